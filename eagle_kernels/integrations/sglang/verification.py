"""Verification of trees in SGLang: greedy batches straight from logits, others by SGLang's own rule with our ops."""

from __future__ import annotations

import torch

from ...ops import VerifyOutput, verify_tree_greedy
from .. import sgl_kernel


def eagle_sample(original, verify_input, batch, logits_output, grammar_mask=None, *rest, **options):
    """Verifies a greedy batch in two launches, without a separate argmax; leaves every other batch to SGLang.

    SGLang's function then calls our filters and tree walks. Penalties, biases and watermarks change logits or need
    their tokens, so they are SGLang's. Simulated acceptance works as in SGLang.
    Returns predicts int32 [B * N], accepted lengths int32 [B] with the bonus, and accept_index int32 [B, S + 1].
    """
    sampling = batch.sampling_info
    changed = (sampling.acc_additive_penalties, sampling.acc_scaling_penalties, sampling.logit_bias)
    is_ours = (
        not batch.forward_mode.is_idle()
        and sampling.is_all_greedy
        and all(value is None for value in changed)
        and not rest
        and all(value is None for name, value in options.items() if name != "watermark_full_mask")
    )
    from sglang.srt.speculative import spec_utils

    simulated = spec_utils.SIMULATE_ACC_LEN > 0
    if not is_ours or (simulated and spec_utils.SIMULATE_ACC_TOKEN_MODE != "fixed"):
        return original(verify_input, batch, logits_output, grammar_mask, *rest, **options)
    logits = logits_output.next_token_logits
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    num_nodes, depth = verify_input.draft_token_num, verify_input.max_tree_depth
    batch_size = len(batch.seq_lens)
    candidates = verify_input.draft_token.view(batch_size, num_nodes)
    make = lambda *shape: torch.empty(shape, dtype=torch.int32, device=logits.device)  # noqa: E731
    # what the walk does not visit is 0, since the draft model reads all of it as tokens
    out = VerifyOutput(torch.zeros_like(make(batch_size * num_nodes)), make(batch_size, depth), make(batch_size))
    predicts, accept_index, num_accepted = verify_tree_greedy(
        candidates,
        verify_input.retrieve_index,
        verify_input.retrieve_next_token,
        verify_input.retrieve_next_sibling,
        target_logits=logits,
        spec_steps=depth - 1,
        keep_unvisited=True,
        out=out,
    )
    if simulated:
        accept_index = spec_utils.generate_simulated_accept_index(
            accept_index=accept_index,
            predict=predicts,
            num_correct_drafts=num_accepted,
            candidates=candidates,
            target_predict=None,
            simulate_acc_len=spec_utils.SIMULATE_ACC_LEN,
            simulate_acc_token_mode=spec_utils.SIMULATE_ACC_TOKEN_MODE,
            bs=batch_size,
            spec_steps=depth - 1,
        )
    return predicts, num_accepted + 1, accept_index


def verify_tree_greedy_func(
    original, predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
    retrieve_next_sibling, target_predict, topk=-1,
):  # fmt: skip
    """Walks trees along given tokens, as SGLang's function of this name does."""
    sgl_kernel.verify_tree_greedy(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token,
        retrieve_next_sibling, target_predict,
    )  # fmt: skip
    return predicts, accept_index, accept_token_num
