"""Which functions of SGLang the plug-in hooks, and the signatures that it relies on.

One table serves registration, the check in every scheduler process, `python -m eagle_kernels env`, and the contract
test, which reads the sources of released versions. Importing this file imports nothing of SGLang.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

# The first was run. The sources of all releases up to the last hold the contract; CI reads those of the two.
TESTED = ("0.5.17", "0.5.23")


@dataclass(frozen=True)
class Hook:
    """A function of SGLang, and what is called around it: it gets the original first, then the original's arguments.
    part: empty for guards, which are always on. ours: module and name in this folder. parameters: names that ours
    relies on, in this order at the front of SGLang's signature."""

    part: str
    target: str
    ours: str
    parameters: tuple[str, ...]

    def function(self) -> Callable:
        """Imports what takes the place of SGLang's function."""
        module, name = self.ours.rsplit(".", 1)
        return getattr(importlib.import_module("." + module, __package__), name)

    def fault(self) -> str | None:
        """Says what is wrong with the target in the installed SGLang; None if it is as expected."""
        try:
            function = resolve(self.target)
        except (ImportError, AttributeError) as error:
            return f"{self.target} does not exist ({error})"
        function = inspect.unwrap(getattr(function, "__func__", function))  # also of a method of the class
        found = tuple(inspect.signature(function).parameters)
        if found[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes {', '.join(found)}; expected first {', '.join(self.parameters)}"
        return None


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
    Hook("", _SRT + "server_args.ServerArgs.check_server_args", "guards.check_server_args", ("self",)),
    Hook("", _SRT + "managers.scheduler.Scheduler.__init__", "guards.start_scheduler", ("self", "server_args")),
    Hook("", _SPEC + "spec_info.SpeculativeAlgorithm.from_string", "guards.know_algorithm", ("cls", "name")),
    Hook("", _ARGUMENTS + "_resolve_speculative_algorithm_alias", "guards.resolve_algorithm",
         ("speculative_algorithm", "speculative_draft_model_path")),
    Hook("", _SRT + "arg_groups.overrides._attention_backend_default", "prompts.choose_reader", ("view",)),
    Hook("", _ARGUMENTS + "_handle_eagle_family", "guards.handle_eagle_family", ("server_args",)),
    Hook("", _ARGUMENTS + "_auto_choose_speculative_params", "guards.choose_drafts", ("server_args", "model_arch")),
    Hook("", _SPEC + "eagle_worker_common.run_eagle_verify", "guards.run_eagle_verify", ("batch",)),
)  # fmt: skip
HOOKS = (
    Hook("attention", _SPEC + "draft_utils.DraftBackendFactory.create_decode_backend", "guards.create_decode_backend",
         ("self",)),
    Hook("attention", _SPEC + "draft_utils.DraftBackendFactory.create_draft_extend_backend",
         "guards.create_draft_extend_backend", ("self",)),
    Hook("attention", _SPEC + "eagle_utils.build_tree_kernel_efficient", "trees.build_tree_kernel_efficient", _BUILD),
    Hook("verify", _SPEC + "eagle_utils.eagle_sample", "verification.eagle_sample",
         ("verify_input", "batch", "logits_output", "grammar_mask")),
    Hook("verify", _SPEC + "eagle_utils.verify_tree_greedy_func", "verification.verify_tree_greedy_func", _WALK),
    Hook("match", _INFO + "from_schedule_batch", "sampling.from_schedule_batch", ("cls", "batch", "vocab_size")),
    Hook("match", _INFO + "copy_for_forward", "sampling.copy_for_forward", ("self",)),
    Hook("match", _SRT + "model_executor.model_runner.ModelRunner.sample", "sampling.sample",
         ("self", "logits_output", "forward_batch")),
    Hook("match", _SRT + "layers.sampler.Sampler.forward", "sampling.forward",
         ("self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs",
          "positions")),
    Hook("draft", _SPEC + "eagle_worker_v2.EagleDraftWorker.draft_forward", "drafting.draft_forward",
         ("self", "forward_batch")),
    Hook("kv", _SPEC + "spec_utils.move_accept_tokens_to_target_kvcache",
         "cache_locs.move_accept_tokens_to_target_kvcache",
         ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator")),
    Hook("kv", "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_uniform_func",
         "cache_locs.assign_extend_cache_locs_uniform_func",
         ("req_pool_indices", "req_to_token", "start_offset", "batch_size", "draft_token_num", "device")),
    Hook("nn", _SRT + "layers.layernorm.RMSNorm.forward_cuda", "layers.forward_norm",
         ("self", "x", "residual", "post_residual_addition")),
    Hook("nn", _SRT + "layers.activation.SiluAndMul.forward_cuda", "layers.forward_activation", ("self", "x")),
)  # fmt: skip


def resolve(target: str):
    """Imports a dotted path; raises ImportError or AttributeError where it does not exist."""
    names = target.split(".")
    for size in range(len(names) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(names[:size]))
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise  # the module is there, and something that it needs is not
            continue
        for name in names[size:]:
            value = getattr(value, name)
        return value
    raise ImportError(f"no module of {target}")
