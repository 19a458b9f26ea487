"""Rules that only a GPU can prove: no call waits for the device, offsets past 2^31, graphs whose rows die."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import assert_equal, to_device
from op_tests.harness.ahead_of_time import PATHS, module_of_tests
from op_tests.harness.cases import as_tuple, case_of_each_mode, copied, module_of_op
from op_tests.ops.tree.cases import make_tree

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", PATHS)
def test_no_op_waits_for_the_device(path, device):
    """The first call compiles, the second is planned, the third replayed; the public function goes its own way."""
    name = path.rpartition(".")[2]
    _, values = next(iter(module_of_tests(path).ahead_of_time_cases()))
    values = to_device(values, device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            getattr(eagle_kernels.raw, name)(**values)
        getattr(eagle_kernels, name)(**values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_kernels_wait_for_the_one_before(in_graph, device):
    """Our kernels start while the one before ends: what it wrote must be seen, and what it reads must stay.

    Each round packs another mask into the same buffer and unpacks it from there, after a kernel of torch and before
    one; all rounds are queued behind a kernel that takes long, so that they follow each other closely.
    """
    masks = (torch.rand(64, 8, 64, 64, device=device) < 0.5).unbind()
    cells, packed = torch.empty_like(masks[0]), torch.empty(8, 64, 1, dtype=torch.int64, device=device)
    unpacked, results = torch.empty_like(cells), torch.zeros(64, *cells.shape, dtype=torch.bool, device=device)

    def rounds():
        for mask, result in zip(masks, results):
            cells.copy_(mask)
            eagle_kernels.raw.pack_tree_mask(cells, tree_mask_mode="qlen_only", out=packed)
            eagle_kernels.raw.unpack_tree_mask(packed, tree_mask_mode="qlen_only", out=unpacked)
            result.copy_(unpacked)

    rounds()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rounds()
        rounds = graph.replay
    results.zero_()
    torch.cuda._sleep(10_000_000)
    rounds()
    assert_equal("pack_tree_mask", "chained", "masks", results, torch.stack(masks))


def test_full_masks_past_2_31_cells(device):
    """Two requests of 2^31 cells each and a short one behind them."""
    small = make_tree(3, 8, 5, 64, device=device)
    values = small | {
        "seq_lens": torch.tensor([2**25, 2**25, 5], device=device),
        "seq_lens_sum": 2**26 + 5,
        "tree_mask_mode": "full_mask",
    }
    mask = eagle_kernels.raw.build_tree(**values).tree_mask
    block = eagle_kernels.raw.build_tree(**small | {"tree_mask_mode": "qlen_only"}).tree_mask
    start = 0
    for request, seq_len in enumerate((2**25, 2**25, 5)):
        rows = mask[start : start + 64 * (seq_len + 64)].view(64, seq_len + 64)
        assert_equal("build_tree", "past 2^31", f"tree of {request}", rows[:, seq_len:], block[request])
        assert all(bool(row[:seq_len].all()) for row in rows)
        start += rows.numel()
    assert start == mask.numel()


def test_logits_past_2_31_elements(device):
    """The last request of a batch whose logits do not fit 31 bits is as it is alone."""
    batch_size, num_nodes, vocab_size = 264, 64, 128256
    tree = eagle_kernels.raw.build_tree(**make_tree(batch_size, 8, 5, num_nodes, device=device))
    nodes = (tree.draft_tokens.view(batch_size, num_nodes), tree.retrieve_index)
    links = (*nodes, tree.retrieve_next_token, tree.retrieve_next_sibling)
    predict = torch.randint(97, (batch_size, num_nodes), device=device)
    # the target follows the first children, so that walks are as deep as their trees
    child = tree.retrieve_next_token.clamp(min=0)
    predict = torch.where(tree.retrieve_next_token >= 0, nodes[0].gather(1, child), predict)
    logits = torch.zeros(batch_size * num_nodes, vocab_size, dtype=torch.bfloat16, device=device)
    assert logits.numel() > 2**31
    logits.scatter_(1, predict.view(-1, 1), 1.0)
    result = eagle_kernels.raw.verify_tree_greedy(*links, target_logits=logits, spec_steps=5)
    expected = eagle_kernels.raw.verify_tree_greedy(*links, target_predict=predict, spec_steps=5)
    for name in result._fields:
        assert_equal("verify_tree_greedy", "past 2^31", name, getattr(result, name), getattr(expected, name))

    beams = logits[: batch_size * num_nodes // 8 * 8]
    state = {"scores": torch.zeros(len(beams) // 8, 8, device=device)}
    state["ancestors"] = torch.zeros(len(beams) // 8, 8, 1, dtype=torch.int64, device=device)
    whole = eagle_kernels.raw.select_top_k_tokens(beams, **state, topk=8, level=1)
    alone = {name: tensor[-1:] for name, tensor in state.items()}
    last = eagle_kernels.raw.select_top_k_tokens(beams[-8:].clone(), **alone, topk=8, level=1)
    for name in ("scores", "tokens", "parents", "candidate_scores", "candidate_tokens"):
        assert_equal("select_top_k_tokens", "past 2^31", name, getattr(whole, name)[-1:], getattr(last, name))


def test_one_graph_serves_any_number_of_live_rows(device):
    """Captured with eight live rows, replayed with fewer: live rows are as eager, dead ones are empty."""
    values = make_tree(8, 4, 3, 12, device=device)
    predict = torch.randint(97, (8, 12), device=device)
    logits = torch.randn(96, 200, device=device)

    def step():
        tree = eagle_kernels.raw.build_tree(**values)
        links = (tree.draft_tokens.view(8, 12), retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling)
        ids = eagle_kernels.raw.verify_tree_greedy(*links, target_predict=predict, spec_steps=3)
        argmax = eagle_kernels.raw.verify_tree_greedy(*links, target_logits=logits, spec_steps=3)
        return ids, argmax, eagle_kernels.raw.verify_commit(*argmax, values["seq_lens"])

    retrieve_index = torch.arange(96, device=device).view(8, 12)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for num_live in (8, 7, 3, 1, 0):
        retrieve_index.copy_(torch.arange(96, device=device).view(8, 12))
        retrieve_index[num_live:] = -1
        values["seq_lens"].random_(1, 40)
        values["seq_lens"][num_live:] = 0
        logits.normal_()
        graph.replay()
        eager = step()
        for got, want in zip(captured, eager):
            for name in got._fields:
                assert_equal(type(got).__name__, f"{num_live} live rows", name, getattr(got, name), getattr(want, name))
        assert (captured[1].accept_index[num_live:] == -1).all() and not captured[2].accept_lengths[num_live:].any()


@pytest.mark.parametrize("path", PATHS)
def test_repeated_runs_have_equal_bits(path, device):
    name = path.rpartition(".")[2]
    for values in case_of_each_mode(path):
        values, expected = to_device(values, device), None
        for _ in range(30):
            given = copied(values)
            output = as_tuple(getattr(eagle_kernels.raw, name)(**given))
            found = [*output, *(given[field] for field in getattr(module_of_op(path), "MUTATES", ()))]
            expected = expected or found
            for place, (got, want) in enumerate(zip(found, expected)):
                assert_equal(name, "again", f"{place}", got, want)
