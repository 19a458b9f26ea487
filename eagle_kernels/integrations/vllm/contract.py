"""What the plug-in relies on in vLLM beside the functions that it hooks, as data.

This table and that of `hooks.py` are held against sources, without importing them: the contract test does so for
released versions, `python -m eagle_kernels env` for the one that is installed. Where versions differ, a name tells
what is required.
"""

from ..shared.contract import call, contains, names, takes, value, where

GROUP, NAME = "vllm.general_plugins", "eagle_kernels"  # of the entry point; setup.py has them too

_CONFIG = "vllm.config."
_ATTENTION = "vllm.v1.attention."
_BACKENDS = _ATTENTION + "backends."
_GPU = "vllm.v1.worker.gpu."
_STRUCTURED = "vllm.v1.structured_output."
_SAMPLER = _GPU + "sample.sampler.Sampler"
_STATES = _GPU + "sample.states.SamplingStates"
_REJECTION = _GPU + "spec_decode.rejection_sampler.RejectionSampler"
_ROWS = ("self", "logits", "expanded_idx_mapping", "idx_mapping_np")  # what vLLM's states of requests change
_DRAFTS = ("input_ids", "expanded_local_pos")
_VERIFY = (
    "self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping", "idx_mapping_np",
    "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np", "verify_draft_sampled",
)  # fmt: skip
_IMPLEMENTATION = (
    "alibi_slopes", "attn_type", "head_size", "kv_cache_dtype", "logits_soft_cap", "num_heads", "scale", "sinks",
    "sliding_window",
)  # fmt: skip


def _host(module: str, name: str):
    """Returns what is relied on in an attention of vLLM's own under ours."""
    backend = f"{_BACKENDS}{module}.{name}Backend"
    metadata, builder, implementation = (f"{_BACKENDS}{module}.{name}{what}" for what in (
        "Metadata", "MetadataBuilder", "Impl",
    ))  # fmt: skip
    return (
        names(backend, ("get_name", "get_impl_cls", "get_builder_cls")),
        takes(f"{backend}.get_supported_kernel_block_sizes", (), ("kv_cache_spec",), ("cls", "kv_cache_spec")),
        # [pages, Hkv, page_size, 2 * D], written before `forward`
        contains(f"{implementation}.do_kv_cache_update", "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
        value(f"{backend}.forward_includes_kv_cache_update", False),
        names(metadata, ("block_table", "max_query_len", "num_actual_tokens")),
        takes(builder, ("kv_cache_spec", "layer_names", "vllm_config", "device")),
        takes(f"{builder}.build", ("self", "common_prefix_len", "common_attn_metadata", "fast_build")),
        names(builder, ("_cudagraph_support",)),
        where(f"{builder}.supports_draft_decode_metadata_update", (
            takes(f"{builder}.update_draft_decode_metadata", ("self", "metadata"), ("self", "_metadata")),
        )),
        names(implementation, _IMPLEMENTATION),
        takes(f"{implementation}.forward", (
            "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
            "output_block_scale",
        )),
    )  # fmt: skip


_DRAFTS_OF = _GPU + "spec_decode.autoregressive."
_SPECULATOR = _DRAFTS_OF + "speculator.AutoRegressiveSpeculator"
_PASS = ("self", "num_reqs", "num_tokens", "attn_metadata", "slot_mappings", "num_tokens_across_dp")
_MLA = "vllm.model_executor.layers.attention.mla_attention."
_LATENT_BACKEND = _BACKENDS + "mla.triton_mla.TritonMLA"
# of vLLM 0.26, where layers of latents may be ours: latent.py, selection.py, tree_drafting.py
_LATENTS = (
    names(_MLA + "QueryLenSupport", ("VARLEN",)),
    takes(_MLA + "MLACommonMetadataBuilder.build", ("self", "common_prefix_len", "common_attn_metadata", "fast_build")),
    contains(_MLA + "MLACommonMetadataBuilder.build", "decode_threshold=self.reorder_batch_threshold"),
    contains(_MLA + "MLACommonMetadataBuilder.build",
             "require_uniform=self.query_len_support != QueryLenSupport.VARLEN"),
    names(_MLA + "MLACommonMetadata", ("decode", "max_query_len")),
    names(_MLA + "MLACommonDecodeMetadata", ("block_table",)),
    contains(_MLA + "MLACommonBackend.get_kv_cache_shape", "return (num_blocks, block_size, head_size)"),
    names(_MLA + "MLAAttention", ("head_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")),
    contains(_MLA + "MLAAttention.forward_impl", "torch.bmm(mqa_q_nope, self.W_UK_T, out=mqa_ql_nope)"),
    contains(_MLA + "MLAAttention._v_up_proj", "torch.bmm(x, self.W_UV, out=out.transpose(0, 1))"),
    contains(_MLA + "MLAAttention.forward_impl", "self.impl.forward_mqa(mqa_q, kv_cache, attn_metadata, self)"),
    contains(_MLA + "MLAAttention.forward_impl", "kv_cache.view(current_platform.fp8_dtype())"),
    # beams have no slots, and are not written
    contains(_MLA + "unified_mla_kv_cache_update", "if layer_slot_mapping is not None:"),
    contains(_MLA + "unified_mla_attention_with_output", "layer.forward_impl("),
    names(_LATENT_BACKEND + "Backend", ("get_builder_cls", "get_impl_cls", "get_name", "validate_configuration")),
    takes(_LATENT_BACKEND + "Impl.forward_mqa", ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")),
    names(_LATENT_BACKEND + "Impl", ("supports_quant_query_input",)),
    names(_MLA + "MLACommonBaseImpl", ("kv_cache_dtype", "kv_lora_rank", "qk_rope_head_dim", "scale")),
    names(_ATTENTION + "selector.AttentionSelectorConfig", ("use_mla",)),
    contains(_ATTENTION + "selector.get_attn_backend", "return _cached_get_attn_backend(backend=backend, "
             "attn_selector_config=attn_selector_config, num_heads=num_heads)"),
)  # fmt: skip
# of vLLM 0.26, where drafts may be trees
_TREES = (
    # guards.py, trees.py, model_state.py
    names(_CONFIG + "VllmConfig", ("kv_transfer_config",)),
    names(_CONFIG + "SpeculativeConfig", ("num_speculative_tokens_per_batch_size", "use_gemma4_mtp")),
    names(_CONFIG + "ModelConfig", ("get_sliding_window", "uses_mrope", "uses_xdrope_dim")),
    names(_CONFIG + "ParallelConfig", ("data_parallel_size", "pipeline_parallel_size")),
    names(_CONFIG + "SchedulerConfig", ("max_num_batched_tokens",)),
    names(_GPU + "input_batch.InputBatch", (
        "cu_num_logits_np", "num_draft_tokens", "num_draft_tokens_per_req", "num_reqs", "num_scheduled_tokens",
        "num_tokens", "req_ids",
    )),
    takes(_GPU + "model_states.interface.ModelState.prepare_attn", (
        "self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config",
        "for_capture",
    )),
    # slots follow from positions, which ours changes after that
    contains(_GPU + "model_runner.GPUModelRunner.execute_model",
             "block_tables, slot_mappings = self.prepare_attn(input_batch)"),
    contains(_GPU + "model_runner.GPUModelRunner.execute_model",
             "attn_metadata = self.model_state.prepare_attn(input_batch, batch_desc.cg_mode, block_tables, slot_map"),
    # rows are the root and the nodes, one after another
    contains(_GPU + "input_batch._combine_sampled_and_draft_tokens_kernel",
             "tl.store(input_ids_ptr + query_end - num_draft_tokens + block, draft_tokens, mask=mask)"),
    # tree_verification.py
    contains(_GPU + "model_runner.GPUModelRunner.sample",
             "or self.rejection_sampler is None:"),
    names(_GPU + "sample.penalties.PenaltiesState", (
        "frequency_penalty", "output_bin_counts", "presence_penalty", "prompt_bin_mask", "repetition_penalty",
        "use_penalty",
    )),
    names(_GPU + "sample.bad_words.BadWordsState", ("bad_word_offsets", "bad_word_token_ids", "req_states")),
    names(_GPU + "states.RequestState", ("all_token_ids", "prompt_len", "total_len")),
    # grammars.py
    names(_GPU + "input_batch.InputBatch", ("has_structured_output_reqs",)),
    contains(_GPU + "model_runner.GPUModelRunner.sample_tokens",
             "self.draft_tokens_handler.set_draft_tokens(input_batch, self.req_states.draft_tokens["),
    # of scheduled drafts workers take the number alone
    contains(_GPU + "model_runner.GPUModelRunner.prepare_inputs",
             "len(draft_tokens.get(req_id, ()))"),
    names(_STRUCTURED + "StructuredOutputManager", ("backend", "should_fill_bitmask", "vllm_config")),
    *(names(_STRUCTURED + "backend_types.StructuredOutputGrammar", (name,)) for name in (
        "accept_tokens", "fill_bitmask", "is_terminated", "rollback", "validate_tokens",
    )),
    names(_STRUCTURED + "request.StructuredOutputRequest", ("grammar", "reasoner")),
    names("vllm.v1.outputs.DraftTokenIds", ("draft_token_ids", "req_ids")),
    names("vllm.v1.core.sched.output.SchedulerOutput", ("num_invalid_spec_tokens", "scheduled_spec_decode_tokens")),
    names("vllm.v1.request.Request", ("all_token_ids", "is_finished", "is_prefill_chunk", "request_id",
                                      "spec_token_ids", "structured_output_request")),
    # tree_drafting.py
    contains(_GPU + "model_runner.GPUModelRunner.sample_tokens",
             "draft_tokens = self.speculator.propose(input_batch, attn_metadata, slot_mappings_by_layer, "
             "spec_hidden_states, aux_hidden_states, num_sampled, num_rejected, "),
    contains(_GPU + "model_runner.GPUModelRunner.sample_tokens",
             "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens"),
    contains(_GPU + "spec_decode.init_speculator", "return EagleSpeculator(vllm_config, device)"),
    names(_SPECULATOR, (
        "decode_cudagraph_manager", "hidden_states", "last_token_indices",
    )),
    names(_GPU + "spec_decode.speculator.DraftModelSpeculator", (
        "_prepare_eplb_forward", "block_tables", "draft_attn_layer_names", "draft_tokens", "dtype", "hidden_size",
        "input_buffers", "kv_cache_config", "max_model_len", "max_num_reqs", "max_num_tokens", "target_input_buffers",
    )),
    takes(_GPU + "spec_decode.speculator.DraftModelSpeculator.set_attn", (
        "self", "model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups",
    )),
    takes(_SPECULATOR + ".init_cudagraph_manager", ("self", "cudagraph_mode")),
    contains(_SPECULATOR + ".init_cudagraph_manager", "SpeculatorCudaGraphManager(self.vllm_config, self.device, "
             "cudagraph_mode, decode_query_len=1)"),
    takes(_SPECULATOR + ".capture", ("self",)),
    contains(_SPECULATOR + ".capture", "capture(self._prefill, self.model_state, self.target_input_buffers, "),
    contains(_SPECULATOR + ".capture", "capture(self._generate_draft, self.model_state, self.input_buffers, "),
    contains(_SPECULATOR + ".propose", "self._prefill(num_reqs, prefill_batch_desc.num_tokens, attn_metadata, "
             "slot_mappings, num_tokens_across_dp=num_tokens_across_dp, "),
    contains(_SPECULATOR + ".propose", "prepare_decode_inputs(self.draft_tokens[:num_reqs, 0], input_batch.seq_lens, "
             "num_rejected, self.input_buffers, "),
    contains(_SPECULATOR + ".propose", "self._multi_step_decode(num_reqs, dummy_run and skip_attn_for_dummy_run, "
             "decode_batch_desc, num_tokens_across_dp)"),
    takes(_SPECULATOR + "._prefill", (*_PASS, "cudagraph_runtime_mode", "mm_inputs")),
    takes(_SPECULATOR + "._run_model", (_PASS[0], *_PASS[2:], "cudagraph_runtime_mode", "mm_inputs")),
    takes(_SPECULATOR + "._multi_step_decode", ("self", "num_reqs", "skip_attn", "batch_desc", "num_tokens_across_dp")),
    takes(_SPECULATOR + "._generate_draft",
          ("self", "num_reqs", "num_tokens_padded", *_PASS[3:], "cudagraph_runtime_mode")),
    contains(_DRAFTS_OF + "speculator._prepare_decode_inputs_kernel",
             "seq_len = tl.minimum(seq_len + 1, max_model_len)"),
    takes(_GPU + "cudagraph_utils.CudaGraphManager.dispatch",
          ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras")),
    takes(_GPU + "cudagraph_utils.CudaGraphManager.run_fullgraph", ("self", "desc")),
    names(_GPU + "cudagraph_utils.CudaGraphManager", ("cudagraph_mode",)),
    names(_GPU + "cudagraph_utils.BatchExecutionDescriptor", ("cg_mode",)),
    names(_GPU + "input_batch.InputBuffers", ("input_ids", "positions", "query_start_loc", "seq_lens")),
    names(_GPU + "block_table.BlockTables", ("input_block_tables",)),
    names("vllm.v1.worker.utils.AttentionGroup", ("metadata_builders",)),
    names("vllm.v1.kv_cache_interface.KVCacheConfig", ("kv_cache_groups",)),
    names("vllm.v1.kv_cache_interface.KVCacheGroupSpec", ("layer_names",)),
    names(_CONFIG + "CompilationConfig", ("static_forward_context",)),
    names("vllm.model_executor.layers.attention.attention.Attention",
          ("head_size", "impl", "kv_cache", "num_kv_heads")),
    # rows without slots are not written
    contains("vllm.model_executor.layers.attention.attention.get_attention_context",
             "layer_slot_mapping = slot_mapping.get(layer_name)"),
    contains("vllm.model_executor.layers.attention.attention.unified_kv_cache_update",
             "if layer_slot_mapping is not None:"),
)  # fmt: skip

CONTRACT = (
    # plugin.py, report.py
    value("vllm.plugins.DEFAULT_PLUGINS_GROUP", GROUP),
    names("vllm", ("__version__",)),
    names("vllm.envs", ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER")),
    names(_BACKENDS + "registry.AttentionBackendEnum", ("get_path", "is_overridden")),
    call(_BACKENDS + "registry.register_backend", ("backend", "class_path")),
    where(_BACKENDS + "registry.AttentionBackendEnum.register", (
        contains(_BACKENDS + "registry.register_backend",
                 "AttentionBackendEnum.register(backend, class_path or '')"),
    ), (
        names(_BACKENDS + "registry.AttentionBackendEnum", ("CUSTOM",)),
    )),
    # parts.py, guards.py
    names("vllm.engine.arg_utils.EngineArgs", ("attention_backend", "attention_config", "speculative_config")),
    names("vllm.v1.worker.worker_base.WorkerWrapperBase", ("vllm_config",)),
    names("vllm.v1.engine.input_processor.InputProcessor", ("speculative_config", "vllm_config")),
    contains("vllm.v1.engine.input_processor.InputProcessor._validate_params",
             "params.verify(self.model_config, self.speculative_config,"),
    names(_CONFIG + "VllmConfig", (
        "attention_config", "cache_config", "lora_config", "model_config", "num_speculative_tokens", "parallel_config",
        "scheduler_config", "speculative_config", "use_v2_model_runner",
    )),
    names(_CONFIG + "AttentionConfig", ("backend",)),
    names(_CONFIG + "CacheConfig", ("cache_dtype",)),
    names(_CONFIG + "ModelConfig",
          ("hf_text_config", "is_attention_free", "is_encoder_decoder", "is_hybrid", "rswa_window", "use_mla")),
    names(_CONFIG + "ParallelConfig",
          ("decode_context_parallel_size", "prefill_context_parallel_size", "use_ubatching")),
    names(_CONFIG + "SchedulerConfig", ("max_num_seqs",)),
    names(_CONFIG + "SpeculativeConfig", (
        "attention_backend", "draft_sample_method", "num_speculative_tokens", "rejection_sample_method",
        "synthetic_acceptance_rates",
    )),
    value(_CONFIG + "speculative.DraftSampleMethod", ("greedy", "probabilistic")),
    where(_SAMPLER + ".logits_processors", (  # what the guards refuse came before that
        names(_CONFIG + "VllmConfig", ("watermark_config",)),
        names(_CONFIG + "ParallelConfig", ("enable_batch_sharded_sampling",)),
        names(_CONFIG + "SpeculativeConfig", ("enable_adaptive_verification",)),
    )),
    # attention.py
    names("vllm.platforms", ("current_platform",)),
    names("vllm.platforms.interface.Platform", ("fp8_dtype", "is_cuda")),
    call("vllm.platforms.interface.Platform.is_device_capability_family", ("cls", "capability")),
    names(_ATTENTION + "backend.AttentionCGSupport", ("UNIFORM_BATCH",)),
    contains(_ATTENTION + "backend.AttentionMetadataBuilder.get_cudagraph_support", "return cls._cudagraph_support"),
    names(_ATTENTION + "backend.AttentionType", ("DECODER",)),
    names(_ATTENTION + "backend.AttentionLayer", ("_k_scale", "_v_scale")),
    names(_ATTENTION + "backend.CommonAttentionMetadata",
          ("causal", "max_query_len", "mm_req_doc_ranges", "query_start_loc", "seq_lens")),
    call(_BACKENDS + "utils.split_decodes_and_prefills", ("common_attn_metadata",), ("decode_threshold",)),
    contains(_BACKENDS + "utils.split_decodes_and_prefills",
             "return (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)"),
    names(_BACKENDS + "fa_utils", ("get_flash_attn_version", "is_flash_attn_varlen_func_available")),
    contains(_BACKENDS + "flash_attn.FlashAttentionBackend.get_name", "return 'FLASH_ATTN'"),
    contains(_BACKENDS + "flash_attn.FlashAttentionMetadataBuilder.get_cudagraph_support",
             "return cls._cudagraph_support"),
    contains(_BACKENDS + "flash_attn.FlashAttentionMetadataBuilder.update_block_table", "copy.copy(metadata)"),
    *_host("flash_attn", "FlashAttention"),
    *_host("triton_attn", "TritonAttention"),
    names(_BACKENDS + "triton_attn.TritonAttentionImpl", ("chunk_lookback", "supports_quant_query_input")),
    # trees.py, guards.py
    names("vllm.engine.arg_utils.EngineArgs", ("additional_config", "max_num_seqs")),
    names(_CONFIG + "VllmConfig", ("additional_config",)),
    names(_CONFIG + "SpeculativeConfig", ("method",)),
    where(_GPU + "spec_decode.rejection_sampler.MAX_CHUNK_BYTES", (), _TREES + _LATENTS),
    # drafting.py
    names(_GPU + "spec_decode.speculator.DraftModelSpeculator",
          ("draft_logits", "model", "use_local_argmax_reduction")),
    names("vllm.model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM",
          ("draft_id_to_target_id", "lm_head", "logits_processor")),
    call("vllm.model_executor.layers.logits_processor.LogitsProcessor.forward", ("self", "lm_head", "hidden_states")),
    # sampling.py
    contains(_GPU + "model_runner.GPUModelRunner.load_model", "custom = self.model_state.custom_sampler(self.sampler)"),
    contains(_GPU + "model_runner.GPUModelRunner.sample",
             "self.rejection_sampler(logits, input_batch, self.speculator.draft_logits"),
    contains(_GPU + "model_runner.GPUModelRunner.sample", "self.sampler(logits, input_batch)"),
    takes(_GPU + "model_states.interface.ModelState.custom_sampler", ("self", "sampler")),
    value(_CONFIG + "model.LogprobsMode",
          ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")),
    names(_SAMPLER, ("compute_nans", "logprobs_mode", "penalties_state", "req_states", "sampling_states")),
    takes(_SAMPLER + ".sample",
          (*_ROWS, "pos", *_DRAFTS, "return_logprobs"),
          (*_ROWS[:3], "idx_mapping", "idx_mapping_np", "pos", *_DRAFTS, "seq_lens_upper_bound_np", "return_logprobs")),
    contains(_SAMPLER + ".sample", ") -> tuple[torch.Tensor, torch.Tensor]:"),
    contains(_SAMPLER + ".__call__", "= self.sample(logits, expanded_idx_mapping, "),
    where(_SAMPLER + ".logits_processors", (
        names(_SAMPLER, ("needs_logits_processing", "return_sampling_mask", "thinking_budget_state")),
        takes(_GPU + "sample.logits_processor.LogitsContext", (
            "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids", "pos",
            "seq_lens_upper_bound_np",
        )),
        contains(_SAMPLER + ".__init__",
                 "[logit_bias_state, self.penalties_state, bad_words_state, *custom_logits_processors]"),
        # these three stay in the dtype of the logits
        *(takes(f"{_GPU}sample.{state}.apply", ("self", "logits", "ctx")) for state in (
            "logit_bias.LogitBiasState", "penalties.PenaltiesState", "bad_words.BadWordsState",
            "thinking_budget.ThinkingBudgetState",
        )),
        names(_GPU + "sample.thinking_budget.ThinkingBudgetState", ("enabled", "use_thinking_budget")),
        # nothing is between this and the temperature
        contains(_SAMPLER + ".apply_sampling_params",
                 "thinking_budget_state.apply(logits, ctx)\n    self.sampling_states.apply_temperature("),
    ), (
        names(_SAMPLER, ("bad_words_state", "logit_bias_state")),
        takes(_GPU + "sample.logit_bias.LogitBiasState.apply_logit_bias", (*_ROWS, "pos")),
        takes(_GPU + "sample.penalties.PenaltiesState.apply_penalties", (*_ROWS, *_DRAFTS)),
        takes(_GPU + "sample.bad_words.BadWordsState.apply_bad_words", (*_ROWS, *_DRAFTS)),
        names(_GPU + "sample.bad_words.BadWordsState", ("num_bad_words",)),
        # a row too early, for which ours makes up
        contains(_GPU + "sample.bad_words._bad_words_kernel", "input_ids_ptr + cur_req_first_pos + spec_offset)"),
        contains(_SAMPLER + ".apply_sampling_params",
                 "self.bad_words_state.apply_bad_words(logits, expanded_idx_mapping, idx_mapping_np, input_ids, "
                 "expanded_local_pos)\n    self.sampling_states.apply_temperature("),
    )),
    names(_GPU + "model_runner.GPUModelRunner", (
        "device", "dtype", "max_num_reqs", "max_num_tokens", "num_speculative_steps", "rejection_sampler", "sampler",
        "vocab_size",
    )),
    names(_STATES, ("min_p", "seeds", "temperature", "top_k", "top_p", "vocab_size")),
    takes(_STATES + ".max_num_logprobs", ("self", "idx_mapping_np")),
    takes(_STATES + ".apply_staged_writes", ("self",)),
    takes(_STATES + ".apply_temperature", _ROWS),
    takes(_STATES + ".apply_min_p", _ROWS),
    takes(_STATES + ".apply_top_k_top_p", _ROWS),
    names(_GPU + "buffer_utils.UvaBackedTensor", ("gpu", "np")),
    names(_GPU + "buffer_utils.StagedWriteTensor", ("gpu",)),
    names(_GPU + "states.RequestState", ("max_num_reqs", "prefill_len")),
    call(_GPU + "sample.output.SamplerOutput",
         ("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected")),
    takes(_GPU + "metrics.logits.get_num_nans", ("logits",)),
    takes(_GPU + "input_batch.get_num_sampled_and_rejected",
         ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len")),
    contains(_GPU + "input_batch.get_num_sampled_and_rejected", "return (num_sampled, num_rejected)"),
    names(_GPU + "input_batch.InputBatch", (
        "cu_num_logits", "expanded_idx_mapping", "expanded_local_pos", "idx_mapping", "idx_mapping_np", "input_ids",
        "logits_indices", "positions", "seq_lens",
    )),
    call(_REJECTION, ("sampler", "spec_config", "device")),
    call(_REJECTION + ".__call__", ("self", "logits", "input_batch", "draft_logits")),
    where(_GPU + "spec_decode.rejection_sampler.MAX_CHUNK_BYTES", (
        takes(_REJECTION + "._verify", *(_VERIFY[:size] for size in (10, 11, 12))),
        contains(_REJECTION + "._verify", "return (processed_logits, sampled, num_sampled)"),
        contains(_REJECTION + "._verify_in_chunks", "= self._verify(logits[lo:hi], draft_logits, draft_sampled[lo:hi]"),
    ), (
        takes(_REJECTION + "._get_logprobs_tensors", ("self", "input_batch", "sampled", "num_sampled", "logits")),
    )),
    names(_REJECTION, ("num_speculative_steps", "sampler", "synthetic_conditional_rates")),
)  # fmt: skip
