"""Hugging Face's models with our attention: `attn_implementation="eagle_kernels"`.

from eagle_kernels.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eagle_kernels")

This is for inference: the ops have no derivatives, so a forward pass that would record them is refused.
"""

from __future__ import annotations

import torch

from ..engine.models.transformers_adapter import attention


def register(name: str = "eagle_kernels") -> None:
    """Makes `attn_implementation=name` known to transformers, with masks that only say which keys are padding."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _padding_mask)


def _padding_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    q_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    cache_position: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """Returns which of the filled keys are no padding, [B, keys], or None if all of kv_length are.

    Unlike transformers' mask for flash attention it also tells how much of a preallocated cache is filled.
    cache_position: given instead of q_offset and q_length by transformers before version 5.
    """
    if attention_mask is None:
        num_seen = int(q_offset) + q_length if cache_position is None else int(cache_position[-1]) + 1
        num_keys = min(num_seen - kv_offset, kv_length)
        return None if num_keys == kv_length else torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
    attention_mask = attention_mask[:, -kv_length:]
    return None if attention_mask.shape[1] == kv_length and attention_mask.all() else attention_mask
