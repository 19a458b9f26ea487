"""SGLang's own tests of the ops that `integrations/sgl_kernel` offers, where they say what must come out: our code.

From its repository (test/registered/)
    spec/utils/test_build_eagle_tree_malformed.py          test_malformed_trees: every output, in every mask mode
    spec/utils/test_build_eagle_tree.py                    test_a_round_of_drafts_becomes_a_tree
    spec/utils/test_eagle_triton_pytorch_parity.py         test_stars_and_chains
    kernels/ops/speculative/test_eagle_utils.py            test_greedy_walk
    kernels/ops/speculative/test_speculative_sampling.py   test_sampled_walk, test_cdf_boundaries, test_chain_*
    kernels/ops/speculative/test_reject_sampling_block.py  test_chain_*
    kernels/ops/speculative/test_ngram_utils.py            test_reconstruct_the_worked_example

Not here, and why
    random numbers against a formula (trees, lists of KV slots, norms, rotary embedding, filters): beside the adapter's
        other tests, with the algorithms of its CUDA ops (oracles.py)
    thresholds (0, 0) as sgl-kernel/tests/speculative/test_speculative_sampling.py expects them: they are of the older
        rule (sglang-kernel 0.4.5), which accepts tokens of probability 0; 0.5.23 expects the opposite, as we do
    parity, "nontrivial_fanout": N candidates of depth 2 with depth = 1, which SGLang's own CUDA op refuses to take
    chain: coins by the caller (verify_chain draws its own), so a draft probability that rounding puts above 1 cannot
        be met with a coin just below 1; it is taken as it is there, p / q, not as 1
    gelu, *_sampling_from_probs, process_*, DFLASH, Domino, LiLiCorr, DSpark, topk1: not names of the adapter
"""

import pytest
import torch

import eagle_kernels
import eagle_kernels.integrations.sgl_kernel as sgl_kernel
from eagle_kernels.integrations.sgl_kernel import TreeMaskMode
from op_tests.integrations import oracles
from op_tests.integrations.buffers import build

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
    [[7.1127e-01, 2.8292e-01, 2.2995e-03, 1.7357e-03],
     [6.9142e-01, 1.2863e-02, 1.6873e-03, 1.1871e-03, 2.4787e-01, 1.8818e-02, 1.4204e-02, 9.2235e-04],
     [2.2971e-03, 1.6700e-06, 1.8737e-07, 8.3146e-08, 1.2771e-03, 2.4374e-04, 1.7832e-04, 1.1947e-05],
     [6.6438e-01, 2.6997e-02, 2.4236e-05, 4.0821e-06, 2.4402e-01, 2.8409e-03, 5.0935e-04, 2.9022e-04],
     [1.6178e-02, 2.0567e-03, 4.5892e-04, 3.0034e-05, 1.3023e-02, 5.0497e-04, 3.6371e-04, 8.7750e-05],
     [6.6420e-01, 1.0525e-04, 6.5864e-05, 1.2253e-06, 1.3019e-01, 1.0461e-01, 5.2083e-03, 1.6777e-03],
     [2.0103e-02, 6.7335e-03, 1.2625e-04, 1.0364e-05, 1.5142e-02, 7.0819e-04, 9.6595e-05, 8.7951e-05]],
    [[9.7476e-01, 2.2219e-02, 6.5031e-04, 1.3212e-04],
     [8.4832e-02, 6.6068e-02, 5.8304e-02, 5.7851e-02, 2.3616e-03, 1.1243e-03, 5.4368e-04, 2.7768e-04],
     [2.5286e-04, 1.5578e-04, 2.8817e-05, 1.2888e-05, 1.2834e-04, 2.5417e-06, 1.1279e-06, 1.6088e-08],
     [2.3263e-02, 2.0054e-02, 9.3990e-03, 2.7783e-03, 6.4156e-02, 5.5506e-04, 1.0429e-04, 9.7211e-05],
     [4.9950e-02, 5.0630e-03, 9.0068e-04, 3.3656e-04, 7.5817e-03, 8.5731e-04, 6.9972e-04, 6.0793e-04],
     [5.8608e-02, 1.8840e-03, 7.8535e-04, 4.4400e-04, 1.2185e-02, 2.0684e-03, 1.7418e-03, 1.4327e-03],
     [6.2455e-03, 6.1487e-03, 2.6862e-03, 1.8034e-03, 1.8590e-03, 1.6151e-03, 1.2481e-03, 3.6038e-04]],
]  # fmt: skip
TOKENS = [
    [[29896, 29906, 29900, 29945], [29889, 29974, 29945, 29900, 29974, 29922, 29930, 29958],
     [29889, 29974, 29930, 29945, 29974, 29922, 29930, 29958],
     [29946, 29945, 29953, 29906, 29896, 29945, 29900, 29906],
     [29896, 29945, 29906, 29953, 29896, 29945, 29906, 29946],
     [29946, 29974, 29945, 29930, 29889, 29922, 29974, 29930],
     [29974, 29946, 29930, 29922, 29889, 29974, 29945, 29922]],
    [[13, 2, 29871, 28956], [22550, 4136, 16492, 8439, 29871, 2, 3001, 13], [2, 13, 29906, 29946, 2, 13, 29871, 259],
     [29871, 2, 29901, 29889, 29871, 2, 395, 259], [29901, 29871, 2, 29889, 3001, 1234, 7146, 2186],
     [29941, 29906, 2, 29946, 29871, 450, 319, 14990], [29946, 29941, 2, 29906, 29871, 2, 3001, 13]],
]  # fmt: skip
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
WALKED = ([3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18], [[0, 3, 4, 5], [6, 10, 11, -1]], [3, 2])


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


# trees out of masks


def test_reconstruct_the_worked_example(device, backend):
    mask = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1], dtype=torch.bool, device=device)
    outputs = [torch.empty(shape, dtype=torch.int64, device=device) for shape in ((4,), (1, 4), (1, 4), (1, 4))]
    sgl_kernel.reconstruct_indices_from_tree_mask(mask, torch.tensor([12], device=device), *outputs, 1, 4)
    assert [output.tolist() for output in outputs] == [
        [12, 13, 13, 14], [[0, 1, 2, 3]], [[1, -1, 3, -1]], [[-1, 2, -1, -1]],
    ]  # fmt: skip
