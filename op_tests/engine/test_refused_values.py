"""Values that no configuration and no request can have: one clear line for each, by the name of the field."""

import pytest

from eagle_kernels import EAGLEConfig, SamplingParams

NAN, INFINITY = float("nan"), float("inf")
SIMULATE = {"accept_policy": "simulate"}
TREE = {"topk": 3, "num_steps": 3, "num_draft_tokens": 12}
CONFIGS = [
    ({"topk": 0}, r"topk must lie in 1..16, got 0"),
    ({"topk": 17}, r"topk must lie in 1..16, got 17"),
    ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
    ({"topk": 2.5}, "topk must be an int, got 2.5"),
    ({"topk": "8"}, "topk must be an int, got '8'"),
    ({"topk": True}, "topk must be an int, got True"),
    ({"num_steps": 2.0}, "num_steps must be an int, got 2.0"),
    ({"num_draft_tokens": 4.0}, "num_draft_tokens must be an int or None, got 4.0"),
    ({"temperature": "1"}, "temperature must be a finite int or float, got '1'"),
    ({"temperature": None}, "temperature must be a finite int or float, got None"),
    ({"top_k": 1.0}, r"top_k must be an int of at least 0 \(0: off\), below 2\^31, got 1.0"),
    ({"top_p": "0.9"}, "top_p must be a finite int or float, got '0.9'"),
    ({"min_p": True}, "min_p must be a finite int or float, got True"),
    ({"eos_token_ids": ["a"]}, r"eos_token_ids must be None or a tuple of token ids, got \('a',\)"),
    ({"max_length": "64"}, "max_length must be an int or None, got '64'"),
    ({"page_size": 16.0}, "page_size must be an int, got 16.0"),
    ({"topk": 2, "num_steps": 3, "num_draft_tokens": 12},
     r"num_draft_tokens must lie in 2..min\(256, 1 \+ topk \+ \(num_steps - 1\) \* topk\^2\) = 11 for topk=2, "
     r"num_steps=3 \(the root counts\), got 12"),
    ({"num_draft_tokens": 1}, "num_draft_tokens must lie in 2"),
    ({"num_draft_tokens": 257}, "num_draft_tokens must lie in .* = 256 for topk=8"),
    ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
    ({"top_k": -2}, r"top_k must be an int of at least 0 \(0: off\), below 2\^31, got -2"),
    ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
    ({"min_p": 1.5}, "min_p must lie in 0..1"),
    ({"page_size": 24}, "page_size must be a power of two up to 256, got 24"),
    ({"max_length": 1}, "max_length must be at least 2"),
    ({"accept_policy": "all"}, r"accept_policy must be one of \['normal', 'accept_all', .*, got 'all'"),
    ({"accept_policy": "accept_all", "simulated_accept_length": 2.0},
     "simulated_accept_length must come with accept_policy='simulate', got 2.0"),
    ({"accept_policy": "simulate"}, "accept_policy must come with one of simulated_accept_length, .*_rates"),
    (SIMULATE | {"simulated_accept_length": 2, "simulated_accept_rates": [1] * 5}, "accept_policy must come with"),
    (SIMULATE | {"simulated_accept_length": 0.5},
     r"simulated_accept_length must lie in 1..min\(num_steps \+ 1, num_draft_tokens\) = 6 \(bonus token"),
    (SIMULATE | {"simulated_accept_length": 6.5}, "simulated_accept_length must lie in"),
    (SIMULATE | {"simulated_accept_length": NAN},
     "simulated_accept_length must be a finite number, got nan"),
    (SIMULATE | {"simulated_accept_length": "2"}, "simulated_accept_length must be a number, got '2'"),
    (SIMULATE | {"simulated_accept_rates": (0.5, 0.4)},
     "simulated_accept_rates must be num_steps = 5 numbers in 0..1"),
    (SIMULATE | {"simulated_accept_rates": (0.5, 0.6, 0, 0, 0)}, ".* none above the one before it, got"),
    (SIMULATE | {"simulated_accept_rates": (0.5, NAN, 0, 0, 0)}, "simulated_accept_rates must be"),
    (SIMULATE | {"simulated_accept_rates": (1, 1, 1, 1, -0.1)}, "simulated_accept_rates must be"),
    ({"num_draft_tokens": 4, "simulated_accept_length": 4.5}, r".* lie in 1..min\(.*\) = 4 \(bonus.* got 4.5"),
    ({"num_draft_tokens": 4, "simulated_accept_rates": (1, 1, 1, 0.1, 0)},
     r"simulated_accept_rates must be 0 beyond the num_draft_tokens - 1 = 3 drafts of a step, got \(1, 1, 1, 0"),
    *(({"num_model_steps": 5, "adaptive": adaptive}, "num_model_steps must be None with adaptive, .* got 5")
      for adaptive in ("auto", ((8, (8, 5, 64)), (32, (1, 3, 4))))),
    ({"num_model_steps": 4}, "num_model_steps must be None or num_steps = 5 unless method='hybrid'"),
    *(({"num_model_steps": 5, "method": method}, "num_model_steps must be None for method=.*, which has no model")
      for method in ("ngram", "suffix", "naive", ("ngram", "naive"))),
    ({"tree_mask_mode": "dense"}, "tree_mask_mode must be one of"),
    ({"temperature": 1e300}, r"temperature must be a finite int or float, got 1e\+300"),
    ({"temperature": 10**400}, "temperature must be a finite int or float, got 10*[.]{3}$"),
    ({"top_k": 2**31}, "top_k must be an int of at least 0 .*, got 2147483648"),
    ({"max_step_ms": 10**400}, "max_step_ms must be a finite number, got 10*[.]{3}$"),
    ({"tree_mask_mode": "qlen_only_bitpacking", "num_draft_tokens": 33}, ".* at most 32 for qlen_only_bitpacking"),
    # methods, and several of them
    ({"method": ("ngram",)}, "method must be a tuple of two or more different methods of"),
    ({"method": ("ngram", "magic")}, "method must be a tuple of two or more different methods of"),
    ({"method": ("eagle", "draft_model")}, "method must hold at most one of eagle, mtp, medusa, hydra, dflash and"),
    ({"method": ("eagle", "ngram"), "verify_strategy": "rejection"},
     "verify_strategy must not be 'rejection' with sev"),
    ({"method": ("eagle", "ngram"), "tree_mask_mode": "full_mask"},
     "tree_mask_mode must not be 'full_mask' with sever"),
    ({"method": ("eagle", "ngram"), "topk": 2, "num_steps": 3, "num_draft_tokens": 9},
     "num_draft_tokens must lie in 2"),
    ({"method": "magic"}, "method must be None, one of"),
    ({"method": "ngram", "min_ngram_size": 6}, "min_ngram_size must be at most max_ngram_size = 5, got 6"),
    ({"method": "ngram", "max_ngram_size": 33}, "max_ngram_size must lie in 1..32, got 33"),
    ({"method": "ngram", "ngram_prefer": "best"}, "ngram_prefer must be one of"),
    ({"method": "ngram", "topk": 2, "num_steps": 3, "num_draft_tokens": 8},
     r"num_draft_tokens must lie in 2..min\(256, 1 \+ topk \* num_steps\) = 7 for topk=2, num_steps=3"),
    ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth must lie in 2..65536"),
    ({"method": "suffix", "suffix_decoding_max_cached_requests": -2}, ".*max_cached_requests must be at least -1"),
    ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ".*min_token_prob must lie in 0..1, got 1.5"),
    ({"method": "suffix", "suffix_decoding_max_spec_factor": -1.0}, ".*max_spec_factor must be at least 0, got -1.0"),
    ({"method": "hybrid"}, "num_model_steps must be an int below num_steps = 5 for method='hybrid', got None"),
    ({"method": "hybrid", "num_model_steps": 5}, "num_model_steps must be an int below"),
    ({"method": "hybrid", "num_model_steps": 2, "num_draft_tokens": 17},
     r"num_draft_tokens must exceed the 1 \+ topk \* num_model_steps = 17 nodes of the model's tree, got 17"),
    ({"method": "hybrid", "num_model_steps": 1, "verify_strategy": "rejection"}, "verify_strategy must not be 'reject"),
    # trees that share rows
    (TREE | {"mean_draft_tokens": 13}, "mean_draft_tokens must be at most the 12 nodes of a tree, got 13"),
    (TREE | {"mean_draft_tokens": 0}, "mean_draft_tokens must be"),
    (TREE | {"mean_draft_tokens": 3, "num_draft_tokens": 9, "method": "ngram"},
     "mean_draft_tokens must be None with method='ngram'"),
    (TREE | {"mean_draft_tokens": 3, "num_draft_tokens": 9, "method": "hybrid"},
     "mean_draft_tokens must be None with method='hybrid'"),
    (TREE | {"mean_draft_tokens": 3, "num_draft_tokens": 9, "verify_strategy": "rejection"},
     "mean_draft_tokens must be None with verify_"),
    (TREE | {"mean_draft_tokens": 3, "tree_mask_mode": "qlen_only"}, "tree_mask_mode must be 'packed' with mean_draft"),
    # tables of trees
    ({"adaptive": "fast"}, "adaptive must be None, 'auto' or"),
    ({"adaptive": ()}, "adaptive must be None"),
    ({"adaptive": ((8, (1, 2)),)}, "adaptive must be None"),
    ({"adaptive": ((8, (1, 3, 4)), (8, None))}, "adaptive must be None"),
    ({"adaptive": ((8, (0, 3, 4)),)}, "topk must lie in 1..16, got 0"),
    ({"adaptive": ((8, None),), "max_spec_batch": 4}, "max_spec_batch must be None when adaptive is a table"),
    ({"max_spec_batch": -1}, "max_spec_batch"),
    # what steps may take, share and hold
    *(({"max_step_ms": value}, "max_step_ms must be") for value in (0, -1.0, NAN, INFINITY, "10")),
    ({"max_step_ms": 10.0, "deterministic": True}, "max_step_ms must be None with deterministic=True"),
    ({"share_prefixes": 1}, "share_prefixes must be True or False, got 1"),
    ({"cuda_graph": True, "tree_mask_mode": "full_mask"}, "cuda_graph must not be True with tree_mask_mode='full_mask"),
    ({"deterministic": 1}, "deterministic must be True or False, got 1"),
    *(({"deterministic": True, "verify_strategy": name}, f"deterministic must be False with verify_strategy='{name}'")
      for name in ("rejection", "typical", "topp")),
]  # fmt: skip
PARAMS = [
    ({"temperature": -1}, "temperature must be at least 0, got -1"),
    ({"top_k": 2**31}, r"top_k must be an int of at least 0 \(0: off\), below 2\^31"),
    ({"presence_penalty": 1e39}, "presence_penalty must be a finite int or float"),
    ({"temperature": NAN}, "temperature must be a finite int or float, got nan"),
    ({"top_k": 1.5}, r"top_k must be an int of at least 0 \(0: off\), below 2\^31, got 1.5"),
    ({"top_p": 0}, r"top_p must lie in \(0, 1\]"),
    ({"min_p": 2}, "min_p must lie in 0..1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
    ({"seed": 2**63}, "seed must be None or an int of 64 bits"),
    ({"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
    ({"stop": b"abc"}, "stop must be a tuple of strings that are not empty, got b'abc'"),
    ({"stop": ("",)}, "stop must be a tuple"),
    ({"stop_token_ids": ("a",)}, "stop_token_ids must be a tuple of token ids"),
    ({"logprobs": 1}, "logprobs must be True, False or 'raw'; top_logprobs=N adds the N likeliest tokens, got 1"),
    ({"logprobs": "all"}, "logprobs must be True, False or 'raw'.*, got 'all'"),
    ({"drafter": 3}, "drafter must be None or a method's name, got 3"),
    *(({"stop": stop}, "stop must hold text that UTF-8 can represent") for stop in (("\ud800",), ("a", "b\udfff"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "message"), [(EAGLEConfig, *row) for row in CONFIGS] + [(SamplingParams, *row) for row in PARAMS]
)
def test_bad_values_are_named(kind, values, message):
    with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
        kind(**values)
