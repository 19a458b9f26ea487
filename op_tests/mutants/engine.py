"""Bugs of the engine, which whole texts see, or drafts, or the noise that was drawn."""

from __future__ import annotations

from .mutant import ENGINE, Mutant

_DRAFTER = ENGINE + "drafters/sampled_drafter.py"


def _law(*cases: str) -> list[str]:
    name = "op_tests/engine/test_verify_strategies.py::test_lossless_strategies_keep_the_law"
    return [f"{name}[{case}]" for case in cases]


def _inspected(*cases: str) -> list[str]:
    name = "op_tests/engine/test_noise_keys.py::test_no_noise_is_inspected_twice"
    return [f"{name}[{case}]" for case in cases]


MUTANTS = [
    Mutant(
        "the last token of the prompt before",
        [(ENGINE + "serve/prompts.py", "(*inner, size - 1)", "(*inner, size - 2)")],
        ["op_tests/engine/serve/test_prompts.py::test_prompts_that_wait_together_are_read_at_once"],
    ),
    Mutant(
        "scores of prompts after the mark",
        [(ENGINE + "serve/prompts.py", "scores = [_score_part(*part) for part in parts]",
          "scores = (_score_part(*part) for part in parts)")],
        ["op_tests/engine/serve/test_prompts.py::test_scores_of_prompts_are_queued_before_the_first_token_is_marked"],
    ),
    Mutant(
        "a node with the logits of its row",
        [(ENGINE + "step/packed_nodes.py", "index_copy_(0, self._node, values)",
          "index_copy_(0, self._node[0] + torch.arange(len(values), device=values.device), values)")],
        ["op_tests/engine/test_ragged_trees.py::test_texts_are_those_of_plain_decoding"],
    ),
    Mutant(
        "a prompt with the logits of the step beside it",
        [(ENGINE + "step/stepper.py", "num_nodes + prompts.lasts", "prompts.lasts")],
        ["op_tests/engine/serve/test_joint_steps.py::test_prompts_that_join_are_read_in_the_steps_of_others"],
    ),
    Mutant(
        "a queue of prompts that never ends",
        [(ENGINE + "serve/reading.py", "len(unread) == 1 and num_rows", "len(unread) >= 1 and num_rows")],
        ["op_tests/engine/serve/test_joint_steps.py::test_where_prompts_are_read"],
    ),
    Mutant(
        "a stale cost table",
        [(ENGINE + "step/choice.py", "other._tokens, other._rows_seen = self._tokens, self._rows_seen",
          "other._tokens, other._rows_seen, other._step_ms = self._tokens, self._rows_seen, self._step_ms")],
        ["op_tests/engine/serve/test_joint_steps.py::test_times_beside_prompts_are_kept_apart"],
    ),
    Mutant(
        "later drafts with the noise of the first",
        [(_DRAFTER, "(batch.lengths + 1 + depth)", "(batch.lengths + depth)")],
        _law("chain, warm") + _inspected("rejection, tree"),
    ),
    Mutant(
        "later drafts at temperature 1",
        [(_DRAFTER, "position, seeds, warm, beam", "position, seeds, torch.ones_like(warm), beam")],
        _law("chain, cold", "tree, cold"),
    ),
    Mutant(
        "a tree that goes by its drafts",
        [(_DRAFTER, "self._parents.repeat(size, 1), self._config",
          "torch.where(tokens == tokens[:, -1:], 0, self._parents.repeat(size, 1)), self._config")],
        _inspected("rejection, tree"),
    ),
]  # fmt: skip
