"""Several drafts for one target, of which a step drafts with one: where they are, and the trees that each can draft.
`adaptive="auto"` chooses by times (`step/choice.py`); texts do not depend on it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ...runtime.values import shown
from ..models.checkpoint import brief, read_folder
from ..models.protocol import DraftModel
from .drafting_options import default_nodes
from .eagle_config import EAGLEConfig

_ARGUMENT = "EAGLEInference.from_pretrained: draft_model"
_logger = logging.getLogger(__name__)


def folders_of_drafts(given: Any) -> dict[str, Path]:
    """Returns the folders of several drafts by name: those of a list, or those in a folder that is no draft itself;
    none for any other folder, and for None."""
    if given is None:
        return {}
    if isinstance(given, (list, tuple)):
        found = [read_folder(_ARGUMENT, each) for each in given]
        _check_list(found, [folder.resolve() for folder in found], [brief(str(folder), 250) for folder in found])
        are_short = len({folder.name for folder in found}) == len(found)
        return {folder.name if are_short else str(folder): folder for folder in found}
    if not isinstance(given, (str, os.PathLike)):
        rule = "be the path of a model's folder, or a list of such paths"
        raise ValueError(f"{_ARGUMENT} must {rule}, got {shown(given)}")
    folder = read_folder(_ARGUMENT, given)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return {}
    found = sorted(each.parent for each in folder.glob("*/config.json"))
    # one folder inside has a line of its own, see `checkpoint`
    return {each.name: each for each in found} if len(found) > 1 else {}


def drafts_by_name(given: Any) -> dict[str, Any]:
    """Returns the drafts that a caller gives: one, several in a list or by name in a dict, or None for none."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        drafts = {str(name): draft for name, draft in given.items()}
    elif isinstance(given, (list, tuple)):
        drafts = {f"{type(draft).__name__} {number}": draft for number, draft in enumerate(given, 1)}
    else:
        return {type(given).__name__: given}
    _check_list(list(drafts), [id(draft) for draft in drafts.values()], list(drafts))
    return drafts


@contextlib.contextmanager
def naming_draft(name: str, is_one_of_several: bool) -> Iterator[None]:
    """Puts the name of one of several drafts before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        if not is_one_of_several:
            raise
        raise ValueError(f"{brief(name)}: {error}") from None


def _check_list(given: Sequence[Any], keys: Sequence[Any], names: Sequence[str]) -> None:
    if not given:
        _refuse("draft_model must be a draft, or several of them", "none")
    for number, key in enumerate(keys):
        if key in keys[:number]:
            _refuse("draft_model must hold each draft once", f"{names[keys.index(key)]} and {names[number]}")


def check_choice(config: EAGLEConfig, names: Sequence[str]) -> None:
    """Raises ValueError where there are several drafts and the configuration does not choose."""
    if len(names) > 1 and config.needs_model and config.may_speculate and config.adaptive != "auto":
        several = ", ".join(brief(name, 40) for name in names)
        _refuse(
            f"adaptive must be 'auto' with several drafts ({several}), or one of them be named", shown(config.adaptive)
        )


def fit_trees(config: EAGLEConfig, drafts: Sequence[DraftModel]) -> list[EAGLEConfig]:
    """Returns the configuration of each draft. Of several, and where no tree was asked for, it has its tree as far as
    the draft can draft it: no more levels than it has, and a chain if these are next-token modules."""
    is_fitted = len(drafts) > 1 or config.has_default_tree
    return [fit_tree(config, draft) if is_fitted else config for draft in drafts]


def tell_of_smaller_trees(config: EAGLEConfig, drafts: Sequence[DraftModel], names: Sequence[str]) -> None:
    """Logs a line for each draft that has a smaller tree than the configuration."""
    for name, own in zip(names, fit_trees(config, drafts) if config.needs_model else ()):
        if own is not config:
            told = "%s: it cannot draft topk=%d, num_steps=%d, and drafts topk=%d, num_steps=%d"
            _logger.info(told, brief(name), config.topk, config.num_steps, own.topk, own.num_steps)


def fit_tree(config: EAGLEConfig, draft: DraftModel) -> EAGLEConfig:
    """Returns the configuration with its tree as far as one draft can draft it."""
    num_modules = getattr(draft, "num_modules", 1)
    most_levels = getattr(draft, "block_length", getattr(draft, "max_levels", config.num_steps))
    if num_modules > 1:
        most_levels = num_modules
    topk = 1 if num_modules > 1 else min(config.topk, draft.draft_vocab_size - 1)
    num_steps = min(config.num_steps, most_levels)
    if (topk, num_steps) == (config.topk, config.num_steps):
        return config
    sizes = {"topk": topk, "num_steps": num_steps}
    others = {"method": config.method, "verify_strategy": config.verify_strategy}
    nodes = default_nodes(config.num_verify_tokens, **sizes, others=others)
    sizes["num_draft_tokens"] = None if config.num_draft_tokens is None else nodes
    if config.mean_draft_tokens is not None:
        sizes["mean_draft_tokens"] = min(config.mean_draft_tokens, nodes)
    if config.num_model_steps == config.num_steps:
        sizes["num_model_steps"] = None
    return replace(config, **sizes)


def _refuse(rule: str, got: str) -> NoReturn:
    raise ValueError(f"EAGLEInference: {rule}, got {got}")
