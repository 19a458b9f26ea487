"""Keeps the page in which a request's accepted tokens end, in place: only whole pages can be freed.

Computes: k of a request's N drafts are not marked. Its tokens then end in the page that begins at token
    ceil((seq_len + k) / P - 1) * P, for pages of P tokens; the marks of this page's tokens are cleared.

        P = 4, seq_len = 5, k = 2:  page        4 5 6 7|8 9 10
                                    mask            0 0 1|1 1 1    (tokens 5 to 10)
                                    cleared         0 0 0|1 1 1
Invariants: Marks are cleared, never set. A request without a token, committed or accepted, has no page to keep.
Grid: (B,) for B requests, one program clears the marks of one request.
Launches: 1
Traffic: N bytes read and at most min(N, P) written per request, and its length.
"""

from __future__ import annotations

import torch

from ...primitives.dependent_launch import await_predecessor
from ...primitives.slots import read_lengths
from ...runtime import check, tuning
from ...runtime.language import tl, triton
from ...runtime.launch import launch, launcher

MUTATES = ("evict_mask",)

# A program clears a request's marks, BLOCK_TOKEN tokens at a time.
TUNING = {"default": {"BLOCK_TOKEN": 128, "num_warps": 1}}


@triton.jit(do_not_specialize=["num_tokens"])
def _align_evict_mask_to_page_size_kernel(
    seq_lens_ptr, evict_mask_ptr,
    num_tokens,
    PAGE_SIZE: tl.constexpr, BLOCK_TOKEN: tl.constexpr, ENABLE_PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(ENABLE_PDL)
    request = tl.program_id(0).to(tl.int64)
    mask_row_ptr = evict_mask_ptr + request * num_tokens
    token = tl.arange(0, BLOCK_TOKEN)
    num_kept = tl.zeros([BLOCK_TOKEN], tl.int64)
    for start in range(0, num_tokens, BLOCK_TOKEN):
        place = start + token
        is_marked = tl.load(mask_row_ptr + place, mask=place < num_tokens, other=1)
        num_kept += tl.where(is_marked == 0, 1, 0)

    seq_len = read_lengths(seq_lens_ptr, request, True)
    length = seq_len + tl.sum(num_kept)
    page = tl.where(length > 0, (length - 1) // PAGE_SIZE * PAGE_SIZE, -PAGE_SIZE)  # where the last page begins
    for start in range(tl.maximum(page - seq_len, 0), tl.minimum(page - seq_len + PAGE_SIZE, num_tokens), BLOCK_TOKEN):
        place = start + token
        in_page = (place < page - seq_len + PAGE_SIZE) & (place < num_tokens)
        tl.store(mask_row_ptr + place, tl.zeros([BLOCK_TOKEN], tl.int1), mask=in_page)


def contract(values: dict) -> None:
    args = check.Arguments("align_evict_mask_to_page_size", values)
    args.integer("page_size", 1)
    args.tensor("seq_lens", ("B",), check.INTEGER)
    args.tensor("evict_mask", ("B", "N"), (torch.bool,))
    args.debug("seq_lens", "not be negative", lambda: values["seq_lens"] >= 0)


@launcher
def align_evict_mask_to_page_size(seq_lens: torch.Tensor, evict_mask: torch.Tensor, *, page_size: int) -> None:
    """Clears the eviction marks on the page in which each request's accepted tokens end, in place.

    Args:
        seq_lens: [B] int. Committed tokens before this step; negative ones count as 0.
        evict_mask: [B, N] bool, in place. True where the slot of token seq_len + i is to be freed. Unmarked tokens are
            accepted, and count as if they came first, as in a chain.
        page_size: tokens of a page, at least 1.

    Returns:
        None. Marks are only cleared. A request without a token, committed or accepted, keeps its marks.

    Raises:
        ValueError, TypeError: an argument breaks a rule above.
        EAGLE_KERNELS_DEBUG=1 also refuses negative seq_lens.

    Source:
        SGLang's align_evict_mask_to_page_size.

    Example:
        >>> evict_mask = torch.tensor([[False, False, True, True, True, True]])  # tokens 5 to 10; 5 and 6 are accepted
        >>> eagle_kernels.align_evict_mask_to_page_size(torch.tensor([5]), evict_mask, page_size=4)
        >>> evict_mask.tolist()  # token 7 is on the page of token 6
        [[False, False, False, True, True, True]]
    """
    contract(locals())
    launch(
        "align_evict_mask_to_page_size", _align_evict_mask_to_page_size_kernel, (seq_lens.shape[0],),
        seq_lens_ptr=seq_lens, evict_mask_ptr=evict_mask, num_tokens=evict_mask.shape[1],
        PAGE_SIZE=page_size, **tuning.row(TUNING, seq_lens.device),
    )  # fmt: skip
