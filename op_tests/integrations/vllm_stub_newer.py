"""The made vLLM in the form of 0.33: what differs from `vllm_stub`, which has that of 0.26."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import numpy as np
import torch

from op_tests.integrations import vllm_stub as older

# attention


class MultipleOf:
    def __init__(self, base: int):
        self.base = base


class TritonAttentionBackend(older.TritonAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]


class FlashAttentionBackend(older.FlashAttentionBackend):
    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        """FlashAttention 4 reads keys of 8 bits in pages of 64, if heads are that large."""
        return [64] if getattr(kv_cache_spec, "head_size", 0) == 512 else [MultipleOf(16)]


class MetadataBuilder(older.TritonAttentionMetadataBuilder):
    supports_draft_decode_metadata_update = True

    def update_draft_decode_metadata(self, metadata) -> None:
        self.updated = metadata


class AttentionBackendEnum(enum.Enum):
    TRITON_ATTN = older.AttentionBackendEnum.TRITON_ATTN.value
    FLASH_ATTN = older.AttentionBackendEnum.FLASH_ATTN.value
    CUSTOM = None

    @classmethod
    def register(cls, name: str, value: str) -> AttentionBackendEnum:
        assert name not in cls._member_map_
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

    @classmethod
    def forget(cls) -> None:
        """Takes what was registered away."""
        for name in [name for name in cls._member_names_ if name not in ("TRITON_ATTN", "FLASH_ATTN", "CUSTOM")]:
            del cls._value2member_map_[cls._member_map_.pop(name)._value_]
            cls._member_names_.remove(name)
            delattr(cls, name)

    def is_overridden(self) -> bool:
        return self in older.OVERRIDES

    def get_path(self) -> str:
        return older.OVERRIDES.get(self, self.value)


def register_backend(backend, class_path: str) -> None:
    if isinstance(backend, str):
        backend = AttentionBackendEnum.register(backend, class_path)
    older.OVERRIDES[backend] = class_path


# sampling


@dataclass(frozen=True)
class LogitsContext:
    expanded_idx_mapping: torch.Tensor
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    expanded_local_pos: torch.Tensor
    input_ids: torch.Tensor
    pos: torch.Tensor
    seq_lens_upper_bound_np: np.ndarray

    @property
    def rows(self) -> tuple:
        return self.expanded_idx_mapping, self.idx_mapping_np

    @property
    def drafts(self) -> tuple:
        return self.input_ids, self.expanded_local_pos


class LogitBiasState(older.LogitBiasState):
    def apply(self, logits, ctx):
        self.apply_logit_bias(logits, *ctx.rows, ctx.pos)
        return logits


class PenaltiesState(older.PenaltiesState):
    def apply(self, logits, ctx):
        self.apply_penalties(logits, *ctx.rows, *ctx.drafts)
        return logits


class BadWordsState(older.BadWordsState):
    """Looks for each draft in its own row."""

    def apply(self, logits, ctx):
        self.apply_bad_words(logits, *ctx.rows, ctx.input_ids.roll(-1), ctx.expanded_local_pos)
        return logits


class ThinkingBudgetState:
    """Forces a token, as vLLM does after so many others, by a logit that float16 does not hold."""

    def __init__(self, size: int):
        self.enabled, self.token, self.use_thinking_budget = False, None, np.zeros(size, bool)

    def apply(self, logits, ctx) -> None:
        for row, place in enumerate(ctx.expanded_idx_mapping.tolist()):
            if self.use_thinking_budget[place]:
                logits[row, self.token] = 1e9


class SamplingStates(older.SamplingStates):
    def get_top_k_top_p(self, rows, places, vocab_size):
        return *super().get_top_k_top_p(rows, places), False


class Sampler:
    def __init__(
        self, vllm_config, max_num_reqs, vocab_size, device, req_states, logprobs_mode="raw_logprobs",
        num_speculative_tokens=1, return_sampling_mask=False, custom_logits_processors=(),
    ):  # fmt: skip
        self.logprobs_mode, self.compute_nans, self.req_states = logprobs_mode, False, req_states
        self.num_speculative_tokens, self.return_sampling_mask = num_speculative_tokens, return_sampling_mask
        self.sampling_states = SamplingStates(max_num_reqs, vocab_size, device)
        self.penalties_state = PenaltiesState(req_states)
        own = (LogitBiasState(req_states), self.penalties_state, BadWordsState(req_states))
        self.logits_processors = [*own, *custom_logits_processors]
        self.thinking_budget_state = ThinkingBudgetState(max_num_reqs)
        self.needs_logits_processing = np.zeros(max_num_reqs, bool)

    def add_request(self, place, params) -> None:
        for state in (self.sampling_states, *self.logits_processors):
            state.add_request(place, params)
        self.needs_logits_processing[place] = True

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()

    def sample(
        self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos,
        seq_lens_upper_bound_np, return_logprobs=False,
    ):  # fmt: skip
        raise NotImplementedError("vLLM's own kernel")

    def get_logprobs_dims(self, places, include_token_ids=True) -> tuple[int, int] | None:
        most = self.sampling_states.max_num_logprobs(places)
        return None if most == -1 else (most, 0)

    def __call__(self, logits, batch) -> older.SamplerOutput:
        places, num_nans = batch.idx_mapping_np, older.get_num_nans(logits) if self.compute_nans else None
        dims = self.get_logprobs_dims(places)
        tokens, processed = self.sample(
            logits, batch.expanded_idx_mapping, batch.idx_mapping, places, batch.positions[batch.logits_indices],
            batch.input_ids[batch.logits_indices], batch.expanded_local_pos, batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=dims is not None,
        )  # fmt: skip
        of = processed if self.logprobs_mode[0] == "p" else logits
        logprobs = dims and older.compute_topk_scores(of, dims[0], tokens, self.logprobs_mode)
        counts = older.get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs), batch.seq_lens, batch.cu_num_logits, batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )  # fmt: skip
        mask = processed.isfinite() if self.return_sampling_mask else None
        return SamplerOutput(tokens.view(-1, 1), logprobs, num_nans, *counts, mask)


@dataclass
class SamplerOutput(older.SamplerOutput):
    sampling_mask_tensors: torch.Tensor | None = None


MAX_CHUNK_BYTES = 2**30


class RejectionSampler:
    """Calls `_verify` with chunks of whole requests."""

    def __init__(self, sampler, spec_config, device, *, watermark_key=None):
        older.RejectionSampler.__init__(self, sampler, spec_config, device)

    def _get_logprobs_tensors(self, *given):
        raise NotImplementedError("vLLM gives it what it takes")

    def _verify(self, *given):
        raise NotImplementedError("vLLM's own kernel")

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None) -> SamplerOutput:
        sampler, batch, mode = self.sampler, input_batch, self.sampler.logprobs_mode
        num_nans = older.get_num_nans(logits) if sampler.compute_nans else None
        pos, local = batch.positions[batch.logits_indices], batch.expanded_local_pos
        is_made_up = (local > 0) & (pos - local < sampler.req_states.prefill_len.gpu[batch.expanded_idx_mapping.long()])
        drafts = batch.input_ids[batch.logits_indices].masked_fill(is_made_up, -1)
        allowed = drafts if invalid_drafts is None else drafts.masked_fill(invalid_drafts, -1)
        most, bounds = max(1, MAX_CHUNK_BYTES // (4 * logits.shape[1])), batch.cu_num_logits_np.tolist()
        starts = [0]
        for request in range(1, len(bounds) - 1):
            if bounds[request + 1] - bounds[starts[-1]] > most:
                starts.append(request)
        found, masks = [], []
        for first, stop in zip(starts, [*starts[1:], len(bounds) - 1]):
            rows, of = slice(bounds[first], bounds[stop]), slice(first, stop)
            processed, sampled, counts = self._verify(
                logits[rows], draft_logits, drafts[rows], pos[rows],
                batch.cu_num_logits[first : stop + 1] - bounds[first], batch.idx_mapping[of], batch.idx_mapping_np[of],
                batch.expanded_idx_mapping[rows], local[rows], batch.seq_lens_cpu_upper_bound.numpy()[of],
                allowed[rows],
            )  # fmt: skip
            found.append((processed if mode[0] == "p" else logits[rows], sampled, counts))
            masks.append(processed.isfinite())
        of, sampled, num_sampled = map(torch.cat, zip(*found))
        logprobs = older.RejectionSampler._get_logprobs_tensors(self, batch, sampled, num_sampled, of)
        counts = older.get_num_sampled_and_rejected(
            num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, sampler.req_states.prefill_len.gpu
        )
        mask = torch.cat(masks) if sampler.return_sampling_mask else None
        return SamplerOutput(sampled, logprobs, num_nans, *counts, mask)


# what is hooked


class DraftModelSpeculator:
    def sample_draft(
        self, hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits,
        spec_step_idx=0, num_steps=1,
    ):  # fmt: skip
        return self.model.compute_logits(hidden_states).argmax(-1)


_ATTENTION = {
    older.BACKENDS + "triton_attn": {
        "TritonAttentionBackend": TritonAttentionBackend, "TritonAttentionMetadataBuilder": MetadataBuilder,
        "TritonAttentionImpl": older.TritonAttentionImpl,
    },
    older.BACKENDS + "registry": {
        "AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend,
    },
}  # fmt: skip
_SAMPLE = older.GPU + "sample."
MODULES = older.MODULES | _ATTENTION | {
    _SAMPLE + "bad_words": {"BadWordsState": BadWordsState},
    _SAMPLE + "logit_bias": {"LogitBiasState": LogitBiasState},
    _SAMPLE + "logits_processor": {"LogitsContext": LogitsContext},
    _SAMPLE + "output": {"SamplerOutput": SamplerOutput},
    _SAMPLE + "penalties": {"PenaltiesState": PenaltiesState},
    _SAMPLE + "sampler": {"Sampler": Sampler},
    older.GPU + "spec_decode.rejection_sampler": {"RejectionSampler": RejectionSampler},
}  # fmt: skip
HOPPER = older.HOPPER | MODULES | {
    name: older.HOPPER[name] for name in ("vllm.platforms", older.BACKENDS + "fa_utils")
} | {
    older.BACKENDS + "flash_attn": {
        "FlashAttentionBackend": FlashAttentionBackend, "FlashAttentionMetadataBuilder": MetadataBuilder,
        "FlashAttentionImpl": older.TritonAttentionImpl,
    },
}  # fmt: skip
hooked = functools.partial(older.hooked, MODULES, DraftModelSpeculator)
