"""select_top_k_tokens against its reference: random logits, ties of every kind, special values, a whole draft."""

import pytest
import torch

import eagle_kernels
from op_tests.harness import check_operation, sweep

PATH = "tree.select_top_k_tokens"
# numpy says so in the interpreter where it makes an infinity, as it should
OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
FLOATS = ("scores", "candidate_scores")

# (batch, topk, level, vocabulary): first and later levels, one beam, word borders, fewer groups and chunks than beams,
# borders of groups (32), chunks (1024) and programs (4096), vectors that do not divide a row, more chunks than lanes
SHAPES = [(1, 1, 0, 1), (2, 8, 0, 3000), (1, 16, 0, 40000), (2, 1, 3, 130), (2, 4, 1, 2048), (1, 3, 2, 2049),
          (1, 8, 7, 500), (1, 8, 8, 4100), (1, 10, 6, 97), (1, 16, 4, 16), (1, 2, 1, 1023)]  # fmt: skip


def make(batch_size, topk, level, vocab_size, *, dtype=torch.float32, mapped=False, device="cpu"):
    rows = batch_size * (topk if level else 1)
    values = {"logits": torch.randn(rows, vocab_size).mul(3).to(dtype), "scores": None, "ancestors": None}
    if level:
        values["scores"] = -torch.rand(batch_size, topk).sort(dim=1).values
        values["ancestors"] = torch.randint(-(2**63), 2**63 - 1, (batch_size, topk, -(-level * topk // 64)))
    # a draft vocabulary with holes: target ids ascend with draft ids
    values["draft_to_target"] = torch.randint(0, 3, (vocab_size,)).cumsum(0) if mapped else None
    values = {key: value if value is None else value.to(device) for key, value in values.items()}
    return values | {"topk": topk, "level": level}


MAY_SPILL = {"K=16 fp16"}  # the 256 candidates of a request


def ahead_of_time_cases():
    yield "K=8 first", make(2, 8, 0, 1000, dtype=torch.bfloat16)
    yield "K=8", make(1, 8, 3, 128256, dtype=torch.bfloat16, mapped=True)
    yield "K=1 fp32", make(2, 1, 3, 1000)
    yield "K=16 fp16", make(1, 16, 1, 1000, dtype=torch.float16)


size_sweep = sweep(lambda batch_size: make(batch_size, 4, 2, 1000))


def check(values, case):
    return check_operation(PATH, values, case=case, close=FLOATS)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    check(make(*shape, device=device), str(shape))


SPECIAL = {
    "all -inf": lambda logits: logits.fill_(-float("inf")),
    "all NaN": lambda logits: logits.fill_(float("nan")),
    "fewer finite than topk": lambda logits: logits[:, 3:].fill_(-float("inf")),
    "NaN among them": lambda logits: logits[:, ::2].fill_(float("nan")),
    "two +inf": lambda logits: logits[:, 5:7].fill_(float("inf")),
    "one dead row": lambda logits: logits[-1].fill_(float("nan")),
    "zeros of both signs": lambda logits: logits.zero_()[:, 1::3].neg_(),
}


@OVERFLOWS
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("level", [0, 1])
def test_special_values(special, level, device):
    values = make(1, 4, level, 1100, device=device)
    SPECIAL[special](values["logits"])
    check(values, special)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@OVERFLOWS
def test_infinite_and_largest_finite(dtype, device):
    """+inf is the largest finite fp32: above the largest of a narrower type, equal to that of its own."""
    values = make(1, 2, 1, 70, dtype=dtype, device=device)
    values["logits"][:, 3] = torch.finfo(dtype).max
    values["logits"][0, 40] = values["logits"][1, 2] = float("inf")
    check(values, str(dtype))


def test_one_group_holds_the_best(device):
    """All of the best in one group, one in each group, and ties of a group's maximum with its neighbour's."""
    values = make(1, 4, 1, 2100, device=device)
    values["logits"][0, 1056:1062] = 50.0
    values["logits"][1, 31::32] = 50.0
    values["logits"][2, 1023:1026] = 50.0
    values["logits"][3, 5] = values["logits"][3, 2099] = 50.0
    check(values, "groups")


def test_dead_beams(device):
    values = make(2, 2, 1, 100, device=device)
    values["scores"][0] = -float("inf")
    values["scores"][1, 1] = float("nan")
    check(values, "beams of score -inf and NaN")


def test_a_draft_written_into_one_buffer_builds_a_tree(device):
    """Three levels, candidates in slices of one buffer, reranked and linked."""
    batch_size, topk, spec_steps, vocab_size, num_nodes = 2, 3, 3, 60, 12
    num_candidates = topk + (spec_steps - 1) * topk * topk
    all_scores = torch.empty(batch_size, num_candidates, device=device)
    all_tokens = torch.empty(batch_size, num_candidates, dtype=torch.int64, device=device)
    parent_list = torch.full((batch_size, 1 + (spec_steps - 1) * topk), -1, device=device)
    scores = ancestors = None
    start = 0
    for level in range(spec_steps):
        width = topk * (topk if level else 1)
        values = make(batch_size, topk, level, vocab_size, device=device) | {"scores": scores, "ancestors": ancestors}
        out = eagle_kernels.reference.ops.tree.select_top_k_tokens.select_top_k_tokens(**values)
        columns = slice(start, start + width)
        out = out._replace(candidate_scores=all_scores[:, columns], candidate_tokens=all_tokens[:, columns])
        eagle_kernels.select_top_k_tokens(**values, out=out)
        if level < spec_steps - 1:
            parent_list[:, 1 + level * topk : 1 + (level + 1) * topk] = out.parent_slots
        scores, ancestors, start = out.scores, out.ancestors, start + width
    kept = eagle_kernels.raw.organize_draft_results(all_scores, all_tokens, num_verify_tokens=num_nodes)
    zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
    tree = eagle_kernels.raw.build_tree(
        zeros, parent_list, *kept, zeros, topk=topk, spec_steps=spec_steps, num_verify_tokens=num_nodes
    )
    depth = tree.positions.view(batch_size, num_nodes)
    assert (depth[:, 1:] > 0).all()
    # a beam of the last level sees one slot of every level, and so does a node of that depth (and the root)
    assert all(bin(word).count("1") == spec_steps for word in ancestors.flatten().tolist())
    for word, node_depth in zip(tree.tree_mask.flatten().tolist(), depth.flatten().tolist()):
        assert bin(word).count("1") == node_depth + 1
