"""Reference of verify_chain: one request at a time, from probabilities, with draws that can be replaced."""

from collections.abc import Sequence

import torch

from ...residual import Draws, given_probs, on_target_ids, prob_at, probs_of_logits, ratio, subtract, widened
from ...tree import Output


def verify_chain(
    candidates: torch.Tensor, target_logits: torch.Tensor | None, draft_logits: torch.Tensor | None,
    positions: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor | None,
    draft_temperature: torch.Tensor | None = None, target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None, d2t: torch.Tensor | None = None,
    *, method: str = "standard",
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/rejection/verify_chain.py."""
    device = candidates.device
    batch_size, num_tokens = candidates.shape
    if target_probs is None:
        target_probs = probs_of_logits(target_logits, temperature.repeat_interleave(num_tokens))
    if draft_probs is None:
        draft_temperature = temperature if draft_temperature is None else draft_temperature
        draft_probs = probs_of_logits(draft_logits, draft_temperature.repeat_interleave(num_tokens - 1))
    vocab_size = target_probs.shape[1]
    draft_probs = on_target_ids(given_probs(draft_probs), d2t, vocab_size)
    target_probs = widened(given_probs(target_probs), draft_probs.shape[1])
    predicts = torch.full((batch_size, num_tokens), -1, dtype=torch.int32, device="cpu")
    accept_index = torch.full((batch_size, num_tokens), -1, dtype=torch.int32, device="cpu")
    accept_token_num = torch.zeros(batch_size, dtype=torch.int32, device="cpu")
    tokens = candidates.tolist()
    for request in range(batch_size):
        if not 0 <= tokens[request][0] < 2**31:
            continue
        accepted, bonus = verify_request(
            tokens[request],
            target_probs[request * num_tokens : (request + 1) * num_tokens].cpu(),
            draft_probs[request * (num_tokens - 1) : (request + 1) * (num_tokens - 1)].cpu(),
            positions[request * num_tokens : (request + 1) * num_tokens].tolist(),
            Draws(int(seeds[request])),
            method,
        )
        emitted = tokens[request][1 : accepted + 1] + [bonus]
        predicts[request, : accepted + 1] = torch.tensor(emitted, dtype=torch.int64, device="cpu")
        accept_index[request, : accepted + 1] = request * num_tokens + torch.arange(accepted + 1, device="cpu")
        accept_token_num[request] = accepted
    return Output(predicts.flatten().to(device), accept_index.to(device), accept_token_num.to(device))


def verify_request(
    tokens: Sequence[int], target_probs: torch.Tensor, draft_probs: torch.Tensor, positions: Sequence[int],
    draws: Draws, method: str = "standard",
) -> tuple[int, int]:  # fmt: skip
    """Returns the number of accepted drafts and the token after them, for one chain `tokens` [T], root first.
    target_probs [T, V] and draft_probs [T - 1, V] by target ids; row i of the latter is what tokens[i + 1] was drawn
    from. draws: `uniform(position, index)` is compared with `<` only, `choose(weights, position)` draws a token by its
    weight."""
    ratios = []  # p / q of each draft, up to the first that was not drawn from its row
    for target, draft, token in zip(target_probs, draft_probs, tokens[1:]):
        if not prob_at(draft, token) > 0:
            break
        ratios.append(ratio(prob_at(target, token), prob_at(draft, token)))
    accept = {"standard": _accept_one_by_one, "block": _accept_block}[method]
    accepted, share = accept(ratios, target_probs, draft_probs, positions, draws)
    weights = target_probs[accepted]
    if accepted < len(ratios):
        weights, _ = subtract(weights, draft_probs[accepted], share)
    return accepted, draws.choose(weights, positions[accepted] + 1)


def _accept_one_by_one(ratios, target_probs, draft_probs, positions, draws) -> tuple[int, float]:
    """Accepts up to the first failure: speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1)."""
    accepted = 0
    while accepted < len(ratios) and draws.uniform(positions[accepted + 1], accepted) < ratios[accepted]:
        accepted += 1
    return accepted, 1.0


def _accept_block(ratios, target_probs, draft_probs, positions, draws) -> tuple[int, float]:
    """Accepts up to the last success: block verification (Sun et al., arXiv 2403.10444, algorithm 2)."""
    accepted, accepted_share, share = 0, 1.0, 1.0
    for index, factor in enumerate(ratios, start=1):
        share = min(share * factor, 1.0)
        chance = share
        if index < len(ratios):
            mass = float((share * target_probs[index] - draft_probs[index]).clamp(min=0).sum())
            divisor = mass + (1.0 - share)
            chance = mass / divisor if divisor > 0 else 1.0
        # keyed by the place in the chain as well: block verification looks at coins after the draft that it ends with,
        # and the next round must not find them again
        if draws.uniform(positions[index], index - 1) < chance:
            accepted, accepted_share = index, share
    return accepted, accepted_share
