"""The benchmark of a server and its texts with vLLM: a package with made outputs takes vLLM's place, without a GPU."""

import itertools
import json

import pytest
import torch

from bench import report, run
from bench.apps import server, server_tables
from bench.apps.server_cases import EVERY_CASE, FAMILIES, VLLM_CASES
from bench.harness import results
from bench.lab.log import read_lines
from bench.peers import vllm_engine

STOCK, PLUGGED = ["vllm+fa3", "vllm+triton"], "vllm+eagle_kernels"
# Its steps take a tenth of a millisecond, its texts follow from their prompts. FAKE: {backend: fault}.
FAKE = """
import importlib.metadata, json, os, time, types

__version__ = "0.26.0"


class SamplingParams:
    def __init__(self, **parameters):
        self.__dict__.update(parameters)
        assert self.ignore_eos and not self.detokenize


class LLM:
    def __init__(self, **arguments):
        backend, drafts = arguments["attention_backend"], arguments.get("speculative_config")
        self.fault = json.loads(os.environ.get("FAKE", "{}")).get(backend)
        if self.fault == "crash":
            raise RuntimeError("no kernel image")
        config = types.SimpleNamespace(backend=types.SimpleNamespace(name=backend))
        self.accept, self.drafts = 0, 0
        if drafts:
            assert drafts["method"] == "eagle3" and drafts["attention_backend"] == backend
            self.accept = drafts.get("synthetic_acceptance_length", 2.0) * (0.9 if self.fault == "accept" else 1)
            head = json.load(open(drafts["model"] + "/config.json"))
            assert head["num_hidden_layers"] == 1
            if "synthetic_acceptance_length" not in drafts:
                assert head["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
        plugins = {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
        loaded = {name: plugins[name] for name in os.environ["VLLM_PLUGINS"].split(",") if name}
        assert ("dummy_head" in loaded) == (arguments["load_format"] == "dummy")
        assert (os.environ.get("EAGLE_KERNELS_VLLM") == "all") == ("eagle_kernels" in loaded) == (backend == "CUSTOM")
        assert os.environ["VLLM_CACHE_ROOT"].endswith(backend + "/vllm")
        if "eagle_kernels" in loaded and self.fault != "no plug-in":
            assert loaded["eagle_kernels"] == "eagle_kernels.integrations.vllm.plugin:register"
            for part in ("attention", "verify", "draft") if drafts else ("attention",):
                print(f"(EngineCore pid=1) eagle_kernels: {part} is in use", flush=True)
        if backend == "FLASH_ATTN":
            print("Using FlashAttention version", 2 if self.fault == "old" else 3, flush=True)
        engine_core = types.SimpleNamespace(shutdown=lambda: print("down", time.monotonic(), flush=True))
        attention = types.SimpleNamespace(attention_config=config)
        self.llm_engine = types.SimpleNamespace(vllm_config=attention, engine_core=engine_core)
        self.longest, self.most = arguments["max_model_len"], arguments["max_num_seqs"]
        print("up", time.monotonic(), flush=True)

    def generate(self, prompts, parameters, use_tqdm):
        assert len(prompts) == len(parameters) and not use_tqdm
        if self.fault == "hot" and parameters[0].temperature > 0:
            raise ValueError("too hot")
        begin_s, outputs = time.monotonic(), []
        for prompt, asked in zip(prompts, parameters):
            ids, number = prompt["prompt_token_ids"], asked.max_tokens
            assert len(ids) + number < self.longest and len(prompts) <= max(self.most, 32)
            tokens = [(sum(ids) + 7 * place) % 256 for place in range(number)]
            if self.fault == "token" and len(ids) == 127:
                tokens[5] = 255 - tokens[5]
            self.drafts += (number - 1) / self.accept if self.accept else 0
            outputs.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens)]))
        time.sleep(max(asked.max_tokens for asked in parameters) / (self.accept or 1) * 1e-4)
        print("timed", begin_s, time.monotonic(), flush=True)
        return outputs

    def get_metrics(self):
        others = types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=1)
        return [others, types.SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts)]
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """Returns a function that runs the app with the made vLLM, and returns the exit status."""
    monkeypatch.delenv("FAKE", raising=False)
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(FAKE)
    options = ["--app", "server", "--engine", "vllm", "--vllm", str(tmp_path / "site"), "--shape", "small", "--quick"]
    options += ["--logs", str(tmp_path / "logs"), "--commit", "abc"]
    return lambda *more, directory="none": run.main([*options, *more, "--results", str(directory)])


@pytest.fixture
def fail(monkeypatch):
    """fail(backend=fault): what goes wrong in engines of a backend."""
    return lambda **faults: monkeypatch.setenv("FAKE", json.dumps(faults))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one of Hopper's GPUs, beside whose name lines are kept."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_arguments(tmp_path):
    options = server.parsed(["--engine", "vllm", "--logs", str(tmp_path)])
    assert options.case == [case.name for case in VLLM_CASES] and options.together
    assert options.system == (*STOCK, PLUGGED, "eagle_kernels") == FAMILIES["vllm"].systems
    assert not server.parsed(["--logs", str(tmp_path)]).together
    assert not server.parsed(["--engine", "vllm", "--no-together", "--logs", str(tmp_path)]).together
    for wrong in (
        ["--case", "plain"], ["--system", "sglang+triton"], ["--tp", "2"], ["--vllm", str(tmp_path / "nowhere")]
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            server.parsed(["--engine", "vllm", *wrong])
    with pytest.raises(SystemExit):
        server.parsed(["--case", "vllm plain"])
    assert len({case.name for case in EVERY_CASE}) == len(EVERY_CASE)


@pytest.mark.parametrize("name", ["plain", "chain3", "chain7"])
def test_an_engine_is_sized_for_all_that_it_is_timed_with(name, tmp_path):
    bench = server.Bench(server.parsed(["--engine", "vllm", "--logs", str(tmp_path)]), None, {})
    case, *also = [case for case in VLLM_CASES if name in case.name or (name == "plain" and "first" in case.name)]
    assert len({each.shared for each in (case, *also)}) == 1
    order = bench.order(case, PLUGGED, also=also)
    order.write_models(tmp_path)
    arguments = order.engine_arguments(tmp_path)
    length = 8192 + (304 if name == "plain" else 560)
    assert length < arguments["max_model_len"] <= length + 2048 and arguments["max_num_seqs"] == 32
    layers = 32 + (name != "plain")
    tokens = arguments["kv_cache_memory_bytes"] / (2 * 2 * 8 * 128 * layers)
    assert 8 * length < tokens < 100_000 and arguments["gpu_memory_utilization"] == 0.3  # three at once
    # weights of 16 GB, that of one engine, must fit beside two others on a GPU of 140 GB
    assert arguments["kv_cache_memory_bytes"] < 0.3 * 140e9 - 18e9
    drafts = arguments.get("speculative_config", {})
    assert drafts.get("num_speculative_tokens") == {"plain": None, "chain3": 3, "chain7": 7}[name]
    assert drafts.get("rejection_sample_method") == (None if name == "plain" else "synthetic")
    timed = [(each["case"], each["batches"], each["lengths"]) for each in order.for_child(tmp_path)["timed"]]
    assert timed[1][0] == f"vllm {name} 8k" and timed[1][1] == (8,)
    assert [each[2] for each in timed[2:]] == [(0, 1)] * (name == "plain")
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["draft_vocab_size"] == 32000


def test_only_plugged_engines_get_the_plug_in(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_KERNELS_VLLM", "all")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    installation, traffic = vllm_engine.Installation(tmp_path), {"requests": []}
    for backend, asked, plugins in (("FLASH_ATTN", "", ""), ("CUSTOM", "all", "eagle_kernels")):
        order = vllm_engine.TextOrder(backend, asked, "float16", traffic, share=0.5)
        told = order.environment(installation, tmp_path / "plugin")
        assert (told["VLLM_PLUGINS"], told.get("EAGLE_KERNELS_VLLM", "")) == (plugins, asked)
        assert (str(vllm_engine.ROOT) in told["PYTHONPATH"]) == bool(asked)


def test_engines_take_turns_and_share_what_is_timed(vllm, gpu, tmp_path):
    """Each is started once for all cases with its drafts; the lines tell their case and the steps by the counter."""
    names = ["vllm plain", "vllm plain 8k", "vllm chain3", "vllm first token 8k"]
    assert vllm("--case", *names, "--system", *STOCK, PLUGGED, directory=tmp_path / "results") == 0
    lines = read_lines(tmp_path / "results" / "Some_GPU" / "server.jsonl")
    settings = {(line["case"], line["batch"], line["temperature"]) for line in lines}
    assert settings == {
        *(("vllm plain", batch, temperature) for batch in (1, 8, 32) for temperature in (0.0, 0.8)),
        *(("vllm chain3", batch, temperature) for batch in (1, 8, 32) for temperature in (0.0, 0.8)),
        ("vllm plain 8k", 8, 0.0), ("vllm plain 8k", 8, 0.8), ("vllm first token 8k", 1, 0.0),
    }  # fmt: skip
    assert len(lines) == 3 * len(settings)
    for line in lines:
        assert line["accept_length"] == pytest.approx(2.5 if "chain3" in line["case"] else 1.0, rel=1e-3)
        assert line["prompt_tokens"] == (512 if "8k" in line["case"] else 32) and line["together"]
        assert line["parts"] == ([] if line["system"] != PLUGGED else ["attention", "draft", "verify"]
                                 if "chain3" in line["case"] else ["attention"])  # fmt: skip
        assert line["versions"]["vllm"] == "0.26.0" and line["ms_per_step"] > 0
        assert line["raw"][0][0] > 0 or line["case"] == "vllm first token 8k"
    logs = [path.read_text().splitlines() for path in (tmp_path / "logs").iterdir() if "plain" in path.name]
    spans = sorted(tuple(map(float, line.split()[1:])) for log in logs for line in log if line.startswith("timed"))
    ups, downs = ([float(line.split()[1]) for log in logs for line in log if line.startswith(word)]
                  for word in ("up", "down"))  # fmt: skip
    assert len(ups) == len(downs) == 3 and max(ups) < spans[0][0] and spans[-1][1] < min(downs)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("backend", "fault", "told"),
    [
        ("FLASH_ATTN", "old", "vllm chain3 vllm+fa3: vLLM ran FlashAttention 2 in place of 3"),
        ("TRITON_ATTN", "crash", "RuntimeError: no kernel image"),
        ("CUSTOM", "no plug-in", f"vllm chain3 {PLUGGED}: the plug-in's attention was not used"),
        ("CUSTOM", "hot", f"vllm chain3 {PLUGGED}: B=1 T=0.8: ValueError: too hot"),
        ("CUSTOM", "accept", f"vllm chain3 B=1 T=0.8 {PLUGGED}: accepted length 2.250, stock's is 2.500 and 2.500"),
    ],
)  # fmt: skip
def test_a_failure_is_named_and_the_others_run(backend, fault, told, vllm, fail, capsys):
    fail(**{backend: fault})
    assert vllm("--case", "vllm chain3", "--system", *STOCK, PLUGGED) == 1
    said = capsys.readouterr().out
    assert told in said and said.count("| vllm+triton |") == (0 if fault == "crash" else 6)


@pytest.mark.slow
def test_our_engine_is_timed_beside_it(vllm, monkeypatch, capsys):
    """Its steps, and its first token."""
    for name, value in (("SHORT", 8), ("QUICK_LONG", 40), ("SMALLER", 256)):
        monkeypatch.setattr(server, name, value)
    monkeypatch.setattr(server.generation, "WARM_STEPS", 1)
    assert vllm("--case", "vllm chain3 8k", "vllm first token 8k", "--system", "vllm+fa3", "eagle_kernels") == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "| eagle_kernels |" in line]
    assert [row[1].strip() for row in rows] == ["chain3 8k"] * 2 + ["first token 8k"]


def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_engine.Installation, "is_here", lambda _: False)
    options = ["--app", "server", "--engine", "vllm", "--shape", "small", "--logs", str(tmp_path), "--system", PLUGGED]
    assert run.main([*options, "--results", "none"]) == 0 and run.main([*options, "--check-only"]) == 2
    assert capsys.readouterr().out == "vLLM is not installed; --vllm names a folder that holds it\n" * 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (None, ""),
        ("token", "plugged-chain: request 18 (127 + 40 tokens, together): token 5 is "),
        ("accept", "plugged-chain: accepted length 1.800, stock's is 2.000\n"),
        ("no plug-in", "plugged-chain: the plug-in's attention, draft, verify was not used\n"),
    ],
)
def test_greedy_texts_are_those_of_plain_decoding(fault, told, vllm, fail, capsys):
    fail(CUSTOM=fault)
    assert vllm("--check-only", "--jobs", "2") == int(fault is not None)
    said = capsys.readouterr().out
    assert told in said
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line[:1] == "|"]
    assert [row[0] for row in rows[2:]] == ["vllm-plain", "vllm-chain", "plugged-plain", "plugged-chain"]
    assert rows[3][3:6] == ["36 of 36", "0", "2.000"] and (fault or rows[5][3:] == [*rows[3][3:6], ""])


def line(system, ms, case="vllm chain3", **fields):
    about = {"op": "server", "shape": "llama-3.1-8b", "gpu": "Some GPU", "commit": "abc", "run": "a", "quick": False}
    about |= {"case": case, "system": system, "batch": 8, "temperature": 0.0, "top_p": 1.0, "prompt_tokens": 512}
    raw = [[1.0, 1.0 + each * 1e-1, 100, 250] for each in (ms, 1.1 * ms, ms)]
    about |= {"raw": raw, "together": True, "versions": {"vllm": "0.26.0", "torch": "2.11.0"}}
    return about | {"ms_per_step": ms, "tokens_per_s": 2e4 / ms, "accept_length": 2.5} | fields


def test_tables(tmp_path, monkeypatch):
    """In the folder of the GPU and in the page of the plug-in, apart from SGLang's."""
    lines = [line("vllm+fa3", 8.0), line("vllm+triton", 10.0), line("eagle_kernels", 5.0, raw=[[5.0, 2.5]])]
    lines += [line(PLUGGED, 4.0, raw=[[1, 1.4, 100, 250], [1, 1.4, 100, 250], [1, 1.4, 100, 250]])]
    lines += [line("vllm+fa3", 9.0, "vllm plain 8k", commit="old"), line("sglang+triton", 7.0, "4/3/8")]
    for each in lines:
        results.append(tmp_path / "results", each)
    (tmp_path / "README.md").write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    page = tmp_path / report.SERVER_PAGES["vLLM"]
    page.parent.mkdir(parents=True)
    page.write_text("<!-- server:begin -->\n<!-- server:end -->\n")
    monkeypatch.setattr(report, "declared", list)
    assert report.main(["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]) == 0
    text = page.read_text()
    assert "simulated acceptance (`--app server --engine vllm`). vLLM 0.26.0, torch 2.11.0." in text
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    assert "| of vllm+fa3 | of vllm+triton (not the default on Hopper) | at commit |" in rows[0]
    assert rows[2:] == [
        "| plain 8k | 8 | greedy | vllm+fa3 | 9.000 | 2222 | 2.50 | 1.00× | - | `old` |",
        "| chain3 | 8 | greedy | vllm+fa3 | 8.000 | 2500 | 2.50 | 1.00× | 1.25× (1.25 to 1.25) | `abc` |",
        "| chain3 | 8 | greedy | vllm+triton | 10.000 | 2000 | 2.50 | 0.80× (0.80 to 0.80) | 1.00× | `abc` |",
        f"| chain3 | 8 | greedy | {PLUGGED} | 4.000 | 5000 | 2.50 | 2.00× (2.00 to 2.20) | 2.50× (2.50 to 2.75) "
        "| `abc` |",
        "| chain3 | 8 | greedy | eagle_kernels | 5.000 | 4000 | 2.50 | 1.60× | 2.00× | `abc` |",
    ]
    written = (tmp_path / "results" / "Some_GPU" / "README.md").read_text()
    assert written.index("## SGLang, stock and") < written.index("## vLLM, stock and") and "sglang" not in text
    assert server_tables.off_stock([line("vllm+fa3", 8.0), line(PLUGGED, 8.0, accept_length=2.6)]) == []
