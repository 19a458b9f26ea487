"""Mixtures of experts: which experts a row goes to, and what they compute, for the rows of a step and of a prompt."""

from ...runtime.lazy import lazily
from ..registry import FAMILIES

__getattr__, __dir__ = lazily(__name__, {name: f".{name}:" for name in FAMILIES["experts"]})
