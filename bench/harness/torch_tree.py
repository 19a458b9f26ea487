"""The plain torch formulation of building a tree, over [B, N, N], which the tree benchmarks share."""

from __future__ import annotations

from collections.abc import Callable

import torch


def closed(steps: torch.Tensor, identity: torch.Tensor) -> torch.Tensor:
    """Returns which nodes any number of steps reach, as 0.0 and 1.0, by matrix powers."""
    reached = steps.float() + identity
    for _ in range((len(identity) - 1).bit_length()):
        reached = (reached @ reached).clamp(max=1.0)
    return reached


def prepare_build(values: dict) -> Callable[[torch.Tensor], tuple[torch.Tensor, dict]]:
    """Returns build(parent [B, N - 1]): who sees whom, as 0.0 and 1.0, and the outputs; of masks, "packed" and
    "qlen_only" ones."""
    seq_lens, num_nodes, mode = (values[name] for name in ("seq_lens", "num_verify_tokens", "tree_mask_mode"))
    batch_size, device = len(seq_lens), seq_lens.device
    node = torch.arange(num_nodes, device=device)
    retrieve_index = torch.arange(batch_size * num_nodes, device=device).view(batch_size, num_nodes)
    identity = torch.eye(num_nodes, device=device)

    def build(parent: torch.Tensor) -> tuple[torch.Tensor, dict]:
        parent = torch.nn.functional.pad(parent, (1, 0), value=-1)
        visible = closed(parent[:, :, None] == node, identity)
        is_child = parent[:, None, :] == node[:, None]
        is_sibling = (parent[:, None, :] == parent[:, :, None]) & (parent >= 0)[:, :, None]
        is_later_sibling = is_sibling & (node > node[:, None])
        outputs = {
            "positions": (seq_lens[:, None] + visible.sum(-1).long() - 1).flatten(),
            "retrieve_index": retrieve_index,
            "retrieve_next_token": torch.where(is_child.any(-1), is_child.int().argmax(-1), -1),
            "retrieve_next_sibling": torch.where(is_later_sibling.any(-1), is_later_sibling.int().argmax(-1), -1),
            "draft_tokens": torch.cat([values["verified_id"][:, None], values["draft_tokens"]], dim=1).flatten(),
        }
        if mode == "packed" and num_nodes <= 64:
            outputs["tree_mask"] = (visible.long() << node).sum(-1, keepdim=True)
        elif mode == "qlen_only":
            outputs["tree_mask"] = visible.bool()
        return visible, outputs

    return build
