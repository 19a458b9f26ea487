"""Programmatic dependent launch: a kernel starts while the one before it in its stream ends.

A kernel of a few microseconds spends a good part of them in being launched. With this (compute capability 9.0 and up)
its programs are on the GPU already when the last program of the kernel before ends, and wait there. Every kernel of
this package begins with `await_predecessor`, so it reads and writes nothing early, whatever ran before; and a kernel
that does not know about it, launched after one of ours, waits for our end as ever.
"""

from __future__ import annotations

from ..runtime.language import tl, triton


@triton.jit
def await_predecessor(ENABLE_PDL: tl.constexpr):
    """Waits until all that the kernels before wrote can be seen; then lets the kernel after this one come up."""
    if ENABLE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
