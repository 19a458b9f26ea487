"""A made vLLM's attention over latents: the few names that our backend for them imports, in the form of 0.26."""

import enum
from types import SimpleNamespace

import torch


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY, UNIFORM, VARLEN = "single_only", "uniform", "varlen"


class MLACommonMetadataBuilder:
    query_len_support = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        assert self.query_len_support is QueryLenSupport.VARLEN
        self.reorder_batch_threshold = 1 + vllm_config.num_speculative_tokens

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common, bounds = common_attn_metadata, common_attn_metadata.query_start_loc_cpu
        is_short = (bounds.diff() <= self.reorder_batch_threshold).int().cumprod(0)
        count = int(is_short.sum())
        decode = SimpleNamespace(block_table=common.block_table_tensor[:count], seq_lens=common.seq_lens[:count])
        return SimpleNamespace(
            decode=decode, num_decodes=count, num_decode_tokens=int(bounds[count]), max_query_len=common.max_query_len,
            num_actual_tokens=common.num_actual_tokens,
        )  # fmt: skip


class TritonMLABackend:
    supported_dtypes = (torch.float16, torch.bfloat16)

    @classmethod
    def validate_configuration(cls, *, use_mla, use_sparse, device_capability, dtype, **others) -> list[str]:
        reasons = {"sparse not supported": use_sparse, "dtype not supported": dtype not in cls.supported_dtypes}
        return [reason for reason, holds in reasons.items() if holds]


class TritonMLAImpl:
    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                 logits_soft_cap, attn_type, kv_sharing_target_layer_name, *, kv_lora_rank, qk_rope_head_dim,
                 **others):  # fmt: skip
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.supports_quant_query_input = True


class MLAAttention:
    """A layer: the heads' parts of a query that stay, the latents' weights, and what reads them."""

    def __init__(self, impl, nope: int, value: int):
        self.impl, self.qk_nope_head_dim, self.qk_rope_head_dim = impl, nope, impl.qk_rope_head_dim
        self.kv_lora_rank, self.head_size = impl.kv_lora_rank, impl.kv_lora_rank + impl.qk_rope_head_dim
        self.W_UK_T = torch.randn(impl.num_heads, nope, impl.kv_lora_rank)
        self.W_UV = torch.randn(impl.num_heads, impl.kv_lora_rank, value)
        self._k_scale = torch.tensor(1.0)

    def forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output):
        return "vLLM's"


def cached_get_attn_backend(backend, attn_selector_config, num_heads=None):
    return "vLLM's"


MODULES = {
    "vllm.model_executor.layers.attention.mla_attention": {
        each.__name__: each for each in (MLACommonMetadataBuilder, QueryLenSupport, MLAAttention)
    },
    "vllm.v1.attention.backends.mla.triton_mla": {
        each.__name__: each for each in (TritonMLABackend, TritonMLAImpl)
    },
    "vllm.v1.attention.selector": {"_cached_get_attn_backend": cached_get_attn_backend},
}  # fmt: skip
