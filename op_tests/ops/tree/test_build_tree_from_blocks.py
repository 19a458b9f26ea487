"""build_tree_from_blocks against its reference and against all paths: ties of every kind, selectors, budgets."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep
from op_tests.ops.tree.cases import make_block as make
from op_tests.ops.tree.masks import MODES, visible_from

PATH = "tree.build_tree_from_blocks"
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

# (batch, depth, topk, nodes): a root alone, one token of each depth, one depth, word borders, trees that need more
# nodes than there are, the largest block and tree
SHAPES = [(1, 1, 1, 1), (2, 1, 1, 2), (1, 5, 1, 6), (2, 1, 7, 8), (3, 2, 3, 20), (2, 4, 4, 30), (1, 8, 3, 65),
          (1, 20, 7, 128), (1, 64, 16, 40), (1, 3, 16, 256)]  # fmt: skip
SMALL = [(2, 1, 3, 3), (2, 2, 2, 7), (2, 3, 2, 9), (2, 3, 3, 20), (1, 4, 2, 31), (1, 2, 4, 12)]


def ahead_of_time_cases():
    yield "D=20 W=7 N=128 bf16", make(1, 20, 7, 128, vocab_size=4000, dtype=torch.bfloat16)
    yield "D=7 N=64 bf16", make(1, 7, 7, 64, vocab_size=151936, dtype=torch.bfloat16)
    yield "D=4 fp32 mapped full_mask", make(2, 4, 4, 16, vocab_size=500, is_mapped=True, mode="full_mask")
    yield "D=8 candidates", make(2, 8, 8, 64)
    yield "D=8 selector", make(1, 8, 8, 64, has_transitions=True, has_budget=True)
    yield "D=64 W=16 N=256 selector", make(1, 64, 16, 256, has_transitions=True)


size_sweep = sweep(lambda batch_size: make(batch_size, 3, 4, 8, vocab_size=100))


def check(values, case=""):
    close = ("scores",) if values.get("logits") is not None else ()
    return check_operation(PATH, values, case=case, close=close)[0]


@pytest.mark.parametrize("has_transitions", [False, True], ids=["alone", "selector"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, has_transitions, device):
    mode = MODES[SHAPES.index(shape) % (4 if shape[3] <= 32 else 3)]
    check(make(*shape, mode=mode, has_transitions=has_transitions, device=device), f"{shape} {mode}")


@pytest.mark.parametrize("has_budget", [False, True], ids=["all nodes", "budgets"])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(7, torch.float32), (1100, torch.float32), (3000, torch.float16)])
def test_logits_match_reference(vocab_size, dtype, has_budget, device):
    """The kernel's log-probabilities are not the reference's to the last bit: inputs on which that moves no node."""
    torch.manual_seed(vocab_size)
    check(make(2, 5, 4, 24, vocab_size=vocab_size, dtype=dtype, has_budget=has_budget, device=device))
    check(make(1, 6, 3, 24, vocab_size=vocab_size, dtype=dtype, is_mapped=True, device=device))


def all_paths(values, request):
    """Every node as (score, depth, order among those of its depth, path), from the best down; by enumeration."""
    scores, transitions = values["candidate_scores"][request].cpu(), values.get("transition_scores")
    level, found = [(0.0, 0, ())], []
    for depth in range(len(scores)):
        below = []
        for order, (score, _, path) in enumerate(level):
            steps = scores[depth].clone()
            if transitions is not None and depth:
                steps += transitions[request, depth - 1, path[-1]].cpu()
            steps = steps.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
            ranks = sorted(range(len(steps)), key=lambda rank: -steps[rank])
            below += [(score + float(steps[rank]), (order, place), (*path, rank)) for place, rank in enumerate(ranks)]
        level = sorted(below, key=lambda each: (-each[0], each[1]))
        found += [(score, depth, order, path) for order, (score, _, path) in enumerate(level)]
    return sorted(found, key=lambda each: (-each[0], each[1], each[2]))


def paths_of(parents, ranks):
    """The ranks from the root to each node."""
    paths = {0: ()}
    for node, (parent, rank) in enumerate(zip(parents, ranks), start=1):
        paths[node] = (*paths[parent], rank)
    return [paths[node] for node in range(1, len(paths))]


def parents_of(tree, request):
    """The parents of nodes 1.. by a tree's links."""
    parents = {}
    for node, child in enumerate(tree.retrieve_next_token[request].tolist()):
        while child >= 0:
            parents[child] = node
            child = int(tree.retrieve_next_sibling[request, child])
    return [parents[node] for node in sorted(parents)]


@pytest.mark.parametrize("grain", [1, 4, 64], ids=lambda grain: f"grain {grain}")
@pytest.mark.parametrize("has_transitions", [False, True], ids=["alone", "selector"])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_tree_is_the_best_of_all_paths(shape, has_transitions, grain, device):
    """In the order of a search that sees every path. Scores are exact sums; grain 1 makes most of them equal."""
    batch_size, depth, topk, num_nodes = shape
    for seed in range(3):
        torch.manual_seed(seed)
        values = make(*shape, has_transitions=has_transitions, grain=grain, device=device)
        # a token tells its depth and its rank
        names = torch.arange(depth)[:, None] * 100 + torch.arange(topk)
        values["candidate_tokens"] = names.expand(batch_size, -1, -1).contiguous().to(device)
        tree = check(values, f"{shape} {seed}")
        for request in range(batch_size):
            best = all_paths(values, request)[: num_nodes - 1]
            ranks = [token % 100 for token in tree.draft_tokens.view(batch_size, -1)[request, 1:].tolist()]
            assert paths_of(parents_of(tree, request), ranks) == [path for *_, path in best]
            assert tree.scores[request].tolist() == [score for score, *_ in best]


def test_depths_and_their_marginals(device):
    """Each depth's tokens are its own: of depth d, d * 10 and up; positions count from the root's."""
    values = make(1, 3, 2, 8, vocab_size=40, device=device)
    logits = torch.full((1, 3, 40), -30.0)
    for depth in range(3):
        logits[0, depth, depth * 10 : depth * 10 + 2] = torch.tensor([1.0, 0.5])
    tree = check(values | {"logits": logits.to(device), "seq_lens": torch.tensor([5], device=device)})
    depths = tree.positions[1:] - 6
    assert torch.equal(tree.draft_tokens[1:] // 10, depths)


def test_worked_example(device):
    """Two depths: 0.5, 0.3, 0.1 and 0.75, 0.25. By hand: a, ax, b, bx, ay, c."""
    scores = torch.tensor([[[0.5, 0.3, 0.1], [0.75, 0.25, 0.0]]]).log()
    values = make(1, 2, 3, 7, device=device) | {"candidate_scores": scores.to(device)}
    values["candidate_tokens"] = torch.tensor([[[1, 2, 3], [11, 12, 13]]], device=device)
    values |= {name: torch.tensor([9], device=device) for name in ("verified_id", "seq_lens")}
    tree = check(values)
    assert tree.draft_tokens.tolist() == [9, 1, 11, 2, 11, 12, 3]
    assert tree.positions.tolist() == [9, 10, 11, 10, 11, 11, 10]
    assert tree.retrieve_next_token.tolist() == [[1, 2, -1, 4, -1, -1, -1]]
    assert tree.retrieve_next_sibling.tolist() == [[-1, 3, 5, 6, -1, -1, -1]]
    parents = torch.tensor([[-1, 0, 1, 0, 3, 1, 0]])
    seen = visible_from(parents)[0].long() @ (1 << torch.arange(7))
    assert tree.tree_mask.flatten().tolist() == seen.tolist()


def test_a_selector_changes_what_follows(device):
    """Alone the best path is a a; below a the selector wants b, below b it wants a."""
    values = make(1, 2, 2, 5, has_transitions=True, device=device)
    values["candidate_scores"] = torch.tensor([[[-1.0, -2.0], [-1.0, -2.0]]], device=device)
    values["transition_scores"] = torch.tensor([[[[-4.0, 1.5], [0.5, -4.0]]]], device=device)
    values["candidate_tokens"] = torch.tensor([[[1, 2], [1, 2]]], device=device)
    tree = check(values)
    assert tree.draft_tokens[1:].tolist() == [1, 2, 2, 1]
    assert tree.scores.tolist() == [[-1.0, -1.5, -2.0, -2.5]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_budget_leaves_the_best_nodes_and_never_less_than_the_root(dtype, device):
    values = make(6, 4, 3, 12, device=device)
    values["candidate_scores"] = values["candidate_scores"][:1].expand(6, -1, -1).contiguous()
    whole = check(values)
    budgets = [-3, 0, 1, 2, 7, 99]
    tree = check(values | {"num_nodes": torch.tensor(budgets, dtype=dtype, device=device)})
    for request, budget in enumerate(budgets):
        kept = min(max(budget, 1), 12)
        assert tree.scores[request, : kept - 1].tolist() == whole.scores[request, : kept - 1].tolist()
        assert (tree.scores[request, kept - 1 :] == -torch.inf).all()
        assert parents_of(tree, request) == parents_of(whole, request)[: kept - 1]
        own = [1 << node for node in range(kept, 12)]
        assert tree.tree_mask[request, kept:, 0].tolist() == own


def test_a_budget_of_the_batch(device):
    """What `prune_trees` keeps of all trees is what the budgets it returns keep of each."""
    values = make(4, 4, 3, 16, device=device)
    sizes = {"device": device, "dtype": torch.int64}
    values |= {"seq_lens": torch.arange(4, **sizes), "verified_id": torch.arange(4, **sizes)}
    tree = eagle_kernels.raw.build_tree_from_blocks(**values)
    tokens = tree.draft_tokens.view(4, 16)
    pruned = eagle_kernels.raw.prune_trees(tokens, tree.tree_mask, tree.scores, max_rows=30)
    assert pruned.num_nodes.sum() == 30
    small = eagle_kernels.raw.build_tree_from_blocks(**values, num_nodes=pruned.num_nodes)
    for request, count in enumerate(pruned.num_nodes.tolist()):
        assert torch.equal(pruned.draft_tokens[request, :count], small.draft_tokens.view(4, 16)[request, :count])
        assert torch.equal(pruned.tree_mask[request, :count], small.tree_mask[request, :count])


SPECIAL = {
    "all -inf": lambda scores: scores.fill_(-float("inf")),
    "all NaN": lambda scores: scores.fill_(float("nan")),
    "no depth after the first": lambda scores: scores[:, 1:].fill_(-float("inf")),
    "fewer finite than topk": lambda scores: scores[..., 2:].fill_(-float("inf")),
    "NaN among them": lambda scores: scores[..., ::2].fill_(float("nan")),
    "above 0": lambda scores: scores[:, 1].fill_(float("inf")),
    "zeros of both signs": lambda scores: scores.zero_()[..., 1::3].neg_(),
    "hardly a difference": lambda scores: scores.fill_(-1e-30),
    "sums past fp32": lambda scores: scores.fill_(-3e38),
}


@OVERFLOWS
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("has_transitions", [False, True], ids=["alone", "selector"])
def test_special_values(special, has_transitions, device):
    values = make(2, 3, 4, 16, has_transitions=has_transitions, device=device)
    SPECIAL[special](values["candidate_scores"])
    check(values, special)


@OVERFLOWS
@pytest.mark.parametrize("special", ["all -inf", "all NaN", "NaN among them", "fewer finite than topk"])
def test_special_logits(special, device):
    values = make(2, 3, 4, 16, vocab_size=90, device=device)
    SPECIAL[special](values["logits"][:1])
    check(values, special)


def wrong_calls():
    """Yields values that the contract refuses, and what it says of them."""
    logits, given = make(2, 3, 4, 8, vocab_size=50), make(2, 3, 4, 8)
    yield given | {"logits": logits["logits"]}, "exactly one of logits and candidate_scores must be given"
    yield given | {"candidate_scores": None}, "exactly one of logits and candidate_scores must be given"
    yield given | {"candidate_tokens": None}, "candidate_tokens must be a tensor"
    yield logits | {"candidate_tokens": given["candidate_tokens"]}, "candidate_tokens must come with candidate_scores"
    selector = make(2, 3, 4, 8, has_transitions=True)["transition_scores"]
    yield logits | {"transition_scores": selector}, "transition_scores must come with candidate_scores"
    yield given | {"draft_to_target": torch.zeros(4).long()}, "draft_to_target must come with logits"
    yield logits | {"topk": 16, "logits": logits["logits"][..., :9].contiguous()}, "topk must be at most the draft"
    yield make(1, 65, 2, 8), r"candidate_scores must have D in 1\.\.64"
    yield logits | {"logits": logits["logits"][:, :0]}, r"logits must have D in 1\.\.64"
    yield given | {"transition_scores": selector[:, :1].contiguous()}, "transition_scores must have shape"
