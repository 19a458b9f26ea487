"""Attention over the paged KV cache, for one query per request and for trees of queries."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["attention"]})
