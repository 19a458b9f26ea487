"""Reads the configuration and the models that callers give, and checks that they belong together, in one line."""

import logging
import operator
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ...runtime.placement import DTYPES, is_same_device, read_placement, rounds_fp32_matmuls
from ...runtime.values import is_integer, is_word, read_flag, scalar, shown
from ..models.causal_draft import CausalDraft
from ..models.checkpoint import brief, naming, read_folder, read_json
from ..models.dflash import load_dflash
from ..models.end_tokens import end_tokens, read_eos_token_ids
from ..models.head_formats import KINDS, MODULE_NAMES, read_mask_token
from ..models.hydra import load_hydra
from ..models.loading import load_draft, load_medusa, load_target, read_dtype, read_kind
from ..models.protocol import FINAL_NORM, DraftModel, KVShape, ModelError, TargetModel, sizes_of
from ..models.quantisation import is_quantised
from ..models.quantising import read_quantize
from ..models.tokenizer import check_same_vocabulary
from ..models.transformers_target import TransformersTarget
from ..requests.names import own_name
from .drafting_options import MODEL_KINDS
from .eagle_config import CONFIG_FIELDS, EAGLEConfig
from .several_drafts import check_choice
from .speculative_config import FIELDS, take_model

_logger = logging.getLogger(__name__)

# models of another library, or what is no model at all, lack some of these
_DRAFT_MEMBERS = ("forward", "max_length", "kv_shape")
_ABSENT = object()
_ORDER = "the order is EAGLEInference(draft_model, target_model)"
_TARGET_MEMBERS = (*_DRAFT_MEMBERS, "vocab_size", "hidden_size", "device", "dtype")


def _is_size(value: Any) -> bool:
    return is_integer(scalar(value)) and 0 < value < 2**63


_SIZE = "an int of at least 1", _is_size
_NO_KEYS = KVShape(0, 1, 1)
# what models say of themselves (`protocol`): what it must be, in words, and whether it is that
_ATTRIBUTES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "draft_vocab_size", "max_length"), _SIZE),
    **dict.fromkeys(("num_modules", "block_length", "max_levels"), _SIZE),
    "kv_shape": ("a KVShape(num_layers, num_kv_heads, head_dim) of ints of at least 1; without keys, (0, 1, 1)",
                 lambda shape: is_word(shape, _NO_KEYS)
                 or all(map(_is_size, sizes_of(shape)))),
    "device": ("a torch.device", lambda device: isinstance(device, torch.device)),
    "dtype": (f"one of {', '.join(map(str, DTYPES))}", lambda kind: isinstance(kind, torch.dtype) and kind in DTYPES),
    "token_shift": ("0 or 1", lambda shift: is_word(shift, 0) or is_word(shift, 1)),
    "aux_layers": ("a tuple of ints, the target's streams",
                   lambda layers: isinstance(layers, (tuple, list)) and all(map(is_integer, layers))),
    "draft_to_target": (
        "None or offsets [draft_vocab_size] of torch.int64",
        lambda ids: ids is None or isinstance(ids, torch.Tensor) and (ids.dim(), ids.dtype) == (1, torch.int64),
    ),
    # what is no name may be a function of the model's own
    "method": (f"None or one of {list(MODEL_KINDS)}",
               lambda method: not isinstance(method, str) or method in MODEL_KINDS),
}  # fmt: skip
# those that a draft has before it is bound
_UNBOUND = ("device", "dtype", "token_shift", "method")


def as_target(model: Any, config: EAGLEConfig) -> tuple[TargetModel, EAGLEConfig]:
    """Returns `model` as a target, and the configuration; raises ValueError if it cannot be one.
    A model of transformers is wrapped; it ends texts as its own `generate` does, unless the configuration says how."""
    if getattr(model, "token_shift", 0) or getattr(model, "method", None) in MODEL_KINDS:
        got = f"{type(model).__name__}, which is a draft; {_ORDER}"
        _refuse("target_model must be the model whose text is wanted", got)
    target = _of_transformers(model)
    _check_members("target_model", "a TargetModel or a model of transformers", target, _TARGET_MEMBERS)
    _check_attributes("target_model", target, _TARGET_MEMBERS[1:])
    ends = None if target is model else getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is not None and config.eos_token_ids is None:
        config = replace(config, eos_token_ids=end_tokens(ends, target.vocab_size, type(model).__name__))
    return target, config


class DraftFolder(NamedTuple):
    """Names the folder of a draft, and tells what it holds."""

    folder: Path
    method: str  # one of `MODEL_KINDS`
    shares_tokens: bool  # whether it is a language model with the target's tokenizer, as far as its files tell


def read_pair(draft_folder: Any, config: Any) -> tuple[Any, EAGLEConfig]:
    """Returns the folders of drafts and the configuration, as callers give them; a server's may name a draft."""
    if isinstance(config, Mapping) and is_of_server(config):
        config, draft_folder = take_model(config, draft_folder)
    return draft_folder, read_config(config)


def load_pair(
    draft_folder: str | Path | None, target_folder: str | Path, config: Any,
    device: str | torch.device | None, dtype: torch.dtype | str | None, check_weights: bool,
    several: Mapping[str, Path],
) -> tuple[list[DraftModel], TargetModel, EAGLEConfig]:  # fmt: skip
    """Loads the models of two folders; the configuration gets the target's end tokens where it names none.
    draft_folder, config: Those of `read_pair`. several: folders of drafts in place of it, by name."""
    read_flag("EAGLEInference.from_pretrained: check_weights", check_weights)
    chosen = [_choose_draft(target_folder, folder, config) for folder in several.values() or [draft_folder]]
    chosen = [each for each in chosen if each is not None]
    dtype = read_dtype(target_folder) if is_word(dtype, "auto") else dtype
    place = read_placement("EAGLEInference.from_pretrained", device, dtype)
    if dtype is None:
        folders = [Path(target_folder), *(each.folder for each in chosen)]
        place = place[0], _choose_dtype(place[0], config, folders)
    check_choice(config.on(place[0]), list(several))
    if not chosen and config.draft_quantize is not None:
        _refuse(
            f"draft_quantize must be None for method={config.method!r}, which loads no draft", config.draft_quantize
        )
    target = load_target(target_folder, *place, check_weights=check_weights, quantize=_parts_of(config.quantize))
    if config.eos_token_ids is None:
        config = replace(config, eos_token_ids=read_eos_token_ids(target_folder, target.vocab_size))
    return [_load_draft_of(target, each, config, check_weights) for each in chosen], target, config


def _choose_dtype(device: torch.device, config: EAGLEConfig, folders: list[Path]) -> torch.dtype:
    """Returns the dtype where the caller names none: float32, unless what is in fewer bits needs one of 16."""
    needs_half = config.kv_cache_dtype != "auto"
    if device.type != "cpu":
        needs_half |= any((config.quantize, config.draft_quantize, *map(is_quantised, folders)))
    return torch.bfloat16 if needs_half else torch.float32


def _parts_of(quantize: Any) -> str | dict[str, str] | None:
    return dict(quantize) if isinstance(quantize, tuple) else quantize


def _choose_draft(target_folder: str | Path, folder: str | Path | None, config: EAGLEConfig) -> DraftFolder | None:
    """Returns the draft of two folders, before anything large is read; None for methods without a model.
    What the folder holds decides how it drafts. The target's own holds the modules of method="mtp"; ValueError and
    ModelError say where there is no draft, or one of another method."""
    caller = "EAGLEInference.from_pretrained"
    target_folder = read_folder(f"{caller}: target_model", target_folder)
    wanted = [method for method in config.methods if method in MODEL_KINDS]
    if folder is None and "mtp" not in wanted:
        if config.needs_model:
            own = ", 'mtp' reads the target's own modules" if read_kind(target_folder) == "MTP" else ""
            ways = f"of an EAGLE head or a smaller language model ('ngram' and 'suffix' need none{own})"
            raise ValueError(f"{caller}: draft_model must be a folder {ways} for method={config.method!r}, got None")
        return None
    folder = target_folder if folder is None else read_folder(f"{caller}: draft_model", folder)
    kind = read_kind(folder)
    method, called, class_name = KINDS[kind]
    if method == "mtp" and "draft_model" in wanted:
        method = "draft_model"  # a model with modules is a language model as well
    for other in wanted:
        if other == "mtp" and method == "draft_model":
            rule = f"holds no next-token modules, which method='mtp' needs: no tensor is named {MODULE_NAMES}"
            raise ModelError(f"{brief(str(folder), 250)}: {rule}")
        if other != method:
            rule = f"method must be {method!r} or None for a draft of {class_name}, got {other!r}"
            raise ValueError(f"{caller}: {rule}; {brief(str(folder), 250)} holds {called}")
    return DraftFolder(folder, method, method == "draft_model" and check_same_vocabulary(folder, target_folder))


def _load_draft_of(target: TargetModel, draft: DraftFolder, config: EAGLEConfig, check_weights: bool) -> DraftModel:
    """Loads the draft that `_choose_draft` returned: a head, or a language model with the target's tokens."""
    options = {"check_weights": check_weights, "quantize": _parts_of(config.draft_quantize)}
    load = {"dflash": load_dflash, "hydra": load_hydra, "medusa": load_medusa}.get(draft.method)
    if load is not None:
        if options["quantize"] is not None:
            _refuse(f"draft_quantize must be None for method={draft.method!r}", options["quantize"])
        return load(draft.folder, target, check_weights=options["check_weights"])
    if draft.method != "draft_model":
        return load_draft(draft.folder, target, **options)
    model = load_target(draft.folder, target.device, target.dtype, **options)
    if not draft.shares_tokens and model.vocab_size != target.vocab_size:
        raise ModelError(tell_sizes(draft.folder, model.vocab_size, target.vocab_size))
    name = brief(str(draft.folder), 250)
    with naming(draft.folder):
        mask = read_mask_token(read_json(draft.folder / "config.json"), "pard_token", "ptd_token_id")
        made = CausalDraft(model, target.vocab_size, mask)
    way = "" if mask is None else f", all at once, by mask token {mask}"
    _logger.info("%s: a language model, which drafts with the target's tokens%s", name, way)
    return made


def tell_sizes(folder: Path, vocab_size: int, wanted: int) -> str:
    """Returns an error about a language model in a folder whose ids may not be the target's, and what would work."""
    rule = f"the draft must have the target's {wanted} tokens, got {vocab_size}"
    way = "from eagle_kernels.engine.models import causal_draft, loading; EAGLEInference(causal_draft.CausalDraft("
    way += f"loading.load_target(DRAFT), vocab_size={wanted}), loading.load_target(TARGET))"
    where = "if they mean the same, say so with a tokenizer.json in both folders, or with this line"
    return f"{brief(str(folder), 100)}: {rule}; {where}: {way}"


def as_draft(model: Any) -> DraftModel:
    """Returns `model` as a draft model: a plain language model, also of transformers, drafts without features."""
    model = _of_transformers(model)
    _check_members("draft_model", "a DraftModel, a TargetModel or a model of transformers", model, _DRAFT_MEMBERS)
    if not hasattr(model, "token_shift"):
        members = (*_DRAFT_MEMBERS, "vocab_size")
        _check_members("draft_model", "a TargetModel", model, members)
        _check_attributes("draft_model", model, members[1:])
    _check_attributes("draft_model", model, _UNBOUND)
    return model if hasattr(model, "token_shift") else CausalDraft(model)


def _weight_bytes(model: Any) -> int | None:
    """Returns the bytes of a model's weights, quantised ones in buffers included; None: it does not tell."""
    while not hasattr(model, "parameters") and hasattr(model, "model"):
        model = model.model  # which `CausalDraft` and `TransformersTarget` wrap
    if not (callable(getattr(model, "parameters", None)) and callable(getattr(model, "buffers", None))):
        return None
    quantised = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *quantised))


def bind_draft(draft: DraftModel, target: TargetModel, allow_larger_draft: bool) -> None:
    """Gives the draft what it borrows from its target; raises ValueError where they are no pair, or look swapped."""
    for name, is_same in (("device", is_same_device), ("dtype", operator.eq)):
        of_draft, of_target = getattr(draft, name, None), getattr(target, name)
        if of_draft is not None and not is_same(of_draft, of_target):
            _refuse(f"the draft's {name} must be the target's, {of_target}", of_draft)
    if hasattr(draft, "bind"):
        draft.bind(target)
    members = ("vocab_size", "draft_vocab_size", "aux_layers", "draft_to_target")
    _check_members("draft_model", "a DraftModel", draft, members)
    _check_attributes("draft_model", draft, _ATTRIBUTES.keys() - {"hidden_size"})
    _check_streams(draft, target)
    if draft.vocab_size != target.vocab_size:
        advice = f"; if only their padding differs, draft with CausalDraft(model, vocab_size={target.vocab_size}) "
        advice += "(from eagle_kernels.engine.models.causal_draft import CausalDraft)"
        got = f"{draft.vocab_size}{advice if isinstance(draft, CausalDraft) else ''}"
        _refuse(f"the draft must have the target's {target.vocab_size} tokens", got)
    sizes = [_weight_bytes(model) for model in (draft, target)]
    is_larger = not draft.token_shift and None not in sizes and sizes[0] > sizes[1]  # heads are never targets
    if is_larger and not allow_larger_draft:
        got = "a draft of {:,} bytes and a target of {:,} bytes; {}".format(*sizes, _ORDER)
        _refuse("draft_model must not have more weights than target_model unless allow_larger_draft=True", got)


def check_device(device: Any, target: TargetModel) -> None:
    """Raises ValueError where a caller names another device than the target's; None names none."""
    if device is None or is_word(device, "auto"):
        return
    try:
        is_device = is_same_device(torch.device(device), target.device)
    except Exception:  # torch raises what the kind of value makes it raise
        is_device = False
    if not is_device:
        _refuse(f"device must be where the models are, on {target.device}", shown(device))


def check_deterministic(config: EAGLEConfig, target: TargetModel) -> None:
    """Raises ValueError where the configuration is deterministic and the target cannot be."""
    if not config.deterministic:
        return
    if not getattr(target, "can_be_deterministic", False):
        got = f"{type(target).__name__}; EAGLEInference.from_pretrained loads one that can be deterministic"
        _refuse("deterministic must be False for a target with layers from outside this library", got)
    if target.device.type == "cpu":
        reason = "where torch sums a row in an order that depends on the others"
        _refuse(f"deterministic must be False on the CPU, {reason}", True)


def check_quantize(config: EAGLEConfig, target: TargetModel, draft: DraftModel | None) -> None:
    """Raises ValueError where the configuration quantises models otherwise than they were at loading."""
    for name, model in (("quantize", target), ("draft_quantize", draft)):
        chosen = read_quantize(f"EAGLEInference: {name}", getattr(config, name))
        if chosen is not None and chosen != getattr(model, "quantize", None):
            way = "EAGLEInference.from_pretrained, load_target and load_draft quantise"
            _refuse(f"{name} must be None, or that of the loaded model ({way})", shown(getattr(config, name)))


def warn_of_rounding(target: TargetModel) -> None:
    """Warns where speculative and plain text may part although the target is fp32."""
    if target.dtype == torch.float32 and target.device.type == "cuda" and rounds_fp32_matmuls():
        warnings.warn(
            "EAGLEInference: torch rounds the inputs of fp32 matmuls (TF32 or less), so speculative and plain text "
            "may differ; torch.set_float32_matmul_precision('highest') avoids this",
            stacklevel=4,
        )


def check_method(config: EAGLEConfig, draft: DraftModel | None) -> None:
    """Raises ValueError where the configuration's method needs a draft model, or one of another kind."""
    if config.needs_model and draft is None:
        _refuse(f"draft_model must be given for method={config.method!r} ('ngram' and 'suffix' need none)", None)
    own = getattr(draft, "method", None)
    for method in config.methods:
        if isinstance(own, str) and method in MODEL_KINDS and method != own:
            _refuse(f"method must be {own!r} or None for a draft of {type(draft).__name__}", repr(method))


def check_trees(config: EAGLEConfig, draft: DraftModel | None) -> None:
    """Raises ValueError where the draft model cannot draft one of the configuration's trees."""
    if not config.needs_model:
        return
    num_modules = getattr(draft, "num_modules", 1)
    for tree in [config, *(tree for _, tree in config.trees if tree is not None)]:
        if tree.topk >= draft.draft_vocab_size:
            _refuse(f"topk must be smaller than the draft vocabulary of {draft.draft_vocab_size} tokens", tree.topk)
        most_levels = getattr(draft, "block_length", getattr(draft, "max_levels", tree.num_model_levels))
        if tree.num_model_levels > most_levels:
            name = "num_steps" if tree.num_model_levels == tree.num_steps else "num_model_steps"
            rule = f"be at most {most_levels}, the levels that {type(draft).__name__} drafts"
            _refuse(f"{name} must {rule}", tree.num_model_levels)
        if num_modules == 1:
            continue
        if tree.topk > 1:
            rule = f"be 1 for a draft of {num_modules} next-token modules, whose drafts are a chain"
            _refuse(f"topk must {rule}", tree.topk)
        if tree.num_model_levels > num_modules:
            name = "num_steps" if tree.num_model_levels == tree.num_steps else "num_model_steps"
            rule = f"be at most the {num_modules} next-token modules of the draft, one for each level"
            _refuse(f"{name} must {rule}", tree.num_model_levels)


def _refuse(rule: str, got: object) -> NoReturn:
    raise ValueError(f"EAGLEInference: {rule}, got {got}")


def _check_members(name: str, kind: str, model: Any, members: tuple[str, ...]) -> None:
    missing = [member for member in members if not hasattr(model, member)]
    if missing:
        value = repr(model) if isinstance(model, (str, Path)) else type(model).__name__
        got = f"{value}; EAGLEInference.from_pretrained loads folders"
        _refuse(f"{name} must be {kind}, which has {missing[0]}", got)


def _check_attributes(name: str, model: Any, attributes: Iterable[str]) -> None:
    """Raises ValueError where a model says something of itself that it cannot mean; it need not have all of these."""
    for attribute in attributes:
        rule, holds = _ATTRIBUTES[attribute]
        value = getattr(model, attribute, _ABSENT)
        is_optional = name == "draft_model" and attribute in ("device", "dtype") and value is None
        if value is not _ABSENT and not is_optional and not holds(value):
            model_class = type(getattr(model, "model", model)).__name__
            _refuse(f"{attribute} of {name} ({model_class}) must be {rule}", shown(value))


def _check_streams(draft: DraftModel, target: TargetModel) -> None:
    """Raises ValueError where a draft reads streams that its target has not, or its offsets do not fit its tokens."""
    most, offsets, where = target.kv_shape.num_layers, draft.draft_to_target, f"draft_model ({type(draft).__name__})"
    if not all(FINAL_NORM <= layer <= most for layer in draft.aux_layers):
        rule = f"lie in {FINAL_NORM}..{most}, the target's streams"
        _refuse(f"aux_layers of {where} must {rule}", shown(draft.aux_layers))
    if offsets is not None and not is_same_device(offsets.device, target.device):
        _refuse(f"draft_to_target of {where} must be on {target.device}", offsets.device)
    num_offsets = draft.vocab_size if offsets is None else len(offsets)
    if num_offsets != draft.draft_vocab_size:
        rule = f"be offsets of the {draft.draft_vocab_size} tokens of draft_vocab_size"
        _refuse(f"draft_to_target of {where} must {rule}", None if offsets is None else f"{num_offsets} offsets")


def _of_transformers(model: Any) -> Any:
    """Returns a model of transformers as a target, which leaves it as it is, and any other unchanged."""
    transformers = sys.modules.get("transformers")  # a model of it exists only where it was imported
    kind = getattr(transformers, "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind) or hasattr(model, "kv_shape"):
        return model
    if model.get_output_embeddings() is None:
        rule = "a transformers model must be a causal language model, with logits over its vocabulary"
        _refuse(rule, type(model).__name__)
    return TransformersTarget(model)


def read_config(config: Any) -> EAGLEConfig:
    """Returns the configuration that a caller gives, or the default one for None.
    A dict is that of a server where it has `method` or a field that `EAGLEConfig` has not; it may have further fields
    of `EAGLEConfig`. Otherwise it has fields of `EAGLEConfig` alone."""
    if isinstance(config, Mapping):
        given = {str(name): value for name, value in config.items()}
        if not is_of_server(given):
            return EAGLEConfig(**given)
        others = {name for name in given if own_name(name, FIELDS) is None and own_name(name, CONFIG_FIELDS)}
        fields = {name: given[name] for name in given.keys() - others}
        return EAGLEConfig.from_speculative_config(fields, **{name: given[name] for name in others})
    if not (config is None or isinstance(config, EAGLEConfig)):
        _refuse("config must be None, an EAGLEConfig or a dict", shown(config))
    return config or EAGLEConfig()


def is_of_server(fields: Mapping[str, Any]) -> bool:
    """Returns whether fields are those of a server's configuration; a whole `EAGLEConfig`, as saved, is none."""
    is_whole = fields.keys() >= set(CONFIG_FIELDS)
    has_method = fields.get("method") is not None and not is_whole
    return has_method or any(name in FIELDS and name not in CONFIG_FIELDS for name in fields)
