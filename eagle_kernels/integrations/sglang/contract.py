"""What the plug-in relies on in SGLang beside the functions that it hooks, as data.

`differences` holds this table and that of `hooks.py` against sources, without importing them: the contract test does so
for released versions, `python -m eagle_kernels env` for the one that is installed. What is read in an SGLang of one
version only is not in here, but its alternatives are (`Either`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import hooks
from .sources import Sources

Rule = Callable[[Sources], "str | None"]  # says why something does not hold
GROUP = "sglang.srt.plugins"  # of entry points; setup.py names it too
# SGLang's refusal of trees with pages larger than a token, of which our backend has no need
PAGE_TREES = "_topk > 1 with page_size > 1 is only supported on"


@dataclass(frozen=True)
class Names:
    """A module or class, and what ours reads, calls, sets or overrides of it.
    members: a list of classes in SGLang's sources whose fields are the owner's too."""

    owner: str
    names: tuple[str, ...]
    members: str = ""

    def rules(self) -> Iterator[tuple[str, Rule]]:
        for name in self.names:
            yield f"{short(self.owner)}.{name}", lambda sources, name=name: self._fault(sources, name)

    def _fault(self, sources: Sources, name: str) -> str | None:
        if sources.find(self.owner) is None:
            return f"{self.owner} does not exist"
        owners = (self.owner, *(sources.listed(self.members) if self.members else ()))
        if any(sources.find(f"{owner}.{name}") is not None for owner in owners):
            return None
        return f"{self.owner} has no {name}"


@dataclass(frozen=True)
class Call:
    """A function or class that ours calls: it takes these parameters; the first of them stand at the front."""

    target: str
    first: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def rules(self) -> Iterator[tuple[str, Rule]]:
        yield f"{short(self.target)}()", self._fault

    def _fault(self, sources: Sources) -> str | None:
        found = sources.parameters(self.target)
        if found is None:
            return f"{self.target} is not a function"
        if found[: len(self.first)] != self.first:
            return f"{self.target} takes {', '.join(found)}; expected first {', '.join(self.first)}"
        missing = [name for name in self.others if name not in found]
        return f"{self.target} takes no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Either:
    """Names of which one must exist, since versions differ."""

    targets: tuple[str, ...]

    def rules(self) -> Iterator[tuple[str, Rule]]:
        yield " or ".join(map(short, self.targets)), self._fault

    def _fault(self, sources: Sources) -> str | None:
        if any(sources.find(target) is not None for target in self.targets):
            return None
        return f"there is neither {' nor '.join(self.targets)}"


@dataclass(frozen=True)
class Value:
    """A constant and what it is."""

    target: str
    value: object

    def rules(self) -> Iterator[tuple[str, Rule]]:
        yield short(self.target), self._fault

    def _fault(self, sources: Sources) -> str | None:
        found = sources.constant(self.target)
        return None if found == self.value else f"{self.target} is {found!r}; expected {self.value!r}"


@dataclass(frozen=True)
class Listed:
    """A function with a list of classes in it, one of which must be this."""

    function: str
    name: str

    def rules(self) -> Iterator[tuple[str, Rule]]:
        yield f"{self.name} in {short(self.function)}", self._fault

    def _fault(self, sources: Sources) -> str | None:
        if self.name in sources.names_in_lists(self.function):
            return None
        return f"{self.function} has no list with {self.name}"


@dataclass(frozen=True)
class LastRefusal:
    """A function whose last statement raises a ValueError with these words, unless a name is in a tuple."""

    function: str
    words: tuple[str, ...]
    allowed: str

    def rules(self) -> Iterator[tuple[str, Rule]]:
        yield f"last statement of {short(self.function)}", self._fault

    def _fault(self, sources: Sources) -> str | None:
        condition, text = sources.last_refusal(self.function)
        missing = [words for words in self.words if words not in text]
        if self.allowed not in condition:
            missing.insert(0, self.allowed)
        return f"the last statement of {self.function} is no ValueError with {missing}" if missing else None


def short(target: str) -> str:
    """Returns the last two names of a path."""
    return ".".join(target.split(".")[-2:])


_SRT = "sglang.srt."
_SPEC = _SRT + "speculative."
_ATTENTION = _SRT + "layers.attention."
_BATCH = _SRT + "model_executor.forward_batch_info."
_ARGUMENTS = _SRT + "server_args.ServerArgs"
_BACKEND = _ATTENTION + "triton_backend.TritonAttnBackend"
_POOL = _SRT + "mem_cache.memory_pool."

CONTRACT = (
    # plugin.py
    Value(_SRT + "plugins.GENERAL_PLUGINS_GROUP", GROUP),
    Call(_SRT + "plugins.hook_registry.HookRegistry.register", ("cls", "target", "hook", "hook_type")),
    Names(_SRT + "plugins.hook_registry.HookType", ("AROUND",)),
    Call(_ATTENTION + "attention_registry.register_attention_backend", ("name",)),
    Names(_SRT + "server_args", ("add_attention_backend_choices",)),
    # parts.py, guards.py, drafting.py, sampling.py
    Names(_ARGUMENTS, (
        "attention_backend", "prefill_attention_backend", "decode_attention_backend",
        "speculative_draft_attention_backend", "speculative_algorithm", "device", "kv_cache_dtype",
        "disable_hybrid_swa_memory", "enable_deterministic_inference", "enable_two_batch_overlap", "enable_pdmux",
        "enable_unified_memory", "speculative_adaptive", "enable_multi_layer_eagle", "dcp_size", "attn_cp_size",
        "enable_dp_attention", "speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens",
        "speculative_use_rejection_sampling", "disaggregation_mode", "enable_custom_logit_processor",
    ), members=_SRT + "server_args._INPUT_NAMESPACES"),
    # where resolved arguments are not written back into the record, a view shows them
    Either((_SRT + "arg_groups.overrides.materialize_declarations", _SRT + "arg_groups.overrides.resolving_view")),
    Either((_ARGUMENTS + ".get_model_config", _SRT + "arg_groups.overrides.model_config_of")),
    Names(_SRT + "configs.model_config.ModelConfig",
          ("attention_arch", "is_encoder_decoder", "is_hybrid_swa", "hf_config", "model_is_mrope")),
    Names(_SRT + "layers.layernorm.RMSNorm",
          ("weight", "variance_epsilon", "variance_size_override", "cast_x_before_out_mul")),
    Names(_SRT + "layers.layernorm", ("is_batch_invariant_mode_enabled",)),
    Call(_SRT + "configs.hybrid_arch.mambaish_config", ("model_config",)),
    Call(_SRT + "utils.async_probe.sanitize_nan_logits", ("logits", "msg")),
    Names(_SRT + "configs.model_config.AttentionArch", ("MLA",)),
    Names(_SPEC + "draft_utils.DraftBackendFactory",
          ("draft_model_runner", "draft_attn_backend", "topk", "speculative_num_steps")),
    Names(_SPEC + "spec_info.SpeculativeAlgorithm", ("EAGLE", "EAGLE3")),
    Call(_SRT + "utils.hf_transformers.config.get_config", ("model",), ("trust_remote_code",)),
    LastRefusal(_SRT + "arg_groups.speculative_hook._handle_eagle_family",
                (PAGE_TREES, "{view.attention_backend!r}"), "view.attention_backend not in _PAGE_TREE_SPEC_BACKENDS"),
    # attention.py
    Call(_BACKEND, ("model_runner", "skip_prefill")),
    Names(_BACKEND, (
        "req_to_token_pool", "token_to_kv_pool", "req_to_token", "page_size", "device", "sliding_window_size",
        "num_draft_tokens", "is_draft_runner", "max_context_len", "skip_prefill",  # fields that ours reads
        "init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph",
        "init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "verify_mask", "forward_decode",
        "forward_extend", "needs_cpu_seq_lens",
    )),
    Call(_BACKEND + ".init_forward_metadata_out_graph", ("self", "forward_batch", "in_capture")),
    Call(_ATTENTION + "base_attn_backend.AttentionBackend.init_forward_metadata_in_graph", ("self", "forward_batch")),
    Call(_BACKEND + ".init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")),
    Call(_BACKEND + ".forward_decode", ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks")),
    Call(_BACKEND + ".forward_extend", ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "sinks")),
    Names(_ATTENTION + "triton_backend.TritonMultiStepDraftBackend", (  # that DraftLevels stands in for
        "init_forward_metadata", "init_cuda_graph_state", "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph", "attn_backends", "needs_cpu_seq_lens", "topk", "speculative_num_steps",
        "device", "max_context_len", "page_size",
    )),
    Names(_ATTENTION + "verify_mask.VerifyMask", ("buffer", "mode", "max_bs", "is_read", "fits")),
    Call(_ATTENTION + "verify_mask.VerifyMask", ("buffer", "mode", "max_bs")),
    Listed(_SPEC + "eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs", "TritonAttnBackend"),
    Names(_SRT + "layers.radix_attention.AttentionType", ("DECODER",)),
    Names(_SRT + "layers.radix_attention.RadixAttention", (
        "tp_q_head_num", "qk_head_dim", "v_head_dim", "layer_id", "scaling", "logit_cap", "logit_capping_method",
        "sliding_window_size", "is_cross_attention", "attn_type", "xai_temperature_len", "k_scale", "v_scale",
    )),
    Call(_POOL + "KVWriteLoc", ("loc",)),
    Call(_POOL + "MHATokenToKVPool.set_kv_buffer",
         ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")),
    Call(_POOL + "MHATokenToKVPool.get_kv_buffer", ("self", "layer_id")),
    Names(_POOL + "ReqToTokenPool", ("req_to_token", "size")),
    Names(_BATCH + "ForwardBatch", (
        "batch_size", "forward_mode", "req_pool_indices", "seq_lens", "seq_lens_sum", "extend_seq_lens",
        "extend_seq_lens_cpu", "spec_info", "positions", "out_cache_loc", "input_ids", "sampling_info",
    )),
    Names(_BATCH + "ForwardMode",
          ("is_idle", "is_decode", "is_decode_or_idle", "is_target_verify", "is_draft_extend_v2")),
    # drafting.py
    Names(_SRT + "runtime_context", ("get_spec",)),
    Names(_SPEC + "eagle_worker_v2.EagleDraftWorker", (
        "topk", "speculative_num_steps", "speculative_num_draft_tokens", "index_share_for_mtp_iteration",
        "draft_runner", "draft_attn_backend", "hot_token_id", "req_to_token_pool", "device",
    )),
    Names(_SRT + "model_executor.model_runner.ModelRunner",
          ("server_args", "model_config", "canary_manager", "forward", "is_draft_worker", "req_to_token_pool")),
    Names(_SPEC + "eagle_info.EagleDraftInput", ("topk_p", "topk_index", "hidden_states")),
    Names(_SRT + "layers.logits_processor.LogitsProcessorOutput", ("next_token_logits", "hidden_states")),
    Call(_SPEC + "eagle_utils.per_step_draft_out_cache_loc", ("out_cache_loc", "batch_size", "topk", "num_steps")),
    Call(_SRT + "model_executor.forward_context.ForwardContext", ("attn_backend",)),
    Call(_SRT + "model_executor.forward_context.forward_context", ("ctx",)),
    # verification.py
    Names(_SPEC + "eagle_info.EagleVerifyInput", (
        "draft_token", "draft_token_num", "max_tree_depth", "retrieve_index", "retrieve_next_token",
        "retrieve_next_sibling", "custom_mask", "positions",
    )),
    Names(_SRT + "managers.schedule_batch.ScheduleBatch",
          ("sampling_info", "forward_mode", "seq_lens", "reqs", "device", "req_pool_indices", "req_pool_indices_cpu")),
    Names(_SRT + "sampling.sampling_batch_info.SamplingBatchInfo", (
        "is_all_greedy", "is_any_greedy", "acc_additive_penalties", "acc_scaling_penalties", "logit_bias",
        "penalizer_orchestrator", "temperatures", "top_ks", "top_ps", "min_ps", "need_top_k_sampling",
        "need_top_p_sampling", "need_min_p_sampling", "vocab_size", "return_sampling_masks",
    )),
    # grammars reach verification as bitmasks of the nodes, whichever backend made them
    Names(_SRT + "constrained.base_grammar_backend.GrammarMask", ("grammar", "vocab_mask", "apply")),
    Names(_SRT + "constrained.base_grammar_backend.BaseGrammarObject",
          ("accept_token", "rollback", "is_terminated", "allocate_vocab_mask", "fill_vocab_mask", "apply_vocab_mask")),
    Names(_SRT + "constrained.xgrammar_backend.XGrammarGrammar",
          ("allocate_vocab_mask", "fill_vocab_mask", "apply_vocab_mask")),
    Call(_SRT + "constrained.base_grammar_backend.register_grammar_backend", ("name", "init_func")),
    Call(_SPEC + "spec_utils.build_grammar_vocab_mask", others=("reqs", "tree", "sampling_info", "barrier")),
    Names(_SPEC + "spec_utils", ("SIMULATE_ACC_LEN", "SIMULATE_ACC_TOKEN_MODE")),
    Call(_SPEC + "spec_utils.generate_simulated_accept_index", others=(
        "accept_index", "predict", "num_correct_drafts", "candidates", "target_predict", "simulate_acc_len",
        "simulate_acc_token_mode", "bs", "spec_steps",
    )),
    # sampling.py
    Names(_SRT + "managers.schedule_batch.Req", ("rid", "sampling_params", "output_ids", "tokenizer", "eos_token_ids")),
    Names(_SRT + "sampling.sampling_params.SamplingParams", (
        "sampling_seed", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_new_tokens",
        "stop_token_ids",
    )),
    Names(_SRT + "layers.sampler.Sampler",
          ("_preprocess_logits", "_sync_token_ids_across_tp", "output_logprob_processor")),
    Names(_SRT + "layers.sampler", ("SGLANG_RETURN_ORIGINAL_LOGPROB",)),
    Call(_SRT + "layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
         ("self", "logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids")),
    Call(_SRT + "layers.logprob_processor.LogprobResult.write_output_to", ("self", "logits_output")),
)  # fmt: skip


def of_hook(hook: hooks.Hook) -> Call:
    """Returns the entry of a function that is hooked."""
    return Call(hook.target, hook.parameters)


def rules() -> Iterator[tuple[str, Rule]]:
    """Yields all that must hold, of hooks too: a name, and what says of sources why it does not hold, or None."""
    for hook in (*hooks.GUARDS, *hooks.HOOKS):
        yield from ((f"hook {name}", rule) for name, rule in of_hook(hook).rules())
    for entry in CONTRACT:
        yield from entry.rules()


def differences(sources: Sources, entries=CONTRACT) -> list[str]:
    """Returns what of these entries does not hold in the sources."""
    found = (rule(sources) for entry in entries for _, rule in entry.rules())
    return [fault for fault in found if fault is not None]
