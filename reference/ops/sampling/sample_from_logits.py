"""Reference of sample_from_logits."""

import torch

from ...sampling import Filters, Processors, draw_tokens


def sample_from_logits(
    logits: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor,
    top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None, min_p: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None, frequency_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None, prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None, logit_bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None,
    *, filter_order: str = "top_k_first",
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/sampling/sample_from_logits.py."""
    filters = Filters(top_k, top_p, min_p, filter_order)
    processors = Processors(
        repetition_penalty, frequency_penalty, presence_penalty, prompt_mask, output_counts, logit_bias, token_bitmask
    )
    return draw_tokens(logits, positions, seeds, temperature, filters, processors)
