"""Which parts of SGLang are replaced: told by --attention-backend and by EAGLE_KERNELS_SGLANG."""

import logging
import os

from ..shared.parts import Parts

logger = logging.getLogger(__name__)

NAME = "eagle_kernels"  # of the attention backend
VARIABLE = "EAGLE_KERNELS_SGLANG"
RULE = "EAGLE_KERNELS_SGLANG_VERIFY"
PRESET = "EAGLE_KERNELS_SGLANG_PRESET"
# what a preset gives for --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens
PRESETS = {"naive": (1, 1, 2)}
# the preset as a --speculative-algorithm: the name that SGLang's pull request #7017 gave it
ALGORITHM = "NAIVE_EAGLE"
PARTS = {
    "attention": "decode, tree verification and draft levels",
    "verify": "greedy and sampled verification of trees",
    "draft": "candidates of each draft level",
    "kv": "slots of drafts and of accepted tokens",
    "nn": "norms and activation",
}
# what the variable of the rule adds to the part verify
MATCH = {"match": "one seed, one text: sampling and verification by the seeds of requests"}

SWITCHES = Parts(VARIABLE, PARTS, logger, MATCH)
turn_on, is_on, note_use, unused = SWITCHES.turn_on, SWITCHES.is_on, SWITCHES.note_use, SWITCHES.unused
_is_naive = False


def asked_by_variable() -> frozenset[str] | None:
    """Returns the parts that EAGLE_KERNELS_SGLANG names, none for `none`, and None where it is not set."""
    return SWITCHES.named(os.environ.get(VARIABLE, ""))


def is_matching() -> bool:
    """Tells whether EAGLE_KERNELS_SGLANG_VERIFY asks for sample and match, in place of SGLang's rule of coins."""
    rule = os.environ.get(RULE, "").strip() or "coins"
    if rule not in ("coins", "match"):
        raise ValueError(f"eagle_kernels: {RULE} must be coins or match; got {rule!r}")
    return rule == "match"


def preset() -> tuple[int, int, int] | None:
    """Returns the steps, topk and nodes of the preset that the variable or the algorithm asks for; None for none."""
    name = os.environ.get(PRESET, "").strip()
    if name and name not in PRESETS:
        raise ValueError(f"eagle_kernels: {PRESET} must be {' or '.join(PRESETS)}; got {name!r}")
    return PRESETS.get(name or ("naive" if _is_naive else ""))


def preset_asked_by() -> str:
    """Returns what asks for the preset, as errors name it."""
    return f"--speculative-algorithm {ALGORITHM}" if _is_naive else PRESET


def note_algorithm(is_naive: bool) -> None:
    """Notes whether the server arguments that are being resolved in this process ask for NAIVE_EAGLE."""
    global _is_naive
    _is_naive = is_naive


def asked_by(server_args) -> frozenset[str]:
    """Returns the parts that these resolved server arguments and the environment ask for.

    The attention backend asks for all parts; the variable, where it is set, decides alone. `match` comes with `verify`.
    """
    asked = asked_by_variable()
    if asked is None:
        asked = frozenset(PARTS) if NAME in backends(server_args).values() else frozenset()
    return asked | (frozenset(MATCH) if is_matching() and "verify" in asked else frozenset())


def resolved(server_args):
    """Returns the arguments as SGLang resolved them, which newer versions do not write back into the record."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def model_config(server_args):
    """Returns SGLang's description of the model; newer versions have a function for it."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def backends(server_args) -> dict[str, str | None]:
    """Returns the attention backends of prefill, decode and draft."""
    server_args = resolved(server_args)
    base = server_args.attention_backend
    decode = server_args.decode_attention_backend or base
    draft = server_args.speculative_draft_attention_backend or decode
    chosen = {"prefill": server_args.prefill_attention_backend or base, "decode": decode}
    return chosen | ({"draft": draft} if server_args.speculative_algorithm else {})


def has_latents(model) -> bool:
    """Tells whether SGLang reads a model's attention as one over latents (MLA)."""
    return getattr(getattr(model, "attention_arch", None), "name", "") == "MLA"
