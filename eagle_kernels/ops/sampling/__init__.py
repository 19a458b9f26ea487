"""Drawing tokens from logits, filtering and penalizing them, and verification by sample and match."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["sampling"]})
