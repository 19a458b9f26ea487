"""Sampling: which drafts the target accepts when it draws, the draw itself, and what filters and penalties leave."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["sampling"]})
