"""What a folder holds, the published formats of heads and next-token modules, and their translation into our names.

Auxiliary layer ids inside `eagle_config` (SpecForge, ModelOpt) name the layers whose *output* is read; ids beside
`hidden_size` (speculators, vLLM) are hidden_states indices. hidden_states[i] is the input of layer i, which is the
output of layer i - 1, so the conventions differ by one. A head that reads the wrong streams still gives correct text,
only more slowly. The official files name no layers. `d2t` holds offsets in every format that has it.

Heads with latent attention (`Eagle3DeepseekV2ForCausalLM`) follow either convention inside `eagle_config`: TorchSpec
and ModelOpt write layers, but TorchSpec's export for vLLM writes indices. Trainers take layer 1 first, so ids that
begin with another number are read as indices, as in SGLang's deepseek_v2.py.

`norm_output` has the meaning that SGLang and vLLM give it: the head feeds back its output after the final norm.
"""

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

from ...runtime.values import is_integer, shown
from .checkpoint import Checkpoint, brief
from .decoder_config import FAMILIES, OF_OTHER_FAMILIES, has_plain_layers, read_model_type
from .dflash import are_dflash
from .hydra import FILES as HYDRA_FILES
from .hydra import are_hydra
from .medusa import FILES as MEDUSA_FILES
from .medusa import are_medusa
from .protocol import FINAL_NORM, ModelError
from .settings import MOST_LAYERS, NULL_IS_A_VALUE, check_implemented, is_empty, is_off, read_size, read_value, stated

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MODULE_PREFIX = "model.mtp_layers."  # begins the names of next-token modules' tensors, which lie beside the target's


class Kind(NamedTuple):
    """Tells how what a folder holds can draft."""

    method: str
    called: str  # in errors
    class_name: str  # of the draft that is made of it


KINDS = {
    "EAGLE-1": Kind("eagle", "an EAGLE-1 head", "Eagle1Head"),
    "EAGLE-3": Kind("eagle", "an EAGLE-3 head", "EagleHead"),
    "P-EAGLE": Kind("eagle", "a P-EAGLE head", "ParallelEagleHead"),
    "MTP": Kind("mtp", "next-token modules", "NextTokenModules"),
    "DFlash": Kind("dflash", "a DFlash draft", "DFlashDraft"),
    "Hydra": Kind("hydra", "Hydra heads", "HydraHeads"),
    "Medusa": Kind("medusa", "Medusa heads", "MedusaHeads"),
    "language model": Kind("draft_model", "a language model", "CausalDraft"),
}

# Kinds that are never a target.
HEADS = ("EAGLE-1", "EAGLE-3", "P-EAGLE", "Medusa", "Hydra", "DFlash")
_OF_EAGLE3 = ("EAGLE-3", "P-EAGLE")
# Drafts of other designs: the word in their config.json, or at the beginning of their tensors' names, and their names.
_NOT_SUPPORTED = {"mlp_speculator": "MLP speculators"}
_FUSIONS = {"fc.weight", "model.fc.weight", "fusion_fc.weight", "model.fusion_fc.weight"}  # names in EAGLE heads
_IS_EAGLE = re.compile("ForCausalLMEagle|^Eagle.*(ForCausalLM|Speculator|DraftModel)$").search
_UNUSED = re.compile(r"^layers\.\d+\.hidden_norm\.").search  # vLLM's class has one in each layer of P-EAGLE
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

# Other names of settings, and our own.
_SYNONYMS = {"truncated_vocab_size": "draft_vocab_size", "use_aux_norm": "fc_norm", "input_norm": "norm_before_fc",
             "fusion_bias": "fc_bias", "bias": "fc_bias"}  # fmt: skip

# Options that trainers can write, with the one value that is implemented.
_IMPLEMENTED = {"num_hidden_layers": 1, "logit_scale": 1.0, "layernorms": False, "use_moe": False}

# Options of `eagle_config` that only ModelOpt writes.
_MODELOPT = {"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1}
_MODELOPT_NORMS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")  # EAGLE-3 has both, EAGLE-1 neither
_MODELOPT_KEYS = {*_MODELOPT, *_MODELOPT_NORMS, "parallel_draft_heads_num_layers"}


class HeadFormat(NamedTuple):
    """Describes a published format."""

    name: str  # as shown to users
    is_written_by: Callable[[dict[str, Any]], bool]  # tells whether a parsed config.json has this format
    section: str = "eagle_config"  # an object in config.json with more keys, which have precedence over those beside it
    tensor_names: tuple[tuple[str, str], ...] = ()  # (beginning of a name in the file, our beginning)


def _architectures(config: dict[str, Any]) -> list[str]:
    names = [] if is_off(config.get("architectures")) else config["architectures"]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f"config.json: architectures must be a list of strings, got {shown(names)}")
    return names


_FORMATS = (  # the first that fits is taken
    HeadFormat(
        "vLLM speculators", lambda config: not is_off(config.get("speculators_model_type")),
        "transformer_layer_config", (("fusion_fc.", "fc."), ("transformer.", "layers.0.")),
    ),
    HeadFormat(
        "NVIDIA ModelOpt", lambda config: bool(_MODELOPT_KEYS & read_value(config, "eagle_config", dict).keys()),
        tensor_names=(("hidden_norm.", "midlayer.hidden_norm."), ("input_embeds_norm.", "midlayer.input_layernorm."),
                      ("eagle_lm_head.", "lm_head.")),
    ),
    HeadFormat(
        "SpecForge/SGLang",
        lambda config: bool(
            read_value(config, "eagle_config", dict) or re.search("ForCausalLMEagle", " ".join(_architectures(config)))
        ),
        tensor_names=tuple((f"aux_norm_{name}.", f"fc_norm.{i}.") for i, name in enumerate(("low", "mid", "high"))),
    ),
    HeadFormat("official (SafeAILab)", lambda config: True),
)  # fmt: skip
# Next-token modules, recognised by their tensors. DeepSeek's, and GLM's (vLLM's glm4_moe_mtp.py), are layers after the
# target's own; each holds copies of the embedding and the output, which are the target's and are not read. ERNIE's end
# with the target's final norm (FastDeploy, model_executor/models/ernie4_5_mtp.py), and are layers of the kind of the
# target's first ones.
NEXT_TOKEN_MODULES = HeadFormat("MiMo (next-token modules)", lambda config: False)
DEEPSEEK_MODULES = HeadFormat("DeepSeek (next-token modules)", lambda config: False)
_DEEPSEEK_PARTS = {"enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm.", "eh_proj.": "input_proj.",
                   "shared_head.norm.": "final_layernorm."}  # fmt: skip
# in errors: what the three layouts call their tensors
MODULE_NAMES = f"{MODULE_PREFIX}* (MiMo), model.layers.*.eh_proj.* (DeepSeek, Kimi, GLM) or model.mtp_block.* (ERNIE)"
ERNIE_MODULES = HeadFormat("ERNIE (next-token modules)", lambda config: False)
_ERNIE_PARTS = {"emb_norm": "token_layernorm.", "hidden_norm": "hidden_layernorm.", "linear_proj": "input_proj.",
                "block": ""}  # fmt: skip
_FINAL_NORM = "model.norm.weight"
_COPIES = ("embed_tokens.", "shared_head.head.")


class AuxLayers(NamedTuple):
    """Holds the streams of the target that a head reads, according to its config.json."""

    written: tuple[int, ...] | None  # the ids in the file; None if it has none
    meaning: str  # what the ids number
    indices: tuple[int, ...]  # the same streams as hidden_states indices; () if the file has none


def recognise(config: dict[str, Any]) -> HeadFormat:
    """Returns the format of a parsed config.json."""
    return next(form for form in _FORMATS if form.is_written_by(config))


def kind_of(config: dict[str, Any], names: Collection[str]) -> str | None:
    """Returns what a folder holds, from config.json or, failing that, the tensors: a key of `KINDS`. `EAGLE-1` is
    EAGLE-2 as well, and `MTP` a target with its own modules. None: another kind of model."""
    if any(name.startswith(MODULE_PREFIX) for name in names):
        return "MTP"
    if are_medusa(config) or any(name.startswith("medusa_head") for name in names):
        return "Medusa"
    if are_hydra(config):
        return "Hydra"
    if are_dflash(config):
        return "DFlash"
    refuse_other_drafts(config, names)
    architectures, declared = _architectures(config), config.get("speculators_model_type")
    if declared == "peagle":
        return "P-EAGLE"
    eagle3 = "P-EAGLE" if any(name.endswith("mask_hidden") for name in names) else "EAGLE-3"
    if declared == "eagle3" or any("eagle3" in name.lower() for name in architectures):
        return eagle3
    if declared == "eagle":
        return "EAGLE-1"
    if any("hidden_norm." in name for name in names):
        return eagle3
    if _FUSIONS.intersection(names) or any(map(_IS_EAGLE, architectures)):
        return "EAGLE-1"
    if architectures:
        is_language_model = any(re.search("CausalLM|LMHead|ConditionalGeneration", name) for name in architectures)
    else:
        is_language_model = any(re.search(r"(^|\.)(layers|h|blocks)\.0\.", name) for name in names)
    return "language model" if is_language_model and is_off(config.get("is_encoder_decoder")) else None


def form_of_modules(names: Iterable[str]) -> HeadFormat:
    """Returns the format of next-token modules, from the names of the tensors in the file."""
    names = list(names)
    if any(".eh_proj." in name for name in names):
        return DEEPSEEK_MODULES
    return ERNIE_MODULES if any(name.startswith("model.mtp_block.") for name in names) else NEXT_TOKEN_MODULES


def rename_modules(config: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Gives the tensors of next-token modules of other layouts the names that MiMo's has for them."""
    form = form_of_modules(checkpoint.tensors)
    if read_model_type(config) not in FAMILIES or form is NEXT_TOKEN_MODULES:
        return
    if form is DEEPSEEK_MODULES:
        return checkpoint.rename(partial(module_name, read_size(config, "num_hidden_layers")))
    checkpoint.rename(_name_of_ernie)
    norm = checkpoint.tensors.get(_FINAL_NORM)
    found = [name.removeprefix(MODULE_PREFIX) for name in checkpoint.tensors if name.startswith(MODULE_PREFIX)]
    modules = {name.partition(".")[0] for name in found}
    if norm is not None:
        checkpoint.tensors |= {f"{MODULE_PREFIX}{module}.final_layernorm.weight": norm for module in modules}


def _name_of_ernie(name: str) -> str:
    """Returns the name that MiMo's layout has for a tensor of ERNIE's, and any other name unchanged."""
    found = re.match(r"model\.mtp_(\w+)\.(\d+)\.(.*)", name)
    if found is None or found[1] not in _ERNIE_PARTS:
        return name
    return f"{MODULE_PREFIX}{found[2]}.{_ERNIE_PARTS[found[1]]}{found[3]}"


def module_name(num_layers: int, name: str) -> str | None:
    """Returns the name that MiMo's layout has for a tensor of DeepSeek's, and any other name unchanged; None for a copy
    of one of the target's. num_layers: those of the target."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if found is None or int(found[1]) < num_layers:
        return name
    part = name.removeprefix(found[0])
    if part.startswith(_COPIES):
        return None
    for theirs, ours in _DEEPSEEK_PARTS.items():
        part = ours + part.removeprefix(theirs) if part.startswith(theirs) else part
    return f"{MODULE_PREFIX}{int(found[1]) - num_layers}.{part}"


def files_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of files that hold the tensors of such a config.json, beside those that all models have."""
    return MEDUSA_FILES if are_medusa(config) else HYDRA_FILES if are_hydra(config) else ()


def refuse_other_drafts(config: dict[str, Any], names: Collection[str] = ()) -> None:
    """Raises ModelError for a draft of a design that is not implemented, by its name."""
    declared = config.get("speculators_model_type")
    if not is_off(declared) and declared not in ("eagle", "eagle3", "peagle"):
        raise ModelError(f"config.json: speculators_model_type={shown(declared)} is not an EAGLE head")
    told = [*_architectures(config), str(config.get("model_type"))]
    told += [name for name, value in config.items() if not is_off(value)]
    for word, called in _NOT_SUPPORTED.items():
        found = next((each for each in told if each.lower().startswith(word)), None)
        found = found or next((name for name in names if re.search(rf"(^|\.){word}", name, re.IGNORECASE)), None)
        if found is not None:
            raise ModelError(f"holds {called} ({brief(found)}), and {called} are not supported yet")
    adapter = next((name for name in names if ".lora_A." in name), None)
    if adapter is not None:
        raise ModelError(f"holds a LoRA adapter ({brief(adapter)}): merge it into its base model, and save that")


def is_of_other_kind(config: dict[str, Any]) -> bool:
    """Returns whether config.json rules out a causal language model. A bare `...Model` does not: its output may be tied
    to its embedding."""
    names = _architectures(config)
    return not is_off(config.get("is_encoder_decoder")) or any(re.search("For[A-Z]", name) for name in names)


def tell_other_kind(config: dict[str, Any]) -> str:
    """Describes a model that is no draft and no language model."""
    told = (f"{name}={shown(config.get(name))}" for name in ("model_type", "architectures"))
    return f"a model of another kind ({', '.join(told)})"


def our_name(form: HeadFormat, kind: str, name: str) -> str | None:
    """Returns our name of a draft's tensor; None for one of the target, and for scales of 8-bit keys and values, since
    a draft's have the weights' type."""
    if kind == "MTP" and not name.startswith(MODULE_PREFIX) or name.endswith((".k_scale", ".v_scale")):
        return None
    own = (("layers.0.", "midlayer."),) if kind in _OF_EAGLE3 else ()
    for theirs, ours in (("model.", ""), *form.tensor_names, *own):
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return None if kind == "P-EAGLE" and _UNUSED(name) else name


def flatten(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns config.json of any format as one flat object with our names; `aux_layers` are hidden_states indices."""
    section = read_value(config, recognise(config).section, dict)
    values = stated(config, *NULL_IS_A_VALUE) | stated(section)
    for theirs, ours in _SYNONYMS.items():
        value = values.pop(theirs, None)
        if value is None:
            continue
        if values.get(ours) not in (None, value):
            raise ModelError(f"config.json: {theirs}={shown(value)} contradicts {ours}={shown(values[ours])}")
        values[ours] = value
    norms = dict.fromkeys(_MODELOPT_NORMS, kind in _OF_EAGLE3)
    only = {name: value for name, value in _IMPLEMENTED.items() if kind != "P-EAGLE" or name != "num_hidden_layers"}
    check_implemented(values, only | _MODELOPT | norms, f" for {kind}")
    family = _family_of(config, values)
    if not has_plain_layers(read_model_type(values)) and has_plain_layers(family):
        # the rest is the target's: what the class of that family reads, the head's does not
        values = {name: value for name, value in values.items() if name not in (*OF_OTHER_FAMILIES, *_WINDOW)}
    values["model_type"] = family
    reads_last = kind == "EAGLE-1" or values.get("use_aux_hidden_state") is False
    values["aux_layers"] = (FINAL_NORM,) if reads_last else written_aux_layers(config).indices or None
    return values


def _is_latent(config: dict[str, Any]) -> bool:
    """Returns whether a head's architecture is that of latent attention."""
    return any("deepseek" in name.lower() for name in _architectures(config))


def _family_of(config: dict[str, Any], values: dict[str, Any]) -> str:
    """Returns the family of a head's layer, which its architecture names; model_type may be the target's."""
    declared = read_model_type(values)
    for name in _architectures(config):
        family = re.sub("p?eagle3?|forcausallm|speculator|draftmodel|model", "", name.lower())
        family = family.replace("deepseekv", "deepseek_v")
        if family in FAMILIES:
            return family
        if not family and not has_plain_layers(declared):  # of speculators, or one that every family has
            return "llama"
    return declared


def written_aux_layers(config: dict[str, Any]) -> AuxLayers:
    """Reads the auxiliary layers that config.json names."""
    inside, beside = read_value(config, "eagle_config", dict).get(LAYER_IDS), config.get(LAYER_IDS)
    inside, beside = (None if is_off(ids) else ids for ids in (inside, beside))
    ids, offset, meaning = (beside, 0, "hidden_states") if inside is None else (inside, 1, "layer outputs")
    if ids is None:
        return AuxLayers(None, "", ())
    if not (isinstance(ids, list) and ids and all(map(is_integer, ids))):
        raise ModelError(f"config.json: {LAYER_IDS} must be a list of integers, got {shown(ids)}")
    if len(ids) > MOST_LAYERS:
        raise ModelError(f"config.json: {LAYER_IDS} must be a list of at most {MOST_LAYERS} integers, got {shown(ids)}")
    if offset and ids[0] != 1 and _is_latent(config):
        offset, meaning = 0, "hidden_states"
    if inside is not None and beside not in (None, inside, [layer + offset for layer in inside]):
        raise ModelError(f"config.json: {LAYER_IDS} {shown(beside)} contradicts {shown(inside)} of eagle_config")
    indices = tuple(layer + offset for layer in ids)
    if min(indices) < 0:
        raise ModelError(f"config.json: {LAYER_IDS} {shown(ids)} names no stream of the target")
    return AuxLayers(tuple(ids), meaning, indices)


def read_mask_token(config: dict[str, Any], *names: str) -> int | None:
    """Returns the token that a draft reads in place of those which it drafts at once, under the first of `names` that
    config.json has: pard_token (PARD), ptd_token_id (P-EAGLE), mask_token_id (speculators). None: it has none."""
    given = {name: config[name] for name in names if not is_empty(config.get(name))}
    for name, value in given.items():
        if not (is_integer(value) and 0 <= value < 2**31):
            raise ModelError(f"config.json: {name} must be a token id, got {shown(value)}")
    if len(set(given.values())) > 1:
        told = " and ".join(f"{name}={value}" for name, value in given.items())
        raise ModelError(f"config.json: {told} contradict each other")
    return next(iter(given.values()), None)


def remarks_on(form: HeadFormat, kind: str, config: dict[str, Any]) -> list[str]:
    """Returns a line for each setting that config.json leaves open or that other programs read differently."""
    if kind not in _OF_EAGLE3:  # the other kinds have none of these options
        return []
    if form.name == "vLLM speculators" and is_empty(config.get("norm_before_residual")):
        taken = "False is taken, speculators' own default, where vLLM takes True"
        return [f"config.json does not say norm_before_residual: {taken}; write it"]
    if _is_latent(config):
        theta = config.get("rope_theta")
        taken = "is taken as written, as SGLang does; vLLM's class and older versions of TorchSpec may take 10000"
        return [] if theta in (None, 10000) else [f"rope_theta={shown(theta)} {taken}"]
    if form.name == "SpecForge/SGLang" and config.get("norm_output"):
        meaning = "is read as SGLang does, the output is fed back after the final norm"
        return [f"norm_output=True {meaning}; SpecForge's own option of that name is another"]
    return []
