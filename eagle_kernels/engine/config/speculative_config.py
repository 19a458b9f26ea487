"""Reads speculative configurations of servers: FastDeploy's `--speculative-config`, vLLM's where they coincide."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...runtime.values import is_integer, is_word, scalar, shown
from ..requests.names import agree, read_names
from .drafting_options import DraftingOptions

# other names of methods; FastDeploy's enumeration says ngram_match, its documentation ngram
_METHODS = {"ngram_match": "ngram", "ngram_gpu": "ngram", "eagle3": "eagle"}
_NAMES = {"prompt_lookup_max": "max_ngram_size", "prompt_lookup_min": "min_ngram_size"}
_SAME = (
    "max_ngram_size", "min_ngram_size", "max_candidate_len", "verify_window", "verify_strategy", "accept_policy",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob", "ngram_prefer", "typical_epsilon", "typical_delta",
)  # fmt: skip
# FastDeploy's documentation turns suffix decoding on by these, under method="mtp"
_SUFFIX = tuple(name for name in _SAME if name.startswith("suffix_"))
# fields, and the methods or strategies that read them
_OWNED = (
    (("max_ngram_size", "min_ngram_size", "ngram_prefer", *_NAMES), "method", {"ngram", "hybrid"}),
    (_SUFFIX, "method", {"suffix"}),
    (("quantization",), "method", {"eagle", "mtp", "draft_model", "hybrid"}),
    (("max_candidate_len", "verify_window"), "verify_strategy", {"topp"}),
    (("typical_epsilon", "typical_delta"), "verify_strategy", {"typical"}),
)
# names of EAGLEConfig for trees, which servers do not have
_OF_TREES = ("topk", "num_steps", "num_draft_tokens")
_OTHERS = ("method", "model", "mtp_strategy", "num_speculative_tokens", "num_model_steps", "benchmark_mode",
           "rejection_sample_method", "quantization")  # fmt: skip
FIELDS = frozenset((*_NAMES, *_SAME, *_OF_TREES, *_OTHERS))


def take_model(given: Mapping[str, Any], draft: Any = None) -> tuple[dict[str, Any], Any]:
    """Returns a server's fields without `model`, and the draft's folder: `model`, or `draft` where that is absent."""
    fields = dict(given) if isinstance(given, Mapping) else _fail_form(given)
    model = fields.pop("model", None)
    if model is None:
        return fields, draft
    if not isinstance(model, (str, Path)) or model == "":
        _fail("model", "be the folder of a draft", model)
    if draft is not None:
        _fail("model", f"be absent where the draft is given as {shown(str(draft))}", model)
    if _means_suffix(fields):
        rule = "be absent with fields of suffix decoding under method='mtp', which mean drafts without a model"
        _fail("model", rule, model)
    return fields, Path(model)


def add_fields(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a server's fields with those of others that such a configuration may have; refuses contradictions.
    What the others say may also be what a given field means, such as num_steps=5 beside num_speculative_tokens=5."""
    meant, own = read_speculative_config(given), _own(given)
    is_counted = any(own.get(name) is not None for name in ("num_speculative_tokens", "num_model_steps"))
    for name in sorted(others.keys() & FIELDS):
        value = others[name]
        if agree(meant.get(name), value) and (name in own or name == "method" or name in _OF_TREES and is_counted):
            continue
        if name in own and not agree(own[name], value):
            _fail(name, f"be {shown(own[name])} or absent beside fields that say so", value)
        own[name] = value
    return own


def read_speculative_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `EAGLEConfig` that a server's fields stand for; see `from_speculative_config` there."""
    if not isinstance(given, Mapping):
        _fail_form(given)
    if given.get("model") is not None:
        rule = "be absent here: EAGLEInference.from_pretrained(None, target, fields) loads it"
        _fail("model", rule, given["model"])
    given = _own(given)
    method = _method(given)
    fields = {"method": method} | _sizes(given, method) | {name: given[name] for name in _SAME if name in given}
    if given.get("quantization") is not None:
        fields["draft_quantize"] = _quantization(given["quantization"])
    for name, ours in _NAMES.items():
        if name in given and not agree(fields.setdefault(ours, given[name]), given[name]):
            _fail(name, f"agree with {ours} = {shown(fields[ours])}, since both mean the same", given[name])
    # vLLM's rule: where one is given the other is the same
    for name, other in zip(_NAMES, reversed(_NAMES.values())):
        if name in given:
            fields.setdefault(other, given[name])
    if "rejection_sample_method" in given:
        name = given["rejection_sample_method"]
        if not is_word(name, "standard") or not is_word(fields.setdefault("verify_strategy", "rejection"), "rejection"):
            rule = "be 'standard', without another verify_strategy"
            _fail("rejection_sample_method", rule, name)
    is_benchmark = given.get("benchmark_mode", False)
    if not isinstance(is_benchmark, bool):
        _fail("benchmark_mode", "be true or false", is_benchmark)
    if is_benchmark and not is_word(fields.setdefault("accept_policy", "reject_all"), "reject_all"):
        _fail("benchmark_mode", "come with no accept_policy but 'reject_all', which it means", fields["accept_policy"])
    return fields


def _quantization(value: Any) -> Any:
    """Returns what `draft_quantize` takes: of FastDeploy's mixed form (its MixQuantConfig) the names of the parts."""
    if not (isinstance(value, Mapping) and "quantization" in value):
        return value
    if value.get("kv_cache_quant_type") is not None:
        rule = "have no kv_cache_quant_type: the draft's keys and values keep its dtype, kv_cache_dtype is the target's"
        _fail("quantization", rule, value["kv_cache_quant_type"])
    types = {"dense": "dense_quant_type", "experts": "moe_quant_type"}
    said = {name for name in value if value[name] not in (None, False)}
    if said != {"quantization", *types.values()} or not is_word(value["quantization"], "mix_quant"):
        _fail("quantization", f"be a name, or have {' and '.join(types.values())} beside 'mix_quant' alone", value)
    return {part: value[name] for part, name in types.items()}


def check_fields_are_read(given: Mapping[str, Any], made: DraftingOptions) -> None:
    """Raises ValueError for a field that means nothing to the method or strategy that was chosen."""
    given = _own(given)
    for names, chosen, owners in _OWNED:
        values = made.methods if chosen == "method" else (made.verify_strategy,)
        for name in names:
            default = None if name == "quantization" else getattr(DraftingOptions, _NAMES.get(name, name))
            if name in given and not agree(given[name], default) and not owners.intersection(values):
                rule = f"be {default!r} or absent for {chosen}={getattr(made, chosen)!r}, which does not read it"
                _fail(name, rule, given[name])


def _own(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields under the names of `FIELDS`; what a server alone decides is refused unless it says nothing."""
    given = {str(name): scalar(value) for name, value in given.items() if not (value is None and name in _NAMES)}
    has_model = {name: given.pop(name) for name in ("model",) if name in given}  # which is a target elsewhere
    return read_names("speculative_config", given, FIELDS - {"model"}) | has_model


def _method(given: Mapping[str, Any]) -> str:
    name = given.get("method")
    if not isinstance(name, str):
        _fail("method", "be given" if name is None else "be the name of a method", name)
    name = "mtp" if name.endswith("_mtp") else name  # vLLM names the family, too
    method = "suffix" if _means_suffix(given) else _METHODS.get(name, name)
    strategy = given.get("mtp_strategy", "default")
    if not any(is_word(strategy, word) for word in ("default", "with_ngram")):
        _fail("mtp_strategy", "be 'default' or 'with_ngram'", strategy)
    if strategy == "with_ngram":
        if method not in ("mtp", "eagle", "hybrid"):
            _fail("mtp_strategy", f"be 'default' for method={shown(name)}, which drafts without a head", strategy)
        return "hybrid"
    if method == "hybrid" and "mtp_strategy" in given:
        _fail("mtp_strategy", "be 'with_ngram' for method='hybrid'", strategy)
    return method


def _sizes(given: Mapping[str, Any], method: str) -> dict[str, int]:
    """Returns the tree: a chain of num_speculative_tokens drafts, or what the tree's own fields say."""
    if method == "naive":
        count = given.get("num_speculative_tokens", 0)  # whatever it is, FastDeploy takes 0
        if not (is_integer(count) and count >= 0):
            _fail("num_speculative_tokens", "be an int of at least 0", count)
        for name in (*_OF_TREES, "num_model_steps"):
            if not is_word(given.get(name, 1), 1):
                _fail(name, "be 1 or absent for method='naive', which has no drafts", given[name])
        return {}
    count, levels = given.get("num_speculative_tokens", 1), given.get("num_model_steps")
    for name, value in (("num_speculative_tokens", count), ("num_model_steps", 1 if levels is None else levels)):
        if not (is_integer(value) and value >= 1):
            _fail(name, "be an int of at least 1", value)
    has_model = method not in ("ngram", "suffix")
    if "num_speculative_tokens" in given and count < (levels or 1):
        _fail("num_speculative_tokens", f"be at least num_model_steps = {levels}", count)
    if not has_model and levels not in (None, 1):
        _fail("num_model_steps", f"be 1 or absent for method={shown(method)}, which has no model", levels)
    tree = {name: given[name] for name in _OF_TREES if name in given}
    if tree:
        if "num_speculative_tokens" in given:
            _fail("num_speculative_tokens", f"be absent where {min(tree)} is given", count)
        if method == "hybrid" and levels is not None:
            return tree | {"num_model_steps": levels}
        if has_model and levels is not None:
            num_steps = tree.setdefault("num_steps", levels)
            if is_integer(num_steps) and num_steps != levels:
                _fail("num_model_steps", f"be num_steps = {num_steps} or absent unless n-grams follow", levels)
        return tree
    if method == "hybrid":
        levels = levels or 1
        if count <= levels:
            rule = f"exceed num_model_steps = {levels} where n-grams follow the model's drafts"
            _fail("num_speculative_tokens", rule, given.get("num_speculative_tokens"))
        return {"topk": 1, "num_steps": count, "num_draft_tokens": count + 1, "num_model_steps": levels}
    if has_model and levels is not None:
        count = levels  # FastDeploy, too: room for more drafts stays empty unless n-grams follow
    return {"topk": 1, "num_steps": count, "num_draft_tokens": count + 1}


def _means_suffix(given: Mapping[str, Any]) -> bool:
    """Returns whether `mtp` stands for suffix decoding: some of its fields say something."""
    is_asked = any(name in given and not agree(given[name], getattr(DraftingOptions, name)) for name in _SUFFIX)
    return is_asked and is_word(given.get("method"), "mtp") and is_word(given.get("mtp_strategy", "default"), "default")


def _fail_form(given: Any) -> NoReturn:
    raise ValueError(f"speculative_config: must be a mapping of fields, got {shown(given)}")


def _fail(name: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"speculative_config: {name} must {rule}, got {shown(value)}")
