"""A small grammar backend for SGLang: regular expressions over bytes, each of which is a token. A plug-in registers it.

xgrammar and its kin are not needed for the tests of the plug-in: all reach verification as bitmasks of the nodes.
"""

from __future__ import annotations

import interegular
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject, register_grammar_backend

NAME = "bytes"


class ByteGrammar(BaseGrammarObject):
    """What may follow, by the states of an automaton; the last of them is the present one, None after the end."""

    def __init__(self, automaton, ends: frozenset[int], states: list[int | None] | None = None):
        super().__init__()
        self.automaton, self.ends = automaton, ends
        self.states = [automaton.initial] if states is None else states

    def _next(self, token: int) -> int | None:
        symbol = self.automaton.alphabet[chr(token)] if token < 256 else None
        after = self.automaton.map.get(self.states[-1], {}).get(symbol)
        return after if after is not None and self.automaton.islive(after) else None

    def accept_token(self, token: int) -> None:
        if token in self.ends and self.states[-1] in self.automaton.finals:
            self.states.append(None)
            return
        after = self._next(token)
        if after is None:
            raise ValueError(f"byte_grammar: token {token} does not follow")
        self.states.append(after)

    def rollback(self, k: int) -> None:
        del self.states[len(self.states) - k :]

    def is_terminated(self) -> bool:
        return self.states[-1] is None

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device) -> torch.Tensor:
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        allowed = torch.zeros(32 * vocab_mask.shape[1], dtype=torch.int64)
        allowed[[token for token in range(256) if self._next(token) is not None]] = 1
        if self.states[-1] in self.automaton.finals:
            allowed[list(self.ends)] = 1
        vocab_mask[idx] = (allowed.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)

    @staticmethod
    def reset_vocab_mask(vocab_mask: torch.Tensor) -> None:
        vocab_mask.fill_(-1)

    @staticmethod
    def move_vocab_mask(vocab_mask: torch.Tensor, device) -> torch.Tensor:
        return vocab_mask.to(device, non_blocking=True)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        bits = vocab_mask[..., None] >> torch.arange(32, device=vocab_mask.device) & 1
        logits.masked_fill_(bits.flatten(-2)[..., : logits.shape[-1]] == 0, float("-inf"))

    def copy(self) -> ByteGrammar:
        return ByteGrammar(self.automaton, self.ends, list(self.states))


class ByteBackend(BaseGrammarBackend):
    """Makes grammars of regular expressions."""

    def __init__(self, ends: frozenset[int]):
        super().__init__()
        self.ends = ends

    def dispatch_regex(self, key_string: str) -> ByteGrammar:
        return ByteGrammar(interegular.parse_pattern(key_string).to_fsm(), self.ends)


def register() -> None:
    """Registers the backend; SGLang calls this in every process."""
    register_grammar_backend(NAME, lambda arguments, tokenizer, vocab_size, ends: ByteBackend(frozenset(ends or ())))
