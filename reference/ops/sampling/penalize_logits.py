"""Reference of penalize_logits: every node's path is followed up to the root, then its row is processed."""

import torch

from ...sampling import Processors, processed_logits


def penalize_logits(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, target_logits: torch.Tensor, repetition_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None, presence_penalty: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None, output_counts: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None, token_bitmask: torch.Tensor | None = None,
    min_tokens: torch.Tensor | None = None, num_output_tokens: torch.Tensor | None = None,
    end_token_ids: torch.Tensor | None = None, bad_token_ids: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See eagle_kernels/ops/sampling/penalize_logits.py."""
    batch_size, num_nodes = candidates.shape
    vocab_size, device = target_logits.shape[1], target_logits.device
    own = Processors(repetition_penalty, frequency_penalty, presence_penalty, prompt_mask, output_counts, logit_bias)
    result = target_logits.to(torch.float32).clone()
    tokens, retrieved = candidates.tolist(), retrieve_index.tolist()
    links = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    for request in range(batch_size):
        if retrieved[request][0] // num_nodes != request:
            continue
        is_sound = [index // num_nodes == request for index in retrieved[request]]
        paths = _paths(links[0][request], links[1][request], is_sound)
        for node, path in enumerate(paths):
            row = request * num_nodes + node
            counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
            if output_counts is not None:
                counts += output_counts[request]
            for above in path:
                token = tokens[request][above]
                if is_sound[above] and 0 <= token < vocab_size:
                    counts[0, token] += 1
            bitmask = None if token_bitmask is None else token_bitmask[row : row + 1]
            here = own.rows(slice(request, request + 1))._replace(output_counts=counts, token_bitmask=bitmask)
            logits = processed_logits(target_logits[row : row + 1], here)[0].clone()
            forbidden = [] if bad_token_ids is None else _of_request(bad_token_ids, request)
            if min_tokens is not None and int(num_output_tokens[request]) + len(path) < int(min_tokens[request]):
                forbidden = forbidden + _of_request(end_token_ids, request)
            for token in forbidden:
                if 0 <= token < vocab_size:
                    logits[token] = float("-inf")
            result[row] = logits
    return result


def _of_request(ids: torch.Tensor, request: int) -> list[int]:
    """Returns the list of a request, or that of all."""
    return (ids if ids.dim() == 1 else ids[request]).tolist()


def _paths(first_child: list[int], next_sibling: list[int], is_sound: list[bool]) -> list[list[int]]:
    """Returns the drafts from the root, which is none, to each node. The first link that names a node counts."""
    num_nodes = len(first_child)
    paths: list[list[int]] = [[]] + [[node] for node in range(1, num_nodes)]
    is_named = [False] * num_nodes
    # nodes follow those that name them: by the time a node passes its path on, it has its own
    for node in range(num_nodes):
        child, sibling = first_child[node], next_sibling[node]
        if node < child < num_nodes and not is_named[child]:
            paths[child], is_named[child] = [*paths[node], child], True
        if node < sibling < num_nodes and is_sound[node] and not is_named[sibling]:
            paths[sibling], is_named[sibling] = [*paths[node][:-1], sibling], True
    return paths
