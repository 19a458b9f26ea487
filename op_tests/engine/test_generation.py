"""What a call of the engine tells: statistics, times, and one clear line for models and arguments that do not fit."""

import dataclasses
import gc
import itertools
import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from eagle_kernels.engine.step.runner import Launch, StepRunner
from op_tests.engine import toys
from op_tests.engine.methods import METHODS, MIXED, SIZES
from op_tests.engine.toys import DEVICE, RowWalker, ToyModel, WalkerHead, plain_logits, random_llama
from op_tests.engine.view import View

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [4]]


@pytest.fixture(scope="module")
def stranger():
    """A draft that has nothing to do with the target."""
    return random_llama(hidden_size=16, num_layers=1, seed=1, device=DEVICE)


def test_an_engine_and_its_output_are_shown_in_one_line(target, stranger):
    engine = EAGLEInference(stranger, target, EAGLEConfig(topk=3, num_steps=2))
    tree = "topk=3, num_steps=2, num_verify_tokens=13, temperature=0.0"
    device = f"device={target.device}"
    assert repr(engine) == f"EAGLEInference(target=Decoder, draft=CausalDraft, method=None, {tree}, {device})"
    output = engine.generate(PROMPTS, 6)
    mean = output.stats.mean_accept_length
    shown = f"GenerationOutput(num_requests=3, generated_tokens=18, mean_accept_length={mean:.2f})"
    assert repr(output) == shown and repr(engine.generate(PROMPTS[0], 6)).startswith(
        "GenerationOutput(num_requests=1, "
    )
    alone = EAGLEInference(None, target, EAGLEConfig(method="ngram"))
    assert "draft=None, method='ngram', " in repr(alone)


def test_an_engine_without_a_tokenizer_says_so(target):
    engine = EAGLEInference(None, target, EAGLEConfig(method="ngram"))
    with pytest.raises(ValueError, match="^EAGLEInference: .* needs the tokenizer of the target: it was not given$"):
        engine.tokenizer.encode("a")
    tokenizer = ByteTokenizer()
    assert EAGLEInference(None, target, EAGLEConfig(method="ngram"), tokenizer=tokenizer).tokenizer is tokenizer


def test_draft_beams_see_their_true_ancestors(target, monkeypatch):
    """At every level, a beam's logits are those of a plain pass over the prompt and the beam's own path.

    Beams are re-parented from level to level, so "the slots of my own branch" would be other nodes; the text would
    still be right, and acceptance only a little lower.
    """
    levels = []

    class Recorder(CausalDraft):
        def forward(self, input_ids, hidden, positions, attend, *, from_target):
            output = super().forward(input_ids, hidden, positions, attend, from_target=from_target)
            if not from_target:
                levels.append((input_ids, attend.tree_mask, output.logits))
            return output

    prompt, topk, num_steps = [3, 1, 4, 1, 5], 4, 4
    engine = EAGLEInference(Recorder(target), target, EAGLEConfig(topk=topk, num_steps=num_steps, cuda_graph=False))
    (root, *_), _ = engine.generate(prompt, 2)
    tokens = [token for ids, _, _ in levels for token in ids[0].tolist()]
    paths = set()
    for level, (_, ancestors, logits) in enumerate(levels):
        for beam in range(topk):
            word = int(ancestors[0, beam, 0])
            slots = [slot for slot in range(topk * num_steps) if word >> slot & 1]
            assert [slot // topk for slot in slots] == list(range(level + 1)), "one ancestor on every level"
            paths.add(tuple(slot % topk for slot in slots))
            want = plain_logits(engine, prompt + [root] + [tokens[slot] for slot in slots])[-1]
            torch.testing.assert_close(logits[0, beam], want, rtol=1e-4, atol=1e-4)
    assert any(len(set(path)) > 1 for path in paths), "no beam was re-parented, so the case proves little"


def test_streaming_yields_the_same_tokens(target, stranger):
    engine = EAGLEInference(target, target, EAGLEConfig(topk=1, num_steps=3))
    want, _ = engine.generate(PROMPTS, 9)
    stream = engine.stream(PROMPTS, 9)
    got = [[], [], []]
    drafted = 0
    for event in stream:
        got[event.request].append(event.token_id)
        drafted += event.is_draft
    assert got == want == stream.output().output_ids
    assert drafted == 6 * 3  # two full steps of three drafts for three requests; the ninth token is the bonus


SHAPES = {
    "plain": {"max_spec_batch": 0},
    "chain": {"topk": 1, "num_steps": 3},
    "fewer drafts than levels": {"topk": 1, "num_steps": 5, "num_draft_tokens": 3},
    "tree": {"topk": 3, "num_steps": 3, "num_draft_tokens": 9},
    "shared rows": {"topk": 3, "num_steps": 3, "num_draft_tokens": 12, "mean_draft_tokens": 4},
    "few requests": {"topk": 2, "num_steps": 2, "max_spec_batch": 2},
    "table": {"adaptive": ((1, (2, 3, 8)), (2, (1, 5, 3)), (3, None))},
    "table of shared rows": {"mean_draft_tokens": 3, "adaptive": ((1, (3, 3, 12)), (2, (1, 1, 2)), (4, (2, 4, 6)))},
    "automatic": {"topk": 4, "num_steps": 4, "num_draft_tokens": 16, "adaptive": "auto"},
    "rejection": {"topk": 2, "num_steps": 3, "verify_strategy": "rejection", "temperature": 0.7},
    "topp": {"topk": 2, "num_steps": 3, "verify_strategy": "topp"},
    "typical": {"topk": 2, "num_steps": 3, "verify_strategy": "typical", "mean_draft_tokens": 3},
    "simulated": {"topk": 1, "num_steps": 3, "simulated_accept_rates": (0.9, 0.5, 0.2)},
    "n-grams": METHODS["ngram tree"],
    "suffix": METHODS["suffix tree"],
    "several methods": MIXED,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_are_what_the_steps_did(shape, device, monkeypatch):
    """Of each request and of a call, for trees of every shape: by what a watcher saw in each step, others beside it."""
    monkeypatch.setattr(Launch, "step_ms", 5.0)  # so that an automatic choice tries all trees
    fields = {"max_batch": 4, "prefill_chunk": 4} | SHAPES[shape]
    target, kind = RowWalker(**SIZES, device=device), toys.Walker if shape == "several methods" else WalkerHead
    engine = EAGLEInference(kind(**SIZES, seed=1, device=device), target, EAGLEConfig(**fields))
    trees = [tree for _, tree in engine.config.trees if tree is not None and engine.config.may_speculate]
    nodes = {tree.num_verify_tokens: min(tree.num_steps, tree.num_verify_tokens - 1) for tree in trees} | {1: 0}
    prompts, steps, scheduled = [PROMPTS[1], *PROMPTS, [6, 7]], defaultdict(list), []

    def watch(step):
        rows, counts = View(engine).scheduler.stepping, step.proposal.num_nodes
        size = step.proposal.tree.retrieve_index.shape[1]
        live = (
            step.batch.is_live.nonzero().flatten().tolist()
        )  # also those of which the host will learn that they ended
        assert {row.index for row in rows} <= set(live)
        counts = [size] * len(step.batch) if counts is None else counts.tolist()
        verified = sum(counts[row] - 1 for row in live) / len(live)  # of a request in the mean
        assert shape == "automatic" or verified == min(fields.get("mean_draft_tokens", size), size) - 1
        for row in rows:
            tokens = [token for token in step.committed.tokens[row.index].tolist() if token >= 0]
            steps[row.request].append((nodes[size], verified, tokens))
        scheduled.append({row.request for row in rows})

    engine.on_tree = watch
    asked = [SamplingParams(max_new_tokens=count, seed=count) for count in (5, 11, 1, 16, 40)]
    if shape == "several methods":
        asked = [dataclasses.replace(each, drafter=name) for each, name in zip(asked, MIXED["method"])]
    for is_alone, lag in ((True, 1), (False, 0)):
        other = engine.submit([9], SamplingParams(max_new_tokens=1 if is_alone else 25))
        View(engine).scheduler.lag = lag
        engine.step()
        stream = engine.stream(prompts, asked)
        for _ in stream:
            pass
        stats, own = stream.output().stats, stream.requests
        for request, params in zip(own, asked):
            assert len(steps[request]) - len(request.accepted) in range(lag + 1)  # a step too many is of no account
            steps[request] = steps[request][: len(request.accepted)]
            levels, drafted, tokens = zip(*steps[request]) if steps[request] else ((), (), ())
            assert request.accepted == [len(each) - 1 for each in tokens]
            assert (request.levels, request.drafted) == (sum(levels), sum(drafted))
            assert request.output_ids[1:] == [*itertools.chain(*tokens)][: params.max_new_tokens - 1]
        seen = [step for request in own for step in steps[request]]
        counts = [len(tokens) - 1 for *_, tokens in seen]
        accepted, levels, drafted = sum(counts), sum(each[0] for each in seen), sum(each[1] for each in seen)
        ours = [number for number, requests in enumerate(scheduled) if not requests.isdisjoint(own)]
        # beside others, the first one may come before the last part of a prompt
        assert stats.steps == len(seen) and ours[-1] - ours[0] + 1 - stats.batch_steps in range(2 - is_alone)
        assert (stats.accepted, stats.levels, stats.drafted) == (accepted, levels, drafted)
        deepest = max((tree.num_steps for tree in trees), default=0)
        assert (stats.num_steps, stats.num_draft_tokens) == (deepest, max(nodes))
        assert stats.accepted_per_depth == [sum(count > depth for count in counts) for depth in range(deepest)]
        assert stats.mean_accept_length == 1 + accepted / len(seen)
        assert stats.acceptance_rate == (accepted / levels if levels else 0)
        assert stats.draft_efficiency == (accepted / drafted if drafted else 0)
        assert (stats.num_requests, stats.generated_tokens) == (5, sum(params.max_new_tokens for params in asked))
        assert stats.prompt_tokens == sum(map(len, prompts)) and stats.seeds == [5, 11, 1, 16, 40]
        engine.collect()
        assert other.is_finished and (accepted > 0) == (shape != "plain")


def test_fresh_seeds_are_returned_and_repeat_the_text(target, stranger):
    engine = EAGLEInference(stranger, target, EAGLEConfig(topk=2, num_steps=2, temperature=1.0))
    text, stats = engine.generate(PROMPTS, 10)
    other, again = engine.generate(PROMPTS, 10)
    assert stats.seeds != again.seeds and text != other
    assert engine.generate(PROMPTS, 10, seeds=stats.seeds)[0] == text


def test_models_that_do_not_fit_are_named(target):
    other = random_llama(vocab_size=50, device=target.device)
    with pytest.raises(ValueError, match="the draft must have the target's 61 tokens, got 50"):
        EAGLEInference(other, target)
    small = random_llama(vocab_size=8)
    with pytest.raises(ValueError, match="topk must be smaller than the draft vocabulary of 8 tokens, got 8"):
        EAGLEInference(small, small, EAGLEConfig(topk=8, num_steps=2))
    engine = EAGLEInference(small, small, EAGLEConfig(topk=4))
    with pytest.raises(ValueError, match="topk must be smaller than the draft vocabulary of 8 tokens, got 9"):
        engine.generate([1], 2, topk=9)


@pytest.mark.parametrize("num_modules", [None, 1, 2])
def test_trees_of_a_table_are_refused_as_one_s_own(num_modules):
    """By what the draft can make, at each place of a table, of an engine or of a call."""
    sizes = {"vocab_size": 8, "seed": 1}
    draft = ToyModel(**sizes) if num_modules is None else toys.WalkerModules(num_modules, walk=6, **sizes)
    good, target, refused = (1, 1, 2), ToyModel(vocab_size=8), set()
    engine = EAGLEInference(draft, target, EAGLEConfig.chain(1))
    for tree in ((7, 2, 9), (8, 2, 9), (9, 2, 9), (2, 2, 4), (1, 2, 3), (1, 3, 4)):
        tables = ((1, tree), (2, good), (3, None)), ((1, None), (2, tree), (3, good)), ((1, good), (3, good), (9, tree))
        asked, told = dict(zip(("topk", "num_steps", "num_draft_tokens"), tree)), set()
        for options in (asked, *({"adaptive": table} for table in tables)):
            config = EAGLEConfig(**{"topk": 1, "num_steps": 1} | options)
            told.add(error_of(EAGLEInference, draft, target, config))
            told.add(error_of(engine.generate, [1], 2, **options))
        assert len(told) == 1, (tree, told)
        refused |= {tree} if told != {None} else set()
    assert len(refused) == (5 if num_modules == 2 else 2), refused


def error_of(call, *arguments, **options) -> str | None:
    """What is wrong with a call; None if nothing is."""
    try:
        call(*arguments, **options)
    except ValueError as error:
        return str(error)
    return None


def test_a_plain_step_is_timed_once_and_keeps_nothing(target, stranger, monkeypatch):
    """When its speedup is first read, if no others run then or ran beside the call; no key or row changes."""
    engine, timed, changed = EAGLEInference(stranger, target, EAGLEConfig(topk=2, num_steps=2)), [], []
    time_ms = StepRunner.time_ms

    def noting(runner, num_rows, *conditions):
        state = runner._state
        pools = [(pool.k_cache, pool.v_cache) for pool in (state.target_pool, state.draft_pool)]
        held = [*state.tensors(), *itertools.chain(*pools)]
        before = [tensor.clone() for tensor in held]
        timed.append(num_rows)
        spent_ms = time_ms(runner, num_rows, *conditions)
        changed.extend(not torch.equal(*each) for each in zip(held, before))
        return spent_ms

    monkeypatch.setattr(StepRunner, "time_ms", noting)
    (texts, stats), (again, latest) = [engine.generate(PROMPTS, 8) for _ in range(2)]
    assert stats["steps"] == stats.steps and stats.plain_step_ms is None and not timed
    assert stats.speedup == stats.speedup > 0 and latest.speedup > 0 < latest.plain_step_ms == stats.plain_step_ms
    assert texts == again and timed == [3] and not any(changed) and len(changed) > 10
    assert engine.generate(PROMPTS, 8)[0] == texts
    assert engine.generate(PROMPTS[0], 1).stats.speedup is None and timed == [3]  # no step
    request = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=30))
    engine.step()
    assert engine.generate(PROMPTS[0], 4).stats.speedup is None and timed == [3] and not request.is_finished
    engine.collect()
    assert engine.generate(PROMPTS[0], 4).stats.speedup > 0 and timed == [3, 1]
    assert engine.generate(PROMPTS[1:], 4, speculative=False).stats.plain_step_ms and timed == [3, 1]


@pytest.mark.parametrize(("page_size", "max_batch"), [(1, 3), (4, 1), (4, 2)])
def test_a_plain_step_is_timed_with_the_rows_that_step(page_size, max_batch, monkeypatch):
    """However many there are and whichever lengths they have; no key changes, whoever the pages belong to by then."""
    timed, changed, time_ms = [], [], StepRunner.time_ms
    config = EAGLEConfig(topk=1, num_steps=1, page_size=page_size, max_batch=max_batch, cuda_graph=False)
    engine = EAGLEInference(WalkerHead(seed=1, device=DEVICE), RowWalker(device=DEVICE), config)

    def noting(runner, num_rows, features, lengths, block_table):
        state = runner._state
        pools = [*itertools.chain(*((pool.k_cache, pool.v_cache) for pool in (state.target_pool, state.draft_pool)))]
        for pool in pools:  # as if others had had the pages since
            pool.uniform_()
        before = [tensor.clone() for tensor in (*pools, *state.tensors())]
        timed.append((num_rows, lengths[:num_rows].tolist()))
        spent_ms = time_ms(runner, num_rows, features, lengths, block_table)
        changed.extend(not torch.equal(*each) for each in zip((*pools, *state.tensors()), before))
        return spent_ms

    monkeypatch.setattr(StepRunner, "time_ms", noting)
    sizes = 16, 3, 4, 15
    for count, is_cut in itertools.product(range(1, max_batch + 2), (True, False)):
        prompts = [[*range(place, place + size)] for place, size in enumerate(sizes[:count])]
        params = [SamplingParams(max_new_tokens=5 if place or not is_cut else 1) for place in range(count)]
        engine.session.plain_steps.known_ms.clear()
        speedup, together = engine.generate(prompts, params).stats.speedup, min(count, max_batch)
        if not is_cut:
            assert timed == [(together, [*sizes[:together]])] and speedup and not any(changed)
        elif count <= max_batch:  # the first one has ended with its prompt, and the others are too few
            assert speedup is None and not timed
        timed.clear()


def test_a_plain_step_that_fails_costs_a_number(target, stranger, monkeypatch, caplog):
    """The texts are there, and it is not tried again; a stream times none, since somebody may time the stream."""
    engine, tried = EAGLEInference(stranger, target, EAGLEConfig(topk=2, num_steps=2)), []

    def failing(*_):
        tried.append(1)
        raise RuntimeError("no plain step here\nat all")

    monkeypatch.setattr(StepRunner, "time_ms", failing)
    stream = engine.stream(PROMPTS, 8)
    texts = [[event.token_id for event in stream if event.request == 0]]
    assert not tried and stream.output().stats.speedup is None
    for _ in range(2):
        tokens, stats = engine.generate(PROMPTS, 8)
        assert tokens[0] == texts[0] and stats.speedup is None and stats.speedup is None
    assert len(tried) == 1
    assert [record.args for record in caplog.records] == [("no plain step here",)]


def test_a_plain_step_waits_until_the_engine_is_free(target, stranger, monkeypatch):
    """Where it is not, or is no more, nothing is known; statistics hold no engine, and go wherever they are sent."""
    engine, timed, told = EAGLEInference(stranger, target, EAGLEConfig(topk=2, num_steps=2, cuda_graph=False)), [], []
    time_ms = StepRunner.time_ms
    monkeypatch.setattr(StepRunner, "time_ms", lambda *all_of_it: timed.append(1) or time_ms(*all_of_it))
    stats = engine.generate(PROMPTS, 8).stats
    sent = pickle.loads(pickle.dumps(stats))
    assert (sent, dataclasses.replace(stats), dataclasses.asdict(sent)) == (stats, stats, dataclasses.asdict(stats))
    assert sent.speedup is None and not timed
    engine.on_tree = lambda _: told.append(stats.speedup)
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=9))
    engine.step()
    told.append(stats.speedup)
    engine.collect()
    with ThreadPoolExecutor(1) as pool, engine.lock:
        told.append(pool.submit(lambda: stats.speedup).result(60))
    assert told == [None] * len(told) and len(told) > 2 and not timed
    del engine
    gc.collect()
    assert stats.speedup is None and not timed


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("speculative", [False, True])
def test_times_of_a_call_are_those_of_its_steps(target, num_requests, speculative, monkeypatch):
    """Whichever of them compile something. A plain step's time is kept if it is known, by the steps that do not."""
    now, kept = [0.0], 9.0 if speculative else None
    engine = EAGLEInference(target, target, EAGLEConfig.chain(1))
    engine.session.plain_steps.known_ms |= {num_requests: kept} if speculative else {}
    run = StepRunner.run

    def spend(runner, *arguments):
        now[0] += next(left) / 1e3
        return run(runner, *arguments)

    monkeypatch.setattr("eagle_kernels.engine.serve.stream.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(StepRunner, "run", spend)
    monkeypatch.setattr(StepRunner, "has_run", lambda *_: not next(cold))
    for flags in itertools.product((True, False), repeat=3):
        step_ms = [1.0, 2.0, 5.0]
        left, cold = iter(step_ms), iter(flags)
        stats = engine.generate([[1, 2]] * num_requests, 7 if speculative else 4, speculative=speculative).stats
        warm_ms = [spent for spent, is_cold in zip(step_ms, flags) if not is_cold]
        kept = fmean(warm_ms) if warm_ms and not speculative else kept
        assert (stats.batch_steps, stats.cold_steps) == (3, sum(flags))
        assert 1e3 * stats.decode_time_s == pytest.approx(8) and stats.step_ms == pytest.approx(8 / 3)
        assert 1e3 * stats.cold_time_s == pytest.approx(8 - sum(warm_ms))
        assert stats.warm_step_ms == pytest.approx(fmean(warm_ms or step_ms))
        assert stats.tokens_per_second == pytest.approx(num_requests * (6 if speculative else 3) / 8e-3)
        known_ms = engine.session.plain_steps.known_ms.get(num_requests)
        assert stats.plain_step_ms == known_ms == (kept and pytest.approx(kept))
        accepted = 2 if speculative else 1
        assert stats.speedup == (kept and pytest.approx(accepted * kept / stats.warm_step_ms))
    assert set(engine.session.plain_steps.known_ms) == {num_requests}


def test_arguments_of_another_kind_are_named(target):
    """By name, with the rule and what it was; of models with the way to one."""
    ways = "; EAGLEInference.from_pretrained loads folders"
    a_target = "target_model must be a TargetModel or a model of transformers, which has "
    a_draft = "draft_model must be a DraftModel, a TargetModel or a model of transformers, which has "
    foreign = torch.nn.Linear(2, 2)
    for models, message in (
        ((target, foreign), f"{a_target}max_length, got Linear{ways}"),
        ((foreign, target), f"{a_draft}max_length, got Linear{ways}"),
        (("folder", "other"), f"{a_target}forward, got 'other'{ways}"),
        ((target, target, 3), "config must be None, an EAGLEConfig or a dict, got 3"),
        ((target, target, EAGLEConfig(eos_token_ids=(3, 61))), "eos_token_ids must lie in 0..60, got 61"),
    ):
        with pytest.raises(ValueError, match="(EAGLEInference|EAGLEConfig): " + message):
            EAGLEInference(*models)
    with pytest.raises(ValueError, match="config must be None, an EAGLEConfig or a dict, got 3"):
        EAGLEInference.from_pretrained("folder", "other", 3)
    with pytest.raises(ValueError, match="speculative_config: method must be given, got None"):
        EAGLEInference.from_pretrained("folder", "other", {"num_speculative_tokens": 3})
    engine = EAGLEInference(target, target)
    for call, message in (
        (lambda: engine.submit([1], 1), "params must be SamplingParams or a dict of its fields, got 1"),
        (lambda: engine.submit([1], SamplingParams(stop_token_ids=(99,))), "stop_token_ids must lie in 0..60, got 99"),
        (lambda: engine.abort(None), "request must be what submit returned, got None"),
        (lambda: engine.workspace_bytes(3), "config must be None, an EAGLEConfig or a dict, got 3"),
        (lambda: setattr(engine, "is_speculating", "no"), "is_speculating must be True or False, got 'no'"),
    ):
        with pytest.raises(ValueError, match="(EAGLEInference|SamplingParams|submit|abort): " + message):
            call()
    assert engine.is_speculating and not engine.has_work


def test_models_must_share_device_and_dtype():
    toy, other = ToyModel(), ToyModel()
    other.dtype = torch.float16
    with pytest.raises(ValueError, match="the draft's dtype must be the target's, torch.float32, got torch.float16"):
        EAGLEInference(other, toy)
    other = ToyModel()
    other.device = torch.device("meta")
    with pytest.raises(ValueError, match="the draft's device must be the target's, cpu, got meta"):
        EAGLEInference(other, toy)
    with pytest.raises(ValueError, match="device must be where the models are, on cpu, got 'cuda'"):
        EAGLEInference(toy, toy, device="cuda")
    with pytest.raises(ValueError, match="device must be where the models are, on cpu, got 'gpu'"):
        EAGLEInference(toy, toy, device="gpu")
    del other.device, other.dtype  # a draft need not tell
    for device in ("cpu", "auto", None):
        assert EAGLEInference(other, toy, device=device).device == toy.device


@pytest.mark.parametrize("precision, warns", [("highest", False), ("high", True), (RuntimeError, True)])
def test_rounded_matmuls_are_warned_of(monkeypatch, recwarn, precision, warns):
    """On a GPU, in fp32; torch answers with an error where its two settings disagree."""

    def get_precision():
        if precision is RuntimeError:
            raise RuntimeError("mixed settings")
        return precision

    monkeypatch.setattr(torch, "get_float32_matmul_precision", get_precision)
    toy = ToyModel()
    EAGLEInference(toy, toy)
    assert not recwarn, "not on the CPU"
    toy.device = torch.device("cuda")
    EAGLEInference(toy, toy)
    assert [str(warning.message)[:50] for warning in recwarn] == warns * [
        "EAGLEInference: torch rounds the inputs of fp32 ma"
    ]
