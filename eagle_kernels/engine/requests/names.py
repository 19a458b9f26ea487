"""Maps the argument names of vLLM, SGLang, transformers and OpenAI to the engine's own, and refuses the others. A call
takes the names of others where they mean the same, and takes what says nothing where it says nothing. Anything else is
refused by name. Values are kept under the engine's own names alone."""

import functools
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any, NoReturn, TypeVar

from ...runtime.placement import DTYPE_NAMES
from ...runtime.validated import is_number
from ...runtime.values import as_tuples, is_word, scalar, shown, shown_name

Class = TypeVar("Class", bound=type)

# Names of one thing: whatever takes one of them takes all.
_SAME = (
    ("max_new_tokens", "max_tokens", "max_completion_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("eos_token_ids", "eos_token_id"),
    ("stop", "stop_strings", "stop_sequences"),
    ("top_logprobs", "top_logprobs_num", "top_n_tokens"),
    ("n", "num_return_sequences"),
    ("seeds", "seed", "sampling_seed"),
    ("progress", "use_tqdm"),
    ("sampling_params", "params"),
    ("input_ids", "prompts", "prompt", "inputs", "text", "token_ids", "prompt_token_ids"),
    ("topk", "speculative_eagle_topk"),
    ("num_steps", "speculative_num_steps"),
    ("num_drafts", "num_speculative_tokens"),
    ("num_draft_tokens", "speculative_num_draft_tokens"),
    ("max_batch", "max_num_seqs", "max_running_requests"),
    ("max_length", "max_model_len", "context_length"),
    ("page_size", "block_size"),
    ("share_prefixes", "enable_prefix_caching"),
    ("draft", "draft_model", "speculative_model", "speculative_draft_model_path", "assistant_model"),
    ("target", "target_model", "model", "model_path", "pretrained_model_name_or_path"),
    ("config", "speculative_config"),
    ("dtype", "torch_dtype"),
)
# Names that are taken where they say nothing: at None and at these values. Otherwise: what holds instead.
_SAYS_NOTHING = (
    ("num_beams num_beam_groups beam_width length_penalty", (1,), "there is no beam search"),
    ("use_beam_search early_stopping", (False,), "there is no beam search"),
    ("diversity_penalty", (0,), "there is no beam search"),
    ("n num_return_sequences best_of", (1,), "n of generate, stream and stream_text draws several samples"),
    ("return_dict_in_generate", (False,), "generate returns output_ids and stats"),
    ("output_scores output_logits return_logprob", (False,),
     "logprobs, top_logprobs and logprob_start_len ask for scores"),
    ("output_attentions output_hidden_states return_hidden_states", (False,),
     "generate returns tokens and their scores"),
    ("prompt_logprobs", (), "logprob_start_len=0 scores the prompt, and top_logprobs=N adds the N likeliest tokens"),
    ("token_ids_logprob logprob_token_ids", (), "top_logprobs=N has the N likeliest tokens"),
    ("skip_special_tokens", (True,), "output_ids hold special tokens, texts leave them out"),
    ("spaces_between_special_tokens detokenize", (True, False), "texts leave special tokens out"),
    ("clean_up_tokenization_spaces", (False,), "texts are exactly what the tokens decode to"),
    ("include_stop_str_in_output no_stop_trim", (False,), "output_ids hold the stop string, text leaves it out"),
    ("stream", (False,), "stream and stream_text of the engine yield tokens and text as they come"),
    ("streamer", (), "stream and stream_text of the engine yield tokens and text as they come"),
    ("use_cache", (True,), "keys and values are always kept"),
    ("cache_implementation cache_config max_cache_len low_memory skip_reading_prefix_cache", (False,),
     "keys and values are kept in the engine's own pools"),
    ("compile_config disable_compile continuous_batching_config", (), "warmup compiles what requests will need"),
    ("attention_mask pad_token_id padding_side", (), "prompts are lists of any lengths, without padding"),
    ("bos_token_id forced_bos_token_id forced_eos_token_id decoder_start_token_id", (),
     "a prompt is read as it is, and end tokens are eos_token_ids and stop_token_ids"),
    ("min_length", (0,), "min_new_tokens counts only new tokens"),
    ("generation_config", (), "its fields are separate arguments"),
    ("custom_generate stopping_criteria max_time", (), "stream can be left at any token, and submit has abort"),
    ("logits_processor logits_processors custom_logit_processor custom_params extra_args vllm_xargs", (),
     "only SamplingParams' fields are supported"),
    ("logit_bias bad_words bad_words_ids allowed_token_ids suppress_tokens begin_suppress_tokens sequence_bias",
     ((), [], {}), "tokens cannot be banned or favored"),
    ("exponential_decay_length_penalty guidance_scale watermarking_config token_healing dola_layers constraints "
     "force_words_ids thinking_token_budget repetition_detection", (), "only SamplingParams' fields are supported"),
    ("flat_logprobs skip_clone", (False,), "scores are lists, see Request"),
    ("output_text_buffer_length", (0,), "text that may begin a stop string is held back as it is"),
    ("no_repeat_ngram_size encoder_no_repeat_ngram_size", (0,),
     "there are repetition, frequency and presence penalties"),
    ("encoder_repetition_penalty", (1,), "there are repetition, frequency and presence penalties"),
    ("typical_p", (1,), "top_k, top_p and min_p filter; EAGLEConfig has verify_strategy='typical'"),
    ("epsilon_cutoff eta_cutoff top_h penalty_alpha", (0,), "top_k, top_p and min_p filter"),
    ("renormalize_logits remove_invalid_values", (False,), "log-probabilities are always normalized"),
    ("guided_decoding structured_outputs response_format json_schema regex ebnf structural_tag stop_regex", (),
     "there are no grammars; stop takes strings"),
    ("prompt_lookup_num_tokens num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
     "assistant_early_exit assistant_lookbehind assistant_ensemble_weight assistant_tokenizer target_lookbehind "
     "is_assistant speculation_type use_mtp draft_sample_method", (),
     "EAGLEConfig says how drafts are made; chain(N, method='ngram') drafts N per step"),
    ("prompt_lookup_max prompt_lookup_min max_matching_ngram_size", (),
     "max_ngram_size and min_ngram_size of EAGLEConfig are the longest and the shortest match"),
    ("details decoder_input_details return_full_text watermark", (False,), "generate returns new tokens"),
    ("lora_request lora_path lora_id priority truncate_prompt_tokens prompt_embeds input_embeds inputs_embeds "
     "image_data multi_modal_data", (), "a request is token ids and SamplingParams"),
    ("add_special_tokens", (), "pass the token ids of a tokenizer of your own"),
    ("output_kind stream_interval", (), "generate returns all tokens, stream each one"),
    # whole engines
    ("max_model_len context_length", (), "max_length of EAGLEConfig is the most tokens of a request"),
    ("tensor_parallel_size tp_size pipeline_parallel_size pp_size data_parallel_size dp_size ep_size "
     "expert_parallel_size draft_tensor_parallel_size decode_context_parallel_size nnodes", (1,),
     "an engine has one device"),
    ("device_map", (), "device names the one device of both models"),
    ("load_in_4bit load_in_8bit trust_remote_code", (False,),
     "weights are read as they are, and no remote code is run"),
    ("quantization quantization_config quantize torchao_config", (),
     "quantize of EAGLEConfig quantises weights at loading"),
    ("load_format", ("auto",), "weights are those of model folders"),
    ("revision code_revision download_dir cache_dir token", (), "models are folders on this machine"),
    ("gpu_memory_utilization mem_fraction_static", (), "kv_cache_bytes of EAGLEConfig sets the size of the pools"),
    ("swap_space cpu_offload_gb", (0,), "models and pools stay on their device"),
    ("enforce_eager disable_cuda_graph", (False,), "cuda_graph=False of EAGLEConfig turns CUDA graphs off"),
    ("disable_radix_cache", (False,), "share_prefixes=False of EAGLEConfig reads every prompt in full"),
    ("max_num_batched_tokens chunked_prefill_size max_prefill_tokens", (),
     "prefill_chunk of EAGLEConfig is the most prompt tokens read at a time"),
    ("enable_chunked_prefill", (True,), "prompts are read in chunks, see prefill_chunk of EAGLEConfig"),
    ("attention_backend attn_implementation sampling_backend moe_backend", ("auto",),
     "EAGLE_KERNELS_BACKEND names the backend of all ops"),
    ("speculative_algorithm speculative_algo", (),
     "method of EAGLEConfig is 'eagle', 'mtp', 'draft_model', 'ngram', ..."),
    ("num_speculative_tokens num_lookahead_tokens", (),
     "EAGLEConfig.chain(N) drafts N tokens, and from_speculative_config reads servers' fields"),
    ("speculative_accept_threshold_single speculative_accept_threshold_acc", (1,),
     "verify_strategy='typical' and 'topp' are the lossy rules"),
    ("speculative_token_map", (), "a head has its own vocabulary"),
    # what servers decide about drafts
    ("num_gpu_block_expand_ratio", (1.0,), "the server decides this"),
    ("enf_gen_phase_tag enable_draft_logprob", (False,), "the server decides this"),
    ("disable_by_batch_size speculative_disable_by_batch_size", (),
     "max_spec_batch of EAGLEConfig is the most requests with drafts"),
    ("disable_logprobs disable_mqa_scorer", (True, False), "logprobs of SamplingParams are those of the target"),
    ("disable_padded_drafter_batch parallel_drafting use_local_argmax_reduction use_heterogeneous_vocab", (False,),
     "the engine decides how it drafts"),
    ("draft_load_config", (), "weights are read as they are"),
    ("speculative_token_tree", (), "topk, num_steps and num_draft_tokens make the tree"),
    ("posterior_threshold posterior_alpha typical_acceptance_sampler_posterior_threshold "
     "typical_acceptance_sampler_posterior_alpha", (),
     "verify_strategy='typical' has typical_epsilon and typical_delta"),
    ("synthetic_acceptance_rate synthetic_acceptance_rates", (), "simulated_accept_length and _rates of EAGLEConfig"),
)  # fmt: skip
_NAMED = {name: names for names in _SAME for name in names}
_NOTHING = {name: (words, instead) for names, words, instead in _SAYS_NOTHING for name in names.split()}
# whose names are known: a class or a call, and its own names
_OWNERS: dict[str, frozenset[str]] = {}
# those whose names are fields
_RECORDS = {"speculative_config"}


class UnknownName(TypeError, ValueError):
    """Raised for an unknown argument or field: a TypeError, as in Python, and a ValueError, as here."""


def read_names(
    owner: str, given: Mapping[str, Any], own: Collection[str], *, where: str = "", placed: Mapping[str, Any] = {},
    is_copy: bool = False, takes_rest: bool = False, required: Collection[str] = (), temperature: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Returns what was given by the owner's own names; raises ValueError for a name that says what cannot be.
    owner, where  what errors name, and what they say after an unknown name
    placed        arguments that were given by position
    is_copy       whether the own names come from a copy, as with `dataclasses.replace`: other names then change it
    takes_rest    whether names that the owner does not know stay as they are, for others to read
    required      the names for which None is an answer; for the others it says nothing
    temperature   that of the owner, where none is given"""
    read = {name: value for name, value in given.items() if name in own}
    known = dict(placed) if is_copy else {**placed, **read}
    for name, value in given.items():
        if name in own:
            continue
        value = scalar(value)
        ours = own_name(name, own)
        if ours is not None:
            if ours in known and not agree(known[ours], value):
                says_nothing = ours not in required
                if value is None and says_nothing:
                    continue
                if known[ours] is not None or ours in placed or not says_nothing:
                    rule = f"agree with {ours} = {shown(known[ours])}, since both mean the same"
                    raise ValueError(f"{owner}: {name} must {rule}, got {shown(value)}")
            known[ours] = value
            if ours not in placed:
                read[ours] = value
        elif takes_rest:
            read[name] = value
        elif name == "do_sample" and "temperature" in own:
            _check_do_sample(owner, value, scalar(given.get("temperature", temperature)))
        elif name in _NOTHING:
            words, instead = _NOTHING[name]
            if not any(is_word(value, word) for word in (None, *words)):
                rule = " or ".join(repr(word) for word in words if word not in ((), [], {})) or "None"
                raise ValueError(f"{owner}: {name} must be {rule} or absent, since {instead}, got {shown(value)}")
        else:
            _fail_unknown(owner, str(name), own, where)
    return read


def takes_other_names(cls: Class) -> Class:
    """Lets a dataclass, or the methods of a class, be called by the names of others as well."""
    is_record = is_dataclass(cls)
    if is_record:
        _RECORDS.add(cls.__name__)
    for name, kept in list(vars(cls).items()):
        of_class, makes = isinstance(kept, classmethod), name == "__init__"
        function = kept.__func__ if of_class else kept
        if not inspect.isfunction(function) or not makes and (name[0] == "_" or is_record and not of_class):
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        order = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        if is_record and makes or not _NAMED.keys().isdisjoint(order):
            owner = f"{cls.__name__}.{name}" if of_class else cls.__name__ if makes else name
            reading = _reading(function, owner, parameters, order, is_record=is_record and makes)
            setattr(cls, name, classmethod(reading) if of_class else reading)
    return cls


def _reading(
    function: Any, owner: str, parameters: list[inspect.Parameter], order: list[str], *, is_record: bool
) -> Any:
    """Returns a function that is called with its own names, whichever it was called with."""
    own = _OWNERS[owner] = frozenset(order)
    takes_rest = any(each.kind == each.VAR_KEYWORD for each in parameters)
    required = {each.name for each in parameters if each.default is each.empty}

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        if not given.keys() <= own:
            placed, is_copy = dict(zip(order, args[1:])), is_record and own <= given.keys()
            given = read_names(
                owner, given, own, placed=placed, is_copy=is_copy, takes_rest=takes_rest, required=required
            )
        return function(*args, **given)

    return call


def own_name(name: str, own: Collection[str]) -> str | None:
    """Returns what the owner calls a thing of this name, if it has it."""
    return next((ours for ours in _NAMED.get(name, (name,)) if ours in own), None)


def suggest(name: str, own: Collection[str]) -> str | None:
    """Returns which of the owner's names a name that it has not may stand for."""
    words = {other: ours for ours in own for other in _NAMED.get(ours, (ours,))}
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    close = get_close_matches(snake, words, 1, 0.7)
    return words[close[0]] if close else None


def agree(one: Any, other: Any) -> bool:
    """Returns whether two values mean the same, whatever types they came in, as far as one can tell."""
    if one is other:
        return True
    one, other = _form(one), _form(other)
    try:
        return _kinds(one) == _kinds(other) and bool(one == other)
    except Exception:  # tensors without values, and what else compares in ways of its own
        return False


def _form(value: Any) -> Any:
    """Returns one form of values that mean the same: of scalars and sequences, paths, and names of dtypes."""
    value = as_tuples(scalar(value))
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str):
        value = DTYPE_NAMES.get(value.removeprefix("torch."), value.rstrip("/") or value)
    return value if isinstance(value, tuple) else (value,)


def _kinds(value: Any) -> Any:
    """Returns the types of a value and of those inside: 1 and True are equal, and do not mean the same."""
    return tuple(map(_kinds, value)) if isinstance(value, tuple) else type(value)


def _check_do_sample(owner: str, wanted: Any, temperature: Any) -> None:
    """Checks the flag against the temperature, which alone decides."""
    if wanted is None or not is_number(temperature):
        return
    if not isinstance(wanted, bool):
        raise ValueError(f"{owner}: do_sample must be True or False, got {shown(wanted)}")
    if wanted != (temperature > 0):
        effect = "samples; temperature=0 decodes greedily" if temperature > 0 else "decodes greedily; 1.0 samples"
        raise ValueError(f"{owner}: do_sample must agree with temperature={temperature}, which {effect}, got {wanted}")


def _fail_unknown(owner: str, name: str, own: Collection[str], where: str) -> NoReturn:
    """Says what might have been meant, or where there is such a name."""
    kind = "field" if where or owner.partition(".")[0] in _RECORDS else "argument"
    told = f"{owner}: there is no {kind} {shown_name(name)}{where}"
    homes = {home: theirs for home, names in _OWNERS.items() if home != owner and (theirs := own_name(name, names))}
    records = [home for home in homes if home in _RECORDS]
    if homes:
        *others, last = records or [*homes][:1]
        has = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        raise UnknownName(f"{told}; {has} {homes[last]}")
    meant = suggest(name, {*own, *_OWNERS.get(owner, ())})
    if meant is not None:
        raise UnknownName(f"{told}; did you mean {meant}?")
    raise UnknownName(told if where else f"{told}; there are {', '.join(sorted(own))}")
