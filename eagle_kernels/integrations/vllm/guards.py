"""What refuses, checks and connects: hooks on vLLM's configuration and on the start of its workers."""

from ..shared.hooks import fault_in_place
from ..shared.versions import installed_version, is_first, spans
from . import hooks
from .parts import KV_DTYPES, LATENTS, PARTS, SWITCHES, TREES, VARIABLE, asked_by, backend_name, has_backend, logger
from .plugin import rebind
from .trees import OPTION, preset, shape_of

METHODS = ("standard", "synthetic")  # of verification
TREE_METHODS = ("eagle", "eagle3", "mtp")  # of drafts
TREE_VERSIONS = "0.26."  # later ones draft and process logits in other places
LATENT_VERSIONS = "0.26."  # of later ones the attention over latents was not read


def refusals(config) -> list[str]:
    """Returns why the parts that this configuration asks for cannot serve it."""
    asked, found = asked_by(config), []
    if not asked:  # vLLM would draft a chain of all nodes
        return [] if shape_of(config) is None else [f"trees of drafts without --attention-backend {backend_name()}"]
    model, speculation, parallel = config.model_config, config.speculative_config, config.parallel_config

    def refuse(is_refused: bool, text: str) -> None:
        if is_refused:
            found.append(text)

    refuse(not config.use_v2_model_runner, "Model Runner V1 (vLLM chose it, or VLLM_USE_V2_MODEL_RUNNER=0 did)")
    refuse(parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size above 1")
    refuse(parallel.prefill_context_parallel_size > 1, "--prefill-context-parallel-size above 1")
    refuse(parallel.use_ubatching, "--enable-dbo and other overlap of small batches")
    refuse(model.is_encoder_decoder, "encoder-decoder models")
    if "verify" in asked:  # vLLM 0.26 has neither
        refuse(getattr(parallel, "enable_batch_sharded_sampling", None), "--enable-batch-sharded-sampling")
        refuse(getattr(config, "watermark_config", None) is not None, "--watermark-config")
    if "attention" in asked:
        found += latent_refusals(model) if model.use_mla else []
        refuse(model.is_hybrid or model.is_attention_free, "models with recurrent layers")
        refuse(model.rswa_window is not None, "reference sliding windows")
        dtype = config.cache_config.cache_dtype
        refuse(dtype not in KV_DTYPES, f"--kv-cache-dtype {dtype}; use one of {', '.join(KV_DTYPES)}")
    if speculation is not None:
        refuse(config.lora_config is not None, "LoRA with speculation")
        refuse(getattr(speculation, "enable_adaptive_verification", False), "enable_adaptive_verification")
    if speculation is not None and "verify" in asked:
        method, drafts = speculation.rejection_sample_method, speculation.draft_sample_method
        refuse(method not in METHODS, f"rejection_sample_method {method!r}; use {' or '.join(METHODS)}")
        refuse(drafts != "greedy", f"draft_sample_method {drafts!r}; use greedy")
    if shape_of(config) is not None:
        found += [f"with trees of drafts {reason}" for reason in tree_refusals(config, asked)]
    return found


def latent_refusals(model) -> list[str]:
    """Returns why attention over the latents of this model cannot be ours."""
    version = installed_version("vllm")
    reasons = {
        f"latent attention (MLA) in vLLM {version}; use {LATENT_VERSIONS}x": not version.startswith(LATENT_VERSIONS),
        "sparse attention over latents (DSA)": hasattr(model.hf_text_config, "index_topk"),
    }
    return [reason for reason, holds in reasons.items() if holds]


def tree_refusals(config, asked: frozenset[str]) -> list[str]:
    """Returns why drafts of this configuration cannot be trees."""
    model, speculation, parallel = config.model_config, config.speculative_config, config.parallel_config
    version, method = installed_version("vllm"), speculation.method
    backend, dtype = speculation.attention_backend, config.cache_config.cache_dtype
    if not version.startswith(TREE_VERSIONS):
        return [f"vLLM {version}; use {TREE_VERSIONS}x"]
    reasons = {
        f"some of the parts ({', '.join(sorted(asked))}); use all": asked != frozenset(PARTS),
        f"method {method!r}; use {', '.join(TREE_METHODS)}": method not in TREE_METHODS or speculation.use_gemma4_mtp(),
        f"attention_backend {getattr(backend, 'name', backend)} of drafts; use {backend_name()}": (
            getattr(backend, "name", backend) != backend_name()
        ),
        "num_speculative_tokens_per_batch_size": speculation.num_speculative_tokens_per_batch_size is not None,
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--data-parallel-size above 1": parallel.data_parallel_size > 1,
        "--kv-transfer-config": config.kv_transfer_config is not None,  # it may copy rows before they have moved
        f"--kv-cache-dtype {dtype}": dtype.startswith("fp8"),
        "sliding windows": model.get_sliding_window() is not None,
        "positions of several axes (M-RoPE)": bool(model.uses_mrope or model.uses_xdrope_dim),
    }
    return [reason for reason, holds in reasons.items() if holds]


def create_engine_config(original, arguments, *rest, **options):
    """Makes vLLM's configuration, and refuses before any weight is loaded what the plug-in does not support.

    Drafts get the target's attention backend, unless they name one.
    """
    speculation = arguments.speculative_config
    backend = arguments.attention_backend or arguments.attention_config.backend
    name = backend_name()
    is_ours = str(getattr(backend, "name", backend)).upper() == name  # vLLM takes names in any case
    if is_ours and speculation and not speculation.get("attention_backend"):
        arguments.speculative_config = speculation | {"attention_backend": name}
    _name_trees(arguments)
    config = original(arguments, *rest, **options)
    asked = asked_by(config)
    if has_backend(config):
        _check_backend(asked)
    reasons = refusals(config)
    if reasons:
        raise ValueError("eagle_kernels: the plug-in does not support " + "; nor ".join(reasons))
    return config


def _name_trees(arguments) -> None:
    """Names the tree, and the drafts that are its nodes, where trees are asked for and nothing is named."""
    options, speculation = arguments.additional_config, arguments.speculative_config
    if not speculation or not isinstance(options, dict) or options.get(OPTION) != {}:
        return
    shape = preset(arguments.max_num_seqs)
    arguments.additional_config = options | {OPTION: {"topk": shape.topk, "depth": shape.depth}}
    arguments.speculative_config = {"num_speculative_tokens": shape.num_nodes - 1} | speculation
    logger.info("eagle_kernels: trees of topk %d, depth %d", shape.topk, shape.depth)


def _check_backend(asked: frozenset[str]) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    name = backend_name()
    path = AttentionBackendEnum[name].get_path()
    if path != hooks.BACKEND_CLASS:
        raise ValueError(f"eagle_kernels: --attention-backend {name} is {path}, of another plug-in")
    if "attention" not in asked:
        raise ValueError(
            f"eagle_kernels: --attention-backend {name} needs the part attention, which {VARIABLE} leaves out"
        )


def init_device(original, wrapper):
    """Hooks what the parts replace in this worker, checks that it is in its place, and says what is on."""
    asked = asked_by(wrapper.vllm_config)
    if asked:
        shape, notes = shape_of(wrapper.vllm_config), {}
        if shape is not None:
            asked |= {TREES}
            notes[TREES] = f"topk {shape.topk}, depth {shape.depth}, {shape.num_nodes} nodes"
        if "attention" in asked and wrapper.vllm_config.model_config.use_mla:
            asked |= {LATENTS}
        wanted = [hook for hook in hooks.HOOKS if hook.part in asked]
        rebind(wanted)
        found = {hook: fault_in_place(hook, "VLLM_PLUGINS") for hook in (*hooks.GUARDS, *wanted)}
        faults = [f"{hook.part or 'guard'}: {fault}" for hook, fault in found.items() if fault is not None]
        if faults:
            raise RuntimeError(
                f"eagle_kernels: this vLLM is not as the plug-in expects: {'; '.join(faults)}; leave these parts out "
                f"by {VARIABLE}, or use a version in {spans(hooks.TESTED)}"
            )
        SWITCHES.turn_on(asked, attention=_who_reads() if "attention" in asked else "", **notes)
        version, (run, *_) = installed_version("vllm"), hooks.TESTED
        if not is_first(version, hooks.TESTED):
            logger.info("eagle_kernels: vLLM %s was checked, not run; vLLM %s was run", version, run)
    return original(wrapper)


def _who_reads() -> str:
    """Returns who reads prompts, in the words of the log."""
    from .attention import READS_MIXED

    return "steps with prompts are FlashAttention 3's" if READS_MIXED else "prompts are ours"


class _WithoutDrafts:
    """vLLM's input processor as it is without speculation."""

    speculative_config = None

    def __init__(self, processor):
        self._processor = processor

    def __getattr__(self, name: str):
        return getattr(self._processor, name)


def validate_params(original, processor, params, *rest, **options):
    """Lets requests with min-p or biases in, which vLLM refuses with drafts, since ours verifies them as it draws."""
    is_refused = getattr(params, "min_p", 0.0) or getattr(params, "logit_bias", None)
    is_alone = getattr(params, "trace_decode_token_ids", None) is None  # of what vLLM refuses with drafts
    if is_refused and is_alone and processor.speculative_config is not None:
        if "verify" in asked_by(processor.vllm_config):
            processor = _WithoutDrafts(processor)
    return original(processor, params, *rest, **options)
