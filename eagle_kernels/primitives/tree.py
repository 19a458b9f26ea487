"""Device functions on parents of token trees: depths and ancestor sets, by pointer doubling or hop by hop."""

from ..runtime.language import ceil_log2, tl, triton


@triton.jit
def path_sums(values, parents, NUM_NODES: tl.constexpr):
    """Returns the sum of values int32 along every node's path, by pointer doubling; parents [node], -1 ends a path."""
    hop = parents
    for _ in tl.static_range(ceil_log2(NUM_NODES)):
        safe_hop = tl.maximum(hop, 0)
        values += tl.where(hop >= 0, tl.gather(values, safe_hop, 0), 0)
        hop = tl.where(hop >= 0, tl.gather(hop, safe_hop, 0), -1)
    return values


@triton.jit
def depths(parents, NUM_NODES: tl.constexpr):
    """Returns the hops of every node to the end of its path."""
    return path_sums((parents >= 0).to(tl.int32), parents, NUM_NODES)


@triton.jit
def ancestor_word(ancestors, parents, NUM_NODES: tl.constexpr):
    """Returns one word of every node's ancestor set, closed upwards by pointer doubling; a parent of -1 ends a path."""
    hop = parents
    for _ in tl.static_range(ceil_log2(NUM_NODES)):
        safe_hop = tl.maximum(hop, 0)
        ancestors = tl.where(hop >= 0, ancestors | tl.gather(ancestors, safe_hop, 0), ancestors)
        hop = tl.where(hop >= 0, tl.gather(hop, safe_hop, 0), -1)
    return ancestors


@triton.jit
def way_up(parents, word, MAX_HOPS: tl.constexpr):
    """Returns one word of the nodes on every node's way up, and the number of steps on it.
    The node itself is on its way, the root is not. parents [node] may be any nodes, also in cycles. A way ends at the
    root, at a parent of -1, or after MAX_HOPS steps."""
    hop = tl.arange(0, parents.shape[0])
    seen = tl.zeros([parents.shape[0]], tl.int64)
    length = tl.zeros([parents.shape[0]], tl.int32)
    for _ in range(MAX_HOPS):
        bit = hop - word * 64
        is_here = (hop > 0) & (bit >= 0) & (bit < 64)
        seen |= tl.where(is_here, tl.full([parents.shape[0]], 1, tl.int64) << (bit & 63), 0)
        length += (hop > 0).to(tl.int32)
        hop = tl.where(hop > 0, tl.gather(parents, tl.maximum(hop, 0), 0), 0)
    return seen, length
