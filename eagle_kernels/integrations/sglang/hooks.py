"""Which functions of SGLang the plug-in hooks, and the signatures that it relies on.

One table serves registration, the check in every scheduler process, `python -m eagle_kernels env`, and the contract
test, which reads the sources of released versions. Importing this file imports nothing of SGLang.
"""

from ..shared.hooks import hook_of

# The first was run. The sources of all releases up to the last hold the contract; CI reads those of the two.
TESTED = ("0.5.17", "0.5.23")

hook = hook_of(__package__)
_SRT = "sglang.srt."
_SPEC = _SRT + "speculative."
_ARGUMENTS = _SRT + "arg_groups.speculative_hook."
_INFO = _SRT + "sampling.sampling_batch_info.SamplingBatchInfo."
_BUILD = ("bonus_tokens", "parent_list", "top_scores_index", "draft_tokens", "seq_lens", "seq_lens_sum", "topk",
          "spec_steps", "num_verify_tokens", "tree_mask_mode", "tree_mask_buf", "fill_prefix_mask")  # fmt: skip
_WALK = ("predicts", "accept_index", "accept_token_num", "candidates", "retrieve_index", "retrieve_next_token",
         "retrieve_next_sibling", "target_predict", "topk")  # fmt: skip

# Guards refuse, check and connect whatever is asked for.
GUARDS = (
    hook("", _SRT + "server_args.ServerArgs.check_server_args", "guards.check_server_args", ("self",)),
    hook("", _SRT + "managers.scheduler.Scheduler.__init__", "guards.start_scheduler", ("self", "server_args")),
    hook("", _SPEC + "spec_info.SpeculativeAlgorithm.from_string", "guards.know_algorithm", ("cls", "name")),
    hook("", _ARGUMENTS + "_resolve_speculative_algorithm_alias", "guards.resolve_algorithm",
         ("speculative_algorithm", "speculative_draft_model_path")),
    hook("", _SRT + "arg_groups.overrides._attention_backend_default", "prompts.choose_reader", ("view",)),
    hook("", _ARGUMENTS + "_handle_eagle_family", "guards.handle_eagle_family", ("server_args",)),
    hook("", _ARGUMENTS + "_auto_choose_speculative_params", "guards.choose_drafts", ("server_args", "model_arch")),
    hook("", _SPEC + "eagle_worker_common.run_eagle_verify", "guards.run_eagle_verify", ("batch",)),
)  # fmt: skip
HOOKS = (
    hook("attention", _SPEC + "draft_utils.DraftBackendFactory.create_decode_backend", "guards.create_decode_backend",
         ("self",)),
    hook("attention", _SPEC + "draft_utils.DraftBackendFactory.create_draft_extend_backend",
         "guards.create_draft_extend_backend", ("self",)),
    hook("attention", _SPEC + "eagle_utils.build_tree_kernel_efficient", "trees.build_tree_kernel_efficient", _BUILD),
    hook("verify", _SPEC + "eagle_utils.eagle_sample", "verification.eagle_sample",
         ("verify_input", "batch", "logits_output", "grammar_mask")),
    hook("verify", _SPEC + "eagle_utils.verify_tree_greedy_func", "verification.verify_tree_greedy_func", _WALK),
    hook("match", _INFO + "from_schedule_batch", "sampling.from_schedule_batch", ("cls", "batch", "vocab_size")),
    hook("match", _INFO + "copy_for_forward", "sampling.copy_for_forward", ("self",)),
    hook("match", _SRT + "model_executor.model_runner.ModelRunner.sample", "sampling.sample",
         ("self", "logits_output", "forward_batch")),
    hook("match", _SRT + "layers.sampler.Sampler.forward", "sampling.forward",
         ("self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs",
          "positions")),
    hook("draft", _SPEC + "eagle_worker_v2.EagleDraftWorker.draft_forward", "drafting.draft_forward",
         ("self", "forward_batch")),
    hook("kv", _SPEC + "spec_utils.move_accept_tokens_to_target_kvcache",
         "cache_locs.move_accept_tokens_to_target_kvcache",
         ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator")),
    hook("kv", "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_uniform_func",
         "cache_locs.assign_extend_cache_locs_uniform_func",
         ("req_pool_indices", "req_to_token", "start_offset", "batch_size", "draft_token_num", "device")),
    hook("nn", _SRT + "layers.layernorm.RMSNorm.forward_cuda", "layers.forward_norm",
         ("self", "x", "residual", "post_residual_addition")),
    hook("nn", _SRT + "layers.activation.SiluAndMul.forward_cuda", "layers.forward_activation", ("self", "x")),
)  # fmt: skip
