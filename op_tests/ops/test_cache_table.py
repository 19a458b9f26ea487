"""cache_addresses: what it lists, and which caches one launch cannot move together."""

import doctest

import pytest
import torch

import eagle_kernels


def caches(count: int, *sizes: int, dtype=torch.float16, device="cpu") -> list[torch.Tensor]:
    return [torch.zeros(*(sizes or (6, 4, 2, 16)), dtype=dtype, device=device) for _ in range(count)]


def test_addresses_of_keys_then_of_values(device):
    k_caches, v_caches = caches(3, device=device), caches(3, device=device)
    table = eagle_kernels.cache_addresses(k_caches, v_caches)
    assert table.dtype == torch.int64 and table.device == k_caches[0].device
    assert table.tolist() == [[cache.data_ptr() for cache in side] for side in (k_caches, v_caches)]


def test_keys_beside_values_are_apart():
    """Where one allocation holds both; strides of axes of one element mean nothing."""
    layers = [torch.zeros(6, 4, 1, 32) for _ in range(2)]
    sides = zip(*(layer.split(16, -1) for layer in layers))
    assert (eagle_kernels.cache_addresses(*map(list, sides)).diff(dim=0) == 64).all()
    pages = [torch.zeros(6, 2, 4, 1, 16).unbind(1) for _ in range(2)]
    pages[1] = tuple(cache.as_strided(cache.shape, (128, 16, 999, 1)) for cache in pages[1])
    assert (eagle_kernels.cache_addresses(*map(list, zip(*pages))).diff(dim=0) == 256).all()


def test_a_view_with_an_offset_is_where_it_begins():
    pool = torch.zeros(2, 3, 6, 4, 2, 16)
    table = eagle_kernels.cache_addresses([*pool[0]], [*pool[1]])
    assert (table - pool.data_ptr()).flatten().tolist() == [number * 6 * 4 * 2 * 16 * 4 for number in range(6)]


K, V = caches(2), caches(2)
OFF = torch.zeros(6 * 4 * 2 * 16 + 1, dtype=torch.float16)[1:].view(6, 4, 2, 16)
REFUSED = {
    "no list": ((K[0], V), "k_caches must be a list of tensors, got Tensor"),
    "no lists": ((K, None), "v_caches must be a list of tensors, got NoneType"),
    "nothing": (([], []), "v_caches must hold at least one cache, and as many as k_caches, 0, got 0"),
    "fewer values": ((K, V[:1]), "v_caches must hold at least one cache, and as many as k_caches, 2, got 1"),
    "no tensor": (([K[0], 3], V), r"k_caches\[1\] must be a tensor, got int"),
    "no tensor first": ((["a", K[0]], V), r"k_caches\[0\] must be a tensor, got str"),
    "another dtype": ((K, [V[0], V[1].bfloat16()]), r"v_caches\[1\] must have dtype float16, got bfloat16"),
    "another device": ((K, [V[0], V[1].to("meta")]), r"v_caches\[1\] must be on cpu like k_caches\[0\], got meta"),
    "no memory": (([each.to("meta") for each in K], [each.to("meta") for each in V]),
                  r"k_caches\[0\] must hold data, got meta"),
    "another size": ((K, [V[0], V[1][:-1]]), r"v_caches\[1\] must have num_pages = 6 in axis 0 \(as k_caches\[0\]\)"),
    "no pages": (([each[0] for each in K], V), r"k_caches\[0\] must have shape \[num_pages, page_size, Hkv, D\]"),
    "another layout": (([K[0], torch.zeros(6, 2, 4, 16, dtype=torch.float16).transpose(1, 2)], V),
                       r"k_caches\[1\] must have the strides of k_caches\[0\], \[128, 32, 16, 1\], got \[128, 16, "),
    "elements apart": (([torch.zeros(6, 4, 2, 32, dtype=torch.float16)[..., ::2]] * 2, V),
                       r"k_caches\[0\] must be contiguous in its last 1 axes"),
    "one cache twice": (([K[0], K[0]], V), r"k_caches\[0\] must not overlap k_caches\[1\]"),
    "keys that are values": ((K, [V[0], K[1]]), r"k_caches\[1\] must not overlap v_caches\[1\]"),
    "not aligned": (([K[0], OFF], V), r"k_caches\[1\] must be at a multiple of 16 bytes like k_caches\[0\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    given, rule = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match="^eagle_kernels.cache_addresses: " + rule):
        eagle_kernels.cache_addresses(*given)


def test_the_example_runs():
    values = {"torch": torch, "eagle_kernels": eagle_kernels}
    text = eagle_kernels.cache_addresses.__doc__
    test = doctest.DocTestParser().get_doctest(text, values, "cache_addresses", None, None)
    assert test.examples and not doctest.DocTestRunner(verbose=False).run(test).failed
