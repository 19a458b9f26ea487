"""FlashAttention 3, which SGLang and vLLM run by default on Hopper: vLLM's build for torch 2.11, `.peers/vllm_fa3.so`.

The file may lie there as it is or packed (`.so.xz`). Work is planned outside of the timed call, as servers plan it once
a step for all layers, and of its settings the one counts that is fastest for the case.
"""

from __future__ import annotations

import functools
import itertools
import lzma
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from ..harness.declaration import Run, Unavailable
from ..harness.inputs import is_chain, visible_drafts
from ..harness.timing import quick_us
from . import FOLDER
from .sglang_fa3 import LIBRARY


class Pages(NamedTuple):
    """Keys and values in pages. Of latents keys are what rotary embedding turns, and values the latents."""

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    scale: float  # of logits
    latent_dim: int = 0  # how many of a query's elements are multiplied with values, the first ones


def gqa_decode(values: dict) -> Run:
    query, pages = values["query"], _pages(values)
    run = _fastest(query, pages, _bounds(query, len(query), 1), values["seq_lens"], 1, is_causal=False)
    return lambda: {"output": run()[0]}


mla_decode = gqa_decode  # `_pages` sees the difference


def tree_attention(values: dict) -> Run:
    """A chain in one causal call; a tree as a cascade of the prefix and of each node's ancestors, which are merged."""
    query, visible = values["query"], visible_drafts(values)
    batch_size, num_nodes = query.shape[:2]
    flat, pages, prefixes = query.flatten(0, 1), _pages(values), values["seq_lens"]
    bounds = _bounds(query, batch_size, num_nodes)
    if is_chain(visible):
        run = _fastest(flat, pages, bounds, prefixes + num_nodes, num_nodes, is_causal=True)
        return lambda: {"output": run()[0].unflatten(0, (batch_size, num_nodes))}
    prefix = _fastest(flat, pages, bounds, prefixes, num_nodes, is_causal=False)
    # each node is a request of its own, whose pages are the slots of the nodes that it sees
    counts = visible.sum(-1, dtype=torch.int32).flatten()
    order = visible.flatten(0, 1).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
    slots = prefixes.repeat_interleave(num_nodes)[:, None] + order
    size = pages.key.shape[1]
    table = values["block_table"].repeat_interleave(num_nodes, 0).gather(1, slots // size) * size + slots % size
    rows = {name: getattr(pages, name).flatten(0, 1)[:, None] for name in ("key", "value")}
    bounds = _bounds(query, len(flat), 1)
    nodes = _fastest(flat, pages._replace(**rows, table=table.to(torch.int32)), bounds, counts, 1, is_causal=False)
    return lambda: {"output": _merged()(*prefix(), *nodes()).unflatten(0, (batch_size, num_nodes))}


mla_tree_attention = tree_attention


def prefill_attention(values: dict) -> Run:
    query, bounds, longest = values["query"], values["qo_indptr"], values["max_query"]
    if "key" in values:
        forward = _library().fwd
        output = torch.empty_like(query)

        def run() -> dict:
            _forward(forward, query, values["key"], values["value"], output, bounds, longest, key_bounds=bounds,
                     is_causal=True)  # fmt: skip
            return {"output": output}

        return run
    run = _fastest(query, _pages(values), bounds, values["seq_lens"], longest, is_causal=True)
    return lambda: {"output": run()[0]}


mla_prefill = prefill_attention


def _fastest(query, pages: Pages, bounds, lengths, longest_query: int, is_causal: bool):
    """Returns a call that gives (output, log-sum-exp [H, rows]) with the fastest of FA3's settings.

    Splits by its scheduler, planned or found in the call, or none; heads of a group packed into a tile as it likes, or
    always.
    """
    library, (key, value, table, scale, latent_dim) = _library(), pages
    longest_key, (batch_size, dtype) = int(lengths.max()), (len(lengths), query.dtype)
    latent_query, query = (query[..., :latent_dim], query[..., latent_dim:]) if latent_dim else (None, query)

    def prepared(num_splits: int, is_planned: bool, pack: bool | None):
        plan = None
        if is_planned:
            plan = library.get_scheduler_metadata(
                batch_size, longest_query, longest_key, query.shape[1], key.shape[2], key.shape[3], value.shape[3],
                dtype, lengths, bounds, None, None, None, None, key.shape[1], 0, is_causal, -1, -1, False, num_splits,
                pack, 0,
            )  # fmt: skip
        output = query.new_empty(*query.shape[:-1], value.shape[3])
        return lambda: _forward(library.fwd, query, key, value, output, bounds, longest_query, lengths=lengths,
                                longest_key=longest_key, table=table, is_causal=is_causal, plan=plan,
                                num_splits=num_splits, pack=pack, scale=scale, latent_query=latent_query)  # fmt: skip

    settings = [*itertools.product((0,), (True, False), (None, True)), (1, False, None), (1, False, True)]
    return min((prepared(*setting) for setting in settings), key=quick_us)


def _forward(
    forward, query, key, value, output, bounds, longest_query: int, lengths=None, longest_key: int = 0, table=None,
    key_bounds=None, is_causal: bool = False, plan=None, num_splits: int = 0, pack: bool | None = None,
    scale: float | None = None, latent_query=None,
):  # fmt: skip
    """Calls FA3's varlen forward with the arguments that matter here, and returns (output, log-sum-exp)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result = forward(
        query, key, value, None, None, latent_query, output, bounds, key_bounds, None, None, lengths, longest_query,
        longest_key or longest_query, table, None, None, None, None, None, None, None, None, scale, is_causal, -1, -1,
        0.0, True, plan, num_splits, pack, 0, None, 1, 0, None,
    )  # fmt: skip
    return result[:2]


def _pages(values: dict) -> Pages:
    """Returns the pages of a call, in whose table no entry is negative."""
    cache, query, table = values.get("latent_cache", values.get("k_cache")), values["query"], values["block_table"]
    if cache.dtype != query.dtype:
        raise Unavailable("8-bit keys are multiplied in 8 bits here, which is another result")
    if "latent_cache" not in values:
        return Pages(cache, values["v_cache"], table.clamp(min=0), query.shape[-1] ** -0.5)
    latents, keys = cache[:, :, None].split((values["latent_dim"], cache.shape[-1] - values["latent_dim"]), dim=-1)
    return Pages(keys, latents, table.clamp(min=0), values["sm_scale"], values["latent_dim"])


def _bounds(tensor: torch.Tensor, count: int, size: int) -> torch.Tensor:
    return torch.arange(count + 1, dtype=torch.int32, device=tensor.device) * size


@functools.cache
def _merged():
    """Returns the weighted mean of two partial results, compiled."""

    def merge(output, lse, other, other_lse):
        weight = torch.sigmoid(lse - other_lse).transpose(0, 1)[:, :, None]
        return (output * weight + other * (1 - weight)).to(output.dtype)

    return torch.compile(merge, dynamic=True)


def is_hopper() -> bool:
    """Tells whether this machine has a GPU that FlashAttention 3 was made for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def find_library() -> Path | None:
    """Returns the file of the library, which may be packed; None without one."""
    return next((file for file in (FOLDER / LIBRARY, FOLDER / f"{LIBRARY}.xz") if file.exists()), None)


def place_library(folder: Path) -> Path:
    """Links the library into a folder, or unpacks it there; returns its file."""
    file, placed = find_library(), folder / LIBRARY
    if file.suffix == ".xz":
        placed.write_bytes(lzma.decompress(file.read_bytes()))
    else:
        placed.symlink_to(file.resolve())
    return placed


@functools.cache
def _library():
    """Returns the operators of the library, unpacked if need be."""
    if not is_hopper():
        raise Unavailable("FlashAttention 3 needs a Hopper GPU")
    if find_library() is None:
        raise Unavailable(f"{FOLDER / LIBRARY} does not exist")
    torch.ops.load_library(str(place_library(Path(tempfile.mkdtemp()))))
    return torch.ops._vllm_fa3_C
