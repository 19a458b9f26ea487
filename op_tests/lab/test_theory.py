"""The theory page: its numbers are computed, and the model predicts machines that are as it says."""

from __future__ import annotations

import re

import pytest

from bench.apps.random_models import SHAPES
from bench.lab import predictions, theory
from bench.lab.predictions import intensity
from bench.lab.speedup import StepModel, expected_tokens, expected_tokens_of_chain, ideal_speedup
from op_tests.lab.made_cells import experiment

SIZES = (1, 2, 4, 8, 16, 32)
SINGLE, TREE = (1, 1, 2), (4, 3, 16)


@pytest.mark.slow
def test_the_page_holds_what_is_computed(tmp_path, capsys):
    assert theory.main(["--check"]) == 0
    page = tmp_path / "THEORY.md"
    page.write_text(theory.PAGE.read_text().replace("tokens a step | enumerated", "tokens | enumerated"))
    assert theory.main(["--check", "--page", str(page)]) == 1
    assert "is not up to date: run python -m bench.lab.theory" in capsys.readouterr().out
    assert theory.main(["--page", str(page)]) == 0
    assert page.read_text() == theory.PAGE.read_text()
    page.write_text("no marks")
    with pytest.raises(ValueError, match="THEORY.md must hold the marks intensity:begin and, after it, intensity:end"):
        theory.main(["--page", str(page)])


def test_committed_measurements_are_as_predicted():
    """Within 10 %, what was measured on the embedded pair and on the 8B shape."""
    for table in (predictions.of_cells(predictions.measured_cells()), predictions.of_presets(_of_presets())):
        errors = [float(text) for text in re.findall(r"([+-]\d+\.\d)% \|", table)]
        assert len(errors) > 10 and max(map(abs, errors)) <= 10.0, errors


def _of_presets() -> list[dict]:
    return predictions.measured_lines("generation")


def test_the_example_tells_right_from_wrong():
    steps = (theory._rejection_step, theory._match_step, theory._match_likeliest_step)
    assert all(theory._distance(theory._law_of(step)) < 1e-12 for step in steps)
    assert theory._distance(theory._law_of(theory._wrong_step)) > 0.01


def test_tokens_a_step():
    assert expected_tokens([]) == 1.0 and expected_tokens([1.0] * 4) == 5.0
    assert expected_tokens([0.5, 0.4]) == pytest.approx(1 + 0.5 + 0.2)
    for alpha in (0.0, 0.3, 0.9):
        assert expected_tokens_of_chain(alpha, 4) == pytest.approx((1 - alpha**5) / (1 - alpha))
    assert ideal_speedup(0.8, 4, 0.0) == expected_tokens_of_chain(0.8, 4)
    assert ideal_speedup(0.8, 4, 0.25) == expected_tokens_of_chain(0.8, 4) / 2


def machine() -> StepModel:
    """Whose rows cost about as much arithmetic as reading takes from 94 of them on."""
    target = tuple((size, 5.0 + 0.02 * size) for size in SIZES)
    return StepModel(target, tuple((2 * size, 0.5 + 0.001 * size) for size in SIZES[:-1]), 0.03, 0.06, 0.004)


def test_a_machine_is_found_from_its_steps():
    true = machine()
    plain = {size: true.plain_ms(size) for size in SIZES}
    single = {size: true.step_ms(SINGLE, size) for size in SIZES}
    large = (TREE, 64, true.step_ms(TREE, 64))
    model = StepModel.fit(plain, single, large, request_ms=0.03, draft_share=0.004 / 0.06)
    assert model.row_ms == pytest.approx(0.06) and model.draft_row_ms == pytest.approx(0.004)
    for size in (1, 3, 8, 40):
        for tree in (SINGLE, (1, 3, 4), TREE, (8, 5, 64)):
            assert model.step_ms(tree, size) == pytest.approx(true.step_ms(tree, size))
            assert model.speedup(tree, size, 3.0) == pytest.approx(3 * true.plain_ms(size) / true.step_ms(tree, size))
    trees = [((1, 3, 4), 2.6), ((8, 5, 64), 4.0)]
    assert [model.best(trees, size) for size in (1, 8, 400)] == [(8, 5, 64), (1, 3, 4), None]
    assert model.best([], 1) is None


def test_times_between_and_beyond_those_measured():
    model = machine()
    assert model.plain_ms(3) == pytest.approx((model.plain_ms(2) + model.plain_ms(4)) / 2)
    # 32 rows take 5.64 ms, 1.92 of it arithmetic's, if nothing overlapped
    assert model.plain_ms(64) - 64 * 0.03 == pytest.approx((5.64**2 - 1.92**2 + 3.84**2) ** 0.5)
    assert model.plain_ms(10_000) == pytest.approx(10_000 * (0.06 + 0.03), rel=1e-3)


def test_levels_between_those_that_were_looked_at():
    assert predictions.of_cells([]) == "Not measured yet."
    cells = experiment(k=(1, 2, 4, 8))
    for cell in cells:
        cell["step_ms"] -= 1.0  # made cells are as fast as their steps are without
        if cell["config"]["prompt_domain"] == "code":  # whose texts are so long that everything takes longer
            cell["step_ms"] *= 1.5
    text = predictions.of_cells(cells)
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.endswith("% |")]
    assert len(rows) == 3 * 2 * 2 and {row[2].strip() for row in rows} == {"2", "4"}
    assert all(row[-1].strip() in ("+0.0%", "-0.0%") for row in rows), text
    assert "| code | chain | 15.000 ms | 16.500 ms | 1500.0 µs | 0.0 µs |" in text
    assert "| summarization | tree | 10.000 ms | 11.000 ms | 1000.0 µs | 0.0 µs |" in text
    for cell in cells:
        if cell["config"]["K"] == 4:
            cell["speedup"] /= 1.25  # what K = 1 and 8 do not foresee
    assert predictions.of_cells(cells).count("+25.0%") == 6
    other = [dict(each) for each in cells]
    for each in other:
        if each["config"]["K"] == 4 and each["config"]["method"] == "chain":  # measured beside another plain decoding
            each["plain_tokens_per_second"] /= 2
    assert predictions.of_cells(other).count("+25.0%") == 3
    nothing = [each | {"speedup": None, "step_ms": 0.0} for each in cells]  # texts that end with their first token
    assert predictions.of_cells(nothing) == "Not measured yet."
    # two K are inputs both; without plain decoding nothing is as fast as anything
    assert predictions.of_cells([cell for cell in cells if cell["config"]["K"] in (None, 1, 8)]) == "Not measured yet."
    assert predictions.of_cells([cell for cell in cells if cell["config"]["K"]]) == "Not measured yet."


def test_rows_cost_what_they_do_where_drafts_cost_nothing():
    """n-gram's slope is the price of a row, which trees with 5, 21, 32 and 32 of them pay beside their levels."""
    cells = experiment(domains=("code",), methods=("ngram", "tree"), k=(1, 2, 4, 8))
    plain_ms = cells[0]["step_ms"]
    rows = {"ngram": {1: 2, 2: 3, 4: 5, 8: 9}, "tree": {1: 5, 2: 21, 4: 32, 8: 32}}
    for cell in cells[1:]:
        method, levels = cell["config"]["method"], cell["config"]["K"]
        cell["step_ms"] = 8.0 + 0.05 * rows[method][levels] + 0.7 * levels * (method == "tree")
        cell["speedup"] = cell["mean_accept_length"] * plain_ms / cell["step_ms"]
    text = predictions.of_cells(cells)
    assert text.count("+0.0%") + text.count("-0.0%") == 4, text
    assert "| code | ngram | 11.000 ms | 8.100 ms | 0.0 µs | 50.0 µs |" in text
    assert "| code | tree | 11.000 ms | 8.950 ms | 700.0 µs | 50.0 µs |" in text


def test_operations_a_byte():
    """One for each row and 2 bytes of weights, less what keys and values of a request take."""
    sizes, weights = SHAPES["llama-3.1-8b"], 7_504_658_432  # all but the embedding, and the norms
    token_bytes = 2 * 2 * 32 * 8 * 128
    attention = 4 * 32 * 32 * 128 * 600
    assert sizes["num_hidden_layers"] == 32 and sizes["num_key_value_heads"] == 8
    for requests, rows in ((1, 1), (1, 64), (32, 1)):
        wanted = requests * rows * (2 * weights + attention) / (2 * weights + requests * 600 * token_bytes)
        assert intensity("llama-3.1-8b", requests, rows) == pytest.approx(wanted, rel=1e-3)
    assert intensity("llama-3.1-8b", 1, 1) == pytest.approx(1.0, abs=0.05)
    assert "| 7 billion weights of fp16, 1 row, by data sheets | 1.0 | 333 | 0.3% |" in theory.intensities()
