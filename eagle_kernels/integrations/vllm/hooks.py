"""Which functions of vLLM the plug-in hooks. Importing this file imports nothing of vLLM."""

from ..shared.hooks import hook_of

# The first and the last release of each range. The first of all was run; the sources of the others hold the contract.
TESTED = ("0.26.0", "0.27.1", "0.31.0", "0.33.0")
# of the attention backend
BACKEND_CLASS = f"{__package__}.attention.EagleKernelsBackend"

_hook = hook_of(__package__)
_GPU, _SCHEDULER = "vllm.v1.worker.gpu.", "vllm.v1.core.sched.scheduler.Scheduler."
# Guards refuse, check and connect whatever is asked for, also where no worker is.
GUARDS = (
    _hook("", "vllm.engine.arg_utils.EngineArgs.create_engine_config", "guards.create_engine_config", ("self",)),
    _hook("", "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device", "guards.init_device", ("self",)),
    _hook("", "vllm.v1.engine.input_processor.InputProcessor._validate_params", "guards.validate_params",
          ("self", "params")),
    _hook("", _SCHEDULER + "update_draft_token_ids", "grammars.update_draft_token_ids", ("self", "draft_token_ids")),
    _hook("", _SCHEDULER + "update_draft_token_ids_in_output", "grammars.update_draft_token_ids_in_output",
          ("self", "draft_token_ids", "scheduler_output")),
    _hook("", "vllm.v1.structured_output.StructuredOutputManager.grammar_bitmask", "grammars.grammar_bitmask",
          ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens")),
)  # fmt: skip
# These are hooked in worker processes alone, which import their modules anyway.
HOOKS = (
    _hook("verify", _GPU + "model_runner.init_model_state", "model_state.init_model_state",
          ("vllm_config", "model", "encoder_cache", "device")),
    _hook("verify", "vllm.v1.worker.gpu_worker.warmup_kernels", "sampling.warmup_kernels",
          ("model_runner", "worker_execute_model", "worker_sample_tokens")),
    _hook("latents", "vllm.v1.attention.selector._cached_get_attn_backend", "selection.choose_backend",
          ("backend", "attn_selector_config")),
    _hook("latents", "vllm.model_executor.layers.attention.mla_attention.MLAAttention.forward_impl",
          "latent.forward_impl", ("self", "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output")),
    _hook("trees", _GPU + "structured_outputs.StructuredOutputsWorker.apply_grammar_bitmask",
          "grammars.apply_grammar_bitmask",
          ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask")),
    _hook("trees", _GPU + "spec_decode.utils.DraftTokensHandler.set_draft_tokens", "grammars.set_draft_tokens",
          ("self", "input_batch", "draft_tokens")),
    _hook("trees", _GPU + "model_runner.init_speculator", "tree_drafting.init_speculator", ("vllm_config", "device")),
    _hook("draft", _GPU + "spec_decode.speculator.DraftModelSpeculator.sample_draft", "drafting.sample_draft",
          ("self", "hidden_states")),
)  # fmt: skip
