"""Every op compiles for every target, but for what it says it does not support: within the target's shared memory, and
with tiles that its registers hold.
"""

import pytest

from eagle_kernels.runtime.target import SHARED_MEMORY_BYTES

from .harness.ahead_of_time import MAKERS, PATHS, TARGETS, compile_for_targets, module_of_tests
from .harness.in_flight import overwritten

# What a thread may keep in slow memory: some words that are used once. Tiles that are too large take hundreds of bytes,
# and no result shows it. An op's test module lists the cases that may have more, as MAY_SPILL.
MOST_SPILLED_BYTES = 160


@pytest.mark.smoke
@pytest.mark.parametrize("path", PATHS)
def test_a_case_compiles(path):
    """Each kernel for one target in turn; where there is a GPU, each of its variants for every target."""
    assert _check_cases(path, "smoke")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_compiles_for_both_makers(path):
    compiled = _check_cases(path, "short")
    assert all(compiled & set(targets) for targets in MAKERS)


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
def test_every_case_compiles_for_every_target(path):
    assert _check_cases(path, "full") == set(TARGETS)


@pytest.mark.full
@pytest.mark.parametrize("path", [path for path in PATHS if hasattr(module_of_tests(path), "full_ahead_of_time_cases")])
def test_every_dtype_and_size_compiles(path):
    records = compile_for_targets(path, "full", "full_ahead_of_time_cases")
    refused = {(record["case"], record["target"]) for record in records if "refusal" in record}
    # a dtype is refused with every size or with none
    dtypes = {(case.split()[0], target) for case, target in _not_supported(path)}
    cases = [case for case, _ in module_of_tests(path).full_ahead_of_time_cases()]
    assert refused == {(case, target) for case in cases for dtype, target in dtypes if case.split()[0] == dtype}
    assert _check(path, records) == set(TARGETS)


@pytest.mark.parametrize("path", ["sampling.sample_from_logits", "verify.verify_tree_greedy"])
def test_no_maxima_of_fp16(path):
    """Rows that end within a block."""
    assert _check(path, compile_for_targets(path, "full", "short_rows")) == set(TARGETS)


def test_what_a_product_may_still_read():
    """Of four weights of a product, one is written in the next turn; not if the product is awaited before."""
    loop = """$L__BB0_1: // a loop
        mov.b32 %r5, %r6;
        { .reg .b32 low; prmt.b32 low, %r7, %r7, 0x5410; fma.rn.f16x2 %r3, low, low, low; }
        @%p1 st.shared.v2.b32 [%r9], {%r1, %r2};
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, %rd1, %p2, 1, 1, 0;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned NUMBER;
        @%p3 bra $L__BB0_1;"""
    assert overwritten(loop.replace("NUMBER", "1")) == ["fma.rn.f16x2 %r3, low, low, low"]
    assert overwritten(loop.replace("NUMBER", "0")) == []


def _check_cases(path: str, part: str) -> set[str]:
    records = compile_for_targets(path, part)
    refused = {(record["case"], record["target"]) for record in records if "refusal" in record}
    assert refused == _not_supported(path)
    return _check(path, records)


def _not_supported(path: str) -> set[tuple[str, str]]:
    return getattr(module_of_tests(path), "NOT_SUPPORTED", set())


def _check(path: str, records: list[dict]) -> set[str]:
    """The targets that something was compiled for."""
    may_spill = getattr(module_of_tests(path), "MAY_SPILL", set())
    compiled = [record for record in records if "refusal" not in record]
    for record in compiled:
        limit = SHARED_MEMORY_BYTES[record["target"]]
        assert record["shared_bytes"] <= limit, f"{record} exceeds the target's {limit} bytes of shared memory"
        fits = record["spilled_bytes"] <= MOST_SPILLED_BYTES or record["case"] in may_spill
        assert not record.get("overwritten"), f"{record} writes what a product may still read"
        assert not record.get("waits"), f"{record} has products that wait for each other"
        assert not record["maxima_of_fp16"], f"{record} takes maxima of fp16, which `ordering.widened` avoids"
        assert fits, f"{record} spills more than {MOST_SPILLED_BYTES} bytes a thread"
    return {record["target"] for record in compiled}
