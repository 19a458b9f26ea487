"""Sample and match in vLLM: a token follows from the target's logits, its request's seed and its position alone.

vLLM makes the sampler and the verification of a model once it has loaded it. Ours take their place and keep vLLM's
states of requests, which bias, penalise and ban tokens in the rows of a step, drafts on the way to a row included. Then
one sampler draws a token in each row: first tokens, those of plain decoding, and one after each draft. Drafts are
accepted as far as they are what is drawn, so one seed gives one text, with and without speculation.
"""

from __future__ import annotations

import functools
import inspect
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from ...ops import sample_from_logits, verify_tree_greedy, verify_tree_sampled
from .parts import SWITCHES

try:  # since vLLM 0.31
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext as Step
except ImportError:
    Step = SimpleNamespace

# What `Sampler.sample` takes of a step between the logits and `return_logprobs`: the fields of a Step
FIELDS = tuple(inspect.signature(Sampler.sample).parameters)[2:-1]
ANY_DTYPE = (LogitBiasState, PenaltiesState, BadWordsState)  # others are promised float32
PROCESSED = ("processed_logprobs", "processed_logits")
# Temperature, top-k and top-p of requests whose kernels are compiled before the first of them comes.
COMPILED = ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 0, 0.9), (1.0, 20, 1.0), (1.0, 20, 0.9))


class MatchSampler(Sampler):
    """vLLM's sampler, which draws by ours."""

    layout = None  # dtype and stride of rows of logits, which may be padded, in the last step

    @classmethod
    def of(cls, sampler: Sampler) -> MatchSampler:
        """Returns a sampler with the states of one that vLLM made."""
        made = cls.__new__(cls)
        made.__dict__.update(sampler.__dict__)
        return made

    def sample(self, logits, *given, return_logprobs=False):
        """Draws a token int64 from each row; returns them and the logits that vLLM may make log-probabilities of."""
        SWITCHES.note_use("verify")
        step = Step(**dict(zip(FIELDS, given)))
        logits = self.adjust(logits, step, return_logprobs)
        rows = step.expanded_idx_mapping
        tokens = sample_from_logits(**self.draws(logits, rows, rows, step.idx_mapping_np), positions=step.pos + 1)
        return tokens, self.processed(logits, rows, step.idx_mapping_np, return_logprobs)

    def adjust(self, logits, step: Step, return_logprobs: bool) -> torch.Tensor:
        """Returns the logits after biases, penalties and bans, which vLLM's own states apply, in place where they can.

        A batch with a request that wants log-probabilities of the logits as they are gets a copy.
        """
        self.layout = logits.dtype, logits.stride(0)
        if return_logprobs and self.logprobs_mode.startswith("raw_"):
            logits = empty_rows(logits, len(logits)).copy_(logits)
        places = step.idx_mapping_np
        if not hasattr(self, "logits_processors"):  # before vLLM 0.31
            rows, drafts = (logits, step.expanded_idx_mapping, places), (step.input_ids, step.expanded_local_pos)
            self.logit_bias_state.apply_logit_bias(*rows, step.pos)
            self.penalties_state.apply_penalties(*rows, *drafts)
            if self.bad_words_state.num_bad_words.np[places].any():
                # these releases look for each draft a row too early (vLLM's pull request 52311 mends that)
                self.bad_words_state.apply_bad_words(*rows, step.input_ids.roll(-1), step.expanded_local_pos)
        elif self.needs_logits_processing[places].any():
            for processor in self.logits_processors:
                logits = processor.apply(logits if isinstance(processor, ANY_DTYPE) else logits.float(), step)
            budget = self.thinking_budget_state
            if budget.enabled and budget.use_thinking_budget[places].any():
                logits = logits.float()  # what it writes is too large for float16
                budget.apply(logits, step)
        return self.filtered(logits, step.expanded_idx_mapping, places) if self.returns_masks else logits

    @property
    def returns_masks(self) -> bool:
        """Tells whether vLLM returns which tokens its filters leave; then ours draws from what they left."""
        return getattr(self, "return_sampling_mask", False)

    def draws(self, logits, rows, requests, idx_mapping_np) -> dict[str, torch.Tensor | None]:
        """Returns the logits, seeds, temperatures and filters that our samplers take.

        rows, requests: the places in vLLM's states of each row of logits, and of what has a seed and filters.
        """
        states = self.sampling_states
        of = lambda numbers: numbers.gpu.index_select(0, requests)  # noqa: E731
        temperature, min_p, is_done = of(states.temperature), None, self.returns_masks
        has_top_k = not is_done and (states.top_k.np[idx_mapping_np] != states.vocab_size).any()
        has_top_p = not is_done and (states.top_p.np[idx_mapping_np] != 1.0).any()
        if not is_done and states.min_p.np[idx_mapping_np].any():
            if not (has_top_k or has_top_p):
                min_p = of(states.min_p)
            else:  # vLLM's min-p comes before top-k and top-p, ours after them
                logits, is_done = logits.to(torch.float32, copy=True), True
                states.apply_temperature(logits, rows, idx_mapping_np)
                states.apply_min_p(logits, rows, idx_mapping_np)
        return {
            "logits": logits,
            "seeds": of(states.seeds),
            "temperature": (temperature > 0).to(torch.float32) if is_done else temperature,
            "top_k": of(states.top_k) if has_top_k else None,
            "top_p": of(states.top_p) if has_top_p else None,
            "min_p": min_p,
        }

    def processed(self, logits, expanded_idx_mapping, idx_mapping_np, return_logprobs: bool) -> torch.Tensor:
        """Returns the adjusted logits as log-probabilities are made of them, which may take their place in place."""
        is_left = self.returns_masks or not return_logprobs or self.logprobs_mode not in PROCESSED
        return logits if is_left else self.filtered(logits, expanded_idx_mapping, idx_mapping_np)

    def filtered(self, logits, *rows) -> torch.Tensor:
        """Returns the adjusted logits over the temperature, and without what vLLM's own filters remove."""
        logits, states = logits.float(), self.sampling_states
        states.apply_temperature(logits, *rows)
        states.apply_min_p(logits, *rows)
        return states.apply_top_k_top_p(logits, *rows)


def empty_rows(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns room for rows that lie as those of some logits do; rows of another alignment need other kernels."""
    return logits.new_empty(count, logits.stride(0))[:, : logits.shape[1]]


def inputs_of(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token and the position of each row of logits; all rows of a step are taken as they lie."""
    rows = batch.logits_indices
    rows = slice(len(rows)) if len(rows) == batch.num_tokens else rows
    return batch.input_ids[rows], batch.positions[rows]


class MatchVerifier(RejectionSampler):
    """vLLM's verification of chains, by sample and match."""

    def __init__(self, sampler: MatchSampler, spec_config, device):
        super().__init__(sampler, spec_config, device)
        rates = spec_config.synthetic_acceptance_rates
        is_synthetic = self.synthetic_conditional_rates is not None
        self.rates = torch.tensor(rates, dtype=torch.float32, device=device) if is_synthetic else None
        num_nodes = self.num_speculative_steps + 1
        child = torch.arange(1, num_nodes + 1, device=device).repeat(sampler.req_states.max_num_reqs, 1)
        child[:, -1] = -1
        index = torch.arange(child.numel(), device=device).view_as(child)
        self._links = index, child, torch.full_like(child, -1)  # of chains as trees, of any batch
        self._fronts: dict[int, tuple[torch.Tensor, ...]] = {}  # of the links, by batch size

    def __call__(self, logits, input_batch, *given) -> SamplerOutput:
        """Draws at each row and accepts drafts as far as they are drawn; see `RejectionSampler`."""
        if hasattr(super(), "_verify"):  # from vLLM 0.27 on; it cuts large batches into chunks for ours
            return super().__call__(logits, input_batch, *given)
        sampler, places = self.sampler, input_batch.idx_mapping_np
        if self.rates is not None and not self.is_whole(logits, places):
            return super().__call__(logits, input_batch, *given)
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        drafts, pos = inputs_of(input_batch)
        processed, sampled, num_sampled = self._verify(
            logits, None, drafts, pos, input_batch.cu_num_logits, input_batch.idx_mapping, places,
            input_batch.expanded_idx_mapping, input_batch.expanded_local_pos,
        )  # fmt: skip
        of = processed if sampler.logprobs_mode in PROCESSED else logits
        logprobs = self._get_logprobs_tensors(input_batch, sampled, num_sampled, of)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )  # fmt: skip
        return SamplerOutput(sampled, logprobs, num_nans, num_sampled, num_rejected)

    def is_whole(self, logits, idx_mapping_np) -> bool:
        """Tells whether all requests have all drafts."""
        return len(logits) == len(idx_mapping_np) * (self.num_speculative_steps + 1)

    def _verify(
        self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np,
        expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np=None, verify_draft_sampled=None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Returns the logits that log-probabilities may be made of, tokens int64 [B, N], and how many count int32 [B].

        draft_sampled: each row's input, -1 for a draft before there were any. verify_draft_sampled: -1 also for drafts
        that a grammar forbids.
        """
        SWITCHES.note_use("verify")
        sampler, rows, places = self.sampler, expanded_idx_mapping, idx_mapping_np
        drafts = draft_sampled if verify_draft_sampled is None else verify_draft_sampled
        is_whole = self.is_whole(logits, places)
        is_forbidding = drafts.data_ptr() != draft_sampled.data_ptr()
        if self.rates is not None and (is_forbidding or not is_whole):  # as in the first steps of a request
            return super()._verify(
                logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, places, rows, expanded_local_pos,
                *(each for each in (seq_lens_upper_bound_np, verify_draft_sampled) if each is not None),
            )  # fmt: skip
        wants = sampler.sampling_states.max_num_logprobs(places) != -1
        fields = {
            "expanded_idx_mapping": rows, "idx_mapping": idx_mapping, "idx_mapping_np": places, "pos": pos,
            "input_ids": draft_sampled, "expanded_local_pos": expanded_local_pos,
            "seq_lens_upper_bound_np": seq_lens_upper_bound_np,
        }  # fmt: skip
        adjusted = sampler.adjust(logits, Step(**{name: fields[name] for name in FIELDS}), wants)
        if is_whole:
            sampled, num_sampled = self.verify_whole(self.parameters(adjusted, rows, idx_mapping, places), drafts, pos)
        else:
            draws = sampler.draws(adjusted, rows, rows, places)
            tokens = sample_from_logits(**draws, positions=pos + 1)
            sampled, num_sampled = _match(tokens, drafts, cu_num_logits, self.num_speculative_steps + 1)
        return sampler.processed(adjusted, rows, places, wants), sampled, num_sampled

    def parameters(self, logits, rows, requests, idx_mapping_np) -> dict[str, torch.Tensor | None]:
        """Returns what `MatchSampler.draws` does; without temperature and filters where all requests are greedy."""
        states = self.sampler.sampling_states
        if not (states.temperature.np[idx_mapping_np] == 0.0).all():
            return self.sampler.draws(logits, rows, requests, idx_mapping_np)
        return {"logits": logits} | ({} if self.rates is None else {"seeds": states.seeds.gpu[requests]})

    def verify_whole(self, parameters: dict, drafts, pos) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (tokens int64 [B, N], how many count int32 [B]) of chains of N rows: the root and all drafts."""
        num_nodes = self.num_speculative_steps + 1
        drafts, is_refused = drafts.view(-1, num_nodes), None
        if self.rates is not None and Step is not SimpleNamespace:
            # since 0.31 vLLM makes all drafts of a request up before there are any
            is_refused, drafts = drafts[:, 1] < 0, drafts.clamp(min=0)
        out = self.walk(parameters, drafts, self._chains(len(drafts)), pos, num_nodes - 1)
        if "temperature" in parameters:
            tokens, count = out.tokens, out.accept_lengths
        else:  # two launches in the place of `verify_commit` are cheaper for the host
            tokens, count = out.predicts.view(-1, num_nodes).to(torch.int64), out.accept_token_num + 1
        return tokens, count if is_refused is None else count.masked_fill(is_refused, 1)

    def walk(self, parameters: dict, drafts, links, pos, spec_steps: int):
        """Returns what `verify_tree_greedy` or `verify_tree_sampled` does of drafts [B, N], as the parameters ask; of
        the latter with what `verify_commit` gives."""
        verify = verify_tree_sampled if "temperature" in parameters else verify_tree_greedy
        parameters = parameters | {"spec_steps": spec_steps}
        parameters["target_logits"] = parameters.pop("logits")
        if self.rates is not None:
            parameters |= {"accept_policy": "simulate", "simulated_rates": self.rates}
        if verify is verify_tree_sampled:
            parameters["seq_lens"] = parameters["seeds"]  # any numbers: nothing reads the lengths that follow
        if verify is verify_tree_sampled or self.rates is not None:
            parameters["positions"] = pos
        return verify(drafts, *links, **parameters)

    def _chains(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the links of chains as trees: retrieve_index, retrieve_next_token and retrieve_next_sibling."""
        if batch_size not in self._fronts:
            self._fronts[batch_size] = tuple(links[:batch_size] for links in self._links)
        return self._fronts[batch_size]


def _match(tokens, drafts, bounds, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens int64 [B, N], how many count int32 [B]) of requests with any number of rows up to N.

    tokens, drafts: [rows], what is drawn at a row, and its input. bounds: [B + 1].
    """
    place = bounds[:-1, None] + torch.arange(num_nodes, device=tokens.device)
    stop, last = bounds[1:, None], len(tokens) - 1
    found = tokens[place.clamp(max=last)]
    is_match = (place + 1 < stop) & (found == drafts[(place + 1).clamp(max=last)])
    return found, is_match.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32) + 1


def warmup_kernels(original, model_runner, worker_execute_model, worker_sample_tokens):
    """Compiles what ours launch, once vLLM has done so for its own kernels, by requests that have all filters."""
    original(model_runner, worker_execute_model, worker_sample_tokens)
    sampler, verifier = model_runner.sampler, model_runner.rejection_sampler
    if not isinstance(sampler, MatchSampler):  # a model's own, or another rank of a pipeline
        return
    states, num_nodes, device = sampler.sampling_states, 1 + model_runner.num_speculative_steps, model_runner.device
    dtype, stride = sampler.layout or (model_runner.dtype, model_runner.vocab_size)
    # large batches are walked level by level
    sizes = (min(model_runner.max_num_reqs, max(1, model_runner.max_num_tokens // num_nodes)), 1)
    # rows overlap, or they would take gigabytes; what is compiled depends on how they are aligned alone
    count, step = sizes[0] * num_nodes, 16 + math.gcd(stride, 16)
    memory = torch.zeros(count * step + model_runner.vocab_size, dtype=dtype, device=device)
    logits = memory.as_strided((count, model_runner.vocab_size), (step, 1))
    rows = torch.zeros(len(logits), dtype=torch.int64, device=device)  # all of the request at place 0
    drafts = rows.to(torch.int32)
    later_steps = getattr(getattr(model_runner, "speculator", None), "later_steps", list)
    calls = later_steps(), []  # the latter launch much of what the former do
    for temperature, top_k, top_p in COMPILED:
        states.temperature.np[0], states.top_p.np[0], states.min_p.np[0] = temperature, top_p, 0.0
        states.top_k.np[0] = top_k or model_runner.vocab_size
        states.apply_staged_writes()
        if temperature:
            draws = sampler.draws(logits[:1], rows[:1], rows[:1], [0])
            calls[0].append(functools.partial(sample_from_logits, **draws, positions=rows[:1]))
        for size, of_size in zip(sizes, calls):
            if isinstance(verifier, MatchVerifier):
                count = size * num_nodes
                parameters = verifier.parameters(logits[:count], rows[:count], rows[:size], [0] * size)
                of_size.append(functools.partial(verifier.verify_whole, parameters, drafts[:count], rows[:count]))

    # a new thread has the first device and its default stream, which does not wait for another one, or another for it
    is_cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if is_cuda else None
    start = {"initializer": torch.cuda.set_device, "initargs": (device,)} if is_cuda else {}

    def make(call) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            call()

    with ThreadPoolExecutor(**start) as pool:  # a compiler leaves Python's lock to others most of the time
        for some in calls:
            list(pool.map(make, some))
