"""A drafter of your own: any object with these members drafts for `EAGLEInference`, and the text stays the target's.

    pip install -e '.[models]' && python -m eagle_kernels.examples.own_drafter

This one guesses the next byte from the last one, by how often one follows the other in some Python files. A better
guess makes generation faster; no guess changes the text. What the engine asks of a draft model, and what it gives it
(positions, attention over a KV pool, the target's features), is in `eagle_kernels/engine/models/protocol.py`.
"""

from pathlib import Path

import torch
from torch import Tensor

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.engine.models.protocol import Attend, DraftOutput, KVShape
from eagle_kernels.engine.models.tokenizer import load_tokenizer


class BigramDraft:
    """Drafts the bytes that most often follow the last one in a text."""

    method = "draft_model"
    max_length = 1 << 20
    aux_layers: tuple[int, ...] = ()  # it reads none of the target's features
    draft_to_target: Tensor | None = None  # its ids are the target's
    token_shift = 0  # the row of token i has position i
    kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=16)  # the smallest pool: it stores nothing

    def __init__(self, text: bytes, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = self.draft_vocab_size = vocab_size
        pairs = torch.tensor(list(zip(text, text[1:])), device=device)
        counts = torch.full((vocab_size, vocab_size), 0.1, device=device)
        counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(len(pairs), device=device), accumulate=True)
        self._log_probs = (counts / counts.sum(dim=1, keepdim=True)).log()

    def forward(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, from_target: bool
    ) -> DraftOutput:
        """Returns logits [B, T, V] after each of the tokens [B, T]; `hidden` goes on to their children unread."""
        return DraftOutput(self._log_probs[input_ids], hidden)


def main() -> None:
    """Prints a text and its tokens per step, and checks it against plain decoding."""
    folder, _ = demo_pair()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, tokenizer = load_target(folder, device, torch.float32), load_tokenizer(folder)
    files = sorted(Path(__file__).parents[1].glob("engine/**/*.py"))
    draft = BigramDraft(b"".join(file.read_bytes() for file in files), target.vocab_size, device)
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=4, num_steps=3), tokenizer=tokenizer)

    prompt = tokenizer.encode("import os\n\ndef walk(")
    tokens, stats = engine.generate(prompt, 80)
    plain, _ = engine.generate(prompt, 80, speculative=False)
    assert tokens == plain
    print(tokenizer.decode(prompt + tokens))
    print(f"{stats.mean_accept_length:.2f} tokens a step, and the text of plain decoding")


if __name__ == "__main__":
    main()
