"""Hugging Face's models with our attention: `attn_implementation="eagle_kernels"`.

from eagle_kernels.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eagle_kernels")
"""

from __future__ import annotations

from ..engine.models.transformers_adapter import attention


def register(name: str = "eagle_kernels") -> None:
    """Makes `attn_implementation=name` known to transformers, with masks that only say what is padding."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, flash_attention_mask)
