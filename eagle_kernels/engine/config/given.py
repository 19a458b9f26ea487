"""Reads the configurations that callers give: an `EAGLEConfig`, or a dict of its fields or of a server's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...runtime.values import shown
from ..requests.names import own_name
from .eagle_config import CONFIG_FIELDS, EAGLEConfig
from .speculative_config import FIELDS, take_model


def read_config(config: Any) -> EAGLEConfig:
    """Returns the configuration that a caller gives, or the default one for None.

    A dict is that of a server where it has `method` or a field that `EAGLEConfig` has not; it may have further fields
    of `EAGLEConfig`. Otherwise it has fields of `EAGLEConfig` alone.
    """
    if isinstance(config, Mapping):
        given = {str(name): value for name, value in config.items()}
        if not is_of_server(given):
            return EAGLEConfig(**given)
        others = {
            name for name in given if own_name(name, FIELDS) is None and own_name(name, CONFIG_FIELDS) is not None
        }
        fields = {name: given[name] for name in given.keys() - others}
        return EAGLEConfig.from_speculative_config(fields, **{name: given[name] for name in others})
    if not (config is None or isinstance(config, EAGLEConfig)):
        raise ValueError(f"EAGLEInference: config must be None, an EAGLEConfig or a dict, got {shown(config)}")
    return config or EAGLEConfig()


def read_config_and_draft(config: Any, draft: Any) -> tuple[EAGLEConfig, Any]:
    """Returns the configuration and the draft's folder; both may come from the fields of a server's configuration."""
    if isinstance(config, Mapping) and is_of_server(config):
        config, draft = take_model(config, draft)
    return read_config(config), draft


def is_of_server(fields: Mapping[str, Any]) -> bool:
    """Returns whether fields are those of a server's configuration; a whole `EAGLEConfig`, as saved, is none."""
    is_whole = fields.keys() >= set(CONFIG_FIELDS)
    has_method = fields.get("method") is not None and not is_whole
    return has_method or any(name in FIELDS and name not in CONFIG_FIELDS for name in fields)
