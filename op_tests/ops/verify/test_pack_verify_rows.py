"""pack_verify_rows against its reference: ragged requests, requests without rows, too little room, malformed counts."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep, to_device

PATH = "verify.pack_verify_rows"
# (batch, nodes)
SHAPES = [(7, 8), (1, 1), (3, 5), (2, 130), (130, 3)]


def make(batch_size, num_nodes, *, slack=5, with_positions=False, dtype=torch.int32, device="cpu"):
    """Ragged requests; the drafts after num_tokens are -1."""
    counts = torch.randint(0, num_nodes + 1, (batch_size,))
    tokens = torch.randint(0, 2**31 - 1, (batch_size, num_nodes))
    tokens[torch.arange(num_nodes) >= counts[:, None]] = -1
    values = {"draft_tokens": tokens, "num_tokens": counts}
    if with_positions:
        values["positions"] = torch.randint(0, 2**31 - 1, (batch_size, num_nodes))
    else:
        values["seq_lens"] = torch.randint(0, 5000, (batch_size,))
    values = {name: value.to(device=device, dtype=dtype) for name, value in values.items()}
    return values | {"max_rows": int(counts.sum()) + slack}


def ahead_of_time_cases():
    yield "int32", make(3, 8)
    yield "int64 with positions", make(3, 8, with_positions=True, dtype=torch.int64)


size_sweep = sweep(lambda batch_size, slack: make(batch_size, 8, slack=slack), (0, 1, 500))


@pytest.mark.cross
@pytest.mark.parametrize("with_positions", [False, True], ids=["chain", "positions"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtype, with_positions, device):
    values = make(*shape, with_positions=with_positions, dtype=dtype, device=device)
    output, _ = check_operation(PATH, values, case=f"{shape} {dtype}")
    assert output.overflow.item() == 0 and output.num_rows.item() == values["num_tokens"].sum()


def test_rows_in_words(device):
    """A chain of three after 10 tokens, a request that prefills, and a root alone after 7."""
    values = {
        "draft_tokens": torch.tensor([[5, 6, 7], [-1, -1, -1], [9, -1, -1]]),
        "num_tokens": torch.tensor([3, 0, 1]),
        "seq_lens": torch.tensor([10, 4, 7]),
    }
    output, _ = check_operation(PATH, to_device(values, device) | {"max_rows": 6})
    assert output.input_ids.tolist() == [5, 6, 7, 9, 0, 0]
    assert output.positions.tolist() == [10, 11, 12, 7, 0, 0]
    assert output.row_to_batch.tolist() == [0, 0, 0, 2, -1, -1]
    assert output.row_to_node.tolist() == [0, 1, 2, 0, -1, -1]
    assert output.cu_seqlens.tolist() == [0, 3, 3, 4]
    assert output.num_rows.tolist() == [4] and output.overflow.tolist() == [0]


def test_every_node_of_a_tree_finds_its_way_back(device):
    """A tree's positions are its own; what is read at row_to_batch and row_to_node is what was packed."""
    values = make(5, 9, with_positions=True, dtype=torch.int64, device=device)
    output = eagle_kernels.raw.pack_verify_rows(**values)
    batch, node = output.row_to_batch.long(), output.row_to_node.long()
    used = torch.arange(values["max_rows"], device=device) < output.num_rows
    assert torch.equal(values["draft_tokens"][batch, node][used], output.input_ids[used])
    assert torch.equal(values["positions"][batch, node][used], output.positions[used])
    assert torch.equal(torch.bincount(batch[used], minlength=5), values["num_tokens"])


def test_positions_win_over_lengths(device):
    values = make(3, 4, with_positions=True, device=device)
    lengths = torch.full((3,), 77, dtype=torch.int32, device=device)
    check_operation(PATH, values | {"seq_lens": lengths}, case="both")


@pytest.mark.parametrize("max_rows", [0, 1, 4, 9, 10])
def test_rows_past_the_room_are_cut_off_the_end(max_rows, device):
    values = make(4, 4, device=device)
    values["num_tokens"].copy_(torch.tensor([3, 0, 4, 3]))
    whole = eagle_kernels.raw.pack_verify_rows(**values | {"max_rows": 10})
    output, _ = check_operation(PATH, values | {"max_rows": max_rows}, case=str(max_rows))
    for name in ("input_ids", "positions", "row_to_batch", "row_to_node"):
        assert torch.equal(getattr(output, name), getattr(whole, name)[:max_rows]), name
    assert output.cu_seqlens.tolist() == [min(bound, max_rows) for bound in (0, 3, 3, 7, 10)]
    assert output.num_rows.item() == max_rows and output.overflow.item() == (0 if max_rows == 10 else 10)


def test_requests_without_rows_leave_the_others_alone(device):
    values = make(5, 4, device=device)
    values["num_tokens"].copy_(torch.tensor([2, 4, 1, 3, 4]))
    values["max_rows"] = 14
    before = eagle_kernels.raw.pack_verify_rows(**values)
    values["num_tokens"][2:4] = 0
    output, _ = check_operation(PATH, values, case="dead")
    assert torch.equal(output.input_ids[:6], before.input_ids[:6])
    assert torch.equal(output.input_ids[6:10], before.input_ids[10:]) and (output.row_to_batch[10:] == -1).all()
