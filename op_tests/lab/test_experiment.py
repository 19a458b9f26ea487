"""Experiments: what a cell's numbers are, and that a run which was cut off goes on."""

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from bench import run
from bench.apps import experiment as app
from bench.lab import measure as measuring
from bench.lab.experiment import Experiment
from bench.lab.log import read_events
from bench.lab.measure import Measurement, Meter
from bench.lab.prompts import Prompt, PromptDataset
from bench.lab.records import newest_cells
from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.benchmark import RequestTimes
from eagle_kernels.engine.models.tokenizer import ByteTokenizer
from eagle_kernels.engine.serve.output import GenerationStats
from op_tests.engine.toys import random_llama

SMALL = ["--max-new-tokens", "6", "--prompts-per-domain", "2", "--num-runs", "2", "--device", "cpu"]
CELLS = ["--domains", "code", "--k", "1", "2", "--methods", "chain", "ngram"]
ONE = ["--domains", "code", "--k", "1", "--methods", "ngram"]


def load_small(pair, device, dtype, **config):
    """In place of a pair: it reads bytes, and its own drafts are right."""
    model = random_llama(vocab_size=256, max_length=1024)
    return EAGLEInference(model, model, EAGLEConfig(topk=1, num_steps=1, **config), tokenizer=ByteTokenizer())


@pytest.fixture(autouse=True)
def small_pair(monkeypatch):
    monkeypatch.setattr(app, "load_pair", load_small)


def call(output, *arguments, commit="abc"):
    options = ["--app", "experiment", *SMALL, *arguments, "--output", str(output), "--commit", commit]
    return run.main(options)


def cells_of(output, *arguments, **options) -> list[dict]:
    """The cells in the file after a command that succeeds."""
    assert call(output, *arguments, **options) == 0
    return read_events(output, "cell")


@pytest.fixture
def with_prompt(tmp_path):
    """with_prompt(text): the options of an experiment on this prompt alone."""

    def options(text):
        PromptDataset([Prompt("code_000", "code", text, len(text))]).save(tmp_path / "prompts.json")
        return ["--prompts", str(tmp_path / "prompts.json"), *ONE]

    return options


def watch_runs(monkeypatch, fail_at=None):
    """The K of each run as it begins; None: plain decoding."""
    real, runs, numbers = Meter.run, [], itertools.count(1)

    def run_watched(meter):
        runs.append(meter._options["num_steps"] if meter._options["speculative"] else None)
        if next(numbers) == fail_at:
            raise RuntimeError("the machine is gone")
        real(meter)

    monkeypatch.setattr(Meter, "run", run_watched)
    return runs


def test_cells_and_their_numbers(tmp_path, capsys):
    cells = cells_of(tmp_path / "cells.jsonl", *CELLS)
    labels = [cell["config"]["decoder_label"] for cell in cells]
    assert labels == ["AR", "SD-K1", "SD-K2", "SD-ngram-K1", "SD-ngram-K2"]
    assert "[10/10]" in capsys.readouterr().err
    for cell in cells:
        assert cell["commit"] == "abc" and cell["dtype"] == "float32" and "torch" in cell["versions"]
        assert cell["identical"] == 1.0 and cell["tokens"] == 2 * 2 * 6 and len(cell["per_run"]) == 2
        assert cell["speedup"] == pytest.approx(cell["tokens_per_second"] / cell["plain_tokens_per_second"], rel=0.01)
        assert cell["inter_token_ms"] == sorted(cell["inter_token_ms"]) and len(cell["inter_token_ms"]) == 101
    plain, single, double = cells[:3]
    assert (plain["mean_accept_length"], single["mean_accept_length"]) == (1.0, 2.0)
    assert single["accepted_per_depth"] == [1.0] and double["accepted_per_depth"][0] == 1.0
    assert plain["speedup"] == 1.0 and set(double["phase_ms"]) == {"draft", "verify", "sample", "bookkeeping"}


class Scripted:
    """An engine of which everything is known: two batches of a run, three steps each."""

    device = torch.device("cpu")

    def __init__(self):
        self.batches = itertools.cycle([
            {"accepted": 5, "per_depth": [3, 2], "decode_s": 0.5, "times": [(0.25, [(0.01, 1), (0.03, 3)])]},
            {"accepted": 1, "per_depth": [1, 0], "decode_s": 1.5, "times": [(0.75, [(0.02, 2), (0.05, 1)])]},
        ])  # fmt: skip

    def stream(self, prompts, max_new_tokens, **options):
        batch = next(self.batches)
        stats = GenerationStats(
            1, 2, 3, [0], generated_tokens=5, steps=3, batch_steps=3, levels=6, accepted=batch["accepted"],
            accepted_per_depth=batch["per_depth"], decode_time_s=batch["decode_s"],
            phase_time_ms={"draft": 3 * batch["decode_s"], "verify": 6.0},
        )  # fmt: skip
        return SimpleNamespace(times=batch["times"], output=lambda: SimpleNamespace(output_ids=prompts, stats=stats))


def test_every_number_of_a_cell(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now_s))

    def times(stream):
        return [RequestTimes(now_s + first_s, rounds) for first_s, rounds in stream.times]

    monkeypatch.setattr(measuring, "time_requests", times)
    meter = Meter(Scripted(), [[1], [2]], 5, 1, seeds=0)
    for _ in range(3):
        meter.run()
    found = meter.result()
    assert found.texts == [[1], [2]] and found.tokens == 3 * 10 and found.per_run == [pytest.approx(8 / 2.0)] * 3
    assert found.tokens_per_second == pytest.approx(4.0) and found.step_ms == pytest.approx(1e3 * 2.0 / 6)
    assert found.ttft_ms == pytest.approx(500.0) and found.peak_memory_mib is None
    # 10, 10, 10, 10 of one request and 10, 10, 50 of the other
    assert found.inter_token_ms[0] == found.inter_token_ms[50] == pytest.approx(10.0)
    assert found.inter_token_ms[100] == pytest.approx(50.0)
    assert found.round_ms["p50"] == pytest.approx(25.0, abs=5.1) and found.round_ms["p99"] == pytest.approx(50.0, abs=2)
    assert found.mean_accept_length == 1 + 6 / 6 and found.acceptance_rate == 6 / 12
    assert found.accepted_per_depth == [4 / 6, 2 / 6]
    assert found.phase_ms == {"draft": pytest.approx(1.0), "verify": pytest.approx(2.0)}


def test_what_is_said_beside_plain_decoding():
    measured = Measurement([[1], [2], [3], [4]], 4, 30.0, [], 0, [], {}, 1, 0, [], {}, 0, None)
    plain = replace(measured, texts=[[1], [2], [9], [4]], tokens_per_second=10.0)
    numbers = app._numbers(measured, plain)
    assert (numbers["identical"], numbers["speedup"], numbers["plain_tokens_per_second"]) == (0.75, 3.0, 10.0)
    nothing = app._numbers(measured, replace(plain, tokens_per_second=0.0))
    assert math.isnan(nothing["speedup"])


def test_texts_that_end_at_once(tmp_path, with_prompt, monkeypatch):
    """Nothing is timed then; the cells say so and the run goes on."""
    first = load_small("any", "cpu", None).generate(list(b"def f("), 2).output_ids[0]
    monkeypatch.setattr(app, "load_pair", partial(load_small, eos_token_ids=(first,)))
    cells = cells_of(tmp_path / "cells.jsonl", *with_prompt("def f("))
    assert [(cell["tokens_per_second"], cell["speedup"]) for cell in cells] == [(0.0, None)] * 2
    assert newest_cells(cells) == cells


@pytest.mark.slow
def test_every_batch_is_full(tmp_path, monkeypatch):
    widths, real = [], measuring.time_requests

    def watch(stream):
        widths.append(len(stream.requests))
        return real(stream)

    monkeypatch.setattr(measuring, "time_requests", watch)
    options = [*ONE, "--num-runs", "1", "--batch-sizes"]
    for size, num_prompts, want in (("5", "2", [5]), ("2", "3", [2, 2])):
        assert call(tmp_path / f"{size}.jsonl", *options, size, "--prompts-per-domain", num_prompts) == 0
        assert widths == 2 * want
        widths.clear()


@pytest.mark.slow
def test_other_code_is_measured_anew(tmp_path, monkeypatch):
    """Also where the commit does not say so: files may differ from it, or there is none."""
    runs = watch_runs(monkeypatch)
    for hashes, want in (("a", 10), ("a", 0), ("b", 10)):
        monkeypatch.setattr(app.results, "code_hash", lambda hashes=hashes: hashes)
        runs.clear()
        assert call(tmp_path / "cells.jsonl", *CELLS, commit="abc-dirty") == 0 and len(runs) == want


def test_no_triton_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(app.results.language, "MISSING", "triton 9")
    assert cells_of(tmp_path / "cells.jsonl", *ONE)[0]["versions"]["triton"] is None


@pytest.mark.slow
def test_cells_of_a_group_are_measured_in_turns(tmp_path, monkeypatch, capsys):
    """So that a machine that is slow for a while is so for all of them."""
    runs = watch_runs(monkeypatch)
    chains = ["--k", "1", "2", "--methods", "chain"]
    assert call(tmp_path / "cells.jsonl", "--domains", "code", "summarization", *chains) == 0
    assert runs == [None, 1, 2] * 4
    said = capsys.readouterr().err
    assert "[1/12]" in said and "[12/12]" in said and said.count("turn 2 of 2") == 6
    runs.clear()
    cells = cells_of(tmp_path / "more.jsonl", "--domains", "code", "--k", "1", "--methods", "chain", "--num-runs", "7")
    assert runs == [None, None, 1, 1] * 2 + [None, 1] * 3
    assert [len(cell["per_run"]) for cell in cells] == [7, 7]


@pytest.mark.slow
def test_no_run_compiles(tmp_path, monkeypatch):
    """Whatever was measured in between, and however few requests are left when others have ended."""
    cold, real = [], Meter.run

    def run_watched(meter):
        before = meter._engine.session.scheduler.num_cold_steps
        real(meter)
        cold.append(meter._engine.session.scheduler.num_cold_steps - before)

    monkeypatch.setattr(Meter, "run", run_watched)
    sizes = ["--batch-sizes", "4", "--prompts-per-domain", "4", "--max-new-tokens", "64"]
    methods = ["--domains", "code", "--k", "4", "--methods", "chain", "ngram"]
    assert call(tmp_path / "cells.jsonl", *methods, *sizes) == 0
    assert cold == 6 * [0]


@pytest.mark.slow
def test_a_cell_learns_nothing_from_its_runs(tmp_path):
    """Nor from those of others: the second run of a prompt drafts as the first one does."""
    options = ["--domains", "code", "--methods", "suffix", "--max-new-tokens", "24", "--num-runs"]
    lengths = []
    for number, (runs, k) in enumerate((("1", ["4"]), ("3", ["2", "4"]))):
        lengths.append(cells_of(tmp_path / f"{number}.jsonl", *options, runs, "--k", *k)[-1]["mean_accept_length"])
    assert lengths[0] == lengths[1]


def test_prompts_may_leave_room_for_two_tokens(tmp_path, with_prompt):
    assert call(tmp_path / "cells.jsonl", *with_prompt("x" * 1019), "--max-new-tokens", "2") == 0


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch, capsys):
    """Cells that are there stay as they are; plain decoding is measured again beside those that are left."""
    output, cells = tmp_path / "cells.jsonl", [*CELLS, "--domains", "code", "conversation"]
    runs = watch_runs(monkeypatch, fail_at=12)  # the second group's second run
    assert call(output, *cells) == 1
    assert "error: the machine is gone" in capsys.readouterr().err
    before = output.read_text()
    assert len(before.splitlines()) == 5
    kept = "".join(line + "\n" for line in before.splitlines()[:3])
    output.write_text(kept + '{"event": "cell", "cell_ha')  # and while it wrote
    runs.clear()
    assert call(output, *cells) == 0
    assert output.read_text().startswith(kept) and runs == 2 * [None, 1, 2] + 2 * [None, 1, 2, 1, 2]
    hashes = [cell["cell_hash"] for cell in read_events(output, "cell")]
    assert len(hashes) == len(set(hashes)) == 10
    runs.clear()
    assert call(output, *cells) == 0 and not runs  # nothing is left
    assert call(output, *CELLS, "--seed", "1") == 0 and len(runs) == 10
    assert call(output, *CELLS, commit="def") == 0 and len(runs) == 20  # other code, other numbers


def measured(engine, prompts, max_new_tokens, batch_size, num_runs, **options):
    meter = Meter(engine, prompts, max_new_tokens, batch_size, **options)
    for _ in range(num_runs):
        meter.run()
    return meter.result()


@pytest.mark.slow
def test_texts_do_not_depend_on_the_batch():
    engine = load_small("any", "cpu", None)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 9]]
    options = {"temperature": 1.0, "topk": 1, "num_steps": 2, "num_draft_tokens": None}
    alone, together = (measured(engine, prompts, 9, size, 1, seeds=7, max_batch=3, **options) for size in (1, 3))
    assert alone.texts == together.texts and alone.tokens == together.tokens == 36
    assert engine.generate(prompts[2], 9, seeds=9, **options).output_ids == alone.texts[2]


def test_one_disturbed_run_changes_no_median(monkeypatch):
    """Neither of speeds nor of steps, which stand beside each other and must be of the same run."""
    engine, stats, real = load_small("any", "cpu", None), [], measuring._speed

    def speed(of_run):
        if not stats:  # the first one
            for each in of_run:
                each.decode_time_s *= 100
        stats.append(of_run)
        return real(of_run)

    monkeypatch.setattr(measuring, "_speed", speed)
    found = measured(engine, [[1, 2, 3]], 6, 1, 3, seeds=0, speculative=False)
    times_s = sorted(run[0].decode_time_s for run in stats)
    assert found.step_ms == pytest.approx(1e3 * times_s[1] / 5) and found.step_ms < 1e3 * times_s[2] / 10
    assert found.tokens_per_second == pytest.approx(1e3 / found.step_ms)


@pytest.mark.parametrize(("name", "num_cells"), [("grid", 156), ("gpt2", 27), ("llama3", 45)])
def test_configurations_that_are_there(name, num_cells):
    """Plain decoding and every method and K: the grid over three domains, two temperatures and two batch sizes."""
    pytest.importorskip("yaml")
    cells = list(Experiment.from_file(f"bench/lab/configs/{name}.yaml").cells())
    assert len(cells) == len(set(cells)) == num_cells
    for cell in cells:
        if cell.is_speculative:
            assert cell.engine_config().num_steps == cell.K


def test_the_environment_names_extras_of_the_package():
    yaml = pytest.importorskip("yaml")
    with open("environment.yml", encoding="utf-8") as file:
        environment = yaml.safe_load(file)
    packages = environment["dependencies"][-1]["pip"]
    extras = re.fullmatch(r"-e \.\[(.*)\]", packages[0])[1].split(",")
    with open("setup.py", encoding="utf-8") as file:
        setup = file.read()
    assert all(f'"{extra}": [' in setup for extra in extras) and {"datasets", "plots", "transformers"} <= set(extras)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_an_experiment_in_a_file(tmp_path, suffix):
    if suffix == "yaml":
        pytest.importorskip("yaml")
    file = tmp_path / f"experiment.{suffix}"
    file.write_text(json.dumps({"domains": ["code"], "k": [1], "methods": ["tree"], "seed": 3}))  # YAML too
    configs = [cell["config"] for cell in cells_of(tmp_path / "cells.jsonl", "--config", str(file), "--k", "2")]
    assert [(each["K"], each["method"], each["seed"]) for each in configs] == [(None, "chain", 3), (2, "tree", 3)]


REFUSED = [
    ({"pairs": ["phi3_llama3"]}, "phi3_llama3: the draft must have the target's tokens"),
    ({"k": [0]}, "K must be None or an int of at least 1, got 0"),
    ({"k": [1, 1000]}, "num_steps must lie in 1..255 for topk=1, got 1000"),
    ({"k": [2, 2]}, r"Experiment: k must be a list of different values, got \[2, 2\]"),
    ({"k": [[1], [2]]}, r"Experiment: k must be a list of different values, got \[\[1\], \[2\]\]"),
    ({"k": [None]}, r"Experiment: k must be a list of different values, got \[None\]"),
    ({"pairs": [["embedded"]]}, "Experiment: pairs must be a list of different values"),
    ({"max_new_tokens": 1}, "max_new_tokens must be an int of at least 2: tokens behind the first are timed, got 1"),
    ({"methods": "chain"}, "methods must be a list of different values, got 'chain'"),
    ({"methods": ["magic"]}, "methods must be among chain, tree"),
    ({"domains": ["law"]}, "domains must be among code, conversation"),
    ({"num_runs": 0}, "num_runs must be an int of at least 1, got 0"),
    ({"dtype": "fp7"}, "dtype must be None or one of"),
    ({"colour": 1}, "Experiment: there is no field colour; there are pairs, domains"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_is_no_experiment(values, message):
    with pytest.raises(ValueError, match=message):
        Experiment.from_dict(values)


def test_errors_of_the_command(tmp_path, with_prompt, capsys):
    for content, message in (("[1]", "must hold an object, got list"), ("{", "is not json")):
        (tmp_path / "experiment.json").write_text(content)
        assert call(tmp_path / "cells.jsonl", "--config", str(tmp_path / "experiment.json")) == 1
        assert message in capsys.readouterr().err
    assert call(tmp_path / "cells.jsonl", "--pairs", "nobody") == 1
    assert "error: get_pair: name must be one of" in capsys.readouterr().err
    assert call(tmp_path) == 1  # a folder
    assert capsys.readouterr().err.startswith("error: ")
    assert call(tmp_path / "cells.jsonl", *with_prompt("def f("), "--domains", "conversation") == 1
    assert "domain must be one of code, got 'conversation'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert call(tmp_path / "cells.jsonl", "--device", "cuda") == 1
        assert "error: --device must be one that torch can use, got cuda" in capsys.readouterr().err


def test_the_options_of_an_app_are_shown(capsys):
    with pytest.raises(SystemExit) as end:
        run.main(["--app", "experiment", "--help"])
    assert end.value.code == 0 and "--prompts-per-domain" in capsys.readouterr().out
    assert run.main(["--help"]) == 0 and "--check-only" in capsys.readouterr().out


@pytest.mark.slow
def test_other_prompts_are_another_setting(tmp_path, with_prompt):
    for text in ("def f(", "def g("):
        lines = cells_of(tmp_path / "cells.jsonl", *with_prompt(text))
    assert len(lines) == 4 and len(newest_cells(lines)) == 4
    assert len({cell["prompts"] for cell in lines}) == 2 and lines[0]["prompts"].startswith("prompts.json, 1, ")
