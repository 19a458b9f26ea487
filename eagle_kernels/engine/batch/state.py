"""The state of a batch from step to step: tensors that stay where they are, so that a CUDA graph can name them."""

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ..config.eagle_config import EAGLEConfig
from ..models.protocol import DraftModel, TargetModel
from ..requests.sampling_params import MOST_ENDS, Features, SamplingParams
from .kv_pool import KVPool
from .transfer import to_device

_FILTERS, _PENALTIES = ("top_k", "top_p", "min_p"), ("repetition_penalty", "frequency_penalty", "presence_penalty")
# tokens of a request after which a draft reads what it missed in plain steps, the only ones that it misses if alone
CATCH_UP_EVERY = 16


class RowSampling:
    """Holds the sampling parameters of the rows of a batch: tensors [R] that stay where they are.

    seeds          [R] int64
    numbers        [R] of each field of `SamplingParams`: top_k int32, the others fp32
    prompt_mask    [R, ceil(V / 32)] int32 bits of the tokens in the prompt, and
    output_counts  [R, V] int32, of the committed output; both None until a request has a penalty
    minimums       [R, 66] int64: min_new_tokens, tokens of the prompt, and the end tokens, -1 padded; None until a
                   request has min_new_tokens
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.numbers: dict[str, Tensor] = {}
        for name in ("temperature", *_FILTERS, *_PENALTIES):
            off, dtype = getattr(SamplingParams(), name), torch.int32 if name == "top_k" else torch.float32
            self.numbers[name] = torch.full((num_rows,), off, dtype=dtype, device=device)
        self.prompt_mask: Tensor | None = None
        self.output_counts: Tensor | None = None
        self.minimums: Tensor | None = None

    def make_room(self, features: Features) -> None:
        """Makes room for what such requests need of all rows."""
        num_rows, device = len(self.seeds), self.seeds.device
        if features.minimum and self.minimums is None:
            self.minimums = torch.full((num_rows, 2 + MOST_ENDS), -1, dtype=torch.int64, device=device)
        if features.penalties and self.prompt_mask is None:
            options = {"dtype": torch.int32, "device": device}
            self.output_counts = torch.zeros(num_rows, self.vocab_size, **options)
            self.prompt_mask = torch.zeros(num_rows, -(-self.vocab_size // 32), **options)

    def set_row(self, row: int, params: SamplingParams, seed: int, prompt: list[int], ends: Iterable[int] = ()) -> None:
        """Gives row `row` to a request, with the tokens that end it."""
        self.seeds[row] = seed
        self.make_room(Features.of([params]))
        if self.minimums is not None:
            numbers = [params.min_new_tokens, len(prompt), *(ends if params.min_new_tokens else ())]
            numbers += [-1] * (self.minimums.shape[1] - len(numbers))
            self.minimums[row] = to_device(numbers, self.minimums.device)
        for name, tensor in self.numbers.items():
            tensor[row] = getattr(params, name)
        if params.has_penalties:
            self.output_counts[row] = 0
            is_in_prompt = np.zeros(32 * self.prompt_mask.shape[1], dtype=bool)
            is_in_prompt[prompt] = True
            words = torch.from_numpy(np.packbits(is_in_prompt, bitorder="little").view(np.int32))
            self.prompt_mask[row] = words.to(self.prompt_mask.device)

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that belongs to rows."""
        held = [self.seeds, *self.numbers.values(), self.prompt_mask, self.output_counts, self.minimums]
        return [tensor for tensor in held if tensor is not None]

    def arguments(self, features: Features, rows: slice | Tensor) -> dict[str, Tensor]:
        """Returns the arguments of `verify_tree_sampled` for these rows."""
        names = ("temperature", *(_FILTERS if features.filters else ()), *(_PENALTIES if features.penalties else ()))
        values = {name: self.numbers[name][rows] for name in names} | {"seeds": self.seeds[rows]}
        if features.penalties:
            values |= {"prompt_mask": self.prompt_mask[rows], "output_counts": self.output_counts[rows]}
        return values

    def early_ends(self, rows: slice | Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Returns the arguments by which `penalize_logits` keeps end tokens back, after `lengths` committed tokens."""
        least, prompt_lengths, ends = self.minimums[rows].split([1, 1, MOST_ENDS], dim=1)
        num_output_tokens = lengths + 1 - prompt_lengths[:, 0]
        return {
            "min_tokens": least[:, 0].clone(), "num_output_tokens": num_output_tokens, "end_token_ids": ends.clone()
        }  # fmt: skip

    def count(self, features: Features, rows: slice, tokens: Tensor) -> None:
        """Adds committed tokens [B, T], -1 for none, to the output of these rows."""
        if features.penalties:
            is_token = (tokens >= 0).to(torch.int32)
            self.output_counts[rows].scatter_add_(1, tokens.clamp(min=0).to(torch.int64), is_token)

    def count_first(self, features: Features, rows: Tensor, tokens: Tensor) -> None:
        """Adds a token [R] each to the output of rows [R], none of which is there twice."""
        if features.penalties:
            self.output_counts[rows, tokens] += torch.ones_like(tokens, dtype=torch.int32)


class Kept(NamedTuple):
    """Holds tokens [R, C] int64 that a draft has yet to read, or to read again, and the target's features [R, C, F]."""

    tokens: Tensor
    features: Tensor


class BatchState:
    """Holds R rows, each a request's or dead. A step reads rows 0 .. n - 1 and leaves them as the next one needs them.

    lengths       [R] int64       committed tokens in the target's KV; the root not counted
    roots         [R] int64       last committed token
    is_live       [R] int64       0: the row is computed in place, writes no key and never grows
    block_table   [R, max_pages]  int32, of both models' pools; -1: no page
    methods       [R] int64       the number of the row's method of drafting, if requests choose among several
    history       [R, L] int32    committed tokens, the root at place `lengths`; None if no drafter reads them
    draft_logits  [R, Vd]         what the draft says after the root
    draft_hidden  [R, H]          the draft's own state there; both None without a draft
    num_behind    [R] int64       committed tokens that the draft has not read for good, most of them of steps in which
                                  it paused
    kept          these tokens, by the number that there is room for
    target_pool, draft_pool       keys and values; a request's pages have the same ids in all. None without a draft
    drafts        this state first, and one for each further draft model: the same rows, with what is a draft's own
    """

    def __init__(
        self, target: TargetModel, drafts: Sequence[DraftModel], config: EAGLEConfig, max_pages: int, num_pages: int,
        target_pool: KVPool | None = None,
    ):  # fmt: skip
        device, num_rows = target.device, config.max_batch
        sizes = num_pages, config.page_size, target.dtype, device
        self.target_pool = KVPool(target.kv_shape, *sizes) if target_pool is None else target_pool

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.num_rows = num_rows
        self.lengths, self.roots, self.is_live = zeros(num_rows), zeros(num_rows), zeros(num_rows)
        self.block_table = zeros(num_rows, max_pages, dtype=torch.int32).fill_(-1)
        self.sampling = RowSampling(num_rows, target.vocab_size, device)
        self.methods = zeros(num_rows)
        self.history: Tensor | None = None
        models = list(drafts) or [None]
        self.drafts = [self, *(copy.copy(self) for _ in models[1:])]
        for each, model in zip(self.drafts, models):
            each.draft_pool = None if model is None else KVPool(model.kv_shape, *sizes)
            width = 0 if model is None else model.draft_vocab_size
            each.draft_logits = None if model is None else zeros(num_rows, width, dtype=target.dtype)
            each.num_behind = zeros(num_rows)
            each.kept = {}
            each.draft_hidden = None  # until the first prompt tells how wide it is
            each.drafts = self.drafts

    def set_draft(self, rows: Tensor, logits: Tensor, hidden: Tensor) -> None:
        """Writes the logits [R, Vd] and hidden states [R, H] of rows [R]."""
        if self.draft_hidden is None:
            self.draft_hidden = hidden.new_zeros(self.num_rows, hidden.shape[1])
        self.draft_logits[rows] = logits
        self.draft_hidden[rows] = hidden

    def begin(self, rows: Tensor, lengths: Tensor, roots: Tensor, block_table: Tensor, features: Features) -> None:
        """Lets rows [R] step whose prompts have been read, with their lengths [R], roots [R] and pages."""
        self.roots[rows], self.lengths[rows], self.block_table[rows] = roots, lengths, block_table
        if self.history is not None:
            self.history[rows, lengths] = roots.to(self.history.dtype)
        self.sampling.count_first(features, rows, roots)
        self.is_live.index_fill_(0, rows, 1)  # a number to a tensor's places would wait for the device

    def keep_history(self) -> None:
        """Makes room for the tokens of all rows."""
        if self.history is None:
            num_tokens = self.block_table.shape[1] * self.target_pool.page_size
            history = self.block_table.new_zeros(self.num_rows, num_tokens)
            for each in self.drafts:
                each.history = history

    def append_to_history(self, rows: slice, tokens: Tensor) -> None:
        """Appends a step's tokens [B, T], -1 padded, before `lengths` grow; the host finds out where requests end."""
        num_tokens = self.lengths[rows] + 1
        ops.append_output(self.history[rows], num_tokens, num_tokens, tokens)

    def make_room(self, count: int, feature_size: int) -> None:
        """Makes room for `count` kept tokens and features of each row."""
        if count not in self.kept:
            features = self.draft_logits.new_zeros(self.num_rows, count, feature_size)
            self.kept[count] = Kept(self.roots.new_zeros(self.num_rows, count), features)

    def keep(self, rows: slice, room: int, tokens: Tensor, features: Tensor, num_new: Tensor) -> None:
        """Keeps num_new [B] more tokens of each row, the first of `tokens` [B, T], with their features [B, T, F]."""
        count, kept = self.num_behind[rows], self.kept[room]
        row = torch.arange(len(count), device=count.device)[:, None]
        place = (count[:, None] + torch.arange(tokens.shape[1], device=count.device)).clamp(max=room - 1)
        kept.tokens[rows][row, place] = tokens.clamp(min=0)
        kept.features[rows][row, place] = features
        count.add_(num_new)

    def clear(self, row: int) -> None:
        """Marks the row as nobody's."""
        for each in self.drafts:
            each.num_behind[row] = 0
        self.is_live[row] = 0
        self.lengths[row] = 0
        self.block_table[row] = -1

    def move(self, row: int, to: int) -> None:
        """Moves a row to place `to`; its old place is nobody's afterwards."""
        for tensor in self.tensors():
            tensor[to] = tensor[row]
        self.clear(row)

    def tensors(self) -> list[Tensor]:
        """Returns every tensor that belongs to rows."""
        held = [self.lengths, self.roots, self.is_live, self.block_table, self.methods, self.history]
        for each in self.drafts:
            held += [each.draft_logits, each.num_behind, each.draft_hidden]
            held += [tensor for kept in each.kept.values() for tensor in kept]
        return [tensor for tensor in held if tensor is not None] + self.sampling.tensors()


class Committed(NamedTuple):
    """Holds the verdict of any verification op and what follows from it; see `ops.verify_commit`."""

    accept_index: Tensor
    accept_token_num: Tensor
    new_seq_lens: Tensor
    bonus_tokens: Tensor
    tokens: Tensor
    hidden_rows: Tensor
    last_row: Tensor
    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None


class Batch:
    """Holds the rows of a step, and where their new keys go.
    slots: [B, M] int64. Those of the M = num_slots tokens after the committed ones, in either pool.
    positions: [B, M] int64. Theirs, none above what the draft was made for; None without its max_length."""

    def __init__(self, state: BatchState, rows: slice, num_slots: int, max_length: int | None):
        self.state, self.rows = state, rows
        self.lengths, self.roots, self.is_live = state.lengths[rows], state.roots[rows], state.is_live[rows]
        self.block_table, self.seeds = state.block_table[rows], state.sampling.seeds[rows]
        page_size = state.target_pool.page_size
        self.slots, self.positions = ops.find_slots(
            self.block_table, self.lengths, count=num_slots, page_size=page_size, max_length=max_length
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def numbers(self, name: str) -> Tensor:
        """Returns [B] values of a field of `SamplingParams`."""
        return self.state.sampling.numbers[name][self.rows]

    def sampling_arguments(self, features: Features) -> dict[str, Tensor]:
        return self.state.sampling.arguments(features, self.rows)
