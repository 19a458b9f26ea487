"""What a single call changes: fields of the configuration, and sampling parameters of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..requests.sampling_params import SAMPLING_FIELDS, SamplingParams
from .eagle_config import EAGLEConfig

CONFIG_FIELDS = tuple(field.name for field in fields(EAGLEConfig))


def split_overrides(
    config: EAGLEConfig, overrides: Mapping[str, Any], caller: str = "generate"
) -> tuple[EAGLEConfig, dict[str, Any]]:
    """Returns the configuration of a call, and those overrides that only its requests have."""
    if caller == "generate" and "seed" in overrides:
        raise ValueError("generate: takes seeds=, one for all or one per prompt, not seed=")
    unknown = sorted(overrides.keys() - {*CONFIG_FIELDS, *SAMPLING_FIELDS} | overrides.keys() & {"seed"})
    if unknown:
        raise ValueError(f"{caller}: there is no field {unknown[0]} in EAGLEConfig or SamplingParams")
    of_config = config_fields(overrides)
    of_requests = {name: value for name, value in overrides.items() if name not in of_config}
    made = replace(config, **of_config) if of_config else config
    wanted = of_config.get("accept_policy", made.accept_policy)
    if wanted != made.accept_policy:
        raise ValueError(
            f"{caller}: accept_policy must be 'simulate' where simulated_accept_length or simulated_accept_rates "
            f"is given, here or to the engine, got {wanted!r}"
        )
    return made, of_requests


def config_fields(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those overrides that are fields of `EAGLEConfig`."""
    return {name: value for name, value in overrides.items() if name in CONFIG_FIELDS}


def sampling_params(config: EAGLEConfig, of_requests: Mapping[str, Any]) -> SamplingParams:
    """Returns what a request asks for: the configuration's sampling, and over it the call's own."""
    shared = {name: getattr(config, name) for name in SAMPLING_FIELDS if name in CONFIG_FIELDS}
    return SamplingParams(**shared | of_requests)
