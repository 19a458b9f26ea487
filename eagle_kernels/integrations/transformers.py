"""Hugging Face's models with our attention: `attn_implementation="eagle_kernels"`.

from eagle_kernels.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eagle_kernels")

This is for inference: the ops have no derivatives, so a forward pass that would record them is refused.
"""

import torch
from torch import Tensor

from .. import ops


def register(name: str = "eagle_kernels") -> None:
    """Registers `attn_implementation=name` with transformers, with masks that only say which keys are padding."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _padding_mask)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    is_causal: bool | None = None, s_aux: Tensor | None = None, **kwargs
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention for transformers' AttentionInterface, with `gqa_decode` or `prefill_attention`.

    query          [B, Hq, L, D]   the last L tokens of each sequence
    key, value     [B, Hkv, Lk, D]
    attention_mask [B, Lk]         False for padding, which may be anywhere; None: no padding
    s_aux          [Hq]            attention sinks
    Returns [B, L, Hq, D] and no attention weights; rows of padding hold arbitrary values.
    Sequences packed into one row (marked by position_ids) are not separated.
    Raises ValueError for dropout, for masks of any other shape, and for keys and values of different sizes.
    """
    batch_size, _, num_query, head_dim = query.shape
    if dropout:
        raise ValueError(f"eagle_kernels: attention has no dropout, got dropout={dropout}; call model.eval()")
    if value.shape != key.shape or key.shape[-1] != head_dim:
        shapes = [list(tensor.shape) for tensor in (query, key, value)]
        raise ValueError(f"eagle_kernels: query, key and value must have one head dimension, got {shapes}")
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            shape = list(attention_mask.shape)
            raise ValueError(f"eagle_kernels: attention_mask must be [batch, tokens] or None, got shape {shape}")
        # a preallocated cache is longer than what it holds
        key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
    num_keys = key.shape[2]
    options = {"sm_scale": scaling, "window": sliding_window, "soft_cap": softcap, "sinks": s_aux}
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    rows = query.transpose(1, 2)
    # tokens one after another: a page of one token is any row
    key, value = (tensor.transpose(1, 2).flatten(0, 1).unsqueeze(1).contiguous() for tensor in (key, value))
    first = torch.arange(batch_size, device=query.device)[:, None] * num_keys
    if attention_mask is None:
        table = first + torch.arange(num_keys, device=query.device)
        lengths = torch.full((batch_size,), num_keys, dtype=torch.int64, device=query.device)
        order = None
    else:
        is_token = attention_mask.bool()
        table = first + torch.argsort(~is_token, dim=1, stable=True)
        lengths = is_token.sum(dim=1)
        # queries are the last of their keys: padding comes before them
        order = torch.argsort(is_token[:, -num_query:].to(torch.int8), dim=1, stable=True)[..., None, None]
        rows = rows.gather(1, order.expand_as(rows))
    cache = {"k_cache": key, "v_cache": value, "block_table": table.to(torch.int32), "seq_lens": lengths}
    if num_query == 1:
        output = ops.gqa_decode(rows[:, 0].contiguous(), **cache, **options).output[:, None]
    else:
        bounds = torch.arange(batch_size + 1, device=query.device) * num_query
        flat = rows.flatten(0, 1).contiguous()
        output = ops.prefill_attention(
            flat, bounds, **cache, **options, max_query=num_query, is_causal=is_causal
        ).output.unflatten(0, (batch_size, num_query))
    if order is not None:
        output = torch.empty_like(output).scatter_(1, order.expand_as(output), output)
    return output, None


def _padding_mask(
    *, batch_size: int, kv_length: int, kv_offset: int = 0, q_length: int = 0, q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None, attention_mask: Tensor | None = None,
    device: torch.device | str | None = None, **kwargs
) -> Tensor | None:  # fmt: skip
    """Returns which of the filled keys are no padding, [B, keys], or None if all of kv_length are.
    Unlike transformers' mask for flash attention it also tells how much of a preallocated cache is filled.
    cache_position: given instead of q_offset and q_length by transformers before version 5."""
    if attention_mask is None:
        num_seen = int(q_offset) + q_length if cache_position is None else int(cache_position[-1]) + 1
        num_keys = min(num_seen - kv_offset, kv_length)
        return None if num_keys == kv_length else torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
    attention_mask = attention_mask[:, -kv_length:]
    return None if attention_mask.shape[1] == kv_length and attention_mask.all() else attention_mask
