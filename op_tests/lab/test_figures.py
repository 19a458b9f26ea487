"""Pictures of an experiment, read off their artists: what is drawn is what was measured."""

import math

import pytest

from bench.harness import results
from bench.lab import figures as drawn
from bench.lab import records, report
from bench.lab.log import read_lines

from .made_cells import cell, experiment, kernels


@pytest.fixture
def figures():
    pytest.importorskip("matplotlib")
    from bench.lab import figures

    return figures


def test_the_map_has_the_speed_up_of_each_cell(figures):
    cells = records.newest_cells([*experiment(domains=("code", "conversation")), cell(K=8, method="tree", speedup=0.5)])
    axes = figures.speedup_map(cells, "title\nabout").axes[0]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    known = {(c["config"]["prompt_domain"], c["config"]["method"], c["config"]["K"]): c["speedup"] for c in cells}
    labels = axes.get_yticklabels(), axes.get_xticklabels()
    rows, columns = ([each.get_text() for each in of_axis] for of_axis in labels)
    assert rows == ["code · chain", "code · tree", "conversation · chain", "conversation · tree"]
    assert columns == ["1", "2", "4", "8"] and len(shown) == 13
    colours = axes.collections[0].get_array()
    for (x, y), text in shown.items():
        speedup = known[(*rows[int(y)].split(" · "), int(columns[int(x)]))]
        assert text == f"{speedup:.2f}×" and colours[int(y), int(x)] == pytest.approx(math.log2(speedup))
    assert axes.collections[0].get_clim() == (-colours.max(), colours.max())  # 1 has the middle colour


def test_acceptance_by_domain_and_depth(figures):
    cells = records.newest_cells(experiment())
    panels = figures.acceptance(cells, "title\nabout").axes
    assert [axes.get_title("left") for axes in panels] == ["chain K=4", "tree K=4"]
    for axes, method in zip(panels, ("chain", "tree")):
        for line in axes.lines:
            made = cell(method=method, K=4, domain=line.get_label())
            assert list(line.get_xdata()) == [1, 2, 3, 4] and list(line.get_ydata()) == made["accepted_per_depth"]
        assert [line.get_label() for line in axes.lines] == ["code", "conversation", "summarization"]


def test_latency_of_plain_decoding_and_of_the_fastest_k(figures):
    slow = cell(K=4, speedup=0.01)
    cells = records.newest_cells([*experiment(domains=("code",), methods=("chain",)), slow])
    (axes,) = figures.latency(cells, "title\nabout").axes
    assert [line.get_label() for line in axes.lines] == ["plain", "chain K=2"]
    assert list(axes.lines[1].get_xdata()) == cell(K=2)["inter_token_ms"]
    assert axes.lines[1].get_ydata()[50] == 0.5
    assert axes.get_xlim()[1] == pytest.approx(1.05 * cell(K=None)["inter_token_ms"][99])


def test_phases_and_what_is_left_are_the_step(figures):
    twice = {name: 3 * time_ms for name, time_ms in cell(K=2)["phase_ms"].items()}
    cells = [cell(K=2), cell(K=2, domain="conversation", phase_ms=twice, step_ms=40.0), cell(K=4, phase_ms={})]
    (axes,) = figures.breakdown(records.newest_cells(cells), "title\nabout").axes
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    mean_ms = (cell(K=2)["step_ms"] + 40.0) / 2
    assert widths["draft"] == [4.0] and widths["verify"] == [14.0]
    assert sum(width for (width,) in widths.values()) == pytest.approx(mean_ms)


def test_the_crossover_is_where_both_laws_meet(figures):
    plain = {size: 100.0 * size for size in (1, 8, 64)}
    curve = {size: 400.0 * size**0.5 for size in (1, 8, 64)}
    assert records.crossover(curve, plain) == pytest.approx((16.0, 1600.0))
    assert records.crossover(plain, plain) is None and records.crossover({1: 101.0, 8: 801.0}, plain) is None
    assert records.crossover({2: 1.0}, plain) is None  # at no batch that both were measured at
    (axes,) = figures.throughput({"plain": plain, "tree": curve}, "title\nabout").axes
    rings = [line for line in axes.lines if line.get_gid() == "crossover-1"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in rings] == [pytest.approx((16.0, 1600.0))]
    labels = {line.get_label() for line in axes.lines if not line.get_label().startswith("_")}
    assert labels == {"plain", "tree, crosses at 16"}


def test_throughput_by_preset_and_by_cell():
    about = {"section": "throughput", "shape": "8b"}
    lines = [
        about | {"provider": provider, "case": f"B={size}", "tokens_per_s": speed}
        for provider, size, speed in (
            ("plain", 2, 9.0), ("plain", 1, 5.0), ("plain", 1, 6.0), ("tree", 1, 8.0), ("tree", 2, 8.5),
            ("few", 1, 1.0),
        )
    ]  # fmt: skip
    assert records.preset_curves(lines) == {"8b": {"plain": {1: 6.0, 2: 9.0}, "tree": {1: 8.0, 2: 8.5}}}
    cells = records.newest_cells(experiment(batch_sizes=(1, 8), methods=("chain",)))
    ((setting, curves),) = records.cell_curves(cells).items()
    assert (setting.pair, setting.batch_size) == ("embedded", 0) and set(curves) == {"plain", "chain K=4"}
    of_domains = [c["tokens_per_second"] for c in cells if records.label_of(c) == "chain K=4"]
    assert curves["chain K=4"][1] == pytest.approx(sum(of_domains[:3]) / 3) and list(curves["plain"]) == [1, 8]
    assert records.cell_curves(records.newest_cells(experiment())) == {}


def test_the_roof_is_the_bandwidth_or_the_shortest_kernel(figures):
    lines = kernels()
    assert figures.roof(lines) == ("large read", 3000.0)
    assert figures.roof([line | {"read_gb_per_s": None} for line in lines]) == ("large copy", pytest.approx(2500.0))
    assert figures.roof([line | {"gpu": "NVIDIA H200"} for line in lines]) == ("memory by its data sheet", 4800.0)
    (axes,) = figures.roofline(lines, "title\nabout").axes
    of_label = {line.get_label(): line for line in axes.lines}
    assert list(of_label["tree"].get_xdata()) == [1000, 10**6] and list(of_label["tree"].get_ydata()) == [0.25, 250.0]
    roof = of_label["large read, 3000 GB/s"]
    # 4 µs is the shortest: 1000 bytes reach 0.25 GB/s, and 12 MB are enough for all of the bandwidth
    assert list(roof.get_xdata()) == pytest.approx([1000, 1.2e7, 1e8])
    assert list(roof.get_ydata()) == pytest.approx([0.25, 3000.0, 3000.0])


@pytest.mark.parametrize("gpu", ["NVIDIA_H100_80GB_HBM3", "NVIDIA_H200"])
def test_no_point_lies_above_the_roof(gpu):
    """Of all that the results hold."""
    folder = results.DIRECTORY / gpu
    lines = [line for file in folder.glob("*.jsonl") for line in read_lines(file)]
    lines = report.cold_kernels(line for line in lines if line.get("provider") == "eagle_kernels")
    _, ceiling = drawn.roof(lines)
    above = [(line["op"], line["case"]) for line in lines if drawn.cold_gb_per_s(line) > ceiling]
    assert len(lines) >= 40 and above == []
