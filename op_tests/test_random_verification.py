"""Random calls give what the references give, with tiles so small that every loop over one goes on for a while."""

import pytest

from eagle_kernels.ops.draft import ngram_match
from eagle_kernels.ops.draft.shared import ngram
from eagle_kernels.ops.rejection import sample_children, verify_tree_rejection, verify_tree_traversal
from eagle_kernels.ops.rejection.shared import prepare_pair
from eagle_kernels.ops.sampling import penalize_logits, verify_tree_sampled
from eagle_kernels.ops.sampling.shared import edge_search, renorm_steps, sampling
from eagle_kernels.ops.verify import (
    append_output,
    pack_verify_rows,
    verify_tree_coins,
    verify_tree_greedy,
    verify_tree_typical,
)
from eagle_kernels.runtime.language import tl
from op_tests.harness import to_device
from op_tests.harness.drawn import check_drawn
from op_tests.harness.retune import retune
from op_tests.random_verification import CALLS, drawn_call, without_requests

# of the interpreter, in lanes that are masked
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")

TILES = [
    (ngram_match.SCAN_TUNING, {"BLOCK_TOKEN": 16, "programs": 8}),
    (ngram_match.MERGE_TUNING, {"BLOCK_KEY": 4}),
    (ngram.BUDGET_TUNING, {"BLOCK_BATCH": 2}),
    (sample_children.TUNING, {"BLOCK_VOCAB": 16}),
    (prepare_pair.SLICE_TUNING, {"BLOCK_VOCAB": 16}),
    (prepare_pair.MAP_TUNING, {"BLOCK_TARGET": 16, "BLOCK_DRAFT": 8}),
    (verify_tree_rejection.TUNING, {"BLOCK_VOCAB": 16}),
    (verify_tree_traversal.TUNING, {"BLOCK_VOCAB": 16}),
    (penalize_logits.TUNING, {"BLOCK_VOCAB": 32}),
    (sampling.SCAN_TUNING, {"BLOCK_CHUNK": 1}),
    (sampling.FILTERED_SCAN_TUNING, {"BLOCK_CHUNK": 1}),
    (renorm_steps.SCAN_TUNING, {"BLOCK_VOCAB": 128}),
    (renorm_steps.COLLECT_TUNING, {"BLOCK_VOCAB": 64}),
    (renorm_steps.EDGE_TUNING, {"BLOCK_CANDIDATE": 64}),
    (renorm_steps.WRITE_TUNING, {"BLOCK_VOCAB": 128}),
    (append_output.TUNING, {"tile_elements": 16}),
    (pack_verify_rows.TUNING, {"BLOCK_ROW": 4}),
    (verify_tree_coins.MASS_TUNING, {"BLOCK_VOCAB": 16, "BLOCK_GROUP": 4}),
    (verify_tree_greedy.ROWS_TUNING, {"BLOCK_VOCAB": 16}),
    (verify_tree_greedy.LEVEL_TUNING, {"BLOCK_VOCAB": 16}),
    (verify_tree_typical.SCAN_TUNING, {"BLOCK_VOCAB": 16}),
]
CLOSE = {"rejection.sample_children": ("logprobs",), "sampling.verify_tree_sampled": ("logprobs", "raw_logprobs")}
# what takes about a second
NUM_CALLS = {
    "draft.merge_drafts": 24, "draft.ngram_match": 50, "draft.reroot_drafts": 40, "draft.share_drafts": 24,
    "rejection.sample_children": 8,
    "rejection.verify_chain": 20, "rejection.verify_tree_rejection": 18, "rejection.verify_tree_traversal": 14,
    "sampling.min_p_renorm": 16, "sampling.penalize_logits": 12, "sampling.sample_from_logits": 16,
    "sampling.top_k_renorm": 12, "sampling.top_p_renorm": 12, "sampling.verify_tree_sampled": 14,
    "verify.append_output": 30, "verify.pack_verify_rows": 40, "verify.verify_commit": 40,
    "verify.verify_tree_coins": 40, "verify.verify_tree_greedy": 30, "verify.verify_tree_topp": 60,
    "verify.verify_tree_typical": 16,
}  # fmt: skip
# and these with trees that are malformed where drafts are accepted
NUM_MALFORMED = {
    "rejection.verify_tree_rejection": 3, "rejection.verify_tree_traversal": 3, "sampling.penalize_logits": 3,
    "sampling.verify_tree_sampled": 6, "verify.verify_tree_coins": 8, "verify.verify_tree_greedy": 8,
    "verify.verify_tree_topp": 8, "verify.verify_tree_typical": 6,
}  # fmt: skip


def prepare(monkeypatch, device) -> None:
    """Tiles of 16 tokens or so, and of the rows that filters read again three and more."""
    for table, numbers in TILES:
        retune(monkeypatch, table, **numbers)
    if device.type == "cpu":  # compiled kernels hold such constants
        monkeypatch.setattr(edge_search, "_BLOCK", tl.constexpr(1024))
        monkeypatch.setattr(edge_search, "_WIDE_BLOCK", tl.constexpr(1024))
        monkeypatch.setattr(edge_search, "_LINES", tl.constexpr(4))


def go_either_way(monkeypatch, number: int) -> None:
    """Every other call reads all rows at once, the others level by level, whatever shapes say; one to three rounds."""
    is_all = number % 2 == 0
    for op in (verify_tree_rejection, verify_tree_traversal):
        retune(monkeypatch, op.ROUND_TUNING, rounds=1 + number // 2 % 3)
    monkeypatch.setattr(verify_tree_sampled, "draws_all_rows", lambda *_: is_all)
    monkeypatch.setattr(verify_tree_rejection, "goes_by_level", lambda *_: not is_all)
    retune(monkeypatch, verify_tree_greedy.CHOICE_TUNING, level_bytes=2**40 * is_all)


def check_calls(path, device, monkeypatch) -> None:
    for number in range(NUM_CALLS[path] + NUM_MALFORMED.get(path, 0)):
        go_either_way(monkeypatch, number)
        values, choice = drawn_call(path, number, number >= NUM_CALLS[path])
        check_drawn(path, to_device(values, device), choice, f"{number}", CLOSE.get(path, ()))
    check_drawn(path, to_device(without_requests(path, values), device), choice, "empty", CLOSE.get(path, ()))


@pytest.mark.parametrize("path", CALLS)
def test_random_calls(path, device, monkeypatch):
    """Kernel and reference agree on every call, in whatever form its arguments and buffers are given."""
    prepare(monkeypatch, device)
    check_calls(path, device, monkeypatch)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("path", CALLS)
def test_many_calls_in_the_shipped_tiles(path, device):
    for number in range(NUM_CALLS[path], 10 * NUM_CALLS[path]):
        values, choice = drawn_call(path, number)
        check_drawn(path, to_device(values, device), choice, f"{number}", CLOSE.get(path, ()))
