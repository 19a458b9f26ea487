"""A made vLLM: the few names of vLLM's that our plug-in imports, with the meaning of vLLM's kernels in plain torch.

It has the form of 0.26; `vllm_stub_newer` has that of 0.33. FORMS has both.
Tests of attention and sampling run on the real one where EAGLE_KERNELS_VLLM_SITE names a folder with it and all that it
imports.
"""

import contextlib
import enum
import functools
import importlib
import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from op_tests.integrations import stand_in, vllm_stub_latents
from op_tests.integrations.vllm_stub_drafts import AutoRegressiveSpeculator

SITE = os.environ.get("EAGLE_KERNELS_VLLM_SITE", "")
FORMS = {"0.26": "vllm_stub", "0.33": "vllm_stub_newer"}
BACKEND = {"0.26": "CUSTOM", "0.33": "EAGLE_KERNELS"}  # the name of ours
NAMES = ["installed"] if SITE else [*FORMS]  # what tests of attention and sampling run on
OURS = tuple(
    f"eagle_kernels.integrations.vllm.{name}"
    for name in ("attention", "latent", "model_state", "rows", "sampling", "tree_verification")
)


# attention


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(enum.Enum):
    ALWAYS, UNIFORM_BATCH = 3, 2


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    mm_req_doc_ranges: dict | None = None


def split_decodes_and_prefills(common, decode_threshold: int = 1):
    """Counts requests up to the first with more rows than the threshold, those from it on, and the tokens of both."""
    lengths = common.query_start_loc_cpu.diff().tolist()
    first = next((index for index, length in enumerate(lengths) if length > decode_threshold), len(lengths))
    tokens = int(common.query_start_loc_cpu[first]) if first < len(lengths) else common.num_actual_tokens
    return first, len(lengths) - first, tokens, common.num_actual_tokens - tokens


class TritonAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes():
        return ["a multiple of 16"]


class TritonAttentionMetadataBuilder:
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        return SimpleNamespace(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
            block_table=common.block_table_tensor, seq_lens=common.seq_lens,
        )  # fmt: skip


class TritonAttentionImpl:
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None,
        use_alibi_sqrt=False, chunk_lookback=-1,
    ):  # fmt: skip
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        self.alibi_slopes, self.sinks, self.attn_type, self.chunk_lookback = (
            alibi_slopes, sinks, attn_type, chunk_lookback,
        )  # fmt: skip
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.supports_quant_query_input = True

    def forward(self, *arguments):
        raise NotImplementedError("vLLM's own kernel")


class FlashAttentionBackend(TritonAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


def platform(capability: int = 0) -> SimpleNamespace:
    """vLLM's word on the device: none of NVIDIA's, or one of this family."""
    return SimpleNamespace(
        is_cuda=lambda: capability > 0, is_device_capability_family=lambda family: family // 10 == capability // 10,
        fp8_dtype=lambda: torch.float8_e4m3fn,
    )  # fmt: skip


class AttentionBackendEnum(enum.Enum):
    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return OVERRIDES.get(self, self.value)


OVERRIDES: dict[AttentionBackendEnum, str] = {}


# sampling


class Numbers:
    """A number of each request, on the host and on the device."""

    def __init__(self, size: int, value, dtype, device):
        self.np, self.device = np.full(size, value, dtype), device
        self.copy()

    def copy(self) -> None:
        self.gpu = torch.from_numpy(self.np.copy()).to(self.device)


def _places(rows):
    return list(enumerate(rows.tolist()))


class SamplingStates:
    def __init__(self, size: int, vocab_size: int, device):
        self.vocab_size = vocab_size
        kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
        self.numbers = {name: Numbers(size, 0, kind, device) for name, kind in (kinds | {"seeds": np.int64}).items()}
        vars(self).update(self.numbers)
        self.num_logprobs = np.full(size, -1, np.int32)

    def add_request(self, place, params) -> None:
        top_k = params.top_k if 0 < params.top_k <= self.vocab_size else self.vocab_size
        values = {
            "temperature": params.temperature, "top_k": top_k, "top_p": params.top_p, "min_p": params.min_p,
            "seeds": params.seed,
        }  # fmt: skip
        for name, value in values.items():
            self.numbers[name].np[place] = value
        self.num_logprobs[place] = -1 if params.logprobs is None else params.logprobs

    def apply_staged_writes(self) -> None:
        for numbers in self.numbers.values():
            numbers.copy()

    def apply_temperature(self, logits, rows, places) -> None:
        temperature = self.temperature.gpu[rows]
        logits.div_(torch.where(temperature == 0, 1, temperature)[:, None])

    def apply_min_p(self, logits, rows, places) -> None:
        least = logits.amax(1, keepdim=True) + self.min_p.gpu[rows].log()[:, None]
        logits.masked_fill_(logits < least, float("-inf"))

    def get_top_k_top_p(self, rows, places):
        has_top_k = (self.top_k.np[places] != self.vocab_size).any()
        top_k = self.top_k.gpu[rows] if has_top_k else None
        return top_k, self.top_p.gpu[rows] if (self.top_p.np[places] != 1.0).any() else None

    def apply_top_k_top_p(self, logits, rows, places) -> torch.Tensor:
        ordered, order = logits.sort(descending=True)
        count = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.masked_fill(count >= self.top_k.gpu[rows][:, None], float("-inf"))
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        ordered = ordered.masked_fill((before >= self.top_p.gpu[rows][:, None]) & (count > 0), float("-inf"))
        return logits.scatter_(1, order, ordered)

    def max_num_logprobs(self, places) -> int:
        return int(self.num_logprobs[places].max())


class _PerRequest:
    """States that keep what each request wants."""

    def __init__(self, req_states):
        self.req_states, self.wanted = req_states, {}

    def add_request(self, place, params) -> None:
        self.wanted[place] = params

    def texts(self, rows, input_ids, local, first_draft=1) -> list[tuple[int, object, list[int], list[int]]]:
        """Returns of each row its number, what its request wants, the prompt, and the output up to this row."""
        states, found = self.req_states, []
        for row, place in _places(rows):
            prompt_len, total_len = (int(each.gpu[place]) for each in (states.prompt_len, states.total_len))
            text, first = states.all_token_ids.gpu[place, :total_len].tolist(), row - int(local[row])
            drafts = input_ids[first + first_draft : row + first_draft].tolist()
            found.append((row, self.wanted[place], text[:prompt_len], text[prompt_len:] + drafts))
        return found


class LogitBiasState(_PerRequest):
    def apply_logit_bias(self, logits, rows, places, pos) -> None:
        for row, place in _places(rows):
            params = self.wanted[place]
            if params.allowed_token_ids:
                kept = logits[row, params.allowed_token_ids].clone()
                logits[row] = float("-inf")
                logits[row, params.allowed_token_ids] = kept
            for token, value in (params.logit_bias or {}).items():
                logits[row, token] += value
            if int(pos[row]) + 1 < int(self.req_states.prompt_len.gpu[place]) + params.min_tokens:
                logits[row, list(params.all_stop_token_ids)] = float("-inf")


class PenaltiesState(_PerRequest):
    """What vLLM's kernel reads: penalties, which tokens are in the prompt, a bit each, and how often in the output."""

    def __init__(self, req_states):
        super().__init__(req_states)
        size, vocab, device = req_states.max_num_reqs, req_states.vocab_size, req_states.device
        self.use_penalty = np.zeros(size, bool)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            setattr(self, name, Numbers(size, name == "repetition_penalty", np.float32, device))
        self.prompt_bin_mask = torch.zeros(size, -(-vocab // 32), dtype=torch.int32, device=device)
        self.output_bin_counts = torch.zeros(size, vocab, dtype=torch.int32, device=device)

    def add_request(self, place, params) -> None:
        super().add_request(place, params)
        values = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.use_penalty[place] = values != (1.0, 0.0, 0.0)
        for numbers, value in zip((self.repetition_penalty, self.frequency_penalty, self.presence_penalty), values):
            numbers.np[place] = value
            numbers.copy()
        states, vocab = self.req_states, self.output_bin_counts.shape[1]
        prompt_len, total_len = int(states.prompt_len.gpu[place]), int(states.total_len.gpu[place])
        text = states.all_token_ids.gpu[place].long()
        self.output_bin_counts[place] = text[prompt_len:total_len].bincount(minlength=vocab)
        for token in set(text[:prompt_len].tolist()):
            bit = 1 << token % 32
            self.prompt_bin_mask[place, token // 32] |= bit - (1 << 32) if bit >> 31 else bit

    def apply_penalties(self, logits, rows, places, input_ids, local) -> None:
        for row, params, prompt, output in self.texts(rows, input_ids, local):
            for token in {*prompt, *output}:
                scale = params.repetition_penalty
                logits[row, token] *= 1 / scale if logits[row, token] > 0 else scale
            for token in set(output):
                logits[row, token] -= params.frequency_penalty * output.count(token) + params.presence_penalty


class BadWordsState(_PerRequest):
    """vLLM 0.26 takes a request's last token for the first draft, the first draft for the second, and so on."""

    def __init__(self, req_states):
        super().__init__(req_states)
        size, device = req_states.max_num_reqs, req_states.device
        self.num_bad_words = Numbers(size, 0, np.int32, device)
        make = lambda width: SimpleNamespace(gpu=torch.zeros(size, width, dtype=torch.int32, device=device))  # noqa: E731
        self.bad_word_token_ids, self.bad_word_offsets = make(1000), make(129)

    def add_request(self, place, params) -> None:
        super().add_request(place, params)
        words = params.bad_words_token_ids or ()
        self.num_bad_words.np[place] = len(words)
        self.num_bad_words.copy()
        for index, word in enumerate(words):
            first = int(self.bad_word_offsets.gpu[place, index])
            self.bad_word_token_ids.gpu[place, first : first + len(word)] = torch.tensor(word)
            self.bad_word_offsets.gpu[place, index + 1] = first + len(word)

    def apply_bad_words(self, logits, rows, places, input_ids, local) -> None:
        for row, params, _, output in self.texts(rows, input_ids, local, first_draft=0):
            for *start, last in params.bad_words_token_ids or ():
                if output[len(output) - len(start) :] == start:
                    logits[row, last] = float("-inf")


@dataclass
class SamplerOutput:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: object
    num_nans: torch.Tensor | None
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor


def get_num_nans(logits: torch.Tensor) -> torch.Tensor:
    return logits.isnan().sum(1, dtype=torch.int32)


def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    is_chunk = seq_lens[: len(idx_mapping)] < prefill_len[idx_mapping.long()]
    num_sampled.masked_fill_(is_chunk, 0)
    return num_sampled, (cu_num_logits.diff() - num_sampled).masked_fill(is_chunk, 0).to(num_sampled.dtype)


def compute_topk_scores(logits, num_logprobs, tokens, mode) -> SimpleNamespace:
    ids = torch.cat([tokens[:, None], logits.topk(num_logprobs).indices], 1)
    scores = logits.float() if mode.endswith("logits") else logits.float().log_softmax(-1)
    return SimpleNamespace(logprob_token_ids=ids, logprobs=scores.gather(1, ids))


class Sampler:
    def __init__(
        self, max_num_reqs, vocab_size, device, req_states, logprobs_mode="raw_logprobs", num_speculative_tokens=1
    ):  # fmt: skip
        self.logprobs_mode, self.compute_nans, self.req_states = logprobs_mode, False, req_states
        self.num_speculative_tokens = num_speculative_tokens
        self.sampling_states = SamplingStates(max_num_reqs, vocab_size, device)
        self.logit_bias_state, self.penalties_state, self.bad_words_state = (
            kind(req_states) for kind in (LogitBiasState, PenaltiesState, BadWordsState)
        )

    def add_request(self, place, prompt_len, params) -> None:
        for state in (self.sampling_states, self.logit_bias_state, self.penalties_state, self.bad_words_state):
            state.add_request(place, params)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()

    def sample(
        self, logits, expanded_idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos, return_logprobs=False
    ):  # fmt: skip
        raise NotImplementedError("vLLM's own kernel")

    def __call__(self, logits, batch) -> SamplerOutput:
        places, num_nans = batch.idx_mapping_np, get_num_nans(logits) if self.compute_nans else None
        wants = self.sampling_states.max_num_logprobs(places) != -1
        tokens, processed = self.sample(
            logits, batch.expanded_idx_mapping, places, batch.positions[batch.logits_indices],
            batch.input_ids[batch.logits_indices], batch.expanded_local_pos, return_logprobs=wants,
        )  # fmt: skip
        of, most = processed if self.logprobs_mode[0] == "p" else logits, self.sampling_states.max_num_logprobs(places)
        logprobs = compute_topk_scores(of, most, tokens, self.logprobs_mode) if wants else None
        counts = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs), batch.seq_lens, batch.cu_num_logits, batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )  # fmt: skip
        return SamplerOutput(tokens.view(-1, 1), logprobs, num_nans, *counts)


class RejectionSampler:
    def __init__(self, sampler, spec_config, device):
        self.sampler, self.num_speculative_steps = sampler, spec_config.num_speculative_tokens
        is_synthetic = spec_config.rejection_sample_method == "synthetic"
        self.synthetic_conditional_rates = torch.ones(self.num_speculative_steps) if is_synthetic else None

    def _get_logprobs_tensors(self, batch, sampled, num_sampled, logits):
        most = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        if most == -1:
            return None
        tokens = torch.zeros(len(logits), dtype=sampled.dtype, device=sampled.device)
        for first, row, count in zip(batch.cu_num_logits.tolist(), sampled, num_sampled.tolist()):
            tokens[first : first + count] = row[:count]
        return compute_topk_scores(logits, most, tokens, self.sampler.logprobs_mode)

    def __call__(self, logits, input_batch, draft_logits=None):
        raise NotImplementedError("vLLM's own kernel")


# what is hooked


class DraftModelSpeculator:
    """Draws greedily from the full vocabulary."""

    def sample_draft(self, hidden_states, positions, idx_mapping, temperature, seeds, draft_step, draft_logits):
        return self.model.compute_logits(hidden_states).argmax(-1)


class StructuredOutputsWorker:
    def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
        return grammar_bitmask


class DraftTokensHandler:
    def set_draft_tokens(self, input_batch, draft_tokens):
        return draft_tokens


class Scheduler:
    def update_draft_token_ids(self, draft_token_ids):
        return draft_token_ids

    def update_draft_token_ids_in_output(self, draft_token_ids, scheduler_output):
        return scheduler_output


class StructuredOutputManager:
    def grammar_bitmask(self, requests, structured_output_request_ids, scheduled_spec_decode_tokens):
        return structured_output_request_ids


def init_speculator(vllm_config, device):
    return DraftModelSpeculator()


def warmup_kernels(model_runner, worker_execute_model, worker_sample_tokens):
    """Runs steps of requests that have all filters."""
    worker_execute_model("prompts")
    worker_sample_tokens(None)


class InputProcessor:
    """Refuses some parameters with drafts, and all of another kind."""

    def __init__(self, vllm_config):
        self.vllm_config, self.speculative_config = vllm_config, vllm_config.speculative_config

    def _validate_params(self, params, supported_tasks):
        if self.speculative_config is not None and (params.min_p or params.logit_bias):
            raise ValueError("not yet supported with speculative decoding")
        return self._tasks(supported_tasks)

    def _tasks(self, supported_tasks) -> str:
        return f"one of {supported_tasks}"


@dataclass
class EngineArgs:
    """Arguments, and the configuration that vLLM makes of them."""

    config: SimpleNamespace
    attention_backend: object = None
    attention_config: object = None
    speculative_config: dict | None = None
    additional_config: dict = field(default_factory=dict)
    max_num_seqs: int | None = None

    def create_engine_config(self):
        return self.config


class WorkerWrapperBase:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config

    def init_device(self):
        return "device"


def init_model_state(vllm_config, model, encoder_cache, device):
    return SimpleNamespace(custom_sampler=lambda sampler: None)


BACKENDS, GPU = "vllm.v1.attention.backends.", "vllm.v1.worker.gpu."
LATENT = "vllm.model_executor.layers.attention.mla_attention"
PLATFORM = {"vllm.platforms": {"current_platform": platform()}}
MODULES = PLATFORM | {
    "vllm.v1.attention.backend": {
        each.__name__: each for each in (AttentionType, AttentionCGSupport, CommonAttentionMetadata)
    },
    BACKENDS + "utils": {"split_decodes_and_prefills": split_decodes_and_prefills},
    BACKENDS + "triton_attn": {
        each.__name__: each for each in (TritonAttentionBackend, TritonAttentionMetadataBuilder, TritonAttentionImpl)
    },
    BACKENDS + "registry": {
        "AttentionBackendEnum": AttentionBackendEnum, "register_backend": OVERRIDES.__setitem__,
    },
    GPU + "input_batch": {"get_num_sampled_and_rejected": get_num_sampled_and_rejected},
    GPU + "metrics.logits": {"get_num_nans": get_num_nans},
    GPU + "sample.bad_words": {"BadWordsState": BadWordsState},
    GPU + "sample.logit_bias": {"LogitBiasState": LogitBiasState},
    GPU + "sample.penalties": {"PenaltiesState": PenaltiesState},
    GPU + "sample.output": {"SamplerOutput": SamplerOutput},
    GPU + "sample.sampler": {"Sampler": Sampler},
    GPU + "spec_decode.rejection_sampler": {"RejectionSampler": RejectionSampler},
    GPU + "spec_decode.autoregressive.speculator": {"AutoRegressiveSpeculator": AutoRegressiveSpeculator},
}  # fmt: skip
# With FlashAttention 3, for which the same stand-ins do.
HOPPER = MODULES | {
    "vllm.platforms": {"current_platform": platform(90)},
    BACKENDS + "fa_utils": {
        "is_flash_attn_varlen_func_available": lambda: True, "get_flash_attn_version": lambda: 3,
    },
    BACKENDS + "flash_attn": {
        "FlashAttentionBackend": FlashAttentionBackend,
        "FlashAttentionMetadataBuilder": TritonAttentionMetadataBuilder, "FlashAttentionImpl": TritonAttentionImpl,
    },
}  # fmt: skip


def hooked(modules: dict[str, dict] = MODULES, speculator: type = DraftModelSpeculator) -> dict[str, dict]:
    """Returns modules with new copies of what the plug-in hooks, beside all others."""
    copy = lambda kind: type(kind.__name__, (kind,), {})  # noqa: E731
    return modules | {
        "vllm.engine.arg_utils": {"EngineArgs": copy(EngineArgs)},
        "vllm.v1.worker.worker_base": {"WorkerWrapperBase": copy(WorkerWrapperBase)},
        "vllm.v1.worker.gpu_worker": {"warmup_kernels": warmup_kernels},
        "vllm.v1.engine.input_processor": {"InputProcessor": copy(InputProcessor)},
        "vllm.v1.core.sched.scheduler": {"Scheduler": copy(Scheduler)},
        "vllm.v1.structured_output": {"StructuredOutputManager": copy(StructuredOutputManager)},
        GPU + "model_runner": {"init_model_state": init_model_state, "init_speculator": init_speculator},
        GPU + "structured_outputs": {"StructuredOutputsWorker": copy(StructuredOutputsWorker)},
        GPU + "spec_decode.speculator": {"DraftModelSpeculator": copy(speculator)},
        GPU + "spec_decode.utils": {"DraftTokensHandler": copy(DraftTokensHandler)},
        **{name: {**values} for name, values in vllm_stub_latents.MODULES.items()},
        LATENT: vllm_stub_latents.MODULES[LATENT] | {"MLAAttention": copy(vllm_stub_latents.MLAAttention)},
    }


def installed(modules: dict[str, dict] = MODULES):
    """The stand-in under vLLM's names, and our modules imported on top of it."""
    return stand_in.installed(modules, *OURS)


def form(name: str):
    """Returns the module with the stand-in in the form of a release."""
    return importlib.import_module(f"{__package__}.{FORMS[name]}")


@contextlib.contextmanager
def vllm(name: str):
    """The real vLLM where EAGLE_KERNELS_VLLM_SITE names its folder, and the stand-in elsewhere, in a release's form."""
    if not SITE:
        with installed(form(name).MODULES):
            yield
        return
    if SITE not in sys.path:
        sys.path.append(SITE)
        sys.path_importer_cache.pop(SITE, None)
    _on_this_machine()
    try:
        yield
    finally:
        for name in OURS:
            sys.modules.pop(name, None)


@functools.cache
def _on_this_machine() -> None:
    """Lets vLLM's kernels run in Triton's interpreter, for which a driver must be active, without pinned memory."""
    if torch.cuda.is_available():
        return
    from triton.backends import backends

    for count, backend in enumerate(backends.values()):
        backend.driver.is_active = staticmethod(lambda count=count: count == 0)
    importlib.import_module("vllm.utils.torch_utils").PIN_MEMORY = False
    filters = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    in_torch = filters.apply_top_k_top_p_pytorch  # the kernel asks for the GPU's size
    filters.apply_top_k_top_p_triton = lambda logits, k, p, has_topp_only_rows=True: in_torch(logits, k, p)
    importlib.import_module("vllm.v1.worker.gpu.buffer_utils").UvaBufferPool = _Pool


class _Pool:
    """Buffers that the device reads from the host, as copies."""

    def __init__(self, size, dtype, max_concurrency=None):
        self.dtype = dtype

    def copy_to_uva(self, values):
        return torch.as_tensor(values, dtype=self.dtype).clone()

    def copy_to_gpu(self, values, out=None):
        values = torch.as_tensor(values)
        return values.clone() if out is None else out[: len(values)].copy_(values)
