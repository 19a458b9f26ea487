"""The drop-in for `sgl_kernel`: its signatures, what it writes and what it leaves, against its algorithms in Python."""

import inspect

import pytest
import torch

import eagle_kernels.integrations.sgl_kernel as sgl_kernel
from eagle_kernels.integrations.sgl_kernel import TreeMaskMode
from op_tests.harness import Guarded, replay_in_graph
from op_tests.harness.trees import random_drafts
from op_tests.integrations.buffers import BITPACKING, FULL_MASK, QLEN_ONLY, build
from op_tests.integrations.oracles import oracle_build, oracle_mask, oracle_reconstruct, oracle_sample, oracle_verify

# (batch, topk, depth, nodes): the root alone, one level, chains, stars, word borders
CASES = [
    ((2, 3, 1, 1), FULL_MASK), ((2, 4, 1, 4), QLEN_ONLY), ((3, 1, 4, 5), BITPACKING), ((2, 8, 1, 9), FULL_MASK),
    ((2, 4, 3, 8), BITPACKING), ((3, 2, 3, 7), QLEN_ONLY), ((1, 4, 4, 16), BITPACKING), ((1, 4, 4, 17), BITPACKING),
    ((2, 4, 3, 32), BITPACKING), ((1, 8, 5, 33), QLEN_ONLY), ((1, 8, 4, 64), FULL_MASK), ((1, 8, 5, 100), QLEN_ONLY),
]  # fmt: skip


# building


def make_drafts(batch_size, topk, depth, num_nodes, device, dtype=torch.int64):
    parent_list, selected_index, _ = random_drafts(batch_size, topk, depth, num_nodes)
    drafts = (parent_list, selected_index, torch.randint(0, 20, (batch_size,)))
    return [tensor.to(device=device, dtype=dtype) for tensor in drafts]


def check_build(drafts, topk, depth, num_nodes, mode, device):
    """Holds the trees of drafts against those of SGLang's algorithm; returns positions and links."""
    mask, positions, index, *links = build([part.to(device) for part in drafts], topk, depth, num_nodes, mode, device)
    rows, *expected = oracle_build(*drafts, topk, depth, num_nodes)
    assert mask.tolist() == oracle_mask(rows, drafts[2], num_nodes, mode, fill=True)
    assert [positions.tolist(), *(link.tolist() for link in links)] == expected
    assert index.flatten().tolist() == list(range(index.numel()))
    return positions, *links


BUILDS = [*((*case, torch.int64) for case in CASES), ((2, 4, 3, 8), QLEN_ONLY, torch.int32)]


@pytest.mark.parametrize(("shape", "mode", "dtype"), BUILDS, ids=str)
def test_build(shape, mode, dtype, device, backend):
    check_build(make_drafts(*shape, device, dtype), *shape[1:], mode, device)


@pytest.mark.parametrize("width", [0, 1, 6])
def test_one_level_needs_no_parents(width, device, backend):
    _, selected_index, seq_lens = make_drafts(2, 5, 1, 4, device)
    parent_list = torch.full((2, width), 2**40, device=device)  # not read
    result = build([parent_list, selected_index, seq_lens], 5, 1, 4, QLEN_ONLY, device)
    assert result[3].tolist() == [[1, -1, -1, -1]] * 2
    assert result[4].tolist() == [[-1, 2, 3, -1]] * 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
@pytest.mark.parametrize("mode", TreeMaskMode, ids=str)
def test_the_mask_is_bytes_in_a_buffer_that_may_be_longer(mode, dtype, device, backend):
    """SGLang hands over graph buffers for its longest batch; what lies behind the batch's own cells stays."""
    drafts = make_drafts(2, 4, 3, 8, device)
    expected = build(drafts, 4, 3, 8, mode, device)
    fill = 1 if dtype == torch.bool or mode == FULL_MASK else 85
    buffer = torch.full((4096,), fill, dtype=torch.uint8, device=device)
    positions = torch.full((64,), -7, device=device)
    links = torch.empty(3, 2, 8, dtype=torch.int64, device=device)
    mask = buffer.view(dtype) if dtype != torch.bool else buffer.bool()
    sgl_kernel.build_tree_kernel_efficient(*drafts, mask, positions, *links, 4, 3, 8, mode)
    written = mask.view(torch.uint8)
    size = expected[0].numel()
    assert written[:size].tolist() == expected[0].view(torch.uint8).tolist()
    assert (written[size:] == fill).all()
    assert torch.equal(positions[:16], expected[1]) and (positions[16:] == -7).all()
    for got, want in zip(links, expected[2:]):
        assert torch.equal(got, want)


def test_the_kernel_leaves_the_prefix_alone(device, monkeypatch):
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "triton")
    drafts = make_drafts(3, 4, 3, 8, device)
    mask = torch.zeros(8 * int(drafts[2].sum()) + 3 * 64, dtype=torch.bool, device=device)
    links = torch.empty(3, 3, 8, dtype=torch.int64, device=device)
    sgl_kernel.build_tree_kernel_efficient(*drafts, mask, mask.new_empty(24, dtype=torch.int64), *links, 4, 3, 8, 0)
    rows, *_ = oracle_build(*drafts, 4, 3, 8)
    assert mask.tolist() == oracle_mask(rows, drafts[2], 8, FULL_MASK, fill=False)


MALFORMED = {  # upstream walks these for ever, or past the end of a row
    "cyclic": lambda parents, kept: parents.copy_(torch.arange(parents.shape[1]).flip(0).expand_as(parents)),
    "parents out of range": lambda parents, kept: parents.fill_(2**40),
    "ids out of range": lambda parents, kept: kept[:, -3:].fill_(2**40),
    "negative ids": lambda parents, kept: kept[:, ::2].fill_(-1),
    "one id everywhere": lambda parents, kept: kept.fill_(5),
    "descending": lambda parents, kept: kept.copy_(kept.flip(1)),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_trees_end(fault, device, backend):
    drafts = make_drafts(2, 4, 3, 16, "cpu")
    MALFORMED[fault](drafts[0], drafts[1])
    check_build(drafts, 4, 3, 16, QLEN_ONLY, device)


@pytest.mark.parametrize(("shape", "mode"), [case for case in CASES if case[0][3] in (8, 17, 64, 100)], ids=str)
def test_selections_in_any_order(shape, mode, device, backend):
    """Sound trees whose nodes stand in any order, so that links lead backwards too: the same trees for all that."""
    parents, kept, seq_lens = make_drafts(*shape, "cpu")
    drafts = (parents, kept[:, torch.randperm(shape[3] - 1)], seq_lens)
    positions, next_token, _ = check_build(drafts, *shape[1:], mode, device)
    assert any(0 <= child < node for row in next_token.tolist() for node, child in enumerate(row))
    sound = oracle_build(parents, kept, seq_lens, *shape[1:])
    assert sorted(positions.tolist()) == sorted(sound[1])


# verifying


def make_verify(batch_size, topk, depth, num_nodes, device, spec_steps, is_shuffled=False):
    parent_list, selected_index, tokens = random_drafts(batch_size, topk, depth, num_nodes, vocab_size=9)
    if is_shuffled:
        order = torch.randperm(num_nodes - 1)
        selected_index, tokens = selected_index[:, order], tokens[:, order]
    candidates = torch.cat([torch.randint(9, (batch_size, 1)), tokens], dim=1)
    *_, first, sibling = oracle_build(parent_list, selected_index, torch.zeros(batch_size), topk, depth, num_nodes)
    index = torch.arange(batch_size * num_nodes).view(batch_size, num_nodes)
    target_predict = torch.randint(9, (batch_size, num_nodes))
    for request in range(batch_size):  # mostly follow some child
        for node in range(num_nodes):
            child = first[request][node]
            while child >= 0 and torch.rand(()) < 0.5 and sibling[request][child] >= 0:
                child = sibling[request][child]
            if child >= 0 and torch.rand(()) < 0.8:
                target_predict[request, node] = candidates[request, child]
    inputs = (candidates, index, torch.tensor(first), torch.tensor(sibling), target_predict)
    return [tensor.to(device) for tensor in inputs], spec_steps + 1


@pytest.mark.parametrize(
    ("shape", "spec_steps", "fill", "is_shuffled"),
    [
        ((3, 1, 1, 1), 0, "garbage", False),
        ((2, 1, 5, 6), 5, "zeros", False),
        ((3, 1, 5, 6), 2, "garbage", True),
        ((2, 8, 1, 9), 1, "minus one", False),
        ((4, 4, 3, 12), 3, "garbage", True),
        ((2, 8, 5, 64), 5, "zeros", False),
        ((2, 8, 5, 64), 5, "zeros", True),
    ],
    ids=str,
)
def test_verify(shape, spec_steps, fill, is_shuffled, device, backend):
    """Unvisited predicts keep what the caller put there, in the whole buffer that SGLang makes one longer.

    is_shuffled: nodes stand in any order, so that links lead backwards too.
    """
    inputs, width = make_verify(*shape, device, spec_steps, is_shuffled)
    size = inputs[0].numel() + 1
    before = {"zeros": torch.zeros(size), "minus one": torch.full((size,), -1), "garbage": torch.arange(size) + 10**6}
    predicts = before[fill].to(device=device, dtype=torch.int32)
    accept_index = torch.full((shape[0], width), -1, dtype=torch.int32, device=device)
    accept_token_num = torch.full((shape[0],), 77, dtype=torch.int32, device=device)
    expected, path = predicts.tolist(), accept_index.tolist()
    counts = oracle_verify(expected, path, *(tensor.tolist() for tensor in inputs))
    assert sgl_kernel.verify_tree_greedy(predicts, accept_index, accept_token_num, *inputs) is None
    assert predicts.tolist() == expected
    assert accept_index.tolist() == path
    assert accept_token_num.tolist() == counts


CYCLES = {  # first children, next siblings, the accepted path; upstream accepts a node again, or walks for ever
    "a child above": ([2, 2, 1, -1], [-1, -1, -1, -1], [0, 2, 1]),
    "its own child": ([3, -1, -1, 3], [-1, -1, -1, -1], [0, 3]),
    "siblings in a ring": ([3, -1, -1, -1], [-1, 3, 1, 2], [0]),
    "its own sibling": ([2, -1, -1, -1], [-1, -1, 2, -1], [0]),
    "the root below": ([1, 0, -1, -1], [-1, -1, -1, -1], [0, 1]),
}


@pytest.mark.parametrize("name", CYCLES)
def test_walks_end_at_a_node_that_they_met(name, device, backend):
    first, sibling, path = CYCLES[name]
    tokens = [[5, 5, 5, 5]] if len(path) > 1 else [[5, 6, 6, 6]]
    tree = [torch.tensor(data, device=device) for data in (tokens, [[0, 1, 2, 3]], [first], [sibling])]
    probs = torch.zeros(1, 4, 9, device=device)
    probs[:, :, 5] = 1.0
    for verify, values in (
        (sgl_kernel.verify_tree_greedy, [torch.full((1, 4), 5, device=device)]),
        (
            sgl_kernel.tree_speculative_sampling_target_only,
            [torch.full((1, 4), 0.5, device=device), torch.full((1,), 0.5, device=device), probs, None],
        ),
    ):
        outputs = [torch.full(shape, -1, dtype=torch.int32, device=device) for shape in ((4,), (1, 6), (1,))]
        verify(*outputs, *tree, *values)
        assert outputs[1].tolist() == [path + [-1] * (6 - len(path))]
        assert outputs[2].tolist() == [len(path) - 1]
        assert outputs[0].tolist() == [5 if node in path else -1 for node in range(4)]


@pytest.mark.parametrize("links", ["cyclic", "out of range"])
def test_walks_along_malformed_links_end(links, device, backend):
    inputs, _ = make_verify(2, 4, 3, 8, "cpu", 3)
    inputs[2].fill_(0 if links == "cyclic" else 2**40)
    inputs[3].copy_(torch.arange(8).expand(2, 8))
    predicts, accept_index, count = (torch.zeros(*shape, dtype=torch.int32) for shape in ((16,), (2, 4), (2,)))
    outputs = [tensor.to(device) for tensor in (predicts, accept_index, count)]
    sgl_kernel.verify_tree_greedy(*outputs, *(tensor.to(device) for tensor in inputs))
    assert outputs[2].tolist() == [0, 0] and outputs[1].tolist() == [[0, -1, -1, -1], [8, -1, -1, -1]]


# sampling


def make_sample(batch_size, topk, depth, num_nodes, device, spec_steps, is_shuffled, vocab_size=9):
    """Probabilities and coins on a dyadic grid, on which all arithmetic is exact; rows mostly favour some child."""
    shape = (batch_size, topk, depth, num_nodes)
    (*tree, target_predict), width = make_verify(*shape, "cpu", spec_steps, is_shuffled)
    counts = torch.randint(4, (batch_size, num_nodes, vocab_size)).float()
    counts.scatter_add_(2, target_predict[..., None], 64 - counts.sum(2, keepdim=True))
    coins = (torch.randint(64, (batch_size, num_nodes)) / 64, torch.randint(64, (batch_size,)) / 64)
    return [tensor.to(device) for tensor in (*tree, *coins, counts / 64)], width


@pytest.mark.parametrize(
    ("shape", "spec_steps", "thresholds", "is_shuffled"),
    [
        ((3, 1, 1, 1), 0, (1.0, 1.0), False),
        ((3, 1, 5, 6), 5, (1.0, 1.0), True),
        ((12, 1, 5, 6), 2, (1.0, 0.5), False),
        ((4, 8, 1, 9), 1, (1.0, 1.0), False),
        ((6, 4, 3, 12), 3, (1.0, 1.0), False),
        ((6, 4, 3, 12), 3, (1.0, 1.0), True),
        ((24, 4, 3, 12), 3, (0.25, 1.0), False),
        ((24, 4, 3, 12), 3, (0.9, 0.5), False),
        ((6, 4, 3, 12), 2, (0.0, 0.0), False),
    ],
    ids=str,
)
def test_sample(shape, spec_steps, thresholds, is_shuffled, device, backend):
    """Unvisited predicts keep what the caller put there; draft_probs is neither read nor written."""
    (*tree, coins, final_coins, target_probs), width = make_sample(*shape, device, spec_steps, is_shuffled)
    predicts = torch.arange(10**6, 10**6 + coins.numel() + 1, dtype=torch.int32, device=device)
    accept_index = torch.full((shape[0], width), -1, dtype=torch.int32, device=device)
    accept_token_num = torch.full((shape[0],), 77, dtype=torch.int32, device=device)
    draft_probs = torch.full_like(target_probs, 0.5)
    expected, path = predicts.tolist(), accept_index.tolist()
    lists = [tensor.tolist() for tensor in tree]
    counts = oracle_sample(
        (expected, path), lists, coins.tolist(), final_coins.tolist(), target_probs.tolist(), *thresholds
    )
    outputs = (predicts, accept_index, accept_token_num)
    result = sgl_kernel.tree_speculative_sampling_target_only(
        *outputs, *tree, coins, final_coins, target_probs, draft_probs, *thresholds, True
    )
    assert result is None
    assert predicts.tolist() == expected
    assert accept_index.tolist() == path
    assert accept_token_num.tolist() == counts
    assert shape[3] == 1 or sum(counts) > 0
    assert (draft_probs == 0.5).all()


# masks to links


def random_masks(batch_size, num_nodes, device):
    """Ancestor masks of random trees; a node without parent starts another root."""
    mask = torch.zeros(batch_size, num_nodes, num_nodes, dtype=torch.bool)
    for request in range(batch_size):
        for node in range(num_nodes):
            parent = int(torch.randint(-1, node, ())) if node else -1
            if parent >= 0:
                mask[request, node] = mask[request, parent]
            mask[request, node, node] = True
    return mask.to(device)


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 33), (1, 65)], ids=str)
def test_reconstruct(shape, device, backend):
    batch_size, num_nodes = shape
    dtype = torch.bool if batch_size > 1 else torch.uint8
    mask, seq_lens = random_masks(*shape, device), torch.randint(0, 50, (batch_size + 1,), device=device)
    positions = Guarded((batch_size * num_nodes,), torch.int64, device)
    links = [Guarded(shape, torch.int64, device) for _ in range(3)]
    buffers = [positions, *links]
    longer = torch.cat([mask.flatten().to(dtype), torch.ones(5, dtype=dtype, device=device)])
    sgl_kernel.reconstruct_indices_from_tree_mask(
        longer, seq_lens, *(buffer.tensor for buffer in buffers), batch_size, num_nodes
    )
    for buffer in buffers:
        buffer.check("reconstruct_indices_from_tree_mask", "an output")
    positions, index, *links = (buffer.tensor for buffer in buffers)
    assert (positions.tolist(), *(link.tolist() for link in links)) == oracle_reconstruct(mask, seq_lens[:batch_size])
    assert index.flatten().tolist() == list(range(batch_size * num_nodes))


# the interface

SIGNATURES = {
    "build_tree_kernel_efficient": "parent_list selected_index verified_seq_len tree_mask positions retrive_index "
    "retrive_next_token retrive_next_sibling topk depth draft_token_num tree_mask_mode",
    "verify_tree_greedy": "predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
    "retrive_next_sibling target_predict",
    "tree_speculative_sampling_target_only": "predicts accept_index accept_token_num candidates retrive_index "
    "retrive_next_token retrive_next_sibling uniform_samples uniform_samples_for_final_sampling target_probs "
    "draft_probs threshold_single threshold_acc deterministic",
    "reconstruct_indices_from_tree_mask": "tree_mask verified_seq_len positions retrive_index retrive_next_token "
    "retrive_next_sibling batch_size draft_token_num",
}
DEFAULTS = {"threshold_single": 1.0, "threshold_acc": 1.0, "deterministic": True}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_order_of_arguments(name):
    parameters = inspect.signature(getattr(sgl_kernel, name)).parameters.values()
    assert [p.name for p in parameters] == SIGNATURES[name].split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default == DEFAULTS.get(p.name, p.empty) for p in parameters)


def test_the_numbers_of_the_mask_modes():
    assert [(mode.name, int(mode)) for mode in TreeMaskMode] == [
        ("FULL_MASK", 0), ("QLEN_ONLY", 1), ("QLEN_ONLY_BITPACKING", 2),
    ]  # fmt: skip


SHORT = {
    "build_tree_kernel_efficient": "tree_mask positions retrive_index retrive_next_token retrive_next_sibling",
    "verify_tree_greedy": "predicts",
    "tree_speculative_sampling_target_only": "predicts",
    "reconstruct_indices_from_tree_mask": "tree_mask verified_seq_len positions retrive_index retrive_next_token "
    "retrive_next_sibling",
}


@pytest.mark.parametrize(("name", "buffer"), [(name, each) for name, all in SHORT.items() for each in all.split()])
def test_a_short_buffer_is_named(name, buffer, device):
    drafts, (tree, _) = make_drafts(2, 4, 3, 8, device), make_sample(2, 4, 3, 8, device, 3, False)
    values = dict(zip(("parent_list", "selected_index", "verified_seq_len"), drafts))
    names = "candidates retrive_index retrive_next_token retrive_next_sibling uniform_samples"
    values |= dict(zip((*names.split(), "uniform_samples_for_final_sampling", "target_probs"), tree))
    values |= {"topk": 4, "depth": 3, "draft_token_num": 8, "tree_mask_mode": 1, "batch_size": 2, "draft_probs": None}
    values |= {"tree_mask": torch.ones(128, dtype=torch.bool, device=device)}
    values |= {"positions": torch.zeros(16, dtype=torch.int64, device=device)}
    values |= {"target_predict": torch.zeros(2, 8, dtype=torch.int64, device=device)}
    for output, shape in (("predicts", (16,)), ("accept_index", (2, 4)), ("accept_token_num", (2,))):
        values[output] = torch.zeros(shape, dtype=torch.int32, device=device)
    values = {key: values[key] for key in SIGNATURES[name].split() if key in values}
    getattr(sgl_kernel, name)(**values)
    values[buffer] = values[buffer][:1]
    with pytest.raises(ValueError, match=f"sgl_kernel.{name}: {buffer} must hold at least [0-9]+ elements of"):
        getattr(sgl_kernel, name)(**values)


def test_an_empty_batch(device, backend):
    drafts = [torch.empty(0, *shape, dtype=torch.int64, device=device) for shape in ((9,), (7,), ())]
    assert all(tensor.numel() == 0 for tensor in build(drafts, 4, 3, 8, QLEN_ONLY, device))


@pytest.mark.gpu
def test_captured_without_waiting(device):
    """One graph around all four ops: none of them reads a tensor on the host."""
    drafts = make_drafts(4, 4, 3, 8, device)
    inputs, width = make_verify(4, 4, 3, 8, device, 3)
    mask = torch.ones(4 * 64, dtype=torch.bool, device=device)
    positions, links = torch.empty(32, dtype=torch.int64, device=device), torch.empty(3, 4, 8, device=device).long()
    verdict = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((32,), (4, width), (4,))]
    again = [torch.empty_like(positions), *torch.empty_like(links)]
    sampled = [torch.zeros_like(tensor) for tensor in verdict]
    target_probs = torch.nn.functional.one_hot(inputs[4], 9).float()
    coins = (torch.rand(4, 8, device=device), torch.rand(4, device=device))

    def run():
        sgl_kernel.build_tree_kernel_efficient(*drafts, mask, positions, *links, 4, 3, 8, 1)
        sgl_kernel.reconstruct_indices_from_tree_mask(mask, drafts[2], *again, 4, 8)
        sgl_kernel.verify_tree_greedy(*verdict, *inputs)
        sgl_kernel.tree_speculative_sampling_target_only(*sampled, *inputs[:4], *coins, target_probs, None)

    replay_in_graph(run)
    for got, want in zip(again, (positions, *links)):
        assert torch.equal(got, want)
    assert verdict[1][:, 0].tolist() == [0, 8, 16, 24]
    for got, want in zip(sampled, verdict):  # rows that are decided are sampled as greedily
        assert torch.equal(got, want)
