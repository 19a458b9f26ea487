"""`EAGLEConfig.from_speculative_config`: servers' fields are read, and what cannot be honoured is refused by name."""

import re

import numpy
import pytest
import torch

from eagle_kernels import EAGLEConfig
from eagle_kernels.engine.config.speculative_config import FIELDS
from op_tests.engine.hostile import refused

MIXED = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}
READ = [
    ({"method": "ngram", "num_speculative_tokens": 5, "max_ngram_size": 4, "min_ngram_size": 1},
     EAGLEConfig.chain(5, method="ngram", max_ngram_size=4, min_ngram_size=1)),
    ({"method": "ngram_match"}, EAGLEConfig.chain(1, method="ngram")),
    ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 7, "prompt_lookup_min": 3},
     EAGLEConfig.chain(3, method="ngram", max_ngram_size=7, min_ngram_size=3)),
    ({"method": "ngram", "prompt_lookup_max": 1},
     EAGLEConfig.chain(1, method="ngram", max_ngram_size=1, min_ngram_size=1)),
    ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": None},
     EAGLEConfig.chain(1, method="ngram", max_ngram_size=4, min_ngram_size=4)),
    ({"method": "ngram", "prompt_lookup_max": 4, "min_ngram_size": 3},
     EAGLEConfig.chain(1, method="ngram", max_ngram_size=4, min_ngram_size=3)),
    (  # a whole dump of FastDeploy's, with what other methods would read
        {"method": "mtp", "num_speculative_tokens": 1, "max_ngram_size": 5, "min_ngram_size": 2, "verify_window": 2,
         "max_candidate_len": 5, "suffix_decoding_max_tree_depth": 64, "num_model_steps": 1},
        EAGLEConfig.chain(1, method="mtp"),
    ),
    ({"method": "ngram", "topk": 4, "num_steps": 6, "num_draft_tokens": 16},
     EAGLEConfig(method="ngram", topk=4, num_steps=6, num_draft_tokens=16)),
    ({"method": "mtp", "num_model_steps": 3}, EAGLEConfig.chain(3, method="mtp")),
    ({"method": "mtp", "topk": 1, "num_model_steps": 3}, EAGLEConfig(method="mtp", topk=1, num_steps=3)),
    ({"method": "mtp", "num_draft_tokens": 3, "topk": 1, "num_steps": 2, "num_model_steps": 2},
     EAGLEConfig(method="mtp", topk=1, num_steps=2, num_draft_tokens=3)),
    ({"method": "hybrid", "topk": 2, "num_steps": 6, "num_draft_tokens": 12, "num_model_steps": 2},
     EAGLEConfig(method="hybrid", topk=2, num_steps=6, num_draft_tokens=12, num_model_steps=2)),
    ({"method": "ngram", "topk": 2, "num_model_steps": 1}, EAGLEConfig(method="ngram", topk=2)),
    ({"method": "mtp", "num_speculative_tokens": 2, "num_model_steps": 2}, EAGLEConfig.chain(2, method="mtp")),
    ({"method": "eagle3", "num_speculative_tokens": 4}, EAGLEConfig.chain(4, method="eagle")),
    ({"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 5, "num_model_steps": 2},
     EAGLEConfig.chain(5, method="hybrid", num_model_steps=2)),
    ({"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_tree_depth": 32,
      "suffix_decoding_max_cached_requests": 100, "suffix_decoding_max_spec_factor": 2.0,
      "suffix_decoding_min_token_prob": 0.2},
     EAGLEConfig.chain(8, method="suffix", suffix_decoding_max_tree_depth=32, suffix_decoding_max_cached_requests=100,
                       suffix_decoding_max_spec_factor=2.0, suffix_decoding_min_token_prob=0.2)),
    (  # vLLM's, of which most says nothing
        {"method": "eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1, "max_model_len": None,
         "revision": None, "enforce_eager": False, "disable_by_batch_size": None, "parallel_drafting": False},
        EAGLEConfig.chain(3, method="eagle"),
    ),
    ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, EAGLEConfig.chain(2, method="mtp")),
    ({"method": "eagle", "speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 6},
     EAGLEConfig(2, 3, 6, method="eagle")),
    ({"method": "naive"}, EAGLEConfig(method="naive")),
    ({"method": "naive", "num_speculative_tokens": 3}, EAGLEConfig(method="naive")),
    ({"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 2}, EAGLEConfig.chain(2, method="mtp")),
    ({"method": "mtp", "suffix_decoding_min_token_prob": 0.2},
     EAGLEConfig.chain(1, method="suffix", suffix_decoding_min_token_prob=0.2)),
    ({"method": "eagle", "num_speculative_tokens": 2, "verify_strategy": "topp", "max_candidate_len": 4,
      "verify_window": 1},
     EAGLEConfig.chain(2, method="eagle", verify_strategy="topp", max_candidate_len=4, verify_window=1)),
    ({"method": "eagle", "num_speculative_tokens": 2, "rejection_sample_method": "standard"},
     EAGLEConfig.chain(2, method="eagle", verify_strategy="rejection")),
    ({"method": "eagle", "benchmark_mode": True, "accept_policy": "reject_all"},
     EAGLEConfig.chain(1, method="eagle", accept_policy="reject_all")),
    ({"method": "ngram", "num_speculative_tokens": 2, "ngram_prefer": "earliest"},
     EAGLEConfig.chain(2, method="ngram", ngram_prefer="earliest")),
    ({"method": "ngram", "verify_strategy": "typical", "typical_epsilon": 0.2, "typical_delta": 0.3},
     EAGLEConfig.chain(1, method="ngram", verify_strategy="typical", typical_epsilon=0.2, typical_delta=0.3)),
    ({"method": "ngram", "quantization": None, "num_gpu_block_expand_ratio": 1.0, "enf_gen_phase_tag": False,
      "enable_draft_logprob": False, "model": None, "benchmark_mode": False},
     EAGLEConfig.chain(1, method="ngram")),
    ({"method": "mtp", "quantization": "WINT4"}, EAGLEConfig.chain(1, method="mtp", draft_quantize="WINT4")),
    ({"method": "mtp", "quantization": MIXED | {"kv_cache_quant_type": None, "is_quantized": False}},
     EAGLEConfig.chain(1, method="mtp", draft_quantize={"dense": "wint8", "experts": "wint4"})),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "config"), READ)
def test_fields_of_servers(fields, config):
    assert EAGLEConfig.from_speculative_config(fields) == config


def test_every_field_is_read():
    assert {name for fields, _ in READ for name in fields} >= FIELDS


def test_other_fields_come_beside():
    config = EAGLEConfig.from_speculative_config({"method": "ngram"}, page_size=64, eos_token_ids=(2,))
    assert (config.page_size, config.eos_token_ids, config.method) == (64, (2,), "ngram")


REFUSED = [
    ([], "must be a mapping of fields, got []"),
    ({}, "method must be given, got None"),
    ({"method": "ngram", "k": 3}, "there is no field k; there are accept_policy, "),
    ({"method": "ngram", 3: 3}, "there is no field 3; there are "),
    ({"method": ["ngram"]}, "speculative_config: method must be the name of a method, got ['ngram']"),
    ({"method": "ngram", "rejection_sample_method": [1]}, "rejection_sample_method must be 'standard', without"),
    ({"method": "magic"}, "EAGLEConfig: method must be None, one of ['eagle', "),
    ({"method": "mtp", "model": "a"},
     "model must be absent here: EAGLEInference.from_pretrained(None, target, fields) "),
    ({"method": "ngram", "quantization": "fp8"}, "quantization must be None or absent for method='ngram', which "),
    ({"method": "mtp", "quantization": "w3"}, "EAGLEConfig: draft_quantize must be None, one of wint4, "),
    ({"method": "mtp", "quantization": MIXED | {"moe_quant_type": "w4a8"}}, "EAGLEConfig: draft_quantize must be "),
    ({"method": "mtp", "quantization": MIXED | {"moe_quant_type": None}},
     "quantization must be a name, or have dense_quant_type and moe_quant_type beside 'mix_quant' alone, got "),
    ({"method": "mtp", "quantization": MIXED | {"quantization": "wint4"}}, "beside 'mix_quant' alone"),
    ({"method": "mtp", "quantization": MIXED | {"is_channel_wise": True}}, "beside 'mix_quant' alone"),
    ({"method": "mtp", "quantization": MIXED | {"kv_cache_quant_type": "float8_e4m3"}},
     "quantization must have no kv_cache_quant_type: the draft's keys and values keep its dtype, "),
    ({"method": "ngram", "num_gpu_block_expand_ratio": 2.0}, "num_gpu_block_expand_ratio must be 1.0 or absent"),
    ({"method": "ngram", "enf_gen_phase_tag": True}, "enf_gen_phase_tag must be False or absent"),
    ({"method": "ngram", "mtp_strategy": "with_ngram"}, "mtp_strategy must be 'default' for method='ngram'"),
    ({"method": "mtp", "mtp_strategy": "always"}, "mtp_strategy must be 'default' or 'with_ngram', got 'always'"),
    ({"method": "hybrid", "mtp_strategy": "default"}, "mtp_strategy must be 'with_ngram' for method='hybrid'"),
    ({"method": "naive", "num_speculative_tokens": -1}, "num_speculative_tokens must be an int of at least 0, got -1"),
    ({"method": "naive", "num_speculative_tokens": "1"}, "num_speculative_tokens must be an int of at least 0, got"),
    ({"method": "eagle", "suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth must be 64 or absent"),
    ({"method": "mtp", "mtp_strategy": "with_ngram", "num_speculative_tokens": 2, "suffix_decoding_max_tree_depth": 8},
     "suffix_decoding_max_tree_depth must be 64 or absent for method='hybrid'"),
    *(({"method": method, "num_speculative_tokens": 1, "num_model_steps": 2} | fields,
       "num_speculative_tokens must be at least num_model_steps = 2, got 1")
      for method, fields in (("mtp", {}), ("eagle3", {}), ("draft_model", {}), ("hybrid", {}),
                             ("mtp", {"mtp_strategy": "with_ngram"}))),
    ({"method": "ngram", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1 or absent, since an "),
    ({"method": "ngram", "num_speculativ_tokens": 2}, "num_speculativ_tokens; did you mean num_speculative_tokens?"),
    ({"method": "ngram", "page_size": 16},
     "speculative_config: there is no field page_size; EAGLEConfig has page_size"),
    ({"method": "ngram", "target": "a"},
     "speculative_config: there is no field target; EAGLEInference has target_model"),
    ({"method": "eagle", "speculative_eagle_topk": 2, "topk": 3}, "speculative_eagle_topk must agree with topk = 3, "),
    ({"method": "eagle", "max_model_len": 64}, "max_model_len must be None or absent, since max_length of EAGLEConfig"),
    ({"method": "naive", "topk": "abc"}, "topk must be 1 or absent for method='naive', which has no drafts, got 'abc'"),
    ({"method": "ngram", "num_model_steps": 3},
     "num_model_steps must be 1 or absent for method='ngram', which has no model"),
    ({"method": "ngram", "topk": 2, "num_model_steps": 5},
     "num_model_steps must be 1 or absent for method='ngram', which has no model, got 5"),
    ({"method": "mtp", "topk": 1, "num_steps": "2", "num_model_steps": 2}, "num_steps must be an int, got '2'"),
    ({"method": "suffix", "topk": 2, "num_model_steps": 0}, "num_model_steps must be an int of at least 1, got 0"),
    ({"method": "mtp", "topk": 1, "num_steps": 2, "num_model_steps": 3},
     "num_model_steps must be num_steps = 2 or absent unless n-grams follow, got 3"),
    ({"method": "ngram", "benchmark_mode": "false"}, "benchmark_mode must be true or false, got 'false'"),
    ({"method": "suffix", "suffix_decoding_max_spec_factor": float("inf")},
     "suffix_decoding_max_spec_factor must be a finite number, got inf"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an int of at least 1, got 0"),
    ({"method": "ngram", "num_speculative_tokens": "5"}, "num_speculative_tokens must be an int of at least 1"),
    ({"method": "ngram", "num_speculative_tokens": 3, "topk": 2},
     "num_speculative_tokens must be absent where topk is given"),
    ({"method": "ngram", "max_ngram_size": 4, "prompt_lookup_max": 5},
     "prompt_lookup_max must agree with max_ngram_size = 4, since both mean the same, got 5"),
    ({"method": "eagle", "max_ngram_size": 3},
     "max_ngram_size must be 5 or absent for method='eagle', which does not read"),
    ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max must be 5 or absent for method='suffix'"),
    ({"method": "ngram", "suffix_decoding_max_tree_depth": 8}, "suffix_decoding_max_tree_depth must be 64 or absent"),
    ({"method": "ngram", "verify_window": 1}, "verify_window must be 2 or absent for verify_strategy='target_match'"),
    ({"method": "ngram", "typical_delta": 0.5},
     "typical_delta must be 0.3 or absent for verify_strategy='target_match'"),
    ({"method": "hybrid", "num_speculative_tokens": 1},
     "num_speculative_tokens must exceed num_model_steps = 1 where n-grams follow the model's drafts, got 1"),
    ({"method": "mtp", "mtp_strategy": "with_ngram"}, "num_speculative_tokens must exceed num_model_steps = 1"),
    ({"method": "ngram", "min_ngram_size": 6}, "EAGLEConfig: min_ngram_size must be at most max_ngram_size = 5"),
    ({"method": "eagle", "rejection_sample_method": "fly"},
     "rejection_sample_method must be 'standard', without another verify_strategy, got 'fly'"),
    ({"method": "eagle", "rejection_sample_method": "standard", "verify_strategy": "greedy"},
     "rejection_sample_method must be 'standard'"),
    ({"method": "eagle", "benchmark_mode": True, "accept_policy": "accept_all"},
     "benchmark_mode must come with no accept_policy but 'reject_all', which it means, got 'accept_all'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EAGLEConfig.from_speculative_config(fields)


JOINED = [
    ({"method": "ngram"}, {"topk": 4}, EAGLEConfig(4, method="ngram")),
    ({"method": "ngram"}, {"speculative_eagle_topk": 4, "block_size": 8}, EAGLEConfig(4, method="ngram", page_size=8)),
    ({"method": "ngram"}, {"num_speculative_tokens": 4}, EAGLEConfig.chain(4, method="ngram")),
    ({"method": "eagle3", "num_speculative_tokens": 3}, {"method": "eagle", "topk": 1, "num_steps": 3},
     EAGLEConfig.chain(3, method="eagle")),
    ({"method": "ngram", "num_speculative_tokens": 3}, {"topk": 4}, "num_speculative_tokens must be absent where topk"),
    ({"method": "ngram", "topk": 4}, {"speculative_eagle_topk": 5}, "topk must be 4 or absent beside fields that say"),
    ({"method": "ngram"}, {"method": "suffix"},
     "method must be 'ngram' or absent beside fields that say so, got 'suff"),
    ({"method": "ngram", "verify_strategy": "greedy"}, {"verify_strategy": "topp"}, "verify_strategy must be 'greedy'"),
    ({"method": "ngram", "rejection_sample_method": "standard"}, {"verify_strategy": "topp"}, "without another verify"),
    ({"method": "ngram", "benchmark_mode": True}, {"accept_policy": "normal"},
     "benchmark_mode must come with no accep"),
    ({"method": "ngram", "prompt_lookup_max": 4}, {"max_ngram_size": 5},
     "prompt_lookup_max must agree with max_ngram_"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "others", "wanted"), JOINED)
def test_further_fields_contradict_none(fields, others, wanted):
    if isinstance(wanted, str):
        assert wanted in refused(EAGLEConfig.from_speculative_config, fields, **others)
    else:
        assert EAGLEConfig.from_speculative_config(fields, **others) == wanted


@pytest.mark.parametrize(
    "value",
    [numpy.array(["a", "b"]), torch.zeros(3), torch.zeros(9, 9), 10**5000],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", sorted(FIELDS - {"method", "model"}))
def test_values_of_any_type_are_refused_by_name(name, value):
    for method in ("mtp", "ngram"):
        told = refused(EAGLEConfig.from_speculative_config, {"method": method, name: value})
        assert "must" in told and "got" in told
