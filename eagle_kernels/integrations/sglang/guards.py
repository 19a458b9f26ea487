"""What refuses, checks and connects: hooks on SGLang's server arguments, schedulers and draft backends."""

import os

from ...ops.attention.shared.drafts import MAX_DRAFT_KEYS, MAX_QUERY
from ...ops.latent.shared.latents import MAX_LATENT_DIM, MAX_ROPE_DIM
from ...ops.tree.shared.levels import MAX_TOPK
from ...ops.tree.shared.tree_contract import MAX_CANDIDATES
from ...runtime.language import is_interpreting
from ..shared.hooks import fault_in_place
from . import hooks, parts, prompts
from .contract import PAGE_TREES
from .parts import ALGORITHM, NAME, RULE, VARIABLE, backends, has_latents, model_config, preset, resolved

SPECULATIVE = (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
KV_DTYPES = ("auto", "bf16", "bfloat16", "float16", "fp8_e4m3")
# models that give attention between image tokens in fields of SGLang's own Triton backend, and drafts with convolutions
MODELS = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "InklingForConditionalGeneration")


def refusals(server_args) -> list[str]:
    """Returns why the attention backend cannot serve these resolved arguments, with what works instead."""
    chosen = backends(server_args)
    if NAME not in chosen.values():
        return []
    model = model_config(server_args)
    found = prompts.refusals(server_args)
    server_args = resolved(server_args)

    def refuse(is_refused: bool, text: str) -> None:
        if is_refused:
            found.append(text)

    others = {mode: name for mode, name in chosen.items() if name != NAME and mode != "prefill"}
    refuse(bool(others), f"another backend for {' and '.join(others)}; {NAME} leaves only prompts to others")
    has_gpu = server_args.device in ("cuda", "hip") or is_interpreting()
    refuse(not has_gpu, f"device {server_args.device!r}; it needs a GPU")
    if has_latents(model):
        found += latent_refusals(server_args, model)
    refuse(bool(getattr(model, "is_encoder_decoder", False)), "encoder-decoder models")
    for name in model.hf_config.architectures or ():
        refuse(name in MODELS, f"the model {name}, which needs SGLang's own Triton backend")
    refuse(_is_recurrent(model), "models with recurrent layers (Mamba, linear attention)")
    dtype = server_args.kv_cache_dtype
    refuse(dtype not in KV_DTYPES, f"--kv-cache-dtype {dtype}; use one of {', '.join(KV_DTYPES)}")
    is_hybrid = bool(getattr(model, "is_hybrid_swa", False)) and not server_args.disable_hybrid_swa_memory
    refuse(is_hybrid, "a separate KV pool for sliding windows; add --disable-hybrid-swa-memory")
    for name, text in (
        ("enable_deterministic_inference", "--enable-deterministic-inference"),
        ("enable_two_batch_overlap", "--enable-two-batch-overlap"),
        ("enable_pdmux", "--enable-pdmux"),
        ("enable_unified_memory", "--enable-unified-memory"),
        ("speculative_adaptive", "--speculative-adaptive"),
        ("enable_multi_layer_eagle", "--enable-multi-layer-eagle"),
    ):
        refuse(bool(getattr(server_args, name, False)), text)
    refuse(getattr(server_args, "dcp_size", 1) > 1, "decode context parallelism (--dcp-size above 1)")
    refuse(getattr(server_args, "attn_cp_size", 1) > 1, "context parallelism (--attn-cp-size above 1)")
    refuse(os.environ.get("SGLANG_USE_HND_KVCACHE", "0").lower() in ("1", "true"), "SGLANG_USE_HND_KVCACHE=1")
    algorithm = server_args.speculative_algorithm
    refuse(algorithm not in SPECULATIVE, f"--speculative-algorithm {algorithm}; use EAGLE, EAGLE3, NEXTN or STANDALONE")
    if algorithm in SPECULATIVE[1:]:
        topk, steps = server_args.speculative_eagle_topk or 1, server_args.speculative_num_steps or 1
        nodes = server_args.speculative_num_draft_tokens or 1
        refuse(nodes > MAX_QUERY, f"trees of {nodes} nodes; at most {MAX_QUERY}")
        refuse(topk > MAX_TOPK, f"--speculative-eagle-topk {topk}; at most {MAX_TOPK}")
        refuse(topk * steps > MAX_DRAFT_KEYS, f"topk * steps = {topk * steps}; at most {MAX_DRAFT_KEYS}")
        candidates = topk + (steps - 1) * topk**2
        refuse(
            candidates > MAX_CANDIDATES, f"{candidates} drafts, topk + (steps - 1) * topk^2; at most {MAX_CANDIDATES}"
        )
        refuse(bool(server_args.enable_dp_attention), "--enable-dp-attention with speculation")
    return found


def latent_refusals(server_args, model) -> list[str]:
    """Returns why models with latent attention cannot be served with these resolved arguments."""
    dtype, reader = server_args.kv_cache_dtype, backends(server_args)["prefill"]
    config = getattr(model, "hf_text_config", model.hf_config)
    reasons = {
        "sparse attention over latents (DSA)": hasattr(config, "index_topk"),
        f"--kv-cache-dtype {dtype} with latent attention (MLA)": dtype.startswith("fp8"),
        f"--prefill-attention-backend {reader} with latent attention (MLA)": reader != NAME,
        f"latents of {model.kv_lora_rank} elements; at most {MAX_LATENT_DIM}": model.kv_lora_rank > MAX_LATENT_DIM,
        f"keys of {model.qk_rope_head_dim} elements beside latents; at most {MAX_ROPE_DIM}": (
            model.qk_rope_head_dim > MAX_ROPE_DIM
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def refusals_to_match(server_args) -> list[str]:
    """Returns why sample and match cannot serve these resolved arguments."""
    server_args = resolved(server_args)
    found = [
        text
        for name, text in (
            ("speculative_use_rejection_sampling", "--speculative-use-rejection-sampling"),
            ("enable_deterministic_inference", "--enable-deterministic-inference"),
            ("enable_dp_attention", "--enable-dp-attention"),
            ("enable_custom_logit_processor", "--enable-custom-logit-processor"),  # verification passes it by
        )
        if getattr(server_args, name, False)
    ]
    algorithm = server_args.speculative_algorithm
    if algorithm not in SPECULATIVE:
        found.append(f"--speculative-algorithm {algorithm}; use EAGLE, EAGLE3, NEXTN or STANDALONE")
    mode = getattr(server_args, "disaggregation_mode", "null")
    return found + ([] if mode == "null" else [f"--disaggregation-mode {mode}"])


def _is_recurrent(model) -> bool:
    """Tells whether a model has layers with a state in the place of keys and values."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


def check_server_args(original, server_args):
    """Refuses before any weight is loaded what the plug-in does not support."""
    asked = parts.asked_by(server_args)
    if NAME in backends(server_args).values() and "attention" not in asked:
        raise ValueError(
            f"eagle_kernels: --attention-backend {NAME} needs the part attention, which {VARIABLE} leaves out"
        )
    if parts.is_matching() and "match" not in asked:
        told = f"eagle_kernels: {RULE}=match needs the part verify: {VARIABLE}=verify, or --attention-backend {NAME}"
        if asked:
            raise ValueError(told)
        parts.logger.warning("%s; SGLang samples by its own rule", told)
    reasons = refusals(server_args)
    if reasons:
        raise ValueError(f"eagle_kernels: the attention backend {NAME} does not support " + "; nor ".join(reasons))
    reasons = refusals_to_match(server_args) if "match" in asked else []
    if reasons:
        raise ValueError(f"eagle_kernels: {RULE}=match does not support " + "; nor ".join(reasons))
    reason = refusal_of_preset(server_args)
    if reason is not None:
        raise ValueError(f"eagle_kernels: {parts.preset_asked_by()} {reason}")
    check_hooks(asked)
    return original(server_args)


def refusal_of_preset(server_args) -> str | None:
    """Says why these resolved arguments are not what the preset gives; None where they are, or without one."""
    wanted, server_args = preset(), resolved(server_args)
    if wanted is None:
        return None
    if server_args.speculative_algorithm not in SPECULATIVE[1:]:
        return f"needs --speculative-algorithm {', '.join(SPECULATIVE[1:-1])} or {SPECULATIVE[-1]}"
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    found = tuple(getattr(server_args, name) for name in names)
    if found == wanted:
        return None
    given = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in zip(names, found))
    return f"gives steps, topk and draft tokens {wanted}, and the server has {given}; leave out one of the two"


def know_algorithm(original, cls, name):
    """Takes NAIVE_EAGLE for EAGLE, which it is with one draft, where SGLang does not know the name."""
    try:
        return original(cls, name)
    except ValueError:
        if name.upper() != ALGORITHM:
            raise
        return original(cls, "EAGLE")


def resolve_algorithm(original, speculative_algorithm, speculative_draft_model_path, *rest, **options):
    """Resolves NAIVE_EAGLE to EAGLE, or to EAGLE3 for a head of that kind, and asks for its preset.
    The name is SGLang's where SGLang resolves it itself, or has an algorithm of that name."""
    parts.note_algorithm(False)
    found = original(speculative_algorithm, speculative_draft_model_path, *rest, **options)
    if (found or "").upper() != ALGORITHM:
        return found
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    if SpeculativeAlgorithm.from_string(ALGORITHM) != SpeculativeAlgorithm.from_string("EAGLE"):
        return found
    algorithm = "EAGLE3" if _is_eagle3(speculative_draft_model_path, *rest, **options) else "EAGLE"
    parts.note_algorithm(True)
    parts.logger.info("eagle_kernels: %s is %s with one draft in each step", ALGORITHM, algorithm)
    return original(algorithm, speculative_draft_model_path, *rest, **options)


def _is_eagle3(draft: str | None, trust_remote_code: bool = False, kwargs: dict | None = None) -> bool:
    """Tells whether a draft's config names an EAGLE-3 head."""
    if not draft:
        return False
    from sglang.srt.utils.hf_transformers.config import get_config

    config = get_config(draft, trust_remote_code=trust_remote_code, **(kwargs or {}))
    return any("eagle3" in name.lower() for name in getattr(config, "architectures", None) or ())


def choose_drafts(original, server_args, model_arch):
    """Gives the preset's steps, topk and nodes where the user named none; SGLang's own without a preset."""
    return preset() or original(server_args, model_arch)


def check_hooks(asked: frozenset[str]) -> None:
    """Raises where a function that is hooked for these parts is not as expected, or where ours is not in its place."""
    wanted = [hook for hook in (*hooks.GUARDS, *hooks.HOOKS) if asked and hook.part in ("", *asked)]
    found = ((hook.part or "guard", fault_in_place(hook, "SGLANG_PLUGINS")) for hook in wanted)
    faults = [f"{part}: {fault}" for part, fault in found if fault is not None]
    if faults:
        raise RuntimeError(
            "eagle_kernels: this SGLang is not as the plug-in expects: " + "; ".join(faults)
            + f"; leave these parts out by {VARIABLE}, or use a version in {hooks.TESTED[0]}..{hooks.TESTED[-1]}"
        )  # fmt: skip


def start_scheduler(original, scheduler, server_args, *rest, **options):
    """Checks in every scheduler process that what was asked for is in place, and says what is on."""
    asked = parts.asked_by(server_args)
    check_hooks(asked)
    is_ours = backends(server_args)["decode"] == NAME
    parts.turn_on(asked, attention=prompts.who_reads(server_args) if is_ours else "")
    return original(scheduler, server_args, *rest, **options)


def create_backend(model_runner):
    """Makes the attention backend; SGLang's registry calls this by name."""
    check_hooks(parts.asked_by(model_runner.server_args))
    from .attention import EagleKernelsAttnBackend

    parts.note_use("attention")
    return EagleKernelsAttnBackend(model_runner)


def _is_drafting_with_ours(factory) -> bool:
    """Tells whether the attention backend of a draft model is ours."""
    chosen = factory.draft_attn_backend or backends(factory.draft_model_runner.server_args)["decode"]
    return chosen == NAME


def create_decode_backend(original, factory):
    """Makes the attention of the draft's levels, where ours is the draft's backend."""
    if not _is_drafting_with_ours(factory):
        return original(factory)
    if factory.speculative_num_steps <= 1:
        return None
    from .attention import DraftLevels

    return DraftLevels(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_draft_extend_backend(original, factory):
    """Makes the attention of the draft's extend, where ours is the draft's backend."""
    if not _is_drafting_with_ours(factory):
        return original(factory)
    from .attention import EagleKernelsAttnBackend

    backend = EagleKernelsAttnBackend(factory.draft_model_runner)
    # SGLang puts it in the place of the draft's backend of two, whose half for prompts it keeps
    backend.reader = getattr(factory.draft_model_runner.attn_backend, "prefill_backend", None)
    return backend


def handle_eagle_family(original, server_args, *rest, **options):
    """Lets trees have pages larger than one token with our backend: SGLang's last check knows its own backends only."""
    try:
        return original(server_args, *rest, **options)
    except ValueError as error:
        if PAGE_TREES not in str(error) or repr(NAME) not in str(error):
            raise
        return None


def run_eagle_verify(original, batch, *rest, **options):
    """Checks after the first verification that no part which is on was passed by."""
    # several layers of drafts, and verification without any, have no step that ours is part of
    is_drafted = options.get("finalize_tree_path", True) and options.get("num_steps", 1) > 0
    is_idle = batch.forward_mode.is_idle()
    result = original(batch, *rest, **options)
    missed = set() if is_idle else parts.unused({"attention", "verify"} | ({"draft"} if is_drafted else set()))
    if missed:
        raise RuntimeError(
            f"eagle_kernels: {', '.join(sorted(missed))} did not run in SGLang's verification step, although it is on; "
            f"leave it out by {VARIABLE}"
        )
    return result
