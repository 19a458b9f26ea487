"""Reference of ngram_match: all matches of a row, sorted; their continuations put into the trie token by token."""

from typing import NamedTuple

import torch

from .merge_drafts import drafts_of


class Output(NamedTuple):
    tokens: torch.Tensor
    parents: torch.Tensor
    num_drafts: torch.Tensor
    match_len: torch.Tensor


def ngram_match(
    token_ids: torch.Tensor, seq_lens: torch.Tensor, draft_tokens: torch.Tensor | None = None,
    max_drafts: torch.Tensor | None = None,
    *, num_speculative_tokens: int, spec_steps: int | None = None, max_ngram_size: int, min_ngram_size: int = 1,
    max_matches: int = 1, prefer: str = "latest", token_budget: int | None = None,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/draft/ngram_match.py."""
    device, batch_size = token_ids.device, len(seq_lens)
    tries, match_len = [], torch.zeros(batch_size, dtype=torch.int32, device="cpu")
    lengths = seq_lens.clamp(0, token_ids.shape[1]).tolist()
    limits = [num_speculative_tokens] * batch_size
    if max_drafts is not None:
        limits = max_drafts.clamp(0, num_speculative_tokens).tolist()
    # what the budget leaves when every live row has its root
    room = None if token_budget is None else max(0, token_budget - sum(length > 0 for length in lengths))
    for request, length in enumerate(lengths):
        history = token_ids[request, :length].to("cpu", torch.int64)
        if draft_tokens is not None and length > 0:
            given = draft_tokens[request].to("cpu", torch.int64)
            history = torch.cat([history, given[(given < 0).cumsum(0) == 0]])
        matches = _matches(history, max_ngram_size, min_ngram_size, prefer)[:max_matches]
        trie = _trie(history.tolist(), matches, min(spec_steps or num_speculative_tokens, num_speculative_tokens))
        trie = trie[: limits[request]]
        if room is not None:
            trie, room = trie[:room], max(0, room - len(trie))
        if matches:
            match_len[request] = matches[0][0]
        tries.append(trie)
    return Output(*drafts_of(tries, num_speculative_tokens, device), match_len.to(device))


def _matches(history: torch.Tensor, longest: int, shortest: int, prefer: str) -> list[tuple[int, int]]:
    """(length, end) of all matches that count, in the order in which they are taken."""
    num_ends = len(history) - 1
    if num_ends < 1:
        return []
    is_match = history[1:] >= 0
    lengths = torch.zeros(num_ends, dtype=torch.int64, device="cpu")
    for size in range(1, min(longest, num_ends) + 1):
        wanted = history[-size]
        # the token size - 1 before each end; the first ends have none
        is_equal = torch.zeros(num_ends, dtype=torch.bool, device="cpu")
        is_equal[size - 1 :] = (history[: num_ends - size + 1] == wanted) & (wanted >= 0)
        is_match = is_match & is_equal
        lengths += is_match
    ends = torch.arange(num_ends, device="cpu")
    if prefer == "latest":
        ends = ends.flip(0)
    ends = ends[lengths[ends].sort(descending=True, stable=True).indices]
    ends = ends[lengths[ends] >= shortest]
    return list(zip(lengths[ends].tolist(), ends.tolist()))


def _trie(history: list[int], matches: list[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    """(token, parent) of every node behind the root, in the order in which they are made."""
    nodes: list[tuple[int, int]] = []
    number: dict[tuple[int, int], int] = {}  # (token, parent) -> node
    for _, end in matches:
        copied = history[end + 1 :]
        parent = 0
        for step in range(steps):
            token = copied[step % len(copied)]
            if token < 0:
                break
            if (token, parent) not in number:
                nodes.append((token, parent))
                number[token, parent] = len(nodes)
            parent = number[token, parent]
    return nodes
