"""Masks that also hold the prefix: sums of lengths that are wrong, buffers of another size, lengths that cannot be."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import eagle_kernels
from op_tests.harness import Guarded, assert_in_bounds, check_operation, to_device
from op_tests.harness.ahead_of_time import module_of_tests
from op_tests.harness.cases import as_tuple
from op_tests.ops.tree.cases import make_parents, make_scored, make_tree, make_words

NUM_NODES = 4
WRITERS = {
    "build_tree": lambda: make_tree(2, 4, 2, NUM_NODES, mode="full_mask"),
    "build_tree_from_scores": lambda: make_scored(2, 4, 2, NUM_NODES, mode="full_mask"),
    "tree_from_parents": lambda: make_parents(2, NUM_NODES, mode="full_mask"),
    "unpack_tree_mask": lambda: make_words(2, NUM_NODES, mode="full_mask"),
}
MODULES = (eagle_kernels, eagle_kernels.raw)


def make(name: str, seq_lens: list[int], seq_lens_sum: int, device="cpu") -> dict:
    return to_device(WRITERS[name]() | {"seq_lens": torch.tensor(seq_lens), "seq_lens_sum": seq_lens_sum}, device)


def num_cells(seq_lens_sum: int) -> int:
    return NUM_NODES * (seq_lens_sum + 2 * NUM_NODES)


def mask_of(result) -> torch.Tensor:
    return result if torch.is_tensor(result) else result.tree_mask


def with_mask(result, mask: torch.Tensor):
    return mask if torch.is_tensor(result) else result._replace(tree_mask=mask)


@pytest.mark.parametrize("seq_lens_sum", [0, 5, 8, 40])
@pytest.mark.parametrize("name", WRITERS)
def test_a_wrong_length_sum_sizes_the_mask_alike_everywhere(name, seq_lens_sum, device):
    """The mask has the cells that the sum says: those of the lengths, as far as there is room. The sum should be 8."""
    values, public = make(name, [2, 6], 8, device), getattr(eagle_kernels, name)
    whole = mask_of(public(**values))
    assert len(whole) == num_cells(8)
    values["seq_lens_sum"] = seq_lens_sum
    with assert_in_bounds():
        masks = [mask_of(getattr(module, name)(**values)) for module in MODULES]
    masks.append(mask_of(torch.compile(public, fullgraph=True, backend="aot_eager")(**values)))
    size = num_cells(seq_lens_sum)
    for mask in masks:
        assert len(mask) == size and torch.equal(mask[: len(whole)], whole[:size])
    with FakeTensorMode() as fake:
        fakes = {key: fake.from_tensor(value) if torch.is_tensor(value) else value for key, value in values.items()}
        assert len(mask_of(public(**fakes))) == size
    operator = getattr(torch.ops.eagle_kernels, name).default
    torch.library.opcheck(operator, (), values, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("seq_lens", [[-3, 4], [10, -40], [2**40, 2], [2**60 - 9, 5], [2**62, 2**62]], ids=str)
@pytest.mark.parametrize("name", WRITERS)
def test_lengths_that_contradict_their_sum_stay_in_bounds(name, seq_lens, device):
    values = make(name, seq_lens, 6, device)
    with assert_in_bounds():
        results = [getattr(module, name)(**values) for module in MODULES]
    assert [len(mask_of(result)) for result in results] == [num_cells(6)] * 2
    guarded = Guarded((7,), torch.bool, device)
    for module, result in zip(MODULES, results):
        getattr(module, name)(**values, out=with_mask(result, guarded.tensor))
        guarded.check(name, "tree_mask")


@pytest.mark.parametrize("module", MODULES, ids=["public", "raw"])
@pytest.mark.parametrize("name", WRITERS)
def test_buffers_of_another_size(name, module, device):
    """A server keeps one buffer for its longest batch, cells past the batch's own stay; a short one is not overrun."""
    values, function = make(name, [3, 300], 303, device), getattr(module, name)
    result = getattr(eagle_kernels, name)(**values)
    mask = mask_of(result)
    buffer = mask.new_zeros(len(mask) + 100)
    function(**values | {"seq_lens_sum": None}, out=with_mask(result, buffer))
    assert torch.equal(buffer[:-100], mask) and not buffer[-100:].any()
    half = len(mask) // 2
    buffer.zero_()
    function(**values, out=with_mask(result, buffer[:half]))
    assert torch.equal(buffer[:half], mask[:half]) and not buffer[half:].any()
    if module is eagle_kernels.raw and name != "unpack_tree_mask":  # a reference writes the prefix again
        buffer.zero_()
        function(**values | {"seq_lens_sum": None}, prefix_is_set=True, out=with_mask(result, buffer))
        assert not buffer[:3].any() and buffer[3] and not buffer[-100:].any()


@pytest.mark.parametrize("name", WRITERS)
def test_debug_mode_checks_the_length_sum_and_the_buffer(name, monkeypatch):
    values, public = make(name, [2, 6], 8), getattr(eagle_kernels, name)
    result = public(**values)
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    for out in (None, result):
        with pytest.raises(ValueError, match=rf"^eagle_kernels\.{name}: seq_lens_sum must be 8, .*, got 9$"):
            public(**values | {"seq_lens_sum": 9}, out=out)
    with pytest.raises(ValueError, match=rf"^eagle_kernels\.{name}: out.* must hold the 64 cells .*, got 63$"):
        public(**values | {"seq_lens_sum": None}, out=with_mask(result, mask_of(result)[:-1]))
    public(**values, out=with_mask(result, torch.empty(80, dtype=torch.bool)))


READERS = ("tree.pack_tree_mask", "tree.tree_from_mask")


@pytest.mark.parametrize("mode", ["full_mask", "qlen_only"])
@pytest.mark.parametrize("path", READERS)
def test_cells_may_be_bytes_and_lengths_int32(path, mode, device):
    values = module_of_tests(path).make(2, 9, mode=mode, dtype=torch.int32, device=device)
    expected = as_tuple(check_operation(path, values)[0])
    values["tree_mask"] = values["tree_mask"].to(torch.uint8) * 6  # any value but 0 is set
    result, _ = check_operation(path, values, case="uint8")
    assert all(map(torch.equal, as_tuple(result), expected))


@pytest.mark.parametrize("seq_lens", [[-40, 10], [10, -3], [2**40, 0]], ids=str)
@pytest.mark.parametrize("path", READERS)
def test_impossible_lengths_are_read_in_bounds(path, seq_lens, device):
    values = module_of_tests(path).make(2, 8, mode="full_mask", device=device)
    check_operation(path, values | {"seq_lens": torch.tensor(seq_lens, device=device)})
