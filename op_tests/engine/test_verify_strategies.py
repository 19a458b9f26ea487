"""Strategies of verification: lossless ones keep the target's law in whole texts, and what they cannot do is told."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams, ops
from eagle_kernels.engine.drafters.protocol import Proposal
from eagle_kernels.engine.requests.sampling_params import Features
from eagle_kernels.engine.step.verification import Verifier, links_of
from eagle_kernels.reference.ops.rejection.verify_tree_rejection import verify_tree_rejection
from op_tests.engine.engines import steps_known
from op_tests.engine.request_law import law_of_token
from op_tests.engine.toys import (
    Markov,
    MarkovBlock,
    MarkovMasked,
    ToyModel,
    draft_of_markov,
    random_head,
    random_llama,
)
from op_tests.engine.view import View
from op_tests.harness.statistics import FALSE_ALARM, assert_follows_law
from op_tests.sampling_law import law

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [4]]

STRATEGIES = ("target_match", "greedy", "rejection", "topp", "typical")
FILTERS = {"temperature": 0.9, "top_k": 4, "top_p": 0.8, "min_p": 0.05}


def engine_of(draft, target, tree, strategy, **others) -> EAGLEInference:
    sizes = dict(zip(("topk", "num_steps", "num_draft_tokens"), tree))
    return EAGLEInference(draft, target, EAGLEConfig(**sizes, verify_strategy=strategy, **others))


class Tied(ToyModel):
    """Two tokens have the same logit everywhere, as in bf16 they may."""

    def forward(self, *arguments, **keywords):
        output = super().forward(*arguments, **keywords)
        logits = torch.zeros_like(output.logits)
        logits[..., 5] = logits[..., 9] = 3.0
        return output._replace(logits=logits)


@pytest.mark.parametrize("strategy", ["rejection", "topp"])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
def test_temperatures_that_are_greedy_are_so_everywhere(strategy, temperature, device):
    target, draft = Tied(vocab_size=20, device=device), ToyModel(vocab_size=20, seed=2, device=device)
    engine = engine_of(draft, target, (1, 2, 3), strategy)
    for filters in ({}, {"top_p": 0.99}):
        text = engine.generate([1, 2], 8, temperature=temperature, seeds=1, **filters).output_ids
        assert text == [5] * 8


def law_of(logits: torch.Tensor, sampling: dict) -> torch.Tensor:
    """Probabilities [V, V] of the next token, by the last one, of logits [V, V]."""
    return torch.tensor([law(row, {"temperature": 1.0} | sampling) for row in logits.cpu().double().tolist()])


def assert_texts_follow_law(
    engine: EAGLEInference, requests: int, sampling: dict, false_alarm: float = FALSE_ALARM
) -> None:
    """Every token of every text, by the two before it: what steps make dependent is near.

    How often each pair comes first is taken as it is, which the test counts as if it could have been otherwise: it is a
    little lenient.
    """
    prompt, size, law = [1, 2], engine.target.vocab_size, law_of(engine.target.table, sampling)
    texts, stats = engine.generate([prompt] * requests, TEXT_LENGTH, seeds=list(range(requests)), **sampling)
    assert stats.mean_accept_length > 1.2
    tokens = torch.tensor([prompt + text for text in texts])
    pairs = (tokens[:, :-2] * size + tokens[:, 1:-1]).flatten()
    share = torch.bincount(pairs, minlength=size * size).double() / pairs.numel()
    law = share[:, None] * law.repeat(size, 1)  # [V * V, V]
    assert_follows_law(pairs * size + tokens[:, 2:].flatten(), law.flatten(), false_alarm)


TOYS = {"vocab_size": 5, "max_length": 80}
TEXT_LENGTH = 60
# the references take a millisecond for a prompt and a quarter for a step
NUM_REQUESTS = 1000 if torch.cuda.is_available() else 60
LOSSLESS = {  # strategy, tree, sampling, where drafts come from
    "chain, cold": ("rejection", (1, 3, 4), {"temperature": 0.6}, {}),
    "chain, warm": ("rejection", (1, 3, 4), {"temperature": 1.5}, {}),
    "tree, cold": ("rejection", (3, 3, 8), {"temperature": 0.6}, {}),
    "tree, warm": ("rejection", (3, 3, 8), {"temperature": 1.5}, {}),
    "tree, filters": ("rejection", (3, 2, 6), FILTERS, {}),
    "chosen drafts, warm": ("rejection", (2, 3, 7), {"temperature": 1.5}, {"method": "ngram"}),
    "target_match, cold": ("target_match", (3, 3, 8), {"temperature": 0.6}, {}),
    "blocks, warm": ("rejection", (3, 3, 8), {"temperature": 1.5}, {"method": "medusa"}),
    "masks, warm": ("rejection", (3, 3, 8), {"temperature": 1.5}, {"method": "draft_model"}),
    "masks, target_match": ("target_match", (3, 3, 8), {"temperature": 0.9}, {"method": "draft_model"}),
    "blocks, target_match": ("target_match", (3, 3, 8), {"temperature": 0.9}, {"method": "medusa"}),
    **{
        f"{name}, {strategy}": (strategy, (3, 3, 8), {"temperature": 0.9}, {"method": method})
        for name, method in (("Hydra", "hydra"), ("DFlash", "dflash"), ("P-EAGLE", "eagle"))
        for strategy in ("rejection", "target_match")
    },
}


@pytest.mark.cross
@pytest.mark.parametrize("case", LOSSLESS)
def test_lossless_strategies_keep_the_law(case, device):
    """Of a sharp draft near the target most blocks are kept whole, and of each token the next one depends; drafts of
    random weights are right by chance.

    A sound engine fails one run in a million of all these cases together.
    """
    strategy, tree, sampling, method = LOSSLESS[case]
    target = Markov(**TOYS, device=device)
    if method.get("method") in ("hydra", "dflash", "eagle"):
        draft = draft_of_markov(method["method"], target)
    else:
        kind = {None: Markov, "medusa": MarkovBlock, "draft_model": MarkovMasked, "ngram": None}[method.get("method")]
        draft = kind and kind(**TOYS, seed=1, near=target, device=device)
    engine = engine_of(draft, target, tree, strategy, max_batch=256, **method)
    assert_texts_follow_law(engine, NUM_REQUESTS, sampling, FALSE_ALARM / len(LOSSLESS))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["topp", "typical"])
def test_lossy_strategies_leave_the_law(strategy, device):
    """And are greedy at temperature 0, as far as their rules go."""
    target, draft = Markov(**TOYS, device=device), Markov(**TOYS, seed=1, device=device)
    engine = engine_of(draft, target, (1, 3, 4), strategy, max_batch=256)
    with pytest.raises(AssertionError, match="chi-square|probability 0"):
        assert_texts_follow_law(engine, NUM_REQUESTS, {"temperature": 1.0})


def laws_of(step, row) -> dict[int, tuple[list[int], list[float], list[int]]]:
    """Returns of each node of a row its drafts from the root down, the law of the token after them, and its children.

    Penalties count the drafts as output; a greedy row's law is that at temperature 1.
    """
    tree, request, count = step.proposal.tree, row.request, len(step.batch)
    tokens, first, sibling = (
        each.view(count, -1)[row.index].tolist()
        for each in (tree.draft_tokens, tree.retrieve_next_token, tree.retrieve_next_sibling)
    )
    logits, paths, laws = step.logits.view(count, len(tokens), -1)[row.index], {0: []}, {}
    while paths.keys() - laws.keys():
        node = min(paths.keys() - laws.keys())
        child, children = first[node], []
        while child >= 0:
            children.append(child)
            paths[child] = [*paths[node], tokens[child]]
            child = sibling[child]
        text = {"prompt": request.prompt, "output_ids": request.output_ids + paths[node], "end_token_ids": ()}
        told = SimpleNamespace(params=request.params, **text)
        laws[node] = paths[node], law_of_token(told, len(told.output_ids), logits[node].float().cpu()), children
    return laws


PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 1.5, "frequency_penalty": 0.5}


@pytest.mark.parametrize("draft", ["itself", "a stranger"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.02, 0.9), (0.9, 0.05), (0.15, 0.4)])
def test_typical_keeps_what_is_likely_enough(epsilon, delta, draft):
    """A draft that is likelier than either limit, after those before it; the deepest such path, the first of equals."""
    target = ToyModel()
    config = {"topk": 3, "num_steps": 2, "num_draft_tokens": 8, "max_batch": 4, "verify_strategy": "typical"}
    config |= {"typical_epsilon": epsilon, "typical_delta": delta}
    engine = EAGLEInference(target if draft == "itself" else ToyModel(seed=1), target, EAGLEConfig(**config))
    asked = ({"temperature": 0.6}, {"temperature": 1.7} | PENALTIES, {}, {"temperature": 1.0} | PENALTIES)
    counts = []

    def watch(step):
        for row in View(engine).scheduler.stepping:
            laws, nodes, deepest = laws_of(step, row), [0], 0
            for node in nodes:  # which grow meanwhile
                path, probs, children = laws[node]
                least = min(epsilon, delta * math.exp(sum(prob * math.log(prob) for prob in probs if prob > 0)))
                least = least if row.request.params.temperature else max(probs) - 1e-6
                nodes += [child for child in children if probs[laws[child][0][-1]] > least]
                deepest = max(deepest, node, key=lambda node: (len(laws[node][0]), -node))
            kept = [token for token in step.committed.tokens[row.index].tolist() if token >= 0][:-1]
            assert kept == laws[deepest][0]
            counts.append(len(kept))

    engine.on_tree = watch
    params = [SamplingParams(max_new_tokens=9, seed=number, **each) for number, each in enumerate(asked)]
    engine.generate([*PROMPTS, [7, 7]], params)
    assert max(counts) > 0


REJECTED = {"drawn": {"topk": 2}, "of fewer tokens": {"topk": 2}, "chosen": {"method": "ngram", "min_ngram_size": 1}}


@pytest.mark.parametrize("drafts", REJECTED)
def test_rejection_keeps_what_its_reference_keeps(drafts):
    """By each request's own law and the draft's own vocabulary; drafts that were chosen have probability 1."""
    target = random_llama(num_layers=6) if drafts == "of fewer tokens" else ToyModel(vocab_size=20)
    draft = (
        None if drafts == "chosen" else ToyModel(vocab_size=20, seed=1) if drafts == "drawn" else random_head(target)
    )
    config = {"num_steps": 3, "num_draft_tokens": 6, "max_batch": 4, "verify_strategy": "rejection", "topk": 3}
    engine = EAGLEInference(draft, target, EAGLEConfig(**config | REJECTED[drafts]))
    asked = (
        {"temperature": 1.0} | PENALTIES, {"temperature": 1.6, "top_k": 9}, {},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    )  # fmt: skip
    counts, has_draft = [], draft is not None

    def watch(step):
        batch, proposal, rows = step.batch, step.proposal, View(engine).scheduler.stepping
        assert (proposal.draft_logits is not None) == has_draft
        probs, temperature = torch.zeros_like(step.logits, dtype=torch.float32), torch.zeros(len(batch))
        for row in rows:
            temperature[row.index] = row.request.params.temperature
            for node, (_, values, _) in laws_of(step, row).items():
                own = torch.tensor(values)
                own = own if temperature[row.index] > 0 else (own == own.max()).float()
                probs[row.index * proposal.tree.retrieve_index.shape[1] + node] = own
        verdict = verify_tree_rejection(
            *links_of(proposal.tree), target_logits=None, target_probs=probs,
            draft_logits=proposal.draft_logits if has_draft else step.logits, positions=proposal.tree.positions,
            seeds=batch.seeds, temperature=temperature,
            draft_temperature=temperature if has_draft else torch.zeros_like(temperature),
            d2t=proposal.draft_to_target if has_draft else None, spec_steps=3,
        )  # fmt: skip
        for row in rows:
            kept = [token for token in step.committed.tokens[row.index].tolist() if token >= 0]
            path = verdict.accept_index[row.index, : len(kept)].tolist()
            assert kept == verdict.predicts[path].tolist() and len(kept) == 1 + verdict.accept_token_num[row.index]
            counts.append(len(kept))

    engine.on_tree = watch
    params = [SamplingParams(max_new_tokens=10, seed=number, **each) for number, each in enumerate(asked)]
    engine.generate([*PROMPTS, [7, 7]], params)
    assert max(counts) > 1


SCORES = [math.log(prob) for prob in (0.4, 0.3, 0.2, 0.06, 0.04)]


def test_candidates_of_topp(monkeypatch):
    """What the filters leave; of too many none, but for top_p = 1 the likeliest."""
    seen = {}

    class Watched(Exception):
        pass

    def watch(*arguments, verify_window, spec_steps):
        seen["ids"], seen["lens"] = arguments[4:6]
        assert (verify_window, spec_steps) == (1, 5)
        raise Watched

    class Rows:
        """A row of one node for each of these."""

        def __init__(self, params):
            columns = list(zip(*params))
            self._numbers = dict(zip(("temperature", "top_k", "top_p", "min_p"), columns))
            self.seeds = torch.zeros(len(params), dtype=torch.int64)

        def numbers(self, name):
            return torch.tensor(self._numbers[name], dtype=torch.int32 if name == "top_k" else torch.float32)

    def candidates(params, features):
        rows, none = Rows(params), torch.full((len(params), 1), -1)
        tree = ops.BuildTreeOutput(None, rows.seeds, none, none, none, rows.seeds)
        logits = torch.tensor(SCORES).repeat(len(params), 1)
        with pytest.raises(Watched):
            config = EAGLEConfig(verify_strategy="topp", max_candidate_len=3, verify_window=1)
            Verifier(config, 5, torch.device("cpu")).verify(rows, Proposal(tree), logits, features)
        assert seen["ids"][0].tolist() == [0, 1, 2]
        return seen["lens"].tolist()

    monkeypatch.setattr(ops, "verify_tree_topp", watch)
    assert candidates([(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)], Features(sampling=True)) == [3, 1]
    # each filter alone and with others, from the least that it may be to none; three tokens are left by each, and four
    params = [*itertools.product(
        (0.0, 1.0, 2.0), (0, 1, 2, 3, 4, 9), (0.1, 0.39, 0.55, 0.65, 0.8, 0.85, 0.93, 0.95, 0.99, 1.0),
        (0.0, 0.12, 0.4, 0.6, 1.0),
    )]  # fmt: skip
    expected = []
    for temperature, top_k, top_p, min_p in params:
        given = {"temperature": temperature, "top_k": top_k or 5, "top_p": top_p, "min_p": min_p}
        kept = sum(prob > 0 for prob in law(SCORES, given)) if temperature > 0 else 1
        expected.append(kept if kept <= 3 else 3 if top_p == 1 else 0)
    assert candidates(params, Features(sampling=True, filters=True)) == expected and {*expected} == {0, 1, 2, 3}


@pytest.mark.cross
@pytest.mark.parametrize("strategy", ["topp", "target_match", "rejection"])
@pytest.mark.parametrize("temperature", [0.02, 0.3, 1.0])
def test_filters_of_a_neighbour_change_nothing(strategy, temperature, device):
    """At low temperatures probabilities round to 0 that no filter has left out."""
    target, draft = (ToyModel(vocab_size=20, seed=seed, device=device) for seed in (1, 0))

    def text(**beside):
        engine = engine_of(draft, target, (2, 3, 7), strategy, max_batch=2)
        own = SamplingParams(max_new_tokens=12, temperature=temperature, seed=3)
        request = engine.submit([1, 2, 3], own)
        engine.submit([4, 5], SamplingParams(max_new_tokens=12, temperature=0.9, seed=99, **beside))
        engine.collect()
        return request.output_ids

    assert text() == text(top_k=3) == text(top_p=0.8) == text(min_p=0.1)


REFUSED = [
    ({"verify_strategy": "best"}, {}, "verify_strategy must be one of"),
    ({"verify_strategy": "topp", "max_candidate_len": 17}, {}, "max_candidate_len must lie in 2..16, got 17"),
    ({"verify_strategy": "topp", "verify_window": -1}, {}, "verify_window must lie in 0..256, got -1"),
    ({"verify_strategy": "typical", "typical_delta": 2.0}, {}, "typical_delta must lie in 0..1, got 2.0"),
    ({"verify_strategy": "topp", "accept_policy": "accept_all"}, {}, "accept_policy must be 'normal' with"),
    ({"verify_strategy": "rejection", "simulated_accept_length": 2.0}, {}, "accept_policy must be 'normal' with"),
    ({"verify_strategy": "greedy"}, {"temperature": 1.0}, "verify_strategy='greedy' serves only temperature=0"),
    ({"verify_strategy": "typical"}, {"temperature": 1.0, "top_k": 3},
     "'typical' does not support top_k, top_p or min_p"),
    ({"verify_strategy": "rejection"}, {"logprobs": True}, "verify_strategy='rejection' does not support logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "params", "message"), REFUSED)
def test_what_a_strategy_cannot_do(options, params, message):
    with pytest.raises(ValueError, match=message):
        toy = ToyModel()
        EAGLEInference(toy, toy, EAGLEConfig(**options)).submit([1, 2], SamplingParams(**params))


@pytest.mark.cross
@pytest.mark.parametrize(
    ("strategy", "num_warmed"), {"target_match": 6, "greedy": 2, "rejection": 3, "topp": 3, "typical": 2}.items()
)
def test_a_bare_warmup_is_for_what_a_strategy_serves(strategy, num_warmed, device):
    """All of the common requests but those that it refuses; by the call as by the engine."""
    toy = ToyModel(device=device)
    for options, overrides in ((strategy, {}), ("target_match", {"verify_strategy": strategy})):
        engine = engine_of(toy, toy, (1, 1, 2), options, max_batch=1)
        engine.warmup(**overrides)
        for runner in View(engine).runners:
            assert len(steps_known(runner)) == num_warmed


def test_without_drafts_all_strategies_are_plain_decoding():
    for strategy in STRATEGIES:
        verifier = Verifier(EAGLEConfig(verify_strategy=strategy), 0, torch.device("cpu"))
        assert verifier._strategy == verifier.match_target
