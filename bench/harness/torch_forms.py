"""Plain torch formulations that several benchmarks share: of sampling rows, building trees and walking them."""

from collections.abc import Callable

import torch

from .inputs import parents


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """One token id a row, by softmax, a sort where there is a filter, and an exponential race."""
    probs = torch.softmax(logits.float() / temperature[:, None], dim=-1)
    if top_k is not None or top_p is not None:
        probs, token_ids = probs.sort(dim=-1, descending=True)
        if top_k is not None:
            rank = torch.arange(probs.shape[1], device=probs.device)
            probs = probs.masked_fill(rank >= top_k[:, None], 0.0)
        if top_p is not None:
            mass = probs.sum(-1, keepdim=True)
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None] * mass, 0.0)
        winner = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return token_ids.gather(1, winner).squeeze(1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


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


class Walk:
    """Walks trees with tensor operations; what a torch user has anyway is made once, from the links.

    above: the parent of each node [B, N], the root's is the root; visible: its ancestors and itself [B, N, N].
    """

    def __init__(self, values: dict):
        self.candidates, self.num_columns = values["candidates"], values.get("spec_steps", 0) + 1
        device, (batch_size, self.num_nodes) = self.candidates.device, self.candidates.shape
        parent = parents(values).to(device)
        self.node, self.request = (torch.arange(size, device=device) for size in (self.num_nodes, batch_size))
        self.visible = torch.eye(self.num_nodes, dtype=torch.bool, device=device).expand(batch_size, -1, -1).clone()
        for child in range(1, self.num_nodes):
            self.visible[:, child] |= self.visible[self.request, parent[:, child]]
        self.depth = self.visible.sum(-1) - 1
        self.above = parent.clamp(min=0)
        self._first_row = self.request[:, None] * self.num_nodes

    def follow(self, target_predict: torch.Tensor) -> dict:
        """Accepts a node if it and all above it carry the target's token [B, N] at their parent."""
        _, on_path, outputs = self.accept(self.candidates == target_predict.gather(1, self.above))
        return {"predicts": torch.where(on_path, target_predict, -1).flatten().int()} | outputs

    def accept(self, matches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Accepts a node if it and all above it match; returns the last one [B], the path as a mask, and outputs."""
        matches[:, 0] = True
        is_accepted = (matches[:, None, :] | ~self.visible).all(-1)
        last = torch.where(is_accepted, self.depth, -1).argmax(1)
        on_path = self.visible[self.request, last]
        path = torch.where(on_path, self.node, self.num_nodes).sort(dim=1).values[:, : self.num_columns]
        return last, on_path, {
            "accept_index": torch.where(path < self.num_nodes, path + self._first_row, -1).int(),
            "accept_token_num": self.depth[self.request, last].int(),
        }  # fmt: skip
