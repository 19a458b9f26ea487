"""Feed-forwards of experts: those of Qwen3-MoE, Mixtral, gpt-oss, ERNIE 4.5, DeepSeek-V2 and -V3 and GLM-4.5, and of
their layers that have none. A router chooses experts for each row, on the device: no step waits, and all of it fits
into a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ....ops.experts.route_experts import MAX_CHOSEN, MAX_EXPERTS, MAX_SHARED
from ....runtime.values import is_integer, shown
from ..protocol import ModelError
from ..settings import check_implemented, is_empty, is_off, read_size, read_value
from .gated import Gated, GatedFeedForward
from .linear import Linear
from .mixture import MixtureOfExperts


@dataclass(kw_only=True)
class Experts:
    """Holds the settings of layers of experts and of plain ones. A class for each layout says what config.json calls
    them, and where the tensors lie."""

    stored_sizes: ClassVar = {"mlp.gate_proj.weight": "intermediate_size"}
    # keys of config.json; of the first one, which models of other families do not have, the second is another name
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts", "num_local_experts")
    keys: ClassVar = {"num_chosen": "num_experts_per_tok", "inner_size": "moe_intermediate_size"}
    implemented: ClassVar[dict[str, Any]] = {"hidden_act": "silu"}
    folder: ClassVar = "mlp"  # begins the names of a layer's tensors
    router: ClassVar = "gate"
    projections: ClassVar = ("gate_proj", "up_proj", "down_proj")  # of an expert; (): tensors hold all experts
    bias_name: ClassVar[str | None] = None  # of what is added to scores for the choice
    bias_shape: ClassVar[tuple[int, ...]] = (-1,)
    has_wide_router: ClassVar = False  # its weights stay fp32

    hidden_size: int
    intermediate_size: int  # of plain layers
    mlp_bias: bool = False
    linear: type[Linear] = Linear  # the kind
    num_experts: int
    num_chosen: int
    inner_size: int  # of an expert
    num_shared: int = 0
    plain_layers: tuple[bool, ...] = ()  # whether each layer has no experts
    plain_after: bool = False  # and those of next-token modules, which come after these
    routing: dict[str, Any] = field(default_factory=dict)  # options of `route_experts`
    activation: dict[str, Any] = field(default_factory=dict)  # of `fused_experts`

    @classmethod
    def read(cls, config: dict[str, Any]) -> Experts:
        check_implemented(config, cls.implemented)
        count = next((key for key in cls.count_keys if not is_empty(config.get(key))), cls.count_keys[0])
        keys = {"num_experts": count} | cls.keys
        values = {name: read_size(config, key) for name, key in keys.items()}
        shared = cls._read_shared(config)
        most = {"num_experts": MAX_EXPERTS, "num_chosen": min(MAX_CHOSEN, values["num_experts"])}
        for name, largest in most.items():
            if values[name] > largest:
                raise ModelError(f"config.json: {keys[name]} must be at most {largest}, got {values[name]}")
        if shared > MAX_SHARED:
            raise ModelError(f"config.json: shared experts must be at most {MAX_SHARED}, got {shared}")
        num_layers = read_size(config, "num_hidden_layers")
        return cls(
            **values, hidden_size=read_size(config, "hidden_size"), linear=config["linear"], num_shared=shared,
            intermediate_size=read_size(config, "intermediate_size"), mlp_bias=config["mlp_bias"],
            plain_layers=tuple(cls._is_plain(config, layer) for layer in range(num_layers)),
            plain_after=cls._is_plain(config, num_layers),
            routing=cls._read_routing(config, values["num_experts"]), activation=cls._read_activation(config),
        )  # fmt: skip

    @classmethod
    def _read_shared(cls, config: dict[str, Any]) -> int:
        return 0

    @classmethod
    def _is_plain(cls, config: dict[str, Any], layer: int) -> bool:
        return False

    @classmethod
    def _read_routing(cls, config: dict[str, Any], num_experts: int) -> dict[str, Any]:
        return {}

    @classmethod
    def _read_activation(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {}

    def make(self, layer: int = 0) -> GatedFeedForward | MixtureOfExperts:
        if self.plain_layers[layer] if layer < len(self.plain_layers) else self.plain_after:
            return self.make_plain(self.intermediate_size)
        shared = self.make_plain(self.num_shared * self.inner_size) if self.num_shared else None
        return MixtureOfExperts(self, shared)

    def make_plain(self, inner_size: int) -> GatedFeedForward:
        settings = {"hidden_size": self.hidden_size, "mlp_bias": self.mlp_bias, "linear": self.linear}
        return Gated(intermediate_size=inner_size, **settings).make()


@dataclass(kw_only=True)
class QwenExperts(Experts):
    """Those of Qwen3-MoE."""

    @classmethod
    def _is_plain(cls, config: dict[str, Any], layer: int) -> bool:
        plain, step = config.get("mlp_only_layers"), config.get("decoder_sparse_step")
        step = 1 if is_empty(step) else read_size(config, "decoder_sparse_step")
        if not is_empty(plain) and not (isinstance(plain, list) and all(map(is_integer, plain))):
            raise ModelError(f"config.json: mlp_only_layers must be a list of integers, got {shown(plain)}")
        return layer in (plain or ()) or (layer + 1) % step != 0

    @classmethod
    def _read_routing(cls, config: dict[str, Any], num_experts: int) -> dict[str, Any]:
        return {"renormalize": read_value(config, "norm_topk_prob", bool)}


@dataclass(kw_only=True)
class MixtralExperts(Experts):
    """Those of Mixtral, whose layers all have them."""

    count_keys = ("num_local_experts", "num_experts")
    keys: ClassVar = {"num_chosen": "num_experts_per_tok", "inner_size": "intermediate_size"}
    folder = "block_sparse_moe"
    projections = ("w1", "w3", "w2")


@dataclass(kw_only=True)
class OssExperts(MixtralExperts):
    """Those of gpt-oss: biases everywhere, gates and up in turns, and a clamped activation."""

    folder, router, projections = "mlp", "router", ()

    @classmethod
    def _read_activation(cls, config: dict[str, Any]) -> dict[str, Any]:
        if is_off(config.get("layer_types")):
            raise ModelError("config.json: layer_types is missing")
        return {
            "activation": "swigluoai", "interleaved": True,
            "alpha": _number(config, "swiglu_alpha", 1.702), "limit": _number(config, "swiglu_limit", 7.0),
        }  # fmt: skip


@dataclass(kw_only=True)
class ErnieExperts(Experts):
    """Those of ERNIE 4.5: a bias for the choice, and experts that all rows share."""

    count_keys = ("moe_num_experts", "num_experts")
    keys: ClassVar = {"num_chosen": "moe_k", "inner_size": "moe_intermediate_size"}
    implemented: ClassVar = Experts.implemented | {"moe_gate": "topk"}
    bias_name, bias_shape = "moe_statics.e_score_correction_bias", (1, -1)
    has_wide_router = True

    @classmethod
    def _read_shared(cls, config: dict[str, Any]) -> int:
        return 0 if is_off(config.get("moe_num_shared_experts")) else read_size(config, "moe_num_shared_experts")

    @classmethod
    def _is_plain(cls, config: dict[str, Any], layer: int) -> bool:
        first, last, step = (config.get(f"moe_layer_{name}") for name in ("start_index", "end_index", "interval"))
        for name, value in {"start_index": first, "end_index": last, "interval": step}.items():
            if not is_integer(value):
                raise ModelError(f"config.json: moe_layer_{name} must be an integer, got {shown(value)}")
        last = last if last >= 0 else read_size(config, "num_hidden_layers") - 1
        return not first <= layer <= last or (layer + 1) % max(step, 1) != 0

    @classmethod
    def _read_routing(cls, config: dict[str, Any], num_experts: int) -> dict[str, Any]:
        return {"least_sum": _number(config, "moe_norm_min", 1e-12)}


@dataclass(kw_only=True)
class DeepseekExperts(Experts):
    """Those of DeepSeek-V3 and GLM-4.5: groups by their best two, a bias for the choice, and shared experts."""

    count_keys = ("n_routed_experts", "num_local_experts")
    implemented: ClassVar = Experts.implemented | {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    }  # fmt: skip
    bias_name, has_wide_router = "gate.e_score_correction_bias", True
    scoring: ClassVar = {"scoring": "sigmoid", "group_scoring": "top2"}

    @classmethod
    def _read_shared(cls, config: dict[str, Any]) -> int:
        return 0 if is_off(config.get("n_shared_experts")) else read_size(config, "n_shared_experts")

    @classmethod
    def _is_plain(cls, config: dict[str, Any], layer: int) -> bool:
        kinds, first = config.get("mlp_layer_types"), config.get("first_k_dense_replace", 0)
        if not is_empty(kinds):
            if not (isinstance(kinds, list) and len(kinds) == read_size(config, "num_hidden_layers")):
                raise ModelError(f"config.json: mlp_layer_types must name each layer, got {shown(kinds)}")
            strangers = [kind for kind in kinds if kind not in ("dense", "sparse")]
            if strangers:
                raise ModelError(f"config.json: mlp_layer_types with {shown(strangers[0])} is not implemented")
            return layer < len(kinds) and kinds[layer] == "dense"
        if not is_integer(first):
            raise ModelError(f"config.json: first_k_dense_replace must be an integer, got {shown(first)}")
        return layer < first

    @classmethod
    def _read_routing(cls, config: dict[str, Any], num_experts: int) -> dict[str, Any]:
        options = cls.scoring | {"scale": _number(config, "routed_scaling_factor", 1.0)}
        options["renormalize"] = read_value(config, "norm_topk_prob", bool)
        if not is_off(config.get("n_group")):
            groups, best = read_size(config, "n_group"), read_size(config, "topk_group")
            if num_experts % groups or num_experts < 2 * groups:
                raise ModelError(f"config.json: n_group must divide {num_experts} experts in pairs, got {groups}")
            if best > groups or best * (num_experts // groups) < read_size(config, "num_experts_per_tok"):
                raise ModelError(f"config.json: topk_group must leave num_experts_per_tok experts, got {best}")
            options |= {"num_groups": groups, "top_groups": best}
        return options


@dataclass(kw_only=True)
class DeepseekV2Experts(DeepseekExperts):
    """Those of DeepSeek-V2: softmax, and groups by their best expert where the method says so."""

    implemented: ClassVar = Experts.implemented | {
        "scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1,
    }  # fmt: skip
    bias_name = None
    scoring: ClassVar = {"group_scoring": "max"}

    @classmethod
    def _read_routing(cls, config: dict[str, Any], num_experts: int) -> dict[str, Any]:
        method = config.get("topk_method")
        if method not in (None, "greedy", "group_limited_greedy"):
            raise ModelError(f"config.json: topk_method={shown(method)} is not implemented")
        if method != "group_limited_greedy":
            config = config | {"n_group": None}
        return super()._read_routing(config, num_experts)


def _number(config: dict[str, Any], name: str, usual: float) -> float:
    value = usual if is_empty(config.get(name)) else config[name]
    if not (is_integer(value) or isinstance(value, float)) or not 0 <= value < float("inf"):
        raise ModelError(f"config.json: {name} must be a number of at least 0, got {shown(value)}")
    return float(value)
