"""vLLM's attention on our kernels: decode and verification of drafts, and prompts that FlashAttention 3 does not read.

Importing this file imports vLLM, and asks it for the device. Keys and values stay in vLLM's cache, as it lays them out:
[pages, Hkv, page_size, 2 * D] by name, and slots before heads in memory, so that a head's key and value are neighbours.
So prefix caches, KV connectors and layers of other backends see what they expect.

Who reads what
    A step is ours if its rows are short: one for each request, and one more for each draft. In a step with prompts or
    chunks of them FlashAttention 3 reads all rows, on GPUs for which vLLM has it. On others ours reads the short rows,
    which come first, and then the prompts; and everywhere in steps with trees, whose masks FlashAttention 3 has not.
CUDA graphs
    What a captured step reads (`Rows`) lies in buffers of the metadata's builder, which vLLM calls before every replay;
    for later drafts newer releases capture one call of it for each (`update_draft_decode_metadata`).
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from ...ops import gqa_decode, prefill_attention, tree_attention
from ...ops.attention.tree_attention import Output as Attended
from ...primitives.paging import MAX_HEAD_DIM, MAX_PAGE_SIZE
from .parts import KV_DTYPES, SWITCHES, backend_name, reads_prompts
from .rows import Rows, RowsOfSteps, aligned
from .trees import Level


def _host():
    """Returns vLLM's own (backend, metadata builder, implementation) for this device.

    FlashAttention 3 reads prompts, unless EAGLE_KERNELS_VLLM_PROMPTS is `ours`, as fp32 needs.
    """
    if not reads_prompts() and current_platform.is_cuda() and current_platform.is_device_capability_family(90):
        from vllm.v1.attention.backends import fa_utils, flash_attn

        if fa_utils.is_flash_attn_varlen_func_available() and fa_utils.get_flash_attn_version() == 3:
            return (
                flash_attn.FlashAttentionBackend,
                flash_attn.FlashAttentionMetadataBuilder,
                flash_attn.FlashAttentionImpl,
            )
    from vllm.v1.attention.backends import triton_attn

    return (
        triton_attn.TritonAttentionBackend,
        triton_attn.TritonAttentionMetadataBuilder,
        triton_attn.TritonAttentionImpl,
    )


# With a cache of 8 bits vLLM gives FlashAttention queries of 8 bits, which stay with it.
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Backend, Builder, Implementation = _host()
READS_MIXED = Backend.get_name() == "FLASH_ATTN"  # all rows of a step with prompts


class EagleKernelsBuilder(RowsOfSteps, Builder):
    """Makes the metadata of vLLM's own attention, and says beside it which rows are ours."""

    # In the graph of a mixed batch rows would stay split as they were when it was captured.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prepare_rows(vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        """Builds vLLM's metadata, and the Rows of ours as its attribute `eagle_kernels`."""
        has_mixed = not READS_MIXED or self.has_trees()
        rows = self.rows_of(common_prefix_len, common_attn_metadata, has_mixed=has_mixed, has_prompts=True)
        # a fast one plans no work for FlashAttention
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build or rows is not None)
        metadata.eagle_kernels = rows
        return metadata


class EagleKernelsBackend(Backend):
    """Our backend for vLLM's attention; what it says of itself is what the backend under it does."""

    @staticmethod
    def get_name() -> str:
        return backend_name()

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None) -> list[int]:
        """Returns the page sizes that our ops take and vLLM's own kernels do; vLLM splits larger and odd pages."""
        given = () if kv_cache_spec is None else (kv_cache_spec,)
        theirs = super().get_supported_kernel_block_sizes(*given)
        ours = [16 << power for power in range((MAX_PAGE_SIZE // 16).bit_length())]
        # their kernels of some heads take pages of one size; else they take any multiple of 16
        return [size for size in ours if size in theirs] if all(isinstance(size, int) for size in theirs) else ours

    @staticmethod
    def get_impl_cls() -> type[EagleKernelsImpl]:
        return EagleKernelsImpl

    @staticmethod
    def get_builder_cls() -> type[EagleKernelsBuilder]:
        return EagleKernelsBuilder


class EagleKernelsImpl(Implementation):
    """The attention of a layer."""

    reads_trees = False  # a target's, where drafts are trees; a draft's first pass reads accepted tokens

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        left, right = self.sliding_window
        self.window = left + 1 if left >= 0 else None
        self.soft_cap = self.logits_soft_cap or None
        self.is_ours = (
            self.attn_type == AttentionType.DECODER
            and self.alibi_slopes is None
            and right <= 0
            and self.head_size <= MAX_HEAD_DIM
            and self.kv_cache_dtype in KV_DTYPES
            and getattr(self, "chunk_lookback", -1) < 0
        )
        if not READS_MIXED:  # Triton's kernel takes queries of 16 bits with keys of 8 as well
            self.supports_quant_query_input = False

    def check_trees(self, name: str) -> None:
        """Raises RuntimeError if this layer, of this name, cannot read trees."""
        reasons = {
            "ours does not read it": not self.is_ours, "it has a sliding window": self.window is not None,
            f"its cache is {self.kv_cache_dtype}": self.kv_cache_dtype.startswith("fp8"),
        }  # fmt: skip
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise RuntimeError(f"eagle_kernels: trees of drafts are not supported in layer {name}: {reason}")

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):  # fmt: skip
        """Attends a step's rows; vLLM has written their keys and values into the cache, but for a draft's levels."""
        if isinstance(attn_metadata, Level):
            self._attend_level(attn_metadata, query, key, value, self._cache(layer, kv_cache), output)
            return output
        rows = getattr(attn_metadata, "eagle_kernels", None)
        is_ours = rows is not None and self.is_ours and output_scale is None and output_block_scale is None
        if not is_ours or query.dtype not in QUERY_DTYPES:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        SWITCHES.note_use("attention")
        cache = self._cache(layer, kv_cache)
        shape = (-1, self.num_heads, self.head_size)
        query, output = query.view(shape), output.view(shape)
        if rows.num_requests:
            self._attend_short(rows, query, cache, attn_metadata, output)
        if rows.prompt_bounds is not None:
            self._attend_prompts(rows, query, cache, attn_metadata, output)
        return output

    def _attend_short(self, rows: Rows, query, cache: dict, metadata, output) -> None:
        count, options = rows.num_tokens, self._logits()
        plan = rows.plan if self.window is None else None
        table = {"block_table": metadata.block_table[: rows.num_requests], "plan": plan}
        out = Attended(output[:count], self._log_sums(query[:count]))
        if rows.max_query == 1:
            gqa_decode(query[:count], **cache, **table, **options, seq_lens=rows.seq_lens, out=out)
            return
        has_mask = self.reads_trees and rows.tree_mask is not None
        sees = {"tree_mask": rows.tree_mask} if has_mask else {"is_causal": True}
        tree_attention(
            query[:count], **cache, **table, **options, seq_lens=rows.prefix_lens, qo_indptr=rows.bounds,
            max_query=rows.max_query, **sees, out=out,
        )  # fmt: skip

    def _attend_level(self, level: Level, query, key, value, cache: dict, output) -> None:
        """Attends the beams of a level, [B * K] rows, to the prefix and to the beams of all levels that they see."""
        size, topk = level.ancestors.shape[:2]
        count, shape = level.number * topk, (size, topk, -1, self.head_size)
        query, output = query.view(shape), output.view(shape)
        drafts = {}
        for name, rows, kept in (("draft_key", key, level.keys), ("draft_value", value, level.values)):
            kept[:size, count - topk : count] = rows.view(shape)
            drafts[name] = kept[:size, :count]
        tree_attention(
            query, **cache, **self._logits(), **drafts, tree_mask=level.ancestors, num_draft_keys=count,
            block_table=level.block_table, seq_lens=level.prefix_lens, out=Attended(output, self._log_sums(query)),
        )  # fmt: skip

    def _attend_prompts(self, rows: Rows, query, cache: dict, metadata, output) -> None:
        first, stop = rows.num_tokens, metadata.num_actual_tokens
        prefill_attention(
            query[first:stop], rows.prompt_bounds, **cache, **self._logits(), max_query=metadata.max_query_len,
            block_table=aligned(metadata.block_table[rows.num_requests :]), seq_lens=rows.prompt_lens,
            out=Attended(output[first:stop], self._log_sums(query[first:stop])),
        )  # fmt: skip

    def _logits(self) -> dict:
        """Returns what changes logits, as arguments of the ops."""
        return {"sm_scale": self.scale, "soft_cap": self.soft_cap, "window": self.window, "sinks": self.sinks}

    def _cache(self, layer, kv_cache: torch.Tensor) -> dict:
        """Returns the keys and values [pages, page_size, Hkv, D] and their scales, as arguments of the ops."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if not self.kv_cache_dtype.startswith("fp8"):
            return {"k_cache": keys, "v_cache": values}
        dtype = current_platform.fp8_dtype()
        return {
            "k_cache": keys.view(dtype), "v_cache": values.view(dtype),
            "k_scale": layer._k_scale.view(-1), "v_scale": layer._v_scale.view(-1),
        }  # fmt: skip

    @staticmethod
    def _log_sums(query: torch.Tensor) -> torch.Tensor:
        """Allocates what the ops return beside the output, which nobody reads here; graphs keep what is theirs."""
        return torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
