"""Tables of the addresses of layers' caches that are separate tensors, for `move_accepted_kv`."""

from collections.abc import Sequence

import torch

from ..runtime import check
from ..runtime.calls import refuse_shared, refuse_without_data


def cache_addresses(k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a table of the addresses of layers' caches, with which `move_accepted_kv` moves all in one launch.

    Make it once, before CUDA graphs are captured, since it is copied to the device. The table keeps no cache alive:
    hold the caches as long as the table, and make another table when one of them is allocated anew.

    Args:
        k_caches, v_caches: One of each per layer, [num_pages, page_size, Hkv, D], as `move_accepted_kv` takes them.
            All have one shape, dtype and device. Keys have the same strides, and all or none of them begin at a
            multiple of 16 bytes; so do values. No two may overlap: a cache that layers share is given once.

    Returns:
        [2, C] int64 on the caches' device: the addresses of C caches of keys, then those of the caches of values.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Example:
        >>> k_caches = [torch.arange(4.0).view(4, 1, 1, 1) for layer in range(3)]  # slot t holds t
        >>> v_caches = [cache + 10 for cache in k_caches]
        >>> table = eagle_kernels.cache_addresses(k_caches, v_caches)
        >>> eagle_kernels.move_accepted_kv(
        ...     k_caches[0][None], v_caches[0][None], torch.tensor([[0, 1, 2, 3]]), torch.tensor([1]),
        ...     torch.tensor([[0, 2]]), torch.tensor([1]), num_verify_tokens=3, cache_addresses=table)
        >>> [cache.flatten().tolist() for cache in v_caches]
        [[10.0, 11.0, 13.0, 13.0], [10.0, 11.0, 13.0, 13.0], [10.0, 11.0, 13.0, 13.0]]
    """
    sides = {"k_caches": k_caches, "v_caches": v_caches}
    args = check.Arguments("cache_addresses", sides)
    for name, caches in sides.items():
        if not isinstance(caches, (list, tuple)):
            args.fail(name, "be a list of tensors", type(caches).__name__, TypeError)
    if not k_caches or len(v_caches) != len(k_caches):
        args.fail("v_caches", f"hold at least one cache, and as many as k_caches, {len(k_caches)}", len(v_caches))
    args.values = {f"{name}[{layer}]": cache for name, caches in sides.items() for layer, cache in enumerate(caches)}
    dtypes = [getattr(k_caches[0], "dtype", None)]
    for place, cache in args.values.items():
        first = f"{place.partition('[')[0]}[0]"
        args.tensor(place, ("num_pages", "page_size", "Hkv", "D"), dtypes, contiguous=1)
        alike = args.values[first]
        if any(size > 1 and one != other for size, one, other in zip(cache.shape, cache.stride(), alike.stride())):
            args.fail(place, f"have the strides of {first}, {list(alike.stride())}", list(cache.stride()))
    refuse_without_data("cache_addresses", args.values)
    refuse_shared("cache_addresses", args.values, tuple(args.values))
    addresses = [[cache.data_ptr() for cache in caches] for caches in sides.values()]
    for name, of_side in zip(sides, addresses):
        for layer, address in enumerate(of_side):
            if (address % 16 == 0) != (of_side[0] % 16 == 0):
                args.fail(f"{name}[{layer}]", f"be at a multiple of 16 bytes like {name}[0], or neither", hex(address))
    return torch.tensor(addresses, dtype=torch.int64, device=args.device)
