"""The layout in which trees reach our attention: packed words instead of one cell for each node and token."""

import torch
from torch import Tensor

from ...ops import BuildTreeOutput, build_tree
from ..sgl_kernel import parent_slots

# Stands in the place of SGLang's TreeMaskMode: int64 [B, N, ceil(N / 64)]; bit j of row i: node i sees node j.
PACKED = "packed"


def num_words(num_nodes: int) -> int:
    """Returns how many words hold a bit for each node."""
    return -(-num_nodes // 64)


def build_tree_kernel_efficient(
    original, bonus_tokens: Tensor, parent_list: Tensor, top_scores_index: Tensor, draft_tokens: Tensor,
    seq_lens: Tensor, seq_lens_sum: int, topk: int, spec_steps: int, num_verify_tokens: int, tree_mask_mode=0,
    tree_mask_buf: Tensor | None = None, fill_prefix_mask: bool = True,
):  # fmt: skip
    """Builds the trees of a batch for our attention in one launch; leaves those for another attention to SGLang.
    Returns the mask, positions, the three links and the tokens, as SGLang's function of this name does."""
    if tree_mask_mode != PACKED:
        return original(
            bonus_tokens, parent_list, top_scores_index, draft_tokens, seq_lens, seq_lens_sum, topk, spec_steps,
            num_verify_tokens, tree_mask_mode, tree_mask_buf, fill_prefix_mask,
        )  # fmt: skip
    batch_size, device = len(seq_lens), seq_lens.device
    make = lambda *shape: torch.empty(shape, dtype=torch.int64, device=device)  # noqa: E731
    links = [make(batch_size, num_verify_tokens) for _ in range(3)]
    if tree_mask_buf is None:
        mask = make(batch_size, num_verify_tokens, num_words(num_verify_tokens))
    else:
        mask = tree_mask_buf[:batch_size]
    nodes = batch_size * num_verify_tokens
    out = BuildTreeOutput(mask, make(nodes), *links, make(nodes))
    tree = build_tree(
        bonus_tokens, parent_slots(parent_list, spec_steps), top_scores_index, draft_tokens, seq_lens,
        topk=topk, spec_steps=spec_steps, num_verify_tokens=num_verify_tokens, out=out,
    )  # fmt: skip
    return (
        tree.tree_mask, tree.positions, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling,
        tree.draft_tokens,
    )  # fmt: skip
