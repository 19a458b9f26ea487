"""Structured outputs of requests whose drafts are trees: the host follows a grammar node by node.

For these requests vLLM brings drafts to its scheduler, which drops what a grammar forbids and makes a mask for each row
of a chain. Here each draft brings its parent along, in the upper half of its number. None is dropped, since nothing
draws what a mask forbids, and the mask of a row is that of the grammar after the path to its node.
"""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import torch

from .trees import shape_of

PARENT = 32  # the bits of a token below its parent
ANY = -1  # a word of a mask that allows all
UNKNOWN = -1  # vLLM's draft that no one knows


class State(NamedTuple):
    """What follows a node: the path's tokens from the root on, and those that a grammar takes; None: there is none yet.

    A grammar begins where a model has ended its reasoning.
    """

    path: tuple[int, ...]
    taken: tuple[int, ...] | None


def parents_of(drafted: torch.Tensor) -> torch.Tensor:
    """Returns the parents int64 [B, N - 1] of the nodes after the root, of trees as in `Trees.state`."""
    words, node = drafted[3:], torch.arange(drafted.shape[2], device=drafted.device)
    sees = words[node // 64].permute(1, 2, 0) >> (node % 64) & 1 > 0  # [B, N, N]
    return torch.where(sees & (node < node[:, None]), node, 0).amax(-1)[:, 1:]


# in workers


def set_draft_tokens(original, handler, input_batch, draft_tokens):
    """Keeps drafts for the scheduler, with their parents."""
    parents = getattr(input_batch, "eagle_kernels_parents", None)
    return original(handler, input_batch, draft_tokens if parents is None else draft_tokens + (parents << PARENT))


def apply_grammar_bitmask(original, worker, logits, input_batch, grammar_req_ids, grammar_bitmask, *given, **options):
    """Masks logits as vLLM does, and notes whose drafts the scheduler did not know: it has left their masks empty."""
    is_empty, unknown, row = (grammar_bitmask == 0).all(axis=1), set(), 0
    counts = dict(zip(input_batch.req_ids, torch.from_numpy(input_batch.cu_num_logits_np).diff().tolist()))
    for name in grammar_req_ids:
        if is_empty[row : row + counts[name]].any():
            unknown.add(name)
        row += counts[name]
    input_batch.eagle_kernels_unknown = unknown
    return original(worker, logits, input_batch, grammar_req_ids, grammar_bitmask, *given, **options)


# where the scheduler is


def update_draft_token_ids(original, scheduler, draft_token_ids):
    """Gives requests their drafts, for the step that is scheduled next."""
    if shape_of(scheduler.vllm_config) is None:
        return original(scheduler, draft_token_ids)
    for request, nodes in _running(scheduler, draft_token_ids):
        request.spec_token_ids = [] if request.is_prefill_chunk else nodes


def update_draft_token_ids_in_output(original, scheduler, draft_token_ids, scheduler_output):
    """Gives requests their drafts in a step that is scheduled already."""
    if shape_of(scheduler.vllm_config) is None:
        return original(scheduler, draft_token_ids, scheduler_output)
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    for request, nodes in _running(scheduler, draft_token_ids):
        if scheduled.get(request.request_id):
            scheduled[request.request_id] = nodes[: len(scheduled[request.request_id])]
    scheduler_output.num_invalid_spec_tokens = {}


def _running(scheduler, draft_token_ids):
    """Yields requests that have not ended, with their drafts."""
    for name, nodes in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids):
        request = scheduler.requests.get(name)
        if request is not None and not request.is_finished():
            yield request, nodes


def grammar_bitmask(original, manager, requests, structured_output_request_ids, scheduled_spec_decode_tokens):
    """Returns the masks int32 [rows, words] of requests, one request after another; see `original`."""
    names, scheduled = structured_output_request_ids, scheduled_spec_decode_tokens
    if shape_of(manager.vllm_config) is None or not any(map(scheduled.get, names)):
        return original(manager, requests, names, scheduled)
    masks = []
    for name in names:
        if scheduled.get(name):
            masks.append(_masks(manager, requests[name], scheduled[name]))
        else:  # vLLM's own lies in a buffer, which the next one takes
            masks.append(torch.from_numpy(original(manager, requests, [name], scheduled)).clone())
    return torch.cat(masks).numpy()


def _masks(manager, request, nodes: list[int]) -> torch.Tensor:
    """Returns the masks int32 [1 + nodes, words] of a request's rows; of nodes that are not known, empty ones."""
    grammar, masks = request.structured_output_request.grammar, manager.backend.allocate_token_bitmask(1 + len(nodes))
    states, taken = [State((), () if manager.should_fill_bitmask(request) else None)], []
    is_known = UNKNOWN not in nodes
    for node in nodes if is_known else ():
        states.append(_after(request, states[node >> PARENT], node & (1 << PARENT) - 1))
    for row, state in enumerate(states):
        masks[row] = ANY
        if state.taken is not None and _follow(grammar, request.request_id, taken, state.taken):
            grammar.fill_bitmask(masks, row)
    _follow(grammar, request.request_id, taken, ())
    if not is_known:
        masks[1:] = 0
    return masks


def _after(request, state: State, token: int) -> State:
    """Returns the state after a child with this token."""
    path = (*state.path, token)
    if state.taken is not None:
        return State(path, (*state.taken, token))
    reasoner = request.structured_output_request.reasoner  # since `should_fill_bitmask` was asked
    has_ended = reasoner.is_reasoning_end_streaming([*request.all_token_ids, *path], [token])
    return State(path, () if has_ended else None)


def _follow(grammar, name: str, taken: list[int], wanted: tuple[int, ...]) -> bool:
    """Brings a grammar from the tokens that it has taken to others; returns whether it is there and says what follows.

    It stops before a token that it forbids, which nothing draws, and where it has ended.
    """
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(taken, wanted)))
    if len(taken) > common:
        grammar.rollback(len(taken) - common)
        del taken[common:]
    for token in wanted[common:]:
        if grammar.is_terminated() or not grammar.validate_tokens([token]):
            return False
        grammar.accept_tokens(name, [token])
        taken.append(token)
    return not grammar.is_terminated()
