"""SGLang's own tests of the ops that `integrations/sgl_kernel` offers: its cases and what it expects of them, our code.

Mapped, from its repository (test/registered/ without a word before them)
    spec/utils/test_build_eagle_tree_malformed.py          test_malformed_trees: every output, in every mask mode
    spec/utils/test_build_eagle_tree.py                    test_a_round_of_drafts_becomes_a_tree
    spec/utils/test_eagle_triton_pytorch_parity.py         test_stars_and_chains
    kernels/ops/speculative/test_eagle_utils.py            test_greedy_walk
    kernels/ops/speculative/test_speculative_sampling.py   test_sampled_walk, test_cdf_boundaries, test_chain_*
    kernels/ops/speculative/test_tree_speculative_sampling_triton.py   test_sampled_walk_of_random_trees
    kernels/ops/speculative/test_reject_sampling_block.py, test_spec_verify_distribution.py   test_chain_*
    kernels/ops/speculative/test_ngram_utils.py, test_reconstruct_tree_mask.py                test_reconstruct_*
    kernels/ops/speculative/test_spec_kv_indices_grid.py, test_draft_decode_window.py,
    test_generate_draft_decode_window_kv_indices.py        test_draft_lists, test_windows_*, test_flat_lists
    sgl-kernel/tests/test_norm.py, test_activation.py, test_rotary_embedding.py, test_sampling.py   test_norms and on

Not mapped, and why
    thresholds (0, 0) as sgl-kernel/tests/speculative/test_speculative_sampling.py and spec/utils/
        test_tree_speculative_sampling.py expect them: they are of the older rule (sglang-kernel 0.4.5, of SGLang
        0.5.17), which accepts tokens of probability 0; the same test of 0.5.23 expects the opposite, as we do
    parity, "nontrivial_fanout": N candidates of depth 2 with depth = 1, which SGLang's own CUDA op refuses to take
    chain: coins by the caller (verify_chain draws its own), so a draft probability that rounding puts above 1 cannot
        be met with a coin just below 1; it is taken as it is there, p / q, not as 1
    lists of pages and translated slots (ENTRY_PAGE_SIZE, v2p), block sizes of launches: the adapter refuses or ignores
        them; where a window comes from (server arguments): not an op
    gelu, *_sampling_from_probs, process_*, DFLASH, Domino, LiLiCorr, DSpark, topk1: not names of the adapter
    equality of SGLang's kernels among themselves, and with CUDA code that is not here
"""

from __future__ import annotations

import pytest
import torch

import eagle_kernels
import eagle_kernels.integrations.sgl_kernel as sgl_kernel
from eagle_kernels.integrations.sgl_kernel import TreeMaskMode
from op_tests.integrations import oracles
from op_tests.integrations.buffers import build

LEFT = -7  # what buffers hold before

# trees

# name: selections, parent lists, then what SGLang asserts: positions, rows of the mask, next_token, next_sibling
UNSORTED, OTHER_ROW = [[4, 2, 0], [2, 4, 0]], [[4, 2, 0], [6, 4, 0]]
ALONE = [[-1, -1, -1, -1], [-1, -1, -1, -1]]
MALFORMED = {
    "valid_chain": (
        UNSORTED, [[0, 0, 2, 0, 0], [0, 4, 0, 0, 0]], [7, 10, 9, 8, 11, 14, 13, 12],
        "1000 1111 1011 1001 1000 1111 1011 1001", [[3, -1, 1, 2], [3, -1, 1, 2]], ALONE,
    ),
    "missing_direct_parent": (
        UNSORTED, [[0, 99, 2, 0, 0], [0, 99, 0, 0, 0]], [7, 9, 8, 8, 11, 12, 13, 12],
        "1000 1110 1010 1001 1000 1100 1011 1001", [[3, -1, 1, -1], [3, -1, -1, 2]], ALONE,
    ),
    "missing_ancestor": (
        UNSORTED, [[0, 99, 99, 99, 99], [0, 99, 99, 99, 99]], [7, 8, 8, 8, 11, 12, 12, 12],
        "1000 1100 1010 1001 1000 1100 1010 1001", [[3, -1, -1, -1], [3, -1, -1, -1]], ALONE,
    ),
    "cyclic_ancestor": (
        UNSORTED, [[0, 2, 2, 0, 0], [0, 4, 4, 0, 0]], [7, 10, 10, 8, 11, 14, 14, 12],
        "1000 1110 1010 1001 1000 1110 1010 1001", [[3, -1, 1, -1], [3, -1, 1, -1]],
        [[-1, 2, -1, -1], [-1, 2, -1, -1]],
    ),
    "max_valid_depth": (
        UNSORTED, [[0, 0, 4, 2, 0], [0, 0, 2, 4, 0]], [7, 10, 9, 8, 11, 13, 14, 12],
        "1000 1100 1011 1001 1000 1101 1111 1001", [[3, 1, -1, 2], [3, 2, -1, 1]], ALONE,
    ),
    "cross_row": (
        OTHER_ROW, [[0, 6, 4, 0, 0], [0, 0, 6, 4, 0]], [7, 10, 8, 8, 11, 14, 14, 12],
        "1000 1100 1010 1001 1000 1110 1110 1001", [[3, 1, -1, -1], [3, 2, 1, -1]], ALONE,
    ),
}  # fmt: skip


def as_rows(bits: str) -> list[list[bool]]:
    return [[bit == "1" for bit in row] for row in bits.split()]


@pytest.mark.parametrize("mode", TreeMaskMode, ids=str)
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_trees(name, mode, device, backend):
    """K = 2, three levels, four nodes; selections that do not ascend, parents that are missing, cycles."""
    kept, slots, positions, rows, next_token, next_sibling = MALFORMED[name]
    seq_lens = torch.tensor([7, 11], device=device)
    drafts = [torch.tensor(slots, device=device), torch.tensor(kept, device=device), seq_lens]
    mask, *outputs = build(drafts, 2, 3, 4, mode, device)
    assert mask.tolist() == oracles.oracle_mask(as_rows(rows), seq_lens, 4, mode, fill=True)
    expected = [positions, [[0, 1, 2, 3], [4, 5, 6, 7]], next_token, next_sibling]
    assert [output.tolist() for output in outputs] == expected


# a round of two requests, K = 4, four levels: scores, tokens and parents of every level, as the draft model left them
SCORES = [
    [
        [7.1127e-01, 2.8292e-01, 2.2995e-03, 1.7357e-03],
        [6.9142e-01, 1.2863e-02, 1.6873e-03, 1.1871e-03, 2.4787e-01, 1.8818e-02, 1.4204e-02, 9.2235e-04],
        [2.2971e-03, 1.6700e-06, 1.8737e-07, 8.3146e-08, 1.2771e-03, 2.4374e-04, 1.7832e-04, 1.1947e-05],
        [6.6438e-01, 2.6997e-02, 2.4236e-05, 4.0821e-06, 2.4402e-01, 2.8409e-03, 5.0935e-04, 2.9022e-04],
        [1.6178e-02, 2.0567e-03, 4.5892e-04, 3.0034e-05, 1.3023e-02, 5.0497e-04, 3.6371e-04, 8.7750e-05],
        [6.6420e-01, 1.0525e-04, 6.5864e-05, 1.2253e-06, 1.3019e-01, 1.0461e-01, 5.2083e-03, 1.6777e-03],
        [2.0103e-02, 6.7335e-03, 1.2625e-04, 1.0364e-05, 1.5142e-02, 7.0819e-04, 9.6595e-05, 8.7951e-05],
    ],
    [
        [9.7476e-01, 2.2219e-02, 6.5031e-04, 1.3212e-04],
        [8.4832e-02, 6.6068e-02, 5.8304e-02, 5.7851e-02, 2.3616e-03, 1.1243e-03, 5.4368e-04, 2.7768e-04],
        [2.5286e-04, 1.5578e-04, 2.8817e-05, 1.2888e-05, 1.2834e-04, 2.5417e-06, 1.1279e-06, 1.6088e-08],
        [2.3263e-02, 2.0054e-02, 9.3990e-03, 2.7783e-03, 6.4156e-02, 5.5506e-04, 1.0429e-04, 9.7211e-05],
        [4.9950e-02, 5.0630e-03, 9.0068e-04, 3.3656e-04, 7.5817e-03, 8.5731e-04, 6.9972e-04, 6.0793e-04],
        [5.8608e-02, 1.8840e-03, 7.8535e-04, 4.4400e-04, 1.2185e-02, 2.0684e-03, 1.7418e-03, 1.4327e-03],
        [6.2455e-03, 6.1487e-03, 2.6862e-03, 1.8034e-03, 1.8590e-03, 1.6151e-03, 1.2481e-03, 3.6038e-04],
    ],
]
TOKENS = [
    [
        [29896, 29906, 29900, 29945],
        [29889, 29974, 29945, 29900, 29974, 29922, 29930, 29958],
        [29889, 29974, 29930, 29945, 29974, 29922, 29930, 29958],
        [29946, 29945, 29953, 29906, 29896, 29945, 29900, 29906],
        [29896, 29945, 29906, 29953, 29896, 29945, 29906, 29946],
        [29946, 29974, 29945, 29930, 29889, 29922, 29974, 29930],
        [29974, 29946, 29930, 29922, 29889, 29974, 29945, 29922],
    ],
    [
        [13, 2, 29871, 28956],
        [22550, 4136, 16492, 8439, 29871, 2, 3001, 13],
        [2, 13, 29906, 29946, 2, 13, 29871, 259],
        [29871, 2, 29901, 29889, 29871, 2, 395, 259],
        [29901, 29871, 2, 29889, 3001, 1234, 7146, 2186],
        [29941, 29906, 2, 29946, 29871, 450, 319, 14990],
        [29946, 29941, 2, 29906, 29871, 2, 3001, 13],
    ],
]
PARENTS = [[-1, 0, 1, 2, 3, 4, 8, 9, 10, 20, 24, 21, 28], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21]]


def test_a_round_of_drafts_becomes_a_tree(device, backend):
    flat = [[sum(rows, []) for rows in requests] for requests in (SCORES, TOKENS)]
    scores, tokens = torch.tensor(flat[0], device=device), torch.tensor(flat[1], device=device)
    kept = eagle_kernels.organize_draft_results(scores, tokens, num_verify_tokens=8)
    drafts = [torch.tensor(PARENTS, device=device), kept.top_scores_index, torch.tensor([5, 10], device=device)]
    _, positions, index, next_token, next_sibling = build(drafts, 4, 4, 8, TreeMaskMode.FULL_MASK, device)
    assert positions.tolist() == [5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14]
    assert index.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    assert next_token.tolist() == [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, -1, -1, -1, -1, -1], [-1, -1, 3, 4, 5, -1, -1, -1]]
    assert kept.draft_tokens.tolist() == [
        [29896, 29906, 29889, 29974, 29946, 29896, 29946], [13, 22550, 4136, 16492, 8439, 29871, 29941],
    ]  # fmt: skip


@pytest.mark.parametrize("shape", ["star", "chain"])
def test_stars_and_chains(shape, device, backend):
    """One candidate eight times below the root, and a chain: the tree, and the walk that takes every first child."""
    depth, seq_lens = (4, [5, 7]) if shape == "star" else (8, [8, 11])
    slots = [-1] + [0] * (4 * (depth - 1))
    slots[1:8] = [0, 4, 8, 12, 16, 20, 24] if shape == "chain" else slots[1:8]
    kept = [0] * 7 if shape == "star" else [0, 4, 8, 12, 16, 20, 24]
    drafts = [torch.tensor(data, device=device) for data in ([slots] * 2, [kept] * 2, seq_lens)]
    mask, positions, *links = build(drafts, 4, depth, 8, TreeMaskMode.FULL_MASK, device)
    hops = [0] + [1] * 7 if shape == "star" else list(range(8))
    rows = [[other in (0, node) if shape == "star" else other <= node for other in range(8)] for node in range(8)]
    assert mask.tolist() == oracles.oracle_mask(rows * 2, drafts[2], 8, TreeMaskMode.FULL_MASK, fill=True)
    assert positions.tolist() == [seq_len + hop for seq_len in seq_lens for hop in hops]
    next_node = [1, 2, 3, 4, 5, 6, 7, -1]
    expected = [[1] + [-1] * 7, [-1, *next_node[1:]]] if shape == "star" else [next_node, [-1] * 8]
    assert [link.tolist() for link in links[1:]] == [[rows] * 2 for rows in expected]

    candidates = torch.tensor([[first + node for node in range(8)] for first in (100, 200)], device=device)
    target = torch.full((2, 8), -1, device=device)
    end = 1 if shape == "star" else 7
    target[:, :end] = candidates[:, 1 : end + 1]
    target[:, end] = candidates[:, end]
    outputs = [torch.full(shape, -1, dtype=torch.int32, device=device) for shape in ((16,), (2, 8), (2,))]
    sgl_kernel.verify_tree_greedy(*outputs, candidates, *links, target)
    assert outputs[0].tolist() == target.flatten().tolist()
    assert outputs[1].tolist() == [
        [first + node if node <= end else -1 for node in range(8)] for first in (0, 8)
    ]  # fmt: skip
    assert outputs[2].tolist() == [end, end]


# walks

EXAMPLE = (
    [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]],
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
    [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]],
    [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]],
)
WALKED = (
    [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18],
    [[0, 3, 4, 5], [6, 10, 11, -1]],
    [3, 2],
)


def example(device):
    """Two requests, six nodes, V = 20: the tree, and logits whose every row decides for one token."""
    logits = torch.full((2, 6, 20), 1.0)
    for request, node, token in ((0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 11), (1, 4, 12)):
        logits[request, node, token] = 10
    logits[..., 18] = torch.where(logits.amax(-1) < 10, 10.0, logits[..., 18])
    return [torch.tensor(data, device=device) for data in EXAMPLE], logits.to(device)


def verdict(num_nodes, width, device, batch_size=2):
    shapes = ((batch_size * num_nodes,), (batch_size, width), (batch_size,))
    return [torch.full(shape, -1, dtype=torch.int32, device=device) for shape in shapes]


def test_greedy_walk(device, backend):
    tree, logits = example(device)
    outputs = verdict(6, 4, device)
    sgl_kernel.verify_tree_greedy(*outputs, *tree, logits.argmax(dim=-1))
    assert tuple(output.tolist() for output in outputs) == WALKED


@pytest.mark.parametrize("thresholds", [(1, 1), (0, 0)], ids=str)
def test_sampled_walk(thresholds, device, backend):
    """At temperature 0.01 all but one token of every row underflow to 0, and are not taken whatever the thresholds."""
    tree, logits = example(device)
    target_probs = torch.softmax(logits / 0.01, dim=-1)
    assert int((target_probs > 0).sum()) == 12
    outputs, coins = verdict(6, 4, device), torch.rand(2, 7, device=device)
    sgl_kernel.tree_speculative_sampling_target_only(
        *outputs, *tree, coins[:, :6].contiguous(), coins[:, 6].contiguous(), target_probs,
        torch.zeros_like(target_probs), *thresholds, deterministic=True,
    )  # fmt: skip
    assert tuple(output.tolist() for output in outputs) == WALKED


@pytest.mark.parametrize(
    ("tokens", "probs", "coin", "threshold_single", "emitted", "accepted"),
    [
        ([2], [0.0, 1.0, 0.0], 0.0, 0.0, 1, 0),
        ([2], [0.0, 1.0, 0.0], 0.0, 1.0, 1, 0),
        ([1, 2, 3], [0.0, 0.25, 0.0, 0.75], 0.25, 1.0, 3, 1),
        ([1], [0.0, 0.25, 0.75], 0.0, 1.0, 1, 1),
        ([1], [0.0, 1.0], 1.0 - 2**-24, 1.0, 1, 1),
    ],
    ids=["zero mass, zero threshold", "zero mass", "interior", "lower end", "upper end"],
)
def test_cdf_boundaries(tokens, probs, coin, threshold_single, emitted, accepted, device, backend):
    num_nodes = 1 + len(tokens)
    next_sibling = [-1, *range(2, num_nodes), -1]
    lists = ([[0, *tokens]], [list(range(num_nodes))], [[1] + [-1] * len(tokens)], [next_sibling])
    target_probs = torch.zeros(1, num_nodes, len(probs), device=device)
    target_probs[0, 0] = torch.tensor(probs)
    target_probs[0, 1:, 0] = 1.0
    coins = torch.zeros(1, num_nodes, device=device)
    coins[0, 0] = coin
    outputs = verdict(num_nodes, 2, device, batch_size=1)
    sgl_kernel.tree_speculative_sampling_target_only(
        *outputs, *(torch.tensor(data, device=device) for data in lists), coins, coins.new_zeros(1), target_probs,
        torch.zeros_like(target_probs), threshold_single, 1.0,
    )  # fmt: skip
    assert (int(outputs[0][0]), outputs[2].tolist()) == (emitted, [accepted])


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.5, 0.7), (0.0, 0.0)], ids=str)
def test_sampled_walk_of_random_trees(thresholds, device, backend):
    """Continuous probabilities and coins; siblings carry distinct tokens (the docstring of the adapter says why)."""
    lists = [[1, 2, -1, 4, 5, -1]] * 4, [[-1, 3, -1, -1, -1, -1]] * 4
    candidates = torch.stack([torch.randperm(17)[:6] for _ in range(4)])
    tree = [candidates, torch.arange(24).view(4, 6), *(torch.tensor(data) for data in lists)]
    target_probs, coins = torch.randn(4, 6, 17).softmax(dim=-1), torch.rand(4, 7)
    outputs = verdict(6, 4, device, batch_size=4)
    expected, path = [-1] * 24, [[-1] * 4 for _ in range(4)]
    counts = oracles.oracle_sample(
        (expected, path), [tensor.tolist() for tensor in tree], coins[:, :6].tolist(), coins[:, 6].tolist(),
        target_probs.tolist(), *thresholds,
    )  # fmt: skip
    values = (*tree, coins[:, :6].contiguous(), coins[:, 6].contiguous(), target_probs)
    sgl_kernel.tree_speculative_sampling_target_only(*outputs, *(t.to(device) for t in values), None, *thresholds)
    assert [output.tolist() for output in outputs] == [expected, path, counts]


# chains of sampled drafts: SGLang's chain_speculative_sampling_triton is our verify_chain


def chains(draft_prob, target_prob, method, device, batch_size=8):
    """Three drafts of token 7, of draft_prob in the draft and target_prob in the target; token 8 has the rest."""
    target = torch.zeros(batch_size * 4, 64)
    target[:, 7], target[:, 8] = target_prob, 1.0 - target_prob
    draft = torch.zeros(batch_size * 3, 64)
    draft[:, 7] = draft_prob
    values = (torch.full((batch_size, 4), 7), torch.arange(4).repeat(batch_size), torch.arange(batch_size))
    candidates, positions, seeds, target, draft = (tensor.to(device) for tensor in (*values, target, draft))
    return eagle_kernels.verify_chain(
        candidates, None, None, positions, seeds, None, target_probs=target, draft_probs=draft, method=method
    )


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("draft_prob", [0.0, float("nan"), float("-inf"), float("inf"), 2.0])
def test_chain_refuses_what_is_no_probability(draft_prob, method, device, backend):
    assert chains(draft_prob, 1.0, method, device).accept_token_num.tolist() == [0] * 8


@pytest.mark.cross
@pytest.mark.parametrize("method", ["standard", "block"])
def test_chain_leaves_nothing_of_a_draft_above_one(method, device, backend):
    """1 + 8e-6 is a probability that was rounded up: where it is rejected, the residual does not hold its token."""
    result = chains(1.0 + 8e-6, 0.5, method, device, batch_size=16)
    is_rejected = (result.accept_token_num == 0).cpu()
    assert 0 < int(is_rejected.sum()) < 16
    assert (result.predicts.view(16, 4)[:, 0].cpu()[is_rejected] == 8).all()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_chain_accepts_drafts_of_the_target_itself(method, device, backend):
    probs = torch.randn(4, 4, 300).mul(2).div(0.6).softmax(dim=-1)
    candidates = torch.cat([torch.zeros(4, 1).long(), probs[:, :3].argmax(dim=-1)], dim=1)
    result = eagle_kernels.verify_chain(
        candidates.to(device), None, None, torch.arange(4).repeat(4).to(device), torch.arange(4).to(device), None,
        target_probs=probs.flatten(0, 1).to(device), draft_probs=probs[:, :3].flatten(0, 1).to(device), method=method,
    )  # fmt: skip
    assert result.accept_token_num.tolist() == [3] * 4


@pytest.mark.full
@pytest.mark.parametrize(("method", "accepted"), [("standard", 10 / 9), ("block", 11 / 9)])
def test_chain_of_the_toy_model(method, accepted, device):
    """Target 1/3, 2/3 and draft 2/3, 1/3: so many drafts are accepted, and the first token has the target's law."""
    rows = 20000
    target = torch.tensor([1 / 3, 2 / 3, 0.0], device=device).expand(rows * 3, 3).contiguous()
    draft = torch.tensor([2 / 3, 1 / 3, 0.0], device=device).expand(rows * 2, 3).contiguous()
    drawn = torch.multinomial(draft, 1).view(rows, 2)
    result = eagle_kernels.verify_chain(
        torch.cat([torch.zeros_like(drawn[:, :1]), drawn], dim=1), None, None,
        torch.arange(3, device=device).repeat(rows), torch.arange(rows, device=device), None,
        target_probs=target, draft_probs=draft, method=method,
    )  # fmt: skip
    assert abs(float(result.accept_token_num.float().mean()) - accepted) < 0.03
    first = result.predicts.view(rows, 3)[:, 0]
    assert not bool((result.predicts == 2).any())
    for token, prob in ((0, 1 / 3), (1, 2 / 3)):
        assert abs(float((first == token).float().mean()) - prob) < 5 * (prob * (1 - prob) / rows) ** 0.5


# trees out of masks


def test_reconstruct_the_worked_example(device, backend):
    mask = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1], dtype=torch.bool, device=device)
    outputs = [torch.empty(shape, dtype=torch.int64, device=device) for shape in ((4,), (1, 4), (1, 4), (1, 4))]
    sgl_kernel.reconstruct_indices_from_tree_mask(mask, torch.tensor([12], device=device), *outputs, 1, 4)
    assert [output.tolist() for output in outputs] == [
        [12, 13, 13, 14], [[0, 1, 2, 3]], [[1, -1, 3, -1]], [[-1, 2, -1, -1]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_nodes", "batch_size"),
    [(2, 3), (7, 1), (8, 3), (17, 1), (63, 1)]
    + [pytest.param(n, b, marks=pytest.mark.full) for n in (1, 2, 3, 7, 8, 16, 17, 32, 63, 64) for b in (1, 3, 16, 64)],
)
def test_reconstruct_random_trees(num_nodes, batch_size, device, backend):
    """About three nodes in ten are roots of their own, and no siblings of each other."""
    mask = torch.zeros(batch_size, num_nodes, num_nodes, dtype=torch.bool)
    for request in range(batch_size):
        for node in range(num_nodes):
            if node and torch.rand(()) >= 0.3:
                mask[request, node] = mask[request, int(torch.randint(node, ()))]
            mask[request, node, node] = True
    seq_lens = torch.randint(1, 200, (batch_size,))
    outputs = [torch.full((batch_size, num_nodes), LEFT, device=device) for _ in range(4)]
    sgl_kernel.reconstruct_indices_from_tree_mask(
        mask.flatten().to(device), seq_lens.to(device), outputs[0].view(-1), *outputs[1:], batch_size, num_nodes
    )
    positions, next_token, next_sibling = oracles.oracle_reconstruct(mask, seq_lens)
    assert outputs[0].flatten().tolist() == positions
    assert outputs[1].flatten().tolist() == list(range(batch_size * num_nodes))
    assert [outputs[2].tolist(), outputs[3].tolist()] == [next_token, next_sibling]


# lists of KV slots


def slot_table(num_requests, width, device):
    """A slot of its own for every token of every request, so that a misplaced read shows."""
    return torch.randperm(num_requests * width).view(num_requests, width).to(device) + 1000


def whole(*sizes):
    return pytest.param(*sizes, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("seq_lens", "num_steps", "topk", "page_size", "window", "sink"),
    [
        ([0, 1, 511, 512, 513], 2, 1, 1, 0, 0), ([33, 40, 16], 3, 4, 1, 0, 0), ([33, 40, 16], 4, 4, 16, 0, 0),
        ([300, 130, 517], 3, 1, 1, 0, 0), ([600, 250], 3, 4, 1, 128, 16), ([100, 200], 2, 1, 1, 4096, 64),
        ([601, 255], 3, 2, 8, 128, 16), ([604, 256], 3, 4, 4, 128, 0), ([500, 204, 90], 4, 1, 1, 102, 0),
        whole([0, 1, 511, 512, 513, 8191, 8192, 8193], 3, 4, 16, 0, 0), whole([100_000, 33, 4096, 16], 3, 4, 1, 0, 0),
        whole([5000, 900], 4, 2, 16, 1024, 64), whole([65536, 1029306], 3, 2, 1, 4032, 64),
        whole([262145, 131072], 4, 1, 1, 4032, 64),
    ],
    ids=str,
)  # fmt: skip
def test_draft_lists(seq_lens, num_steps, topk, page_size, window, sink, device, backend):
    """Prefix, or its sink and its window, then the branch's own tokens; nothing else in the buffers is touched."""
    num_requests, num_branches = len(seq_lens), len(seq_lens) * topk
    table = slot_table(num_requests, max(seq_lens) + topk * (num_steps + 2 * page_size), device)
    lengths = torch.tensor(seq_lens, device=device)
    cap = window + sink if window else max(seq_lens)
    width = topk * sum(min(length, cap) + num_steps for length in seq_lens) + 64
    indices = torch.full((num_steps, width), LEFT, device=device)
    indptr = torch.zeros(num_steps, num_branches + 1, dtype=torch.int32, device=device)
    wanted = indices.tolist(), indptr.tolist()
    grid = (num_steps, num_requests, topk)
    sizes = (table.stride(0), width, num_branches + 1, 8, 4, 32, page_size, window, sink)
    sgl_kernel.generate_draft_decode_kv_indices[grid](
        torch.arange(num_requests, device=device), table, lengths, indices, indptr, lengths.repeat_interleave(topk),
        *sizes,
    )  # fmt: skip
    oracles.oracle_draft_indices(
        table.tolist(), list(range(num_requests)), seq_lens, grid, page_size, window, sink, *wanted
    )
    assert (indices.tolist(), indptr.tolist()) == wanted


@pytest.mark.parametrize(("page_size", "topk", "window"), [(1, 1, 4), (1, 1, 64), (1, 1, 6), (2, 1, 6), (2, 2, 5)])
def test_windows_over_prefix_and_drafts(page_size, topk, window, device, backend):
    seq_lens, grid = [5, 1, 9], (3, 3, topk)
    table, lengths = slot_table(3, 64, device), torch.tensor(seq_lens, device=device)
    indices = torch.full((3, 3 * topk * window), LEFT, device=device)
    indptr = torch.zeros(3, 3 * topk + 1, dtype=torch.int32, device=device)
    wanted = indices.tolist(), indptr.tolist()
    sgl_kernel.generate_draft_decode_window_kv_indices[grid](
        torch.arange(3, device=device), table, lengths, indices, indptr, lengths.repeat_interleave(topk),
        64, 3 * topk * window, 3 * topk + 1, 4, 4, 8, page_size, window,
    )  # fmt: skip
    oracles.oracle_window_indices(table.tolist(), [0, 1, 2], seq_lens, grid, page_size, window, *wanted)
    assert (indices.tolist(), indptr.tolist()) == wanted


@pytest.mark.parametrize("blocks", [None, 1, 32])
@pytest.mark.parametrize("start", [None, 7])
@pytest.mark.parametrize("seq_lens", [[0, 1, 511, 512, 513], whole([100_000, 33, 4096]), whole([1000] * 7 + [100_000])])
def test_flat_lists(seq_lens, start, blocks, device, backend):
    num_requests = len(seq_lens)
    table = slot_table(num_requests + 1, max(seq_lens) + 16, device).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    indptr = torch.zeros(num_requests + 1, dtype=torch.int32, device=device)
    indptr[1:] = lengths.cumsum(0)
    starts = None if start is None else torch.full_like(lengths, start)
    indices = torch.full((sum(seq_lens) + 8,), LEFT, dtype=torch.int32, device=device)
    wanted = indices.tolist()
    grid = (num_requests,) if blocks is None else (num_requests, blocks)
    rows = list(range(num_requests))
    oracles.oracle_flat_indices(
        table.tolist(), rows, seq_lens, indptr.tolist(), None if start is None else [start] * num_requests, wanted
    )
    sgl_kernel.create_flashinfer_kv_indices_triton[grid](
        table, torch.tensor(rows, device=device), lengths, indptr, starts, indices, table.shape[1],
        TOKEN_BLOCK_PARALLEL=blocks is not None,
    )  # fmt: skip
    assert indices.tolist() == wanted


# norms, activation, rotary embedding, renormalising filters; SGLang's own tolerances


def close(actual, expected, tolerance=1e-3):
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["", "gemma_"])
@pytest.mark.parametrize(
    ("rows", "hidden_size"),
    [(1, 111), (19, 500), (3, 1024)] + [whole(r, h) for r in (1, 19, 99, 989) for h in (111, 3072, 3584, 4096, 16384)],
)
def test_norms(rows, hidden_size, kind, device, backend):
    x, residual = torch.randn(2, rows, hidden_size).half().to(device)
    weight = torch.randn(hidden_size).half().to(device)

    def normed(values):
        wide = values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
        return (wide * (weight.float() + bool(kind))).half()

    norm, add_norm = getattr(sgl_kernel, kind + "rmsnorm"), getattr(sgl_kernel, kind + "fused_add_rmsnorm")
    close(norm(x, weight), normed(x))
    out = torch.empty_like(x)
    norm(x, weight, out=out)
    close(out, normed(x))
    total = x + residual
    add_norm(x, residual, weight, 1e-6)
    close(residual, total)
    close(x, normed(total))


@pytest.mark.parametrize(
    ("size", "batch_size", "seq_len"),
    [(128, 2, 4), (256, 1, 1)] + [whole(d, b, s) for d in (2048, 11008, 16384) for b in (1, 16) for s in (1, 512)],
)
def test_silu_and_mul(size, batch_size, seq_len, device, backend):
    x = torch.randn(batch_size, seq_len, 2 * size).half().to(device)
    close(sgl_kernel.silu_and_mul(x), x[..., size:] * torch.nn.functional.silu(x[..., :size]))


@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "positions", "base", "is_neox", "batch_size", "seq_len", "heads"),
    [
        (64, 64, 32, 8000, True, 2, 5, (1, 1)), (256, 128, 64, 10000, True, 2, 5, (4, 2)),
        (512, 128, 31, 10000, True, 1, 3, (4, 2)), (128, 128, 64, 10000, False, 2, 5, (8, 2)),
        (512, 128, 31, 10000, False, 1, 3, (4, 2)),
        whole(64, 64, 32, 8000, True, 32, 32, (1, 1)), whole(256, 128, 4096, 10000, True, 2, 512, (4, 2)),
        whole(512, 128, 311, 10000, True, 3, 39, (4, 2)), whole(128, 128, 2048, 10000, False, 2, 512, (32, 8)),
        whole(128, 128, 2048, 10000, False, 2, 512, (16, 4)), whole(512, 128, 311, 10000, False, 3, 39, (4, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_rotary_embedding(head_size, rotary_dim, positions, base, is_neox, batch_size, seq_len, heads, device, backend):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    angles = torch.arange(positions)[:, None] / base ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    places = torch.arange(seq_len, device=device).repeat(batch_size)
    query, key = (torch.randn(len(places), count * head_size).to(dtype).to(device) for count in heads)

    def turned(rows):
        values = rows.float().view(len(rows), -1, head_size)
        part, rest = values[..., :rotary_dim], values[..., rotary_dim:]
        first, second = part.chunk(2, dim=-1) if is_neox else (part[..., ::2], part[..., 1::2])
        cos, sin = table[places, None].chunk(2, dim=-1)
        both = [first * cos - second * sin, second * cos + first * sin]
        part = torch.cat(both, dim=-1) if is_neox else torch.stack(both, dim=-1).flatten(-2)
        return torch.cat([part, rest], dim=-1).flatten(1).to(dtype)

    expected = turned(query), turned(key)
    sgl_kernel.apply_rope_with_cos_sin_cache_inplace(
        positions=places, query=query, key=key, head_size=head_size, cos_sin_cache=table, is_neox=is_neox
    )
    close(query, expected[0], 1e-2)
    close(key, expected[1], 1e-2)


RENORM_SIZES = [(3, 111), whole(99, 32000), whole(989, 128256)]


@pytest.mark.parametrize("top_k", [10, 100, 500])
@pytest.mark.parametrize(("rows", "vocab_size"), RENORM_SIZES)
def test_top_k_renorm(rows, vocab_size, top_k, device, backend):
    probs = torch.rand(rows, vocab_size, device=device)
    probs /= probs.sum(dim=-1, keepdim=True)
    edge = probs.sort(dim=-1, descending=True).values[:, min(top_k, vocab_size) - 1, None]
    kept = torch.where(probs >= edge, probs, 0.0)
    close(sgl_kernel.top_k_renorm_prob(probs, top_k), kept / kept.sum(dim=-1, keepdim=True))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("rows", "vocab_size"), RENORM_SIZES)
def test_top_p_renorm(rows, vocab_size, top_p, device, backend):
    probs = torch.rand(rows, vocab_size, device=device)
    probs /= probs.sum(dim=-1, keepdim=True)
    ordered, order = probs.sort(dim=-1)
    kept = torch.zeros_like(probs).scatter_(1, order, ordered * (ordered.cumsum(dim=-1) >= 1 - top_p))
    close(sgl_kernel.top_p_renorm_prob(probs, top_p), kept / kept.sum(dim=-1, keepdim=True))


def test_renorms_of_given_rows(device, backend):
    """top_k of 1 for all rows, and one a row; top_p one a row; a row without any mass stays so."""
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], device=device)
    assert sgl_kernel.top_k_renorm_probs(probs, 1).tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    result = sgl_kernel.top_k_renorm_probs(probs, torch.tensor([2, 4], dtype=torch.int32, device=device))
    close(result.sum(dim=-1), torch.ones(2, device=device), 1e-6)
    assert int(result[0].count_nonzero()) == 2
    close(result[1], probs[1], 1e-6)
    probs[1] = 0.0
    result = sgl_kernel.top_p_renorm_probs(probs, torch.tensor([0.5, 0.95], device=device))
    close(result, torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], device=device), 1e-6)
