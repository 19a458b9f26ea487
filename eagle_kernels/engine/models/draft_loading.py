"""Loading of EAGLE heads and next-token modules from their folders, in any published format (`head_formats.py`)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.placement import read_placement
from . import head_formats
from .checkpoint import Checkpoint, StoredTensor, check_layers, check_sizes, fill, naming, read_config
from .draft_head import OPTIONS_IN_FILE, DraftHead, HeadConfig
from .eagle_head import Eagle1Config, Eagle1Head, EagleConfig, EagleHead
from .next_token_modules import NextTokenConfig, NextTokenModules
from .protocol import FINAL_NORM, ModelError, TargetModel

_logger = logging.getLogger(__name__)

_CLASSES = {
    "EAGLE-1": (Eagle1Config, Eagle1Head),
    "EAGLE-3": (EagleConfig, EagleHead),
    "MTP": (NextTokenConfig, NextTokenModules),
}


class HeadFile(NamedTuple):
    """A head from its folder, not yet bound to a target.

    head          frozen, in eval mode
    format_name   the name of the published format
    kind          `EAGLE-1` (which EAGLE-2 shares), `EAGLE-3` or `MTP`
    dtypes        the types of its floating-point tensors in the file, in the words of safetensors, such as BF16
    written_aux   the auxiliary layer ids that config.json has
    remarks       see `head_formats.remarks_on`
    """

    head: DraftHead
    format_name: str
    kind: str
    dtypes: list[str]
    written_aux: head_formats.AuxLayers
    remarks: list[str]


def load_draft(
    folder: str | Path,
    target: TargetModel,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    aux_layers: Sequence[int] | None = None,
    check_weights: bool = True,
) -> DraftHead:
    """Loads an EAGLE head, or the next-token modules in a target's own folder; frozen, in eval mode and bound to
    `target`, whose embedding or lm_head it uses if it has none.

    device, dtype  where its weights go, and their type; None: the target's
    aux_layers     hidden_states indices to read instead of those that config.json names
    check_weights  see `load_target`
    One line of logging names the format and the auxiliary layers as written and as read.
    """
    folder = Path(folder)
    device, dtype = target.device if device is None else device, target.dtype if dtype is None else dtype
    file = read_head(folder, device, dtype, check_weights=check_weights)
    head = file.head
    with naming(folder):
        if aux_layers is not None:
            head.use_aux_layers(aux_layers)
        head.bind(target)
    written = _tell_aux_layers(file) if aux_layers is None else "aux layers given by the caller"
    told = (file.format_name, file.kind, written, tell_capture(head.aux_layers))
    _logger.info("%s: %s format, %s, %s = %s", folder, *told)
    for remark in file.remarks:
        _logger.warning("%s: %s", folder, remark)
    return head


def _tell_aux_layers(file: HeadFile) -> str:
    """Describes the auxiliary layers as config.json names them."""
    if file.head.config.aux_layers == (FINAL_NORM,):
        return "the target's last feature"
    if file.written_aux.written is None:
        return "default aux layers"
    return f"aux layers {list(file.written_aux.written)} ({file.written_aux.meaning})"


def tell_capture(aux_layers: Sequence[int]) -> str:
    """Describes the streams that `capture` names."""
    if tuple(aux_layers) == (FINAL_NORM,):
        return "the stream after the final norm"
    return f"hidden_states {list(aux_layers)}"


def read_head(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    check_weights: bool = True,
) -> HeadFile:
    """Loads the head of a folder, with its floating-point tensors converted to `dtype`."""
    folder, (device, dtype) = Path(folder), read_placement("load_draft", device, dtype)
    with naming(folder):
        config = read_config(folder)
        checkpoint = Checkpoint(folder)
        kind = head_formats.kind_of(config, checkpoint.tensors)
        form = head_formats.NEXT_TOKEN_MODULES if kind == "MTP" else head_formats.recognise(config)
        tensors = _renamed(form, kind, checkpoint.tensors)
        if kind == "MTP":  # config.json is the target's
            check_layers(config, "num_hidden_layers", checkpoint.tensors, "model.layers.")
            check_layers(config, "num_nextn_predict_layers", tensors, "mtp_layers.")
        checkpoint.tensors = tensors
        dtypes = sorted({stored.dtype for stored in tensors.values() if stored.is_floating_point})
        settings = _settings(config, kind, tensors)
        if settings.aux_layers == (FINAL_NORM,) and kind == "EAGLE-3":
            tensors.pop("fc.weight", None)  # SGLang's class always has one, even if it does not use it
        check_sizes(settings, settings.stored_sizes, tensors)
        if settings.draft_vocab_size == settings.vocab_size:
            # A head over the whole vocabulary has no mapping; some trainers write the identity.
            if "d2t" in tensors:
                _check_identity(checkpoint.get("d2t"))
                del tensors["d2t"]
            tensors.pop("t2d", None)
        if settings.tie_word_embeddings and "embed_tokens.weight" in tensors:
            tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
        own = {"own_embedding": "embed_tokens.weight" in tensors, "own_output": "lm_head.weight" in tensors}
        with torch.device("meta"):
            head = _CLASSES[kind][1](settings, **own)
        if "t2d" not in tensors:
            head.t2d = None  # `bind` derives it from d2t
        fill(head, checkpoint, device, dtype, check_weights)
        written, remarks = head_formats.written_aux_layers(config), head_formats.remarks_on(form, kind, config)
        return HeadFile(head, form.name, kind, dtypes, written, remarks)


def _settings(config: dict[str, Any], kind: str, names: Collection[str]) -> HeadConfig:
    """Reads config.json; heads may leave out some options, which the names of their tensors then tell."""
    seen = {}
    if kind != "MTP":
        seen = {setting: any(name.endswith(end) for name in names) for setting, end in OPTIONS_IN_FILE.items()}
    if kind == "EAGLE-1" and config.get("bias") is None and config.get("fusion_bias") is None:
        seen["fc_bias"] = "fc.bias" in names
    return _CLASSES[kind][0].from_dict(seen | config)


def _renamed(form: head_formats.HeadFormat, kind: str, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    renamed: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        if kind == "MTP" and not name.startswith(head_formats.MODULE_PREFIX):
            continue  # it is the target's
        ours = head_formats.rename(form, kind, name)
        if ours in renamed:
            raise ModelError(f"tensor {name}: another one is {ours} already")
        renamed[ours] = stored
    return renamed


def _check_identity(d2t: Tensor) -> None:
    """Refuses offsets other than 0 in a head that drafts every token of the target."""
    moved = d2t.flatten().nonzero().flatten()
    if len(moved):
        first = int(moved[0])
        raise ModelError(
            f"tensor d2t must be 0 throughout where the draft's vocabulary is the target's, got {d2t.flatten()[first]} "
            f"for draft id {first}"
        )
