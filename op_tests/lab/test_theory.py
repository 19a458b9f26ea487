"""The theory page: its numbers are computed, and the model predicts machines that are as it says."""

import re
from functools import partial

import pytest
import torch

from bench.lab import predictions, theory
from bench.lab.speedup import StepModel, expected_tokens, expected_tokens_of_chain, ideal_speedup

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
    """Within 10 %, what was measured on the 8B shape."""
    table = predictions.of_presets(predictions.measured_lines("generation"))
    errors = [float(text) for text in re.findall(r"([+-]\d+\.\d)% \|", table)]
    assert len(errors) > 10 and max(map(abs, errors)) <= 10.0, errors


def test_the_example_tells_right_from_wrong():
    steps = [theory._rejection_step, *(partial(theory._match_step, draft) for draft in (theory.DRAFT, torch.eye(3)))]
    assert all(theory._distance(theory.enumerate_outcomes(step)) < 1e-12 for step in steps)
    assert theory._distance(theory.enumerate_outcomes(theory._wrong_step)) > 0.01


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
