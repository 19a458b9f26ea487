"""Linear layers for the rows of a decoding step, in 16 bit and with quantised weights."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["linear"]})
