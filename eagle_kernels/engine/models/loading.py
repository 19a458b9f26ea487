"""Loading of targets, and of EAGLE heads and next-token modules in any published format (`head_formats.py`).

Model folders have the Hugging Face layout: `config.json` next to the tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...runtime.placement import read_placement
from ...runtime.values import first_line, is_integer
from . import head_formats
from .checkpoint import Checkpoint, check_memory, naming, read_config, read_json, refuse_names, refuse_not_finite
from .decoder import Decoder
from .decoder_config import FAMILIES, DecoderConfig, read_model_type
from .draft_head import OPTIONS_IN_FILE, DraftHead
from .eagle_head import Eagle1Config, Eagle1Head, EagleConfig, EagleHead
from .next_token_modules import NextTokenConfig, NextTokenModules
from .protocol import FINAL_NORM, ModelError, TargetModel
from .transformers_target import TransformersTarget

DEMO_PAIR_FOLDER = Path(__file__).resolve().parents[2] / "assets" / "demo_pair"

_logger = logging.getLogger(__name__)

_CLASSES = {
    "EAGLE-1": (Eagle1Config, Eagle1Head),
    "EAGLE-3": (EagleConfig, EagleHead),
    "MTP": (NextTokenConfig, NextTokenModules),
}


def load_target(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    check_weights: bool = True,
) -> TargetModel:
    """Loads a target, frozen and in eval mode.

    Args:
        folder: A model in Hugging Face layout: a decoder of one of `decoder_config.FAMILIES`, or another causal
            language model, which is loaded through transformers (`transformers_target.py`).
        device: Where its weights go. On "meta" a decoder has names and sizes, and its weights are not read; a model of
            transformers goes onto the CPU instead.
        dtype: The type that its weights are converted to.
        check_weights: Whether NaN and infinite weights are refused by name, by one pass over them on the device.

    Raises:
        ModelError: The folder is incomplete, damaged or no target (a ValueError in one line).
    """
    folder, (device, dtype) = Path(folder), read_placement("load_target", device, dtype, "meta")
    with naming(folder):
        content = read_config(folder)
        if read_model_type(content) not in FAMILIES:
            device = torch.device("cpu") if device.type == "meta" else device
            return _load_through_transformers(folder, content, device, dtype, check_weights)
        checkpoint = Checkpoint(folder)
        for name in [name for name in checkpoint.tensors if name.startswith(head_formats.MODULE_PREFIX)]:
            del checkpoint.tensors[name]  # they are a draft, see `load_draft`
        if "fc.weight" in checkpoint.tensors and "model.embed_tokens.weight" not in checkpoint.tensors:
            raise ModelError("is an EAGLE head (fc.weight, no model.embed_tokens.weight): a draft, not a target")
        checkpoint.check_layers(content, "num_hidden_layers", "model.layers.")
        config = DecoderConfig.from_dict(content)
        checkpoint.check_sizes(config)
        with torch.device("meta"):
            target = Decoder(config)
        if config.tie_word_embeddings:
            # allocates the shared weight once, and reads it once if the checkpoint holds it twice
            target.lm_head.weight = None
            checkpoint.tensors.pop("lm_head.weight", None)
        checkpoint.fill(target, device, dtype, check_weights)
        target.tie_weights()
        return target


def _load_through_transformers(
    folder: Path, config: dict[str, Any], device: torch.device, dtype: torch.dtype, check_weights: bool
) -> TransformersTarget:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        advice = "other models need transformers: pip install 'eagle_kernels[transformers]'"
        raise ModelError(f"config.json: model_type is none of {', '.join(FAMILIES)}; {advice}") from None
    checkpoint = Checkpoint(folder)
    checkpoint.check_most_layers(config)
    needed = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values()) * dtype.itemsize
    check_memory(needed, device, f"the weights take {{}} as {dtype}")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # unchecked files can raise anything in transformers
        raise ModelError(f"transformers cannot load the model: {type(error).__name__}: {first_line(error)}") from None
    refuse_names("missing tensors", sorted(report["missing_keys"]))  # transformers fills these with random numbers
    model = model.to(device)
    if check_weights:
        refuse_not_finite(dict(model.named_parameters()), dtype)
    return TransformersTarget(model)


class HeadFile(NamedTuple):
    """Holds a head from its folder, not yet bound to a target."""

    head: DraftHead  # frozen, in eval mode
    format_name: str  # the name of the published format
    kind: str  # `EAGLE-1` (which EAGLE-2 shares), `EAGLE-3` or `MTP`
    dtypes: list[str]  # types of the floating-point tensors in the file, in the words of safetensors, such as BF16
    written_aux: head_formats.AuxLayers  # the auxiliary layer ids that config.json has
    remarks: list[str]  # see `head_formats.remarks_on`


def load_draft(
    folder: str | Path,
    target: TargetModel,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    aux_layers: Sequence[int] | None = None,
    check_weights: bool = True,
) -> DraftHead:
    """Loads a draft head, frozen, in eval mode and bound to its target.

    Logs one line that names the format and the auxiliary layers as written and as read.

    Args:
        folder: An EAGLE head, or a target's own folder with next-token modules.
        target: The target, whose embedding or lm_head the head uses if it has none.
        device, dtype: Where its weights go, and their type; None: the target's.
        aux_layers: The hidden_states indices to read instead of those that config.json names.
        check_weights: As for `load_target`.

    Raises:
        ModelError: The folder is incomplete, damaged or no head, or does not fit the target.
    """
    folder = Path(folder)
    device, dtype = target.device if device is None else device, target.dtype if dtype is None else dtype
    file = read_head(folder, device, dtype, check_weights=check_weights)
    head, (ids, meaning, _) = file.head, file.written_aux
    source = "default aux layers" if ids is None else f"aux layers {list(ids)} ({meaning})"
    if head.config.aux_layers == (FINAL_NORM,):
        source = "the target's last feature"
    with naming(folder):
        if aux_layers is not None:
            head.use_aux_layers(aux_layers)
            source = "aux layers given by the caller"
        head.bind(target)
    told = (file.format_name, file.kind, source, tell_capture(head.aux_layers))
    _logger.info("%s: %s format, %s, %s = %s", folder, *told)
    for remark in file.remarks:
        _logger.warning("%s: %s", folder, remark)
    return head


def tell_capture(aux_layers: Sequence[int]) -> str:
    """Describes the streams that `capture` names."""
    is_last = tuple(aux_layers) == (FINAL_NORM,)
    return "the stream after the final norm" if is_last else f"hidden_states {list(aux_layers)}"


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
        if kind == "MTP":  # config.json is the target's
            checkpoint.check_layers(config, "num_hidden_layers", "model.layers.")
        checkpoint.tensors = tensors = head_formats.rename(form, kind, checkpoint.tensors)
        checkpoint.check_layers(config, "num_nextn_predict_layers", "mtp_layers.")
        dtypes = sorted({stored.dtype for stored in tensors.values() if stored.is_floating_point})
        # The names of the tensors tell options that config.json leaves out.
        seen = {setting: any(name.endswith(end) for name in tensors) for setting, end in OPTIONS_IN_FILE.items()}
        if kind == "EAGLE-1" and config.get("bias") is None and config.get("fusion_bias") is None:
            seen["fc_bias"] = "fc.bias" in tensors
        config_class, head_class = _CLASSES[kind]
        settings = config_class.from_dict(seen | config)
        if settings.aux_layers == (FINAL_NORM,) and kind == "EAGLE-3":
            tensors.pop("fc.weight", None)  # SGLang's class always has one, even if it does not use it
        checkpoint.check_sizes(settings)
        if settings.draft_vocab_size == settings.vocab_size:
            # A head over the whole vocabulary has no mapping; some trainers write the identity.
            offsets = checkpoint.get("d2t").flatten().tolist() if "d2t" in tensors else []
            for draft_id, offset in enumerate(offsets):
                if offset != 0:
                    rule = "must be 0 everywhere where the draft has the target's vocabulary"
                    raise ModelError(f"tensor d2t {rule}, got {offset} for draft id {draft_id}")
            tensors.pop("d2t", None)
            tensors.pop("t2d", None)
        if settings.tie_word_embeddings and "embed_tokens.weight" in tensors:
            tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
        own = {"own_embedding": "embed_tokens.weight" in tensors, "own_output": "lm_head.weight" in tensors}
        with torch.device("meta"):
            head = head_class(settings, **own)
        if "t2d" not in tensors:
            head.t2d = None  # `bind` derives it from d2t
        checkpoint.fill(head, device, dtype, check_weights)
        written, remarks = head_formats.written_aux_layers(config), head_formats.remarks_on(form, kind, config)
        return HeadFile(head, form.name, kind, dtypes, written, remarks)


def demo_pair() -> tuple[Path, Path]:
    """Returns the folders (target, draft) of the small pair in the package, which reads and writes bytes."""
    target, draft = DEMO_PAIR_FOLDER / "target", DEMO_PAIR_FOLDER / "draft"
    if not (target.is_dir() and draft.is_dir()):
        command = f"python -m eagle_kernels.tools.training.demo_pair --output {DEMO_PAIR_FOLDER}"
        raise ModelError(f"{DEMO_PAIR_FOLDER} is missing; make it with: {command}")
    return target, draft


def read_eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Returns the end tokens of a model folder; generation_config.json, which chat models use, has precedence."""
    folder = Path(folder)
    with naming(folder):
        config = read_json(folder / "config.json", is_optional=True)
        eos = (config | read_json(folder / "generation_config.json", is_optional=True)).get("eos_token_id")
        token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(map(is_integer, token_ids)):
            raise ModelError(f"eos_token_id must be a token id or a list of them, got {eos!r}")
    return tuple(token_ids)
