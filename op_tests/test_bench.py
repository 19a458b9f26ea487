"""The benchmarks' own proof: tables come from results, rows from one run, and whoever cannot run says why."""

import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types

import pytest
import torch

from bench import in_turn, peers, plot, report, run, tune
from bench.apps import (
    APPS,
    drafters,
    generation,
    load,
    prefixes,
    quantised_steps,
    random_models,
    requests,
    suffix_cache,
)
from bench.apps.replay import edited_file
from bench.harness import Benchmark, Case, Floor, Unavailable, results, timing
from bench.harness.check import check_provider, expected_outputs
from bench.harness.declaration import declared
from bench.harness.trace import gaps_us, sums_us
from bench.lab.log import read_lines
from bench.lab.records import newest_cells
from bench.peers import sgl_kernel, sglang_caller, sglang_triton, wheel_files
from eagle_kernels import reference
from eagle_kernels.engine.drafters.suffix import SuffixCache
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.engine.models.layers.linear import Linear
from eagle_kernels.engine.models.layers.quantised import QuantisedLinear
from eagle_kernels.runtime import tuning

CPU = torch.device("cpu")
BENCHMARKS = {benchmark.op: benchmark for benchmark in declared()}
BUILD_TREE = BENCHMARKS["build_tree"]
GPU = "Some GPU 80GB"
README = (report.ROOT / "README.md").read_text(encoding="utf-8")
# files of results that sources name by their whole path (not of a commit); test_readme.py checks the links of pages
CITED = {
    cited
    for package in ("bench", "eagle_kernels", "op_tests", "reference")
    for file in (report.ROOT / package).rglob("*")
    if file.suffix in (".py", ".md", ".ipynb")
    for cited in re.findall(r"(?<!:)bench/results/(\w+/[\w./]*\w)", file.read_text(encoding="utf-8"))
}


def line(provider, graph_us, *, case="first", op="build_tree", **fields):
    times = {"graph_p50_us": graph_us, "cold_p50_us": 9.0, "eager_p50_us": 50.0}
    machine = {"gpu": GPU, "versions": {"torch": "2.0", "triton": "3.0"}, "commit": "abc"}
    return {"op": op, "case": case, "provider": provider, "share_of_copy": 0.5} | times | machine | fields


def app_line(op, section, case, provider, **numbers):
    about = {"op": op, "section": section, "case": case, "provider": provider}
    return about | {"shape": "llama", "gpu": GPU, "commit": "abc", "run": "a"} | numbers


@pytest.fixture(autouse=True)
def _committed_results(monkeypatch):
    """No test adds to them, on a GPU neither."""
    append, committed = results.append, results.DIRECTORY.resolve()

    def append_elsewhere(directory, line):
        assert directory.resolve() != committed
        append(directory, line)

    monkeypatch.setattr(results, "append", append_elsewhere)


@pytest.fixture
def folder(tmp_path):
    """A README with the two marks, and results of which the command line's `declared` knows two cases."""
    (tmp_path / "README.md").write_text("before\n<!-- bench:begin -->\n<!-- bench:end -->\nafter\n")
    (tmp_path / "results").mkdir()
    return tmp_path


def write(folder, *lines):
    for one in lines:
        results.append(folder / "results", one)


def rows(folder, *names):
    file = folder / "results" / GPU.replace(" ", "_") / "build_tree.jsonl"
    return {
        case.name: {provider: row[provider]["graph_p50_us"] for provider in row}
        for case, row in report.newest_rows(file, [Case(name, {}) for name in names])
    }


def test_the_newest_line_counts(folder):
    write(folder, line("eagle_kernels", 3.0, run="a"), line("torch", 30.0, run="a"))
    write(folder, line("eagle_kernels", 2.0, run="b"), line("torch", 40.0, run="b"), line("torch", 41.0, run="b"))
    write(folder, line("eagle_kernels", 7.0, case="second", run="a"), line("eagle_kernels", 1.0, case="gone", run="b"))
    expected = {"first": {"eagle_kernels": 2.0, "torch": 41.0}, "second": {"eagle_kernels": 7.0}}
    assert rows(folder, "first", "second", "never") == expected


def test_a_row_never_mixes_runs(folder):
    write(folder, line("eagle_kernels", 3.0, run="a"), line("torch", 30.0, run="a"))
    write(folder, line("eagle_kernels", 2.0, run="b"))
    assert rows(folder, "first") == {"first": {"eagle_kernels": 2.0}}
    write(folder, line("torch", 40.0, run="c"))  # a run without ours has nothing to compare with
    assert rows(folder, "first") == {"first": {"eagle_kernels": 2.0}}


def test_the_commit_parts_lines_without_a_run(folder):
    write(folder, line("eagle_kernels", 3.0, commit="1"), line("torch", 30.0, commit="1"))
    write(folder, line("eagle_kernels", 2.0, commit="2"), line("sgl_kernel", 20.0, commit="2"))
    assert rows(folder, "first") == {"first": {"eagle_kernels": 2.0, "sgl_kernel": 20.0}}


def test_committed_results_hold_the_newest_lines_alone(folder, monkeypatch):
    """A new line takes the place of the older one; another folder keeps both, for comparisons."""
    lines = [line("eagle_kernels", 3.0, run="a"), line("torch", 30.0, run="a"), line("eagle_kernels", 2.0, run="b")]
    profile = [{"op": "generation", "section": "profile", "case": case, "provider": kernel, "run": run, "gpu": GPU}
               for run, case, kernel in (("a", "B=1", "gone"), ("a", "B=1", "kept"), ("a", "B=8", "kept"),
                                         ("b", "B=1", "kept"), ("b", "B=1", "new"))]  # fmt: skip

    def kept():
        write(folder, *lines, *profile)
        files = (folder / "results" / GPU.replace(" ", "_") / f"{op}.jsonl" for op in ("build_tree", "generation"))
        return [[(one["case"], one["provider"], one["run"]) for one in read_lines(file)] for file in files]

    assert list(map(len, kept())) == [3, 5]
    monkeypatch.setattr(results, "DIRECTORY", folder / "results")
    assert kept() == [
        [("first", "eagle_kernels", "b"), ("first", "torch", "a")],
        [("B=1", "kept", "b"), ("B=8", "kept", "a"), ("B=1", "new", "b")],
    ]


def page(folder, gpu="Some_GPU_80GB") -> str:
    """The page beside the results of a GPU."""
    return (folder / "results" / gpu / "README.md").read_text()


def call_report(folder, monkeypatch, *arguments, cases=("first", "second"), **fields):
    benchmark = Benchmark(
        path="tree.build_tree", cases=[Case(name, {}, is_headline=name == "first") for name in cases], small_cases=[],
        make=dict, count_bytes=int, providers={"torch": None}, peers={"sgl_kernel": None, "sgl_kernel_bare": None},
        **fields,
    )  # fmt: skip
    monkeypatch.setattr(report, "declared", lambda: [benchmark])
    monkeypatch.setattr(report, "README_GPU", "Some_GPU_80GB")
    monkeypatch.setattr(report, "README_ROWS", (("build_tree", "first"), ("build_tree", "never timed")))
    where = ["--results", str(folder / "results"), "--readme", str(folder / "README.md")]
    return report.main([*arguments, *where])


def test_tables(folder, monkeypatch):
    calls = {"host_p50_us": 8.5, "public_host_p50_us": 21.25, "floor_us": 4.0}
    write(folder, line("eagle_kernels", 4.0, run="a", **calls), line("torch", 100.0, run="a"))
    write(folder, line("sgl_kernel", 30.0, run="a"), line("sgl_kernel_bare", 2.0, run="a"))
    write(folder, line("eagle_kernels", 10.0, case="second", run="a"), line("torch", 4.5, case="second", run="a"))
    write(folder, line("eagle_kernels", 77.0, run="a", gpu="Another GPU"))
    assert call_report(folder, monkeypatch, floor=Floor("write", 3.0)) == 0
    readme = (folder / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n")
    assert "Some GPU 80GB, torch 2.0, triton 3.0:\n\n| op | case | ours, µs | fastest other | its µs | ratio" in readme
    # the bare kernel is nobody's equal, and the README has the declared rows alone
    assert "| `build_tree` | first | 4.00 | sgl_kernel | 30.00 | 7.5× |" in readme
    assert "second" not in readme and "never timed" not in readme
    assert "77.00" not in readme and "77.00" in page(folder, "Another_GPU")
    full = page(folder)
    assert full.startswith("# Some GPU 80GB, torch 2.0, triton 3.0\n")
    headlines, _, every_case = full.partition("## Every case")
    assert "| `build_tree` | first | 4.00 | 8.50 | 21.25 | sgl_kernel | 30.00 | 7.5× | `abc` |" in headlines
    assert "second" not in headlines and "### build_tree" in every_case
    assert "Floor: the bytes at the bandwidth of a large write, and 3 µs." in full
    theirs = "100.0 (25×) | 30.00 (7.5×) | 2.00 (0.50×)"
    assert f"| first | abc | 4.00 | 9.00 | 50.00 | 8.50 | 21.25 | 50.0% | 4.00 | 1.00 | {theirs} |" in full
    assert "| second | abc | 10.00 | 9.00 | 50.00 | - | - | 50.0% | - | - | 4.50 (0.45×) | - | - |" in full


def test_steps_of_the_engine(folder, monkeypatch):
    """The newest line of each case and provider; throughput as one table of batch sizes and presets."""

    def step(section, case, provider, step_ms, **numbers):
        return app_line("generation", section, case, provider, step_ms=step_ms, **numbers)

    write(folder, step("plain", "B=1", "eagle_kernels", 6.0), step("plain", "B=1", "eagle_kernels", 5.3741, ratio=1.0))
    for provider, speed, of_plain in (("plain", 186.1, 1.0), ("chain", 377.8, 2.031)):
        write(folder, step("throughput", "B=1", provider, 5.0, tokens_per_s=speed, of_plain=of_plain))
    for run_of, kernel in (("a", "gone"), ("b", "kept")):
        write(folder, step("profile", "B=1", kernel, 0.25, calls=32.0) | {"run": run_of})
    assert call_report(folder, monkeypatch) == 0
    assert "No results yet." in (folder / "README.md").read_text()
    of_gpu = page(folder)
    assert of_gpu.startswith("# Some_GPU_80GB\n\n## The engine, shape of llama\n")
    assert "| plain | B=1 | eagle_kernels | 5.374 | ratio 1 | `abc` |" in of_gpu and "6.000" not in of_gpu
    assert "| tokens/s (of plain) | plain | chain |" in of_gpu
    assert "| B=1 | 186 (1.00×) | 378 (2.03×) |" in of_gpu
    assert "| B=1: `kept` | 32 | 0.250 | `abc` |" in of_gpu and "gone" not in of_gpu


def test_methods_of_drafting(folder, monkeypatch):
    """The newest line of each; chains and trees, and what the device waits for, beside the results."""
    measured = functools.partial(app_line, "drafters")
    for speed in (100.2, 400.6):
        numbers = {"accept_length": 4.321, "tokens_per_s": speed, "of_plain": speed / 100.2}
        write(folder, measured("methods", "code", "ngram", drafts=8, **numbers))
    write(folder, measured("methods", "code", "plain", accept_length=1.0, tokens_per_s=100.2, of_plain=1.0))
    write(folder, measured("methods", "code", "naive", accept_length=1.0, tokens_per_s=90.0, of_plain=0.9))
    write(folder, measured("naive", "code", "naive", tokens_per_s=98.8, of_plain=0.986))
    for provider, length in (("ngram chain", 2.5), ("suffix topk=2", 3.75)):
        for nodes, commit in ((8, "abc"), (16, "abc"), (32, "def" if provider == "ngram chain" else "abc")):
            cell = measured("trees", f"{nodes} nodes", provider, accept_length=length, tokens_per_s=71.2)
            write(folder, cell | {"commit": commit})
    write(folder, measured("heads", "8 levels, B=1", "p-eagle", draft_ms=0.25, mib=810.1, of_bytes=1.35))
    write(folder, measured("gap", "B=8", "suffix", median_us=9.8, worst_us=14.9))
    assert call_report(folder, monkeypatch) == 0
    of_gpu = page(folder)
    assert "| code | ngram | 8 | 4.32 | 401 | 4.00× | `abc` |" in of_gpu and of_gpu.count("| code | ngram |") == 1
    plain = "| code | plain | 0 | 1.00 | 100 | 1.00× | `abc` |"
    naive = "| code | naive | 0 | 1.00 | 90 | 0.90× | `abc` |"
    assert 0 < of_gpu.index(plain) < of_gpu.index("| code | ngram | 8 |") < of_gpu.index(naive)
    assert "| code, in turns with plain decoding | naive | 0 | 1.00 | 99 | 0.99× | `abc` |" in of_gpu
    assert "| tokens a step, tokens/s | ngram chain | suffix topk=2 |" in of_gpu
    assert "| at commit | `abc`, `def` | `abc` |" in of_gpu
    assert "| 8 levels, B=1 | p-eagle | 0.250 | 810 | 1.35× | `abc` |" in of_gpu
    assert "| 8 nodes | 2.50, 71 | 3.75, 71 |" in of_gpu and "| B=8 | suffix | 10 | 15 | `abc` |" in of_gpu


def test_check_goes_red_when_a_number_is_edited_or_is_new(folder, monkeypatch, capsys):
    write(folder, line("eagle_kernels", 4.0, run="a"), line("torch", 100.0, run="a"))
    assert call_report(folder, monkeypatch, "--check") == 1
    assert not (folder / "results" / "Some_GPU_80GB" / "README.md").exists()
    assert call_report(folder, monkeypatch) == 0
    assert call_report(folder, monkeypatch, "--check") == 0
    for file in (folder / "README.md", folder / "results" / "Some_GPU_80GB" / "README.md"):
        text = file.read_text()
        file.write_text(text.replace("4.00", "3.00"))
        capsys.readouterr()
        assert call_report(folder, monkeypatch, "--check") == 1
        assert capsys.readouterr().out == f"{file} is not up to date: run python -m bench.report\n"
        file.write_text(text)
    write(folder, line("eagle_kernels", 2.0, run="b"), line("torch", 100.0, run="b"))
    assert call_report(folder, monkeypatch, "--check") == 1


def test_a_readme_without_marks_is_refused(folder, monkeypatch):
    (folder / "README.md").write_text("before <!-- bench:begin -->")
    with pytest.raises(ValueError, match="README.md must hold the marks bench:begin and, after it, bench:end"):
        call_report(folder, monkeypatch)


def test_the_rows_of_the_readme_are_declared_cases():
    """A case that was renamed would leave the README in silence."""
    assert len(report.README_ROWS) == 4  # and attention over drawn cases, and one of a server
    for op, case in report.README_ROWS:
        assert case in {declared_case.name for declared_case in BENCHMARKS[op].cases}, op
        assert f"| `{op}` | {case} |" in README, "not timed on any GPU"


def test_the_tables_of_this_checkout_are_up_to_date():
    assert report.main(["--check"]) == 0


@pytest.mark.parametrize("gpu", sorted(path.name for path in results.DIRECTORY.glob("NVIDIA_*")))
def test_what_is_committed_exists_and_is_the_newest(gpu):
    """No line of a case or provider that has gone, no two on one subject, no sweep that nothing cites."""
    folder = results.DIRECTORY / gpu
    for op, benchmark in BENCHMARKS.items():
        names = {case.name for case in (*benchmark.cases, *benchmark.sweep)}
        providers = set(benchmark.all_providers(with_peers=True))
        for one in read_lines(file) if (file := folder / f"{op}.jsonl").exists() else ():
            assert one["case"] in names and one["provider"] in providers, f"{file}: {one['case']}, {one['provider']}"
    for op in {*BENCHMARKS, *APPS} - {"experiment"}:
        lines = read_lines(file) if (file := folder / f"{op}.jsonl").exists() else []
        for number, one in enumerate(lines):
            assert not any(results.gives_way(older, one) for older in lines[:number]), f"{file}:{number + 1}"
    for one in read_lines(file) if (file := folder / results.DRAWN).exists() else ():
        assert one["case"] in {case.name for case in BENCHMARKS[one["op"]].drawn(one["seed"], 200)}, f"{file}: {one}"
    cells = read_lines(folder / "experiment.jsonl")
    assert newest_cells(cells) == cells
    assert len((folder / "NOTES.md").read_text(encoding="utf-8").splitlines()) <= 150
    linked = re.findall(r"\]\((tuning/[^)]+)\)", (folder / "NOTES.md").read_text(encoding="utf-8"))
    cited = {file.removeprefix(f"{gpu}/") for file in CITED} | set(linked)
    assert {str(file.relative_to(folder)) for file in folder.glob("tuning/*")} <= cited


def test_cited_results_exist():
    assert len(CITED) > 10 and not [file for file in CITED if not (results.DIRECTORY / file).exists()]


@pytest.mark.parametrize("op", BENCHMARKS)
def test_results_are_found_by_the_names_of_cases(op):
    names = [case.name for case in (*BENCHMARKS[op].cases, *BENCHMARKS[op].sweep)]
    assert len(set(names)) == len(names)
    module = sys.modules[f"bench.ops.{BENCHMARKS[op].path.replace('.', '.bench_')}"]
    assert set(getattr(module, "HEADLINES", ())) == {case.name for case in BENCHMARKS[op].cases if case.is_headline}


def test_what_is_drawn():
    """A seed says which cases, and more of them go on where fewer end; each has inputs, and the table weighs them."""
    for benchmark in filter(lambda benchmark: benchmark.drawn, BENCHMARKS.values()):
        names = [case.name for case in benchmark.drawn(5, 30)]
        assert len(set(names)) == 30 and names[:9] == [case.name for case in benchmark.drawn(5, 9)]
        assert not set(names) & {case.name for case in benchmark.drawn(6, 30)}
        assert all(benchmark.count_bytes(**case.sizes) > 0 for case in benchmark.drawn(5, 30))
        parameters = set(inspect.signature(benchmark.make).parameters) - {"device"}
        assert all(case.sizes.keys() == parameters for case in benchmark.drawn(5, 3))


def test_the_table_of_drawn_cases(tmp_path):
    """Ratios of the runs in which ours was timed too: their geometric mean, and how many are below the edges."""
    times = {"a": (2.0, 4.0), "b": (1.0, 0.9), "c chain": (4.0, 8.0), "d": (1.0, 0.98), "e": (None, 3.0)}
    for case, (ours, other) in times.items():
        for provider, graph_us in (("eagle_kernels", ours), ("fa3", other)):
            line = {"op": "tree_attention", "seed": 3, "case": case, "provider": provider, "graph_p50_us": graph_us}
            if graph_us is not None:
                results.append(tmp_path, line | {"gpu": "X Y", "run": "r"})
    table = report._drawn_table(tmp_path / "X_Y" / results.DRAWN)[-1].splitlines()
    assert table[2:] == [
        "| `tree_attention` chains | 3 | fa3 | 1 | 2.00× | 2.00× | 0 | 0 |",
        "| `tree_attention` trees | 3 | fa3 | 3 | 1.21× | 0.90× | 2 | 1 |",
    ]
    assert report._drawn_rows(tmp_path / "X_Y" / results.DRAWN) == [
        ["`tree_attention`", "1 drawn cases, chains, H200", "-", "fa3", "-", "2.00×"],
        ["`tree_attention`", "3 drawn cases, trees, H200", "-", "fa3", "-", "1.21×"],
    ]


@pytest.fixture
def nothing_said():
    run._say.cache_clear()
    yield
    run._say.cache_clear()


def test_missing_peers_are_named(tmp_path, monkeypatch, capsys, nothing_said):
    monkeypatch.setattr(sgl_kernel, "FOLDER", tmp_path)
    monkeypatch.setattr(sglang_triton, "FOLDER", tmp_path)
    sgl_kernel._reason.cache_clear()
    sglang_triton._module.cache_clear()
    try:
        assert run.main(["--check-only", "--peers", "--op", "build_tree"]) == 0
    finally:
        sgl_kernel._reason.cache_clear()
    said = capsys.readouterr().out.splitlines()
    assert f"sgl_kernel: {tmp_path}/sgl_kernel_sm90.so does not exist" in said
    assert f"sglang_triton: {tmp_path}/sglang_triton/spec_tree.py does not exist" in said
    assert said[-1] == "build_tree: eagle_kernels, torch agree with the reference"


def refuse(values):
    raise Unavailable("not on this machine")


def crash(values):
    raise RuntimeError("no kernel image\nand much more")


def fill_the_memory(values):
    raise torch.OutOfMemoryError("of 28 GiB")


def lie(values):
    return lambda: {"positions": values["seq_lens"].new_zeros(24)}


def with_providers(**fields):
    return Benchmark(
        path="tree.build_tree", cases=BUILD_TREE.cases, small_cases=BUILD_TREE.small_cases[:1], make=BUILD_TREE.make,
        count_bytes=BUILD_TREE.count_bytes, **fields,
    )  # fmt: skip


def test_a_peer_that_fails_leaves_the_others_alone(capsys, nothing_said):
    benchmark = with_providers(peers={"absent": refuse, "broken": crash})
    assert run.main(["--check-only", "--peers"], [benchmark]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "absent: not on this machine",
        "broken: RuntimeError: no kernel image",
        "build_tree: eagle_kernels agree with the reference",
    ]
    with pytest.raises(RuntimeError, match="no kernel image"):
        run.main(["--check-only"], [with_providers(providers={"broken": crash})])
    assert run.main(["--check-only"], [with_providers(providers={"torch": fill_the_memory})]) == 0
    assert "torch: OutOfMemoryError: of 28 GiB" in capsys.readouterr().out
    with pytest.raises(torch.OutOfMemoryError):
        run.main(["--check-only"], [with_providers(providers={"ours": fill_the_memory})])


def test_a_provider_that_disagrees_is_red(capsys, nothing_said):
    benchmark = with_providers(peers={"liar": lie})
    assert run.main(["--check-only", "--provider", "liar"], [benchmark]) == 1
    said = capsys.readouterr().out
    assert f"RED build_tree [{BUILD_TREE.small_cases[0].name}] liar: positions: " in said
    assert "build_tree: nobody agree" in said
    assert run.main(["--check-only", "--provider", "eagle_kernels"], [benchmark]) == 0


def put(outputs, made) -> None:
    for output, made_output in zip(outputs, made):
        output.copy_(made_output)


def agree(benchmark, case, prepare, expected=None) -> None:
    """Outputs are the reference's, at a second call as well: what the first one left is gone, or does no harm."""

    def twice(values):
        once = prepare(values)
        once()
        return once

    check_provider(benchmark, case, twice, expected or expected_outputs(benchmark, case, CPU), CPU)


@pytest.mark.parametrize("index", range(len(BUILD_TREE.small_cases)))
def test_sglang_gets_what_its_caller_owes_it(index):
    """An op of SGLang's contract finds its buffers filled, at every call, and its outputs where they are compared."""
    case = BUILD_TREE.small_cases[index]
    calls = []

    def op(parent_list, top_scores_index, seq_lens, tree_mask, *outputs_and_sizes):
        *outputs, topk, spec_steps, num_nodes, mode = outputs_and_sizes
        name = {value: key for key, value in sglang_caller.MASK_MODES.items()}[mode]
        assert all((links == -1).all() for links in outputs[1:])
        assert (tree_mask.to(torch.int64) == (0 if name == "qlen_only_bitpacking" else 1)).all()
        calls.append(name)
        made = reference.ops.tree.build_tree.build_tree(
            seq_lens, parent_list, top_scores_index, top_scores_index, seq_lens,
            topk=topk, spec_steps=spec_steps, num_verify_tokens=num_nodes, tree_mask_mode=name,
        )  # fmt: skip
        put([tree_mask, *outputs], [made.tree_mask.flatten(), *made[1:]])

    agree(BUILD_TREE, case, lambda values: sglang_caller.build_tree(values, op))
    mode = case.sizes["tree_mask_mode"]
    assert calls == ["qlen_only" if mode == "packed" else mode] * 2


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_greedy_walk_of_sglang_gets_filled_buffers(is_bare):
    benchmark = BENCHMARKS["verify_tree_greedy"]
    case = next(case for case in benchmark.small_cases if "target_predict" in benchmark.inputs(case, CPU))

    def prepare(values):
        def op(*arguments):
            outputs, walked = arguments[:3], arguments[3:]
            if not is_bare:
                assert (outputs[0] == -1).all() and (outputs[1] == -1).all()
            walk = reference.ops.verify.verify_tree_greedy.verify_tree_greedy
            put(outputs, walk(*walked, spec_steps=values["spec_steps"]))

        return sglang_caller.verify_tree_greedy(values, op, is_bare)

    agree(benchmark, case, prepare)


def walk_by_coins(values, outputs, walked) -> None:
    tree, (coins, final_coins, target_probs) = walked[:4], walked[4:]
    walk = reference.ops.verify.verify_tree_coins.verify_tree_coins
    put(outputs, walk(*tree, target_probs, coins, final_coins, spec_steps=values["spec_steps"]))


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_coins_of_sglang_get_filled_buffers(is_bare):
    benchmark = BENCHMARKS["verify_tree_coins"]

    def prepare(values):
        def op(*arguments):
            outputs, walked, draft_probs, thresholds = arguments[:3], arguments[3:10], arguments[10], arguments[11:]
            if not is_bare:
                assert (outputs[0] == -1).all() and (outputs[1] == -1).all() and not draft_probs.any()
            assert thresholds == (1.0, 1.0, True) and draft_probs.shape == values["target_probs"].shape
            walk_by_coins(values, outputs, walked)
            draft_probs.fill_(1.0)

        return sglang_caller.verify_tree_coins(values, op, is_bare)

    for case in benchmark.small_cases:
        agree(benchmark, case, prepare)


def test_the_pipeline_of_a_server_agrees():
    """The filters in their order and the coin walk of SGLang's contract, each by a reference, from the fp32 logits."""
    benchmark, calls = BENCHMARKS["verify_tree_sampled"], []

    def renorm(name):
        def op(probs, limit):
            calls.append(name)
            return getattr(getattr(reference.ops.sampling, name), name)(probs, limit)

        return op

    def prepare(values):
        def op(*arguments):
            outputs, walked, draft_probs = arguments[:3], arguments[3:10], arguments[10]
            target_probs = walked[-1]
            assert target_probs.dtype == torch.float32 and draft_probs.shape == target_probs.shape
            assert not draft_probs.any() and (outputs[0] == -1).all()
            walk_by_coins(values, outputs, walked)

        return sglang_caller.verify_tree_sampled(values, op, renorm("top_k_renorm"), renorm("top_p_renorm"))

    for case in benchmark.small_cases:
        calls.clear()
        expected = expected_outputs(benchmark, case, CPU)
        # "full depth" and all other depths are those that the names say, but for trees that are less deep
        accepted = case.sizes["tree"].spec_steps if case.sizes["accepted"] is None else case.sizes["accepted"]
        assert expected["accept_token_num"].max() == accepted
        agree(benchmark, case, prepare, expected)
        assert calls == (["top_k_renorm", "top_p_renorm"] * 2 if "top-k" in case.name else [])


def row(name, **times):
    return Case(name, {}), {provider: line(provider, us, case=name) for provider, us in times.items()}


def test_a_curve_is_of_the_cases_that_differ_in_one_size():
    kind = "top-k 50 top-p 0.9 full depth"
    batch_n8, _, nodes_b8 = plot.PLOTS["verify_tree_sampled"]
    rows = [
        row(f"K/S/N=4/3/8 B=2 {kind}", eagle_kernels=10.0),
        row(f"K/S/N=4/3/8 B=1 {kind}", eagle_kernels=8.0, pipeline=80.0),
        row("K/S/N=4/3/8 B=4 no filters full depth", eagle_kernels=5.0),
        row(f"K/S/N=8/5/8 B=8 {kind}", eagle_kernels=7.0),
        row(f"K/S/N=8/5/1 B=8 {kind}", eagle_kernels=6.0),
    ]
    assert plot.curves(rows, batch_n8) == {"eagle_kernels": [(1, 8.0), (2, 10.0)], "pipeline": [(1, 80.0)]}
    assert plot.curves(rows, nodes_b8) == {"eagle_kernels": [(1, 6.0), (8, 7.0)]}


def test_every_case_of_the_sweep_is_drawn():
    benchmark = BENCHMARKS["verify_tree_sampled"]
    rows = [row(case.name, eagle_kernels=1.0) for case in (*benchmark.cases, *benchmark.sweep)]
    sizes = [[x for x, _ in plot.curves(rows, p)["eagle_kernels"]] for p in plot.PLOTS["verify_tree_sampled"]]
    assert sizes == [[1 << exponent for exponent in range(9)]] * 3
    drawn = {c.name for c in benchmark.sweep}
    assert not drawn & {c.name for c in benchmark.cases}


def test_a_sweep_is_drawn(folder, capsys):
    pytest.importorskip("matplotlib")
    cases = BENCHMARKS["verify_tree_sampled"].cases
    write(folder, *(line("eagle_kernels", 2.0, case=case.name, op="verify_tree_sampled") for case in cases))
    assert plot.main(["--results", str(folder / "results")]) == 0
    assert capsys.readouterr().out.count("wrote ") == 2  # of nodes there is one size
    assert plot.main(["--op", "gqa_decode", "--results", str(folder / "results")]) == 1


def test_a_plot_without_matplotlib_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main(["--op", "verify_tree_sampled"]) == 2
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.skipif(not (peers.FOLDER / "sglang_triton").exists(), reason="needs the files that .peers holds")
@pytest.mark.parametrize("op", ["build_tree", "verify_tree_greedy"])
def test_sglang_s_triton_kernels_agree(op, device):
    benchmark, num_agreeing = BENCHMARKS[op], 0
    for case in benchmark.small_cases:
        try:
            expected = expected_outputs(benchmark, case, device)
            check_provider(benchmark, case, getattr(sglang_triton, op), expected, device)
            num_agreeing += 1
        except Unavailable as reason:
            assert str(reason) == "has no bit-packed masks"
    assert num_agreeing
    assert not any(isinstance(module, wheel_files.Stub) for module in sys.modules.values())


@pytest.mark.parametrize("case", BENCHMARKS["ngram_match"].small_cases, ids=lambda case: case.name)
def test_planted_repeats_are_found(case):
    """Rows that hold their last tokens twice have a match of full length; among others, random, few have one."""
    match_len = expected_outputs(BENCHMARKS["ngram_match"], case, CPU)["match_len"]
    assert (match_len[:6] == 4).all() and (match_len[6:] < 4).all()


@pytest.mark.parametrize("case", BUILD_TREE.cases[-8:], ids=lambda case: case.name)
def test_the_mask_s_size_is_known_from_the_case(case):
    values = BUILD_TREE.inputs(case, CPU)
    assert int(values["seq_lens"].sum()) == values["seq_lens_sum"]
    assert values["seq_lens"].min() > 0 and (case.sizes["batch_size"] < 8 or values["seq_lens"].unique().numel() > 2)


def test_host_time_does_not_contain_the_gpu_s(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.01))
    monkeypatch.setattr(timing, "_sample_us", lambda run: 1e6)
    assert timing.host_us(lambda: None) < 1000
    assert 1000 < timing.host_us(lambda: time.sleep(0.001)) < 9000


def test_a_record_names_its_run_and_its_floor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    monkeypatch.setattr(results, "ceiling_gb_per_s", {"copy": 2000.0, "write": 1000.0}.get)
    benchmark = Benchmark("tree.build_tree", [], [], dict, count_bytes=lambda size: size, floor=Floor("write", 4.0))
    times = timing.Times(9.0, 10.0, 11.0, 12.0, 13.0, 14.0)
    made = results.record(benchmark, Case("x", {"size": 1_000_000}), "eagle_kernels", times, "abc", "r1", 20.0)
    expected = {"run": "r1", "commit": "abc", "gpu": GPU, "bytes": 1_000_000, "gb_per_s": 100.0, "share_of_copy": 0.05}
    expected |= {"host_p50_us": 14.0, "public_host_p50_us": 20.0, "write_gb_per_s": 1000.0, "floor_us": 5.0}
    assert made.items() >= expected.items()
    assert json.loads(json.dumps(made)) == made
    graphs = results.record(benchmark, Case("x", {"size": 9}), "eagle_kernels", timing.Times(9.0, 10.0, 11.0), "abc")
    assert made.keys() - graphs.keys() == {"eager_p50_us", "cold_p50_us", "host_p50_us", "public_host_p50_us"}
    assert results.new_run() != results.new_run()
    assert results.table([made]).endswith(" | 5.0% | 5.00 |")


def test_graphs_alone_are_timed_on_request(monkeypatch):
    class Watch:
        ROUNDS = 2

        def __init__(self, call):
            self.rounds = 0

        def take_round(self):
            self.rounds += 1

        def times(self, graphs_only):
            return self.rounds, graphs_only

    monkeypatch.setattr(run, "Stopwatch", Watch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(results, "record", lambda *arguments: (arguments[3], arguments[6]))
    monkeypatch.setattr(run._Runner, "_public_host_us", lambda *_: 20.0)
    for graphs_only, public in ((False, 20.0), (True, None)):
        runner = run._Runner(BUILD_TREE, False, ["eagle_kernels"], graphs_only)
        assert runner.time(BUILD_TREE.small_cases[:1], None, "abc", "r1") == [((2, graphs_only), public)]


def test_the_host_is_timed_alone_on_request(monkeypatch, nothing_said, capsys):
    monkeypatch.setattr(run, "host_us", lambda call: 1.5)
    benchmark = with_providers(providers={"torch": BUILD_TREE.providers["torch"]}, peers={"absent": refuse})
    assert run._Runner(benchmark, True).host_times() == {"raw": 1.5, "public": 1.5, "torch": 1.5}
    assert capsys.readouterr().out == "absent: not on this machine\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_results_make_no_checkout_dirty(tmp_path, monkeypatch):
    """So that what a run writes first does not change the commit of what it writes next."""

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    code, line = tmp_path / "bench" / "harness" / "results.py", tmp_path / "bench" / "results" / "gpu.jsonl"
    for file in (code, line):
        file.parent.mkdir(parents=True)
        file.write_text("1\n")
    monkeypatch.setattr(results, "__file__", str(code))
    monkeypatch.setattr(results, "DIRECTORY", line.parent)
    assert results.checkout_commit() == ""
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")
    commit = results.checkout_commit()
    assert len(commit) == 12
    line.write_text("2\n")
    assert results.checkout_commit() == commit
    code.write_text("2\n")
    assert results.checkout_commit() == f"{commit}-dirty"


@pytest.mark.slow
def test_an_app_runs_without_a_gpu_on_a_small_shape(capsys):
    command = ["--app", "generation", "--shape", "small", "--steps", "1", "--prompt-tokens", "3", "--results", "none"]
    assert run.main([*command, "--only", "tree"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["tree", f"B={batch}"] for batch in (1, 8, 32, 1)]
    assert all("of_plain" in line for line in lines)
    with pytest.raises(SystemExit):
        run.main(["--app", "nothing"])
    with pytest.raises(SystemExit):
        run.main(["--op", "build_tree", "--shape", "small"])


def test_steps_of_a_quantised_target(capsys):
    """Beside those in 16 bit, after what loading took; the models are of the sizes that were asked for."""
    command = ["--app", "generation", "--shape", "small", "--steps", "1", "--prompt-tokens", "3", "--results", "none"]
    assert run.main([*command, "--quantize", "w4a16"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("quantised ")]
    assert [line[13:48].strip() for line in lines] == [
        *("plain B=1", "plain B=8", "plain B=32", "loading", "plain B=1", "plain B=8", "plain B=32"),
        "tree B=1 8/5/64, head in 16 bit", "tree B=1 8/5/64, head in w4a16",
    ]  # fmt: skip
    assert "weights_gib" in lines[3] and all("of_16_bit" in line for line in lines[4:7])
    assert all("of_plain" in line for line in lines[7:])
    with pytest.raises(SystemExit):
        run.main([*command, "--quantize", "w4a16", "--only", "tree"])


def test_models_that_are_drawn_quantised():
    """Each linear of the layers is, the output is not, and a head keeps the numbers that it had, about."""
    cpu = torch.device("cpu")
    target = random_models.quantised_target("small", cpu, torch.float32, "wint8")
    kinds = {name: type(each).__name__ for name, each in target.named_modules() if "proj" in name}
    assert set(kinds.values()) <= {"QuantisedLinear", "Weights", "ModuleList"} and type(target.lm_head) is Linear
    whole = random_models.random_head("small", cpu, torch.float32)
    head = random_models.quantised_head(whole, {"dense": "wint8", "lm_head": "wint8"})
    x = torch.randn(1, 4, 64)
    torch.testing.assert_close(head.lm_head(x), whole.lm_head(x), atol=0.5, rtol=0)
    assert type(head.lm_head) is QuantisedLinear and torch.equal(head.d2t, whole.d2t)
    tied = random_models.quantised_target("small", cpu, torch.float32, "wint4", num_hidden_layers=1)
    assert quantised_steps.weight_bytes(tied) < quantised_steps.weight_bytes(target)


def test_the_floor_of_a_target_with_experts():
    """3.3 billion of its 30.5 billion parameters take part in a row, a tenth of them by a lookup."""
    with torch.device("meta"):
        config, head = random_models.target_config("qwen3-30b-a3b"), random_models.head_config("qwen3-30b-a3b")
        target, draft = Decoder(DecoderConfig.from_dict(config)), EagleHead(EagleConfig.from_dict(head))
    bench = types.SimpleNamespace(device=torch.device("cpu"), target=target.bfloat16(), draft=draft.bfloat16())
    assert sum(weight.numel() for weight in target.parameters()) == pytest.approx(30.5e9, rel=0.005)
    read = [generation.Bench.read_bytes(bench, *sizes) for sizes in ((1,), (64,), (1, 3))]
    assert read[0] == pytest.approx(2 * 3.04e9, rel=0.01) and read[1] == pytest.approx(2 * 30e9, rel=0.02)
    head_bytes = 2 * sum(weight.numel() for weight in draft.parameters())
    assert 0 < read[2] - read[0] <= 3 * head_bytes
    assert generation.Bench.of_floor(bench, 9.0, 8) == {"experts": pytest.approx(128 * (1 - (15 / 16) ** 8))}


def test_the_price_of_deterministic_steps():
    recorded = []
    bench = types.SimpleNamespace(
        device=torch.device("cuda"),
        engine=lambda batch_size, shape, accept, deterministic: 6.0 if deterministic else 4.0,
        step_ms=lambda engine, batch_size, is_plain: (engine + batch_size + is_plain, 1.0),
        record=lambda *arguments, **numbers: recorded.append((*arguments, numbers)),
    )
    generation.deterministic(bench)
    assert [line[1] for line in recorded] == ["B=1 plain", "B=32 plain", "B=1 K/S/N=8/5/64", "B=32 K/S/N=4/3/8"]
    assert recorded[0][3:] == (8.0, {"of_ordinary": 8 / 6}) and recorded[2][3:] == (7.0, {"of_ordinary": 7 / 5})


def test_sizes_of_a_mixed_load():
    sizes = [(len(wanted.prompt), wanted.new_tokens) for wanted in load.mixed_load(400, 50, 2000)]
    assert all(prompt >= 30 and 32 <= new <= 500 and prompt + new <= 2000 for prompt, new in sizes)
    prompts = sorted(prompt for prompt, _ in sizes)
    assert prompts[0] < 40 and prompts[-1] > 1200 and 150 < prompts[200] < 400  # in the middle by orders of magnitude
    assert load.mixed_load(9, 50, 2000) == load.mixed_load(9, 50, 2000) != load.mixed_load(9, 50, 2000, seed=1)


def test_a_mixed_load_is_served_and_timed(monkeypatch):
    """By an engine that takes a second for a step, three for the seventh. It reads a prompt in one; each later step
    brings two tokens."""
    clock, most_at_once = [0.0], 0

    class Engine:
        def __init__(self):
            self.requests, self.num_steps = [], 0

        @property
        def has_work(self):
            return any(not request.is_finished for request in self.requests)

        def submit(self, prompt, params):
            request = types.SimpleNamespace(id=len(self.requests), error=None, output_ids=[], is_finished=False)
            request.until, request.most = clock[0] + 1, params.max_new_tokens
            self.requests.append(request)
            return request

        def step(self):
            nonlocal most_at_once
            self.num_steps += 1
            clock[0] += 3.0 if self.num_steps == 7 else 1.0
            live = [request for request in self.requests if not request.is_finished]
            most_at_once = max(most_at_once, len(live))
            live = [request for request in live if clock[0] > request.until]
            for request in live:
                request.output_ids += [7, 7]
                request.is_finished = len(request.output_ids) >= request.most
            return [types.SimpleNamespace(request=request.id) for request in live for _ in range(2)]

    monkeypatch.setattr(load.time, "perf_counter", lambda: clock[0])
    engine = Engine()
    numbers = load.serve(engine, [load.Wanted([1, 2, 3], 6)] * 5, load.phases("2", 5))
    assert len(engine.requests) == 5 and most_at_once == 2
    # two at once take 4 steps each, three times over, the last one alone
    assert numbers == {
        "tokens_per_s": 30 / 14, "first_ms": 2000.0, "gap_ms": 1000.0, "late_ms": 3000.0, "worst_ms": 3000.0,
    }  # fmt: skip
    # one that failed brings no tokens, and is not passed over
    monkeypatch.setattr(Engine, "submit", lambda *_: types.SimpleNamespace(error="too long", id=0))
    with pytest.raises(RuntimeError, match="load: too long"):
        load.serve(Engine(), [load.Wanted([1], 1)], load.phases("1", 1))


def test_clients_come_and_go():
    assert load.phases("8", 30) == [(30, 8)]
    # shares 1, 2, 4, 5, 4, 2, 1 of 19
    assert load.phases("1-25", 38) == [(2, 1), (6, 4), (14, 16), (24, 25), (32, 16), (36, 4), (38, 1)]


@pytest.mark.slow
def test_a_mixed_load_of_a_small_model(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "ALONE_STEPS", 2)

    command = ["--app", "load", "--shape", "small", "--clients", "2", "--requests", "2", "--results", "none"]
    assert run.main([*command, "--only", "plain", "chain 3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["2 clients, 2 requests"] * 2
    assert all(name in line for line in lines for name in load.SHOWN if name != "of_alone")
    assert run.main([*command, "--only", "chain 3", "--join", "100", "--max-step-ms", "5"]) == 0
    line = capsys.readouterr().out
    assert "100 tokens join 2 clients, at most 5 ms" in line and "of_alone" in line
    results.append(tmp_path, {"op": "load", "gpu": "a", "shape": "small", "case": "2 clients, 2 requests",
                              "provider": "plain", "tokens_per_s": 12.5, "commit": "abc"})  # fmt: skip
    (table,) = load.tables(next(tmp_path.glob("**/load.jsonl")))
    assert "| 2 clients, 2 requests | plain | 12.5 | - | - | - | - | - | - | `abc` |" in table


def test_what_sharing_of_prefixes_saves(capsys, tmp_path):
    prompts = prefixes.prompts_of(prefixes.CASES["together"], 3, (5, 2), 99, seed=1)
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1 and len({tuple(prompt[5:]) for prompt in prompts}) == 3
    apart = prefixes.prompts_of(prefixes.CASES["apart"], 3, (5, 2), 99, seed=1)
    assert len({tuple(prompt[:5]) for prompt in apart}) == 3 and {len(prompt) for prompt in prompts + apart} == {7}
    command = ["--app", "prefixes", "--shape", "small", "--requests", "3", "--repeats", "1", "--results", "none"]
    assert run.main([*command, "--only", "plain", "--case", "together"]) == 0
    assert capsys.readouterr().out.startswith("3 together ")
    line = {"op": "prefixes", "gpu": "a", "shape": "small", "case": "3 together", "preset": "plain", "commit": "abc"}
    times = {"shared": {"first_ms": 10.0, "whole_ms": 20.0}, "without": {"first_ms": 80.0, "whole_ms": 90.0}}
    results.append(tmp_path, line | times)
    *_, table = prefixes.tables(next(tmp_path.glob("**/prefixes.jsonl")))
    assert "| small | 3 together | plain | first, ms | 10.0 | 80.0 | 8.00× | `abc` |" in table


def test_requests_of_random_lengths(capsys, tmp_path):
    command = ["--app", "requests", "--shape", "small", "--requests", "5", "--input-len", "20", "--output-len", "8"]
    assert run.main([*command, "--batch", "2", "--only", "chain 3", "--results", "none"]) == 0
    assert re.match(r"chain 3 +requests_per_second \d+\.\d+ ", capsys.readouterr().out)
    line = {"op": "requests", "gpu": "a", "shape": "small", "case": "5 of 20 + 8 tokens", "preset": "plain", "batch": 2}
    numbers = {"requests_per_second": 4.0, "output_tokens_per_second": 30.5, "mean_accept_length": 1.0}
    results.append(tmp_path, line | numbers | {"commit": "abc", "ttft_ms": {"p50": 10.0, "p99": 20.4}})
    *_, table = requests.tables(next(tmp_path.glob("**/requests.jsonl")))
    assert "| small | 5 of 20 + 8 tokens | 2 | plain | 4.00 | 30.50 | 1.00 | 10, 20 | `abc` |" in table


SUFFIX_CACHE = ["--app", "suffix_cache", "--responses", "4", "--requests", "1", "--cached", "2", "--results", "none"]
SUFFIX_KINDS = ["code", "similar", "fresh", "periodic", "two_tokens", "one_token"]


def test_the_cache_of_suffixes_is_timed_anywhere(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    assert run.main([*SUFFIX_CACHE, "--tree"]) == 0
    title, *lines, reason = capsys.readouterr().out.splitlines()
    assert title.endswith("then p50, p99, worst in us")
    assert [line.split()[:2] for line in lines] == [[kind, "eagle_kernels"] for kind in SUFFIX_KINDS]
    for line in lines:
        words = line.split()
        for part in ("extend", "speculate", "step"):
            place = words.index(part) + 1
            median, p99, worst = map(int, words[place : place + 3])
            assert 0 <= median <= p99 <= worst
    assert reason.startswith("arctic_inference: arctic_inference is not installed")


def test_steps_of_the_cache_are_kept_beside_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    assert run.main([*SUFFIX_CACHE, "--results", str(tmp_path), "--commit", "abc"]) == 0
    (file,) = tmp_path.rglob("suffix_cache.jsonl")
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [line["case"] for line in lines] == SUFFIX_KINDS
    for told, line in zip(capsys.readouterr().out.splitlines()[1:], lines):
        times = list(map(int, told.split("step ")[1].split()[:3]))
        assert [round(line[name]) for name in ("p50_us", "p99_us", "worst_us")] == pytest.approx(times, abs=1)
        assert line["processor"] and (line["section"], line["responses"], line["commit"]) == ("path", 4, "abc")
    (table,) = suffix_cache.tables(file)
    assert "| path | code | eagle_kernels | 4 | " in table and lines[0]["processor"] in table


def test_the_cache_of_another_project_gets_the_same_steps(capsys, monkeypatch):
    """Under its names; ours plays it, with each third draft made another."""

    class SuffixDecodingCache:
        def __init__(self, max_tree_depth, max_cached_requests):
            self.cache, self.num_calls = SuffixCache(max_tree_depth, max_cached_requests), 0
            self.start_request, self.stop_request = self.cache.start, self.cache.stop
            self.add_active_response = self.cache.extend

        def speculate(self, request, context, max_spec_tokens, use_tree_spec):
            assert context[-63:] == list(self.cache._requests[request].context)
            self.num_calls += 1
            found = self.cache.speculate(request, max_spec_tokens=max_spec_tokens, use_tree=use_tree_spec)
            return found._replace(score=found.score + (self.num_calls % 3 == 0), token_ids=[*found.token_ids, 1])

    module = types.SimpleNamespace(SuffixDecodingCache=SuffixDecodingCache)
    monkeypatch.setitem(sys.modules, "arctic_inference", types.SimpleNamespace(suffix_decoding=module))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    assert run.main(SUFFIX_CACHE) == 0
    lines = capsys.readouterr().out.splitlines()[8:]
    assert [line.split()[:2] for line in lines[::2]] == [[kind, "arctic_inference"] for kind in SUFFIX_KINDS]
    for line in lines[1::2]:
        assert "same tokens 0.0%" in line and 66 <= float(line.split("same score ")[1].split("%")[0]) <= 68


def test_gaps_are_before_graphs():
    """Kernels of one graph may overlap; one launched alone is no graph, but it is work."""

    def event(correlation, start, duration):
        return {"cat": "kernel", "ts": start, "dur": duration, "args": {"correlation": correlation}}

    events = [event(1, 0, 10), event(1, 5, 7), event(2, 20, 5), event(2, 26, 4), event(3, 29, 4), event(3, 35, 1)]
    events += [{"cat": "cpu_op", "ts": 0, "dur": 99, "args": {}}, event(9, 13, 1)]
    assert gaps_us(events) == [6, 0]


def test_kernels_are_summed_by_name():
    events = [{"name": name, "dur": duration} for name, duration in (("a", 2), ("b", 5), ("a", 4), ("b", 0.5))]
    assert sums_us(events) == [("a", 2, 6), ("b", 2, 5.5)]


@pytest.mark.slow
def test_drafters_are_compared_on_code_that_is_edited(capsys, monkeypatch):
    """Also that the text is the edited file, whoever drafts; on a pair of lines, since references are slow."""
    monkeypatch.setattr(drafters, "PAIR_PROMPTS", ("def f",))
    monkeypatch.setattr(drafters, "PAIR_TOKENS", 4)
    assert run.main(["--app", "drafters", "--shape", "small", "--num-lines", "3", "--only", "methods", "naive",
                     "--results", "none"]) == 0  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    names = [line[len("methods    code editing                 ") :].split("drafts")[0].strip() for line in lines]
    assert names[: 1 + len(drafters.METHODS)] == ["plain", *drafters.METHODS]
    assert len(lines) == 2 * (1 + len(drafters.METHODS)) and all("of_plain" in line for line in lines)


@pytest.mark.slow
def test_heads_of_each_kind_draft(capsys, monkeypatch):
    monkeypatch.setattr(drafters, "LEVEL_TOKENS", 3)
    command = ["--app", "drafters", "--shape", "small", "--num-lines", "3", "--only", "heads", "--results", "none"]
    assert run.main(command) == 0
    names = [line.split()[4] for line in capsys.readouterr().out.splitlines()]
    assert names == ["eagle3", "p-eagle", "medusa", "hydra", "dflash"]


def test_a_file_is_edited():
    text = "\n".join(f"value_{number} = {number}" for number in range(100))
    before, after = edited_file(text, 80, 0.1, 4096)
    again = edited_file(text, 80, 0.1, 4096)
    assert (before, after) == again and len(before) == 80 * 6 and before != after
    changed = sum(line not in _lines_of(before) for line in _lines_of(after))
    assert 4 <= changed <= 8
    with pytest.raises(ValueError, match="the text has 1.. different tokens, the model 50"):
        edited_file(text, 80, 0.1, 50)


def _lines_of(tokens: list[int]) -> list[tuple[int, ...]]:
    """Cut after every newline, which is the sixth token of the first line."""
    lines, line = [], []
    for token in tokens:
        line.append(token)
        if token == tokens[5]:
            lines.append(tuple(line))
            line = []
    return lines


def test_rows_are_replaced_also_in_special_cases():
    """Those of the op alone, one after another, and afterwards none."""
    device, others = torch.device("cpu"), {"default": {"num_warps": 1}}
    for op, special in (("gqa_decode", "widest"), ("tree_attention", "widest")):
        benchmark = BENCHMARKS[op]
        before = tuning.row(benchmark.tuning, device)
        for variant in tune._variants(["num_warps=16,32", "programs=3/5"]):
            with tune._replaced(benchmark, variant):
                found = tuning.row(benchmark.tuning, device)
                for row in found if isinstance(found, tuple) else (found,):
                    assert variant.items() <= row.items()
                    assert variant.items() <= (row | row[special]).items()
                assert tuning.row(others, device) == others["default"]
        assert variant == {"num_warps": 32, "programs": (3, 5)} and tuning.row(benchmark.tuning, device) is before


@pytest.mark.cross
@pytest.mark.parametrize("command", [["run"], ["tune", "--vary", "max_warps=1,2"]], ids=lambda command: command[0])
def test_kernels_are_compiled_for_a_gpu_that_is_not_here(command, tmp_path):
    """All that the cases launch on it, and nothing runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    command = ["bench." + command[0], *command[1:], "--op", "rms_norm", "--case", "T=1 H=4096", "--compile", "sm_90"]
    done = subprocess.run([sys.executable, "-m", *command], env=environment, text=True, capture_output=True, check=True)
    kernels = {file.parent for file in tmp_path.rglob("*.cubin")}
    assert done.stdout == f"{len(kernels)} kernels\n" and len(kernels) > 1


def test_cases_are_compiled_side_by_side(monkeypatch):
    """By processes of the same command line, each of which calls the providers on its run of the cases."""
    called, commands = [], []

    def prepare(inputs):
        return lambda: called.append(inputs["size"]) or 1 / (inputs["size"] - 2)

    def start(command):
        commands.append(command[3:])
        assert run.main(command[3:], [benchmark]) == 0
        return types.SimpleNamespace(wait=lambda: None)

    benchmark = Benchmark(
        path="tree.build_tree", cases=[Case(f"size {size}", {"size": size}) for size in range(5)],
        small_cases=[Case("small", {"size": 9})], make=lambda device, size: {"size": size}, count_bytes=None,
        providers={"torch": refuse, "eagle_kernels": prepare}, peers={"absent": refuse},
    )  # fmt: skip
    monkeypatch.setattr(run, "subprocess", types.SimpleNamespace(Popen=start))
    monkeypatch.setattr(run, "_Runner", lambda *_: types.SimpleNamespace(
        benchmark=benchmark, providers=benchmark.providers, device=None, red=(), check=lambda _: called.append("check"),
        agreeing=list))  # fmt: skip
    assert run.main(["--op", benchmark.op, "--check-only", "--jobs", "4"], [benchmark]) == 0
    assert called == [9, 0, 1, 2, 3, 4, "check"]
    assert [command[-3:] for command in commands] == [["--share", str(number), "4"] for number in range(4)]


def test_checkouts_in_turn(capsys):
    """What a process of a checkout answers, and what is said of times."""
    with in_turn.Checkout(in_turn.Path(in_turn.__file__).parent.parent) as checkout:
        assert checkout.ask("cases", True) == [[each.op, each.cases[0].name] for each in BENCHMARKS.values()]
        assert "error" in checkout.ask("call", "build_tree", "no such case")
    with pytest.raises(ValueError):  # it has ended
        checkout.ask("cases", True)
    times = {"is_equal": True, "graph_us": [2.0, 2.0]}
    rows = [{"op": "a", "case": "b"} | times, {"op": "c", "case": "d"} | times | {"graph_us": [2.0, 8.0]}]
    in_turn._report([*rows, {"op": "e", "case": "f", "errors": [None, "red"]}])
    assert capsys.readouterr().out.splitlines() == [
        "e f [None, 'red']",
        "graph_us: new / old 2.0000 (geometric mean), 1.000 to 4.000",
        "    4.000 c [d]",
    ]
