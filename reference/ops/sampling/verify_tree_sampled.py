"""Reference of verify_tree_sampled."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...accept_policy import most_accepted, planted
from ...sampling import Filters, Processors, draw_tokens, kept_logits, log_probabilities, scaled_logits
from ...tree import walk
from ..verify.verify_commit import verify_commit


class Output(NamedTuple):
    predicts: torch.Tensor
    accept_index: torch.Tensor
    accept_token_num: torch.Tensor
    logprobs: torch.Tensor
    raw_logprobs: torch.Tensor
    new_seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    accept_lengths: torch.Tensor
    tokens: torch.Tensor
    hidden_rows: torch.Tensor
    last_row: torch.Tensor


def verify_tree_sampled(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_logits: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor,
    temperature: torch.Tensor, top_k: torch.Tensor | None = None, top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None, presence_penalty: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None, output_counts: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None, token_bitmask: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None, is_live: torch.Tensor | None = None,
    simulated_rates: torch.Tensor | None = None,
    *, spec_steps: int, filter_order: str = "top_k_first", return_logprobs: bool = False, accept_policy: str = "normal",
    draw: Callable[[torch.Tensor, int, int], int] | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/sampling/verify_tree_sampled.py.
    draw: draws instead of the noise, for exact enumeration: the token for the kept logits [V] of a request's node."""
    batch_size, num_nodes = candidates.shape
    device, num_columns = candidates.device, spec_steps + 1
    requests = torch.arange(batch_size, device=device)
    filters = Filters(top_k, top_p, min_p, filter_order)
    # of each request, one row of everything but the grammar, whose rows belong to nodes
    processors = Processors(
        repetition_penalty, frequency_penalty, presence_penalty, prompt_mask, output_counts, logit_bias
    )
    counts = output_counts
    if processors.has_penalties and counts is None:
        counts = torch.zeros(batch_size, target_logits.shape[1], dtype=torch.int32, device=device)

    def of_rows(rows: torch.Tensor, counts: torch.Tensor | None):
        """Returns temperature, filters and processors of rows of the logits, with the output's counts at each."""
        request = rows // num_nodes
        bitmask = None if token_bitmask is None else token_bitmask[rows]
        own = processors.rows(request)._replace(output_counts=counts, token_bitmask=bitmask)
        return temperature[request], filters.rows(request), own

    positions = positions.to(torch.int64)
    drafts: list[list[int]] = [[] for _ in range(batch_size)]
    logprobs = torch.full((2, batch_size, num_columns), float("-inf"), dtype=torch.float32, device=device)
    all_drawn = None
    if not processors.has_penalties and draw is None:
        rows = torch.arange(batch_size * num_nodes, device=device)
        all_drawn = draw_tokens(target_logits, positions + 1, seeds[rows // num_nodes], *of_rows(rows, None))
        all_drawn = all_drawn.tolist()

    def token_at(request: int, node: int) -> int:
        """Draws at a node; called for the nodes of a request's path, root first."""
        index = request * num_nodes + node
        row = torch.tensor([index], dtype=torch.int64, device=device)
        if node > 0:
            drafts[request].append(int(candidates[request, node]))
        own_counts = None if counts is None else counts[request : request + 1].clone()
        for token in drafts[request] if own_counts is not None else ():
            own_counts[0, token] += 1
        own = of_rows(row, own_counts)
        if all_drawn is not None:
            token = all_drawn[index]
        elif draw is not None:
            token = draw(kept_logits(target_logits[row], *own)[0], request, node)
        else:
            token = int(draw_tokens(target_logits[row], positions[row] + 1, seeds[request : request + 1], *own))
        if return_logprobs:
            at = torch.tensor([token], dtype=torch.int64, device=device)
            kept = kept_logits(target_logits[row], *own)
            raw = scaled_logits(target_logits[row], torch.ones(1, dtype=torch.float32, device=device))
            logprobs[0, request, len(drafts[request])] = log_probabilities(kept, at)[0]
            logprobs[1, request, len(drafts[request])] = log_probabilities(raw, at)[0]
        return token

    links = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    token_at = planted(
        token_at, *links, spec_steps=spec_steps, accept_policy=accept_policy, simulated_rates=simulated_rates,
        seeds=seeds, positions=positions,
    )  # fmt: skip
    walked = walk(*links, spec_steps, token_at, most_accepted=most_accepted(spec_steps, accept_policy))
    none = requests[:0]
    no_column = none.new_empty((0, num_columns))
    # torch.library wants outputs that share no memory
    committed = (none, none.clone(), none.to(torch.int32), no_column, no_column.clone(), none.clone())
    if seq_lens is not None:
        committed = verify_commit(*walked, seq_lens, is_live)
    if not return_logprobs:
        logprobs = logprobs[:, :0]
    return Output(*walked, *(part.clone() for part in logprobs), *committed)
