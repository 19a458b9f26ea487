"""With EAGLE_KERNELS_DEBUG=1 ops name page ids, slots and lengths that a server got wrong, where they are read."""

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.linear.shared.repack import pack_columns
from eagle_kernels.ops.registry import OPS
from eagle_kernels.runtime import check
from op_tests.harness import to_device
from op_tests.harness.cases import copied, refusal
from op_tests.harness.trees import stars

INTS = torch.tensor
PAGES, PAGE_SIZE = 5, 4


def caches(*leading: int) -> dict:
    return {name: torch.zeros(*leading, PAGES, PAGE_SIZE, 1, 16) for name in ("k_cache", "v_cache")}


def at(name: str, *where: int, to: int):
    """A step that puts a number into a tensor: (its name, its place, the number)."""
    return name, where, to


LARGEST = 2**63 - 1  # whose successor is negative
# nodes that are accepted of trees of three requests, of which the second one accepts none, and what is no node
PATHS = {
    "accept_index": INTS([[0, 2, -1], [-1, 9, 9], [6, 7, 8]]), "accept_token_num": INTS([1, -1, 2]),
    "num_verify_tokens": 3,
}  # fmt: skip
PATH_STEPS = [at("accept_index", *where, to=node) for *where, node in (
    (0, 1, 5), (0, 0, 3), (2, 1, -2), (2, 0, LARGEST), (0, 1, 2**40))]  # fmt: skip
SLOTS = {"cache_locs": INTS([5, -1, 4, -1, -1, -1, 1, 2, 3])}  # of three requests; those of -1 are not accepted


def room(**sizes) -> dict:
    """Drafts of a prefix of 5 tokens in a table that is just wide enough."""
    columns = sizes.pop("columns")
    return {"req_pool_indices": INTS([0]), "req_to_token": torch.arange(columns)[None], "seq_lens": INTS([5])} | sizes


def narrower(values: dict) -> tuple:
    """One column less."""
    return "req_to_token", None, values["req_to_token"][:, :-1]


FULL = {"block_table": INTS([[4, 0, 3]]), "seq_lens": INTS([12])}
FULL_CSR = {"kv_indptr": INTS([0, 3]), "kv_indices": INTS([4, 0, 3]), "last_page_len": INTS([4])}
ONE_DECODE = {"query": torch.zeros(1, 1, 16)} | caches()
ONE_CHAIN = {"query": torch.zeros(1, 2, 1, 16), "is_causal": True} | caches()
ONE_RAGGED = {"query": torch.zeros(2, 1, 16), "qo_indptr": INTS([0, 2]), "max_query": 2} | caches()
# the same over latents
LATENTS = {"latent_cache": torch.zeros(PAGES, PAGE_SIZE, 20), "latent_dim": 16, "sm_scale": 1.0}
ONE_LATENT_DECODE = {"query": torch.zeros(1, 1, 20)} | LATENTS
ONE_LATENT_CHAIN = {"query": torch.zeros(1, 2, 1, 20), "is_causal": True} | LATENTS
ONE_LATENT_PROMPT = {"query": torch.zeros(2, 1, 20), "qo_indptr": INTS([0, 2]), "max_query": 2} | LATENTS
ROW_STEPS = [at("req_pool_indices", 0, to=2), at("req_pool_indices", 0, to=-1), at("req_to_token", 1, 5, to=-1)]
LAST_ROW = {"req_pool_indices": INTS([1]), "req_to_token": INTS([[9] * 6, [4, 3, 2, 1, 2**31 - 1, 0]])}
PAST_INT32 = at("req_to_token", 1, 4, to=2**31)
ENDS = [at("kv_indptr", 1, to=4), at("kv_indptr", 0, to=-1)]
TREE = stars([[1]], root=9)
LEAST, ALMOST_1 = torch.finfo(torch.float32).tiny, 1.0 - 2.0**-24
NAN, INF, LARGEST_FLOAT = float("nan"), float("inf"), torch.finfo(torch.float32).max
DRAWN = {"positions": INTS([5, 6]), "seeds": INTS([1])}
FILTERS = {"temperature": torch.zeros(1), "top_p": torch.zeros(1), "min_p": torch.zeros(1)}
LINK_STEPS = [at("retrieve_next_token", 0, 0, to=2), at("retrieve_next_token", 0, 0, to=0),
              at("retrieve_next_token", 0, 0, to=-2), at("retrieve_next_token", 0, 1, to=1),
              at("retrieve_next_sibling", 0, 1, to=2), at("retrieve_next_sibling", 0, 0, to=1)]  # fmt: skip
PENALTIES = {"repetition_penalty": torch.full((1,), LEAST), "frequency_penalty": torch.zeros(1),
             "presence_penalty": torch.zeros(1)}  # fmt: skip
BELOW_0 = [at("temperature", 0, to=-LEAST), at("temperature", 0, to=NAN)]
FILTER_STEPS = [*BELOW_0, at("top_p", 0, to=NAN), at("min_p", 0, to=NAN)]
PENALTY_STEPS = [at("repetition_penalty", 0, to=0.0), at("frequency_penalty", 0, to=NAN),
                 at("presence_penalty", 0, to=NAN)]  # fmt: skip
PAIR = {"target_logits": torch.zeros(2, 4), "draft_logits": torch.zeros(2, 4), "temperature": torch.zeros(1),
        "draft_temperature": torch.zeros(1)}  # fmt: skip
PAIR_STEPS = [*BELOW_0, at("draft_temperature", 0, to=-LEAST)]
BUILT = {"verified_id": INTS([9]), "seq_lens": INTS([0]), "num_verify_tokens": 3, "tree_mask_mode": "packed"}
SCORED = BUILT | {"parent_list": INTS([[-1, 0, 1]]), "topk": 2, "spec_steps": 2}
LENGTH = [at("seq_lens", 0, to=-1)]

# calls at their limits, and each step that goes too far: of an element, or (place None) another argument
LIMITS = {
    "experts": ("fused_experts", {
        "x": torch.zeros(1, 1), "experts": INTS([[1, -1]]), "weights": torch.zeros(1, 2),
        "gate_up": torch.zeros(2, 2, 1), "down": torch.zeros(2, 1, 1),
    }, [at("experts", 0, 0, to=2), at("experts", 0, 1, to=-2)]),
    "quantised experts": ("fused_experts", {
        "x": torch.zeros(1, 16).half(), "experts": INTS([[0]]), "weights": torch.zeros(1, 1),
        "gate_up": torch.zeros(1, 1, 1, 16, 32, dtype=torch.int32), "gate_up_scales": torch.zeros(1, 16),
        "down": torch.zeros(1, 1, 1, 16, 32, dtype=torch.int32), "down_scales": torch.zeros(1, 16),
        "weight_format": "fp8",
    }, [at("gate_up_scales", 0, 0, to=NAN), at("down_scales", 0, 15, to=float("inf"))]),
    "decode": ("gqa_decode", ONE_DECODE | FULL, [
        at("seq_lens", 0, to=13), at("seq_lens", 0, to=-1), at("block_table", 0, 0, to=5),
        at("block_table", 0, 2, to=-1),
    ]),
    "no key": ("gqa_decode", ONE_DECODE | {"block_table": INTS([[-5, 9, 9]]), "seq_lens": INTS([0])}, LENGTH),
    "decode csr": ("gqa_decode", ONE_DECODE | FULL_CSR, [
        *ENDS, at("last_page_len", 0, to=5), at("last_page_len", 0, to=0), at("kv_indices", 0, to=5),
        at("kv_indices", 2, to=-1),
    ]),
    "one slot": ("gqa_decode", ONE_DECODE | FULL_CSR | {"last_page_len": INTS([1])}, [at("last_page_len", 0, to=0)]),
    "no page": (
        "gqa_decode",
        {"query": torch.zeros(3, 1, 16), "kv_indptr": INTS([0, 2, 2, 2]), "kv_indices": INTS([3, 0, 99]),
         "last_page_len": INTS([2, 0, 9])} | caches(),
        [at("kv_indptr", 2, to=1), at("kv_indptr", 3, to=4), at("kv_indices", 1, to=PAGES)],
    ),
    "window": (
        "gqa_decode", ONE_DECODE | FULL | {"block_table": INTS([[-1, 5, 3]]), "window": 4}, [("window", None, 5)],
    ),
    "first of a page": (
        "gqa_decode", ONE_DECODE | {"block_table": INTS([[4, 0, -1]]), "seq_lens": INTS([8])},
        [at("seq_lens", 0, to=9)],
    ),
    "chain": ("tree_attention", ONE_CHAIN | FULL | {"seq_lens": INTS([10])}, [at("seq_lens", 0, to=11)]),
    "chain beside": (
        "tree_attention",
        ONE_CHAIN | FULL | {name: torch.zeros(1, 2, 1, 16) for name in ("draft_key", "draft_value")},
        [at("seq_lens", 0, to=13)],
    ),
    "ragged": ("tree_attention", ONE_RAGGED | FULL | {"seq_lens": INTS([10]), "is_causal": True}, [
        at("seq_lens", 0, to=11), at("qo_indptr", 1, to=3), at("qo_indptr", 0, to=-1), ("max_query", None, 1),
    ]),
    "prefill": ("prefill_attention", ONE_RAGGED | FULL, [
        at("seq_lens", 0, to=13), at("qo_indptr", 1, to=3), ("max_query", None, 1), at("block_table", 0, 0, to=5),
    ]),
    "keys": (
        "prefill_attention",
        {"query": torch.zeros(2, 1, 16), "qo_indptr": INTS([0, 2]), "max_query": 2, "key_indptr": INTS([0, 3])}
        | {name: torch.zeros(3, 1, 16) for name in ("key", "value")},
        [at("key_indptr", 1, to=4), at("key_indptr", 0, to=-1)],
    ),
    "plan": ("plan_attention", {"seq_lens": INTS([2**31 - 2**21, 0])}, [
        at("seq_lens", 0, to=2**31 - 2**21 + 1), at("seq_lens", 1, to=-1),
    ]),
    "decode of latents": ("mla_decode", ONE_LATENT_DECODE | FULL, [
        at("seq_lens", 0, to=13), at("seq_lens", 0, to=-1), at("block_table", 0, 0, to=5),
    ]),
    "chain of latents": ("mla_tree_attention", ONE_LATENT_CHAIN | FULL | {"seq_lens": INTS([10])}, [
        at("seq_lens", 0, to=11), at("block_table", 0, 2, to=-1),
    ]),
    "prompt of latents": ("mla_prefill", ONE_LATENT_PROMPT | FULL, [
        at("seq_lens", 0, to=13), at("qo_indptr", 1, to=3), ("max_query", None, 1), at("block_table", 0, 0, to=5),
    ]),
    "write of latents": (
        "write_latent_kv",
        {"latent": torch.zeros(2, 16), "rope_key": torch.zeros(2, 4), "latent_cache": LATENTS["latent_cache"],
         "slots": INTS([-1, 19])},
        [at("slots", 1, to=20), at("slots", 0, to=-2)],
    ),
    "write": (
        "write_kv",
        {name: torch.zeros(2, 1, 16) for name in ("key", "value")} | caches() | {"slots": INTS([-1, 19])},
        [at("slots", 1, to=20), at("slots", 0, to=-2)],
    ),
    "move": (
        "move_accepted_kv",
        caches(1) | FULL | {"seq_lens": INTS([9]), "accept_index": INTS([[0, 2]]), "accept_token_num": INTS([1]),
                            "num_verify_tokens": 3},
        [at("seq_lens", 0, to=10), at("seq_lens", 0, to=-1), at("accept_index", 0, 1, to=3),
         at("accept_token_num", 0, to=2), at("block_table", 0, 2, to=5), at("block_table", 0, 2, to=-1)],
    ),
    "move at addresses": (  # which are no memory, since nothing is accepted
        "move_accepted_kv",
        caches(1) | FULL | {"accept_index": INTS([[-1]]), "accept_token_num": INTS([-1]), "num_verify_tokens": 3,
                            "cache_addresses": INTS([[16, 0], [32, 0]])},
        [at("cache_addresses", 0, 1, to=8), at("cache_addresses", 1, 1, to=16)],
    ),
    "accepted": (
        "accepted_cache_locs",
        {"cache_locs": INTS([0, -1, 0]), "seq_lens": INTS([0]), "accept_index": INTS([[0, 2]]),
         "accept_token_num": INTS([1]), "num_verify_tokens": 3},
        [at("cache_locs", 2, to=-1), at("cache_locs", 0, to=-1), at("seq_lens", 0, to=-1),
         at("accept_index", 0, 1, to=3), at("accept_token_num", 0, to=2)],
    ),
    "accepted of int32": (
        "accepted_cache_locs",
        {"cache_locs": INTS([2**31 - 1, 0]), "accept_token_num": INTS([1]), "num_verify_tokens": 2,
         "out": tuple(torch.zeros(size, dtype=torch.int32) for size in (2, 2, 2, 2, 0, 2))},
        [at("cache_locs", 0, to=2**31)],
    ),
    "move of three": (
        "move_accepted_kv",
        caches(2) | PATHS
        | {"block_table": INTS([[3, 0, -7], [99, -7, 5], [-1, -1, -1]]), "seq_lens": INTS([5, -9, 1])},
        [*PATH_STEPS, at("accept_index", 0, 1, to=-1), at("seq_lens", 0, to=LARGEST), at("seq_lens", 0, to=-1),
         at("seq_lens", 0, to=10), at("block_table", 0, 1, to=PAGES), at("block_table", 0, 1, to=-1),
         at("accept_token_num", 0, to=3)],
    ),
    "accepted of three": ("accepted_cache_locs", SLOTS | PATHS | {"seq_lens": INTS([3, -9, 0])}, [
        *PATH_STEPS, at("accept_index", 0, 1, to=-1), at("cache_locs", 2, to=-1), at("seq_lens", 0, to=-1),
        at("accept_token_num", 0, to=3),
    ]),
    "accepted paths": (
        "accepted_cache_locs",
        SLOTS | {"num_verify_tokens": 3, "accept_index": INTS([[0, 2, -1], [-1, -1, -1], [6, 7, 8]])}, PATH_STEPS,
    ),
    "evict": ("align_evict_mask_to_page_size", {
        "seq_lens": INTS([0]), "evict_mask": torch.ones(1, 3, dtype=torch.bool), "page_size": 4}, LENGTH),
    "assign": (
        "assign_req_to_token",
        LAST_ROW | {"req_to_token": torch.zeros(2, 6).int(), "starts": INTS([0]), "ends": INTS([6]),
                    "cache_locs": INTS([2**31 - 1] * 6)},
        [at("starts", 0, to=-1), at("ends", 0, to=7), at("cache_locs", 0, to=2**31), ROW_STEPS[0], ROW_STEPS[1],
         ("cache_locs", None, INTS([1] * 5))],
    ),
    "chain lists": (
        "chain_kv_indices", LAST_ROW | {"kv_lens": INTS([6]), "num_verify_tokens": 2, "capacity": 20},
        [*ROW_STEPS, PAST_INT32, at("kv_lens", 0, to=7), at("kv_lens", 0, to=-1)],
    ),
    "lists": (
        "kv_indices", LAST_ROW | {"seq_lens": INTS([4]), "starts": INTS([2]), "capacity": 20},
        [*ROW_STEPS, PAST_INT32, at("seq_lens", 0, to=5), at("starts", 0, to=3), at("starts", 0, to=-1),
         at("seq_lens", 0, to=-1)],
    ),
    "extend": (
        "extend_cache_locs", LAST_ROW | {"starts": INTS([0]), "ends": INTS([6]), "capacity": 20},
        [*ROW_STEPS, at("ends", 0, to=7), at("ends", 0, to=-1), at("starts", 0, to=-1)],
    ),
    "extend evenly": (
        "extend_cache_locs", LAST_ROW | {"starts": INTS([3]), "num_tokens": 3}, [*ROW_STEPS, at("starts", 0, to=4)],
    ),
    "drafts": ("draft_cache_locs", LAST_ROW | {"seq_lens": INTS([2]), "topk": 2, "num_steps": 2}, [
        *ROW_STEPS, at("seq_lens", 0, to=3), at("seq_lens", 0, to=-1),
    ]),
    "draft lists": (
        "draft_kv_indices", LAST_ROW | {"seq_lens": INTS([2]), "topk": 2, "num_steps": 2, "capacity": 20},
        [*ROW_STEPS, PAST_INT32, at("seq_lens", 0, to=3), at("seq_lens", 0, to=-1)],
    ),
    # columns of the last draft: 5 + K * steps; 4 + (K - 1) * pages + 1 + steps
    **{
        f"{op} of {sizes}": (op, room(**sizes) | given, [narrower(room(**sizes))])
        for op, given in (("draft_cache_locs", {}), ("draft_kv_indices", {"capacity": 99}))
        for sizes in (
            {"topk": 3, "num_steps": 2, "page_size": 1, "columns": 11},
            {"topk": 1, "num_steps": 2, "page_size": 4, "columns": 7},
            {"topk": 2, "num_steps": 2, "page_size": 4, "columns": 11},
            {"topk": 3, "num_steps": 3, "page_size": 4, "columns": 16},
            {"topk": 2, "num_steps": 4, "page_size": 4, "columns": 17},
        )
    },
    "pack rows": ("pack_verify_rows", {
        "draft_tokens": INTS([[1, 2], [3, 4]]), "num_tokens": INTS([0, 2]), "seq_lens": INTS([0, 0]), "max_rows": 2,
    }, [("max_rows", None, 1), at("num_tokens", 1, to=3), at("num_tokens", 0, to=-1), at("num_tokens", 0, to=1)]),
    "append": ("append_output", {
        "token_ids": INTS([[1, 2], [3, 4]]), "num_tokens": INTS([0, 2]), "num_prompt_tokens": INTS([0, 0]),
        "tokens": INTS([[1], [2]]),
    }, [at("num_tokens", 1, to=3), at("num_tokens", 0, to=-1)]),
    "coins": ("verify_tree_coins", TREE | {
        "target_probs": torch.ones(2, 4), "uniform_samples": torch.tensor([[0.0, ALMOST_1]]), "spec_steps": 1,
        "uniform_samples_for_final_sampling": torch.tensor([ALMOST_1]),
    }, [at("uniform_samples", 0, 1, to=1.0), at("uniform_samples", 0, 0, to=-LEAST),
        at("uniform_samples_for_final_sampling", 0, to=1.0), at("uniform_samples_for_final_sampling", 0, to=NAN)]),
    "typical": ("verify_tree_typical", TREE | DRAWN | {
        "target_logits": torch.zeros(2, 4), "spec_steps": 1,
        **{name: torch.zeros(1) for name in ("temperature", "epsilon", "delta")},
    }, [*BELOW_0, at("epsilon", 0, to=-LEAST), at("delta", 0, to=-LEAST), at("delta", 0, to=NAN)]),
    "simulated": ("verify_tree_greedy", TREE | DRAWN | {
        "target_predict": INTS([[1, 2]]), "spec_steps": 2, "accept_policy": "simulate",
        "simulated_rates": torch.tensor([1.0, 0.0]),
    }, [*LINK_STEPS, at("simulated_rates", 0, to=1.0 + 2.0**-23), at("simulated_rates", 1, to=-LEAST)]),
    "sampled": (
        "verify_tree_sampled",
        TREE | DRAWN | FILTERS | PENALTIES | {"target_logits": torch.zeros(2, 4), "spec_steps": 1},
        FILTER_STEPS + PENALTY_STEPS,
    ),
    "drawn": (
        "sample_from_logits",
        FILTERS | PENALTIES | {"logits": torch.zeros(1, 4), "positions": INTS([1]), "seeds": INTS([1])},
        FILTER_STEPS + PENALTY_STEPS,
    ),
    "penalised": ("penalize_logits", TREE | PENALTIES | {"target_logits": torch.zeros(2, 4)}, PENALTY_STEPS),
    **{
        f"{name}_renorm": (f"{name}_renorm", {"probs": torch.ones(1, 4), name: torch.zeros(1)}, [at(name, 0, to=NAN)])
        for name in ("top_p", "min_p")
    },
    "children": (
        "sample_children",
        {"draft_logits": torch.zeros(1, 4), "positions": INTS([1]), "seeds": INTS([1]), "temperature": torch.zeros(1),
         "num_children": 1},
        BELOW_0,
    ),
    "pair of a chain": (
        "verify_chain", DRAWN | PAIR | {"candidates": INTS([[9, 1]]), "draft_logits": torch.zeros(1, 4)}, PAIR_STEPS,
    ),
    "pair of a walk up": ("verify_tree_traversal", TREE | DRAWN | PAIR | {"spec_steps": 1}, PAIR_STEPS),
    "pair": ("verify_tree_rejection", TREE | DRAWN | PAIR | {"spec_steps": 1, "d2t": INTS([0, 0, 0, 0])}, [
        *PAIR_STEPS, at("d2t", 3, to=1), at("d2t", 0, to=-1),
    ]),
    "built": (
        "build_tree", SCORED | {"top_scores_index": INTS([[0, 5]]), "draft_tokens": INTS([[1, 2]])},
        [*LENGTH, at("top_scores_index", 0, 1, to=6)],
    ),
    "scored": (
        "build_tree_from_scores", SCORED | {"candidate_scores": torch.zeros(1, 6), "candidate_tokens": INTS([[1] * 6])},
        LENGTH,
    ),
    "blocks": (
        "build_tree_from_blocks",
        {"verified_id": INTS([9]), "logits": None, "seq_lens": INTS([0]), "candidate_tokens": INTS([[[5, 6], [7, 8]]]),
         "candidate_scores": torch.tensor([[[0.0, -INF], [0.0, 0.0]]]), "num_nodes": INTS([1]), "topk": 2,
         "transition_scores": torch.tensor([[[[-INF, LARGEST_FLOAT], [0.0, 0.0]]]]), "num_verify_tokens": 3},
        [at("candidate_scores", 0, 1, 0, to=LEAST), at("candidate_scores", 0, 1, 0, to=NAN),
         at("transition_scores", 0, 0, 1, 0, to=NAN), at("transition_scores", 0, 0, 0, 1, to=INF),
         at("num_nodes", 0, to=0), *LENGTH],
    ),
    "blocks of logits": (
        "build_tree_from_blocks",
        {"verified_id": INTS([9]), "logits": torch.tensor([[[-INF, LARGEST_FLOAT], [0.0, 0.0]]]), "seq_lens": INTS([0]),
         "topk": 2, "num_verify_tokens": 3},
        [at("logits", 0, 1, 0, to=NAN), at("logits", 0, 0, 1, to=INF), *LENGTH],
    ),
    "parents": ("tree_from_parents", BUILT | {"draft_tokens": INTS([[1, 2]]), "parents": INTS([[0, 0]])}, LENGTH),
    "mask": ("tree_from_mask", {
        "tree_mask": INTS([[[1], [3]]]), "seq_lens": INTS([0]), "num_verify_tokens": 2, "tree_mask_mode": "packed",
    }, LENGTH),
    "packed": ("pack_tree_mask", {
        "tree_mask": torch.ones(4, dtype=torch.bool), "seq_lens": INTS([0]), "num_verify_tokens": 2,
        "tree_mask_mode": "full_mask",
    }, LENGTH),
    "unpacked": ("unpack_tree_mask", {
        "tree_mask": INTS([[[1], [3]]]), "seq_lens": INTS([0]), "seq_lens_sum": 0, "tree_mask_mode": "full_mask",
    }, LENGTH),
    "quantised weights": (
        "linear_w4a16",
        {"x": torch.ones(1, 2).half(), "weight": pack_columns(torch.ones(2, 2, dtype=torch.uint8), 4),
         "scales": torch.tensor([1.0, torch.finfo(torch.float32).max]), "columns": INTS([1, 0])},
        [at("scales", 1, to=float("inf")), at("columns", 0, to=2), at("columns", 1, to=-1)],
    ),
    "weights of 8 bits": (
        "linear_fp8",
        {"x": torch.ones(1, 2).half(), "weight": pack_columns(torch.ones(2, 2, dtype=torch.uint8), 8),
         "scales": torch.tensor([1.0, 2.0])},
        [at("scales", 0, to=float("-inf"))],
    ),
    "unpacked keys": (
        "unpack_tree_mask", {"tree_mask": INTS([[[1], [3]]]), "tree_mask_mode": "qlen_only"},
        [at("tree_mask", 0, 1, 0, to=4)],
    ),
}  # fmt: skip


@pytest.fixture(params=["reference", "triton"])
def function(request, monkeypatch, device):
    """`function(name, values)`: a call of an op in debug mode."""
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    module = eagle_kernels if request.param == "reference" else eagle_kernels.raw

    return lambda name, values: getattr(module, name)(**to_device(values, device))


def changed(values: dict, step: tuple) -> dict:
    """The arguments after a step."""
    field, where, number = step
    if where is not None:
        number, to = values[field].clone(), number
        number[where] = to
    return values | {field: number}


@pytest.mark.parametrize("case", LIMITS)
def test_limits_pass_and_one_step_further_fails(case, function):
    name, values, steps = LIMITS[case]
    assert not refusal(function, name, copied(values))
    for step in steps:
        wrong = changed(values, step)
        said = refusal(function, name, wrong)
        found = re.match(rf"eagle_kernels\.{name}: (\w+) must .*, got (.*?)(?: at (\[.*\]))?$", said)
        assert found, (step, said)
        # a range is where both of its numbers say, and one slot more may lie on a page that is not there
        blamed = ("starts", "seq_lens") if step[0] == "starts" else step[:1]
        assert step[1] is None or found[1] in blamed or case == "first of a page", (step, said)
        if found[3]:  # what it says that it got is there
            assert str(wrong[found[1]][tuple(ast.literal_eval(found[3]))].item()) == found[2], (step, said)


def test_every_rule_has_its_limit(monkeypatch):
    """Every call of `debug` in the sources, but one rule of plan_attention that takes 2^31 blocks, has failed above."""
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    failed = set()
    fail = check.Arguments.fail

    def noting(args, *rest, **options):
        frame = sys._getframe(1)
        while frame.f_code.co_filename == check.__file__:
            frame = frame.f_back
        failed.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        fail(args, *rest, **options)

    monkeypatch.setattr(check.Arguments, "fail", noting)
    for name, values, steps in LIMITS.values():
        for step in steps:
            refusal(getattr(eagle_kernels.raw, name), **changed(values, step))
    rules = set()
    for file in Path(check.__file__).parents[1].glob("[op]*/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("debug", "debug_numbers"):
                rules.add((file.name, node.lineno))
    assert len(rules) > 40
    assert len(rules - failed) == 1, rules - failed


def test_every_op_that_takes_a_pool_or_a_table_is_tried():
    """But `find_slots`, which knows no pool and returns -1 for what has no page."""
    named = {"block_table", "kv_indptr", "req_to_token", "slots", "cache_locs"}
    takes = {name for name in OPS if named & inspect.signature(getattr(eagle_kernels, name)).parameters.keys()}
    assert len(takes) > 10 and takes - {"find_slots"} <= {name for name, _, _ in LIMITS.values()}
