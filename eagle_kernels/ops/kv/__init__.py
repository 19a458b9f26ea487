"""The paged KV cache: lists of slots for drafting, for attention, after verification; writing and moving."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["kv"]})
