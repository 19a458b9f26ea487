"""Engines of small models, prompts, and requests of all kinds."""

import random
from collections import defaultdict

import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.requests.sampling_params import Features
from eagle_kernels.engine.step.stepper import Stepper
from op_tests.engine import heads
from op_tests.engine.view import View

PARAMS = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=14, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=1, temperature=0.7, top_k=10, seed=4),
    SamplingParams(max_new_tokens=11, temperature=0.9, top_p=0.8, min_p=0.05, seed=5, logprobs=True),
    SamplingParams(max_new_tokens=12, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(max_new_tokens=10, temperature=1.2, repetition_penalty=1.1, presence_penalty=0.5, seed=6),
    SamplingParams(max_new_tokens=7, logprobs=True),
]


def make(draft, target, **config):
    """Prompts are read each time, which many tests count or time; `engine_of` shares what they begin with."""
    fixed = {"topk": 3, "num_steps": 3, "max_batch": 3, "share_prefixes": False}
    return EAGLEInference(draft, target, EAGLEConfig(**fixed | config))


def write_with_modules(folder, num_modules, **options):
    """A target and its modules in one folder, as they are published."""
    torch.manual_seed(0)
    sizes = heads.WIDTHS | {"model_type": "mimo", "num_hidden_layers": 2} | options
    target = Decoder(DecoderConfig.from_dict(sizes))
    for parameter in target.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    tensors = target.state_dict() | heads.module_tensors(num_modules)
    return heads.write_modules(folder, tensors, num_modules, **options)


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * index) % 61 for index in range(1 + number * 5 % 23)]


def alone(engine, prompt, params, **options):
    """Decodes one request by itself, without drafts; returns its tokens and log-probabilities."""
    wanted = {name: getattr(params, name) for name in params.__dataclass_fields__ if name != "seed"}
    stream = engine.stream(prompt, seeds=params.seed or 0, speculative=False, **wanted, **options)
    for _ in stream:
        pass
    return stream.requests[0].output_ids, stream.requests[0].logprobs


COMMON = [
    {"logprobs": logprobs, "seed": 3, **drawn}
    for logprobs in (False, True)
    for drawn in ({}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.9, "min_p": 0.2})
]


def mixed_requests(engine, coin: random.Random, count: int) -> None:
    """Runs `count` requests with common parameters, some together; drafting stops and starts again meanwhile."""
    for number in range(count):
        params = SamplingParams(max_new_tokens=coin.randrange(1, 9), **coin.choice(COMMON))
        engine.submit(prompt_of(number), params)
        for _ in range(coin.randrange(4)):
            engine.is_speculating = coin.random() < 0.7
            engine.step()
    engine.is_speculating = True
    engine.collect()


def trees_by_request(engine, monkeypatch) -> dict[int, list]:
    """Will hold the trees of each request's steps: tokens, positions and links. Without graphs, which run no code."""
    run, trees = Stepper._run_target, defaultdict(list)

    def watched(stepper, batch, proposal, prompts):
        tree = proposal.tree
        parts = tree.draft_tokens, tree.positions, tree.retrieve_next_token, tree.retrieve_next_sibling
        lists = [part.view(len(batch), -1).tolist() for part in parts]
        scheduler = View(engine).scheduler
        is_its_own = scheduler is not None and batch.state is scheduler.state
        for row in scheduler.stepping if is_its_own else ():
            trees[row.request.id].append([part[row.index] for part in lists])
        return run(stepper, batch, proposal, prompts)

    monkeypatch.setattr(Stepper, "_run_target", watched)
    # so that no step is for nobody
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: 0)
    return trees


def steps_known(runner) -> set[Features]:
    """Returns the sets of features for which the runner has nothing left to compile or to capture."""
    return {kind.features for kind in [*runner._have_run, *runner._graphs]}


async def all_of(stream):
    return [event.token_id async for event in stream]
