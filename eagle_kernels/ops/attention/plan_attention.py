"""The plan of a batch for attention: where the keys of each request begin among all, counted in blocks.

Computes
    plan[b] = the blocks of 32 slots that the requests before b have (shared/cuts.py): of each those from the first slot
    that its rows see to its last draft key.
Invariants
    Negative lengths count as 0.
Grid
    (1,), one program sums up all requests, BLOCK_BATCH at a time.
Launches
    1
Traffic
    element size of seq_lens * B + 4 B * (B + 1)
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher
from .shared.cuts import count_blocks

# One program plans the batch, BLOCK_BATCH requests at a time.
TUNING = {"default": {"BLOCK_BATCH": 512, "num_warps": 4}}


@triton.jit(do_not_specialize=["batch_size", "num_drafts", "reach"])
def _plan_attention_kernel(
    seq_lens_ptr,
    plan_ptr,
    batch_size,
    num_drafts,
    reach,
    BLOCK_BATCH: tl.constexpr,
    ENABLE_PDL: tl.constexpr,
):
    await_predecessor(ENABLE_PDL)
    before = tl.zeros([], tl.int32)
    tl.store(plan_ptr, before)
    for start in range(0, batch_size, BLOCK_BATCH):
        request = start + tl.arange(0, BLOCK_BATCH)
        is_live = request < batch_size
        prefix = tl.maximum(tl.load(seq_lens_ptr + request, mask=is_live, other=0), 0).to(tl.int32)
        first = tl.zeros_like(prefix)
        if reach is not None:
            first = tl.maximum(prefix - reach, 0)
        stops = before + tl.cumsum(tl.where(is_live, count_blocks(first, prefix + num_drafts), 0))
        tl.store(plan_ptr + request + 1, stops, mask=is_live)
        before = tl.max(stops)


MAX_LENGTH = 2**31 - 2**21


def contract(values: dict) -> check.Spec:
    """Checks the arguments of `plan_attention` and describes its output."""
    args = check.Arguments("plan_attention", values)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.integer("num_drafts", 0, 2**20)
    if values["window"] is not None:
        args.integer("window", 1, 2**31 - 1)
    lengths = values["seq_lens"]
    args.debug("seq_lens", "lie in 0..2^31 - 2^21", lambda: (lengths >= 0) & (lengths <= MAX_LENGTH))
    blocks = lambda: (lengths.clamp(0, MAX_LENGTH).to(torch.int64) + values["num_drafts"]) // 32 + 1  # noqa: E731
    rule = "be at most 2^31 - 2^21, and ask for fewer than 2^31 blocks in all"
    is_sound = lambda: (lengths <= MAX_LENGTH) & (blocks().cumsum(0) <= check.MAX_INT32)  # noqa: E731
    args.debug("seq_lens", rule, is_sound, of_reference=True)
    return args.spec((args.size("B") + 1,), torch.int32)


@launcher
def plan_attention(
    seq_lens: torch.Tensor, *, num_drafts: int = 0, window: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Plans the attention of a batch, once for all layers with the same window.

    The result is the `plan` of `gqa_decode` and `tree_attention`, and of `mla_decode` and `mla_tree_attention`. A plan
    for other lengths makes them slower, not wrong.

    Args:
        seq_lens: [B] int. Filled slots of each request, as passed to attention; with a CSR page table (pages - 1) *
            page_size + last_page_len.
        num_drafts: draft keys of a request after these slots, at least 0; their mean, if ragged. 0 if the slots include
            them, as with a CSR page table.
        window: that of the attention.
        out: a tensor to write into.

    Returns:
        [B + 1] int32. Request b has the blocks plan[b]..plan[b + 1] - 1, at least one, of 32 slots each.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        Not checked: that seq_lens are in 0..2^31 - 2^21.

    Source:
        Even chunks of all work, as stream-K cuts matrix products, https://arxiv.org/abs/2301.03598; a plan once per
        step, as FlashInfer makes on the host, https://arxiv.org/abs/2501.01005.

    Example:
        >>> eagle_kernels.plan_attention(torch.tensor([100, 0, 64]), num_drafts=8).tolist()
        [0, 4, 5, 8]
    """
    plan = check.allocate("plan_attention", contract(locals()), out)
    launch(
        "plan_attention",
        _plan_attention_kernel,
        (1,),
        seq_lens_ptr=seq_lens,
        plan_ptr=plan,
        batch_size=len(seq_lens),
        num_drafts=num_drafts,
        reach=None if window is None else window - (num_drafts > 0),
        **tuning.row(TUNING, seq_lens.device),
    )
    return plan
