"""Penalizes the logits of every tree node, and counts the drafts on the node's own path as output.

Computes: What `verify_tree_sampled` does to logits before temperature, for all rows and written to memory, for ops that
    verify by probabilities (the renorms, coins, rejection, traversal). If `verify_tree_sampled` is given the result and
    no penalties, it draws, bit by bit, what it draws from the logits with them; only -inf for early end tokens and bad
    tokens is not part of that op.
Invariants: NaN stays NaN where no -inf replaces it. Malformed links end a path: where they do not lead to the root, the
    drafts are those from the node on that no link names. Tokens that are no ids count nowhere.
Grid: (B * N, slices), one program writes one slice of one node's row.
Launches: 1
Traffic: B * N * V * (element size + 4), and once per request (for its other nodes from the cache) 4 V for output_counts
    and V / 8 for prompt_mask.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.tree_walk import all_nodes, check_links, find_above, is_own, load_nodes, tree_arguments
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import bundle, launch, launcher
from .shared.logits import Processors, Row, check_processors, has_penalties, load_counts, process

IN_PLACE = {"out": ("target_logits",)}

# A program penalizes BLOCK_VOCAB tokens of a node, 16 a thread.
TUNING = {"default": {"BLOCK_VOCAB": 2048, "num_warps": 4}}

_NOT_LISTED = tl.constexpr(9223372036854775807)


class Forbidden(NamedTuple):
    """Pointers to what says which tokens get -inf: the op's arguments of these names; None: not given."""

    min_tokens: Any
    num_output_tokens: Any
    end_token_ids: Any
    bad_token_ids: Any


@triton.jit(do_not_specialize=["stride_logits_row", "stride_output_row", "stride_end_token_ids_batch",
                               "stride_bad_token_ids_batch", "num_ends", "num_bad"])  # fmt: skip
def _penalize_logits_kernel(
    links, target_logits_ptr, processors, forbidden, output_ptr, stride_logits_row, stride_output_row,
    stride_end_token_ids_batch, stride_bad_token_ids_batch, num_ends, num_bad,
    NUM_NODES: tl.constexpr, VOCAB_SIZE: tl.constexpr, HAS_PENALTIES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, BLOCK_ID: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    place = tl.program_id(0).to(tl.int64)
    request = place // NUM_NODES
    first = tl.program_id(1) * BLOCK_VOCAB
    ids = first + tl.arange(0, BLOCK_VOCAB)
    is_token = ids < VOCAB_SIZE
    row_ptr = target_logits_ptr + tl.multiple_of(place * stride_logits_row, ALIGNMENT)
    logit = tl.load(row_ptr + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    root = tl.load(links.retrieve_index + request * NUM_NODES).to(tl.int64)
    if is_own(root, request, NUM_NODES):
        count = tl.zeros([BLOCK_VOCAB], tl.int32)
        if HAS_PENALTIES:
            count = load_counts(
                Row(row_ptr, processors, request, place, 1.0, None, VOCAB_SIZE, HAS_PENALTIES), ids, is_token
            )
        depth = tl.zeros([], tl.int32)
        has_end = False
        if forbidden.min_tokens is not None:
            end_ptr = forbidden.end_token_ids + request * stride_end_token_ids_batch
            has_end = _has_any(first, end_ptr, num_ends, BLOCK_VOCAB, BLOCK_ID)
        if HAS_PENALTIES or forbidden.min_tokens is not None:
            tree = load_nodes(links, request, NUM_NODES)
            nodes = all_nodes(NUM_NODES)
            # most slices hold no draft and no end token: which drafts are on the path does not matter to them
            has_draft = tl.max(((tree.tokens >= first) & (tree.tokens < first + BLOCK_VOCAB)).to(tl.int32)) > 0
            current = tl.where(has_draft | has_end, (place % NUM_NODES).to(tl.int32), 0)
            is_on_path = current > 0  # false for one that is passed on the way to the first of its siblings
            while current > 0:
                if is_on_path:
                    depth += 1
                    if HAS_PENALTIES:
                        count += (ids == tl.sum(tl.where(nodes == current, tree.tokens, 0))).to(tl.int32)
                current, is_on_path = find_above(tree, current)
        logit = process(
            logit, count, Row(row_ptr, processors, request, place, 1.0, None, VOCAB_SIZE, HAS_PENALTIES), ids, is_token
        )
        if forbidden.min_tokens is not None:
            num_output_tokens = tl.load(forbidden.num_output_tokens + request).to(tl.int64) + depth
            if has_end & (num_output_tokens < tl.load(forbidden.min_tokens + request).to(tl.int64)):
                logit = _forbid(logit, ids, first, end_ptr, num_ends, BLOCK_VOCAB, BLOCK_ID)
        if forbidden.bad_token_ids is not None:
            bad_ptr = forbidden.bad_token_ids + request * stride_bad_token_ids_batch
            logit = _forbid(logit, ids, first, bad_ptr, num_bad, BLOCK_VOCAB, BLOCK_ID)
    written_ptr = output_ptr + tl.multiple_of(place * stride_output_row, ALIGNMENT)
    tl.store(written_ptr + ids, logit, mask=is_token)


@triton.jit
def _has_any(first, list_ptr, num_listed, BLOCK_VOCAB: tl.constexpr, BLOCK_ID: tl.constexpr):
    """Tells whether a token of a list is in the slice."""
    smallest = tl.full([], _NOT_LISTED, tl.int64)
    for start in range(0, num_listed, BLOCK_ID):
        smallest = tl.minimum(smallest, tl.min(_listed_here(list_ptr, start, num_listed, first, BLOCK_VOCAB, BLOCK_ID)))
    return smallest < _NOT_LISTED


@triton.jit
def _listed_here(list_ptr, start, num_listed, first, BLOCK_VOCAB: tl.constexpr, BLOCK_ID: tl.constexpr):
    """Loads the tokens [BLOCK_ID] of a list from `start` on that are in the slice, _NOT_LISTED instead of others."""
    entry = start + tl.arange(0, BLOCK_ID)
    listed = tl.load(list_ptr + entry, mask=entry < num_listed, other=-1).to(tl.int64)
    return tl.where((listed >= first) & (listed < first + BLOCK_VOCAB), listed, _NOT_LISTED)


@triton.jit
def _forbid(logit, ids, first, list_ptr, num_listed, BLOCK_VOCAB: tl.constexpr, BLOCK_ID: tl.constexpr):
    """Returns the logits with -inf for the tokens of a list: those in the slice are few and are taken one by one."""
    for start in range(0, num_listed, BLOCK_ID):
        listed = _listed_here(list_ptr, start, num_listed, first, BLOCK_VOCAB, BLOCK_ID)
        token = tl.min(listed)
        while token < _NOT_LISTED:
            logit = tl.where(ids == token, float("-inf"), logit)
            token = tl.min(tl.where(listed > token, listed, _NOT_LISTED))
    return logit


def contract(values: dict) -> check.Spec:
    args = check.Arguments("penalize_logits", values)
    batch_size, num_nodes = check_links(args)
    num_rows = batch_size * num_nodes
    args.tensor("target_logits", (num_rows, "V"), check.FLOAT, contiguous=1)
    check_processors(args, "B", num_rows)
    args.tensor("min_tokens", ("B",), check.INTEGER, optional=True)
    args.tensor("num_output_tokens", ("B",), check.INTEGER, optional=True)
    for name, axis in (("end_token_ids", "E"), ("bad_token_ids", "M")):
        is_shared = isinstance(values[name], torch.Tensor) and values[name].dim() == 1
        args.tensor(name, (axis,) if is_shared else ("B", axis), check.INTEGER, optional=True)
    together = ("min_tokens", "num_output_tokens", "end_token_ids")
    given = [name for name in together if values[name] is not None]
    if given and len(given) < len(together):
        args.fail("min_tokens, num_output_tokens and end_token_ids", "be given together", "only " + " and ".join(given))
    return args.spec((num_rows, args.size("V")), torch.float32, contiguous=1)


@launcher
def penalize_logits(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_logits: torch.Tensor,
    repetition_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    token_bitmask: torch.Tensor | None = None,
    min_tokens: torch.Tensor | None = None,
    num_output_tokens: torch.Tensor | None = None,
    end_token_ids: torch.Tensor | None = None,
    bad_token_ids: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Penalizes the logits of every tree node, and counts the drafts on the node's own path as output.

    Applies, in this order, repetition, frequency and presence penalty, bias, grammar; then early end tokens and bad
    tokens get -inf. The output at a node is all committed tokens, the root included, and the drafts down to the node,
    itself included. `verify_tree_sampled` applies penalties, bias and grammar itself; ops that verify by probabilities
    do not.
    Symbols: B requests, N nodes of a tree (1..1024), V tokens.

    Args:
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, N] int. Trees, as in `verify_tree`.
        target_logits: [B * N, V] fp32, fp16 or bf16. Unit stride along V; for a padded vocabulary, pass
            `target_logits[:, :V]`.
        repetition_penalty, frequency_penalty, presence_penalty: None or [B] fp32. As in `sample_from_logits`.
        prompt_mask: None or [B, ceil(V / 32)] int32. Likewise.
        output_counts: None or [B, V] int32. Occurrences in the committed output, the root included; None: 0. Only with
            a penalty.
        logit_bias: None or [B, V] fp32, fp16 or bf16. Added to the logits.
        token_bitmask: None or [B * N, ceil(V / 32)] int32. Bit v % 32 of word v // 32: the grammar allows token v after
            the node; the others get -inf.
        min_tokens: None or [B] int. End tokens get -inf while the output is shorter. Only together with the next two.
        num_output_tokens: None or [B] int. Length of the committed output, the root included.
        end_token_ids: None, [E] or [B, E] int. End tokens of all requests, or of each; -1 padded.
        bad_token_ids: None, [M] or [B, M] int. Tokens that always get -inf; likewise.
        out: a tensor to write into, whose rows may be strided. It may be target_logits, if these are fp32.

    Returns:
        [B * N, V] fp32. The penalized logits; a dead row, as in `verify_tree`, keeps its logits.

    Raises:
        ValueError, TypeError: an argument breaks a rule above. EAGLE_KERNELS_DEBUG=1 also checks links, that
            repetition_penalty is above 0, and the others for NaN.

    Source:
        Hugging Face's repetition penalty, OpenAI's frequency and presence penalties; drafts on the path count as in
        vLLM's rejection sampler, which verifies chains. Penalties along the paths of a tree are eagle_kernels' own.

    Example:
        >>> logits = torch.tensor([[2.0, 2.0, -2.0], [2.0, 2.0, -2.0]])
        >>> tree = [torch.tensor([x]) for x in ([0, 1], [0, 1], [1, -1], [-1, -1])]  # a root of token 0, its child of 1
        >>> eagle_kernels.penalize_logits(
        ...     *tree, logits, presence_penalty=torch.tensor([0.5]),
        ...     output_counts=torch.tensor([[1, 0, 0]], dtype=torch.int32)).tolist()
        [[1.5, 2.0, -2.0], [1.5, 1.5, -2.0]]
    """
    values = locals()
    out = check.allocate("penalize_logits", contract(values), out)
    num_rows, vocab_size = target_logits.shape
    tuned = dict(tuning.row(TUNING, target_logits.device))
    block_vocab = min(tuned.pop("BLOCK_VOCAB"), next_power_of_2(max(vocab_size, 1)))
    num_ends = 0 if end_token_ids is None else end_token_ids.shape[-1]
    num_bad = 0 if bad_token_ids is None else bad_token_ids.shape[-1]
    launch(
        "penalize_logits", _penalize_logits_kernel, (num_rows, triton.cdiv(vocab_size, block_vocab)),
        **tree_arguments(values), target_logits_ptr=target_logits,
        processors=bundle(Processors, values), forbidden=bundle(Forbidden, values), output_ptr=out,
        stride_logits_row=target_logits.stride(0), stride_output_row=out.stride(0),
        stride_end_token_ids_batch=num_ends if num_ends and end_token_ids.dim() == 2 else 0,
        stride_bad_token_ids_batch=num_bad if num_bad and bad_token_ids.dim() == 2 else 0,
        num_ends=num_ends, num_bad=num_bad, VOCAB_SIZE=vocab_size, HAS_PENALTIES=has_penalties(values),
        # what is known of the offset of every row, so that loads can be wide
        ALIGNMENT=math.gcd(target_logits.stride(0), out.stride(0), 16),
        BLOCK_VOCAB=block_vocab, BLOCK_ID=128, **tuned,
    )  # fmt: skip
    return out
