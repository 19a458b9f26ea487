"""A stand-in for the few names of SGLang that our plug-in imports: tests without SGLang install it."""

import contextlib
import enum
import functools
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from op_tests.integrations import stand_in


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass
class KVWriteLoc:
    loc: torch.Tensor


@dataclass
class VerifyMask:
    buffer: torch.Tensor
    mode: object
    max_bs: int
    is_read: bool = True

    def fits(self, batch_size: int) -> bool:
        return batch_size <= self.max_bs


class TritonAttnBackend:
    """Only the fields that ours reads."""

    def __init__(self, model_runner, skip_prefill: bool = False):
        self.skip_prefill = skip_prefill
        self.req_to_token_pool, self.token_to_kv_pool = model_runner.req_to_token_pool, model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.page_size, self.device = model_runner.page_size, model_runner.device
        self.sliding_window_size = model_runner.sliding_window_size
        self.num_draft_tokens = model_runner.num_draft_tokens
        self.is_draft_runner = model_runner.is_draft_worker
        self.max_context_len = self.req_to_token.shape[1]


class Pool:
    """One layer's keys and values, and a write that scales as SGLang's does."""

    def __init__(self, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device):
        shape = (num_slots, num_kv_heads, head_dim)
        self.k, self.v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))

    def get_key_buffer(self, layer_id: int):
        return self.k

    def get_value_buffer(self, layer_id: int):
        return self.v

    def get_kv_buffer(self, layer_id: int):
        return self.k, self.v

    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        for buffer, new, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            if scale is not None and buffer.dtype != new.dtype:
                new = new / scale
            buffer[getattr(loc, "loc", loc)] = new.to(buffer.dtype)

    def attend(self, layer, query, seen, sinks=None, scales=(1.0, 1.0)) -> torch.Tensor:
        """Softmax attention in float64 of each row of query [T, Hq, D] over the slots that it sees."""
        k, v = (buffer.double() * scale for buffer, scale in zip((self.k, self.v), scales))
        return stand_in.attend(query, k, v, seen, scale=layer.scaling, cap=layer.logit_cap, sinks=sinks)


class Mode(enum.Enum):
    DECODE, EXTEND, TARGET_VERIFY, DRAFT_EXTEND_V2, IDLE = range(5)

    def is_decode_or_idle(self):
        return self in (Mode.DECODE, Mode.IDLE)

    def is_target_verify(self):
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return self is Mode.DRAFT_EXTEND_V2

    def is_idle(self):
        return self is Mode.IDLE


def layer(num_heads: int, num_kv_heads: int, head_dim: int, **changes) -> SimpleNamespace:
    """Returns the fields of a RadixAttention."""
    fields = {
        "tp_q_head_num": num_heads, "tp_k_head_num": num_kv_heads, "qk_head_dim": head_dim, "v_head_dim": head_dim,
        "scaling": head_dim**-0.5, "logit_cap": 0.0, "logit_capping_method": "tanh", "sliding_window_size": -1,
        "is_cross_attention": False, "attn_type": AttentionType.DECODER, "xai_temperature_len": -1, "k_scale": None,
        "v_scale": None, "layer_id": 0,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


MODULES = {
    "sglang.srt.layers.attention.triton_backend": {"TritonAttnBackend": TritonAttnBackend},
    "sglang.srt.layers.attention.verify_mask": {"VerifyMask": VerifyMask},
    "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
}


class HookType(enum.Enum):
    AROUND = "around"
    BEFORE = "before"


class Framework:
    """Modules with every function that the plug-in hooks, and SGLang's registry of hooks.

    functions: dotted paths, and the names of their parameters. calls: what the functions themselves were called with.
    """

    def __init__(self, functions: dict[str, tuple[str, ...]]):
        self.calls: list[tuple[str, tuple]] = []
        self.hooks: dict[str, list] = {}
        self.backends: dict[str, object] = {}
        self.choices: list[str] = ["triton"]
        self.modules: dict[str, dict] = {
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": SimpleNamespace(register=self._register),
                "HookType": HookType,
            },
            "sglang.srt.layers.attention.attention_registry": {
                "register_attention_backend": lambda name: lambda make: self.backends.setdefault(name, make)
            },
            "sglang.srt.server_args": {"add_attention_backend_choices": self.choices.extend},
            "sglang.srt.configs.hybrid_arch": {"mambaish_config": lambda model: model.recurrent},
        }
        for target, parameters in functions.items():
            *path, name = target.split(".")
            module = ".".join(part for part in path if not part[0].isupper())
            owner = self.modules.setdefault(module, {})
            if path[-1][0].isupper():
                owner = owner.setdefault(path[-1], type(path[-1], (), {}))
            function = self._make(target, name, parameters)
            setattr(owner, name, function) if isinstance(owner, type) else owner.update({name: function})

    def _make(self, target: str, name: str, parameters: tuple[str, ...]):
        """Makes a function that notes its arguments and returns its own path."""
        scope = {"note": lambda *arguments: self.calls.append((target, arguments)), "target": target}
        listed = ", ".join(parameters)
        exec(f"def {name}({listed}, more=None):\n    note({listed}, more)\n    return target", scope)
        return scope[name]

    def _register(self, target, hook, hook_type=None):
        self.hooks.setdefault(target, []).append((hook, hook_type))

    def apply_hooks(self) -> None:
        """Puts the hooks around their functions, as SGLang does after all plug-ins have registered theirs."""
        for target, registered in self.hooks.items():
            owner, name = self.owner(target)
            for hook, _ in registered:
                setattr(owner, name, _around(getattr(owner, name), hook))

    @staticmethod
    def owner(target: str):
        """Returns the class or module that holds a function, and the function's name."""
        path, _, name = target.rpartition(".")
        if path in sys.modules:
            return sys.modules[path], name
        module, _, owner = path.rpartition(".")
        return getattr(sys.modules[module], owner), name

    def function(self, target: str):
        """Returns what a caller in SGLang finds under this path."""
        owner, name = self.owner(target)
        return getattr(owner, name)


def _around(original, hook):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return wrapper


def installed(modules: dict[str, dict] = MODULES):
    """The stand-in under SGLang's names, and our backend imported on top of it."""
    return stand_in.installed(modules, "eagle_kernels.integrations.sglang.attention")


SPEC = {
    "speculative_use_rejection_sampling": False,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}


def imported_by_steps(monkeypatch) -> dict[str, types.ModuleType]:
    """Puts the functions that drafting, verification and sampling import when they run under SGLang's names."""
    group = SimpleNamespace(world_size=1)
    modules = {
        "sglang.srt.runtime_context": {
            "get_spec": lambda: SimpleNamespace(**SPEC),
            "get_parallel": lambda: SimpleNamespace(tp_group=group, attn_tp_group=group),
        },
        "sglang.srt.layers.layernorm": {"is_batch_invariant_mode_enabled": lambda: False},
        "sglang.srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
        "sglang.srt.layers.sampler": {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": False,
            "Sampler": SimpleNamespace(
                _preprocess_logits=lambda sampler, logits, info: logits,
                _sync_token_ids_across_tp=lambda sampler, tokens, info: None,
            ),
        },
        "sglang.srt.model_executor.forward_context": {
            "ForwardContext": SimpleNamespace,
            "forward_context": lambda context: contextlib.nullcontext(),
        },
        "sglang.srt.speculative.eagle_utils": {
            "per_step_draft_out_cache_loc": lambda locs, batch, topk, steps: (
                locs.view(batch, topk, steps).permute(2, 0, 1).reshape(steps, -1)
            ),
            "_verify_coins": lambda *, candidates, **_: (
                torch.full(candidates.shape, 0.35, device=candidates.device),
                torch.full(candidates.shape[:1], 0.6, device=candidates.device),
            ),
        },
        "sglang.srt.utils.async_probe": {"sanitize_nan_logits": lambda logits, msg: logits.nan_to_num_(-1e30)},
        "sglang.srt.speculative.spec_utils": {"SIMULATE_ACC_LEN": -1.0, "SIMULATE_ACC_TOKEN_MODE": "fixed"},
    }
    for name, module in stand_in.made(modules).items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return sys.modules
