"""The tokens that end a text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...runtime.values import is_integer, plain, shown
from .checkpoint import brief, naming, read_folder, read_json
from .protocol import ModelError
from .settings import is_empty, read_value, stated

_logger = logging.getLogger(__name__)


def read_eos_token_ids(folder: str | Path, vocab_size: int | None = None) -> tuple[int, ...]:
    """Returns the end tokens of a model folder; generation_config.json, which chat models use, has precedence.

    vocab_size: How many tokens the model has; ids that cannot come are dropped and logged. None: those that config.json
    says, and nothing is logged.
    """
    folder = read_folder("read_eos_token_ids: folder", folder)
    with naming(folder):
        configs = (read_json(folder / name, is_optional=True) for name in ("config.json", "generation_config.json"))
        own, chat = map(stated, configs)
        own = stated(read_value(own, "text_config", dict)) | own  # of a model of images and text
        told = None if vocab_size is None else brief(str(folder), 250)
        vocab_size = own.get("vocab_size") if vocab_size is None else vocab_size
        return end_tokens((own | chat).get("eos_token_id"), vocab_size if is_integer(vocab_size) else None, told)


def end_tokens(value: Any, vocab_size: int | None, of: str | None) -> tuple[int, ...]:
    """Returns the ids that an `eos_token_id` of a file or of a model names, each once, without those that cannot come:
    a small model often has the end token of its family's vocabulary. If `of` is given, they are logged as those of it.
    """
    listed = value if isinstance(value, dict) else plain(value)
    token_ids = []
    for token in listed if isinstance(listed, list) else [listed]:
        token = int(token) if isinstance(token, float) and token.is_integer() else token  # as some writers have it
        if token is False or is_empty(token):
            continue
        if not is_integer(token):
            raise ModelError(f"eos_token_id must be a token id or a list of them, got {shown(value)}")
        token_ids.append(token)
    token_ids = dict.fromkeys(token_ids)
    strangers = [token for token in token_ids if vocab_size is not None and not 0 <= token < vocab_size]
    if strangers and of is not None:
        rule = f"cannot occur: the model's tokens are 0..{vocab_size - 1}; it ends no text"
        _logger.warning("%s: eos_token_id %s %s", of, shown(strangers), rule)
    return tuple(token for token in token_ids if token not in strangers)
