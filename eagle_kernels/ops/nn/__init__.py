"""The small kernels that a decode step needs between its matrix products: norm, rotary embedding, activation."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["nn"]})
