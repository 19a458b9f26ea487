"""What a newcomer got wrong, as a table: every call ends in one line that says what is wrong, or does what it says."""

import contextlib
import functools
import itertools
import math
import operator
import pickle
import random
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import eagle_kernels
from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.integrations import aiter
from eagle_kernels.runtime import check
from eagle_kernels.runtime.calls import refuse_overlaps, refuse_shared
from op_tests.engine.toys import ToyModel
from op_tests.ops.linear.cases import make_linear
from op_tests.ops.nn.cases import make_norm, make_silu
from op_tests.ops.tree.cases import make_tree
from op_tests.ops.verify.cases import make_logits, make_sampled

from .harness import to_device
from .harness.ahead_of_time import PATHS
from .harness.cases import (
    as_tuple,
    cases_of,
    copied,
    module_of_op,
    num_elements,
    refusal,
    signature_of,
    small_case,
    tensors_of,
)

NAN = math.nan


def one_line(message: str, call, *arguments, **named) -> str:
    """The call raises one line that says so, which is returned."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(op: str, rule: str, call, *arguments, **named) -> str:
    """The call raises a line of this op."""
    return one_line(rf"^eagle_kernels\.{op}: {rule}", call, *arguments, **named)


def functions_of(path: str) -> list:
    """The public function and the launcher."""
    return [getattr(module, path.rpartition(".")[2]) for module in (eagle_kernels, eagle_kernels.raw)]


@pytest.fixture
def set_precision():
    """Sets how torch computes fp32 products, and restores it."""
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@functools.cache
def _smallest_case(path: str) -> dict:
    return min(cases_of(path), key=num_elements)


def smallest_case(path: str) -> dict:
    return copied(_smallest_case(path))


def bits(tensors) -> list[torch.Tensor]:
    """Returns bytes, which are equal for NaN too."""
    return [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors]


@contextlib.contextmanager
def every_default():
    """Sets defaults of torch to what computes otherwise, and restores them."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def short_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# what a program may have set around its calls
SURROUNDINGS = {
    "autocast bfloat16": lambda: torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.float16),
    "defaults": every_default,
    "short defaults": short_default,
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "modes": lambda: torch.overrides.BaseTorchFunctionMode(),
}


@contextlib.contextmanager
def everything():
    with contextlib.ExitStack() as stack:
        for surrounding in SURROUNDINGS.values():
            stack.enter_context(surrounding())
        yield


# one op of each family, in which each surrounding is tried by itself
ALONE = [*{path.partition(".")[0]: path for path in PATHS}.values()]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_around_a_call_changes_its_bits(path, device):
    """Of the public function and the launcher, of what they return, write into `out`, and change in place."""
    smaller = min(small_case(path), smallest_case(path), key=num_elements)
    values, (public, launcher) = to_device(smaller, device), functions_of(path)
    alone = SURROUNDINGS.values() if path in ALONE else ()
    for function, surroundings in ((public, (everything, *alone)), (launcher, (everything,))):
        before = copied(values)
        expected = as_tuple(wanted := function(**before))
        for surrounding in surroundings:
            given, out = copied(values), None
            if expected:
                out = tuple(map(torch.empty_like, expected))
                out = {"out": out[0] if isinstance(wanted, torch.Tensor) else type(wanted)(*out)}
            with surrounding():
                found = as_tuple(function(**given, **(out or {})))
                again = as_tuple(function(**copied(values))) if function is public else found
            assert [tensor.dtype for tensor in again] == [tensor.dtype for tensor in expected]
            for ours in (found, again):
                assert len(ours) == len(expected) and all(map(torch.equal, bits(ours), bits(expected)))
            assert all(map(torch.equal, bits(tensors_of(given).values()), bits(tensors_of(before).values())))


def test_a_compiled_call_under_autocast_keeps_its_bits():
    call = torch.compile(lambda: eagle_kernels.linear_decode(**LINEAR), backend="aot_eager", fullgraph=True)
    with SURROUNDINGS["autocast bfloat16"]():
        assert torch.equal(call(), eagle_kernels.linear_decode(**LINEAR))
    assert torch.equal(call(), eagle_kernels.linear_decode(**LINEAR))


def test_an_op_may_be_called_while_another_one_begins():
    """As a signal handler does: what guards the settings of the process is held then."""
    from eagle_kernels.runtime import surroundings

    with surroundings._whole_products.lock:
        assert eagle_kernels.linear_decode(**LINEAR).isfinite().all()


def test_the_precision_of_products_is_that_of_the_program_afterwards(set_precision):
    """Also where calls in several threads overlap, and after an error."""
    from eagle_kernels.runtime.surroundings import undisturbed

    set_precision("high")
    with pytest.raises(ValueError), undisturbed():
        with undisturbed():
            pass
        assert torch.get_float32_matmul_precision() in ("highest", "high")  # newer torch has one for each backend
        raise ValueError
    assert torch.get_float32_matmul_precision() == "high"


def precisions() -> set[str]:
    """Returns how torch computes fp32 products now, on the CPU and on GPUs."""
    of_place = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: torch.get_float32_matmul_precision())
    return {of_place(place, "matmul") for place in ("mkldnn", "cuda")}


WHOLE = {"ieee", "none", "highest"}


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_are_whole_while_anyone_is_within(precision, set_precision):
    """In whatever order calls come and leave; what the program had is back when the last of them has left."""
    from eagle_kernels.runtime import surroundings

    coin, within = numpy.random.default_rng(1), []
    set_precision(precision)
    before = precisions()
    for step in range(60):
        if within and (step > 50 or coin.random() < 0.5):
            within.pop(coin.integers(len(within))).close()
        else:
            within.append(contextlib.ExitStack())
            within[-1].enter_context(surroundings._whole_products)
        assert precisions() <= WHOLE if within else precisions() == before
        assert within or torch.get_float32_matmul_precision() == precision


def test_a_call_that_ends_leaves_another_thread_s_as_it_was(set_precision):
    from eagle_kernels.runtime.surroundings import undisturbed

    entered, left = threading.Event(), threading.Event()

    def longer():
        with undisturbed():
            entered.set()
            left.wait(10)
            return precisions(), torch.is_grad_enabled()

    set_precision("medium")
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(longer)
        entered.wait(10)
        with undisturbed():
            pass
        left.set()
        found, has_gradients = result.result()
    assert found <= WHOLE and not has_gradients and torch.is_grad_enabled()
    assert torch.get_float32_matmul_precision() == "medium"


# kinds of tensors that no op takes: what each makes of a sound one
FOREIGN = {
    "a list": lambda tensor: tensor.flatten()[:3].tolist(),
    "an array": lambda tensor: numpy.zeros(3),
    "nothing dense": lambda tensor: torch.zeros(3, 3).to_sparse(),
    "compressed rows": lambda tensor: torch.zeros(3, 3).to_sparse_csr(),
    "nested": lambda tensor: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "jagged": lambda tensor: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "oneDNN's": lambda tensor: torch.zeros(3, 3).to_mkldnn(),
    "complex": lambda tensor: torch.zeros(tensor.shape[:2], dtype=torch.complex64),
    "quantised": lambda tensor: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
    "of traces": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "without data": lambda tensor: tensor.to("meta"),
}


WITHOUT_DATA = ("of traces", "without data")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PATHS)
def test_tensors_of_another_kind(path):
    """One of them among sound ones; an op that takes one tensor alone returns shapes for one without data."""
    name, values, (public, launcher) = path.rpartition(".")[2], smallest_case(path), functions_of(path)
    for field, tensor in tensors_of(values).items():
        for (kind, made), function in itertools.product(FOREIGN.items(), (public, launcher)):
            wrong = copied(values) | {field: made(tensor)}
            if len(tensors_of(values)) == 1 and function is public and kind in WITHOUT_DATA:
                shapes = [[each.shape for each in as_tuple(function(**given))] for given in (wrong, values)]
                assert shapes[0] == shapes[1]
                continue
            text = refused(name, "", function, **wrong)
            # the tensor itself, or the first one that does not agree with it
            assert field in text or "like" in text, (field, kind, text)


@pytest.mark.parametrize("path", PATHS)
def test_numbers_beyond_every_size(path):
    """Named before anything is allocated, looped over or handed to a kernel."""
    op, values = path.rpartition(".")[2], smallest_case(path)
    for name, parameter in signature_of(path).items():
        kind = str(parameter.annotation).removesuffix(" | None")
        for number in {"int": (2**40, 2**70, 10**5000), "float": (10**400,)}.get(kind, ()):
            if (name, number) == ("token_budget", 2**40):
                continue  # no size
            for function in functions_of(path):
                text = refused(op, "", function, **copied(values) | {name: number})
                assert len(text) < 300 and (name in text or "given" in text or "with" in text), text


@pytest.mark.parametrize("path", PATHS)
def test_arguments_that_are_not_read(path):
    """Those of another mode, in one case of each: they are checked all the same."""
    name, modes = path.rpartition(".")[2], {}
    for values in cases_of(path):
        mode = tuple((field, value is None, value if isinstance(value, str) else "") for field, value in values.items())
        modes.setdefault(mode, values)
    fields = [field for field, parameter in signature_of(path).items() if "Tensor" in str(parameter.annotation)]
    for values in modes.values():
        for field in fields:
            for wrong in ("no tensor", [1], torch.zeros((1,) * 9)):
                if field != "out" or isinstance(wrong, torch.Tensor):
                    refused(name, "", getattr(eagle_kernels, name), **values | {field: wrong})


@pytest.mark.parametrize("path", PATHS)
def test_a_keyword_that_does_not_exist(path):
    name, last = path.rpartition(".")[2], [*signature_of(path)][-1]
    rule = rf"got an unexpected keyword argument '{last}s'; did you mean {last}\?$"
    for function, values in itertools.product(functions_of(path), ({}, smallest_case(path))):
        refused(name, rule, function, **values, **{last + "s": 1})


@pytest.mark.parametrize("name", eagle_kernels.ops.__all__)
def test_functions_can_be_sent_to_other_processes(name):
    for module in (eagle_kernels, eagle_kernels.raw):
        if function := getattr(module, name, None):
            assert pickle.loads(pickle.dumps(function)) is function


INTS = torch.tensor
FAR = INTS([2**31 - 1])
ROW = {"req_pool_indices": INTS([0]), "req_to_token": INTS([[5, 6, 7, 8]])}
# calls whose lengths say much more than their tables and outputs hold, and what of their results
BOUNDED = {
    "plan_attention": ({"seq_lens": INTS([2**31 - 2**21])}, lambda plan: plan.tolist() == [0, 2**26 - 2**16]),
    "assign_req_to_token": (
        ROW | {"req_to_token": INTS([[5, 6, 7, 8]]), "starts": INTS([1]), "ends": FAR, "cache_locs": INTS([1, 2])},
        lambda result: result is None,
    ),
    "kv_indices": (
        ROW | {"seq_lens": FAR, "capacity": 6},
        lambda listed: listed.kv_indices.tolist() == [5, 6, 7, 8, -1, -1] and listed.overflow.item() == 2**31 - 1,
    ),
    "chain_kv_indices": (
        ROW | {"kv_lens": FAR, "num_verify_tokens": 2, "capacity": 6},
        lambda listed: listed.kv_indptr.tolist() == [0, 6, 6],
    ),
    "draft_kv_indices": (
        ROW | {"seq_lens": FAR, "topk": 2, "num_steps": 2, "capacity": 3},
        lambda listed: listed.kv_indices.tolist() == [[5, 6, 7]] * 2,
    ),
    "extend_cache_locs": (
        ROW | {"starts": INTS([3]), "ends": FAR, "capacity": 3},
        lambda listed: listed.cache_locs.tolist() == [8, -1, -1] and listed.positions.tolist() == [3, 4, 5],
    ),
    "draft_cache_locs": (
        ROW | {"seq_lens": FAR - 1, "topk": 2, "num_steps": 2, "page_size": 2**31 - 1, "capacity": 2},
        lambda listed: listed.copy_indptr.tolist() == [0, 2] and listed.source_locs.tolist() == [-1, -1],
    ),
    "accepted_cache_locs": (
        {"cache_locs": INTS([5]), "accept_token_num": FAR, "num_verify_tokens": 1, "seq_lens": FAR},
        lambda listed: listed.source_locs.tolist() == [5],
    ),
}


@contextlib.contextmanager
def within(seconds: int):
    """Raises TimeoutError, which no call does by itself."""

    def ring(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", BOUNDED)
def test_lengths_beyond_the_outputs_cost_nothing(name):
    values, holds = BOUNDED[name]
    with within(5):
        assert holds(getattr(eagle_kernels, name).reference(**copied(values)))


def pages_of_memory(monkeypatch, number: int, size: int = 2**20) -> None:
    """Lets this machine have this number of pages of memory."""
    monkeypatch.setattr("os.sysconf", lambda word: number if word == "SC_PHYS_PAGES" else size)


@pytest.mark.parametrize("name", ["kv_indices", "chain_kv_indices", "draft_kv_indices"])
def test_capacities_beyond_the_memory(name, monkeypatch):
    """What is not there is not asked for, as systems promise it: all pages of this machine are taken for two."""
    pages_of_memory(monkeypatch, 2)
    monkeypatch.setattr(check, "_empty", lambda *_: pytest.fail("memory was asked for"))
    values = BOUNDED[name][0] | {"capacity": 2**28}
    rule = r"out\.kv_indices must fit 8 times into the memory of 2097152 bytes, .* got shape"
    with within(5):
        refused(name, rule, getattr(eagle_kernels, name), **values)


# slots past int32, for a table or a list of int32
PAST_INT32 = {
    "kv_indices": ("req_to_token", ROW | {"seq_lens": INTS([2]), "capacity": 8}),
    "chain_kv_indices": ("req_to_token", ROW | {"kv_lens": INTS([2]), "num_verify_tokens": 1, "capacity": 8}),
    "draft_kv_indices": ("req_to_token", ROW | {"seq_lens": INTS([2]), "topk": 1, "num_steps": 1, "capacity": 8}),
    "extend_cache_locs": ("req_to_token", ROW | {"starts": INTS([0]), "num_tokens": 2}),
    "draft_cache_locs": ("req_to_token", ROW | {"seq_lens": INTS([0]), "topk": 1, "num_steps": 2}),
    "accepted_cache_locs": ("cache_locs", {"cache_locs": INTS([3, 4]), "num_verify_tokens": 2,
                                           "accept_token_num": INTS([1])}),
    "assign_req_to_token": (
        "cache_locs", ROW | {"req_to_token": torch.zeros(1, 4, dtype=torch.int32), "starts": INTS([0]),
                             "ends": INTS([2]), "cache_locs": INTS([3, 4])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", PAST_INT32)
def test_slots_past_int32(name, debug, monkeypatch):
    """None is cut short; what is not read may be one, and out may hold int64."""
    (field, values), function = PAST_INT32[name], getattr(eagle_kernels, name)
    result = function(**copied(values))
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", debug)
    wide = values[field].clone()
    wide.view(-1)[1] = 2**40

    def out_of(dtype) -> dict:
        if result is None:
            return {}
        is_slots = lambda name: name.endswith(("indices", "locs", "positions"))  # noqa: E731
        listed = (x.to(dtype) if is_slots(name) else x for name, x in result._asdict().items())
        return {"out": type(result)(*listed)}

    rule = rf"{field} must fit in .*int32.*, got {2**40} at \[(0, )?1\]"
    refused(name, rule, function, **copied(values) | {field: wide}, **out_of(torch.int32))
    if result is not None:
        listed = function(**values | {field: wide}, **out_of(torch.int64))
        assert any(2**40 in tensor for tensor in listed)
    if field == "req_to_token":
        if not debug:  # a row that does not exist is not read
            function(**values | {field: wide, "req_pool_indices": INTS([-1])})
        wide[0, 1], wide[0, 3] = 6, 2**40
        function(**values | {field: wide})


def paged(page_size: int) -> dict:
    """A token in the middle of the second page; no list holds the first one."""
    slots = torch.full((1, 3 * page_size), 2**60)
    return {"req_to_token": slots, "starts": INTS([page_size + page_size // 2]), "seq_lens": INTS([1])}


# (op, arguments, place of a slot that is listed, slots of a page where pages are listed instead)
DRAFTS = ROW | {"topk": 2, "num_steps": 1, "page_size": 2, "capacity": 8}
AT_THE_LIMIT = [
    *((name, values, 1, 1) for name, (_, values) in PAST_INT32.items()),
    *(("kv_indices", ROW | paged(size) | {"page_size": size, "capacity": 8}, size, size) for size in (1, 2, 3, 16)),
    *((name, DRAFTS | {"seq_lens": INTS([1])}, place, 1)
      for name in ("draft_cache_locs", "draft_kv_indices") for place in (0, 1, 3)),
    ("draft_cache_locs", DRAFTS | {"seq_lens": INTS([1])}, 2, 1),
    ("accepted_cache_locs", PAST_INT32["accepted_cache_locs"][1] | {"page_size": 2, "seq_lens": INTS([3])}, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "place", "unit"), AT_THE_LIMIT, ids=[f"{n}-{p}-{unit}" for n, _, p, unit in AT_THE_LIMIT]
)
def test_the_last_slot_that_int32_holds(name, values, place, unit):
    """It is listed, or its page, by kernel and reference; the next one only in int64."""
    field = PAST_INT32[name][0]
    most = (2**31 - 1) * unit + unit - 1
    functions = functions_of(name)
    result = functions[0](**copied(values | {field: values[field].clamp(max=99)}))

    def listed(function, slot: int, dtype) -> list[torch.Tensor]:
        arguments = copied(values) | {field: values[field].clone()}
        arguments[field].view(-1)[place] = slot
        if result is None:
            arguments["req_to_token"] = arguments["req_to_token"].to(dtype)
            function(**arguments)
            return [arguments["req_to_token"]]
        holds_slots = lambda field: field.endswith(("indices", "locs"))  # noqa: E731
        out = type(result)(*(x.to(dtype) if holds_slots(f) else x.clone() for f, x in result._asdict().items()))
        return list(function(**arguments, out=out))

    for slot, dtype in ((most, torch.int32), (most, torch.int64), (most + 1, torch.int64)):
        for function in functions:
            try:
                lists = listed(function, slot, dtype)
            except ValueError as error:
                raise AssertionError(f"{slot} is refused for {dtype}") from error
            assert any(slot // unit in tensor for tensor in lists)
    rule = rf"{field} must fit in .*int32.*, got {most + 1} at \[(0, )?{place}\]"
    refused(name, rule, listed, functions[0], most + 1, torch.int32)


def test_heads_without_elements():
    empty = lambda *shape: torch.zeros(*shape, 0)  # noqa: E731
    rows = {"qo_indptr": INTS([0, 3]), "max_query": 3, "is_causal": True}
    cache = {"k_cache": empty(2, 4, 1), "v_cache": empty(2, 4, 1), "block_table": INTS([[0, 1]]), "seq_lens": INTS([3])}
    for name, values in {
        "prefill_attention": rows | {"query": empty(3, 2), "key": empty(3, 1), "value": empty(3, 1)},
        "tree_attention": rows | cache | {"query": empty(3, 2)},
        "gqa_decode": cache | {"query": empty(1, 2)},
    }.items():
        for function in functions_of(name):
            refused(name, "query must have heads of at ", function, **values)


def test_outputs_beyond_the_memory():
    """On the CPU, where a reference needs more than the outputs; a GPU's own message says what would help."""
    values = {"req_pool_indices": torch.arange(2), "req_to_token": torch.arange(40).view(2, 20),
              "seq_lens": torch.tensor([3, 5]), "topk": 2**30 - 1, "num_steps": 64, "capacity": 2**31 - 1}  # fmt: skip
    rule = r"out\.kv_\w+ must fit (8 times )?into .*memory.*, got shape \[64, 2147483647\]"
    refused("draft_kv_indices", rule, eagle_kernels.draft_kv_indices, **values)


def test_the_room_that_references_need(monkeypatch):
    """8 times that of integers, twice that of other outputs, to the byte; less than 1 GiB is not looked at."""
    coin = numpy.random.default_rng(0)
    of = lambda size, dtype: check.Spec((2, int(size)), dtype, torch.device("meta"))  # noqa: E731
    for _ in range(40):
        dtypes = coin.choice([torch.int32, torch.int64, torch.float32, torch.bool, torch.float16], 3)
        specs = [of(coin.integers(1, 2**28), dtype) for dtype in dtypes]
        sizes = [2 * spec.shape[1] * spec.dtype.itemsize for spec in specs]
        needed = sum(size * (2 if spec.dtype not in check.INTEGER else 8) for size, spec in zip(sizes, specs))
        contract = Three(*specs)
        pages_of_memory(monkeypatch, needed, 1)
        assert not refusal(check.check_room, "op", contract)
        pages_of_memory(monkeypatch, needed - 1, 1)
        largest = "abc"[int(numpy.argmax(sizes))]
        if sum(sizes) < 2**30:
            check.check_room("op", contract)
        else:
            times = 2 if specs["abc".index(largest)].dtype not in check.INTEGER else 8
            rule = rf"^eagle_kernels\.op: out\.{largest} must fit {times} times into the memory of {needed - 1} bytes"
            assert re.match(rule, refusal(check.check_room, "op", contract))
    pages_of_memory(monkeypatch, 1, 1)
    check.check_room("op", of(2**29 - 1, torch.bool))
    check.check_room("op", None)
    refused("op", "out must fit 2 times .* which is 1073741824 bytes", check.check_room, "op", of(2**29, torch.bool))


class Three(NamedTuple):
    """What an op of three outputs returns."""

    a: object
    b: object
    c: object


def test_a_pool_that_overlaps_itself(device):
    """Written in place as rows of one page, or as keys and values at once."""
    key, cache = torch.ones(1, 1, 16, device=device), torch.zeros(2, 4, 1, 16, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    for function in (eagle_kernels.write_kv, eagle_kernels.raw.write_kv):
        refused("write_kv", "k_cache must not overlap v_cache", function, key, key, cache, cache, slots)
        pages = cache[:1].expand(2, 4, 1, 16)
        refused("write_kv", "k_cache must not overlap itself", function, key, key, pages, cache.clone(), slots)
        both = torch.zeros(2, 2, 4, 1, 16, device=device)  # as vLLM lays them out
        function(key, key, both[:, 0], both[:, 1], slots)


# calls of AITER's helpers, and what is said about them
HELPERS = {
    "half a number": (lambda: aiter.next_power_of_2(5.5), "next_power_of_2: n must be an int, got float"),
    "no alignment": (lambda: aiter.pad_to_alignment(PROBS, 0), "pad_to_alignment: alignment must be at least 1, got 0"),
    "no axis": (lambda: aiter.pad_to_alignment(PROBS, 4, 2), r"pad_to_alignment: dim must lie in -2\.\.1, got 2"),
    "more than all": (lambda: aiter.fast_topk_torch(PROBS, 17), r"fast_topk_torch: k must lie in 0\.\.16, got 17"),
    "a vocabulary of 2^40": (lambda: aiter.generate_token_bitmask(INTS([[0]]), 2**40),
                             r"generate_token_bitmask: vocab_size must lie in 0\.\.2147483647, got 1099511627776"),
    "no drafts": (lambda: aiter.compute_tree_statistics(PROBS, 0, 1), "num_draft_tokens must be at least 1, got 0"),
    "a mask mode": (lambda: aiter.sgl_kernel.layout(9), "tree_mask_mode must be 0, 1 or 2, got 9"),
    "no models": (lambda: aiter.EAGLEInference(None, None), "EAGLEInference: target_model must be .*, got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("case", HELPERS)
def test_helpers_of_the_facades(case):
    call, message = HELPERS[case]
    one_line(message, call)


# a value of another kind for each kind of argument; None stands for itself
OTHER_KINDS = {
    "torch.Tensor": (1, [1], "1"),
    "int": (True, 1.5, "1"),
    "float": (True, "1", NAN),
    "bool": (1, "yes", None),
    "str": (3, True, 10**5000, torch.ones(5, 5)),
}


@pytest.mark.parametrize("path", PATHS)
def test_arguments_of_another_kind(path):
    """True is no number, 1 is not True, and NaN is nothing; of an option that may be absent as well."""
    op, values = path.rpartition(".")[2], next(cases_of(path))
    for name, parameter in signature_of(path).items():
        kind = str(parameter.annotation).removesuffix(" | None")
        is_needed = parameter.default is parameter.empty and kind == "int" == str(parameter.annotation)
        for other in (*OTHER_KINDS.get(kind, ()), *((None,) if is_needed else ())):
            for function in functions_of(path):
                refused(op, f"{name} must .*, got ", function, **values | {name: other})


def overlapping(buffers):
    """A call of build_tree with the outputs that `buffers` makes of sound ones."""
    values = make_tree(2, 4, 3, 8)
    tree = eagle_kernels.build_tree(**values)
    return lambda function: function(**values, out=buffers(tree))


def shifted(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors like it, each but for its first row in the place of the other's last ones."""
    rows = torch.empty(len(tensor) + 1, *tensor.shape[1:], dtype=tensor.dtype)
    return rows[:-1], rows[1:]


def rope_onto(function):
    """The query goes where the key is."""
    heads = torch.randn(3, 2, 8)
    key, angles = torch.randn(3, 2, 8), torch.ones(5, 4)
    out = type(eagle_kernels.rope(heads, key, torch.arange(3), angles, angles))(key, torch.empty_like(key))
    return function(heads, key, torch.arange(3), angles, angles, out=out)


LOGITS = make_logits(4, 30, temperature=1.0)
NORM = make_norm(4, 16, torch.float32, has_residual=True)
SILU = make_silu(4, 16, torch.float32)
LINEAR = make_linear(4, 16, 16, torch.float32)
PROBS = torch.rand(4, 16)

# name of the op, a call of it with overlapping buffers, and which two
OVERLAPS = {
    "one buffer twice": (
        "build_tree", overlapping(lambda tree: tree._replace(draft_tokens=tree.positions)),
        "out.positions must not overlap out.draft_tokens",
    ),
    "views of one memory": (
        "build_tree",
        overlapping(lambda tree: tree._replace(
            **dict(zip(("retrieve_next_token", "retrieve_next_sibling"), shifted(tree.retrieve_index)))
        )),
        "out.retrieve_next_token must not overlap out.retrieve_next_sibling",
    ),
    "an input": (
        "sample_from_logits", lambda function: function(**LOGITS, out=LOGITS["seeds"]), "out must not overlap seeds",
    ),
    "a part of an input": (
        "top_p_renorm", lambda function: function(PROBS[:3], torch.ones(3), out=PROBS[1:]),
        "out must not overlap probs",
    ),
    "the rows of an input": (
        "linear_decode", lambda function: function(**LINEAR, out=LINEAR["x"]), "out must not overlap x",
    ),
    "another place of an input that may be overwritten": (
        "silu_and_mul", lambda function: function(**SILU, out=SILU["gate"][:, 1:-1][:, :16]),
        "out must be gate itself or not overlap it",
    ),
    "an input that may be overwritten, with shorter rows": (
        "silu_and_mul", lambda function: function(**SILU, out=SILU["gate"].view(-1)[:64].view(4, -1)),
        "out must be gate itself or not overlap it",
    ),
    "an input that only another output may overwrite": ("rope", rope_onto, "out.query must not overlap key"),
    "rows of an output on each other": (
        "silu_and_mul", lambda function: function(**SILU, out=torch.empty(16).expand(4, -1)),
        "out must not overlap itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERLAPS)
def test_overlapping_buffers(case):
    name, call, message = OVERLAPS[case]
    for function in functions_of(name):
        refused(name, f"{message}, got ", call, function)


@pytest.mark.parametrize("module", [eagle_kernels, eagle_kernels.raw], ids=["public", "raw"])
def test_buffers_that_only_share_a_storage_are_fine(module, device):
    """Columns of one matrix beside each other, an arena with inputs and outputs, and what is documented as in place."""
    rows = {"req_pool_indices": torch.arange(2), "req_to_token": torch.arange(40).view(2, 20)}
    values = to_device(rows | {"seq_lens": torch.tensor([3, 5])}, device) | {"topk": 2, "num_steps": 3, "capacity": 25}
    expected = module.draft_kv_indices(**values)
    wide = torch.empty(3, 5 + 25, dtype=torch.int32, device=device)
    out = type(expected)(wide[:, :5], wide[:, 5:], torch.empty(1, dtype=torch.int32, device=device))
    for ours, theirs in zip(module.draft_kv_indices(**values, out=out), expected):
        assert torch.equal(ours, theirs)
    arena, top_p = torch.rand(8, 16, device=device), torch.ones(4, device=device)
    assert torch.equal(module.top_p_renorm(arena[:4], top_p), module.top_p_renorm(arena[:4], top_p, out=arena[4:]))
    norm = to_device({name: value.clone() if name != "eps" else value for name, value in NORM.items()}, device)
    wanted = module.rms_norm(**norm)
    module.rms_norm(**norm, out=type(wanted)(norm["x"], norm["residual"]))
    assert torch.equal(norm["x"], wanted.output) and torch.equal(norm["residual"], wanted.residual)
    gate = to_device(SILU, device)["gate"].clone()
    wanted = module.silu_and_mul(gate)
    assert torch.equal(module.silu_and_mul(gate, out=gate[:, : gate.shape[1] // 2]), wanted)


@pytest.mark.parametrize("module", [eagle_kernels, eagle_kernels.raw], ids=["public", "raw"])
def test_buffers_of_another_kind(module):
    """No tensors, too few, or one where there should be several, and the other way round."""
    tree = make_tree(2, 4, 3, 8)
    for out, got in ((5, "int"), ((torch.zeros(1),), "1"), (torch.zeros(6, 2), "Tensor")):
        refused("build_tree", f"out must hold 6 tensors, got {got}$", module.build_tree, **tree, out=out)
    for out, got in ((5, "int"), ((torch.zeros(4, 16),), "tuple")):
        refused("silu_and_mul", f"out must be a tensor, got {got}$", module.silu_and_mul, **SILU, out=out)
    out = tuple(eagle_kernels.build_tree(**tree))
    for wrong in (None, [1]):
        rule = "out.tree_mask must be a tensor, got "
        refused("build_tree", rule, module.build_tree, **tree, out=(wrong, *out[1:]))


@pytest.mark.parametrize("path", [path for path in PATHS if hasattr(module_of_op(path), "MUTATES")])
def test_inputs_in_the_place_of_what_changes(path):
    """Each input begins where a tensor begins that the op works on in place."""
    name, values = path.rpartition(".")[2], smallest_case(path)
    for changed, (field, tensor) in itertools.product(module_of_op(path).MUTATES, tensors_of(values).items()):
        if field == changed or not tensor.numel():
            continue
        size = max(tensor.nbytes, values[changed].nbytes) + 64
        memory = torch.zeros(size, dtype=torch.uint8).untyped_storage()
        at_once = {
            each: torch.empty(0, dtype=values[each].dtype).set_(memory, 0, values[each].shape)
            for each in (changed, field)
        }
        for function in functions_of(path):
            rule = f"({changed}|{field}) must not overlap ({changed}|{field}), "
            refused(name, rule, function, **copied(values) | at_once)


def test_overlaps_are_those_of_the_addresses():
    """Random views of one memory, against the set of elements of each."""
    memory, generator, found = torch.zeros(64), random.Random(0), [0, 0]

    def view():
        shape = [generator.randint(1, 4) for _ in range(generator.randint(1, 3))]
        strides = [generator.randint(0, 9) for _ in shape]
        last = sum((size - 1) * stride for size, stride in zip(shape, strides))
        return memory.as_strided(shape, strides, generator.randint(0, max(0, 63 - last))) if last < 64 else view()

    def places(tensor):
        index = torch.arange(64).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return index.flatten().tolist()

    for _ in range(3000):
        one, other = view(), view()
        if generator.random() < 0.4:  # of one look, side by side or not, as keys and values in one pool
            offset = generator.randint(0, 63 - max(places(one)) + one.storage_offset())
            other = memory.as_strided(one.shape, one.stride(), offset)
        is_wrong = len(set(places(one))) < one.numel() or not set(places(one)).isdisjoint(places(other))
        found[is_wrong] += 1
        try:
            refuse_overlaps("op", {"other": other}, one, (), {})
        except ValueError as error:
            assert is_wrong, (error, one.shape, one.stride(), other.shape, other.stride())
        else:
            assert not is_wrong, (one.shape, one.stride(), other.shape, other.stride())
    assert min(found) > 100


def test_an_output_takes_the_place_of_an_input_element_by_element():
    """Random views of one memory, of which the first may be in the place of the other: each element is at the address
    of its own, or of none. Rows that lie on each other, of one or the other, are no such place."""
    memory, generator, found = torch.zeros(96), random.Random(1), [0, 0]

    def view(shape, strides, offset, dtype):
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
        return memory.view(dtype).as_strided(shape, strides, offset) if last < 96 else None

    def elements(tensor):
        """The indices of all elements by their address."""
        places = {}
        for index in itertools.product(*map(range, tensor.shape)):
            place = tensor.storage_offset() + sum(map(operator.mul, index, tensor.stride()))
            places.setdefault(place, set()).add(index)
        return places

    for _ in range(4000):
        shape = [generator.randint(1, 4) for _ in range(generator.choice((1, 2, 2, 3)))]
        strides = [generator.choice((0, 1, 2, 4, 5, 16, 20)) for _ in shape[1:]] + [1]
        changed = [generator.choice((stride, stride, stride, 0, 4, 7)) for stride in strides]
        dtype = generator.choice((torch.float32, torch.float32, torch.int32))
        offset = generator.choice((0, 0, 0, 1, 4, 30))
        one, other = view(shape, strides, 0, torch.float32), view(shape, changed, offset, dtype)
        if one is None or other is None:
            continue
        ours, theirs = elements(one), elements(other)
        common = ours.keys() & theirs.keys()
        is_own = all(len(indices) == 1 for indices in ours.values())
        is_sound = is_own and (not common or dtype == torch.float32 and all(ours[at] == theirs[at] for at in common))
        must_pass = is_own and (not common or dtype == torch.float32 and ours == theirs)
        try:
            refuse_overlaps("op", {"other": other}, one, (), {"out": ("other",)})
        except ValueError as error:
            assert not must_pass, (error, shape, strides, changed, offset)
        else:
            assert is_sound, (shape, strides, changed, offset, dtype)
        found[is_sound] += 1
        if common or not is_own:  # what is changed in place shares nothing
            with pytest.raises(ValueError, match="must not overlap"):
                refuse_shared("op", {"one": one, "other": other}, ("one",))
        else:
            refuse_shared("op", {"one": one, "other": other}, ("one",))
    assert min(found) > 100


NO_DERIVATIVES = "must not require grad, since ops have no derivatives .*no_grad.*, got requires_grad=True"


def with_gradient(values: dict, name: str) -> dict:
    return values | {name: values[name].detach().clone().requires_grad_()}


# an op, its arguments one of which requires a gradient, which, and what is called
GRADIENTS = {
    "a weight": ("rms_norm", with_gradient(NORM, "weight"), "weight"),
    "the input of a layer": ("linear_decode", with_gradient(LINEAR, "x"), "x"),
    "a buffer": ("silu_and_mul", SILU | {"out": torch.empty(4, 16, requires_grad=True)}, "out"),
    "probabilities": ("top_p_renorm", with_gradient({"probs": PROBS, "top_p": torch.ones(4)}, "probs"), "probs"),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_are_not_dropped(case):
    name, values, field = GRADIENTS[case]
    function = getattr(eagle_kernels, name)
    refused(name, f"{field} {NO_DERIVATIVES}", function, **values)
    for allowed in (torch.no_grad(), torch.inference_mode()):
        with allowed:
            result = function(**values)
            assert values.get("out") is not None or not any(t.requires_grad for t in as_tuple(result))


def test_gradients_are_not_dropped_below_the_public_functions():
    """Of torch.ops, of an op that writes in place, and of what torch.compile makes of a call."""
    weight = NORM["weight"].clone().requires_grad_()
    refused("rms_norm", f"weight {NO_DERIVATIVES}", torch.ops.eagle_kernels.rms_norm, NORM["x"], weight)
    key, cache = torch.ones(1, 1, 8, requires_grad=True), torch.zeros(1, 1, 1, 8)
    refused("write_kv", f"key {NO_DERIVATIVES}", eagle_kernels.write_kv, key, key, cache, cache.clone(), INTS([0]))
    compiled = torch.compile(lambda weight: eagle_kernels.rms_norm(NORM["x"], weight).output, backend="aot_eager")
    with pytest.raises(Exception, match=r"eagle_kernels\.rms_norm: weight must not require grad"):
        compiled(weight)
    assert torch.equal(compiled(weight.detach()), eagle_kernels.rms_norm(NORM["x"], weight.detach()).output)


NO_TANGENTS = "must not carry a tangent, since ops have no derivatives .*, got a dual tensor"
WITH_TANGENTS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("path", PATHS)
def test_tangents_are_not_dropped(path):
    """Of every tensor of floats, also below torch.no_grad(), which does not end forward mode."""
    name, values = path.rpartition(".")[2], smallest_case(path)
    function = getattr(eagle_kernels, name)
    for field, tensor in tensors_of(values).items():
        if tensor.dtype in WITH_TANGENTS:
            for surrounding in (contextlib.nullcontext, torch.no_grad):
                with forward_ad.dual_level(), surrounding():
                    dual = forward_ad.make_dual(tensor.clone(), torch.ones_like(tensor))
                    refused(name, f"{field} {NO_TANGENTS}", function, **values | {field: dual})
    with forward_ad.dual_level():  # none of these is dual
        function(**copied(values))


def norm(x: torch.Tensor) -> torch.Tensor:
    return eagle_kernels.rms_norm(x, NORM["weight"]).output


def norm_into(x: torch.Tensor) -> torch.Tensor:
    out = type(eagle_kernels.rms_norm(NORM["x"], NORM["weight"]))(torch.empty(4, 16), torch.empty(0, 16))
    return eagle_kernels.rms_norm(x, NORM["weight"], out=out).output


def total(function):
    return lambda x: function(x).sum()


# transforms of a function at x
TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "dual within vmap": lambda f, x: torch.func.vmap(lambda row: torch.func.jvp(f, (row,), (row,)))(x[None]),
    "vmap of duals": lambda f, x: torch.func.jvp(lambda x: torch.func.vmap(f)(x[None]), (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(total(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(total(f))(x),
    "functional jvp": lambda f, x: torch.autograd.functional.jvp(f, x, x),
    "functional hessian": lambda f, x: torch.autograd.functional.hessian(total(f), x),
    "backward": lambda f, x: total(f)(x.clone().requires_grad_()).backward(create_graph=True),
    "checkpoint": lambda f, x: torch.utils.checkpoint.checkpoint(f, x.clone().requires_grad_(), use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [norm, norm_into])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_do_not_lose_derivatives(transform, function):
    with pytest.raises(RuntimeError, match=r"no derivatives|Batching rule not implemented for eagle_kernels::rms_norm"):
        TRANSFORMS[transform](function, NORM["x"])


def test_transforms_without_derivatives():
    rows = torch.stack([NORM["x"], NORM["x"] + 1])
    assert torch.equal(torch.func.vmap(norm)(rows), torch.stack([norm(row) for row in rows]))
    assert torch.equal(torch.func.functionalize(norm)(rows[0]), norm(rows[0]))
    compiled = torch.compile(lambda x: torch.func.jvp(norm, (x,), (x,)), backend="aot_eager")
    with pytest.raises(Exception, match=r"rms_norm: x must not carry a tangent"):
        compiled(rows[0])


def sampled_or_greedy(is_sampled: bool) -> dict:
    values = make_sampled(2, 4, 3, 8)
    of_sampling = () if is_sampled else ("positions", "seeds", "temperature")
    return {name: value for name, value in values.items() if name not in of_sampling}


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_verify_tree_returns_three_fields(is_sampled):
    values = sampled_or_greedy(is_sampled)
    verdict = eagle_kernels.verify_tree(**values)
    assert verdict._fields == ("predicts", "accept_index", "accept_token_num")
    out = type(verdict)(*(torch.empty_like(tensor) for tensor in verdict))
    again = eagle_kernels.verify_tree(**values, out=out)
    assert type(again) is type(verdict) and all(ours is theirs for ours, theirs in zip(again, out))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, verdict))
    refused("verify_tree", "out must hold 3 tensors, got 2", eagle_kernels.verify_tree, **values, out=tuple(out)[:2])


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec_steps": -1}, r"spec_steps must lie in 0\.\.1024, got -1"),
        ({"spec_steps": "2"}, "spec_steps must be an int, got str"),
        ({"candidates": None}, "candidates must be a tensor, got NoneType"),
        ({"retrieve_index": torch.zeros(2, 4)}, "retrieve_index must have dtype int32 or int64, got float32"),
        ({"positions": "junk"}, "positions must be a tensor, got str"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions must have shape \[16\], got \[3\]"),
        ({"simulated_rate": None}, "got an unexpected keyword argument 'simulated_rate'; did you mean simulated_rates"),
        ({"accept_policy": "none"}, "accept_policy must be one of "),
        ({"target_logits": torch.zeros(16, 8, requires_grad=True)}, "target_logits must not require grad"),
    ],
    ids=str,
)
def test_verify_tree_names_itself(is_sampled, change, message):
    """And not the op that it calls."""
    refused("verify_tree", message, eagle_kernels.verify_tree, **sampled_or_greedy(is_sampled) | change)


@pytest.mark.parametrize("path", ["attention.prefill_attention", "attention.tree_attention"])
def test_debug_mode_checks_the_longest_request(path, monkeypatch):
    """max_query: rows of a request beyond that are not attended."""
    name, values = path.rpartition(".")[2], next(case for case in cases_of(path) if "qo_indptr" in case)
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    most, num_rows = int(values["qo_indptr"].diff().max()), len(values["query"])
    for change, rule in (
        ({"max_query": most - 1}, f"give no request more than max_query = {most - 1} rows, got {most}"),
        ({"qo_indptr": values["qo_indptr"] + 1}, rf"ascend within 0\.\.{num_rows}, got {num_rows + 1}"),
        ({"qo_indptr": values["qo_indptr"].flip(0)}, rf"ascend within 0\.\.{num_rows}"),
    ):
        refused(name, f"qo_indptr must {rule}", getattr(eagle_kernels, name), **values | change)
    getattr(eagle_kernels, name)(**values)


@pytest.fixture(scope="module")
def engine():
    return EAGLEInference(ToyModel(), ToyModel(seed=1), EAGLEConfig(topk=2, num_steps=2))


NO_NUMBER = "must be a finite int or float"
ENGINE = {
    "a NaN temperature": (lambda e: e.generate([1], 1, temperature=NAN), f"temperature {NO_NUMBER}, got nan"),
    "an infinite one": (lambda e: EAGLEConfig(temperature=math.inf), f"temperature {NO_NUMBER}, got inf"),
    "a negative one": (lambda e: EAGLEConfig(temperature=-1), "temperature must be at least 0, got -1"),
    "of a request": (lambda e: SamplingParams(temperature=NAN), f"temperature {NO_NUMBER}, got nan"),
    "a NaN top_p": (lambda e: EAGLEConfig(top_p=NAN), f"top_p {NO_NUMBER}, got nan"),
    "a NaN min_p": (lambda e: EAGLEConfig(min_p=NAN), f"min_p {NO_NUMBER}, got nan"),
    "a NaN delta": (lambda e: EAGLEConfig(typical_delta=NAN), "typical_delta must be a finite number, got nan"),
    "topk=True": (lambda e: e.generate([1], 1, topk=True), "topk must be an int, got True"),
    "temperature=True": (lambda e: SamplingParams(temperature=True), f"temperature {NO_NUMBER}, got True"),
    "cuda_graph=1": (lambda e: EAGLEConfig(cuda_graph=1), "cuda_graph must be True, False or None, got 1"),
    "phase_times=1": (lambda e: EAGLEConfig(phase_times=1), "phase_times must be True or False, got 1"),
    "speculative=1": (lambda e: e.generate([1], 1, speculative=1), "speculative must be True or False, got 1"),
    "speculative='no'": (lambda e: e.stream([1], 1, speculative="no"), "speculative must be True or False, got 'no'"),
    "a warm-up's": (lambda e: e.warmup(speculative=None), "warmup: speculative must be True or False, got None"),
    "a warm-up of no params": (lambda e: e.warmup("greedy"), "warmup: params must be SamplingParams or a dict"),
    "a bar of 1": (lambda e: e.benchmark([1], 1, progress=1), "benchmark: progress must be True or False, got 1"),
    "truths as tokens": (lambda e: e.next_token_logits([True]),
                         "next_token_logits: .* must be text, integer ids .* holds True"),
    "a token past the end": (lambda e: e.next_token_logits([40]),
                             r"token ids must lie in 0\.\.39, the prompt holds 40"),
    "no token": (lambda e: e.next_token_logits([]), "next_token_logits: .* must hold at least one token"),
    "device=True": (lambda e: EAGLEInference(e.draft, e.target, device=True),
                    "device must be where the models are, on .*, got True"),
    "check_weights='no'": (
        lambda e: EAGLEInference.from_pretrained(None, "x", {"method": "ngram"}, check_weights="no"),
        "from_pretrained: check_weights must be True or False, got 'no'",
    ),
    "a million million samples": (lambda e: e.generate([1], 1, n=10**12), "n must be at most 1048576 for 1 prompts"),
    "a server's truths": (lambda e: EAGLEConfig.from_speculative_config({"method": "naive", "topk": True}),
                          "topk must be 1 or absent for method='naive', which has no drafts, got True"),
    "a server's zero": (
        lambda e: EAGLEConfig.from_speculative_config({"method": "naive", "num_speculative_tokens": False}),
        "num_speculative_tokens must be an int of at least 0, got False",
    ),
    "a server's one": (
        lambda e: EAGLEConfig.from_speculative_config({"method": "ngram", "num_gpu_block_expand_ratio": True}),
        "num_gpu_block_expand_ratio must be 1.0 or absent, since the server decides this, got True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENGINE)
def test_the_engine_always_says_so(case, engine):
    call, message = ENGINE[case]
    one_line(message, call, engine)


class Watched(ToyModel):
    """Notes how many threads its forward may take."""

    def __init__(self, **others):
        super().__init__(**others)
        self.seen = set()

    def forward(self, *args, **kwargs):
        self.seen.add(torch.get_num_threads())
        return super().forward(*args, **kwargs)


def test_a_small_model_takes_one_thread_and_gives_the_others_back():
    """Threads that wait for each other spin, and wait for those whom another program keeps from running."""
    before, target = torch.get_num_threads(), Watched()
    torch.set_num_threads(3)
    try:
        EAGLEInference(ToyModel(seed=1), target, EAGLEConfig(topk=2, num_steps=2)).generate([1, 2, 3], 4)
        assert target.seen == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
