"""Calls whose every argument is drawn: sizes, flags, values and their limits, dtypes, strides, buffers, and tile sizes.

Other tests look at what somebody thought of. Here kernel and reference must agree on what nobody did.
"""

import random

import pytest
import torch

from op_tests.harness import assume_multiprocessors, to_device
from op_tests.harness.ahead_of_time import module_of_tests
from op_tests.harness.drawn import check_drawn, with_small_tiles
from op_tests.harness.pools import ORDERS, with_pools
from op_tests.ops.attention.cases import paged_cache
from op_tests.ops.latent.cases import as_latents
from op_tests.random_calls import CALLS, drawn_call

DRAWS = 16
# scores are read again for each bit of the one that is sought
TILES = {"tree.prune_trees": (32, 64)}
FLOATS = {f"tree.{name}": ("scores", "candidate_scores") for name in ("select_from_head", "select_top_k_tokens")}


@pytest.mark.parametrize("path", CALLS)
def test_whatever_is_drawn_kernel_and_reference_agree(path, device, monkeypatch):
    for number in range(DRAWS):
        values, coin = drawn_call(path, number)
        with monkeypatch.context() as patched:
            with_small_tiles(path, coin, patched, TILES.get(path, (2, 4, 8)))
            check_drawn(path, to_device(values, device), coin, f"{number}", FLOATS.get(path, ()))


def drawn_cache(coin: random.Random, lengths: list[int]) -> dict:
    """Arguments of attention to a pool, and what changes logits."""
    num_kv_heads, head_dim = coin.choice((1, 2)), coin.choice((8, 16, 24))
    form, dtype = coin.choice(("block_table", "csr")), coin.choice((torch.float32, torch.float16))
    values = paged_cache(
        lengths, coin.choice((1, 2, 16)), num_kv_heads, head_dim, dtype, form=form, is_strided=coin.random() < 0.5
    )
    num_heads = num_kv_heads * coin.choice((1, 2, 3))
    if coin.random() < 0.4:
        values["window"] = coin.choice((1, 7, 64, 65))
    if coin.random() < 0.3:
        values["soft_cap"] = 2.0
    if coin.random() < 0.4:
        values["sinks"] = torch.randn(num_heads)
    if coin.random() < 0.6:
        values = with_pools(values, coin.choice(ORDERS))
    return values | {"heads": (num_heads, head_dim), "dtype": dtype}


def drawn_attention(path: str, coin: random.Random) -> dict:
    """Requests of any lengths, in any order: of no block, whole ones, and some that end in one that is not full."""
    lengths = [coin.choice((0, 1, 31, 64, 65, 130, 200, 257)) for _ in range(coin.choice((1, 2, 3, 5)))]
    if path == "attention.prefill_attention":
        lengths = [*lengths, 31]
        counts = [coin.randint(0, min(length, 40)) for length in lengths[:-1]] + [5]
        values = drawn_cache(coin, lengths)
        values |= {"qo_indptr": torch.tensor([0, *counts]).cumsum(0).int(), "max_query": max(1, *counts)}
        shape = (sum(counts),)
        values["is_causal"] = coin.random() < 0.7 or "window" in values
        if coin.random() < 0.4:
            values["max_query"] = coin.choice((1, 7, 33))
    else:
        num_rows = coin.choice((1, 3, 7))
        is_chain = path == "attention.tree_attention"
        is_beside = is_chain and coin.random() < 0.4  # draft keys are in tensors of their own
        values = drawn_cache(coin, [length + num_rows for length in lengths] if is_chain > is_beside else lengths)
        shape = (len(lengths), num_rows) if is_chain else (len(lengths),)
        values |= {"is_causal": True} if is_chain else {}
        if is_beside:
            num_kv_heads, head_dim = values["k_cache"].shape[2:]
            # parts of a fused projection, in which rows lie further apart than they must, or not
            drafts = torch.randn(*shape, 2 * num_kv_heads + coin.choice((0, 0, 3)), head_dim).to(values["dtype"])
            values |= {"draft_key": drafts[..., :num_kv_heads, :], "draft_value": drafts[..., -num_kv_heads:, :]}
        elif is_chain and "seq_lens" in values:
            values["seq_lens"] = values["seq_lens"] - num_rows
    query = torch.randn(*shape, *values.pop("heads")).to(values.pop("dtype"))
    return values | {"query": query}


def drawn_latents(path: str, coin: random.Random) -> dict:
    """The same over latents: keys of one head, which are values too."""
    names = {"mla_decode": "gqa_decode", "mla_prefill": "prefill_attention", "mla_tree_attention": "tree_attention"}
    values = {"draft_key": None}
    while "draft_key" in values:
        values = drawn_attention("attention." + names[path.rpartition(".")[2]], coin)
    for name in ("soft_cap", "sinks"):
        values.pop(name, None)
    width = values["query"].shape[-1]
    return as_latents(values, coin.choice((4, width // 2, width)), coin.choice((0.1, 1.0)))


def attended_rows(values: dict) -> list[int] | None:
    """Rows of requests that are not ragged, None: all; of the others as many as max_query of each request."""
    if "qo_indptr" not in values:
        return None
    bounds = values["qo_indptr"].tolist()
    return [row for first, last in zip(bounds, bounds[1:]) for row in range(first, last)[: values["max_query"]]]


@pytest.mark.parametrize(
    "path",
    ["attention.gqa_decode", "attention.prefill_attention", "attention.tree_attention",
     "latent.mla_decode", "latent.mla_prefill", "latent.mla_tree_attention"],
)  # fmt: skip
def test_attention_to_whatever_is_drawn(path, device, monkeypatch):
    """On a GPU of any size, which decides into how many chunks keys are cut."""
    for number in range(8):
        coin = random.Random(f"{path} {number}")
        torch.manual_seed(number)
        values = (drawn_latents if path.startswith("latent") else drawn_attention)(path, coin)
        if not path.endswith(("prefill_attention", "mla_prefill")) and coin.random() < 0.3:
            values["deterministic"] = True
        with monkeypatch.context() as patched:
            assume_multiprocessors(patched, coin.choice((1, 2, 7, 132)))
            rows = {} if path.endswith("_decode") else {"rows": attended_rows(values)}
            module_of_tests(path).check(to_device(values, device), f"{number}", **rows)


@pytest.mark.parametrize("is_separate", [False, True], ids=["in pool", "separate"])
@pytest.mark.parametrize("form", ["block_table", "csr"])
def test_ragged_trees_of_any_bits(form, is_separate, device):
    """Requests of more rows than max_query too, and masks that say of drafts that are not there that they are seen."""
    module = module_of_tests("attention.tree_attention")
    for number in range(3):
        coin = random.Random(f"{form} {is_separate} {number}")
        torch.manual_seed(number)
        counts = [*(coin.choice((0, 1, 3, 8)) for _ in range(2)), (9, 70, 5)[number]]
        prefixes = [coin.choice((0, 1, 31, 65)) for _ in counts]
        values = module.ragged(counts, 8, 2, 1, coin.choice((1, 2, 16)), torch.float32, prefixes, form=form,
                               is_separate=is_separate)  # fmt: skip
        values |= {"tree_mask": torch.randint(-(2**63), 2**63 - 1, values["tree_mask"].shape),
                   "max_query": (3, 65, 5)[number], "deterministic": coin.random() < 0.5}  # fmt: skip
        if coin.random() < 0.4:
            places = [prefix + row // 2 for prefix, count in zip(prefixes, counts) for row in range(count)]
            values |= {"window": coin.choice((1, 7, 64)), "positions": torch.tensor(places)}
        module.check(to_device(values, device), f"{number}", rows=attended_rows(values))


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("path", CALLS)
def test_many_calls_in_the_shipped_tiles(path, device):
    for number in range(DRAWS, 20 * DRAWS):
        values, coin = drawn_call(path, number)
        check_drawn(path, to_device(values, device), coin, f"{number}", FLOATS.get(path, ()))
