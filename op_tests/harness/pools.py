"""Pools of keys and values in all orders that their axes may have in memory."""

import itertools

import torch

# w: keys or values, p: pages, t: tokens of a page, h: heads, outermost first; the elements of a head come last.
# vLLM packs pthw, or phtw where heads lie outside of tokens; pwth and wpth were its layouts before.
ORDERS = ["".join(order) for order in itertools.permutations("wpth")]
# with l, the layers of caches that hold all of them
ORDERS_OF_LAYERS = [order[:at] + "l" + order[at:] for at, order in zip(itertools.cycle(range(5)), ORDERS)]


def in_order(k_cache: torch.Tensor, v_cache: torch.Tensor, order: str) -> tuple[torch.Tensor, ...]:
    """Returns keys and values as views of one memory, and what is nobody's: of the same shape, NaN where floats are."""
    names = "wlpth" if k_cache.dim() == 5 else "wpth"
    size = k_cache.element_size()
    parts = [cache.contiguous().view(torch.uint8) for cache in (k_cache, v_cache)]
    parts = torch.stack([*parts, torch.full_like(parts[0], 0xFF)])
    memory = parts.permute(*(names.index(name) for name in order), len(names)).contiguous()
    views = memory.permute(*(order.index(name) for name in names), len(names))
    assert views.shape[-1] == k_cache.shape[-1] * size
    return tuple(views.view(k_cache.dtype))


def with_pools(values: dict, order: str) -> dict:
    """The arguments of an op, its caches in this order."""
    return values | dict(zip(("k_cache", "v_cache"), in_order(values["k_cache"], values["v_cache"], order)))
