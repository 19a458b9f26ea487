"""Device functions on token trees: links, ancestor words."""

from __future__ import annotations

from ..runtime.language import tl, triton


@triton.jit
def checked_link(links_ptr, node, NUM_NODES: tl.constexpr):
    """The link of `node`, or -1 where it is none, out of range, or does not point forward.

    Nodes are in topological order, so a link that does not grow is malformed; refusing it also ends every cycle.
    """
    link = tl.load(links_ptr + node).to(tl.int32)
    return tl.where((link > node) & (link < NUM_NODES), link, -1)
