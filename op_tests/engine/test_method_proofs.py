"""Every method of drafting with every exact strategy and policy, and histories of every length: one token to 128k."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.protocol import KVShape, TargetOutput
from eagle_kernels.engine.requests.sampling_params import SAMPLING_FIELDS
from eagle_kernels.engine.step.verification import Verifier, links_of
from op_tests.engine.methods import PROVEN as METHODS
from op_tests.engine.methods import SIZES, engine_of, plain_of

COUNT = 64 if torch.cuda.is_available() else 4
COIN = random.Random(2)
PROMPTS = [[COIN.randrange(20) for _ in range(COIN.choice((1, 3, 12)))] for _ in range(COUNT)]
EXACT = {
    "target_match, greedy": {},
    "target_match, seeded": {"temperature": 0.8, "top_k": 12},
    "greedy": {"verify_strategy": "greedy"},
    # of greedy requests the law is one text
    "rejection, greedy": {"verify_strategy": "rejection", "num_draft_tokens": None},
}


@pytest.mark.cross
@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("name", METHODS)
def test_text_is_plain_text_by_every_exact_strategy(name, strategy, device):
    if "hybrid" in name and "rejection" in strategy:
        pytest.skip("refused")
    options, seeds = EXACT[strategy], list(range(COUNT))
    sampling = {key: value for key, value in options.items() if key in SAMPLING_FIELDS}
    plain = plain_of(device).generate(PROMPTS, 24, seeds=seeds, **sampling).output_ids
    text, stats = engine_of(name, device).generate(PROMPTS, 24, seeds=seeds, **options)
    assert text == plain
    assert {token < SIZES["walk"] for tokens in plain for token in tokens} == {True, False}
    # kept and dropped are both there, or the case proves little
    assert stats.drafted == 0 if name == "naive" else 0 < stats.accepted < stats.drafted


# who takes one draft takes two; by a coin of its own for each depth half of them would not
RATES = (0.5, 0.5)
# where a policy meets draws it is another walk of the same trees
SEEDED = ("naive", "eagle", "ngram tree", "suffix tree", "hybrid tree")


class Watch:
    """What verification was given and what it kept, of every live row of every step."""

    def __init__(self, monkeypatch):
        self.steps, verify = [], Verifier.verify

        def watched(verifier, batch, proposal, logits, features):
            committed = verify(verifier, batch, proposal, logits, features)
            own = logits.argmax(-1).view_as(proposal.tree.retrieve_index)
            of_rows = (*links_of(proposal.tree), own, committed.tokens, batch.is_live)
            for tokens, _, child, sibling, own, kept, is_live in zip(*(tensor.tolist() for tensor in of_rows)):
                if is_live:
                    kept = [token for token in kept if token >= 0]
                    self.steps.append(SimpleNamespace(tokens=tokens, child=child, sibling=sibling, own=own, kept=kept))
            return committed

        monkeypatch.setattr(Verifier, "verify", watched)


def first_children(step) -> list[int]:
    """The nodes of the path, root first."""
    path = [0]
    while step.child[path[-1]] > 0:
        path.append(step.child[path[-1]])
    return path


def children_tokens(step, node: int) -> list[int]:
    tokens, child = [], step.child[node]
    while child > 0:
        tokens.append(step.tokens[child])
        child = step.sibling[child]
    return tokens


@pytest.mark.cross
@pytest.mark.parametrize("policy", ["accept_all", "reject_all", "simulate"])
@pytest.mark.parametrize(("name", "temperature"), [(name, 0.0) for name in METHODS] + [(name, 0.8) for name in SEEDED])
def test_policies_keep_their_promise(name, policy, temperature, device, monkeypatch):
    """Step by step: the path of first children as deep as the policy says, and the target's token behind it. Where
    that ends a simulated path before a child that carries it, another one stands in its place."""
    watch, options = Watch(monkeypatch), {"accept_policy": policy}
    if policy == "simulate":
        options["simulated_accept_rates"] = RATES + (0.0,) * (METHODS[name].get("num_steps", 5) - len(RATES))
    # so that no step is for nobody
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: 0)
    engine = engine_of(name, device, cuda_graph=False, max_batch=64, **options)
    prompts = [prompt * 2 for prompt in PROMPTS * (4 if policy == "simulate" else 1)]
    drawn = {"seeds": list(range(len(prompts))), "temperature": temperature}
    text, stats = engine.generate(prompts, 16, **drawn)
    assert all(len(tokens) == 16 for tokens in text)
    steps = list(watch.steps)
    assert len(steps) == stats.steps
    for step in steps:
        path, accepted = first_children(step), len(step.kept) - 1
        assert step.kept[:-1] == [step.tokens[node] for node in path[1:][:accepted]]
        if policy != "simulate":
            assert accepted == (len(path) - 1 if policy == "accept_all" else 0)
        carried = children_tokens(step, path[accepted])
        bonus, own = step.kept[-1], step.own[path[accepted]]
        assert bonus not in carried or policy == "reject_all"
        if temperature == 0:
            is_kept = own not in carried or policy == "reject_all"
            assert bonus == (own if is_kept else min(set(range(20)) - set(carried)))
    deep = [len(step.kept) - 1 for step in steps if len(first_children(step)) > 2]
    if name == "naive" or policy == "reject_all":
        plain = plain_of(device, cuda_graph=False)  # the watch still looks, which a graph forbids
        assert text == plain.generate(prompts, 16, **drawn).output_ids
    if name == "naive":
        assert not deep
        return
    assert len(deep) > (40 if policy == "simulate" else 4), len(deep)
    if policy == "simulate":
        for depth, rate in enumerate((*RATES, 0.0), start=1):
            share = sum(accepted >= depth for accepted in deep) / len(deep)
            assert abs(share - rate) <= 4 * (rate * (1 - rate) / len(deep)) ** 0.5, (depth, share, len(deep))


@pytest.mark.cross
@pytest.mark.parametrize("name", ["hybrid chain", "hybrid tree"])
def test_a_simulated_length_is_that_of_the_whole_tree(name, device):
    """Not of the levels that the model drafts: the longest takes every path to its end, the shortest none."""
    num_steps = METHODS[name]["num_steps"]
    for length, policy in ((num_steps + 1, "accept_all"), (1, "reject_all")):
        engines = engine_of(name, device, simulated_accept_length=length), engine_of(name, device, accept_policy=policy)
        (text, stats), (wanted, of_policy) = (engine.generate(PROMPTS, 12) for engine in engines)
        assert stats.accepted == of_policy.accepted
        assert policy == "reject_all" or text == wanted  # which keeps the target's own text


LAST = SIZES["vocab_size"] - 1
SHORT = [[LAST], [0], [LAST] * 3, [3, 3], [5, 1, 2], [1, 2, 1, 2], [0, LAST, 0]]


@pytest.mark.cross
@pytest.mark.parametrize("name", METHODS)
def test_prompts_with_next_to_nothing_to_look_up(name, device):
    """One token, fewer than an n-gram has, and such as have occurred once; side by side, and alone."""
    others = {"max_ngram_size": 4, "min_ngram_size": 3} if "ngram" in name else {}
    engine, plain = engine_of(name, device, prefill_chunk=1, **others), plain_of(device)
    for count in (1, 2, 12):
        want = plain.generate(SHORT, count).output_ids
        assert engine.generate(SHORT, count).output_ids == want
    for prompt, tokens in zip(SHORT[:3], want):
        assert engine.generate(prompt, 12, prefill_chunk=2048).output_ids == tokens


def test_no_step_accepts_more_than_it_drafts(target):
    """Deeper levels than drafts are none that could be accepted: a perfect draft is accepted whole."""
    fewer = {"topk": 1, "num_steps": 8, "num_draft_tokens": 4}
    for policy in ({}, {"simulated_accept_length": 4}, {"simulated_accept_rates": (1, 1, 1, 0, 0, 0, 0, 0)}):
        stats = EAGLEInference(target, target, EAGLEConfig(**fewer, **policy)).generate([1, 2], 13).stats
        assert stats.mean_accept_length == 4 and stats.acceptance_rate == stats.draft_efficiency == 1
    table = ((1, (1, 8, 3)), (8, (1, 8, 4)))
    for policy in ({"simulated_accept_length": 4}, {"simulated_accept_rates": (1, 1, 1, 0, 0, 0, 0, 0)}):
        engine = EAGLEInference(target, target, EAGLEConfig(**fewer, **policy, adaptive=table))
        assert engine.generate([1, 2], 13).stats.mean_accept_length == 3
        assert engine.generate([[1, 2], [3]], 13).stats.mean_accept_length == 4


def test_planted_tokens_are_end_tokens_too(target):
    """Unless the caller says that there are none."""
    config = EAGLEConfig(topk=1, num_steps=3, accept_policy="accept_all", eos_token_ids=tuple(range(61)))
    assert EAGLEInference(target, target, config).generate([1], 9).stats.finish_reasons == ["eos"]
    free = dataclasses.replace(config, eos_token_ids=())
    assert EAGLEInference(target, target, free).generate([1], 9).stats.finish_reasons == ["length"]


class Counter:
    """Counts on and looks at nothing else: a `TargetModel` without attention, which would take its time over 128k."""

    vocab_size, hidden_size, kv_shape, dtype = 64, 16, KVShape(1, 1, 16), torch.float32

    def __init__(self, max_length, device):
        self.max_length, self.device = max_length, torch.device(device)
        self.sure = torch.eye(64, device=device).roll(1, dims=1)

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False):
        return TargetOutput(self.sure[input_ids[:, -1:] if last_only else input_ids], None)


LONG = 1 << 17


@pytest.mark.cross
@pytest.mark.parametrize("name", ["ngram chain", "ngram tree", "suffix chain", "suffix tree", "hybrid chain"])
def test_a_history_of_128k_tokens(name, device):
    """What is to follow stands once, at the very beginning, behind its longest match; shorter ones are everywhere."""
    count, coin = 24, random.Random(3)
    said, told = list(range(40)), list(range(8))
    filler = coin.choices((*range(42, 64), 6, 7), k=LONG - count - len(said) - len(told))
    target = Counter(LONG, device)
    config = EAGLEConfig(**METHODS[name], max_batch=1, page_size=256)
    engine = EAGLEInference(target if config.needs_model else None, target, config)
    for _ in range(2):  # in rows and pages that were used before
        text, stats = engine.generate(said + filler + told, count)
        assert text == list(range(8, 8 + count))
        assert stats.mean_accept_length == 1 + config.num_steps
