"""Computes what the next step starts from: lengths, roots, the draft's inputs and rows to gather.

Computes: The path of request b is accept_index[b, 0 .. a]. The target's token at its node d is predicts[accept_index[b,
    d]]: for d < a the accepted draft that follows, for d = a the bonus.
Invariants: Every row that is returned exists, so that gathers by them stay in bounds.
Grid: (B,), one program commits one request.
Launches: 1
Traffic: per request 4 (S + 1) + 4 (S + 1) + 20 bytes read, 16 (S + 1) + 28 written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import next_power_of_2, tl, triton
from ...runtime.launch import launch, launcher


class Output(NamedTuple):
    """What `verify_commit` returns."""

    new_seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    accept_lengths: torch.Tensor
    tokens: torch.Tensor
    hidden_rows: torch.Tensor
    last_row: torch.Tensor


# One warp commits a request: paths are short.
TUNING = {"default": {"num_warps": 1}}


@triton.jit(do_not_specialize=["num_nodes"])
def _verify_commit_kernel(
    predicts_ptr, accept_index_ptr, accept_token_num_ptr, seq_lens_ptr, is_live_ptr, out, num_nodes,
    NUM_COLUMNS: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, next_power_of_2(NUM_COLUMNS))
    in_row = depth < NUM_COLUMNS
    offset = request * NUM_COLUMNS + depth
    root_row = request * num_nodes
    index = tl.load(accept_index_ptr + offset, mask=in_row, other=-1).to(tl.int64)
    accepted = tl.load(accept_token_num_ptr + request).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    is_live = tl.sum(tl.where((depth == 0) & (index >= 0), 1, 0)) > 0
    if is_live_ptr is not None:
        is_live &= tl.load(is_live_ptr + request) != 0
    last = tl.where(is_live, tl.minimum(tl.maximum(accepted, 0), NUM_COLUMNS - 1), -1)

    is_node = (depth <= last) & (index >= root_row) & (index < root_row + num_nodes)
    token = tl.load(predicts_ptr + index, mask=is_node, other=-1).to(tl.int64)
    bonus = tl.sum(tl.where(depth == last, token, 0)) - tl.where(is_live, 0, 1)
    tl.store(out.tokens + offset, token, mask=in_row)
    tl.store(out.hidden_rows + offset, tl.where(is_node, index, root_row), mask=in_row)
    tl.store(out.last_row + request, request * NUM_COLUMNS + tl.maximum(last, 0))
    tl.store(out.bonus_tokens + request, bonus)
    tl.store(out.accept_lengths + request, (last + 1).to(tl.int32))
    tl.store(out.new_seq_lens + request, (seq_len + last + 1).to(seq_len.dtype))


def contract(values: dict) -> Output:
    args = check.Arguments("verify_commit", values)
    accept_index = args.tensor("accept_index", ("B", "S + 1"), check.INTEGER)
    batch_size, num_columns = args.size("B"), args.size("S + 1")
    predicts = args.tensor("predicts", (None,), check.INTEGER)
    if num_columns == 0:
        args.fail("accept_index", "have a column for the root", list(accept_index.shape))
    if predicts.shape[0] % max(batch_size, 1):
        args.fail("predicts", f"hold N tokens for each of B = {batch_size} requests", list(predicts.shape))
    args.tensor("accept_token_num", ("B",), check.INTEGER)
    seq_lens = args.tensor("seq_lens", ("B",), check.INTEGER)
    args.tensor("is_live", ("B",), (*check.INTEGER, torch.bool), optional=True)
    path = args.spec((batch_size, num_columns), torch.int64)
    return Output(
        new_seq_lens=args.spec((batch_size,), seq_lens.dtype), bonus_tokens=args.spec((batch_size,), torch.int64),
        accept_lengths=args.spec((batch_size,), torch.int32), tokens=path, hidden_rows=path,
        last_row=args.spec((batch_size,), torch.int64),
    )  # fmt: skip


@launcher
def verify_commit(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    seq_lens: torch.Tensor,
    is_live: torch.Tensor | None = None,
    *,
    out: Output | None = None,
) -> Output:
    """Computes what the next step starts from: lengths, roots, the draft's inputs and rows to gather.

    Symbols: B requests, N nodes of a tree, S = spec_steps, a = accept_token_num clamped to 0..S.

    Args:
        predicts: [B * N] int. The target's token at every path node, as from a verify op.
        accept_index: [B, S + 1] int. b * N + node for the path, root first, -1 padded. A dead row begins with -1.
        accept_token_num: [B] int. Accepted drafts, without the bonus.
        seq_lens: [B] int. Committed tokens of each request, without the root.
        is_live: None or [B] int or bool. 0: dead whatever the path says. None: all are live.
        out: six tensors to write into.

    Returns:
        A named tuple:
        new_seq_lens: [B] int, the dtype of seq_lens. seq_lens + a + 1; dead rows keep theirs.
        bonus_tokens: [B] int64. The step's last token, the next root; -1 for dead rows.
        accept_lengths: [B] int32. Tokens of the step, a + 1; 0 for dead rows.
        tokens: [B, S + 1] int64. Accepted drafts, then the bonus, -1 padded, -1 for dead rows: the draft's next inputs,
            one for the target's feature of each path node.
        hidden_rows: [B, S + 1] int64. Row of each path node in the target's features [B * N]; in padding and dead rows
            the root's, b * N, which a gather may read.
        last_row: [B] int64. Row of the last path node in what is computed from `tokens`: b * (S + 1) + a, in dead rows
            b * (S + 1).

        A path entry outside the request's nodes gives token -1 and the root's row.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.

    Source:
        Lengths and bonus as in SGLang's prepare_verify_commit_outputs; the rest is eagle_kernels' own.

    Example:
        >>> step = eagle_kernels.verify_commit(  # nodes 0 and 2 of three are the path
        ...     torch.tensor([12, -1, 30]), torch.tensor([[0, 2, -1]]), torch.tensor([1]), torch.tensor([7]))
        >>> step.tokens.tolist(), step.new_seq_lens.tolist(), step.hidden_rows.tolist()
        ([[12, 30, -1]], [9], [[0, 2, 0]])
    """
    out = check.allocate("verify_commit", contract(locals()), out)
    batch_size, num_columns = accept_index.shape
    launch(
        "verify_commit", _verify_commit_kernel, (batch_size,),
        predicts_ptr=predicts, accept_index_ptr=accept_index, accept_token_num_ptr=accept_token_num,
        seq_lens_ptr=seq_lens, is_live_ptr=is_live, out=out, num_nodes=predicts.shape[0] // max(batch_size, 1),
        NUM_COLUMNS=num_columns, **tuning.row(TUNING, accept_index.device),
    )  # fmt: skip
    return out
