"""Bugs of the plug-ins for servers and of the packages that have other projects' names."""

from __future__ import annotations

from .mutant import INTEGRATIONS, SGLANG, Mutant, bug

_ATTENTION, _SAMPLING, _VERIFICATION = (f"{SGLANG}{name}.py" for name in ("attention", "sampling", "verification"))


def _of(file: str, *names: str) -> list[str]:
    return [f"op_tests/integrations/test_{file}.py::{name}" for name in names]


def _texts(*names: str) -> list[str]:
    return _of("sglang_sampling", *names)


_BIAS = "    if sampling.logit_bias is not None:\n        logits.add_(sampling.logit_bias[:, None])\n"
_RULES = _texts("test_requests_come_and_go[True]")

MUTANTS = [
    bug("the seed of the neighbour", _VERIFICATION,
        "seeds(batch.req_pool_indices)", "seeds(batch.req_pool_indices.roll(1))", *_RULES),
    bug("the penalties of the root for all nodes", _VERIFICATION,
        "penalize(tree, logits", "penalize((*tree[:2], tree[3], tree[3]), logits", *_RULES),
    bug("min-p left out", _SAMPLING,
        "info.min_ps if info.need_min_p_sampling else None", "None",
        *_texts("test_filters_leave_what_sglang_s_leave[False-False-True]")),
    Mutant("biases before penalties at nodes", [
        (_VERIFICATION, "    is_counted = is_matching and",
         "    _adjust(logits.view(batch_size, num_nodes, -1), sampling)\n    is_counted = is_matching and"),
        (_VERIFICATION, "batch.req_pool_indices)\n    _adjust(logits.view(batch_size, num_nodes, -1), sampling)\n",
         "batch.req_pool_indices)\n"),
    ], _RULES),
    Mutant("SGLang's own penalties after its biases", [
        (_VERIFICATION, "scale))\n" + _BIAS, "scale))\n"),
        (_VERIFICATION, "    if sampling.acc_additive_penalties is not None:\n",
         _BIAS + "    if sampling.acc_additive_penalties is not None:\n"),
    ], _of("sglang_steps", "test_greedy_verification")),
    bug("a request that was retracted without its last token", _SAMPLING,
        "for token in request.output_ids]", "for token in request.output_ids[:-1]]",
        *_texts("test_requests_that_were_retracted_go_on")),
    bug("filters one after another", _SAMPLING,
        '"filter_order": "joint"', '"filter_order": "top_k_first"',
        *_texts("test_filters_leave_what_sglang_s_leave[True-True-False]")),
    bug("a seed that goes by the process", _SAMPLING,
        'int.from_bytes(hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest(), "big")',
        "hash(str(request.rid))",
        *_texts("test_all_ranks_write_one_text")),
    bug("stop tokens that min_new_tokens does not keep back", _SAMPLING,
        "(request.sampling_params.stop_token_ids, request.eos", "(request.eos",
        *_texts("test_nothing_ends_a_request_early[False]")),
    bug("the steps of drafts counted as their beams", _ATTENTION,
        "device=self.device).repeat(topk)", "device=self.device).repeat_interleave(topk)",
        *_of("sglang_attention", "test_draft_levels")),
    bug("thresholds of AITER's in each other's place", INTEGRATIONS + "aiter.py",
        "(threshold_single, threshold_acc)\n", "(threshold_acc, threshold_single)\n",
        "op_tests/integrations/test_aiter.py::test_each_threshold_of_the_walk_by_coins_has_its_place"),
    bug("ends padded with a token", _SAMPLING,
        "torch.nn.functional.pad(self._ends, (0, missing), value=-1)",
        "torch.nn.functional.pad(self._ends, (0, missing))",
        *_texts("test_nothing_else_waits")),
    bug("ends of the model that min_new_tokens does not keep back", _SAMPLING,
        "request.eos_token_ids, of_tokenizer", "of_tokenizer",
        *_texts("test_nothing_ends_a_request_early[False]")),
    Mutant("a batch as it was when its first request came", [
        (_SAMPLING, "return batch is not None and any(map(is_penalised, batch.reqs))", "return self._was"),
        (_SAMPLING, "self._batch = weakref.ref(batch)\n",
         "self._batch = weakref.ref(batch)\n        self._was = any(map(is_penalised, batch.reqs))\n"),
    ], _texts("test_requests_join_one_by_one[False]")),
    bug("counts that move when their number grows", _SAMPLING,
        "(0, 0, 0, more)", "(0, 0, more, 0)", *_texts("test_requests_join_one_by_one[False]")),
    bug("seeds of 62 bits", _SAMPLING,
        "return seed % 2**63", "return seed % 2**62", *_texts("test_seeds_of_any_size_are_served")),
    bug("log-probabilities of drafts before penalties", _VERIFICATION,
        "logits = logits_output.next_token_logits = matching", "logits = matching",
        *_texts("test_log_probabilities_of_drafts_are_of_adjusted_logits")),
    bug("simulated acceptance told of the bonus", _VERIFICATION,
        "num_correct_drafts=num_accepted", "num_correct_drafts=num_accepted + 1",
        *_of("sglang_steps", "test_simulated_acceptance")),
    bug("scales of keys and values in each other's place", _ATTENTION,
        'cache["k_scale"], cache["v_scale"] =', 'cache["v_scale"], cache["k_scale"] =',
        *_of("sglang_attention", "test_decode")),
    bug("words of 63 bits", _ATTENTION,
        "return word - (1 << 64) if word >> 63 else word", "return word & ((1 << 63) - 1)",
        *_of("sglang_attention", "test_draft_levels")),
    bug("a graph with the mask of its capture", _ATTENTION,
        "self._verify_mask.buffer[:batch_size] if self.is_static else forward_batch", "forward_batch",
        *_of("sglang_attention", "test_trees")),
    bug("sgl_kernel's thresholds in each other's place", INTEGRATIONS + "sgl_kernel.py",
        "threshold_single=threshold_single, threshold_acc=threshold_acc",
        "threshold_single=threshold_acc, threshold_acc=threshold_single",
        *_of("sgl_kernel", "test_sample")),
    bug("a norm without its epsilon", INTEGRATIONS + "sglang_elementwise.py",
        'options = {"eps": eps, ', "options = {", *_of("sglang_elementwise", "test_norms")),
    bug("AITER's temperature of 0 as none", INTEGRATIONS + "aiter_engine.py",
        "if value is not None}\n        texts", "if value}\n        texts",
        *_of("aiter", "test_what_the_engine_is_told_and_tells")),
    bug("attention's rows in the order of their tokens", INTEGRATIONS + "transformers.py",
        "torch.empty_like(output).scatter_(1, order.expand_as(output), output)",
        "output.gather(1, order.expand_as(output))",
        *_of("transformers", "test_rows")),
    bug("AITER's top_p of 0 as none", INTEGRATIONS + "aiter.py",
        "rows(top_p, ", "rows(top_p or None, ",
        *_of("aiter", "test_every_number_of_sampling_reaches_the_op")),
    bug("ranks that match do not wait for the first one's draws", _VERIFICATION,
        "if not sampling.is_all_greedy or", "if not (sampling.is_all_greedy or is_matching) or",
        *_of("sglang_steps", "test_ranks_take_the_first_one_s_verdict")),
    bug("candidates of a beam counted as one each", SGLANG + "drafting.py",
        "topk + (num_steps - 1) * topk**2 <= MAX", "num_steps * topk <= MAX",
        *_of("sglang_steps", "test_we_draft_exactly_the_trees_that_our_ops_take")),
    bug("the most keys of drafts refused", SGLANG + "guards.py",
        "topk * steps > MAX_DRAFT_KEYS", "topk * steps >= MAX_DRAFT_KEYS",
        *_of("sglang_plugin", "test_sizes_are_refused_from_where_our_ops_refuse_them_on")),
    bug("trees verified by whoever reads prompts", SGLANG + "prompts.py",
        '        more["speculative_attention_mode"] = "decode"\n', "        pass\n",
        *_of("sglang_prompts", "test_who_reads_prompts")),
    bug("prompts taken from a backend that the user named", SGLANG + "prompts.py",
        "if view.prefill_attention_backend is None and base == NAME:", "if base == NAME:",
        *_of("sglang_prompts", "test_who_reads_prompts")),
    bug("steps of verification read by the backend for prompts", _ATTENTION,
        "or mode.is_target_verify() or mode.is_draft_extend_v2()\n", "or mode.is_target_verify()\n",
        *_of("sglang_prompts", "test_a_draft_s_prompts_go_where_the_target_s_go")),
    bug("SGLang's seed 0 as none", SGLANG + "sampling.py",
        "if seed is None:", "if not seed:",
        *_of("sglang_sampling", "test_a_seed_that_is_given_is_the_seed")),
]  # fmt: skip
