"""SGLang's Triton kernels, out of the wheel sglang 0.5.23: `.peers/sglang_triton/*.py`.

SGLang itself runs them on XPU only, where its CUDA ops do not exist. They are timed with what they leave to their
caller: see sglang_caller.
"""

import functools
from types import ModuleType

import torch

from eagle_kernels.runtime.language import triton

from ..harness.declaration import Run, Unavailable
from ..harness.inputs import is_chain, prefixed_masks, visible_drafts
from ..harness.timing import quick_us
from . import FOLDER, sglang_caller
from .wheel_files import Stub, import_file

# what the files import from SGLang: questions about the platform, most of which may be answered with no, and each other
_STUBS = (
    "sglang",
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.attention",
    "sglang.srt",
    "sglang.srt.environ",
    "sglang.srt.platforms",
    "sglang.srt.platforms.interface",
    "sglang.srt.utils",
)
_NEEDS = {"decode_attention": ("score_mod",), "extend_attention": ("decode_attention", "score_mod"),
          "verify_mla": ("verify_splitkv",)}  # fmt: skip
# by file, the questions that are answered with yes; spec_tree's answers lead to the same kernels either way
_YES = {"extend_attention": ("is_cuda",)}


@functools.cache
def _module(name: str) -> ModuleType:
    yes = dict.fromkeys(_YES.get(name, ()), lambda: True)
    needed = {f"sglang.kernels.ops.attention.{other}": _module(other) for other in _NEEDS.get(name, ())}
    return import_file(FOLDER / "sglang_triton" / f"{name}.py", {stub: Stub(stub, **yes) for stub in _STUBS} | needed)


def gqa_decode(values: dict) -> Run:
    """Takes the number of splits that is fastest for the case, which is searched once."""
    decode = _module("decode_attention").decode_attention_fwd
    query, lengths = values["query"], values["seq_lens"]
    batch_size, num_heads, _ = query.shape
    (k_buffer, v_buffer), scale = _buffers(values)
    kv_indptr, kv_indices = _token_indices(values, lengths.tolist())
    output = query.new_empty(batch_size, num_heads, v_buffer.shape[-1])
    # values are taken out of keys for these sizes alone
    is_latent = "latent_cache" in values and query.shape[-1] in (288, 576)

    def prepared(num_splits: int) -> Run:
        logits = torch.empty(batch_size, num_heads, num_splits, v_buffer.shape[-1], device=query.device)
        lse = torch.empty(batch_size, num_heads, num_splits, device=query.device)
        splits = torch.full((batch_size,), num_splits, dtype=torch.int32, device=query.device)

        def run():
            decode(query, k_buffer, v_buffer, output, kv_indptr, kv_indices, logits, lse, splits, num_splits,
                   scale, 1.0, 1.0, has_mla=is_latent)  # fmt: skip
            return {"output": output}

        return run

    return min((prepared(num_splits) for num_splits in (1, 2, 4, 8, 16, 32, 64)), key=quick_us)


mla_decode = gqa_decode  # `_buffers` sees the difference


def tree_attention(values: dict) -> Run:
    """extend_attention with a custom mask; of chains, the faster one of it and verify_splitkv, the kernel for them.

    Both read the draft block from tensors of its own.
    """
    extend = _module("extend_attention").extend_attention_fwd
    query, prefixes = values["query"].flatten(0, 1), values["seq_lens"].tolist()
    batch_size, num_nodes, num_heads, _ = values["query"].shape
    caches, scale = _buffers(values)
    kv_indptr, kv_indices = _token_indices(values, prefixes)
    _, with_drafts = _token_indices(values, [prefix + num_nodes for prefix in prefixes])
    bounds = torch.tensor([0, *prefixes]).cumsum(0) + torch.arange(batch_size + 1) * num_nodes
    places = torch.cat([torch.arange(last - num_nodes, last) for last in bounds[1:].tolist()])
    drafts = [cache[with_drafts[places.to(query.device)]] for cache in caches]
    masks = prefixed_masks(values)
    sizes = torch.tensor([0, *(len(mask) for mask in masks)])
    mask, mask_indptr = torch.cat(masks), sizes.cumsum(0).to(query.device)
    qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32, device=query.device) * num_nodes
    output = query.new_empty(len(query), num_heads, caches[1].shape[-1])
    new, old = (query, *drafts), (*caches, qo_indptr, kv_indptr, kv_indices, mask, True, mask_indptr, num_nodes)

    def prepared(forward) -> Run:
        def run():
            forward(*new, output, *old, 1.0, 1.0, scale)
            return {"output": output.unflatten(0, (batch_size, num_nodes))}

        return run

    if is_chain(visible_drafts(values)):
        name, forward = ("verify_splitkv", "verify_splitkv_fwd")
        if "latent_cache" in values:
            name, forward = ("verify_mla", "verify_shared_kv_fwd")
        verify = _module(name)
        if verify.can_handle(*new, *old):
            return min((prepared(each) for each in (extend, getattr(verify, forward))), key=quick_us)
    return prepared(extend)


mla_tree_attention = tree_attention


def build_tree_from_blocks(values: dict) -> Run:
    """uno_tree, whose top-k is FlashInfer's, up to the lists of which SGLang makes links afterwards."""
    if values["logits"] is None:
        raise Unavailable("uno_tree selects from logits")
    build = _module("uno_tree").build_uno_tree_proposal
    sizes = {"max_nodes": values["num_verify_tokens"], "candidate_top_k": values["topk"], "temperature": 1.0}
    workspace: dict = {}

    def run():
        build(values["verified_id"], values["logits"], workspace=workspace, **sizes)
        return {}  # equal logits are ordered as FlashInfer likes, so nodes cannot be compared

    return run


def _buffers(values: dict) -> tuple[list[torch.Tensor], float]:
    """Returns keys and values [slots, Hkv, D], the latter of latents a part of the former, and the scale of logits."""
    if "latent_cache" in values:
        rows = values["latent_cache"].flatten(0, 1)[:, None]
        return [rows, rows[..., : values["latent_dim"]]], values["sm_scale"]
    return [values[name].flatten(0, 1) for name in ("k_cache", "v_cache")], values["query"].shape[-1] ** -0.5


def _token_indices(values: dict, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_indptr [B + 1] int32 and kv_indices int64, one per slot, of the first `lengths` slots of each request."""
    table, page_size = values["block_table"].long(), values.get("latent_cache", values.get("k_cache")).shape[1]
    slots = [
        table[request, torch.arange(length, device=table.device) // page_size] * page_size
        + torch.arange(length, device=table.device) % page_size
        for request, length in enumerate(lengths)
    ]
    return torch.tensor([0, *lengths]).cumsum(0).to(table.device, torch.int32), torch.cat(slots)


def build_tree(values: dict) -> Run:
    if values["tree_mask_mode"] == "qlen_only_bitpacking":
        raise Unavailable("has no bit-packed masks")
    return sglang_caller.build_tree(values, _module("spec_tree").sgl_build_tree_kernel_triton)


def verify_tree_greedy(values: dict) -> Run:
    return sglang_caller.verify_tree_greedy(values, _module("spec_tree").verify_tree_greedy_triton)


def draft_kv_indices(values: dict) -> Run:
    """The positions that it sums up are made in the timed call, as its caller does."""
    kernel = _module("cache_locs").generate_draft_decode_kv_indices
    if values.get("window_counts_drafts"):
        raise Unavailable("has another kernel for windows that count drafts")
    table, seq_lens, topk, num_steps = (values[name] for name in ("req_to_token", "seq_lens", "topk", "num_steps"))
    batch_size, num_branches = len(seq_lens), len(seq_lens) * topk
    kv_indptr = torch.zeros(num_steps, num_branches + 1, dtype=torch.int32, device=table.device)
    kv_indices = torch.full((num_steps, values["capacity"]), -1, dtype=torch.int32, device=table.device)
    bounds = [triton.next_power_of_2(size) for size in (batch_size, num_steps, num_branches)]

    def run():
        kernel[num_steps, batch_size, topk](
            values["req_pool_indices"], table, seq_lens, kv_indices, kv_indptr,
            seq_lens.repeat_interleave(topk, output_size=num_branches), table.stride(0), kv_indices.stride(0),
            kv_indptr.stride(0), *bounds, values.get("page_size", 1), values.get("window_size", 0),
            values.get("sink_size", 0),
        )  # fmt: skip
        return {"kv_indptr": kv_indptr, "kv_indices": kv_indices}

    return run


def extend_cache_locs(values: dict) -> Run:
    """Its uniform kernel writes positions as well, the other one does not."""
    kernels = _module("cache_locs")
    rows, table, starts, ends = values["req_pool_indices"], values["req_to_token"], values["starts"], values.get("ends")
    batch_size, columns = len(starts), table.shape[1]
    if ends is not None:
        cache_locs = torch.empty(values["capacity"], dtype=torch.int64, device=table.device)
        bound = triton.next_power_of_2(batch_size)

        def run():
            kernels.assign_extend_cache_locs[(batch_size,)](rows, table, starts, ends, cache_locs, columns, bound)
            return {"cache_locs": cache_locs}

        return run
    num_tokens = values["num_tokens"]
    cache_locs, positions = torch.empty(2, batch_size * num_tokens, dtype=torch.int64, device=table.device)

    def run():
        kernels.assign_extend_cache_locs_uniform[(batch_size,)](
            rows, table, starts, cache_locs, columns, num_tokens, positions_out=positions
        )
        return {"cache_locs": cache_locs, "positions": positions}

    return run


def draft_cache_locs(values: dict) -> Run:
    """Where branches lie one after another; the rest it leaves to torch."""
    if values["page_size"] > 1 and values["topk"] > 1:
        raise Unavailable("has no kernel for several branches with pages")
    kernel = _module("cache_locs").assign_draft_cache_locs_contiguous
    table, seq_lens = values["req_to_token"], values["seq_lens"]
    topk, num_steps, batch_size = values["topk"], values["num_steps"], len(seq_lens)
    cache_locs = torch.empty(batch_size * topk, num_steps, dtype=torch.int64, device=table.device)
    positions = torch.empty(batch_size * topk, dtype=torch.int64, device=table.device)

    def run():
        kernel[(batch_size,)](
            values["req_pool_indices"], table, seq_lens, cache_locs, table.shape[1], topk, num_steps,
            positions=positions, BS=batch_size, WRITE_POSITIONS=True,
        )  # fmt: skip
        return {"cache_locs": cache_locs, "positions": positions}

    return run
