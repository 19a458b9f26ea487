"""Bugs of the plug-ins for servers and of the packages that have other projects' names."""

from __future__ import annotations

from .mutant import INTEGRATIONS, SGLANG, Mutant

_ATTENTION, _SAMPLING, _VERIFICATION = (f"{SGLANG}{name}.py" for name in ("attention", "sampling", "verification"))


def _of(file: str, *names: str) -> list[str]:
    return [f"op_tests/integrations/test_{file}.py::{name}" for name in names]


def _texts(*names: str) -> list[str]:
    return _of("sglang_sampling", *names)


_RULES = _texts("test_texts_are_those_of_the_rules[True]")

MUTANTS = [
    Mutant(
        "the seed of the neighbour",
        [(_VERIFICATION, "seeds(batch.req_pool_indices)", "seeds(batch.req_pool_indices.roll(1))")],
        _RULES,
    ),
    Mutant(
        "the penalties of the root for all nodes",
        [(_VERIFICATION, "penalize(tree, logits", "penalize((*tree[:2], tree[3], tree[3]), logits")],
        _RULES,
    ),
    Mutant(
        "min-p left out",
        [(_SAMPLING, "info.min_ps if info.need_min_p_sampling else None", "None")],
        _texts("test_filters_leave_what_sglang_s_leave[False-False-True]"),
    ),
    Mutant(
        "biases before penalties at nodes",
        [
            (_VERIFICATION, "    is_counted = is_matching and", "    _adjust(logits.view(batch_size, num_nodes, -1), sampling)\n    is_counted = is_matching and"),
            (_VERIFICATION, "batch.req_pool_indices)\n    _adjust(logits.view(batch_size, num_nodes, -1), sampling)\n",
             "batch.req_pool_indices)\n"),
        ],
        _RULES,
    ),
    Mutant(
        "SGLang's own penalties after its biases",
        [
            (_VERIFICATION, "    if sampling.acc_additive_penalties is not None:\n", "    if sampling.logit_bias is not None:\n        logits.add_(sampling.logit_bias[:, None])\n    if sampling.acc_additive_penalties is not None:\n"),
            (_VERIFICATION, "scale))\n    if sampling.logit_bias is not None:\n        logits.add_(sampling.logit_bias[:, None])\n", "scale))\n"),
        ],
        _of("sglang_steps", "test_sampled_verification"),
    ),
    Mutant(
        "a request that was retracted without its last token",
        [(_SAMPLING, "for token in request.output_ids]", "for token in request.output_ids[:-1]]")],
        _texts("test_requests_that_were_retracted_go_on"),
    ),
    Mutant(
        "filters one after another",
        [(_SAMPLING, '"filter_order": "joint"', '"filter_order": "top_k_first"')],
        _texts("test_filters_leave_what_sglang_s_leave[True-True-False]"),
    ),
    Mutant(
        "a seed that goes by the process",
        [(_SAMPLING, 'int.from_bytes(hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest(), "big")',
          "hash(str(request.rid))")],
        _texts("test_all_ranks_write_one_text"),
    ),
    Mutant(
        "stop tokens that min_new_tokens does not keep back",
        [(_SAMPLING, "(request.sampling_params.stop_token_ids, request.eos", "(request.eos")],
        _texts("test_nothing_ends_a_request_early[False]"),
    ),
    Mutant(
        "the steps of drafts counted as their beams",
        [(_ATTENTION, "device=self.device).repeat(topk)", "device=self.device).repeat_interleave(topk)")],
        _of("sglang_attention", "test_draft_levels"),
    ),
    Mutant(
        "thresholds of AITER's in each other's place",
        [(INTEGRATIONS + "aiter.py", "(threshold_single, threshold_acc)\n", "(threshold_acc, threshold_single)\n")],
        ["op_tests/integrations/test_aiter.py::test_each_threshold_of_the_walk_by_coins_has_its_place"],
    ),
]  # fmt: skip
