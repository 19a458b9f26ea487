"""What the plug-in relies on in SGLang beside the functions that it hooks, as data.

This table and that of `hooks.py` are held against sources, without importing them: the contract test does so for
released versions, `python -m eagle_kernels env` for the one that is installed. What is read in an SGLang of one
version only is not in here, but its alternatives are (`either`).
"""

from ..shared.contract import call, contains, either, last_refusal, listed, names, value

GROUP = "sglang.srt.plugins"  # of entry points; setup.py names it too
# SGLang's refusal of trees with pages larger than a token, of which our backend has no need
PAGE_TREES = "_topk > 1 with page_size > 1 is only supported on"
# what chooses an attention backend where nobody names one, in older versions
OWN_DEFAULT = "_get_default_attn_backend"

_SRT = "sglang.srt."
_DEEPSEEK = _SRT + "models.deepseek_common."
_SPEC = _SRT + "speculative."
_ATTENTION = _SRT + "layers.attention."
_BATCH = _SRT + "model_executor.forward_batch_info."
_ARGUMENTS = _SRT + "server_args.ServerArgs"
_BACKEND = _ATTENTION + "triton_backend.TritonAttnBackend"
_POOL = _SRT + "mem_cache.memory_pool."

CONTRACT = (
    # plugin.py
    value(_SRT + "plugins.GENERAL_PLUGINS_GROUP", GROUP),
    call(_SRT + "plugins.hook_registry.HookRegistry.register", ("cls", "target", "hook", "hook_type")),
    names(_SRT + "plugins.hook_registry.HookType", ("AROUND",)),
    call(_ATTENTION + "attention_registry.register_attention_backend", ("name",)),
    names(_SRT + "server_args", ("add_attention_backend_choices",)),
    # parts.py, guards.py, drafting.py, sampling.py
    names(_ARGUMENTS, (
        "attention_backend", "prefill_attention_backend", "decode_attention_backend",
        "speculative_draft_attention_backend", "speculative_algorithm", "device", "kv_cache_dtype",
        "disable_hybrid_swa_memory", "enable_deterministic_inference", "enable_two_batch_overlap", "enable_pdmux",
        "enable_unified_memory", "speculative_adaptive", "enable_multi_layer_eagle", "dcp_size", "attn_cp_size",
        "enable_dp_attention", "speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens",
        "speculative_use_rejection_sampling", "disaggregation_mode", "enable_custom_logit_processor",
        "speculative_attention_mode",
    ), members=_SRT + "server_args._INPUT_NAMESPACES"),
    # where resolved arguments are not written back into the record, a view shows them
    either(_SRT + "arg_groups.overrides.materialize_declarations", _SRT + "arg_groups.overrides.resolving_view"),
    either(_ARGUMENTS + ".get_model_config", _SRT + "arg_groups.overrides.model_config_of"),
    names(_SRT + "configs.model_config.ModelConfig", (
        "attention_arch", "is_encoder_decoder", "is_hybrid_swa", "hf_config", "model_is_mrope", "head_dim", "dtype",
        "kv_lora_rank", "qk_rope_head_dim",
    )),
    # latents.py
    names(_SRT + "mem_cache.memory_pool.MLATokenToKVPool",
          ("get_kv_buffer", "kv_buffer", "kv_lora_rank", "move_kv_cache", "set_kv_buffer")),
    contains(_SRT + "mem_cache.memory_pool.MLATokenToKVPool.move_kv_cache",  # as cache_locs.py does it in one launch
             "for kv_cache in self.kv_buffer:\n        kv_cache[tgt_loc_flat] = kv_cache[src_loc_flat]"),
    call(_SRT + "mem_cache.memory_pool.MLATokenToKVPool.set_kv_buffer",
         ("self", "layer", "loc_info", "cache_k", "cache_v")),
    contains(_DEEPSEEK + "attention_backend_handler.AttentionBackendRegistry.get_handler",
             "cls._handlers.get(backend_name, cls._handlers.get('triton'))"),
    contains(_DEEPSEEK + "attention_backend_handler.handle_attention_triton",
             "sum(forward_batch.extend_prefix_lens_cpu) == 0:\n        return AttnForwardMethod.MHA"),
    contains(_DEEPSEEK + "attention_forward_methods.forward_mla.DeepseekMLAForwardMixin.forward_absorb_core",
             "k = torch.cat([k_nope, k_pe], dim=-1)"),
    names(_SRT + "layers.layernorm.RMSNorm",
          ("weight", "variance_epsilon", "variance_size_override", "cast_x_before_out_mul")),
    names(_SRT + "layers.layernorm", ("is_batch_invariant_mode_enabled",)),
    call(_SRT + "configs.hybrid_arch.mambaish_config", ("model_config",)),
    call(_SRT + "utils.async_probe.sanitize_nan_logits", ("logits", "msg")),
    names(_SRT + "configs.model_config.AttentionArch", ("MLA",)),
    names(_SPEC + "draft_utils.DraftBackendFactory",
          ("draft_model_runner", "draft_attn_backend", "topk", "speculative_num_steps")),
    names(_SPEC + "spec_info.SpeculativeAlgorithm", ("EAGLE", "EAGLE3")),
    call(_SRT + "utils.hf_transformers.config.get_config", ("model",), ("trust_remote_code",)),
    last_refusal(_SRT + "arg_groups.speculative_hook._handle_eagle_family",
                 (PAGE_TREES, "{view.attention_backend!r}"), "view.attention_backend not in _PAGE_TREE_SPEC_BACKENDS"),
    # prompts.py
    either(f"{_ARGUMENTS}.{OWN_DEFAULT}", _SRT + "arg_groups.model_override_base.get_default_attn_backend"),
    names(_ATTENTION + "hybrid_attn_backend.HybridAttnBackend", ("prefill_backend", "decode_backend", "verify_mask")),
    # attention.py
    call(_BACKEND, ("model_runner", "skip_prefill")),
    names(_BACKEND, (
        "req_to_token_pool", "token_to_kv_pool", "req_to_token", "page_size", "device", "sliding_window_size",
        "num_draft_tokens", "is_draft_runner", "max_context_len", "skip_prefill",  # fields that ours reads
        "init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph",
        "init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "verify_mask", "forward_decode",
        "forward_extend", "needs_cpu_seq_lens",
    )),
    call(_BACKEND + ".init_forward_metadata_out_graph", ("self", "forward_batch", "in_capture")),
    call(_ATTENTION + "base_attn_backend.AttentionBackend.init_forward_metadata_in_graph", ("self", "forward_batch")),
    call(_BACKEND + ".init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")),
    call(_BACKEND + ".forward_decode", ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks")),
    call(_BACKEND + ".forward_extend", ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks")),
    names(_ATTENTION + "triton_backend.TritonMultiStepDraftBackend", (  # that DraftLevels stands in for
        "init_forward_metadata", "init_cuda_graph_state", "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph", "attn_backends", "needs_cpu_seq_lens", "topk", "speculative_num_steps",
        "device", "max_context_len", "page_size",
    )),
    names(_ATTENTION + "verify_mask.VerifyMask", ("buffer", "mode", "max_bs", "is_read", "fits")),
    call(_ATTENTION + "verify_mask.VerifyMask", ("buffer", "mode", "max_bs")),
    listed(_SPEC + "eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs", "TritonAttnBackend"),
    names(_SRT + "layers.radix_attention.AttentionType", ("DECODER",)),
    names(_SRT + "layers.radix_attention.RadixAttention", (
        "tp_q_head_num", "qk_head_dim", "v_head_dim", "layer_id", "scaling", "logit_cap", "logit_capping_method",
        "sliding_window_size", "is_cross_attention", "attn_type", "xai_temperature_len", "k_scale", "v_scale",
    )),
    call(_POOL + "KVWriteLoc", ("loc",)),
    call(_POOL + "MHATokenToKVPool.set_kv_buffer",
         ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")),
    call(_POOL + "MHATokenToKVPool.get_kv_buffer", ("self", "layer_id")),
    names(_POOL + "ReqToTokenPool", ("req_to_token", "size")),
    names(_BATCH + "ForwardBatch", (
        "batch_size", "forward_mode", "req_pool_indices", "seq_lens", "seq_lens_sum", "extend_seq_lens",
        "extend_seq_lens_cpu", "spec_info", "positions", "out_cache_loc", "input_ids", "sampling_info",
    )),
    names(_BATCH + "ForwardMode",
          ("is_idle", "is_decode", "is_decode_or_idle", "is_target_verify", "is_draft_extend_v2")),
    # drafting.py
    names(_SRT + "runtime_context", ("get_spec",)),
    names(_SPEC + "eagle_worker_v2.EagleDraftWorker", (
        "topk", "speculative_num_steps", "speculative_num_draft_tokens", "index_share_for_mtp_iteration",
        "draft_runner", "draft_attn_backend", "hot_token_id", "req_to_token_pool", "device",
    )),
    names(_SRT + "model_executor.model_runner.ModelRunner",
          ("server_args", "model_config", "canary_manager", "forward", "is_draft_worker", "req_to_token_pool",
           "attn_backend")),
    names(_SPEC + "eagle_info.EagleDraftInput", ("topk_p", "topk_index", "hidden_states")),
    names(_SRT + "layers.logits_processor.LogitsProcessorOutput", ("next_token_logits", "hidden_states")),
    call(_SPEC + "eagle_utils.per_step_draft_out_cache_loc", ("out_cache_loc", "batch_size", "topk", "num_steps")),
    call(_SRT + "model_executor.forward_context.ForwardContext", ("attn_backend",)),
    call(_SRT + "model_executor.forward_context.forward_context", ("ctx",)),
    # verification.py
    names(_SPEC + "eagle_info.EagleVerifyInput", (
        "draft_token", "draft_token_num", "max_tree_depth", "retrieve_index", "retrieve_next_token",
        "retrieve_next_sibling", "custom_mask", "positions",
    )),
    names(_SRT + "managers.schedule_batch.ScheduleBatch",
          ("sampling_info", "forward_mode", "seq_lens", "reqs", "device", "req_pool_indices", "req_pool_indices_cpu")),
    names(_SRT + "sampling.sampling_batch_info.SamplingBatchInfo", (
        "is_all_greedy", "is_any_greedy", "acc_additive_penalties", "acc_scaling_penalties", "logit_bias",
        "penalizer_orchestrator", "temperatures", "top_ks", "top_ps", "min_ps", "need_top_k_sampling",
        "need_top_p_sampling", "need_min_p_sampling", "vocab_size", "return_sampling_masks",
    )),
    # grammars reach verification as bitmasks of the nodes, whichever backend made them
    names(_SRT + "constrained.base_grammar_backend.GrammarMask", ("grammar", "vocab_mask", "apply")),
    names(_SRT + "constrained.base_grammar_backend.BaseGrammarObject",
          ("accept_token", "rollback", "is_terminated", "allocate_vocab_mask", "fill_vocab_mask", "apply_vocab_mask")),
    names(_SRT + "constrained.xgrammar_backend.XGrammarGrammar",
          ("allocate_vocab_mask", "fill_vocab_mask", "apply_vocab_mask")),
    call(_SRT + "constrained.base_grammar_backend.register_grammar_backend", ("name", "init_func")),
    call(_SPEC + "spec_utils.build_grammar_vocab_mask", others=("reqs", "tree", "sampling_info", "barrier")),
    names(_SPEC + "spec_utils", ("SIMULATE_ACC_LEN", "SIMULATE_ACC_TOKEN_MODE")),
    call(_SPEC + "spec_utils.generate_simulated_accept_index", others=(
        "accept_index", "predict", "num_correct_drafts", "candidates", "target_predict", "simulate_acc_len",
        "simulate_acc_token_mode", "bs", "spec_steps",
    )),
    # sampling.py
    names(_SRT + "managers.schedule_batch.Req", ("rid", "sampling_params", "output_ids", "tokenizer", "eos_token_ids")),
    names(_SRT + "sampling.sampling_params.SamplingParams", (
        "sampling_seed", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_new_tokens",
        "stop_token_ids",
    )),
    names(_SRT + "layers.sampler.Sampler",
          ("_preprocess_logits", "_sync_token_ids_across_tp", "output_logprob_processor")),
    names(_SRT + "layers.sampler", ("SGLANG_RETURN_ORIGINAL_LOGPROB",)),
    call(_SRT + "layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
         ("self", "logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids")),
    call(_SRT + "layers.logprob_processor.LogprobResult.write_output_to", ("self", "logits_output")),
)  # fmt: skip
