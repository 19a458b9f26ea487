"""Drafts that know the text, or its opposite, and planted times of steps: what a choice of trees ought to find out."""

import torch

from eagle_kernels.engine.models.protocol import DraftOutput, KVShape

PROMPT, LENGTH = [3, 1, 4, 1, 5], 120
# milliseconds of a plain step, and what each node more adds to them: where nobody measures on a GPU
PLAIN_MS, NODE_MS = 6.0, 0.2


class Prophet:
    """Knows the text that follows one prompt, and says it, or its opposite; as a draft it costs next to nothing."""

    aux_layers, draft_to_target, token_shift = (), None, 0

    def __init__(self, text: list[int], vocab_size: int, is_right: bool, device):
        self.vocab_size = self.draft_vocab_size = vocab_size
        self.max_length, self.kv_shape = 256, KVShape(num_layers=1, num_kv_heads=1, head_dim=16)
        tokens = torch.tensor((text + [0] * self.max_length)[: self.max_length + 1], device=device)
        says = torch.nn.functional.one_hot(tokens, vocab_size).float()
        self._logits = 40 * says if is_right else -40 * says

    def forward(self, input_ids, hidden, positions, attend, *, from_target):
        return DraftOutput(self._logits[(positions + 1).clamp(max=self.max_length)], hidden)


def planted_ms(num_nodes: int) -> float:
    return PLAIN_MS + NODE_MS * (num_nodes - 1)
