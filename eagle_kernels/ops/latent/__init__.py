"""Attention over latents (MLA): keys that are values too, one for all heads, for tokens, trees and prompts."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["latent"]})
