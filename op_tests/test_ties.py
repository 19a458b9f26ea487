"""Of equal scores the lowest index wins, in every op that orders, by hand: kernel and reference may be wrong alike.

An index is a token's id, a candidate's flat id, a request's and a node's number, a sibling's place. Equal scores lie
within a tile of the kernels, across its ends and far apart, and the higher index is met first where it can be. That
what ties at a filter's edge stays as a whole is in ops/verify; that of n-grams the place decides, in
ops/draft/test_ngram_match.py.
"""

import pytest
import torch

from eagle_kernels.engine.step.verification import score
from eagle_kernels.ops.registry import OPS
from op_tests.harness import check_operation, to_device
from op_tests.harness.trees import stars

VOCAB = 5000
# the ids of equal logits, which no other token reaches
TIES = [[4999, 40, 41], [31, 32], [1023, 1024, 4096], [2047, 2048], [4095, 4096], [3, 4999], [0, 4998, 4999]]


def tied_logits(device, dtype=torch.float32) -> torch.Tensor:
    logits = torch.randint(-9, 2, (len(TIES), VOCAB)).to(dtype)
    for row, tied in zip(logits, TIES):
        row[tied] = 2.0
    return logits.to(device)


def greedy(logits: torch.Tensor) -> dict:
    zeros = torch.zeros(len(TIES), dtype=torch.int64)
    positions = zeros.repeat_interleave(len(logits) // len(TIES))
    return {"positions": positions, "seeds": zeros, "temperature": zeros.float()}


LOGPROBS = ("logprobs", "raw_logprobs")
LOWEST, HIGHEST = [min(tied) for tied in TIES], [max(tied) for tied in TIES]
# every op that takes the likeliest token; where it walks a tree, a child has the highest of the tied ids or the lowest
WALKS = {
    "verify_tree_greedy": lambda logits: {"target_logits": logits, "spec_steps": 1},
    "verify_tree_sampled": lambda logits: {"target_logits": logits, "spec_steps": 1} | greedy(logits),
    "verify_tree_typical": lambda logits: {
        "target_logits": logits, "spec_steps": 1, "epsilon": torch.ones(len(TIES)), "delta": torch.ones(len(TIES)),
    } | greedy(logits),
    **dict.fromkeys(("verify_tree_rejection", "verify_tree_traversal"), lambda logits: {
        "target_logits": logits, "draft_logits": logits, "spec_steps": 1,
    } | greedy(logits)),
}  # fmt: skip


def assert_lowest(path: str, values: dict, is_taken: bool, skip=()) -> None:
    output, _ = check_operation(path, values, skip=skip)
    assert output.accept_token_num.tolist() == [int(is_taken)] * len(TIES)
    assert output.predicts.view(-1, 2).tolist() == [[token, token if is_taken else -1] for token in LOWEST]


@pytest.mark.parametrize(
    ("op", "dtype"), [*((op, torch.float32) for op in WALKS), ("verify_tree_greedy", torch.bfloat16)], ids=str
)
def test_a_greedy_walk_follows_the_lowest_id(op, dtype, device):
    logits = tied_logits(device, dtype).repeat_interleave(2, 0)
    for drafts, is_taken in ((LOWEST, True), (HIGHEST, False)):
        values = to_device(stars([[token] for token in drafts]) | WALKS[op](logits), device)
        assert_lowest(OPS[op], values, is_taken, skip=LOGPROBS if op == "verify_tree_sampled" else ())


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_greedy_chain_follows_the_lowest_id(method, device):
    logits = tied_logits(device)
    both = {"target_logits": logits.repeat_interleave(2, 0), "draft_logits": logits, "method": method}
    for drafts, is_taken in ((LOWEST, True), (HIGHEST, False)):
        values = {"candidates": torch.tensor([[7, token] for token in drafts])} | both | greedy(both["target_logits"])
        assert_lowest("rejection.verify_chain", to_device(values, device), is_taken)


def test_greedy_draws_take_the_lowest_ids(device):
    logits = tied_logits(device)
    values = to_device({"logits": logits} | greedy(logits), device)
    assert check_operation("sampling.sample_from_logits", values)[0].tolist() == LOWEST
    values = to_device({"draft_logits": logits, "num_children": 2} | greedy(logits), device)
    output, _ = check_operation("rejection.sample_children", values, close=("logprobs",))
    assert output.tokens.tolist() == [sorted(tied)[:2] for tied in TIES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafting_keeps_the_lowest_ids_and_beams(dtype, device):
    """Of the first level the lowest tokens, of another one those of the lowest beam, and of it the lowest."""
    logits = tied_logits(device, dtype)
    path, close = "tree.select_top_k_tokens", ("scores", "candidate_scores")
    first, _ = check_operation(path, {"logits": logits, "topk": 2, "level": 0}, close=close)
    assert first.tokens.tolist() == [sorted(tied)[:2] for tied in TIES]
    flat = torch.full((4, 8), -1.0, dtype=dtype, device=device)  # two requests of two beams, all of one score
    flat[:2, 4] = flat[:2, 6] = flat[2:, 5] = 0.0
    values = {"logits": flat, "scores": torch.zeros(2, 2, device=device), "topk": 2, "level": 1}
    values["ancestors"] = torch.tensor([[[1], [2]]] * 2, device=device)
    later, _ = check_operation(path, values, close=close)
    assert later.candidate_tokens.tolist() == [[4, 6, 4, 6], [5, 0, 5, 0]]
    assert later.tokens.tolist() == [[4, 6], [5, 5]] and later.parents.tolist() == [[0, 0], [0, 1]]


# scores of 2 + 4 + 4 candidates, and the four that are kept
KEPT = [
    ([0.0] * 10, [0, 1, 2, 3]),
    ([-1.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 0.0], [0, 1, 2, 9]),
    ([-2.0, -1.0, -2.0, -2.0, -1.0, -1.0, -2.0, -2.0, -1.0, -1.0], [1, 4, 5, 8]),
    ([0.0, -0.0, -0.0, 0.0, 0.0] + [-0.0] * 5, [0, 1, 2, 3]),
    ([float("-inf")] * 6 + [0.0] + [float("-inf")] * 3, [0, 1, 2, 6]),
]


def test_trees_keep_the_lowest_candidates(device):
    scores, kept = zip(*KEPT)
    values = {
        "candidate_scores": torch.tensor(scores),
        "candidate_tokens": torch.arange(10).repeat(len(KEPT), 1),
        "num_verify_tokens": 5,
    }
    output, _ = check_operation("tree.organize_draft_results", to_device(values, device))
    assert output.top_scores_index.tolist() == list(kept)
    values |= {"verified_id": torch.zeros(len(KEPT), dtype=torch.int64), "topk": 2, "spec_steps": 3}
    values |= {"parent_list": torch.tensor([[-1, 0, 1, 2, 3]] * len(KEPT)), "seq_lens": torch.ones(len(KEPT)).long()}
    tree, _ = check_operation("tree.build_tree_from_scores", to_device(values, device))
    assert tree.top_scores_index.tolist() == list(kept)


# scores of the drafts of two requests, what max_rows is, and which nodes stay: a chain of 0 - 1 - 2 - 3 each
PRUNED = [
    ([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], 5, [[0, 1, 2, 3], [0]]),
    ([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], 6, [[0, 1, 2, 3], [0, 1]]),
    ([[0.0, -1.0, -1.0], [0.0, -1.0, -1.0]], 5, [[0, 1, 2], [0, 1]]),
    ([[-1.0, -1.0, -1.0], [0.0, -1.0, -1.0]], 4, [[0, 1], [0, 1]]),
    ([[-0.0, 0.0, -0.0], [0.0, -0.0, 0.0]], 4, [[0, 1, 2], [0]]),
]


@pytest.mark.parametrize(("scores", "max_rows", "stay"), PRUNED, ids=str)
def test_pruning_keeps_the_first_requests_and_nodes(scores, max_rows, stay, device):
    values = {"draft_tokens": torch.arange(4).repeat(2, 1), "tree_mask": torch.tensor([[[1], [3], [7], [15]]] * 2)}
    values |= {"scores": torch.tensor(scores)}
    output, _ = check_operation("tree.prune_trees", to_device(values, device) | {"max_rows": max_rows})
    assert [[token for token in row if token >= 0] for row in output.draft_tokens.tolist()] == stay
    assert output.num_nodes.tolist() == [len(nodes) for nodes in stay]


def test_the_first_of_siblings_of_one_token_is_followed(device):
    """By its place among the siblings; both draws, coins, candidates and matches go by tokens."""
    tree, ones = stars([[3, 3, 3]] * 2), torch.ones(2)
    logits = torch.full((8, 6), -9.0)
    logits[:, 3] = 9.0
    noise = {"positions": torch.zeros(8).long(), "seeds": torch.arange(2), "temperature": ones}
    pair = {"target_logits": logits, "draft_logits": logits} | noise
    cases = {
        "verify_tree_greedy": {"target_logits": logits},
        "verify_tree_sampled": {"target_logits": logits} | noise,
        "verify_tree_typical": {"target_logits": logits, "epsilon": ones / 2, "delta": ones / 2} | noise,
        "verify_tree_rejection": pair,
        "verify_tree_traversal": pair,
        "verify_tree_topp": {
            "candidate_ids": torch.tensor([[5, 3]] * 8), "candidate_lens": torch.full((8,), 2),
            "target_predict": torch.full((2, 4), 3),
        },
        "verify_tree_coins": {
            "target_probs": torch.softmax(logits, 1).view(2, 4, 6), "uniform_samples": torch.full((2, 4), 0.5),
            "uniform_samples_for_final_sampling": ones / 2,
        },
    }  # fmt: skip
    for op, values in cases.items():
        skipped = LOGPROBS if op == "verify_tree_sampled" else ()
        values = to_device(tree | values, device) | {"spec_steps": 1}
        output, _ = check_operation(OPS[op], values, case=op, skip=skipped)
        assert output.accept_index.tolist() == [[0, 1], [4, 5]], op


@pytest.mark.parametrize("tied", [list(range(1000)), list(range(0, 1000, 7)), [999, 3, 500]], ids=lambda ids: len(ids))
def test_top_log_probabilities_are_those_of_the_lowest_ids(tied, device):
    """Also where more tokens tie than are given; the first one is what a greedy request emits."""
    logits = torch.zeros(2, 1000, device=device)
    logits[:, tied] = 1.0
    rest = [token for token in range(1000) if token not in tied]
    top = score(logits, torch.zeros(2, dtype=torch.int64, device=device), True)
    assert top.top_ids.tolist() == [(sorted(tied) + rest)[:20]] * 2


def test_top_log_probabilities_have_the_lowest_ids_first():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 0.0]])
    top = score(logits, torch.tensor([4]), True)
    assert top.top_ids.tolist() == [[1, 3, 5, 2, 4, 0, 6]]
    assert torch.equal(top.top_logprobs, torch.log_softmax(logits, -1)[:, top.top_ids[0]])
