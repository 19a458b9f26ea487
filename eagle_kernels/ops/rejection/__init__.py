"""Verifying drafts that were drawn: by rejection, along the tree or a chain, and the drawing of children."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["rejection"]})
