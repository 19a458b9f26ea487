"""Programmatic dependent launch: a kernel starts while the one before it in its stream ends.

A kernel of a few microseconds spends a good part of them in being launched. With this (compute capability 9.0 and up)
its programs are on the GPU already when the last program of the kernel before ends, and wait there. Every kernel of
this package calls `await_predecessor` before it reads or writes what another kernel may touch; and a kernel that does
not know about it, launched after one of ours, waits for our end as ever.

They begin with it, and so do nothing early, whatever ran before. One that streams weights may be told to prefetch: then
it waits a little later, when it has asked for the first of them, so that they are on their way while the kernel before
ends. What it may not have seen then is what the kernel directly before it wrote, and nothing older: that one let it
come up only after its own wait, when all before had ended. So the caller answers for it that this one kernel does not
write what is prefetched. For the same reason the two steps stay together in one function: were a successor let up
before the wait, a chain of such kernels could run ahead of any number of others.
"""

from __future__ import annotations

from ..runtime.language import tl, triton


@triton.jit
def await_predecessor(ENABLE_PDL: tl.constexpr):
    """Waits until all that the kernels before wrote can be seen; then lets the kernel after this one come up.

    Called by every program, outside of branches and loops, and once with a true ENABLE_PDL where the GPU can.
    """
    if ENABLE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
