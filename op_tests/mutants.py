"""Planted bugs: `python -m op_tests.mutants [--list] [--only NAME] [--third] [--alike]`.

A bug that kernel and reference share cannot show where one is compared with the other: what sees it is a law test. Each
mutant is a list of edits, made in a copy of the repository, in the kernel and the reference alike; then only the law
tests of that op run there, and one of them must fail by an assertion. Three more kinds: a bug in the kernel alone,
which kernel = reference must see, one in the engine or the plug-in, which a law of whole texts or the recorder of noise
keys must see, and one in the enumeration, which a negative control must see.

Printed is what caught each mutant. Exit code 1: one survived, or its tests broke instead of failing, or an edit no
longer applies (test_mutants.py says that too), in which case the mutant follows the code. `--alike` also checks that
kernel = reference does not see the bugs planted in both, so that it was the law test that was needed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("eagle_kernels", "reference", "op_tests", "bench", "pyproject.toml", "README.md")
SECONDS = 180

KERNELS = "eagle_kernels/ops/verify/"
SHARED = KERNELS + "shared/"
REFERENCES = "reference/ops/verify/"
ENGINE = "eagle_kernels/engine/"
SGLANG = "eagle_kernels/integrations/sglang/"
SEEDED = ["op_tests/integrations/test_sglang_sampling.py::test_one_seed_gives_one_text"]
CHUNKS = "eagle_kernels/ops/attention/shared/chunks.py"
DRAFTER = ENGINE + "drafters/sampled_drafter.py"
TESTS = "op_tests/ops/verify/"
LAWS = "op_tests/test_laws.py::"


class Mutant(NamedTuple):
    """edits: (file, old text, new text); every occurrence is replaced, and there must be one."""

    name: str
    op: str
    edits: list[tuple[str, str, str]]
    tests: list[str]
    kind: str = "both"  # or "kernel", "engine" or "enumeration"


def both(
    name: str, op: str, tests: list[str], kernel: list[tuple[str, ...]], reference: list[tuple[str, ...]]
) -> Mutant:
    """A mutant in kernel and reference; edits of two texts are in the op's own files."""
    edits = [edit if len(edit) == 3 else (f"{KERNELS}{op}.py", *edit) for edit in kernel]
    edits += [edit if len(edit) == 3 else (f"{REFERENCES}{op}.py", *edit) for edit in reference]
    return Mutant(name, op, edits, tests)


def of(op: str, *names: str) -> list[str]:
    return [f"{TESTS}test_{op}.py::{name}" for name in names]


def _one_stream(name: str) -> list[tuple[str, str, str]]:
    streams = {"DRAFT": 1, "ACCEPT": 2, "RESIDUAL": 3}
    return [(name, f"\nSTREAM_{stream} = {number}\n", f"\nSTREAM_{stream} = 0\n") for stream, number in streams.items()]


def engine_law(*cases: str) -> list[str]:
    name = "op_tests/engine/test_verify_strategies.py::test_lossless_strategies_keep_the_law"
    return [f"{name}[{case}]" for case in cases]


def inspected(*cases: str) -> list[str]:
    name = "op_tests/engine/test_noise_keys.py::test_no_noise_is_inspected_twice"
    return [f"{name}[{case}]" for case in cases]


def rounds(*schemes: str) -> list[str]:
    return [f"{LAWS}test_rounds_of_drafting_and_verifying[{scheme}]" for scheme in schemes]


_COINS, _CHAIN, _SAMPLED = "verify_tree_coins", "verify_chain", "verify_tree_sampled"
_REJECTION, _TRAVERSAL, _CHILDREN = "verify_tree_rejection", "verify_tree_traversal", "sample_children"
_COINS_LAW = of(_COINS, "test_the_law_is_the_target_s", "test_joint_law_of_the_emitted_tokens[binary]")
_CHAIN_LAW = of(_CHAIN, "test_the_law_is_exactly_the_targets") + rounds("standard", "block")
_REJECTION_LAW = of(_REJECTION, "test_the_law_is_the_targets") + rounds("rejection, without", "rejection, with")
_TRAVERSAL_LAW = of(_TRAVERSAL, "test_the_law_is_exactly_the_targets") + rounds("traversal")
_NOISE = [
    f"op_tests/test_random.py::{name}"
    for name in ("test_philox_known_answers", "test_neighbouring_keys_are_independent[upper halves of seeds]")
]
_GOLDEN = [
    f"op_tests/test_golden.py::test_tokens_of_ops[{case}]" for case in ("sample_from_logits", "verify_chain, block")
]
_NOISE_LAW = [f"{LAWS}test_a_residual_has_noise_of_its_own"]
_PARAMETERS_LAW = [f"{LAWS}test_every_parameter"]
_MIN_P_OF_ONE = "(weight == 1.0) | (weight / weight.sum(1, keepdim=True) >= min_p[:, None])"
_OWN_DRAFT_TEMPERATURE = "draft_temperature = temperature if draft_temperature is None else draft_temperature"

MUTANTS = [
    # `<=` for `<` has no width: what sees it is a coin on the edge
    both(
        "<= for <, coins", _COINS, of(_COINS, "test_comparisons_are_strict"),
        [("is_covered = coin < tl", "is_covered = coin <= tl")],
        [("coin < mass / acc", "coin <= mass / acc")],
    ),
    both(
        "<= for <, chain", _CHAIN, of(_CHAIN, "test_coins_at_the_ends"),
        [("(coin * draft_prob < target", "(coin * draft_prob <= target"), ("(coin < chance)", "(coin <= chance)")],
        [("accepted) < ratios", "accepted) <= ratios"), ("index - 1) < chance", "index - 1) <= chance")],
    ),
    both(
        "<= for <, rejection", _REJECTION, of(_REJECTION, "test_the_coin_is_compared_strictly"),
        [(SHARED + "rejection_steps.py", "(coin * draft_prob < target_prob)", "(coin * draft_prob <= target_prob)")],
        [("child) < target[token]", "child) <= target[token]")],
    ),
    both(
        "<= for <, traversal", _TRAVERSAL, of(_TRAVERSAL, "test_coins_at_the_ends"),
        [(SHARED + "traversal_steps.py", "(coin >= acceptance)", "(coin > acceptance)")],
        [("node) < acceptance[node]", "node) <= acceptance[node]")],
    ),
    both(
        "a coin for all levels, coins", _COINS, _COINS_LAW,
        [("coin = tl.where(is_accepted, child_coin, coin)", "coin = tl.where(is_accepted, coin, coin)")],
        [("coin_at(path[-1])", "coin_at(0)")],
    ),
    both(
        "a coin for all levels, chain", _CHAIN, _CHAIN_LAW,
        [
            ("request * NUM_TOKENS + 1 + draft, mask=is_draft", "request * NUM_TOKENS + 1 + 0 * draft, mask=is_draft"),
            ("tl.int64), position, draft)", "tl.int64), position, 0 * draft)"),
        ],
        [
            ("(positions[accepted + 1], accepted)", "(positions[1])"),
            ("(positions[index], index - 1)", "(positions[1])"),
        ],
    ),
    both(
        "a coin found again in the next round, chain", _CHAIN,
        of(_CHAIN, "test_the_law_of_two_rounds_is_exactly_the_targets"),
        [("tl.int64), position, draft)", "tl.int64), position, 0 * draft)")],
        [
            ("(positions[accepted + 1], accepted)", "(positions[accepted + 1])"),
            ("(positions[index], index - 1)", "(positions[index])"),
        ],
    ),
    both(
        "a coin found again in the next round, traversal", _TRAVERSAL,
        of(_TRAVERSAL, "test_the_law_of_two_rounds_is_exactly_the_targets"),
        [(SHARED + "traversal_steps.py", "accepted * _NODES + current)", "current)")],
        [("(len(path) - 1) * 65536 + node)", "node)")],
    ),
    both(
        "a coin for all children, rejection", _REJECTION, _REJECTION_LAW,
        [(SHARED + "rejection_steps.py", "accept_coin(node.seed, tl.load(node.positions + child), child)",
          "accept_coin(node.seed, tl.load(node.positions), 0)")],
        [("draws.uniform(positions[child], child)", "draws.uniform(positions[0], 0)")],
    ),
    both(
        "residual not subtracted, coins", _COINS, _COINS_LAW,
        [(SHARED + "inverse_cdf.py", "tl.where(index == token, 0.0, probs)", "tl.where(index < 0, 0.0, probs)")],
        [("left[[token for token in rejected if 0 <= token < len(probs)]] = 0", "left[:0] = 0")],
    ),
    both(
        "residual not subtracted, chain", _CHAIN, _CHAIN_LAW,
        [("tl.maximum(share * target - draft_prob, 0.0)", "share * target")],
        [("weights, _ = subtract(weights, draft_probs[accepted], share)", "weights = share * weights")],
    ),
    both(
        "residual not subtracted, rejection", _REJECTION, _REJECTION_LAW,
        [
            (SHARED + "rejection.py", "tl.maximum(target - state.scale * draft, 0.0)", "tl.maximum(target, 0.0)"),
            (SHARED + "rejection.py", "tl.where(is_gone, 0.0, target)", "tl.where(is_gone, target, target)"),
        ],
        [("left = (target - draft).clamp(min=0)", "left = target")],
    ),
    both(
        "no renormalisation, rejection", _REJECTION, _REJECTION_LAW,
        [(SHARED + "rejection.py", "has_left, new_mass, state.mass", "has_left, 1.0, state.mass")],
        [("target = left / left.sum()", "target = left")],
    ),
    both(
        "q not renormalised, traversal", _TRAVERSAL, _TRAVERSAL_LAW,
        [(SHARED + "deletions.py", "(ids == token, 0.0, draft * scale)", "(ids == token, 0.0, draft)")],
        [("reference/residual.py", "left * (1.0 / mass) if mass > 0 else torch.zeros_like(left)", "left")],
    ),
    both(
        "a duplicate counts twice, coins", _COINS, of(_COINS, "test_the_law_is_the_target_s"),
        [("tl.where(is_repeated, 0.0, _pick_float(probs, is_child))", "_pick_float(probs, is_child)")],
        [("0 <= token < len(probs) and token not in rejected", "0 <= token < len(probs)")],
    ),
    # the draft's temperature is ignored where children are drawn, or where they are verified
    both(
        "draft before warping, sampler", _CHILDREN, of(_CHILDREN, "test_law_of_ordered_pairs"),
        [
            ("scale, is_sampled = read_temperature(temperature)", "scale, is_sampled = 1.0, temperature >= 1e-5"),
            ("scale, _ = read_temperature(tl.load(temperature_ptr + row))", "scale = 1.0"),
        ],
        [("scaled_logits(draft_logits, temperature)", "scaled_logits(draft_logits, torch.ones_like(temperature))")],
    ),
    both(
        "draft before warping, rejection", _REJECTION, _REJECTION_LAW,
        [
            (SHARED + "prepare_pair.py", 'values["temperature"] if draft_temperature is None else draft_temperature',
             'values["temperature"]'),
        ],
        [(_OWN_DRAFT_TEMPERATURE, "draft_temperature = temperature")],
    ),
    both(
        "draft before warping, chain", _CHAIN, _CHAIN_LAW,
        [
            (SHARED + "prepare_pair.py", 'values["temperature"] if draft_temperature is None else draft_temperature',
             'values["temperature"]'),
        ],
        [(_OWN_DRAFT_TEMPERATURE, "draft_temperature = temperature")],
    ),
    # (a coin and a residual draw of one key have nothing to do with each other: a hash lies between)
    both(
        "one stream for all noise", _REJECTION, _NOISE_LAW,
        _one_stream(SHARED + "random.py"), _one_stream("reference/random.py"),
    ),
    both(
        "draft and residual share a stream", _CHAIN, _NOISE_LAW,
        [(SHARED + "random.py", "\nSTREAM_RESIDUAL = 3\n", "\nSTREAM_RESIDUAL = 1\n")],
        [("reference/random.py", "\nSTREAM_RESIDUAL = 3\n", "\nSTREAM_RESIDUAL = 1\n")],
    ),
    both(
        "position not + 1", _SAMPLED, of(_SAMPLED, "test_joint_law_of_the_emitted_tokens[{}]"),
        [
            (SHARED + "sampled_levels.py", "tl.load(positions_ptr + node).to(tl.int64) + 1",
             "tl.load(positions_ptr + node).to(tl.int64)"),
            ("position_offset=1", "position_offset=0"),
        ],
        [("positions + 1", "positions"), ("positions[row] + 1", "positions[row]")],
    ),
    both(
        "min-p relative to 1", _SAMPLED, _PARAMETERS_LAW,
        [(SHARED + "filters.py", "keep &= weight >= tl.minimum(filters.min_p, 1.0)",
          "keep &= (weight == 1.0) | (weight / tl.sum(weight) >= tl.minimum(filters.min_p, 1.0))"),
         (SHARED + "edge_search.py", "tl.where(filters.min_p > 0.0, tl.minimum(filters.min_p, 1.0), 0.0)",
          "tl.minimum(filters.min_p * row_mass(summary.chunk_max, summary.chunk_sum, largest, VOCAB_SIZE), 1.0)")],
        [("reference/sampling.py", "(weight >= min_p.clamp(max=1.0)[:, None])", _MIN_P_OF_ONE)],
    ),
    both(
        "penalties forget the drafts before", _SAMPLED, _PARAMETERS_LAW,
        [(SHARED + "logits.py", "count += (ids == ", "count += 0 * (ids == ")],
        [("own_counts[0, token] += 1", "own_counts[0, token] += 0")],
    ),
    both(
        "a node's first draw for another's second", _CHILDREN,
        of(_CHILDREN, "test_nodes_of_one_request_draw_independently"),
        [("node + child * _NODES", "node + child")],
        [("nodes.to(torch.int64) + child * 65536", "nodes.to(torch.int64) + child")],
    ),
    both(
        "greedy below 1e-3", _SAMPLED, ["op_tests/test_temperatures.py::test_where_greedy_begins"],
        [(SHARED + "rows.py", "GREEDY_TEMPERATURE = 1e-5", "GREEDY_TEMPERATURE = 1e-3")],
        [("reference/sampling.py", "BELOW = 1e-5", "BELOW = 1e-3")],
    ),
    both(
        "the upper half of seeds is ignored", _CHILDREN, _NOISE + _GOLDEN,
        [(SHARED + "random.py", "seed.to(tl.int64).to(tl.uint64)", "seed.to(tl.uint32).to(tl.uint64)")],
        [("reference/random.py", "(seed >> 32) & _MASK", "seed & 0")],
    ),
    both(
        "Philox of six rounds", _CHILDREN, _NOISE + _GOLDEN,
        [(SHARED + "random.py", "(position * 0 + draw).to(tl.uint32),", "(position * 0 + draw).to(tl.uint32), 6,")],
        [("reference/random.py", "range(10)", "range(6)")],
    ),
    Mutant(
        "a tile's last lane is not masked", _COINS,
        [(SHARED + "inverse_cdf.py", "(rejected < start + BLOCK)", "(rejected < start + BLOCK - 1)")],
        ["op_tests/test_tile_edges.py::test_coins"], "kernel",
    ),
    Mutant(
        "a path's keys in another order", "tree_attention",
        [("eagle_kernels/ops/attention/shared/paths.py", "place = start + lane",
          "place = start + BLOCK_KEY - 1 - lane")],
        ["op_tests/ops/attention/test_tree_attention.py::test_deterministic_nodes_are_plain_decoding"], "kernel",
    ),
    Mutant(
        "a block planned twice", "gqa_decode",
        [(CHUNKS, "begin, share_stop = cut_slot(first, stop, block - first_block, BLOCK_KEY), stop",
          "begin, share_stop = cut_slot(first, stop, block - first_block - 2, BLOCK_KEY), stop")],
        ["op_tests/ops/attention/test_gqa_decode.py::test_chunks"], "kernel",
    ),
    Mutant(
        "the keys past a plan are lost", "plan_attention",
        [(CHUNKS, "            if not is_last:\n", "            if True:\n")],
        ["op_tests/ops/attention/test_plan_attention.py::test_no_key_is_lost_by_a_plan_of_other_lengths"], "kernel",
    ),
    Mutant(
        "the last token of the prompt before", "plan",
        [(ENGINE + "serve/prompts.py", "(*inner, size - 1)", "(*inner, size - 2)")],
        ["op_tests/engine/serve/test_prompts.py::test_prompts_that_wait_together_are_read_at_once"], "engine",
    ),
    Mutant(
        "scores of prompts after the mark", "plan",
        [(ENGINE + "serve/prompts.py", "scores = [_score_part(*part) for part in parts]",
          "scores = (_score_part(*part) for part in parts)")],
        ["op_tests/engine/serve/test_prompts.py::test_scores_of_prompts_are_queued_before_the_first_token_is_marked"],
        "engine",
    ),
    Mutant(
        "a node taken without its parent", "prune_trees",
        [("eagle_kernels/ops/tree/prune_trees.py", "is_best & sees_root & (num_lost == 0)", "is_best & sees_root")],
        ["op_tests/ops/tree/test_prune_trees.py::test_matches_reference"], "kernel",
    ),
    Mutant(
        "a node with the logits of its row", "plan",
        [(ENGINE + "step/packed_nodes.py", "index_copy_(0, self._node, values)",
          "index_copy_(0, self._node[0] + torch.arange(len(values), device=values.device), values)")],
        ["op_tests/engine/test_ragged_trees.py::test_texts_are_those_of_plain_decoding"], "engine",
    ),
    Mutant(
        "a prompt with the logits of the step beside it", "plan",
        [(ENGINE + "step/stepper.py", "num_nodes + prompts.lasts", "prompts.lasts")],
        ["op_tests/engine/serve/test_joint_steps.py::test_prompts_that_join_are_read_in_the_steps_of_others"], "engine",
    ),
    Mutant(
        "a queue of prompts that never ends", "plan",
        [(ENGINE + "serve/reading.py", "len(unread) == 1 and num_rows", "len(unread) >= 1 and num_rows")],
        ["op_tests/engine/serve/test_joint_steps.py::test_where_prompts_are_read"], "engine",
    ),
    Mutant(
        "the last tile of a request is lost", "prefill_attention",
        [("eagle_kernels/ops/attention/prefill_attention.py", "return request, stop - 1 - number",
          "return request, tl.maximum(stop - 2 - number, 0)")],
        ["op_tests/ops/attention/test_prefill_attention.py::test_many_requests"], "kernel",
    ),
    Mutant(
        "a stale cost table", "plan",
        [(ENGINE + "step/choice.py", "other._tokens, other._rows_seen = self._tokens, self._rows_seen",
          "other._tokens, other._rows_seen, other._step_ms = self._tokens, self._rows_seen, self._step_ms")],
        ["op_tests/engine/serve/test_joint_steps.py::test_times_beside_prompts_are_kept_apart"], "engine",
    ),
    Mutant(
        "columns that no part has", "linear_decode",
        [("eagle_kernels/ops/nn/shared/many_rows.py", "(part + 1) * NUM_SECTIONS // NUM_PARTS",
          "(part + 1) * (NUM_SECTIONS // NUM_PARTS)")],
        ["op_tests/ops/nn/test_linear_decode.py::test_parts"], "kernel",
    ),
    Mutant(
        "the seed of the neighbour", "sglang",
        [(SGLANG + "verification.py", "seeds(batch.req_pool_indices)", "seeds(batch.req_pool_indices.roll(1))")],
        SEEDED, "engine",
    ),
    Mutant(
        "the penalties of the root for all nodes", "sglang",
        [(SGLANG + "verification.py", "penalize(tree, logits", "penalize((*tree[:2], tree[3], tree[3]), logits")],
        SEEDED, "engine",
    ),
    Mutant(
        "min-p left out", "sglang",
        [(SGLANG + "sampling.py", "info.min_ps if info.need_min_p_sampling else None", "None")],
        ["op_tests/integrations/test_sglang_sampling.py::test_filters_that_leave_one_token"], "engine",
    ),
    Mutant(
        "a token kept that top-p does not keep", "sample_from_logits",
        [(f"{SHARED}edge_search.py", "is_open = (filters.top_p < 1.0) & (rank >= edge)", "is_open = (edge > above)")],
        of("sample_from_logits", "test_filters_of_long_rows"), "kernel",
    ),
    Mutant(
        "bounds of flat rows with the maxima of other groups", "sample_from_logits",
        [(f"{SHARED}edge_search.py", "group // (LANES // GROUP)", "group // LANES")],
        of("sample_from_logits", "test_flat_rows_of_a_large_vocabulary"), "kernel",
    ),
    Mutant(
        "weighing that ends as if all of it lay below", "sample_from_logits",
        [(f"{SHARED}edge_search.py", "(read - above <= spare)", "(read <= spare)")],
        of("sample_from_logits", "test_flat_rows_of_a_large_vocabulary"), "kernel",
    ),
    Mutant(
        "mass carried to the next level", _COINS,
        [(f"{KERNELS}{_COINS}.py", "mass = tl.where(is_accepted, 0.0, mass)", "mass += 0.0")],
        of(_COINS, "test_matches_reference"), "kernel",
    ),
    Mutant(
        "later drafts with the noise of the first", _REJECTION,
        [(DRAFTER, "(batch.lengths + 1 + depth)", "(batch.lengths + depth)")],
        engine_law("chain, warm") + inspected("rejection, tree"), "engine",
    ),
    Mutant(
        "later drafts at temperature 1", _REJECTION,
        [(DRAFTER, "position, seeds, warm, beam", "position, seeds, torch.ones_like(warm), beam")],
        engine_law("chain, cold", "tree, cold"), "engine",
    ),
    Mutant(
        "a tree that goes by its drafts", _REJECTION,
        [(DRAFTER, "self._parents.repeat(size, 1), self._config",
          "torch.where(tokens == tokens[:, -1:], 0, self._parents.repeat(size, 1)), self._config")],
        inspected("rejection, tree"), "engine",
    ),
    Mutant(
        "distances are 0", _COINS,
        [("reference/enumeration.py", "return 0.5 * sum", "return 0.0 * sum")],
        [f"{LAWS}test_wrong_schemes_are_seen", *of(_COINS, "test_wrong_schemes_are_seen")], "enumeration",
    ),
    Mutant(
        "a wrong scheme is enumerated", _SAMPLED,
        [("op_tests/test_laws.py", "max(control(None))", 'max(control("bonus from p"))')],
        [f"{LAWS}test_the_controls_are_right_without_their_fault"], "enumeration",
    ),
    Mutant(
        "a wrong scheme is mended", _REJECTION,
        [(f"{TESTS}test_{_REJECTION}.py", 'if fault == "bonus from p" or target', "if target")],
        of(_REJECTION, "test_wrong_schemes_show"), "enumeration",
    ),
]  # fmt: skip


def stale(mutant: Mutant) -> list[str]:
    """The edits whose old text is in no file, as lines to print."""
    lines = []
    for name, old, _ in mutant.edits:
        if not (ROOT / name).exists() or old not in (ROOT / name).read_text(encoding="utf-8"):
            lines.append(f"{mutant.name}: the mutant is stale: {name} has no {old.strip()!r}")
    return lines


def plant(mutant: Mutant, folder: Path) -> None:
    """Copies the repository into an empty folder, and makes the edits there."""
    ignored = shutil.ignore_patterns("assets", "results", "*.egg-info")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    for name, old, new in mutant.edits:
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def failures(tests: list[str], folder: Path) -> tuple[list[str], str]:
    """The tests that failed by an assertion there, and what went wrong otherwise ("" for nothing)."""
    report = folder / "report.xml"
    options = ("-q", "-p", "no:cacheprovider", "--slow", f"--junitxml={report}")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired:
        return [], f"still running after {SECONDS} s"
    if result.returncode not in (0, 1):
        return [], result.stdout.decode()[-2000:]
    caught = []
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        failure = case.find("failure")
        message = "" if failure is None else failure.get("message", "")
        if message.startswith(("assert", "AssertionError")):
            caught.append(case.get("name"))
        elif failure is not None or case.find("error") is not None:
            return [], f"{case.get('name')} broke: {message.splitlines()[0] if message else 'an error'}"
    return caught, ""


def try_mutant(mutant: Mutant, is_alike_checked: bool) -> tuple[bool, str]:
    """Whether the mutant was caught, and the lines to print."""
    begin = time.monotonic()
    if stale(mutant):
        return False, "\n".join(stale(mutant))
    alike = [test for test in of(mutant.op, "test_matches_reference") if mutant.kind == "both"]
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        plant(mutant, Path(name))
        caught, problem = failures(mutant.tests, Path(name))
        if is_alike_checked and alike:
            seen, broken = failures(alike, Path(name))
            problem = problem or broken or ("kernel = reference sees it: " + summary(seen) if seen else "")
    text = f"{mutant.name} ({mutant.kind}, {time.monotonic() - begin:.0f} s): "
    if problem:
        return False, text + problem
    return bool(caught), text + (summary(caught) if caught else "SURVIVED " + ", ".join(mutant.tests))


def summary(tests: list[str]) -> str:
    """Names of tests, each with how many of its cases there are."""
    functions = [name.partition("[")[0] for name in tests]
    cases = {function: [name for name in tests if name.partition("[")[0] == function] for function in functions}
    return ", ".join(names[0] if len(names) == 1 else f"{name} ({len(names)})" for name, names in cases.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m op_tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="names, kinds and ops, without running anything")
    parser.add_argument("--only", metavar="NAME", help="mutants whose name contains this")
    parser.add_argument("--alike", action="store_true", help="also check that kernel = reference does not see them")
    parser.add_argument("--third", action="store_true", help="every third mutant, those of the day")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only is None or options.only in mutant.name]
    if options.third:
        chosen = chosen[datetime.date.today().toordinal() % 3 :: 3]
    if not chosen:
        parser.error(f"no mutant has {options.only!r} in its name")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name} ({mutant.kind}, {mutant.op})")
        return 0
    begin, num_caught = time.monotonic(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for is_caught, text in pool.map(lambda mutant: try_mutant(mutant, options.alike), chosen):
            num_caught += is_caught
            print(text, flush=True)
    print(f"{num_caught} of {len(chosen)} mutants caught in {time.monotonic() - begin:.0f} s")
    return int(num_caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
