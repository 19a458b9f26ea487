"""Several drafters share the nodes of a tree: texts are plain decoding's, nodes go to what is accepted, and what each
drafter says of its drafts is compared with what came."""

import random
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams, ops
from eagle_kernels.engine.drafters.ngram import NgramDrafter
from eagle_kernels.engine.drafters.protocol import Drafter, Proposal, tree_of
from eagle_kernels.engine.drafters.shared_drafter import FORGETTING, PRIOR, Record
from eagle_kernels.engine.drafters.suffix import SuffixCache, SuffixDrafter, SuffixFeed
from eagle_kernels.engine.requests.request import Request
from eagle_kernels.engine.step import packed_rows
from op_tests.engine.engines import PARAMS, make, prompt_of
from op_tests.engine.methods import SIZES
from op_tests.engine.toys import (
    DEVICE,
    MaskedDraft,
    RowWalker,
    ToyModel,
    Walker,
    WalkerBlock,
    WalkerHead,
    random_llama,
)  # fmt: skip
from op_tests.engine.view import View
from op_tests.ops.draft.cases import random_tries

COIN = random.Random(2)
PROMPTS = [[COIN.randrange(20) for _ in range(COIN.choice((1, 3, 12)))] for _ in range(4)]
SHARED = {
    "model": (Walker, ("draft_model", "ngram", "suffix")),
    "head": (WalkerHead, ("suffix", "eagle")),
    "heads in one pass": (WalkerBlock, ("medusa", "ngram")),
    "masks": (MaskedDraft, ("draft_model", "suffix")),
    "no model": (None, ("ngram", "suffix")),
}
TREES = {"chains": {"topk": 1, "num_steps": 4}, "trees": {"topk": 3, "num_steps": 4, "num_draft_tokens": 10}}


def engine_of(name, device=DEVICE, target_kind=Walker, **options):
    kind, methods = SHARED[name]
    target = target_kind(**SIZES, device=device)
    sizes = {**SIZES, "seed": 1, "device": device} | ({"of": target} if kind is WalkerBlock else {})
    fixed = {"method": methods, "share_nodes": len(methods) > 1, "min_ngram_size": 1}
    return EAGLEInference(None if kind is None else kind(**sizes), target, EAGLEConfig(**fixed | options))


@pytest.mark.cross
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", SHARED)
def test_texts_are_those_of_plain_decoding(name, tree, lag, device):
    """Greedy and seeded, in every layout of masks that several methods may have."""
    engine, seeds = engine_of(name, device, **TREES[tree]), list(range(len(PROMPTS)))
    for options in ({}, {"temperature": 0.8, "top_k": 12}, {"tree_mask_mode": "qlen_only"},
                    {"verify_strategy": "greedy", "tree_mask_mode": "qlen_only_bitpacking"}):  # fmt: skip
        text, stats = engine.generate(PROMPTS, 24, seeds=seeds, **options)
        assert text == engine.generate(PROMPTS, 24, seeds=seeds, speculative=False, **options).output_ids
        assert 0 < stats.accepted < stats.drafted


@pytest.mark.cross
@pytest.mark.parametrize("mean", [None, 1, 2, 5, 12])
def test_texts_with_a_budget_of_the_batch(target, lag, mean):
    """Requests of all kinds, side by side."""
    draft = random_llama(hidden_size=16, num_layers=1, seed=1, device=DEVICE)
    options = {"method": ("draft_model", "ngram", "suffix"), "share_nodes": True, "num_steps": 4}
    engine = make(draft, target, max_batch=7, mean_draft_tokens=mean, num_draft_tokens=12, min_ngram_size=1, **options)
    plain = make(draft, target, max_batch=7)
    plain.is_speculating = False
    requests = []
    for each in (engine, plain):
        requests.append([each.submit(prompt_of(number), PARAMS[number]) for number in range(7)])
        each.collect()
    for got, want in zip(*requests):
        assert got.output_ids == want.output_ids
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", SHARED)
def test_they_bring_more_together_than_the_best_of_them_alone(name, device):
    """Which has as many nodes for its own."""
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7], [4]]
    for tree in TREES.values():
        together = engine_of(name, device, **tree).generate(prompts, 40).stats
        for method in SHARED[name][1]:
            engine = engine_of(name, device, **tree, method=method, share_nodes=False)
            alone = engine.generate(prompts, 40).stats
            assert together.mean_accept_length > alone.mean_accept_length, method


def test_a_choice_of_trees(device):
    """Whichever is taken: chains of one and of three nodes, and trees; targets without `last_rows` get smaller ones."""
    engine = engine_of("model", device, topk=3, num_steps=4, num_draft_tokens=10, adaptive="auto")
    assert engine.generate(PROMPTS, 16)[0] == engine.generate(PROMPTS, 16, speculative=False)[0]
    engine.warmup(most_requests=1)
    assert View(engine).nodes == [1, 2, 4, 10]
    free = EAGLEConfig(method=("eagle", "suffix"), share_nodes=True)
    assert free.on(torch.device("cuda")).adaptive == "auto" and free.on(torch.device("cpu")).adaptive is None
    means = [tree.mean_draft_tokens for _, tree in free.on(torch.device("cuda")).trees]
    assert means == [None, None, 8, 16, None]


def test_who_is_sure_gets_the_rows_of_the_batch(device, monkeypatch):
    """One text repeats itself; in the other one only the last token has been there before."""
    sizes = {"topk": 2, "num_steps": 4, "num_draft_tokens": 9, "mean_draft_tokens": 4, "cuda_graph": False}
    config = EAGLEConfig(method=("ngram", "suffix"), share_nodes=True, min_ngram_size=1, **sizes)
    engine, counts, prune = EAGLEInference(None, RowWalker(**SIZES, device=device), config), [], ops.prune_trees

    def noting(*arguments, **values):
        pruned = prune(*arguments, **values)
        counts.append(pruned.num_nodes.tolist())
        return pruned

    monkeypatch.setattr(packed_rows.ops, "prune_trees", noting)
    for prompt in ([*range(8)] * 3 + [0, 1], [3, 9, 12, 2]):
        engine.submit(prompt, SamplingParams(max_new_tokens=6))
    engine.collect()
    both = [count for count in counts if len(count) == 2]
    assert both[0][0] > both[0][1] >= 1 and all(sum(count) <= 8 for count in both)


@pytest.mark.parametrize("methods", ["shared", "alone"])
@pytest.mark.parametrize("name", ["model", "heads in one pass", "masks"])
def test_no_request_goes_without_drafts_for_ever(name, methods, device):
    """Of as many drafts in all as there are requests, which one tree could take, each request gets some whenever it is
    surer than others, whatever its place in the batch; and all have their root in every step."""
    alone = {} if methods == "shared" else {"method": SHARED[name][1][0], "share_nodes": False}
    options = {"mean_draft_tokens": 2, "cuda_graph": False} | TREES["trees"] | alone
    engine, drafts = engine_of(name, device, RowWalker, **options), []

    def watch(step):
        counts, places = step.proposal.num_nodes.tolist(), sorted(row.index for row in View(engine).scheduler.stepping)
        kept = [counts[place] for place in places]
        assert min(kept) >= 1 and sum(kept) <= 2 * len(kept)
        if len(kept) == 4:
            drafts.append([count - 1 for count in kept])

    engine.on_tree = watch
    for token in (3, 9, 14, 18):
        engine.submit([token], SamplingParams(max_new_tokens=90))
    for _ in range(24):
        engine.step()
    for half in (drafts[:10], drafts[10:]):
        assert len(half) >= 10 and all(sum(counts) > 0 for counts in zip(*half)), drafts


# what drafters say of their drafts


class Given(Drafter):
    """Proposes a tree that was given, with the probabilities of its paths."""

    def __init__(self, config, tokens, parents, paths):
        super().__init__(config)
        self._given = tokens, parents, paths

    def propose(self, batch):
        tokens, parents, paths = self._given
        return Proposal(tree_of(batch, tokens, parents, self._config), path_probs=lambda: paths)


def batch_of(size, device):
    zeros = torch.zeros(size, dtype=torch.int64, device=device)
    return SimpleNamespace(roots=zeros, lengths=zeros + 3, rows=slice(0, size))


@pytest.mark.parametrize("num_nodes", [2, 9, 65])
def test_drafts_of_a_tree(num_nodes, device):
    """Are its nodes, their parents, and each path's probability over that of the path above."""
    torch.manual_seed(0)
    tokens, parents = random_tries(3, num_nodes - 1, 0.4, 40)
    tokens += torch.arange(num_nodes - 1) * 40  # siblings differ
    own = torch.rand(3, num_nodes - 1) * 0.9 + 0.1
    paths = torch.ones(3, num_nodes)
    for node in range(1, num_nodes):
        above = parents[:, node - 1 : node]
        paths[:, node] = own[:, node - 1] * paths.gather(1, above)[:, 0]
    parents[1, -1] = tokens[1, -1] = -1  # padding
    given = (each.to(device) for each in (tokens, parents, paths[:, 1:]))
    config = EAGLEConfig(topk=4, num_steps=5, num_draft_tokens=num_nodes)
    drafts = Given(config, *given).drafts(batch_of(3, device))
    is_draft = parents >= 0
    assert torch.equal(drafts.parents.cpu(), parents)
    assert torch.equal(drafts.tokens.cpu()[is_draft], tokens[is_draft])
    torch.testing.assert_close(drafts.probs.cpu()[is_draft], own[is_draft])


def test_drafts_of_matches_are_as_sure_as_the_match_is_long(device):
    """After 1 2 came 3 and, before, 4: of equal matches the first is tried first, and the next where that fails."""
    text = torch.tensor([[9, 1, 2, 4, 9, 1, 2, 3, 7, 1, 2], [5] * 11, list(range(11))], device=device)
    batch = SimpleNamespace(
        rows=slice(0, 3), lengths=torch.tensor([10, 10, 10], device=device),
        is_live=torch.ones(3, dtype=torch.int64, device=device), state=SimpleNamespace(history=text),
    )  # fmt: skip
    config = EAGLEConfig(method="ngram", topk=2, num_steps=2, num_draft_tokens=5, max_ngram_size=4)
    drafts = NgramDrafter(config).drafts(batch)
    assert drafts.tokens[0].tolist() == [3, 7, 4, 9] and drafts.parents[0].tolist() == [0, 1, 0, 3]
    assert drafts.probs[0].tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 9, 2 / 3])
    assert drafts.probs[1, :2].tolist() == pytest.approx([4 / 5] * 2)
    assert (drafts.tokens[2] == -1).all() and not (drafts.probs[2] > 0).any()


@pytest.mark.parametrize("factor", [0.5, 4.0])
@pytest.mark.parametrize("since", [[], [4], [4, 5], [4, 6, 1], [9], [4, 9], [4, 5, 9]], ids=str)
def test_drafts_of_an_offer_are_as_sure_as_the_host_counted(since, factor, device):
    """Those that are left of it after the tokens since, as `propose` has them and `path_probs` scores them."""
    sizes = {"topk": 3, "num_steps": 3, "num_draft_tokens": 10, "suffix_decoding_max_spec_factor": factor}
    config = EAGLEConfig(method=("ngram", "suffix"), share_nodes=True, **sizes)
    text = [3, 4, 5, 1, 3, 4, 5, 2, 3, 4, 6, 1, 3, 4, 5, 1, 7, 3]
    length = torch.tensor([len(text) - 1], device=device)
    feed = SuffixFeed([config], SuffixCache(16, 0), SimpleNamespace(num_rows=1, lengths=length), lag=1)
    request = Request(0, text, SamplingParams(), 0, frozenset())
    feed.start(request)
    feed.send([(0, request)])
    history = torch.tensor([[*text, *since, *(30 * [-1])]], dtype=torch.int32, device=device)
    batch = SimpleNamespace(
        rows=slice(0, 1), state=SimpleNamespace(history=history), lengths=length + len(since),
        roots=history[:, len(text) - 1 + len(since)].long(),
    )  # fmt: skip
    drafter = SuffixDrafter(EAGLEConfig(method="suffix", **sizes), feed)
    drafts, proposal = drafter.drafts(batch), drafter.propose(batch)
    tokens, parents, probs = (each[0].tolist() for each in drafts)
    found = proposal.tree.draft_tokens[1:].tolist()
    count = sum(parent >= 0 for parent in parents)
    # the match at the root is one token long
    assert (count > 0) == (9 not in since and since != [4, 6, 1] and factor * (1 + len(since)) >= 1)
    assert tokens[:count] == found[:count] and tokens[count:] == [-1] * (9 - count)
    paths = [1.0]
    for parent, prob in zip(parents[:count], probs):
        paths.append(paths[parent] * prob)
    assert paths[1:] == pytest.approx(proposal.path_probs()[0, :count].tolist(), rel=1e-6)
    assert not any(probs[count:])


# what became of them


def brute_force(shared, tokens) -> tuple[list, list]:
    """Of each drafter and depth: how many drafts came, and the sum of what it said of those whose place is known."""
    num_drafters = shared.probs.shape[1]
    accepted, promised = ([[0.0] * 3 for _ in range(num_drafters)] for _ in range(2))
    for row, came in enumerate(tokens.tolist()):
        paths = [[]]
        for token, parent in zip(shared.tokens[row].tolist(), shared.parents[row].tolist()):
            paths.append([*paths[parent], token] if parent >= 0 else None)
        for node, path in enumerate(paths[1:]):
            known = [token for token in came if token >= 0]
            if path is None or len(path) > len(known) or path[:-1] != known[: len(path) - 1]:
                continue
            for drafter, prob in enumerate(shared.probs[row, :, node].tolist()):
                promised[drafter][len(path) - 1] += prob
                accepted[drafter][len(path) - 1] += prob > 0 and path[-1] == known[len(path) - 1]
    return accepted, promised


@pytest.mark.parametrize("seed", range(4))
def test_what_came_is_counted_by_drafter_and_depth(seed, device):
    """Of every draft whose place in the text is known, whether it was verified or not; dead rows tell nothing."""
    torch.manual_seed(seed)
    tries = [each.view(8, 3, 6) for each in random_tries(24, 6, 0.5, 2)]
    depths = torch.zeros(8, 3, 7, dtype=torch.int64)
    for node in range(6):
        depths[..., node + 1] = depths.gather(2, tries[1][..., node, None])[..., 0] + 1
    tries[1][depths[..., 1:] > 3] = -1  # none is deeper than a step
    values = (*(each.to(device) for each in tries), torch.rand(8, 3, 6, device=device))
    shared = ops.share_drafts(*values, num_speculative_tokens=9)
    tokens = torch.randint(2, (8, 4))
    tokens[torch.arange(4) >= torch.randint(5, (8, 1))] = -1
    tree = ops.tree_from_parents(torch.zeros(8, dtype=torch.int64, device=device), shared.tokens, shared.parents,
                                 torch.zeros(8, dtype=torch.int64, device=device), num_verify_tokens=10)  # fmt: skip
    record = Record(3, 3, torch.device(device))
    record.observe(shared, tree.positions.view(8, 10)[:, 1:], SimpleNamespace(tokens=tokens.to(device)))
    for total, new in zip((record.accepted, record.promised), brute_force(shared, tokens)):
        torch.testing.assert_close(total.cpu(), torch.tensor(new) + PRIOR)
    assert (record.accepted > PRIOR).any() and (record.promised > PRIOR).any()


def chain_of(*drafters, came, device):
    """Drafts of one row: each drafter's own first token, and its probability; the token that came."""
    tries = ([[[each] for each in part]] for part in ([token for token, _ in drafters], [0] * len(drafters),
                                                      [prob for _, prob in drafters]))  # fmt: skip
    shared = ops.share_drafts(*(torch.tensor(each, device=device) for each in tries), num_speculative_tokens=4)
    depths = torch.where(shared.parents >= 0, 1, 0)
    return shared, depths, SimpleNamespace(tokens=torch.tensor([[came, -1]], device=device))


def test_who_is_wrong_loses_nodes_and_is_trusted_again(device):
    """The first drafter is sure and wrong, the second one is right more often than it says."""
    record = Record(2, 1, torch.device(device))
    assert record.factors.tolist() == [[1.0], [1.0]]
    for _ in range(60):
        record.observe(*chain_of((5, 1.0), (6, 0.25), came=6, device=device))
    (wrong,), (right,) = record.factors.tolist()
    assert wrong < 0.1 and right > 3
    for _ in range(round(12 / FORGETTING)):  # neither drafts; then nothing is known of them
        record.observe(*chain_of((-1, 1.0), (-1, 1.0), came=6, device=device))
    assert record.factors.flatten().tolist() == pytest.approx([1.0, 1.0], abs=0.01)


class Liar(ToyModel):
    """Is sure of tokens that the target says by chance alone."""

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        return output._replace(logits=50 * output.logits)


def test_a_drafter_that_is_always_wrong_costs_little(device):
    """Beside one that is nearly always right, with nodes for one of them: after some steps its drafts are left out."""
    target, liar = Walker(**SIZES, device=device), Liar(vocab_size=20, seed=7, device=device)
    options, prompts = {"topk": 1, "num_steps": 4, "cuda_graph": False}, [[*range(8)] * 3]
    config = EAGLEConfig(method=("draft_model", "suffix"), share_nodes=True, **options)
    engine = EAGLEInference(liar, target, config)
    alone = EAGLEInference(None, target, EAGLEConfig(method="suffix", **options))
    lengths = [each.generate(prompts, 60).stats.mean_accept_length for each in (engine, alone) for _ in range(2)]
    record = View(engine).runners[1].stepper.drafter.record
    assert record.factors[0, 0] < 0.7 * record.factors[1, 0]
    assert lengths[0] <= lengths[1] == lengths[3]


# what is refused

REFUSED = [
    ({"method": "suffix"}, "share_nodes must be False with method='suffix': a tuple of two or more methods share"),
    ({}, "share_nodes must be False with method=None"),
    ({"method": ("eagle", "naive")}, r"method must not hold 'naive' with share_nodes=True: it makes no drafts"),
    ({"method": ("hybrid", "suffix"), "num_model_steps": 2}, "method must not hold 'hybrid' with share_nodes=True"),
    ({"method": ("eagle", "medusa")}, "method must hold at most one of eagle, mtp, medusa"),
    ({"method": ("eagle", "ngram"), "verify_strategy": "rejection"}, "verify_strategy must not be 'rejection'"),
    ({"method": ("eagle", "ngram"), "tree_mask_mode": "full_mask"}, "tree_mask_mode must not be 'full_mask'"),
    ({"method": ("eagle", "ngram"), "mean_draft_tokens": 33}, "mean_draft_tokens must be at most the 32 nodes"),
    ({"method": ("eagle", "ngram"), "share_nodes": 1}, "share_nodes must be True or False, got 1"),
    ({"method": ("eagle", "ngram"), "share_nodes": False, "mean_draft_tokens": 8},
     r"mean_draft_tokens must be None with method=\('eagle', 'ngram'\): .*, unless share_nodes=True"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"^EAGLEConfig: {message}"):
        EAGLEConfig(**{"share_nodes": True} | fields)


def test_a_request_cannot_choose_a_drafter():
    engine = engine_of("no model", topk=1, num_steps=2)
    with pytest.raises(
        ValueError, match="drafter must be None with share_nodes=True, where all methods draft, got 'su"
    ):
        engine.submit([1, 2], SamplingParams(drafter="suffix"))
