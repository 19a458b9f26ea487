"""Ops that read or write pools take them in every layout: pages, tokens and heads are strided by whole rows of D.

Only the elements of a head lie together. In all orders that the axes of pools may have in memory, with keys beside
values and both beside what is nobody's, an op gives the bits that it gives for two contiguous pools. What is no such
layout is refused in one line.
"""

import pytest
import torch

import eagle_kernels
from eagle_kernels.runtime import check

from .harness import assert_equal, assert_in_bounds, assume_multiprocessors, to_device
from .harness.ahead_of_time import module_of_tests
from .harness.cases import contracted, copied, refusal
from .harness.operation import as_bits
from .harness.pools import ORDERS, ORDERS_OF_LAYERS, in_order, with_pools
from .ops.attention.cases import fp8_of, with_float8

CACHES = ("k_cache", "v_cache")
ATTENTION = ("gqa_decode", "tree_attention", "prefill_attention")
PATHS = [f"attention.{name}" for name in ATTENTION] + ["kv.write_kv", "kv.move_accepted_kv"]


def in_float8(values: dict) -> dict:
    """The same with 8-bit caches, each head with a scale of its own."""
    return with_float8(values, k_scale=[0.5, 1.75], v_scale=[1.75, 0.5])


def calls(path: str, device) -> list[tuple[str, dict]]:
    """Calls of an op with pages of 1, of a few and of many slots, and with what changes where and how keys are read."""
    make = module_of_tests(path).make
    sinks, half = torch.randn(4, device=device), torch.float16
    if path == "attention.gqa_decode":
        everything = make(24, 2, 2, 16, half, [70, 3], device=device) | {"window": 40, "soft_cap": 5.0, "sinks": sinks}
        return [
            ("pages of 1", make(16, 2, 2, 1, half, [40, 0, 3], form="csr", device=device)),
            ("pages of 64", in_float8(make(16, 2, 2, 64, half, [70, 3], device=device))),
            ("all at once", everything),
            ("deterministic", everything | {"deterministic": True}),
        ]
    if path == "attention.tree_attention":
        nodes = make(5, 5, 24, 2, 2, 4, half, [30, 3], device=device)
        places = torch.tensor([30, 31, 31, 32, 33, 3, 4, 5, 5, 5], device=device)
        everything = {"window": 20, "soft_cap": 5.0, "sinks": sinks, "positions": places}
        beside = make(3, 3, 16, 2, 2, 1, half, [30, 0], is_separate=True, device=device)
        return [
            ("beside", beside | {"deterministic": True}),
            ("pages of 64", in_float8(make(3, 3, 16, 2, 2, 64, half, [66, 3], device=device))),
            ("all at once", nodes | everything),
            ("deterministic", nodes | everything | {"deterministic": True}),
        ]
    if path == "attention.prefill_attention":
        everything = make([9, 20], [30, 0], 24, 2, 2, 16, half, form="csr", device=device)
        return [
            ("pages of 1", make([5, 20], [9, 0], 16, 2, 2, 1, half, device=device)),
            ("pages of 64", in_float8(make([5, 7], [70, 0], 16, 2, 2, 64, half, device=device))),
            ("all at once", everything | {"window": 20, "soft_cap": 5.0, "sinks": sinks}),
        ]
    if path == "kv.write_kv":
        return [
            ("pages of 1", make(1, 2, 3, 16, half, half, device=device)),
            ("pages of 3", make(3, 2, 3, 20, torch.float32, torch.float32, device=device)),
            ("float8", make(16, 4, 2, 16, half, fp8_of(device), device=device)),
        ]
    return [
        ("pages of 1", make(2, 1, 2, 16, half, 8, 3, [5, 0], device=device)),
        ("pages of 4", make(2, 4, 3, 20, torch.float32, 8, 5, [9, 3], device=device)),
        ("a head of one byte", make(3, 3, 3, 1, torch.uint8, 8, 5, [9, 3], device=device)),
    ]


def orders_of(path: str) -> list[str]:
    return ORDERS_OF_LAYERS if path == "kv.move_accepted_kv" else ORDERS


def some_orders(path: str, number: int, count: int) -> list[str]:
    """Of one call among several: one of vLLM's orders, and a part of half of all orders."""
    packed = ["pthw", "phtw"][number % 2]
    return ["l" * (path == "kv.move_accepted_kv") + packed, *orders_of(path)[number :: 2 * count]]


def results(path: str, values: dict) -> dict[str, torch.Tensor]:
    """What an op returns, or changes in place."""
    returned = getattr(eagle_kernels.raw, path.rpartition(".")[2])(**values)
    fields = {"output": returned} if isinstance(returned, torch.Tensor) else returned._asdict() if returned else {}
    return fields | {name: values[name] for name in CACHES}


def assert_same_bits(path: str, case: str, found: dict, expected: dict) -> None:
    for name, tensor in expected.items():
        assert_equal(path, case, name, as_bits(found[name]), as_bits(tensor))


@pytest.mark.parametrize("path", PATHS)
def test_every_layout_gives_the_same_bits(path, device, monkeypatch):
    """On a GPU twice all, so that the plan of each layout is run again after those of the others."""
    assume_multiprocessors(monkeypatch, 2)
    made = calls(path, device)
    for number, (case, values) in enumerate(made):
        expected = results(path, copied(values))
        is_planned = values["k_cache"].is_cuda
        for order in orders_of(path) * 2 if is_planned else some_orders(path, number, len(made)):
            key, value, nobodys = in_order(values["k_cache"], values["v_cache"], order)
            with assert_in_bounds():
                found = results(path, values | {"k_cache": key, "v_cache": value})
            assert_same_bits(path, f"{case}, {order}", found, expected)
            assert (as_bits(nobodys) == 0xFF).all(), f"{case}, {order}"


def test_some_of_the_heads_move_in_place(device):
    """Three of four heads: pages of three slots step over whole slots of these, but slots do not."""
    values = module_of_tests("kv.move_accepted_kv").make(2, 3, 4, 16, torch.float16, 8, 3, [15, 4] * 5, device=device)
    assert values["accept_token_num"].any(), "nothing moves"
    some = copied(values)
    some |= {name: some[name][..., :3, :] for name in CACHES}
    eagle_kernels.raw.move_accepted_kv(**values)
    eagle_kernels.raw.move_accepted_kv(**some)
    assert_same_bits("move_accepted_kv", "some heads", some, {name: values[name][..., :3, :] for name in CACHES})


@pytest.mark.parametrize("path", PATHS)
def test_layouts_are_taken_with_debug(path, device, monkeypatch):
    monkeypatch.setattr(check, "DEBUG", True)
    _, values = calls(path, device)[0]
    for order in orders_of(path)[::5]:
        getattr(eagle_kernels, path.rpartition(".")[2])(**with_pools(values, order))


# what is no layout: (why, how a cache [.., page_size, Hkv, D] is laid out, what is said of it)
OF_ROWS, ON_EACH_OTHER = "have strides that are multiples of D = 16", "have slots and heads that do not overlap"
REFUSED = [
    ("elements apart", lambda cache: cache.repeat_interleave(2, -1)[..., ::2], "be contiguous in its last 1 axes"),
    ("tokens of other than whole rows", lambda cache: strided(cache, -3, cache.stride(-3) + 1), OF_ROWS),
    ("heads of other than whole rows", lambda cache: strided(cache, -2, cache.stride(-2) + 8), OF_ROWS),
    ("one head for all", lambda cache: cache[..., :1, :].expand_as(cache), ON_EACH_OTHER),
    ("one token for all", lambda cache: cache[..., :1, :, :].expand_as(cache), ON_EACH_OTHER),
    ("tokens within tokens", lambda cache: strided(cache, -3, cache.stride(-3) - 16), ON_EACH_OTHER),
    ("heads within tokens that lie closer", lambda cache: strided(cache, -2, cache.stride(-3)), ON_EACH_OTHER),
    ("heads apart", lambda cache: torch.stack([cache] * 2, -2).flatten(-3, -2)[..., ::2, :], None),
    ("tokens apart", lambda cache: torch.stack([cache] * 2, -3).flatten(-4, -3)[..., ::2, :, :], None),
]


def strided(cache: torch.Tensor, axis: int, stride: int) -> torch.Tensor:
    """A tensor of the same shape, one of whose axes has another stride."""
    strides = list(cache.stride())
    strides[axis] = stride
    extent = 1 + sum((size - 1) * each for size, each in zip(cache.shape, strides))
    return cache.new_zeros(extent).as_strided(cache.shape, strides)


def sound(path: str, device, page_size: int = 4, num_heads: int = 2) -> dict:
    """A call with pages of some slots of some heads of 16 elements."""
    make, half = module_of_tests(path).make, torch.float16
    sizes = (16, 2, num_heads, page_size, half)
    return {
        "attention.gqa_decode": lambda: make(*sizes, [7], device=device),
        "attention.tree_attention": lambda: make(3, 3, *sizes, [7], device=device),
        "attention.prefill_attention": lambda: make([3], [7], *sizes, device=device),
        "kv.write_kv": lambda: make(page_size, 2, num_heads, 16, half, half, device=device),
        "kv.move_accepted_kv": lambda: make(1, page_size, num_heads, 16, half, 8, 3, [5], device=device),
    }[path]()


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_layout_is_refused(path, name, device):
    """One cache apart from the other is no layout either, whichever it is: the strides of pages alone may differ."""
    op, values = path.rpartition(".")[2], sound(path, device)
    for why, laid, message in REFUSED:
        changed = values | {name: laid(values[name])}
        if message is None:
            wanted, got = (list(changed[each].stride()) for each in CACHES)
            message = f"v_cache must have the strides of k_cache, {wanted}, for slots and heads, got {got}"
        else:
            message = f"{name} must {message}, got "
        for function in (getattr(eagle_kernels, op), getattr(eagle_kernels.raw, op)):
            text = refusal(function, **changed)
            in_place = f"eagle_kernels.{op}: {name} must not overlap itself, got shape"
            is_named = text.startswith(f"eagle_kernels.{op}: {message}")
            assert "\n" not in text and (is_named or path.startswith("kv.") and text.startswith(in_place)), (why, text)


@pytest.mark.parametrize("path", PATHS)
def test_axes_of_one_have_any_stride(path, device):
    """PyTorch says anything of an axis that nobody steps along."""
    values = sound(path, device, page_size=1, num_heads=1)
    expected = results(path, copied(values))
    for stride in (0, 1, 2**40):
        caches = {}
        for name in CACHES:
            strides = (*values[name].stride()[:-3], stride, stride, 1)
            caches[name] = values[name].clone().as_strided(values[name].shape, strides)
        found = results(path, values | caches)
        assert_same_bits(path, f"{stride}", found, expected)


@pytest.mark.parametrize("axis", [-3, -2], ids=["tokens", "heads"])
@pytest.mark.parametrize("path", [path for path in PATHS if path != "kv.move_accepted_kv"])
def test_rows_of_a_page_are_counted_in_uint32(path, axis):
    """From the first to the last one, whatever lies between the tokens or the heads of a page."""
    values = to_device(sound(path, "cpu"), "meta")
    shape, dense = values["k_cache"].shape, values["k_cache"].stride()
    others = sum((shape[each] - 1) * dense[each] // 16 for each in range(3) if each - 4 != axis)
    most = (2**32 - 2 - others) // (shape[axis] - 1)
    for rows in (most, most + 1):
        strides = list(dense)
        strides[axis] = 16 * rows
        caches = {name: torch.empty_strided(shape, strides, dtype=torch.float16, device="meta") for name in CACHES}
        text = refusal(contracted, path, values | caches)
        assert bool(text) == (rows > most)
    assert "k_cache must span less than 2^32 rows of D = 16 elements, got " in text


@pytest.mark.parametrize("axis", [-3, -2], ids=["tokens", "heads"])
@pytest.mark.parametrize("path", PATHS)
def test_rows_of_a_page_past_int32(path, axis, device):
    """The last token, or head, is more than 2^31 rows after the first: memory of which little is ever touched."""
    make, half, dtype = module_of_tests(path).make, torch.float16, fp8_of(device)
    page_size, num_heads = (4, 1) if axis == -3 else (1, 4)
    sizes = (2, num_heads, page_size)
    values = {
        "attention.gqa_decode": lambda: make(4, *sizes, half, [page_size], device=device) | {"deterministic": True},
        "attention.tree_attention": lambda: (
            make(1, 1, 4, *sizes, half, [page_size - 1], kind="chain", device=device) | {"deterministic": True}
        ),
        "attention.prefill_attention": lambda: make([1], [page_size - 1], 4, *sizes, half, device=device),
        "kv.write_kv": lambda: make(page_size, 2, num_heads, 4, half, dtype, slots=[0, page_size - 1], device=device),
        "kv.move_accepted_kv": lambda: make(1, page_size, num_heads, 4, torch.uint8, 2, 1, [0], device=device),
    }[path]()
    if path.startswith("attention."):
        values = in_float8(values)
        values |= {name: values[name][:1] for name in ("k_scale", "v_scale")}
    expected = results(path, copied(values))
    shape = values["k_cache"].shape
    # pages lie side by side, between the two tokens or heads
    strides = [8 * shape[1] if len(shape) == 5 else 8, 8, 8, 8, 1][-len(shape) :]
    strides[axis] = 4 * (2**31 // 3 + 5)
    memory = torch.empty(3 * strides[axis] + 8 * shape[-4], dtype=torch.uint8, device=device)
    memory = memory.view(values["k_cache"].dtype)
    caches = {name: memory.as_strided(shape, strides, 4 * at) for at, name in enumerate(CACHES)}
    for name, cache in caches.items():
        cache.copy_(values[name])
    with assert_in_bounds():
        found = results(path, values | caches)
    assert_same_bits(path, "past int32", found, expected)
