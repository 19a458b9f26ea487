"""Building the tree: from draft logits to masks, positions and links."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["tree"]})
