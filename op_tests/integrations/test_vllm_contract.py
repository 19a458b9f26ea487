"""What the plug-in relies on in vLLM is held against the sources of released versions, which are never imported.

Plain runs skip this. EAGLE_KERNELS_VLLM_WHEELS is a folder of wheels, or `download`, which reads 2 MB for each version:

    EAGLE_KERNELS_VLLM_WHEELS=download python -m pytest op_tests/integrations/test_vllm_contract.py
"""

from __future__ import annotations

import pytest

from eagle_kernels.integrations.shared.contract import rules
from eagle_kernels.integrations.shared.sources import Sources
from eagle_kernels.integrations.vllm import contract, hooks
from op_tests.integrations.releases import releases_of, without

released = releases_of("vLLM", "vllm")
PAIRS = list(rules((*hooks.GUARDS, *hooks.HOOKS), contract.CONTRACT))
RULES = dict(PAIRS)
NEWEST = "0.33.0"  # when this was written; it is read, and not supported
# There logits processors stand in a list, sampler and verification take more, and drafts are sampled by one function.
# What no name tells: drafts' steps change metadata in place (`update_draft_decode_metadata`) instead of building it,
# which would leave our rows as they were, and drafts in a prompt's last step are tokens that must be refused.
DIFFERS = {
    "hook DraftModelSpeculator._greedy_sample_draft()",
    "speculative.RejectionSampleMethod",
    "FlashAttentionBackend.get_supported_kernel_block_sizes()",
    "TritonAttentionBackend.get_supported_kernel_block_sizes()",
    "self.rejection_sampler(logits, input_batch, self.speculator.draft_logits) in GPUModelRunner.sample",
    "sampler.Sampler.bad_words_state", "sampler.Sampler.logit_bias_state", "Sampler.sample()",
    "Sampler.returns_logprobs()", "LogitBiasState.apply_logit_bias()", "PenaltiesState.apply_penalties()",
    "BadWordsState.apply_bad_words()", "SamplingStates.get_top_k_top_p()",
    "return (top_k, top_p) in SamplingStates.get_top_k_top_p", "rejection_sampler.RejectionSampler()",
    "RejectionSampler.__call__()", "RejectionSampler._get_logprobs_tensors()",
    "input_ids_ptr + cur_req_first_pos + spec_offset) in bad_words._bad_words_kernel",
}  # fmt: skip


@pytest.fixture(scope="module", params=dict.fromkeys(hooks.TESTED))
def sources(request) -> Sources:
    return released(request.param)


def test_no_two_rules_have_one_name():
    assert len(RULES) == len(PAIRS)


@pytest.mark.parametrize("name", RULES)
def test_it_holds(sources, name):
    assert RULES[name](sources) is None


@pytest.mark.parametrize("name", RULES)
def test_a_name_that_is_gone_is_told(sources, name):
    assert RULES[name](without(sources, name)) is not None


def test_what_differs_in_the_newest_release():
    newest = released(NEWEST)
    assert {name for name, rule in PAIRS if rule(newest) is not None} == DIFFERS
