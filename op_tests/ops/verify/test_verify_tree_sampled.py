"""verify_tree_sampled: equal to its reference, equal to plain sampling token for token, and the target's joint law."""

from __future__ import annotations

import itertools

import pytest
import torch

import eagle_kernels
from eagle_kernels.reference import sampling as reference_sampling
from op_tests.harness import assert_only_launches, check_operation, check_registration, replay_in_graph, to_device
from op_tests.harness.statistics import assert_follows_law
from op_tests.ops.verify.cases import MALFORMED, follow_tree, make_tree

PATH = "verify.verify_tree_sampled"
SHAPES = [(2, 1, 1, 1), (3, 1, 4, 5), (2, 8, 1, 9), (4, 4, 3, 8), (2, 8, 5, 32)]
FILTERS = {"none": {}, "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02}}


def make(batch_size, topk, spec_steps, num_nodes, *, vocab_size=61, device="cpu", dtype=torch.float32, **filters):
    links, positions = make_tree(batch_size, topk, spec_steps, num_nodes, vocab_size=vocab_size, device=device)
    values = {
        **links,
        "target_logits": follow_tree(links, vocab_size, peak=6.0, dtype=dtype),
        "positions": positions,
        "seeds": torch.randint(-(2**62), 2**62, (batch_size,), device=device),
        "temperature": torch.tensor([0.8, 0.0, 1.0, 1.3], device=device).repeat(batch_size)[:batch_size].contiguous(),
        "spec_steps": spec_steps,
    }
    for name, value in filters.items():
        dtype = torch.int64 if name == "top_k" else torch.float32
        values[name] = torch.full((batch_size,), value, dtype=dtype, device=device)
    return values


def ahead_of_time_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield str(dtype), make(2, 8, 5, 64, dtype=dtype)
    yield "filters", make(2, 8, 5, 64, dtype=torch.bfloat16, **FILTERS["all"])


def size_sweep():
    for batch_size in (1, 2, 3, 16, 17, 64, 257):
        yield make(batch_size, 4, 3, 8)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, filters, device):
    values = make(*shape, device=device, **FILTERS[filters])
    output, _ = check_operation(PATH, values, case=f"{shape} {filters}")
    assert shape[3] == 1 or output.accept_token_num.sum() > 0, "the case accepts nothing, so it proves little"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_logits(dtype, device):
    check_operation(PATH, make(4, 4, 3, 8, device=device, dtype=dtype), case=str(dtype))


@pytest.mark.parametrize("filters", FILTERS)
def test_draws_what_plain_sampling_draws(filters, device):
    """The op-level promise: every visited node's token is sample_from_logits' token for that row, seed and position."""
    values = make(4, 4, 3, 8, device=device, **FILTERS[filters])
    output = eagle_kernels.raw.verify_tree_sampled(**values)
    names = [name for name in ("seeds", "temperature", "top_k", "top_p", "min_p") if name in values]
    per_node = {name: values[name].repeat_interleave(8) for name in names}
    plain = eagle_kernels.raw.sample_from_logits(values["target_logits"], values["positions"] + 1, **per_node)
    visited = output.predicts >= 0
    assert visited.sum() == (output.accept_token_num + 1).sum()
    assert torch.equal(output.predicts[visited].long(), plain[visited])


def test_rows_of_temperature_zero_are_greedy(device):
    values = make(4, 4, 3, 8, device=device, **FILTERS["all"])
    values["temperature"].zero_()
    sampled = eagle_kernels.raw.verify_tree_sampled(**values)
    links = list(values.values())[:4]
    greedy = eagle_kernels.raw.verify_tree_greedy(*links, target_logits=values["target_logits"], spec_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(sampled, greedy))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_joint_law_of_the_emitted_tokens(filters, device):
    """A target over four tokens that remembers one token; a tree of two levels; chi-square on what three draws emit.

    The emitted text is completed to three tokens by plain sampling with the same seed, so every outcome has a known
    probability whatever the tree accepted.
    """
    lanes, vocab_size = 20_000, 4
    table = torch.tensor([[0.0, 1.0, 0.5, -1.0], [1.0, 0.0, 2.0, 0.0], [0.5, 0.5, -1.0, 1.0], [2.0, 0.0, 0.0, 1.0]])
    temperature = 0.9
    # root 0 with children 1 and 2; node 1 (token 1) has children tokens 2 and 0
    tokens = torch.tensor([0, 1, 2, 2, 0])
    first_child = torch.tensor([1, 3, -1, -1, -1])
    next_sibling = torch.tensor([-1, 2, -1, 4, -1])
    depth = torch.tensor([0, 1, 1, 2, 2])
    num_nodes = len(tokens)
    logits = table[tokens].repeat(lanes, 1).to(device)
    parameters = {
        name: torch.full((lanes,), value, device=device, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in {"temperature": temperature, **filters}.items()
    }
    seeds = torch.arange(lanes, device=device)
    output = eagle_kernels.verify_tree_sampled(
        tokens.repeat(lanes, 1).to(device),
        torch.arange(lanes * num_nodes, device=device).view(lanes, num_nodes),
        first_child.repeat(lanes, 1).to(device),
        next_sibling.repeat(lanes, 1).to(device),
        logits,
        (10 + depth).repeat(lanes).to(device),
        seeds,
        spec_steps=2,
        **parameters,
    )
    text = torch.full((lanes, 3), -1, dtype=torch.int64, device=device)
    count = output.accept_token_num.long() + 1
    for index in range(3):
        node = output.accept_index[:, index].clamp(min=0).long()
        text[:, index] = torch.where(index < count, output.predicts[node].long(), -1)
    for index in (1, 2):
        plain = eagle_kernels.sample_from_logits(
            table.to(device)[text[:, index - 1]], torch.full((lanes,), 11 + index, device=device), seeds, **parameters
        )
        known = index < count
        assert torch.equal(text[known, index], plain[known]), "equal logits gave another token inside a tree"
        text[:, index] = torch.where(known, text[:, index], plain)

    one = {name: value[:1].repeat(vocab_size).cpu() for name, value in parameters.items()}
    scaled = reference_sampling.scaled_logits(table, one.pop("temperature"))
    kept = reference_sampling.filtered_logits(scaled, *(one.get(name) for name in ("top_k", "top_p", "min_p")))
    step = torch.softmax(kept.double(), dim=-1)
    law = torch.tensor(
        [step[0, a] * step[a, b] * step[b, c] for a, b, c in itertools.product(range(vocab_size), repeat=3)]
    )
    outcome = (text[:, 0] * vocab_size + text[:, 1]) * vocab_size + text[:, 2]
    assert_follows_law(outcome.cpu(), law)


def test_neighbours_and_batch_do_not_matter(device):
    values = make(4, 4, 3, 8, device=device, **FILTERS["all"])
    whole = eagle_kernels.raw.verify_tree_sampled(**values)
    for row in (0, 3):
        alone = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                per_request = value.shape[0] // 4
                value = value[row * per_request : (row + 1) * per_request].contiguous()
            alone[name] = value
        alone["retrieve_index"] = alone["retrieve_index"] - row * 8
        output = eagle_kernels.raw.verify_tree_sampled(**alone)
        assert torch.equal(output.predicts, whole.predicts[row * 8 : row * 8 + 8])
        assert torch.equal(output.accept_token_num, whole.accept_token_num[row : row + 1])


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_trees_end_and_accept_nothing_bad(fault, device):
    values = make(3, 4, 3, 8)
    MALFORMED[fault]({key: values[key] for key in list(values)[:4]})
    values = to_device(values, device)
    output, _ = check_operation(PATH, values, case=fault)
    if fault in ("tokens of -1", "out-of-vocabulary tokens", "dead rows", "backward links", "links past the tree"):
        assert output.accept_token_num.sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_special_logits_stay_in_their_row(bad, device):
    values = make(3, 4, 3, 8, device=device, **FILTERS["all"])
    clean = eagle_kernels.raw.verify_tree_sampled(**values)
    values["target_logits"][8:16] = bad
    output, _ = check_operation(PATH, values, case=str(bad))
    assert output.predicts.max() < 61
    for row in (0, 2):
        assert torch.equal(output.accept_index[row], clean.accept_index[row])


def test_duplicate_siblings_are_followed_once(device):
    values = make(2, 4, 1, 5, device=device)
    values["candidates"][:, 1:] = 7
    values["target_logits"][:, 7] = 100.0
    output, _ = check_operation(PATH, values, case="duplicates")
    assert output.accept_index[:, 1].tolist() == [1, 6]


def test_front_door_samples_with_sampling_parameters(device):
    values = make(3, 4, 3, 8, device=device, **FILTERS["all"])
    want = eagle_kernels.verify_tree_sampled(**values)
    got = eagle_kernels.verify_tree(**values)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    with pytest.raises(ValueError, match="verify_tree: sampling needs seeds as well"):
        eagle_kernels.verify_tree(**{**values, "seeds": None})
    without_filters = {key: value for key, value in values.items() if key not in FILTERS["all"]}
    with pytest.raises(ValueError, match="verify_tree: sampling needs temperature as well"):
        eagle_kernels.verify_tree(**{**without_filters, "temperature": None})


def test_launches_and_nothing_else(device):
    values = make(3, 4, 3, 8, device=device)
    assert_only_launches(PATH, values, launches=3 + 2)
    assert_only_launches(PATH, make(3, 4, 3, 8, device=device, **FILTERS["all"]), launches=2 * 3 + 3)


def test_registration(device):
    check_registration("verify_tree_sampled", make(2, 2, 2, 4, device=device, **FILTERS["all"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_logits": torch.zeros(15, 61)}, r"target_logits must have shape \[16, V\], got \[15, 61\]"),
        ({"temperature": torch.zeros(2, dtype=torch.float64)}, "temperature must have dtype float32, got float64"),
        ({"top_p": torch.zeros(3)}, "top_p must have B = 2 in axis 0"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match="eagle_kernels.verify_tree_sampled: " + message):
        eagle_kernels.raw.verify_tree_sampled(**{**make(2, 4, 3, 8), **change})


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS)
def test_large_vocabulary(filters, device):
    values = make(8, 8, 5, 64, vocab_size=32000, device=device, dtype=torch.bfloat16, **FILTERS[filters])
    output, _ = check_operation(PATH, values, case=filters)
    assert output.accept_token_num.sum() > 0


@pytest.mark.gpu
def test_graph_replay_with_dead_rows(device):
    values = make(8, 4, 3, 16, device=device)
    out = eagle_kernels.raw.verify_tree_sampled(**values)
    live = [tensor.clone() for tensor in out]

    def kill_rows():
        for key in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "candidates"):
            values[key][3:] = -1

    replay_in_graph(lambda: eagle_kernels.raw.verify_tree_sampled(**values, out=out), change=kill_rows)
    assert torch.equal(out.accept_index[:3], live[1][:3]) and (out.accept_index[3:] == -1).all()
    assert torch.equal(out.predicts[:48], live[0][:48]) and (out.predicts[48:] == -1).all()
