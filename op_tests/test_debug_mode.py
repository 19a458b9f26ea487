"""With EAGLE_KERNELS_DEBUG=1 ops name page ids, slots and lengths that a server got wrong, where they are read."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.registry import OPS
from eagle_kernels.runtime import check

INTS = torch.tensor
PAGES, PAGE_SIZE = 5, 4
PADDING = [99, -7, 5]  # what is not read may hold anything


def caches(*leading: int) -> dict:
    return {name: torch.zeros(*leading, PAGES, PAGE_SIZE, 1, 16) for name in ("k_cache", "v_cache")}


# a request of 6 slots in pages 3 and 0, one without a slot, and one that only pads the batch
TABLE = {"block_table": INTS([[3, 0, -7], PADDING, [-1, -1, -1]]), "seq_lens": INTS([6, 0, 1])}
WINDOWED = INTS([[99, 0, 0], PADDING, [-1, -1, -1]])
CSR = {"kv_indptr": INTS([0, 2, 2, 2]), "kv_indices": INTS([3, 0, 99]), "last_page_len": INTS([2, 0, 9])}
ROWS = {"req_pool_indices": INTS([1, 7, 0]), "req_to_token": INTS([[9, 8, 7, 6, 5, -1], [4, 3, 2, 1, 0, 9]])}
DECODE = {"query": torch.zeros(3, 2, 16)} | caches()
CHAIN = {"query": torch.zeros(3, 2, 2, 16), "is_causal": True} | caches()
RAGGED = {"query": torch.zeros(3, 2, 16), "qo_indptr": INTS([0, 2, 3, 3]), "max_query": 2} | caches()
BESIDE = {name: torch.zeros(3, 2, 1, 16) for name in ("draft_key", "draft_value")}
PATHS = {
    "accept_index": INTS([[0, 2, -1], [-1, 9, 9], [6, 7, 8]]), "accept_token_num": INTS([1, -1, 2]),
    "num_verify_tokens": 3,
}  # fmt: skip
DRAFTS = ROWS | {"seq_lens": INTS([2, 0, 1]), "topk": 2, "num_steps": 2}

# calls that nothing is wrong with
SOUND = {
    "decode": ("gqa_decode", DECODE | TABLE),
    "decode csr": ("gqa_decode", DECODE | CSR),
    "decode window": ("gqa_decode", DECODE | TABLE | {"block_table": WINDOWED, "window": 2}),
    "prefill": ("prefill_attention", RAGGED | TABLE),
    "prefill csr": ("prefill_attention", RAGGED | CSR),
    "keys": (
        "prefill_attention",
        {name: torch.zeros(3, 1, 16) for name in ("query", "key", "value")}
        | {"qo_indptr": INTS([0, 2, 3, 3]), "key_indptr": INTS([0, 3, 3, 3]), "max_query": 2},
    ),
    "chain": ("tree_attention", CHAIN | TABLE),
    "chain csr": ("tree_attention", CHAIN | CSR),
    "chain window": ("tree_attention", CHAIN | TABLE | {"block_table": WINDOWED, "window": 2}),
    "chain beside": ("tree_attention", CHAIN | TABLE | BESIDE),
    "ragged": ("tree_attention", RAGGED | TABLE | {"is_causal": True}),
    "plan": ("plan_attention", {"seq_lens": INTS([6, 0])}),
    "write": (
        "write_kv",
        {name: torch.zeros(3, 1, 16) for name in ("key", "value")} | caches() | {"slots": INTS([-1, 19, 0])},
    ),
    "move": ("move_accepted_kv", caches(2) | TABLE | PATHS | {"seq_lens": INTS([5, 0, 1])}),
    "accepted": (
        "accepted_cache_locs",
        PATHS | {"cache_locs": INTS([5, -1, 4, -1, -1, -1, 1, 2, 3]), "seq_lens": INTS([3, -9, 0])},
    ),
    "accepted paths": (
        "accepted_cache_locs",
        {"cache_locs": INTS([5, -1, 4, -1, -1, -1, 1, 2, 3]), "num_verify_tokens": 3,
         "accept_index": INTS([[0, 2, -1], [-1, -1, -1], [6, 7, 8]])},
    ),
    "evict": ("align_evict_mask_to_page_size",
              {"seq_lens": INTS([3, 0]), "evict_mask": torch.ones(2, 3, dtype=torch.bool), "page_size": 4}),
    "assign": (
        "assign_req_to_token",
        ROWS | {"starts": INTS([2, 3, 0]), "ends": INTS([4, 0, 5]), "cache_locs": INTS([1] * 7)},
    ),
    "chain lists": (
        "chain_kv_indices", ROWS | {"kv_lens": INTS([6, 0, 5]), "num_verify_tokens": 2, "capacity": 40},
    ),
    "draft locs": ("draft_cache_locs", DRAFTS),
    "draft locs on pages": ("draft_cache_locs", DRAFTS | {"page_size": 2, "seq_lens": INTS([1, 0, 0]), "num_steps": 1}),
    "draft lists": ("draft_kv_indices", DRAFTS | {"capacity": 40}),
    "draft lists in a window": (
        "draft_kv_indices",
        DRAFTS | {"capacity": 40, "window_size": 1, "req_to_token": INTS([[9] * 6, [-1, 3, 2, 1, 0, 9]])},
    ),
    "extend": ("extend_cache_locs", ROWS | {"starts": INTS([2, 3, 0]), "ends": INTS([6, 0, 5]), "capacity": 40}),
    "extend evenly": (
        "extend_cache_locs",
        ROWS | {"starts": INTS([4, 2, 3]), "num_tokens": 2, "req_pool_indices": INTS([1, 1, 0])},
    ),
    "lists": ("kv_indices", ROWS | {"seq_lens": INTS([4, 0, 5]), "starts": INTS([2, 9, 0]), "capacity": 40}),
    "lists of pages": ("kv_indices", ROWS | {"seq_lens": INTS([6, 0, 6]), "capacity": 40, "page_size": 4}),
}  # fmt: skip

PAGE = f"name one of the {PAGES} pages of the pool where it is read"
ROOM = "leave room for the {} in the 12 slots of a row of block_table"


def at(name: str, *where: int, to: int):
    """Puts a wrong number into a tensor: (its name, its place, the number)."""
    return name, where, to


TABLE_FAULTS = {
    at("block_table", 0, 1, to=PAGES): PAGE,
    at("block_table", 0, 0, to=-1): PAGE,
    at("seq_lens", 0, to=13): "lie in 0..12, the slots of a row of block_table",
    at("seq_lens", 1, to=-1): "lie in 0..12, the slots of a row of block_table",
}
CSR_FAULTS = {
    at("kv_indices", 1, to=PAGES): PAGE,
    at("kv_indices", 0, to=-1): PAGE,
    at("kv_indptr", 2, to=1): "ascend within 0..3",
    at("kv_indptr", 0, to=-1): "ascend within 0..3",
    at("kv_indptr", 3, to=4): "ascend within 0..3",
    at("last_page_len", 0, to=0): "lie in 1..4",
    at("last_page_len", 0, to=5): "lie in 1..4",
}
ROW = "name one of the 2 rows of req_to_token"
COLUMNS = "end within the 6 columns of req_to_token"
SLOT = "hold slots of the pool where it is read"
ROW_FAULTS = {
    at("req_pool_indices", 0, to=2): ROW,
    at("req_pool_indices", 0, to=-1): ROW,
    at("req_to_token", 1, 3, to=-1): SLOT,
}
NEGATIVE = "not be negative"
LARGEST = 2**63 - 1  # whose successor is negative
NODE = "name one of the 3 nodes of the request's tree where it is read"
PATH_FAULTS = {at("accept_index", *where, to=node): NODE for *where, node in ((0, 1, 5), (0, 0, 3), (2, 1, -2))} | {
    at("accept_index", 2, 0, to=LARGEST): NODE,
    at("accept_index", 0, 1, to=2**40): NODE,
}
INT32 = "hold what int32 holds, or out int64, where it is read"
DRAFT_FAULTS = ROW_FAULTS | {
    at("seq_lens", 0, to=LARGEST): "leave room for the drafts within the 6 columns of req_to_token",
    at("seq_lens", 0, to=3): "leave room for the drafts within the 6 columns of req_to_token",
    at("seq_lens", 1, to=-1): NEGATIVE,
}
FAULTS = {
    "decode": TABLE_FAULTS,
    "decode csr": CSR_FAULTS,
    "decode window": {at("block_table", 0, 1, to=-2): PAGE},
    "prefill": TABLE_FAULTS,
    "prefill csr": CSR_FAULTS,
    "keys": {at("key_indptr", 1, to=4): "ascend within 0..3", at("key_indptr", 1, to=-1): "ascend within 0..3"},
    "chain": TABLE_FAULTS | {at("seq_lens", 0, to=11): ROOM.format("draft keys")},
    "chain csr": CSR_FAULTS,
    "chain window": {at("block_table", 0, 1, to=-2): PAGE},
    "chain beside": TABLE_FAULTS,
    "ragged": TABLE_FAULTS | {at("seq_lens", 0, to=11): ROOM.format("draft keys")},
    "plan": {at("seq_lens", 1, to=-1): r"lie in 0..2^31 - 2^21"},
    "write": {at("slots", 1, to=20): "be -1 or one of the 20 slots of the pool", at("slots", 1, to=-2): "be -1 or one"},
    "move": PATH_FAULTS | {
        at("accept_index", 0, 1, to=-1): NODE,
        at("seq_lens", 0, to=LARGEST): ROOM.format("accepted nodes"),
        at("block_table", 0, 1, to=PAGES): PAGE,
        at("block_table", 0, 1, to=-1): PAGE,
        at("seq_lens", 0, to=-1): NEGATIVE,
        at("seq_lens", 0, to=10): ROOM.format("accepted nodes"),
        at("accept_token_num", 0, to=3): "be below the 3 entries of a path",
    },
    "accepted paths": PATH_FAULTS,
    "accepted": PATH_FAULTS | {
        at("accept_index", 0, 1, to=-1): NODE,
        at("cache_locs", 2, to=-1): "hold slots of the pool where they are read",
        at("seq_lens", 0, to=-1): NEGATIVE,
        at("accept_token_num", 0, to=3): "be below the 3 entries of a path",
    },
    "evict": {at("seq_lens", 0, to=-1): NEGATIVE},
    "assign": {
        at("req_pool_indices", 0, to=2): ROW,
        **{at(name, row, to=number): "lie in 0..6, the columns of req_to_token"
           for name in ("starts", "ends") for row, number in ((0, -1), (0, 7), (1, 2**40), (2, LARGEST))},
        at("ends", 2, to=6): "ask for at most 7 slots",
    },
    "chain lists": ROW_FAULTS | {
        at("req_to_token", 1, 2, to=2**40): INT32,
        at("kv_lens", 0, to=LARGEST): COLUMNS,
        at("kv_lens", 0, to=7): COLUMNS, at("kv_lens", 1, to=-1): NEGATIVE},
    "draft locs": DRAFT_FAULTS,
    "draft locs on pages": {at("req_to_token", 1, 0, to=-1): SLOT, at("req_to_token", 1, 3, to=-1): SLOT},
    "draft lists": DRAFT_FAULTS | {at("req_to_token", 1, 2, to=2**31): INT32, at("req_to_token", 1, 0, to=-1): SLOT},
    "draft lists in a window": {at("req_to_token", 1, 1, to=-1): SLOT, at("req_to_token", 1, 2, to=-1): SLOT},
    "extend": ROW_FAULTS | {
        at("starts", 0, to=-1): NEGATIVE,
        at("ends", 1, to=-1): NEGATIVE,
        at("ends", 0, to=7): COLUMNS,
    },
    "extend evenly": {
        at("starts", 0, to=LARGEST): COLUMNS,
        at("starts", 0, to=5): COLUMNS, at("req_to_token", 1, 5, to=-1): SLOT},
    "lists": ROW_FAULTS | {
        at("req_to_token", 1, 2, to=2**40): INT32,
        at("seq_lens", 0, to=LARGEST): COLUMNS,
        at("seq_lens", 0, to=5): COLUMNS, at("seq_lens", 1, to=-1): NEGATIVE},
    "lists of pages": {at("req_to_token", 1, 4, to=2**40): INT32, at("req_to_token", 1, 4, to=-1): SLOT},
}  # fmt: skip


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
ROW_STEPS = [at("req_pool_indices", 0, to=2), at("req_pool_indices", 0, to=-1), at("req_to_token", 1, 5, to=-1)]
LAST_ROW = {"req_pool_indices": INTS([1]), "req_to_token": INTS([[9] * 6, [4, 3, 2, 1, 2**31 - 1, 0]])}
PAST_INT32 = at("req_to_token", 1, 4, to=2**31)
ENDS = [at("kv_indptr", 1, to=4), at("kv_indptr", 0, to=-1)]
TREE = {
    "candidates": INTS([[9, 1]]), "retrieve_index": INTS([[0, 1]]), "retrieve_next_token": INTS([[1, -1]]),
    "retrieve_next_sibling": INTS([[-1, -1]]),
}  # fmt: skip
LEAST, ALMOST_1 = torch.finfo(torch.float32).tiny, 1.0 - 2.0**-24
NAN = float("nan")
DRAWN = {"positions": INTS([5, 6]), "seeds": INTS([1])}
FILTERS = {"temperature": torch.zeros(1), "top_p": torch.zeros(1), "min_p": torch.zeros(1)}
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
    }, [at("simulated_rates", 0, to=1.0 + 2.0**-23), at("simulated_rates", 1, to=-LEAST)]),
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

    def call(name: str, values: dict):
        moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        return getattr(module, name)(**moved)

    return call


@pytest.mark.parametrize("case", SOUND)
def test_sound_calls_pass(case, function):
    name, values = SOUND[case]
    function(name, {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()})


@pytest.mark.parametrize(
    ("case", "fault"), [(case, fault) for case, faults in FAULTS.items() for fault in faults], ids=str
)
def test_faults_are_named(case, fault, function):
    (name, values), (field, where, number) = SOUND[case], fault
    wrong = values[field].clone()
    wrong[where] = number
    with pytest.raises(ValueError) as caught:
        function(name, values | {field: wrong})
    expected = f"eagle_kernels.{name}: {field} must {FAULTS[case][fault]}"
    assert str(caught.value).startswith(expected) and str(caught.value).endswith(f"got {number} at {list(where)}")


def changed(values: dict, step: tuple) -> dict:
    """The arguments after a step."""
    field, where, number = step
    if where is not None:
        number, to = values[field].clone(), number
        number[where] = to
    return values | {field: number}


def refusal(call, *arguments) -> str:
    """What a call says that refuses its arguments."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", LIMITS)
def test_limits_pass_and_one_step_further_fails(case, function):
    name, values, steps = LIMITS[case]
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    assert not refusal(function, name, copies)
    for step in steps:
        assert refusal(function, name, changed(values, step)).startswith(f"eagle_kernels.{name}: "), step


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
            refusal(lambda: getattr(eagle_kernels.raw, name)(**changed(values, step)))  # noqa: B023
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
    assert len(takes) > 10 and takes - {"find_slots"} <= {SOUND[case][0] for case in FAULTS}
    assert FAULTS.keys() == SOUND.keys()
