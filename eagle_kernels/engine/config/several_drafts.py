"""A folder with several drafts for one target, of which `adaptive="auto"` takes the fastest: each decodes the same
prompts once, with the configuration's own tree. Texts do not depend on the choice."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...runtime.placement import read_placement
from ...runtime.values import is_integer, shown
from ..models.checkpoint import brief, read_folder
from ..models.protocol import ModelError
from .eagle_config import EAGLEConfig

_logger = logging.getLogger(__name__)

# of the texts that are timed; most prompts, and most of their tokens
_NEW_TOKENS, _MOST_PROMPTS, _MOST_PROMPT_TOKENS = 64, 8, 512


def folders_of_drafts(folder: Any, config: EAGLEConfig, device: Any) -> list[Path]:
    """Returns the folders of drafts in a folder that is none itself, by name; [] for any other folder.

    Raises ModelError where it holds several and the configuration does not choose.
    """
    if folder is None:
        return []
    folder = read_folder("EAGLEInference.from_pretrained: draft_model", folder)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return []
    found = sorted(each.parent for each in folder.glob("*/config.json"))
    if len(found) < 2:  # one folder inside has a line of its own, see `checkpoint`
        return []
    place, _ = read_placement("EAGLEInference.from_pretrained", device, None)
    if config.on(place).adaptive != "auto":
        names = ", ".join(brief(each.name, 40) for each in found)
        rule = f"holds several drafts ({names}): name one of them, or adaptive='auto' takes the fastest"
        raise ModelError(f"{brief(str(folder), 250)}: {rule}")
    return found


def fastest(
    folders: Sequence[Path], load: Callable[[Path], Any], engine_of: Callable[[Any], Any], target: Any,
    config: EAGLEConfig,
) -> Any:  # fmt: skip
    """Returns the draft with the most tokens a second.

    load: loads the draft of a folder. engine_of: makes an engine with it. Those that do not fit the target or the
    configuration are left out, with a warning; if none does, the first one's error is raised.
    """
    prompts, speeds, errors = _prompts(folders[0].parent, target, config), {}, []
    for folder in folders:
        try:
            draft = load(folder)
            engine = engine_of(draft)
        except ValueError as error:
            _logger.warning("%s is left out: %s", brief(folder.name), error)
            errors.append(error)
            continue
        options = {"progress": False, "adaptive": None, "temperature": 0.0}
        for _ in range(2):  # the first time compiles and captures
            stats = engine.generate(prompts, _NEW_TOKENS, **options).stats
        speeds[folder.name] = (stats.generated_tokens / max(stats.decode_time_s, 1e-9), draft)
        del engine, draft
        gc.collect()  # its pools are as large as free memory allows
    if not speeds:
        raise errors[0]
    best = max(speeds, key=lambda name: speeds[name][0])
    told = ", ".join(f"{name} {speed:.0f}" for name, (speed, _) in speeds.items())
    _logger.info("%s: drafts with %s; tokens a second: %s", brief(str(folders[0].parent), 250), best, told)
    return speeds[best][1]


def _prompts(folder: Path, target: Any, config: EAGLEConfig) -> list[list[int]]:
    """Returns those of prompts.json, lists of token ids; without it one of a few tokens drawn at random."""
    path, most = folder / "prompts.json", min(target.max_length, config.max_length or target.max_length) - _NEW_TOKENS
    if most < 1:
        rule = f"be above {_NEW_TOKENS} to choose among several drafts, which write as many tokens"
        raise ValueError(f"EAGLEInference: max_length must {rule}, got {most + _NEW_TOKENS}")
    if not path.is_file():
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(target.vocab_size, (min(8, most),), generator=generator, device="cpu").tolist()]
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        prompts = None
    is_list = isinstance(prompts, list) and len(prompts) > 0
    for prompt in prompts if is_list else [None]:
        is_prompt = isinstance(prompt, list) and len(prompt) > 0
        if not (is_prompt and all(is_integer(token) and 0 <= token < target.vocab_size for token in prompt)):
            rule = "must be a list of prompts, each a list of the target's token ids"
            raise ModelError(f"{brief(str(path), 250)} {rule}, got {shown(prompt if is_list else prompts)}")
    return [prompt[-min(most, _MOST_PROMPT_TOKENS) :] for prompt in prompts[: min(_MOST_PROMPTS, config.max_batch)]]
