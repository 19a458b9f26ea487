"""vLLM's attention over latents (MLA) on our kernels: decode, verification of drafts, and trees.

Importing this file imports vLLM, and asks it for the device. Latents stay in vLLM's cache [pages, page_size, D], and
vLLM absorbs the weights. Prompts are read by vLLM, which multiplies latents out to keys and values of all heads; with
EAGLE_KERNELS_VLLM_PROMPTS=ours they are ours, absorbed, which takes more arithmetic and no workspace.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, QueryLenSupport
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

from ...ops import mla_decode, mla_prefill, mla_tree_attention
from ...ops.latent.mla_decode import Output as Attended
from ...ops.latent.shared.latents import MAX_LATENT_DIM, MAX_ROPE_DIM
from ...primitives.paging import MAX_PAGE_SIZE
from .parts import LATENTS, SWITCHES, backend_name, reads_prompts
from .rows import Rows, RowsOfSteps, aligned
from .trees import Level

_ALL = 2**31 - 1  # longer than any rows of a request


class LatentBuilder(RowsOfSteps, MLACommonMetadataBuilder):
    """Makes the metadata of vLLM's own attention, and says beside it which rows are ours."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prepare_rows(vllm_config, device)
        self.has_prompts = reads_prompts()

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        """Builds vLLM's metadata, and the Rows of ours as its attribute `eagle_kernels`."""
        # what vLLM calls decodes comes to us, absorbed
        self.reorder_batch_threshold = _ALL if self.has_prompts else self.most_rows
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        self.reorder_batch_threshold = self.most_rows
        options = {"has_mixed": True, "has_prompts": self.has_prompts}
        metadata.eagle_kernels = self.rows_of(common_prefix_len, common_attn_metadata, **options)
        return metadata


class LatentBackend(TritonMLABackend):
    """Our backend for layers of latents; what it says of itself is what vLLM's Triton backend does."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return backend_name()

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        """Returns the page sizes that our ops take; vLLM splits larger and odd pages."""
        return [16 << power for power in range((MAX_PAGE_SIZE // 16).bit_length())]

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder


class LatentImpl(TritonMLAImpl):
    """The attention of a layer."""

    reads_trees = False  # a target's, where drafts are trees; a draft's first pass reads accepted tokens

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for name, size, most in (
            ("kv_lora_rank", self.kv_lora_rank, MAX_LATENT_DIM),
            ("qk_rope_head_dim", self.qk_rope_head_dim, MAX_ROPE_DIM),
        ):
            if size > most:
                raise ValueError(f"eagle_kernels: {name} of this model must be at most {most}, got {size}")
        self.supports_quant_query_input = False

    def check_trees(self, name: str) -> None:
        """Raises RuntimeError if this layer, of this name, cannot read trees."""
        if self.kv_cache_dtype.startswith("fp8"):
            raise RuntimeError(
                f"eagle_kernels: trees of drafts are not supported in layer {name}: its cache is {self.kv_cache_dtype}"
            )

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        """Attends a step's short rows, and prompts if they are ours; returns latents [T, Hq, L] and log-sum-exps."""
        rows = getattr(attn_metadata, "eagle_kernels", None)
        if rows is None:
            raise RuntimeError("eagle_kernels: rows of latents that are not causal, or have a shared prefix")
        SWITCHES.note_use(LATENTS)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out = self._empty(query)
        options = self._options(layer, kv_c_and_k_pe_cache)
        if rows.num_requests:
            self._attend_short(rows, query, attn_metadata.decode.block_table, options, out)
        if rows.prompt_bounds is not None:
            first = rows.num_tokens
            mla_prefill(
                query[first:], rows.prompt_bounds, **options, max_query=attn_metadata.max_query_len,
                block_table=aligned(attn_metadata.decode.block_table[rows.num_requests :]),
                seq_lens=rows.prompt_lens, out=Attended(*(x[first:] for x in out)),
            )  # fmt: skip
        return out

    def _attend_short(self, rows: Rows, query, block_table, options: dict, out: Attended) -> None:
        count = rows.num_tokens
        query, out = query[:count], Attended(*(x[:count] for x in out))
        options = options | {"block_table": block_table[: rows.num_requests], "plan": rows.plan, "out": out}
        if rows.max_query == 1:
            mla_decode(query, **options, seq_lens=rows.seq_lens)
            return
        has_mask = self.reads_trees and rows.tree_mask is not None
        sees = {"tree_mask": rows.tree_mask} if has_mask else {"is_causal": True}
        mla_tree_attention(
            query, **options, **sees, seq_lens=rows.prefix_lens, qo_indptr=rows.bounds, max_query=rows.max_query
        )

    def attend_level(self, level: Level, query, latents, layer, kv_cache) -> torch.Tensor:
        """Attends the beams of a level, query [B, K, Hq, D], to the prefix and to beams whose rows `latents` [B, C, D]
        are beside the cache; returns [B, K, Hq, L]."""
        unseen = torch.zeros_like(level.ancestors[..., :1])  # of a draft in the cache
        prefix = mla_tree_attention(
            query, **self._options(layer, kv_cache), tree_mask=unseen, num_draft_keys=1, block_table=level.block_table,
            seq_lens=level.prefix_lens,
        )  # fmt: skip
        beam = torch.arange(latents.shape[1], device=query.device)
        is_seen = (level.ancestors[..., beam // 64] >> (beam % 64) & 1).bool()  # [B, K, C]
        logits = torch.einsum("bkhd,bcd->bkhc", query.float(), latents.float()) * self.scale
        logits = logits.masked_fill(~is_seen[:, :, None], float("-inf"))
        lse = logits.logsumexp(-1)
        own = torch.einsum("bkhc,bcl->bkhl", logits.softmax(-1), latents[..., : self.kv_lora_rank].float())
        whole = torch.logaddexp(lse, prefix.lse)
        shares = [(each - whole).exp()[..., None] for each in (prefix.lse, lse)]
        return (prefix.output.float() * shares[0] + own * shares[1]).to(query.dtype)

    def _options(self, layer, kv_cache: torch.Tensor) -> dict:
        """Returns the latents and their scale, as arguments of the ops."""
        options = {"latent_cache": kv_cache, "latent_dim": self.kv_lora_rank, "sm_scale": self.scale}
        if self.kv_cache_dtype.startswith("fp8"):
            options |= {"latent_cache": kv_cache.view(current_platform.fp8_dtype()),
                        "latent_scale": layer._k_scale.view(-1)}  # fmt: skip
        return options

    def _empty(self, query: torch.Tensor) -> Attended:
        shape = query.shape[:-1]
        return Attended(
            torch.empty(*shape, self.kv_lora_rank, dtype=query.dtype, device=query.device),
            torch.empty(shape, dtype=torch.float32, device=query.device),
        )


def forward_impl(original, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, *rest, **options):
    """Attends a layer of latents; where beams of a draft are read, ours does it, and keeps their rows."""
    if not isinstance(attn_metadata, Level):
        return original(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, *rest, **options)
    level, (size, topk) = attn_metadata, attn_metadata.ancestors.shape[:2]
    count, rows = level.number * topk, size * topk
    staying, turning = q[:rows].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    absorbed = torch.bmm(staying.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
    query = torch.cat([absorbed, turning], dim=-1).unflatten(0, (size, topk))
    row = torch.cat([k_c_normed[:rows], k_pe[:rows].flatten(1)], dim=-1)
    level.keys[:size, count - topk : count] = row.unflatten(0, (size, topk))
    attended = layer.impl.attend_level(level, query, level.keys[:size, :count], layer, kv_cache)
    heads = output[:rows].unflatten(-1, (attended.shape[2], -1))
    torch.bmm(attended.flatten(0, 1).transpose(0, 1), layer.W_UV, out=heads.transpose(0, 1))
    return output
