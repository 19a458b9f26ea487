"""Verifying the tree: which drafts the target accepts, and the token that follows them."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["verify"]})
