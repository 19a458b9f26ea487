"""Which rows of a step are ours: what the metadata of vLLM's attention is given beside it, for keys and for latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ...ops import plan_attention
from ...ops.attention.shared.drafts import MAX_QUERY


@dataclass
class Rows:
    """The rows of a step that are ours: those of the first B requests, and the prompts after them.

    seq_lens, prefix_lens: int32 [B], with and without the step's own tokens. bounds: int32 [B + 1], of the requests'
    rows. plan: int32 [B + 1], for layers without a window. prompt_bounds: None, or int32 [P + 1] counted from the first
    prompt's first row. prompt_lens: None, or int32 [P], theirs as seq_lens, aligned. tree_mask: None, or int64 [T, W],
    of layers that read trees.
    """

    num_requests: int
    num_tokens: int
    max_query: int
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    bounds: torch.Tensor
    plan: torch.Tensor
    prompt_bounds: torch.Tensor | None
    prompt_lens: torch.Tensor | None
    tree_mask: torch.Tensor | None = None


def aligned(values: torch.Tensor) -> torch.Tensor:
    """Returns values at an address that 16 divides; for others Triton compiles kernels anew."""
    return values if values.data_ptr() % 16 == 0 else values.clone()


class RowsOfSteps:
    """Says which rows are ours; comes before a metadata builder of vLLM's."""

    trees = None  # `Trees` of the target's builders, where drafts are trees

    def prepare_rows(self, vllm_config, device: torch.device) -> None:
        """Allocates what graphs read."""
        self.most_rows = min(1 + vllm_config.num_speculative_tokens, MAX_QUERY)
        max_requests = vllm_config.scheduler_config.max_num_seqs
        # graphs may hold more requests than there can be, for padding
        self._prefix_lens = torch.zeros(2 * max_requests, dtype=torch.int32, device=device)
        self._plan = torch.zeros(2 * max_requests + 1, dtype=torch.int32, device=device)

    def rows_of(self, common_prefix_len: int, common, *, has_mixed: bool, has_prompts: bool) -> Rows | None:
        """Returns a step's rows; None where vLLM reads all of them.

        has_mixed: whether the short rows of a step with prompts are ours. has_prompts: whether the prompts are, too.

        Raises:
            RuntimeError: there are trees, which vLLM cannot read.
        """
        rows = None
        # tokens of images see each other in both directions
        if common.causal is True and common_prefix_len == 0 and common.mm_req_doc_ranges is None:
            rows = self._rows(common, has_mixed, has_prompts)
        if rows is None and self.has_trees():
            raise RuntimeError("eagle_kernels: a step with trees holds rows that are not causal, or a shared prefix")
        return rows

    def _rows(self, common, has_mixed: bool, has_prompts: bool) -> Rows | None:
        num_requests, num_prompts, num_tokens, _ = split_decodes_and_prefills(common, decode_threshold=self.most_rows)
        if num_prompts and not has_mixed:
            return None
        bounds = lengths = None
        if num_prompts and has_prompts:
            bounds = common.query_start_loc[num_requests:] - num_tokens
            lengths = aligned(common.seq_lens[num_requests:])
        # beside trees always as many, since other numbers have other kernels
        is_most = num_prompts or self.trees is not None
        rows = Rows(
            num_requests, num_tokens, self.most_rows if is_most else max(common.max_query_len, 1),
            common.seq_lens[:num_requests], self._prefix_lens[:num_requests],
            common.query_start_loc[: num_requests + 1], self._plan[: num_requests + 1],
            bounds, lengths, None if self.trees is None else self.trees.row_mask[:num_tokens],
        )  # fmt: skip
        self._measure(rows)
        return rows

    def has_trees(self) -> bool:
        """Tells whether the step has a tree."""
        return self.trees is not None and self.trees.current is not None

    @staticmethod
    def _measure(rows: Rows) -> None:
        """Writes what follows from the lengths, which vLLM may have changed in place."""
        planned, bounds = rows.seq_lens, rows.bounds
        if rows.max_query > 1:
            planned = torch.sub(planned, bounds[1:], out=rows.prefix_lens).add_(bounds[:-1]).clamp_(min=0)
        if rows.num_requests:
            plan_attention(planned, num_drafts=0 if rows.max_query == 1 else rows.max_query, out=rows.plan)

    def update_draft_decode_metadata(self, metadata) -> None:
        """Brings the metadata of drafts up to date in place, inside a graph, where vLLM does not build it anew."""
        super().update_draft_decode_metadata(metadata)
        if metadata.eagle_kernels is not None:
            self._measure(metadata.eagle_kernels)
