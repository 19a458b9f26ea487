"""Verification of trees in SGLang: greedy batches straight from logits; others by SGLang's own rule of coins, or by
sample and match (`sampling.py`)."""

import torch

from ...ops import VerifyOutput, verify_tree_coins, verify_tree_greedy, verify_tree_sampled
from .. import sgl_kernel
from . import sampling as matching
from .parts import is_on


def eagle_sample(original, verify_input, batch, logits_output, grammar_mask=None, *rest, **options):
    """Verifies the trees of a batch; leaves idle batches, rejection sampling and watermarks to SGLang.
    Penalties, biases, grammar masks, filters, seeds and simulated acceptance are applied as SGLang applies them. On AMD
    GPUs, where SGLang takes the argmax whatever the temperature, requests that sample are sampled.
    Returns predicts int32 [B * N], accepted lengths int32 [B] with the bonus, and accept_index int32 [B, S + 1]."""
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative import spec_utils
    from sglang.srt.utils import async_probe

    spec, is_simulated = get_spec(), spec_utils.SIMULATE_ACC_LEN > 0
    is_ours = (
        not batch.forward_mode.is_idle()
        and not spec.speculative_use_rejection_sampling
        and not (is_simulated and spec_utils.SIMULATE_ACC_TOKEN_MODE != "fixed")
        and not rest
        and all(value is None for name, value in options.items() if name != "watermark_full_mask")
    )
    if not is_ours:
        return original(verify_input, batch, logits_output, grammar_mask, *rest, **options)
    batch_size, num_nodes = len(batch.seq_lens), verify_input.draft_token_num
    sampling, logits = batch.sampling_info, logits_output.next_token_logits
    async_probe.sanitize_nan_logits(logits, "verify: target model logits")
    tree = (
        verify_input.draft_token.view(batch_size, num_nodes),
        verify_input.retrieve_index,
        verify_input.retrieve_next_token,
        verify_input.retrieve_next_sibling,
    )
    is_matching = is_on("match")
    is_counted = is_matching and matching.has_penalties(sampling)
    if is_counted:
        logits = logits_output.next_token_logits = matching.REQUESTS.penalize(tree, logits, batch.req_pool_indices)
    _adjust(logits.view(batch_size, num_nodes, -1), sampling)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    depth = verify_input.max_tree_depth
    if is_matching and not sampling.is_all_greedy:
        seeds = matching.REQUESTS.seeds(batch.req_pool_indices)
        drawn = verify_tree_sampled(
            *tree, logits, verify_input.positions, seeds, **matching.filters(sampling), spec_steps=depth - 1
        )
        out = VerifyOutput(drawn.predicts.clamp_(min=0), drawn.accept_index, drawn.accept_token_num)
    else:
        out = _walk(tree, batch, logits, depth - 1, spec)
    if not sampling.is_all_greedy or torch.version.hip:
        out = _agree(out)
    predicts, accept_index, num_accepted = out
    if is_simulated:
        accept_index = spec_utils.generate_simulated_accept_index(
            accept_index=accept_index, predict=predicts, num_correct_drafts=num_accepted, candidates=tree[0],
            target_predict=None, simulate_acc_len=spec_utils.SIMULATE_ACC_LEN,
            simulate_acc_token_mode=spec_utils.SIMULATE_ACC_TOKEN_MODE, bs=batch_size, spec_steps=depth - 1,
        )  # fmt: skip
    if is_counted:
        is_output = accept_index >= 0
        tokens = predicts.long()[accept_index.clamp(min=0).long()]
        matching.REQUESTS.count(batch.req_pool_indices, tokens, is_output.long())
    return predicts, num_accepted + 1, accept_index


def _walk(tree, batch, logits: torch.Tensor, spec_steps: int, spec) -> VerifyOutput:
    """Walks trees along the most likely tokens where all requests are greedy; else by SGLang's rule of coins."""
    batch_size, num_nodes = tree[0].shape
    make = lambda *shape: torch.empty(shape, dtype=torch.int32, device=logits.device)  # noqa: E731
    # what the walk does not visit is 0, since the draft model reads all of it as tokens
    predicts = torch.zeros(batch_size * num_nodes, dtype=torch.int32, device=logits.device)
    out = VerifyOutput(predicts, make(batch_size, spec_steps + 1), make(batch_size))
    options = {"spec_steps": spec_steps, "keep_unvisited": True, "out": out}
    if batch.sampling_info.is_all_greedy:
        return verify_tree_greedy(*tree, target_logits=logits, **options)
    return verify_tree_coins(
        *tree, _probs(logits, batch.sampling_info, num_nodes), *_coins(batch, tree[0]),
        threshold_single=spec.speculative_accept_threshold_single, threshold_acc=spec.speculative_accept_threshold_acc,
        **options,
    )  # fmt: skip


def _adjust(logits: torch.Tensor, sampling) -> None:
    """Applies penalties and biases in place, one row [V] for all nodes of a request: logits [B, N, V]."""
    if sampling.acc_additive_penalties is not None:
        logits.add_(sampling.acc_additive_penalties[:, None])
    if sampling.acc_scaling_penalties is not None:
        scale = sampling.acc_scaling_penalties[:, None]
        logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))
    if sampling.logit_bias is not None:
        logits.add_(sampling.logit_bias[:, None])


def _probs(logits: torch.Tensor, sampling, num_nodes: int) -> torch.Tensor:
    """Returns the probabilities of every node, fp32 [B * N, V], with temperature, top-k and top-p."""
    rows = lambda values: values.repeat_interleave(num_nodes, 0)  # noqa: E731
    scaled = logits.view(-1, num_nodes, logits.shape[-1]) / sampling.temperatures[:, None]
    probs = torch.softmax(scaled.flatten(0, 1), -1, dtype=torch.float32)
    if sampling.need_top_k_sampling:
        probs = sgl_kernel.top_k_renorm_prob(probs, rows(sampling.top_ks))
    if sampling.need_top_p_sampling:
        probs = sgl_kernel.top_p_renorm_prob(probs, rows(sampling.top_ps))
    return probs


def _coins(batch, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns SGLang's coins, seeded where requests have seeds: of each node [B, N], and of the bonus [B]."""
    from sglang.srt.speculative import eagle_utils

    return eagle_utils._verify_coins(
        sampling_info=batch.sampling_info, seq_lens=batch.seq_lens, draft_token_num=candidates.shape[1],
        candidates=candidates, device=candidates.device,
    )  # fmt: skip


def _agree(out: VerifyOutput) -> VerifyOutput:
    """Returns rank 0's result on all ranks, as SGLang does after sampling, and on AMD GPUs always; in one message."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().attn_tp_group if is_dp_attention_enabled() else get_parallel().tp_group
    if group.world_size == 1:
        return out
    message = torch.cat([tensor.flatten() for tensor in out])
    group.broadcast(message, src=0)
    parts = message.split([tensor.numel() for tensor in out])
    return VerifyOutput(*(part.view(tensor.shape) for part, tensor in zip(parts, out)))


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
