"""Programmatic dependent launch: a kernel starts while the one before it in its stream ends.

Launching is a large part of the time of a short kernel. With this feature (compute capability 9.0 and up) its programs
already wait on the GPU when the last program of the kernel before ends. Every kernel of this package calls
`await_predecessor` before it reads or writes what another kernel may touch. A kernel without that call waits for the
end of ours as usual.

Kernels begin with the call, so they do nothing early, whatever ran before. A kernel that streams weights may prefetch:
it first asks for its weights, which are loaded while the kernel before ends, and then waits. Those loads may miss what
the kernel directly before wrote, but nothing older: that kernel let this one start only after its own wait, when all
kernels before it had ended. So the caller promises that this one kernel does not write what is prefetched. For the
same reason the merge of attention's parts may read lengths before it waits: the attention of the same call, directly
before it, does not write them. It is also why both steps are in one function: if a kernel let its successor start
before its own wait, a chain of such kernels could run ahead of any number of others.
"""

from ..runtime.language import tl, triton


@triton.jit
def await_predecessor(ENABLE_PDL: tl.constexpr):
    """Waits until all that the kernels before wrote can be seen; then lets the kernel after this one start.
    Every program calls it, outside of branches and loops, and once with a true ENABLE_PDL where the GPU can."""
    if ENABLE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
