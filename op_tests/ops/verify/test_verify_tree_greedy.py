"""verify_tree_greedy against its reference, from ids and from logits, on sound and malformed trees."""

from __future__ import annotations

import pytest
import torch

import eagle_kernels
from op_tests.harness import assert_only_launches, check_operation, check_registration, replay_in_graph, to_device
from op_tests.ops.verify.cases import MALFORMED, follow_tree, make_tree

SHAPES = [(1, 1, 1, 1), (3, 1, 4, 5), (2, 8, 1, 9), (4, 4, 3, 8), (2, 8, 5, 64), (1, 8, 5, 256)]
PATH = "verify.verify_tree_greedy"


def make(batch_size, topk, spec_steps, num_nodes, *, source="ids", vocab_size=97, device="cpu", dtype=torch.int64):
    links, _ = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size, device=device, dtype=dtype)
    logits = follow_tree(links, vocab_size)
    if source == "ids":
        target = {"target_predict": logits.argmax(-1).view(batch_size, num_nodes).to(dtype)}
    else:
        target = {"target_logits": logits.to(source)}
    return {**links, **target, "spec_steps": spec_steps}


def ahead_of_time_cases():
    yield "ids", make(2, 8, 5, 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield f"logits {dtype}", make(2, 8, 5, 64, source=dtype)


def size_sweep():
    for batch_size in (1, 2, 3, 16, 17, 64, 257):
        yield make(batch_size, 4, 3, 8, source=torch.float16)


@pytest.mark.parametrize("source", ["ids", torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, source, device):
    output, _ = check_operation(PATH, make(*shape, source=source, device=device), case=f"{shape} {source}")
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


def test_int32_inputs(device):
    check_operation(PATH, make(3, 4, 3, 8, dtype=torch.int32, device=device), case="int32")


def test_row_strided_logits_and_block_borders(device):
    """A slice of wider rows; more tokens than one block, with equal maxima on both sides of a border."""
    values = make(2, 4, 3, 8, source=torch.float32, vocab_size=2500, device=device)
    wide = torch.full((16, 3000), 100.0, device=device)
    wide[:, :2500] = values["target_logits"]
    wide[:, 1023:1026] = 50.0
    output, _ = check_operation(PATH, {**values, "target_logits": wide[:, :2500]}, case="strided")
    assert output.predicts.view(2, 8)[:, 0].tolist() == [1023, 1023]


def test_all_equal_logits_take_the_lowest_id(device):
    values = make(2, 4, 3, 8, source=torch.float32, device=device)
    values["target_logits"].fill_(1.5)
    output, _ = check_operation(PATH, values, case="flat")
    assert set(output.predicts.tolist()) <= {0, -1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_special_logits_stay_in_their_row(bad, device):
    values = make(3, 4, 3, 8, source=torch.float32, device=device)
    clean = eagle_kernels.raw.verify_tree_greedy(**values)
    values["target_logits"][8:16] = bad
    values["target_logits"][8, 5] = 0.0
    output, _ = check_operation(PATH, values, case=str(bad))
    assert output.predicts.max() < 97
    for row in (0, 2):
        assert torch.equal(output.accept_index[row], clean.accept_index[row])


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_trees_end_and_accept_nothing_bad(fault, device):
    values = make(3, 4, 3, 8, device="cpu")
    MALFORMED[fault]({key: values[key] for key in list(values)[:4]})
    values = to_device(values, device)
    output, _ = check_operation(PATH, values, case=fault)
    if fault in ("tokens of -1", "out-of-vocabulary tokens", "dead rows", "backward links", "links past the tree"):
        assert output.accept_token_num.sum() == 0


def test_a_target_of_minus_one_matches_nothing(device):
    values = make(2, 4, 3, 8, device=device)
    values["candidates"].fill_(-1)
    values["target_predict"].fill_(-1)
    output, _ = check_operation(PATH, values, case="-1 meets -1")
    assert output.accept_token_num.sum() == 0


def test_target_ids_outside_int32_match_nothing(device):
    """They are not cut to 32 bits, where they could equal a draft."""
    values = make(2, 4, 3, 8, device=device)
    values["target_predict"] += 2**32
    output, _ = check_operation(PATH, values, case="ids past 2^32")
    assert output.accept_token_num.sum() == 0 and (output.predicts == -1).all()


def test_fewer_steps_than_levels_stop_the_walk(device):
    values = make(4, 2, 4, 8, device=device)
    deep = eagle_kernels.raw.verify_tree_greedy(**values)
    output, _ = check_operation(PATH, {**values, "spec_steps": 1}, case="one step")
    assert torch.equal(output.accept_token_num, deep.accept_token_num.clamp(max=1))


def test_front_door_is_greedy_without_sampling_parameters(device):
    values = make(3, 4, 3, 8, source=torch.float32, device=device)
    want = eagle_kernels.verify_tree_greedy(**values)
    got = eagle_kernels.verify_tree(**values)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_launches_and_nothing_else(device):
    assert_only_launches(PATH, make(2, 4, 3, 8, device=device))
    assert_only_launches(PATH, make(2, 4, 3, 8, source=torch.float32, device=device))


def test_registration(device):
    check_registration("verify_tree_greedy", make(2, 4, 3, 8, device=device))
    check_registration("verify_tree_greedy", make(2, 4, 3, 8, source=torch.float32, device=device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_predict": None}, "target_predict / target_logits must be given exactly once, got none of them"),
        ({"target_predict": None, "target_logits": torch.zeros(16, 0)}, "target_logits must have at least one token"),
        ({"spec_steps": -1}, "spec_steps must be at least 0, got -1"),
        ({"retrieve_index": torch.zeros(2, 7, dtype=torch.int64)}, r"retrieve_index must have N = 8 in axis 1"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match="eagle_kernels.verify_tree_greedy: " + message):
        eagle_kernels.raw.verify_tree_greedy(**{**make(2, 4, 3, 8), **change})


@pytest.mark.gpu
def test_graph_replay_with_dead_rows(device):
    values = make(8, 4, 3, 16, source=torch.bfloat16, device=device)
    out = eagle_kernels.raw.verify_tree_greedy(**values)
    live = [tensor.clone() for tensor in out]

    def kill_rows():
        for key in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "candidates"):
            values[key][3:] = -1

    replay_in_graph(lambda: eagle_kernels.raw.verify_tree_greedy(**values, out=out), change=kill_rows)
    assert torch.equal(out.accept_index[:3], live[1][:3]) and (out.accept_index[3:] == -1).all()
    assert torch.equal(out.predicts[:48], live[0][:48]) and (out.predicts[48:] == -1).all()
