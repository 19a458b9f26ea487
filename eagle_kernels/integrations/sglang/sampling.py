"""Sample and match in SGLang: one seed gives one text, with and without drafts (EAGLE_KERNELS_SGLANG_VERIFY=match).

A token is drawn from the target's logits with noise that follows from its request's seed and its position alone, by one
sampler for first tokens, for plain decoding and at every node of a tree. So the text does not depend on the drafts.

What that needs of a request is kept on the device, by its row in SGLang's request pool: its seed and penalties, and how
often its output has each token. Each row is written when a prompt is read and counted on by every step, all in the
order of the forward stream; the host, from which SGLang's own penalties are fed, is a step behind under overlap.
"""

import hashlib
import weakref
from dataclasses import dataclass

import torch

from ...ops import penalize_logits, sample_from_logits


@dataclass
class Asked:
    """What R requests whose prompts are read ask for, on the device.
    numbers: int64 [5, R], row of the pool, seed, slot of counts (0: none), length of the output, min_new_tokens.
    penalties: fp32 [3, R], repetition, frequency, presence. ends: int64 [R, E], end tokens, -1 padded. counted: int64
    [2, T], slot and token of each token that the slots' outputs have already."""

    numbers: torch.Tensor
    penalties: torch.Tensor
    ends: torch.Tensor
    counted: torch.Tensor
    num_slots: int


class Requests:
    """The requests of a process by row of SGLang's request pool; requests with penalties have a slot of counts."""

    def __init__(self):
        self._slots: dict[int, int] = {}  # by row
        self._numbers = self._penalties = self._ends = self._counts = None

    def slot_of(self, row: int, is_penalised: bool) -> int:
        """Returns the slot of counts of the request that takes this row, and frees that of the one before."""
        if not is_penalised:
            self._slots.pop(row, None)
            return 0
        taken = set(self._slots.values())
        free = next(slot for slot in range(1, len(taken) + 2) if slot not in taken)
        return self._slots.setdefault(row, free)

    def write(self, asked: Asked, num_rows: int, vocab_size: int) -> None:
        """Writes the rows of requests whose prompts are read."""
        device = asked.numbers.device
        if self._numbers is None:
            self._numbers = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
            self._penalties = torch.zeros(3, num_rows, dtype=torch.float32, device=device)
            self._ends = torch.full((num_rows, 1), -1, dtype=torch.int64, device=device)
            self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        rows, slots = asked.numbers[0], asked.numbers[2]
        missing = asked.ends.shape[1] - self._ends.shape[1]
        if missing > 0:
            self._ends = torch.nn.functional.pad(self._ends, (0, missing), value=-1)
        self._numbers[:, rows] = asked.numbers[1:]
        self._penalties[:, rows] = asked.penalties
        self._ends[rows] = torch.nn.functional.pad(asked.ends, (0, max(-missing, 0)), value=-1)
        if asked.num_slots >= len(self._counts):
            more = max(asked.num_slots + 1 - len(self._counts), len(self._counts))
            self._counts = torch.nn.functional.pad(self._counts, (0, 0, 0, more))
        self._counts[slots] = 0
        self._add(*asked.counted, torch.ones_like(asked.counted[0]))

    def seeds(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the seeds of these rows."""
        return self._numbers[0].index_select(0, rows)

    def penalize(self, tree: tuple[torch.Tensor, ...], logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits of a tree's nodes, fp32, after the penalties of these rows; each node counts its path.
        They take the place of logits that are fp32: all nodes of a batch are up to a GB."""
        repetition, frequency, presence = self._penalties[:, rows]
        _, slots, lengths, least = self._numbers[:, rows]
        return penalize_logits(
            *tree, logits, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence,
            output_counts=self._counts[slots], min_tokens=least, num_output_tokens=lengths,
            end_token_ids=self._ends[rows], out=logits if logits.dtype == torch.float32 else None,
        )  # fmt: skip

    def count(self, rows: torch.Tensor, tokens: torch.Tensor, is_output: torch.Tensor) -> None:
        """Counts the tokens [R, T] that these rows emitted, where is_output [R, T] says so."""
        self._numbers[2].index_add_(0, rows, is_output.sum(1))
        slots = self._numbers[1, rows][:, None].expand_as(tokens)
        self._add(slots.flatten(), tokens.flatten(), is_output.flatten())

    def _add(self, slots: torch.Tensor, tokens: torch.Tensor, numbers: torch.Tensor) -> None:
        places = slots * self._counts.shape[1] + torch.where(numbers > 0, tokens, 0)
        self._counts.view(-1).scatter_add_(0, places, numbers.to(torch.int32))


REQUESTS = Requests()


class Penalised:
    """Stands in for SGLang's penalizers, and asks nothing of it: ours count on the device, by the rows of the pool."""

    is_required = False

    def __init__(self, batch):
        self._batch = weakref.ref(batch)

    @property
    def has_penalties(self) -> bool:
        """Whether a request that is in the batch now has a penalty."""
        batch = self._batch()
        return batch is not None and any(map(is_penalised, batch.reqs))

    def _ignore(self, *arguments, **options) -> None:
        """Does nothing."""

    filter = merge = release = _ignore


def is_penalised(request) -> bool:
    """Tells whether a request's logits depend on its output."""
    params = request.sampling_params
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.min_new_tokens > 0
    )


def seed_of(request) -> int:
    """Returns a request's seed; one that gives none has its own, which all ranks and all its prompts agree on."""
    seed = request.sampling_params.sampling_seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest(), "big")
    return seed % 2**63


def ends_of(request) -> list[int]:
    """Returns the tokens that min_new_tokens keeps back: all at which SGLang ends the request."""
    of_tokenizer = getattr(request.tokenizer, "additional_stop_token_ids", None)  # of a server without one None
    lists = (request.sampling_params.stop_token_ids, request.eos_token_ids, of_tokenizer)
    ends = {getattr(request.tokenizer, "eos_token_id", None)}.union(*(tokens or () for tokens in lists))
    return sorted(ends - {None})


def ask(requests, rows: list[int], device) -> Asked:
    """Returns what requests ask for that get these rows of the pool."""
    numbers, penalties, ends, counted = [], [], [], []
    for request, row in zip(requests, rows):
        params, is_counted = request.sampling_params, is_penalised(request)
        slot = REQUESTS.slot_of(row, is_counted)
        numbers.append([row, seed_of(request), slot, len(request.output_ids), params.min_new_tokens])
        penalties.append([params.repetition_penalty, params.frequency_penalty, params.presence_penalty])
        ends.append(ends_of(request) if params.min_new_tokens > 0 else [])
        # of a request that was retracted and reads its own output again
        counted += [[slot, token] for token in request.output_ids] if is_counted else []
    width = max(1, *map(len, ends))
    ends = [each + [-1] * (width - len(each)) for each in ends]
    make = lambda values, dtype: torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)  # noqa: E731
    counted = make(counted, torch.int64).view(-1, 2).T
    return Asked(
        make(numbers, torch.int64).T, make(penalties, torch.float32).T, make(ends, torch.int64), counted,
        max(number[2] for number in numbers),
    )  # fmt: skip


def from_schedule_batch(original, cls, batch, vocab_size):
    """Notes what the requests of a batch ask for, and takes SGLang's own penalties out of it."""
    info = original(cls, batch, vocab_size)
    info.penalizer_orchestrator = Penalised(batch)
    info.eagle_kernels_asked, info.eagle_kernels_is_penalised = None, False
    if batch.reqs:
        info.eagle_kernels_asked = ask(batch.reqs, batch.req_pool_indices_cpu.tolist(), batch.device)
    return info


def copy_for_forward(original, info):
    """Copies for the forward stream also what is not a field of SGLang's."""
    copy = original(info)
    copy.eagle_kernels_asked, copy.eagle_kernels_is_penalised = info.eagle_kernels_asked, has_penalties(info)
    return copy


def has_penalties(info) -> bool:
    """Tells whether a request of a batch has a penalty."""
    penalised = info.penalizer_orchestrator
    return info.eagle_kernels_is_penalised if penalised is None else penalised.has_penalties


def sample(original, runner, logits_output, forward_batch):
    """Samples first tokens and plain decoding: penalties and seeds are those of the rows of the pool."""
    info, rows = forward_batch.sampling_info, forward_batch.req_pool_indices
    if runner.is_draft_worker or not hasattr(info, "eagle_kernels_asked"):  # a batch that no request is in
        return original(runner, logits_output, forward_batch)
    if info.eagle_kernels_asked is not None and not forward_batch.forward_mode.is_decode():
        num_rows = len(runner.req_to_token_pool.req_to_token)
        REQUESTS.write(info.eagle_kernels_asked, num_rows, info.vocab_size)
    is_counted = has_penalties(info)
    if is_counted:
        node, none = torch.arange(len(rows), device=rows.device)[:, None], torch.full_like(rows[:, None], -1)
        root = (torch.zeros_like(none), node, none, none)
        logits_output.next_token_logits = REQUESTS.penalize(root, logits_output.next_token_logits, rows)
    info.eagle_kernels_seeds = REQUESTS.seeds(rows)
    tokens = original(runner, logits_output, forward_batch)
    if is_counted:
        REQUESTS.count(rows, tokens.long()[:, None], torch.ones_like(rows)[:, None])
    return tokens


def filters(info) -> dict[str, torch.Tensor | None | str]:
    """Returns the temperature and the filters of each request, as our samplers take them."""
    temperature = info.temperatures[:, 0]
    if info.is_any_greedy:
        temperature = temperature.masked_fill(info.top_ks <= 1, 0.0)
    return {
        "temperature": temperature,
        "top_k": info.top_ks if info.need_top_k_sampling else None,
        "top_p": info.top_ps if info.need_top_p_sampling else None,
        "min_p": info.min_ps if info.need_min_p_sampling else None,
        "filter_order": "joint",  # as SGLang's samplers
    }


def forward(
    original, sampler, logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **options
):
    """Draws a token from each row of logits; greedy batches, and what only SGLang's sampler returns, stay with it."""
    from sglang.srt.layers import sampler as of_sglang

    is_ours = (
        not info.is_all_greedy
        and hasattr(info, "eagle_kernels_seeds")
        and not any(info.return_sampling_masks or ())
        and all(value is None for value in options.values())
    )
    if not is_ours:
        return original(
            sampler, logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **options
        )
    logits = of_sglang.Sampler._preprocess_logits(sampler, logits_output.next_token_logits, info)
    tokens = sample_from_logits(logits, positions + 1, info.eagle_kernels_seeds, **filters(info)).to(torch.int32)
    if return_logprob:
        scale = 1.0 if of_sglang.SGLANG_RETURN_ORIGINAL_LOGPROB else info.temperatures
        logprobs = torch.log_softmax(logits / scale, -1)
        found = sampler.output_logprob_processor.compute_logprobs(
            logprobs, top_logprobs_nums, token_ids_logprobs, tokens
        )
        found.write_output_to(logits_output)
    of_sglang.Sampler._sync_token_ids_across_tp(sampler, tokens, info)
    return tokens
