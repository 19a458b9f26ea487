"""Device functions on parents of token trees: depths and ancestor sets, closed upwards by pointer doubling."""

from __future__ import annotations

from ..runtime.language import tl, triton


@triton.jit
def depths(parents, NUM_ROUNDS: tl.constexpr):
    """Hops of every node to the end of its path, by pointer doubling; parents [node], -1 ends a path."""
    depth = (parents >= 0).to(tl.int32)
    hop = parents
    for _ in tl.static_range(NUM_ROUNDS):
        safe_hop = tl.maximum(hop, 0)
        depth = tl.where(hop >= 0, depth + tl.gather(depth, safe_hop, 0), depth)
        hop = tl.where(hop >= 0, tl.gather(hop, safe_hop, 0), -1)
    return depth


@triton.jit
def ancestor_word(ancestors, parents, NUM_ROUNDS: tl.constexpr):
    """One word of every node's ancestor set, closed upwards by pointer doubling; parents -1 end a path."""
    hop = parents
    for _ in tl.static_range(NUM_ROUNDS):
        safe_hop = tl.maximum(hop, 0)
        ancestors = tl.where(hop >= 0, ancestors | tl.gather(ancestors, safe_hop, 0), ancestors)
        hop = tl.where(hop >= 0, tl.gather(hop, safe_hop, 0), -1)
    return ancestors
