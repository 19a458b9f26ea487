"""With EAGLE_KERNELS_DEBUG=1 ops name page ids, slots and lengths that a server got wrong, where they are read."""

from __future__ import annotations

import inspect

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.registry import OPS

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


def test_every_op_that_takes_a_pool_or_a_table_is_tried():
    """But `find_slots`, which knows no pool and returns -1 for what has no page."""
    named = {"block_table", "kv_indptr", "req_to_token", "slots", "cache_locs"}
    takes = {name for name in OPS if named & inspect.signature(getattr(eagle_kernels, name)).parameters.keys()}
    assert len(takes) > 10 and takes - {"find_slots"} <= {SOUND[case][0] for case in FAULTS}
    assert FAULTS.keys() == SOUND.keys()
