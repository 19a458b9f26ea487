"""Loading of targets, and of draft heads and next-token modules in any published format (`head_formats.py`). Model
folders have the Hugging Face layout: `config.json` next to the tensors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...runtime.placement import DTYPE_NAMES, read_placement
from ...runtime.values import first_line, shown
from . import head_formats, medusa
from .checkpoint import (
    Checkpoint,
    brief,
    check_memory,
    naming,
    read_config,
    read_folder,
    read_json,
    refuse_names,
    refuse_not_finite,
)
from .decoder import Decoder
from .decoder_config import FAMILIES, OPTIONS_IN_FILE, DecoderConfig, read_model_type
from .draft_head import DraftHead
from .heads import Eagle1Config, Eagle1Head, EagleConfig, EagleHead, NextTokenConfig, NextTokenModules
from .kv_limits import read_kv_limits
from .parallel_head import ParallelEagleConfig, ParallelEagleHead
from .protocol import FINAL_NORM, ModelError, TargetModel
from .quantisation import read_quantisation, without_quantisation
from .quantised_linears import quantise_linears
from .quantising import quantise_at_load, read_quantize
from .settings import is_empty, is_off
from .transformers_target import TransformersTarget

DEMO_PAIR_FOLDER = Path(__file__).resolve().parents[2] / "assets" / "demo_pair"

_MAY_BE_MISSING = "_keys_to_ignore_on_load_missing"  # a model's patterns of names, in transformers

_logger = logging.getLogger(__name__)

_CLASSES = {
    "EAGLE-1": (Eagle1Config, Eagle1Head),
    "EAGLE-3": (EagleConfig, EagleHead),
    "P-EAGLE": (ParallelEagleConfig, ParallelEagleHead),
    "MTP": (NextTokenConfig, NextTokenModules),
}


def load_target(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, *,
    check_weights: bool = True, quantize: str | Mapping[str, str] | None = None,
) -> TargetModel:  # fmt: skip
    """Loads a target, frozen and in eval mode.

    Args:
        folder: A model in Hugging Face layout: a decoder in `decoder_config.FAMILIES`, or another causal language
            model, which is loaded through transformers.
        device: Where its weights go. On "meta", a decoder's weights have names and sizes but are not read; a model
            loaded through transformers goes to the CPU instead.
        dtype: The type that its weights are converted to.
        check_weights: Whether to refuse NaN and infinite weights, by name, in one pass over them on the device.
        quantize: How to quantise its linears, see `EAGLEConfig`; None: they stay as the folder has them.

    Raises:
        ModelError: The folder is incomplete, damaged or not a target (a ValueError in one line).
    """
    folder = read_folder("load_target: folder", folder)
    device, dtype = read_placement("load_target", device, dtype, "meta")
    chosen = read_quantize("load_target: quantize", quantize)
    with naming(folder):
        content, checkpoint, kind = _open(folder)
        if kind in head_formats.HEADS:
            swapped = "are draft and target swapped? EAGLEInference takes the draft first"
            raise ModelError(f"holds {head_formats.KINDS[kind].called}: a draft, not a target; {swapped}")
        if kind is None and head_formats.is_of_other_kind(content):
            raise ModelError(f"is {head_formats.tell_other_kind(content)}, not a causal language model")
        if read_model_type(content) not in FAMILIES:
            device = torch.device("cpu") if device.type == "meta" else device
            if chosen is not None:
                known = f"only {', '.join(FAMILIES)}"
                raise ModelError(f"quantize must be None for a model of transformers ({known}), got {shown(quantize)}")
            return _load_through_transformers(folder, content, checkpoint, device, dtype, check_weights)
        if not is_off(content.get("auto_map")):
            _logger.info("%s: our own decoder reads it, the code that auto_map names is not run", folder)
        # the modules are a draft, see `load_draft`
        checkpoint.rename(lambda name: None if name.startswith(head_formats.MODULE_PREFIX) else name)
        if "embed_tokens.weight" in checkpoint.tensors:  # of a model that was saved without its output
            checkpoint.rename(lambda name: name if name.startswith("lm_head.") else f"model.{name}")
        checkpoint.check_layers(content, "num_hidden_layers", "model.layers.")
        quantisation = quantise_at_load(read_quantisation(folder, content), chosen, isinstance(quantize, str))
        config = DecoderConfig.from_dict(without_quantisation(content))
        checkpoint.check_sizes(config)
        both = ("model.embed_tokens.weight", "lm_head.weight")
        if config.tie_word_embeddings and checkpoint.tensors.keys() >= {*both} and device.type != "meta":
            if not torch.equal(*map(checkpoint.get, both)):  # as transformers 5 reads it
                told = "lm_head.weight is not the embedding, although config.json ties them: it is used"
                _logger.warning("%s: %s", folder, told)
                config = replace(config, tie_word_embeddings=False)
        if config.tie_word_embeddings and chosen is not None and "lm_head" in chosen:
            checkpoint.tensors.setdefault("lm_head.weight", checkpoint.tensors.get("model.embed_tokens.weight"))
            config = replace(config, tie_word_embeddings=False)
        with torch.device("meta"):
            target = Decoder(config)
        if config.tie_word_embeddings:
            # allocates the shared weight once, and reads it once if the checkpoint holds it twice
            target.lm_head.weight = None
            checkpoint.tensors.pop("lm_head.weight", None)
        exported = read_json(folder / "hf_quant_config.json", is_optional=True)
        limits = read_kv_limits(content, exported, checkpoint.tensors, checkpoint.get, target.kv_shape)
        quantise_linears(target, checkpoint.tensors, checkpoint.get, quantisation)
        checkpoint.fill(target, device, dtype, check_weights)
        target.tie_weights()
        target.pack()
        target.quantize, target.kv_limits = chosen, limits
        return target


def _open(folder: Path, of_draft: bool = False) -> tuple[dict[str, Any], Checkpoint, str | None]:
    """Returns config.json, the headers of the tensors, and what the folder holds (`head_formats.kind_of`); refuses what
    cannot draft if it should be `of_draft`."""
    config = read_config(folder)
    head_formats.refuse_other_drafts(config)  # whose tensors may lie in files that are not read
    checkpoint = Checkpoint(folder, head_formats.files_of(config))
    head_formats.rename_modules(config, checkpoint)
    kind = head_formats.kind_of(config, checkpoint.tensors)
    if kind is None and of_draft:
        ways = "drafts are EAGLE, Medusa or Hydra heads, next-token modules, and models with the target's tokens"
        raise ModelError(f"holds {head_formats.tell_other_kind(config)}, which is not a draft: {ways}")
    return config, checkpoint, kind


def read_kind(folder: Path) -> str:
    """Returns what the folder of a draft holds, a key of `head_formats.KINDS`; refuses what cannot draft."""
    with naming(folder):
        return _open(folder, of_draft=True)[2]


def _load_through_transformers(
    folder: Path, config: dict[str, Any], checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
    check_weights: bool,
) -> TransformersTarget:  # fmt: skip
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        advice = "other models need transformers: pip install 'eagle_kernels[transformers]'"
        raise ModelError(f"config.json: model_type is none of {', '.join(FAMILIES)}; {advice}") from None
    checkpoint.check_most_layers(config)
    checkpoint.check_index()
    _check_tensors(folder, config, checkpoint)
    needed = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values()) * dtype.itemsize
    check_memory(needed, device, f"the weights take {{}} as {dtype}")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # unchecked files can raise anything in transformers
        fault = brief(f"{type(error).__name__}: {first_line(error)}", 200)
        if "Unrecognized configuration class" in fault and not is_off(config.get("text_config")):
            fault = f"config.json: text_config of model_type={shown(config.get('model_type'))}: only text models load"
        raise ModelError(f"transformers cannot load the model: {fault}") from None
    refuse_names("missing tensors", sorted(report["missing_keys"]))  # transformers fills these with random numbers
    model = model.to(device)
    if check_weights:
        refuse_not_finite(dict(model.named_parameters()), dtype)
    return TransformersTarget(model)


def _check_tensors(folder: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Refuses a folder that lacks tensors of the model that config.json asks for, or has others of their names.
    transformers would fill these with random numbers first, which takes minutes for a large model. Its own renaming is
    applied; where this version of it has none, or cannot make the model without memory, loading finds the fault."""
    if not is_off(config.get("quantization_config")):
        return  # the tensors are those of the quantised model
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers import logging as log
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        with ExitStack() as afterwards, torch.device("meta"):
            afterwards.callback(log.set_verbosity, log.get_verbosity())
            log.set_verbosity_error()  # loading says the same again
            known = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(known, trust_remote_code=False)
        expected, changes = model.state_dict(), get_model_conversion_mapping(model)
        converters = [change for change in changes if isinstance(change, WeightConverter)]
        renamings = [change for change in changes if not isinstance(change, WeightConverter)]
        found = {
            name: rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
            for name in checkpoint.tensors
        }
        optional = "|".join(map("({})".format, getattr(model, _MAY_BE_MISSING, None) or ["$^"]))
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    except Exception:
        return
    missing = expected.keys() - {name for name, _ in found.values()} - found.keys() - tied
    joined = [part.strip("^$") for each in converters for part in each.target_patterns]  # of several names each
    missing = sorted(
        name for name in missing if not (re.search(optional, name) or any(part in name for part in joined))
    )
    advice = f", which a model of model_type={shown(config.get('model_type'))} has"
    refuse_names("missing tensors", missing, advice)
    for name, (theirs, converter) in found.items():
        shape = checkpoint.tensors[name].shape
        if converter is None and theirs in expected and shape != list(expected[theirs].shape):
            shapes = f"shape {shown(shape)}, but config.json says {list(expected[theirs].shape)}"
            raise ModelError(f"tensor {brief(name)} has {shapes}{advice}")


class HeadFile(NamedTuple):
    """Holds a head from its folder, not yet bound to a target."""

    head: DraftHead | medusa.MedusaHeads  # frozen, in eval mode
    format_name: str  # the name of the published format
    kind: str  # `EAGLE-1` (which EAGLE-2 shares), `EAGLE-3`, `MTP` or `Medusa`
    dtypes: list[str]  # types of the floating-point tensors in the file, in the words of safetensors, such as BF16
    written_aux: head_formats.AuxLayers  # the auxiliary layer ids that config.json has
    remarks: list[str]  # see `head_formats.remarks_on`


def load_draft(
    folder: str | Path, target: TargetModel, device: str | torch.device | None = None, dtype: torch.dtype | None = None,
    *, aux_layers: Sequence[int] | None = None, check_weights: bool = True,
    quantize: str | Mapping[str, str] | None = None,
) -> DraftHead:  # fmt: skip
    """Loads a draft head, frozen, in eval mode and bound to its target.

    Logs one line that names the format and the auxiliary layers as written and as read.

    Args:
        folder: An EAGLE head, or a target's own folder with next-token modules.
        target: The target, whose embedding or lm_head the head uses if it has none of its own.
        device, dtype: Where its weights go, and their type; None: the target's.
        aux_layers: The hidden_states indices to read instead of those in config.json.
        check_weights, quantize: As for `load_target`.

    Raises:
        ModelError: The folder is incomplete, damaged or not a head, or the head does not fit the target.
    """
    file = _read_for(target, folder, device, dtype, "load_draft", check_weights=check_weights, quantize=quantize)
    head, (ids, meaning, _) = file.head, file.written_aux
    source = "default aux layers" if ids is None else f"aux layers {list(ids)} ({meaning})"
    if head.config.aux_layers == (FINAL_NORM,):
        source = "the target's last feature"
    with naming(Path(folder)):
        if isinstance(head, medusa.MedusaHeads):
            raise ModelError("holds Medusa heads, which load_medusa loads")
        if aux_layers is not None:
            head.use_aux_layers(aux_layers)
            source = "aux layers given by the caller"
        head.bind(target)
    name = brief(str(Path(folder)), 250)
    _logger.info("%s: %s format, %s, %s = %s", name, file.format_name, file.kind, source, tell_capture(head.aux_layers))
    for remark in file.remarks:
        _logger.warning("%s: %s", name, remark)
    return head


def load_medusa(
    folder: str | Path, target: TargetModel, device: str | torch.device | None = None, dtype: torch.dtype | None = None,
    *, check_weights: bool = True,
) -> medusa.MedusaHeads:  # fmt: skip
    """Loads the Medusa heads of a folder, frozen, in eval mode and bound to their target; as `load_draft`."""
    file = _read_for(target, folder, device, dtype, "load_medusa", check_weights=check_weights)
    heads, name = file.head, brief(str(folder), 250)
    with naming(Path(folder)):
        if not isinstance(heads, medusa.MedusaHeads):
            raise ModelError(f"holds {head_formats.KINDS[file.kind].called}, which load_draft loads")
        heads.bind(target)
    _logger.info("%s: %s format, %d Medusa heads", name, file.format_name, heads.block_length)
    for remark in file.remarks:
        _logger.warning("%s: %s", name, remark)
    return heads


def _read_for(
    target: TargetModel, folder: str | Path, device: str | torch.device | None, dtype: torch.dtype | None, caller: str,
    *, check_weights: bool, quantize: str | Mapping[str, str] | None = None,
) -> HeadFile:  # fmt: skip
    """Reads the head of a folder as its target needs it."""
    folder = read_folder(f"{caller}: folder", folder)
    if not hasattr(target, "kv_shape"):
        raise ValueError(f"{caller}: target must be a TargetModel, as load_target returns, got {shown(target)}")
    device, dtype = target.device if device is None else device, target.dtype if dtype is None else dtype
    return read_head(folder, device, dtype, check_weights=check_weights, quantize=quantize)


def tell_capture(aux_layers: Sequence[int]) -> str:
    """Describes the streams that `capture` names."""
    is_last = tuple(aux_layers) == (FINAL_NORM,)
    return "the stream after the final norm" if is_last else f"hidden_states {list(aux_layers)}"


def read_head(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, *,
    check_weights: bool = True, quantize: str | Mapping[str, str] | None = None,
) -> HeadFile:  # fmt: skip
    """Loads the head of a folder, with its floating-point tensors converted to `dtype`."""
    folder = read_folder("load_draft: folder", folder)
    device, dtype = read_placement("load_draft", device, dtype)
    chosen = read_quantize("load_draft: quantize", quantize)
    with naming(folder):
        config, checkpoint, kind = _open(folder, of_draft=True)
        if kind == "language model":
            modules = f"num_nextn_predict_layers is set, but no tensor is named {head_formats.MODULE_NAMES}"
            fault = "" if is_off(config.get("num_nextn_predict_layers")) else f" ({modules})"
            way = "EAGLEInference.from_pretrained(draft, target) drafts with it"
            raise ModelError(f"holds a language model, not a draft head{fault}; {way}")
        if kind == "Medusa":
            dtypes = sorted({stored.dtype for stored in checkpoint.tensors.values() if stored.is_floating_point})
            heads, remarks = medusa.read_medusa(config, checkpoint, device, dtype, check_weights)
            return HeadFile(
                heads, medusa.name_layout(config), kind, dtypes, head_formats.AuxLayers(None, "", ()), remarks
            )
        if kind in ("Hydra", "DFlash"):
            raise ModelError(f"holds {head_formats.KINDS[kind].called}, which load_{kind.lower()} loads")
        form = head_formats.recognise(config)
        if kind == "MTP":  # config.json is the target's
            form = head_formats.form_of_modules(stored.name for stored in checkpoint.tensors.values())
            checkpoint.check_layers(config, "num_hidden_layers", "model.layers.")
        checkpoint.rename(partial(head_formats.our_name, form, kind))
        tensors = checkpoint.tensors
        for name in ("d2t", "t2d"):
            if name in tensors and 0 in tensors[name].shape:
                del tensors[name]  # an empty mapping says nothing
        checkpoint.check_layers(config, "num_nextn_predict_layers", "mtp_layers.")
        dtypes = sorted({stored.dtype for stored in tensors.values() if stored.is_floating_point})
        # The names of the tensors tell options that config.json leaves out.
        seen = {setting: any(name.endswith(end) for name in tensors) for setting, end in OPTIONS_IN_FILE.items()}
        if kind == "EAGLE-1" and is_empty(config.get("bias")) and is_empty(config.get("fusion_bias")):
            seen["fc_bias"] = "fc.bias" in tensors
        if kind == "MTP":
            seen["embedding_first"] = form is not head_formats.NEXT_TOKEN_MODULES
            seen["counts_from_first"] = form is head_formats.ERNIE_MODULES
        config_class, head_class = _CLASSES[kind]
        told = {name: value for name, value in seen.items() if is_empty(config.get(name))}
        quantisation = quantise_at_load(read_quantisation(folder, config), chosen, isinstance(quantize, str))
        settings = config_class.from_dict(without_quantisation(config) | told)
        if settings.aux_layers == (FINAL_NORM,) and kind in ("EAGLE-3", "P-EAGLE"):
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
        has_output = any(name.startswith("lm_head.") for name in tensors)
        own = {"own_embedding": "embed_tokens.weight" in tensors, "own_output": has_output}
        own |= {"mask_shape": tensors["mask_hidden"].shape} if kind == "P-EAGLE" and "mask_hidden" in tensors else {}
        with torch.device("meta"):
            head = head_class(settings, **own)
        if "t2d" not in tensors:
            head.t2d = None  # `bind` derives it from d2t
        quantise_linears(head, tensors, checkpoint.get, quantisation)
        checkpoint.fill(head, device, dtype, check_weights)
        head.quantize = chosen
        written, remarks = head_formats.written_aux_layers(config), head_formats.remarks_on(form, kind, config)
        return HeadFile(head, form.name, kind, dtypes, written, remarks)


def demo_pair() -> tuple[Path, Path]:
    """Returns the folders (target, draft) of the small pair in the package, which reads and writes bytes."""
    target, draft = DEMO_PAIR_FOLDER / "target", DEMO_PAIR_FOLDER / "draft"
    if not (target.is_dir() and draft.is_dir()):
        command = f"python -m bench.lab.train_demo_pair --output {DEMO_PAIR_FOLDER}"
        raise ModelError(f"{DEMO_PAIR_FOLDER} is missing; in a checkout, make it with: {command}")
    return target, draft


def read_dtype(folder: str | Path) -> str:
    """Returns the name of the weights' dtype in a model folder's config.json."""
    with naming(Path(folder)):
        config = read_config(Path(folder))
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype not in map(str, DTYPE_NAMES):
            rule = f"name one of {', '.join(DTYPE_NAMES)} for dtype='auto'"
            raise ModelError(f"config.json: dtype must {rule}, got {shown(dtype)}")
    return dtype
