"""Drafts that were drawn from a draft model: drawing them, and verifying them along a chain or a tree."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["rejection"]})
