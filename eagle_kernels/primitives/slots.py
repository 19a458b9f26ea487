"""Lists of all requests in one buffer, one after another, told apart by the running sum of their lengths (CSR). A
buffer has room for `capacity` entries, those that no list uses being -1. Lengths are on the device, so a buffer can
turn out too small: then entries past its end are not written, no bound exceeds `capacity`, and `overflow` holds the
room that was needed."""

from ..runtime import check
from ..runtime.language import tl, triton


@triton.jit
def read_lengths(lengths_ptr, request, is_wanted):
    """Returns lengths (or places in a row) int64 of one or several requests, limited so that sums of them fit int64."""
    length = tl.load(lengths_ptr + request, mask=is_wanted, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), 2147483647)


@triton.jit
def fill_unused(list_ptr, used, capacity, part, num_parts, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the share of program `part` of `num_parts` in the entries used..capacity - 1."""
    entry = tl.arange(0, BLOCK)
    for start in range(used + part.to(tl.int64) * BLOCK, capacity, num_parts * BLOCK):
        place = start + entry
        tl.store(list_ptr + place, tl.full([BLOCK], VALUE, tl.int32), mask=place < capacity)


@triton.jit
def store_overflow(overflow_ptr, needed, capacity):
    """Writes `overflow`: the room that was needed if it exceeds capacity (limited to int32), else 0."""
    tl.store(overflow_ptr, tl.where(needed > capacity, tl.minimum(needed, 2147483647), 0).to(tl.int32))


def check_capacity(args: check.Arguments, name: str = "capacity") -> int:
    """Checks the room for a list, an argument of the op, and returns it."""
    return args.integer(name, 0, check.MAX_INT32)


def check_keep_unused(args: check.Arguments) -> None:
    """Checks that keep_unused comes with buffers of the caller."""
    if args.values["keep_unused"] and args.values.get("out") is None:
        args.fail("keep_unused", "come with out, whose unused entries it keeps", True)
