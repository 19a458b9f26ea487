"""Models that say what is given, so that acceptance measures the drafter and not the model: code that is edited."""

import random
import re

import torch
from torch import Tensor

from eagle_kernels.engine.models.heads import NextTokenModules
from eagle_kernels.engine.models.protocol import TargetModel, TargetOutput

_POSITION_BITS = 20
_PIECES = re.compile(r"\w+|[^\w\s]|\n|[ \t]+")


def edited_file(text: str, num_lines: int, share: float, vocab_size: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Tokens of the first lines of a text, and of the same with some of them changed: (before, after).

    share: of the lines; one in three of these is removed, one gets another line behind it, one a new name in it.
    Tokens are words, signs and runs of blanks, numbered as they come.
    """
    coin = random.Random(seed)
    lines = [line + "\n" for line in text.splitlines()][:num_lines]
    changed = dict.fromkeys(coin.sample(range(len(lines)), round(share * len(lines))))
    after = []
    for number, line in enumerate(lines):
        if number not in changed:
            after.append(line)
            continue
        kind = coin.choice(("remove", "add", "rename"))
        names = re.findall(r"[A-Za-z_]\w+", line)
        if kind == "rename" and names:
            after.append(line.replace(coin.choice(names), f"renamed_{number}"))
        elif kind != "remove":
            after += [line, f"    added_{number} = {number}\n"]
    ids: dict[str, int] = {}
    before, after = ([ids.setdefault(piece, len(ids)) for piece in _PIECES.findall("".join(part))]
                     for part in (lines, after))  # fmt: skip
    if len(ids) > vocab_size:
        raise ValueError(f"edited_file: the text has {len(ids)} different tokens, the model {vocab_size}")
    return before, after


class Replay:
    """A model that computes what it always does and then says `script`, whatever it has read: token p + 1 at position
    p. Wrong drafts, in whose rows nobody is interested, get the script's next token as well.

    accuracy: share of the positions where it says something else, as a draft does that is right so often.
    """

    def __init__(self, model: TargetModel, script: list[int], accuracy: float = 1.0, seed: int = 0):
        self._model = model
        self._said = _said(model, script, accuracy, seed)

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def forward(self, input_ids: Tensor, positions: Tensor, attend, *, capture=(), last_only=False) -> TargetOutput:
        """See `TargetModel`."""
        output = self._model.forward(input_ids, positions, attend, capture=capture, last_only=last_only)
        said = self._said[positions[:, -1:] if last_only else positions]
        return output._replace(logits=_with_peaks(output.logits, said))


class ReplayModules:
    """Next-token modules, likewise: of module k what the script says k + 2 places behind a row's token."""

    def __init__(self, modules: NextTokenModules, script: list[int], accuracy: float = 1.0, seed: int = 0):
        self._modules, self._said = modules, _said(modules, script, accuracy, seed)
        self._bits = 1 << torch.arange(_POSITION_BITS, device=modules.device)

    def __getattr__(self, name: str):
        return getattr(self._modules, name)

    def advance(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, attend, *, module: int) -> Tensor:
        """See `DraftModules`; the place of what is said next goes along, a bit an element."""
        hidden = self._modules.advance(input_ids, hidden, positions, attend, module=module).clone()
        place = (positions + 1 + module).clamp(max=len(self._said) - 1)
        hidden[..., :_POSITION_BITS] = (place[..., None] & self._bits > 0).to(hidden.dtype)
        return hidden

    def project(self, hidden: Tensor) -> Tensor:
        """See `DraftModules`."""
        places = ((hidden[..., :_POSITION_BITS] > 0) * self._bits).sum(-1)
        return _with_peaks(self._modules.project(hidden), self._said[places])


def _said(model: TargetModel | NextTokenModules, script: list[int], accuracy: float, seed: int) -> Tensor:
    """Token p + 1 of the script at place p, some of them wrong, for each position of the model."""
    said = torch.tensor(script[1:] + [0])
    is_wrong = torch.rand(len(said), generator=torch.Generator().manual_seed(seed)) >= accuracy
    said = torch.where(is_wrong, (said + 1) % model.vocab_size, said)
    return torch.nn.functional.pad(said, (0, max(0, model.max_length - len(said)))).to(model.device)


def _with_peaks(logits: Tensor, said: Tensor) -> Tensor:
    """What is said above all other logits, which stay what they are."""
    peaks = torch.full_like(said, 100, dtype=logits.dtype)
    return logits.scatter(-1, said[..., None], peaks[..., None])
