"""The options of `train-head`, and the config.json of the head that it trains."""

import argparse
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from eagle_kernels.engine.models.checkpoint import read_config
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.draft_head import usual_aux_layers
from eagle_kernels.engine.models.end_tokens import read_eos_token_ids
from eagle_kernels.engine.models.head_formats import LAYER_IDS
from eagle_kernels.runtime.values import is_integer

MOST_WINDOW, MOST_DRAFT_VOCAB = 2048, 32000  # limits of the defaults


def _option(default: Any, text: str, *, kind: type = int, low: float | None = 1, decides: bool = True) -> Any:
    """Declares a field; `low` is its least value, and `decides` tells whether it changes the trained weights."""
    return field(default=default, metadata={"help": text, "kind": kind, "low": low, "decides": decides})


@dataclass(frozen=True)
class HeadOptions:
    """The options of `train-head`, named as on the command line; None: chosen to fit target and data."""

    steps: int | None = _option(None, "optimizer steps (default: those of --epochs)")
    epochs: int = _option(2, "passes over the data")
    batch_size: int = _option(2, "windows computed together")
    accumulate: int = _option(4, "batches in an optimizer step, which then has batch-size * accumulate windows")
    learning_rate: float = _option(
        1e-4, "peak learning rate, reached by a linear warm-up; then falls to 0 along a cosine", kind=float, low=0
    )
    weight_decay: float = _option(0.0, "weight decay of matrices", kind=float, low=0)
    clip_norm: float = _option(0.5, "largest norm of the gradient", kind=float, low=0)
    window: int | None = _option(
        None, f"most tokens of an example (default: {MOST_WINDOW}, or the target's limit)", low=4
    )
    depths: int = _option(5, "draft steps that are unrolled in training")
    draft_vocab_size: int | None = _option(
        None, f"how many of the most frequent tokens the head can draft (default: {MOST_DRAFT_VOCAB}, or all)", low=9
    )
    intermediate_size: int | None = _option(None, "width of the head's MLP (default: the target's)")
    aux_layers: tuple[int, ...] | None = _option(
        None, "hidden_states indices that the head reads, such as 2,16,29 (default: 2, n/2, n-3)", kind=tuple, low=None
    )
    regenerate: bool = _option(False, "learn from the target's answers to the prompts of the data", kind=bool, low=None)
    answer_tokens: int | None = _option(None, "most tokens of a regenerated answer (default: half a window)")
    answer_temperature: float = _option(0.0, "temperature of regenerated answers; 0: greedy", kind=float, low=0)
    held_out: float = _option(0.05, "share of the examples kept for validation", kind=float, low=0)
    seed: int = _option(0, "seed of weights, order and answers", low=0)
    validate_every: int | None = _option(None, "steps between validations (default: at the end only)", decides=False)
    validation_prompts: int = _option(16, "held-out prompts that a validation decodes", decides=False)
    validation_tokens: int = _option(64, "most new tokens for each of these prompts", decides=False)
    save_every: int = _option(250, "steps between checkpoints", decides=False)
    report_every: int = _option(50, "steps between lines of progress", decides=False)
    time_budget: float | None = _option(
        None, "seconds until it stops with a checkpoint; the same command continues", kind=float, low=0, decides=False
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value, low, kind = getattr(self, item.name), item.metadata["low"], item.metadata["kind"]
            if value is None and item.default is None:
                continue
            is_kind = isinstance(value, kind) and (kind is not int or is_integer(value))
            is_kind = is_kind or (kind is float and is_integer(value))
            self._require(is_kind, item.name, f"be of type {kind.__name__}")
            # a NaN is not at least anything
            self._require(low is None or value >= low, item.name, f"be at least {low}")
        self._require(self.held_out < 1, "held_out", "be below 1")
        for name in ("learning_rate", "clip_norm"):
            self._require(0 < getattr(self, name) < float("inf"), name, "be above 0 and finite")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        require(holds, name.replace("_", "-"), rule, repr(getattr(self, name)))

    def deciding(self) -> dict[str, Any]:
        """Returns the options that must be the same for a checkpoint to be continued."""
        values = asdict(self)
        chosen = {item.name: values[item.name] for item in fields(self) if item.metadata["decides"]}
        return chosen | {"aux_layers": self.aux_layers and list(self.aux_layers)}


def require(holds: bool, option: str, rule: str, value: Any) -> None:
    """Raises the ValueError of an option that breaks its rule."""
    if not holds:
        raise ValueError(f"train-head: --{option} must {rule}, got {value}")


def settle(options: HeadOptions, target: Decoder) -> tuple[HeadOptions, tuple[int, ...]]:
    """Returns the options with the target's limits in place of None, and the auxiliary layers."""
    positions = target.max_length
    window = options.window or min(MOST_WINDOW, positions)
    require(window <= positions, "window", f"be at most the {positions} positions of the target", window)
    answer_tokens = window // 2 if options.answer_tokens is None else options.answer_tokens
    require(answer_tokens < window, "answer-tokens", f"be below --window {window}", answer_tokens)
    validation = options.validation_tokens
    rule = f"be below the {positions} positions of the target"
    require(validation < positions, "validation-tokens", rule, validation)
    vocabulary = options.draft_vocab_size or min(MOST_DRAFT_VOCAB, target.vocab_size)
    rule = f"be at most the {target.vocab_size} tokens of the target"
    require(vocabulary <= target.vocab_size, "draft-vocab-size", rule, vocabulary)
    aux_layers, is_official = default_aux_layers(target.kv_shape.num_layers)
    if options.aux_layers is not None:
        aux_layers = options.aux_layers
    elif not is_official:
        told = f"the usual auxiliary layers do not ascend in {target.kv_shape.num_layers} layers: reads {aux_layers}"
        print(told, file=sys.stderr, flush=True)
    return replace(options, window=window, answer_tokens=answer_tokens, draft_vocab_size=vocabulary), aux_layers


def default_aux_layers(num_layers: int) -> tuple[tuple[int, ...], bool]:
    """Returns hidden_states indices of the streams to read, and whether they are the official choice.

    Those do not ascend in targets of fewer than 7 layers; there a low, a middle and a high stream are taken.
    """
    official = usual_aux_layers(num_layers)
    if official[0] < official[1] < official[2]:
        return official, True
    low = 1 if num_layers > 2 else 0
    high = num_layers - 1 if num_layers > 3 else num_layers
    return tuple(sorted({low, (low + high) // 2, high})), False


def head_config(
    target_folder: Path, target: Decoder, options: HeadOptions, aux_layers: tuple[int, ...], draft_vocab_size: int
) -> dict[str, Any]:
    """Returns config.json of a head in the format of SpecForge and SGLang, with the target's sizes and RoPE."""
    config = target.config
    theirs = read_config(target_folder)
    rope_keys = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
    rope = {name: theirs[name] for name in rope_keys if theirs.get(name) is not None}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_model_type": theirs.get("model_type") or "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": options.intermediate_size or config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.rope_theta,
        **rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": theirs.get("bos_token_id"),
        "eos_token_id": list(read_eos_token_ids(target_folder)) or None,
        "torch_dtype": "bfloat16",
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "num_aux_hidden_states": len(aux_layers),
        "eagle_config": {
            # names layers by their outputs: one below the hidden_states indices
            LAYER_IDS: [layer - 1 for layer in aux_layers],
            "use_aux_hidden_state": True,
        },
    }


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds an argument for every field of `HeadOptions`, which checks the values."""
    for item in fields(HeadOptions):
        name, kind, text = "--" + item.name.replace("_", "-"), item.metadata["kind"], item.metadata["help"]
        if kind is bool:
            command.add_argument(name, action="store_true", help=text)
            continue
        default = "" if item.default is None else f" (default: {item.default})"
        command.add_argument(
            name, type=_layer_ids if kind is tuple else kind, default=item.default, help=text + default
        )


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be layer ids with commas between them, got {text!r}") from None


def read_options(arguments: argparse.Namespace) -> HeadOptions:
    """Returns the options that the parsed command line sets."""
    return HeadOptions(**{item.name: getattr(arguments, item.name) for item in fields(HeadOptions)})
