"""The benchmark of a server, without a GPU: packages with made outputs take the places of SGLang and of vLLM."""

import importlib
import inspect
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

import eagle_kernels
from bench import report, run
from bench.apps import server, server_rows, server_tables, server_texts
from bench.apps.random_models import target_config
from bench.apps.server_cases import CASES, CHAINS, GREEDY, SYSTEMS, VLLM_CASES, VLLM_SYSTEMS
from bench.apps.server_rows import VLLM_ROWS
from bench.harness import results
from bench.harness.markdown import markdown
from bench.lab.log import read_lines
from bench.peers import engine, engine_child, fa3, sglang_engine, sglang_fa3, vllm_engine
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig

GPU = "Some GPU 80GB"
THREE = ["sglang+flashinfer", "sglang+triton", "sglang+eagle_kernels"]
# A clock that only made steps move, a tenth of a millisecond each: a machine that is busy changes no figure.
CLOCK = """
import time

spent_s = [time.perf_counter()]
time.perf_counter = lambda: sum(spent_s)


def spend(seconds):
    begin_s = time.monotonic()
    time.sleep(seconds)
    spent_s.append(seconds)
    print("timed", begin_s, time.monotonic(), flush=True)
"""
# FAKE says what goes wrong: {backend: fault}.
FAKE = """
import importlib.metadata, importlib.util, json, os, subprocess, sys, types

__version__ = "0.5.17"
fault = json.loads(os.environ.get("FAKE", "{}"))


class Engine:
    def __init__(self, **arguments):
        backend = arguments["attention_backend"]
        self.fault = fault.get(backend)
        ran = "other" if self.fault == "other backend" else backend
        self.server_args = types.SimpleNamespace(**arguments | {"attention_backend": ran})
        self.nodes = arguments.get("speculative_num_draft_tokens")
        for name in ("target", "draft"):
            folder = arguments["model_path"].replace("target", name)
            assert json.load(open(folder + "/config.json"))["num_hidden_layers"] == {"target": 8, "draft": 1}[name]
        allowed = os.environ["SGLANG_PLUGINS"]
        plugins = {point.name: point.value for point in importlib.metadata.entry_points(group="sglang.srt.plugins")}
        if plugins.get(allowed) == "eagle_kernels.integrations.sglang:register" and self.fault != "no plug-in":
            print("eagle_kernels: attention is in use", flush=True)
            if os.environ.get("EAGLE_KERNELS_SGLANG_VERIFY") == "match" and self.fault != "no match":
                print("eagle_kernels: match is in use", flush=True)
        if allowed == "fa3":
            folder = os.path.dirname(importlib.util.find_spec("sglang_fa3").origin)
            assert plugins["fa3"] == "sglang_fa3:register" and os.path.exists(folder + "/vllm_fa3.so")
        if self.fault == "no all-reduce":
            print("Setup Custom allreduce failed with 1. To silence this", flush=True)
        if self.fault == "crash":
            raise RuntimeError("no kernel image")
        if self.fault == "hang":
            other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print("started", other.pid, flush=True)
            time.sleep(600)
        if self.fault == "late":
            time.sleep(3)
        print("up", time.monotonic(), flush=True)

    def generate(self, input_ids, sampling_params):
        if isinstance(sampling_params, list):
            assert len(input_ids) == 64 and len({params["max_new_tokens"] for params in sampling_params}) > 10
            outputs = [self.generate([ids], params)[0] for ids, params in zip(input_ids, sampling_params)]
            return outputs[:-1] + [outputs[0]] if self.fault == "short" else outputs
        if self.fault == "hot" and sampling_params["temperature"] > 0:
            raise ValueError("too hot")
        if self.fault == "stuck":
            time.sleep(600)
        tokens = sampling_params["max_new_tokens"]
        assert sampling_params["ignore_eos"] and all(0 <= token < 512 for ids in input_ids for token in ids)
        accept = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", 1)) * (0.98 if self.fault == "accept" else 1)
        spend(tokens / accept * (1e-3 if self.fault == "slow" else 1e-4))
        meta_info = {"spec_verify_ct": (tokens - 1) / accept} if self.nodes else {}
        return [{"output_ids": [0] * tokens, "meta_info": meta_info} for _ in input_ids]

    def shutdown(self):
        print("down", time.monotonic(), flush=True)
"""

# vLLM's, whose texts follow from the last token of their prompts and from seeds; short samples without a seed are drawn
FAKE_VLLM = """
import gzip, importlib.metadata, json, os, random
from types import SimpleNamespace as make

__version__ = "0.26.0"


class SamplingParams:
    seed, temperature = 0, 1.0

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def verify(self, is_speculative):
        if is_speculative and "min_p" in vars(self) and not os.environ.get("EAGLE_KERNELS_VLLM"):
            raise ValueError("not yet supported with speculative decoding")


class LLM:
    def __init__(
        self, attention_backend, load_format, dtype, speculative_config=None, additional_config=None,
        profiler_config=None, **arguments
    ):
        self.traces = profiler_config and profiler_config["torch_profiler_dir"]
        self.fault = json.loads(os.environ.get("FAKE", "{}")).get(attention_backend) or ""
        drafts, self.drafts = speculative_config or {}, 0
        self.accept = drafts.get("synthetic_acceptance_length", 2.0 if drafts else None)
        if drafts and load_format != "dummy":
            assert json.load(open(drafts["model"] + "/config.json"))["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
        plugins = {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
        loaded = [plugins[name] for name in os.environ["VLLM_PLUGINS"].split(",")]
        is_exact, asked = dtype == "float32", os.environ.get("EAGLE_KERNELS_VLLM", "")
        is_ours, reads = attention_backend == "CUSTOM", os.environ.get("EAGLE_KERNELS_VLLM_PROMPTS")
        assert asked == ("all" if is_ours else "verify,draft" if is_exact else "")
        assert reads == ("ours" if is_ours and is_exact else None)
        assert additional_config is None or (is_ours and set(additional_config["eagle_kernels"]) == {"topk", "depth"})
        assert loaded == ["vllm_child:register", "eagle_kernels.integrations.vllm.plugin:register"][: 1 + bool(asked)]
        assert os.environ.get("TRITON_F32_DEFAULT") == ("ieee" if is_exact else None)
        parts = asked.replace("all", "attention,verify,draft").split(",") if self.fault != "no plug-in" else []
        for part in filter(None, parts + ["trees"] * bool(additional_config and parts)):
            print(f"(EngineCore pid=1) eagle_kernels: {part} is in use", flush=True)
        if attention_backend == "FLASH_ATTN":
            print("Using FlashAttention version", 2 if self.fault == "old" else 3, flush=True)
        self.llm_engine, self.running, self.random = self, {}, random.Random(attention_backend)
        self.vllm_config = make(attention_config=make(backend=attention_backend))
        self.engine_core = make(shutdown=lambda: print("down", time.monotonic(), flush=True))

    def text(self, ids, asked):
        asked.verify(self.accept is not None)
        if asked.temperature and not asked.seed and asked.max_tokens <= 4:
            return self.random.choices(range(3), (0.5, 0.1, 0.4) if self.fault else (0.5, 0.3, 0.2), k=asked.max_tokens)
        shift = self.fault == "wrong" and self.accept is not None and asked.seed > 0
        tokens = [(ids[-1] + (7 + asked.seed + shift) * place) % 256 for place in range(1, 1 + asked.max_tokens)]
        if self.fault in ("token", "wrong") and len(ids) == 127:
            tokens[5] = 255 - tokens[5]
        self.drafts += (len(tokens) - 1) / self.accept if self.accept else 0
        return tokens

    def generate(self, prompts, parameters, use_tqdm):
        before = self.drafts
        texts = [self.text(prompt["prompt_token_ids"], each) for prompt, each in zip(prompts, parameters, strict=True)]
        spend(1e-4 * ((self.drafts - before) / len(texts) or max(map(len, texts))))
        return [make(outputs=[make(token_ids=tokens)]) for tokens in texts]

    def start_profile(self):
        assert not os.listdir(self.traces) if os.path.isdir(self.traces) else not os.makedirs(self.traces)

    def stop_profile(self):
        events = [{"name": "python_function", "ts": 0}]
        # of a millisecond each: two kernels, of which one is long, and a launch for both; before them are two prompts
        for step in [] if self.fault == "no steps" else [-4.5, -2, *range(8)]:
            for name, begin, us in ("_gather_block_tables_kernel", 0, 10), ("gemm", 100, 400 if step >= 0 else 1900):
                events.append({"cat": "kernel", "name": name, "ts": 1000 * step + begin, "dur": us})
            events.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "tid": 1, "ts": 1000 * step, "dur": 50})
        for name, found in ("worker", events), ("front", []):
            with gzip.open(f"{self.traces}/{name}.pt.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": found}, file)

    def add_request(self, request_id, prompt, params):
        self.running[request_id] = [0, self.text(prompt["prompt_token_ids"], params)]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        for request_id, state in [*self.running.items()]:
            state[0] += 4
            tokens, is_whole = state[1][: state[0]], state[0] >= len(state[1])
            is_whole |= self.fault == "ends early" and request_id.startswith("soak") and state[0] == 4
            if is_whole:
                del self.running[request_id]
            yield make(request_id=request_id, finished=is_whole, outputs=[make(token_ids=tokens)])

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.running[request_id]

    def get_metrics(self):
        happened = 0 if self.fault == "wrong" else 9
        values = {"spec_decode_num_drafts": self.drafts, "spec_decode_num_accepted_tokens": happened,
                  "num_preemptions": happened, "prefix_cache_hits": happened,
                  "kv_cache_usage_perc": 0.25 * (self.fault == "leak")}
        return [make(name="vllm:" + name, value=values[name]) for name in values]
"""


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """Returns the options that name the made SGLang; beside it lie FlashInfer's distribution and vLLM's FA3, packed."""
    monkeypatch.delenv("FAKE", raising=False)
    monkeypatch.setattr(fa3, "FOLDER", tmp_path / "peers")
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "vllm_fa3.so.xz").write_bytes(lzma.compress(b"library"))
    write_package(tmp_path / "site", "sglang", CLOCK + FAKE)
    write_package(tmp_path / "flashinfer", "flashinfer", "", distribution="flashinfer_python", version="0.6.15")
    return ["--sglang", str(tmp_path / "site"), "--shape", "small", "--quick", "--logs", str(tmp_path / "logs")]


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """Returns the options that name the made vLLM."""
    monkeypatch.delenv("FAKE", raising=False)
    write_package(tmp_path / "site", "vllm", CLOCK + FAKE_VLLM)
    folders = ["--vllm", str(tmp_path / "site"), "--logs", str(tmp_path / "logs")]
    return ["--engine", "vllm", "--shape", "small", "--quick", *folders]


def write_package(folder, name, text, distribution=None, version=None):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    if distribution:
        about = folder / f"{distribution}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def write_own_fa3(folder):
    write_package(folder, "sgl_kernel", "")
    (folder / "sgl_kernel" / "flash_ops.abi3.so").touch()


def call(options, *more, directory="none"):
    return run.main(["--app", "server", *options, *more, "--results", str(directory), "--commit", "abc"])


def order(backend, accept=4.0, **fields):
    sizes = {"batches": (1,), "sampling": ((0.0, 1.0),), "prompt_tokens": 8, "lengths": (48, 176), "repeats": 1}
    target = {"vocab_size": 512, "num_hidden_layers": 8}
    draft = target | {"num_hidden_layers": 1}
    return sglang_engine.Order(backend, target, draft, tree=(8, 5, 64), accept=accept, **sizes | fields)


@pytest.fixture
def fail(monkeypatch):
    """fail(backend=fault): what goes wrong in engines of a backend."""
    return lambda **faults: monkeypatch.setenv("FAKE", json.dumps(faults))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, beside whose name lines are kept."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)


def kept(folder) -> list[dict]:
    (file,) = folder.rglob("*.jsonl")
    return read_lines(file)


def test_arguments(tmp_path, capsys):
    options = server.parsed([])
    assert options.case == [case.name for case in CASES]
    assert options.case[:6] == ["plain", "8/5/64", "4/3/8", "4/4/16", "first token 8k", "first token 8 x 2k"]
    assert options.system == SYSTEMS and SYSTEMS[0] == "sglang+flashinfer" and options.logs.is_dir()
    options.logs.rmdir()
    assert options.repeats == 3
    options = server.parsed(["--case", "plain", "4/3/8", "--system", "eagle_kernels", "--logs", str(tmp_path)])
    assert (options.case, options.system) == (["plain", "4/3/8"], ["eagle_kernels"])
    ranks = server.parsed(["--tp", "2", "--logs", str(tmp_path)])
    assert (ranks.case, ranks.all_reduce) == (["8B plain", "8B 4/3/8", "32B plain", "32B 4/3/8"], "own")
    for wrong in (
        ["--case", "9/9/9"], ["--system", "vllm"], ["--sglang", str(tmp_path / "nowhere")], ["--tp", "0"],
        ["--tp", "2", "--case", "plain", "8B plain"], ["--all-reduce", "ring"], ["--repeats", "0"],
        ["--engine", "vllm", "--case", "plain"], ["--system", "vllm+fa3"],
        ["--row", "seeded-chain"], ["--engine", "vllm", "--row", "stock-plain"],
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            server.parsed(wrong)
    with pytest.raises(SystemExit):
        run.main(["--app", "server", "--help"])
    assert "--flashinfer" in capsys.readouterr().out


def test_a_case_is_the_app_s_own(tmp_path, capsys, monkeypatch):
    """`--case` of the ops is another one."""
    seen = []
    monkeypatch.setattr(server.Bench, "run_own", lambda bench, case: seen.append(case.name))
    more = ["--case", "plain", "4/3/8", "--system", "eagle_kernels"]
    assert call(["--shape", "small", "--logs", str(tmp_path)], *more) == 0
    assert seen == ["plain", "4/3/8"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_engine_is_sized_for_its_case(case, tmp_path):
    bench = server.Bench(server.parsed(["--logs", str(tmp_path)]), None, {})
    ordered = bench.order(case, "sglang+triton")
    arguments = ordered.engine_arguments(tmp_path)
    longest = case.prompt_tokens + ordered.lengths[1]
    assert arguments["context_length"] > longest
    assert arguments["max_total_tokens"] >= max(case.batches) * arguments["context_length"]
    assert arguments["cuda_graph_bs_decode"] == list(case.batches)
    assert ordered.model["max_position_embeddings"] > arguments["context_length"]
    tree = [arguments.get(f"speculative_{name}") for name in ("eagle_topk", "num_steps", "num_draft_tokens")]
    assert tree == list(case.tree or [None] * 3) and ("speculative_algorithm" in arguments) == bool(case.tree)
    assert ordered.draft["draft_vocab_size"] == 32000 and ordered.draft["num_hidden_layers"] == 1
    samples = case.name in ("8/5/64", "4/3/8", "4/4/16", "8B 4/3/8", "32B 4/3/8")
    assert ordered.sampling == (((0.8, 0.95), (0.0, 1.0)) if samples else GREEDY)
    assert "tp_size" not in arguments
    more = server.Bench(server.parsed(["--logs", str(tmp_path), "--repeats", "11"]), None, {})
    assert (ordered.repeats, more.order(case, "sglang+triton").repeats) == (3, 11)
    matching = bench.order(case, "sglang+match")
    assert matching.sampling == ordered.sampling[:-1] and matching.rule == "match" and ordered.rule is None
    if case.name.startswith(("Qwen3", "32B")):
        assert ordered.model["architectures"] == ["Qwen3ForCausalLM"] and "rope_scaling" not in ordered.model
        assert ordered.draft["model_type"] == "llama" and ordered.model["vocab_size"] == 151936


@pytest.mark.parametrize("place", [0, 2, 4])
def test_three_engines_of_vllm_fit_on_a_gpu(place, tmp_path):
    """Each with all cases that it is started once for."""
    bench = server.Bench(server.parsed(["--engine", "vllm", "--logs", str(tmp_path)]), None, {})
    cases, bench.num_together = [case for case in VLLM_CASES if case.tree == VLLM_CASES[place].tree], 3
    order = bench.order(cases[0], "vllm+eagle_kernels", also=cases[1:])
    arguments, longest = order.engine_arguments(tmp_path), 8192 + order.also[0].lengths[1]
    assert longest < arguments["max_model_len"] <= 10240 and arguments["gpu_memory_utilization"] == 0.3
    assert 8 * longest * 4 * 8 * 128 * 32 < arguments["kv_cache_memory_bytes"] < 0.3 * 140e9 - 20e9
    assert arguments.get("speculative_config", {}).get("num_speculative_tokens") == (None, 3, 7)[place // 2]
    assert [each.lengths[0] for each in (order, *order.also)] == [48, 48] + {0: [0], 2: [], 4: [48]}[place]


def test_the_shapes_of_qwen3():
    """As published: parameters, of 4B without those of the output, which are the embedding's."""
    wanted = {"4b": 4.02e9, "8b": 8.19e9, "14b": 14.77e9, "32b": 32.76e9}
    for size, number in wanted.items():
        config = target_config(f"qwen3-{size}")
        small = config | {"max_position_embeddings": 8}
        one, two = (_num_parameters(small | {"num_hidden_layers": layers}) for layers in (1, 2))
        assert one + (config["num_hidden_layers"] - 1) * (two - one) == pytest.approx(number, rel=0.005)


def _num_parameters(config: dict) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(DecoderConfig.from_dict(config)).parameters())


def test_requests_have_the_lengths_of_the_load():
    (case,) = (case for case in CASES if case.name == "requests plain")
    assert len(case.requests) == 500 and {length for pair in case.requests for length in pair} >= {716, 1024}
    assert all(716 <= length <= 1024 for pair in case.requests for length in pair)


def test_stock_engines_get_no_plug_in(tmp_path, monkeypatch):
    for name in ("SGLANG_SIMULATE_ACC_LEN", "EAGLE_KERNELS_SGLANG", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["here", "/there"]))
    installation = sglang_engine.Installation(tmp_path / "sglang", tmp_path / "flashinfer")
    (tmp_path / "flashinfer" / "bin").mkdir(parents=True)
    told = order("triton").environment(installation, tmp_path / "plugin", with_flashinfer=True)
    folders = [str(tmp_path / "flashinfer"), str(tmp_path / "sglang")]
    assert told["PYTHONPATH"].split(os.pathsep) == [*folders, str(Path("here").resolve()), "/there"]
    assert told["PATH"].startswith(str(tmp_path / "flashinfer" / "bin"))
    assert told["SGLANG_PLUGINS"] == sglang_engine.NO_PLUGIN and told["SGLANG_SIMULATE_ACC_LEN"] == "4.0"
    assert not {"EAGLE_KERNELS_SGLANG", "TRITON_INTERPRET", "SGLANG_IS_FLASHINFER_AVAILABLE"} & set(told)
    plain = order("triton", accept=None)
    told = plain.environment(installation, tmp_path / "plugin", with_flashinfer=False)
    assert "SGLANG_SIMULATE_ACC_LEN" not in told and told["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"
    assert folders[0] not in told["PYTHONPATH"]


@pytest.mark.slow
def test_the_plug_in_is_found_as_an_installed_one(tmp_path):
    sglang_engine.write_plugin(tmp_path / "plugin")
    installation = sglang_engine.Installation()
    told = order("eagle_kernels").environment(installation, tmp_path / "plugin", with_flashinfer=True)
    assert (told["SGLANG_PLUGINS"], told["EAGLE_KERNELS_SGLANG"]) == ("eagle_kernels", "all")
    code = (
        "import importlib.metadata as m; (p,) = m.entry_points(group='sglang.srt.plugins', name='eagle_kernels');"
        "print(p.value, p.dist.version); print(p.load().__name__); import eagle_kernels; print(eagle_kernels.__file__)"
    )
    told |= {"TRITON_INTERPRET": "1"}  # there is no GPU to compile for
    done = subprocess.run([sys.executable, "-c", code], env=told, cwd=tmp_path, capture_output=True, text=True)
    point, function, file = done.stdout.splitlines()
    assert point == f"eagle_kernels.integrations.sglang:register {eagle_kernels.__version__}"
    assert function == "register" and Path(file).is_relative_to(engine.ROOT)


def test_stock_engines_get_fa3_as_a_plug_in(tmp_path, monkeypatch):
    """Which holds all that it needs: its file and the library, unpacked or linked; ours leave prompts to it on Hopper.
    SGLang's own needs none."""
    installation, plugin = sglang_engine.Installation(tmp_path / "sglang"), tmp_path / "plugin"
    told = order("fa3").environment(installation, plugin, with_flashinfer=False)
    assert told["SGLANG_PLUGINS"] == "fa3" and told["PYTHONPATH"].split(os.pathsep)[:2] == [
        str(plugin), str(tmp_path / "sglang"),
    ]  # fmt: skip
    monkeypatch.setattr(fa3, "FOLDER", tmp_path)
    (tmp_path / "vllm_fa3.so.xz").write_bytes(lzma.compress(b"packed"))
    sglang_engine.write_plugin(plugin, "fa3")
    assert (plugin / "vllm_fa3.so").read_bytes() == b"packed"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major, loaded in ((9, ["eagle_kernels", "fa3"]), (10, ["eagle_kernels"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert sglang_engine.plugins_of(order("eagle_kernels"), installation) == loaded
    assert (plugin / "sglang_fa3.py").read_bytes() == Path(sglang_fa3.__file__).read_bytes()
    points = (plugin / "vllm_fa3.dist-info" / "entry_points.txt").read_text()
    assert points == "[sglang.srt.plugins]\nfa3 = sglang_fa3:register\n"
    (tmp_path / "vllm_fa3.so").write_bytes(b"as it is")
    sglang_engine.write_plugin(tmp_path / "other", "fa3")
    assert (tmp_path / "other" / "vllm_fa3.so").resolve() == tmp_path / "vllm_fa3.so"
    write_own_fa3(tmp_path / "whole")
    installation = sglang_engine.Installation(tmp_path / "whole")
    told = order("fa3").environment(installation, plugin, with_flashinfer=False)
    assert told["SGLANG_PLUGINS"] == sglang_engine.NO_PLUGIN and str(plugin) not in told["PYTHONPATH"]


def vllm_fwd(
    q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap, is_rotary_interleaved,
    scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, cp_tot_seqused_k,
):  # fmt: skip
    """Has the arguments that vLLM's library declares; returns what they are given."""
    return locals()


def vllm_get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, page_size, max_seqlen_k_new, is_causal,
    window_size_left, window_size_right, has_softcap, num_splits, pack_gqa, sm_margin,
):  # fmt: skip
    return locals()


def sglang_arguments(function, last) -> dict:
    """Returns a value for each argument that sgl_kernel 0.4.5 gives its operator, in its order."""
    values = {name: f"the {name}" for name in inspect.signature(function).parameters if not name.startswith("cp_")}
    names = list(values)
    names.insert(names.index("window_size_right") + 1, "attention_chunk")
    return {name: values.get(name, 0) for name in names} | last


def test_vllm_s_fa3_takes_the_arguments_of_sglang_s(monkeypatch):
    """Those of `flash_attn_with_kvcache`, of `flash_attn_varlen_func`, which names the last ones, and of plans."""
    loaded, ours, theirs = [], torch.ops.sgl_kernel, torch.ops._vllm_fa3_C
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    for function in (vllm_fwd, vllm_get_scheduler_metadata):
        name = function.__name__.removeprefix("vllm_")
        monkeypatch.setattr(ours, name, None, raising=False)
        monkeypatch.setattr(theirs, name, function, raising=False)
    package = ModuleType("sgl_kernel")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_ops", None)
    sglang_fa3.register()
    assert loaded == [str(Path(sglang_fa3.__file__).with_name("vllm_fa3.so"))]
    assert importlib.import_module("sgl_kernel.flash_ops").__name__ == "sgl_kernel.flash_ops"

    given = sglang_arguments(vllm_fwd, {"sparse_mask_fine": None, "only_qv": False})
    assert len(given) == 37
    wanted = {name: given.get(name) for name in inspect.signature(vllm_fwd).parameters}
    wanted |= {"cp_world_size": 1, "cp_rank": 0}
    call, names = ours.fwd.default, list(given)
    assert call(*given.values()) == wanted
    named = {"sinks" if name == "s_aux" else name: given[name] for name in names[29:]}
    assert call(*(given[name] for name in names[:29]), **named) == wanted
    for name, value in (("attention_chunk", 8), ("sparse_mask_fine", "a mask"), ("only_qv", True)):
        with pytest.raises(ValueError, match=f"has no {name}; got {value}"):
            call(*(given | {name: value}).values())

    given = sglang_arguments(vllm_get_scheduler_metadata, {})
    call = ours.get_scheduler_metadata
    assert call(*given.values()) == {name: value for name, value in given.items() if name != "attention_chunk"}
    with pytest.raises(ValueError, match="has no attention_chunk; got 8"):
        call(*(given | {"attention_chunk": 8}).values())


def test_plans_fit_calls_that_name_no_number_of_splits(monkeypatch):
    """vLLM's operators would each guess it, of other lengths, and a plan of another number has another size."""
    for function in (vllm_fwd, vllm_get_scheduler_metadata):
        monkeypatch.setattr(torch.ops._vllm_fa3_C, function.__name__.removeprefix("vllm_"), function, raising=False)
    rest = {"sparse_mask_fine": None, "only_qv": False}
    for asked, planned, unplanned in ((0, sglang_fa3.NUM_SPLITS, 0), (1, 1, 1)):
        given = sglang_arguments(vllm_get_scheduler_metadata, {"num_splits": asked})
        assert sglang_fa3.get_scheduler_metadata(*given.values())["num_splits"] == planned
        given = sglang_arguments(vllm_fwd, rest | {"num_splits": asked})
        assert sglang_fa3.fwd(*given.values())["num_splits"] == planned
        assert sglang_fa3.fwd(*(given | {"scheduler_metadata": None}).values())["num_splits"] == unplanned


@pytest.mark.slow
def test_all_systems_on_a_made_sglang(sglang, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(server, "SHORT", 8)
    monkeypatch.setattr(server, "QUICK_LONG", 40)
    monkeypatch.setattr(server, "SMALLER", 256)
    monkeypatch.setattr(server.generation, "WARM_STEPS", 1)
    more = ["--flashinfer", str(tmp_path / "flashinfer"), "--case", "8/5/64", "4/4/16"]
    assert call(sglang, *more) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    told = [line for line in lines if line and line[0] in ("8/5/64", "4/4/16")]
    systems = [(line[0], line[3]) for line in told]
    cases, times = ("8/5/64", "4/4/16"), {"sglang+match": 1}
    expected = [(case, system) for case in cases for system in SYSTEMS[:5] for _ in range(times.get(system, 2))]
    assert systems == expected + [(case, "eagle_kernels") for case in cases for _ in range(2)]
    assert {(line[1], line[2]) for line in told} == {(b, t) for b in ("B=1", "B=8") for t in ("T=0", "T=0.8")}
    table = [line for line in lines if line[:1] == ["|"]]
    assert len(table) == 2 + 22


def test_engines_of_two_gpus(sglang, gpu, tmp_path, capsys, monkeypatch):
    """Lines tell of them, and so do SGLang's arguments; EAGLEInference is left out; one GPU is too few."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    more = ["--tp", "2", "--all-reduce", "nccl", "--case", "8B 4/3/8"]
    more += ["--system", "sglang+triton", "sglang+eagle_kernels", "eagle_kernels"]
    assert call(sglang, *more, directory=tmp_path / "results") == 2
    assert capsys.readouterr().out == "--tp 2: this machine has 1 GPUs\n"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert call(sglang, *more, directory=tmp_path / "results") == 0
    assert "eagle_kernels: EAGLEInference runs on one GPU, and is left out of --tp 2\n" in capsys.readouterr().out
    lines = kept(tmp_path / "results")
    assert [(line["system"], line["batch"]) for line in lines if line["temperature"] == 0] == [
        (system, batch) for system in ("sglang+triton", "sglang+eagle_kernels") for batch in (1, 8, 32)
    ]
    assert all((line["tp"], line["all_reduce"]) == (2, "nccl") for line in lines)
    arguments = order("triton", tp=2, all_reduce="nccl").engine_arguments(tmp_path)
    assert (arguments["tp_size"], arguments["disable_custom_all_reduce"]) == (2, True)
    assert order("triton", tp=2).engine_arguments(tmp_path)["disable_custom_all_reduce"] is False


@pytest.mark.slow
def test_lines_are_kept_beside_a_gpu(sglang, gpu, tmp_path):
    more = ["--flashinfer", str(tmp_path / "flashinfer"), "--system", *THREE, "--case", "plain", "4/3/8"]
    assert call(sglang, *more, directory=tmp_path / "results") == 0
    file = tmp_path / "results" / "Some_GPU_80GB" / "server.jsonl"
    lines = read_lines(file)
    assert [(line["case"], line["system"], line["batch"]) for line in lines if line["temperature"] == 0] == [
        *(("plain", system, batch) for system in THREE for batch in (1, 8, 32)),
        *(("4/3/8", system, 32) for system in THREE),
    ]
    for line in lines:
        assert line["parts"] == (["attention"] if line["system"] == "sglang+eagle_kernels" else [])
        assert line["attention_backend"] == line["system"].removeprefix("sglang+")
        assert line["accept_length"] == pytest.approx(2.5 if line["tree"] else 1.0)
        assert {"ms_per_step", "tokens_per_s"} < set(line) and len(line["raw"]) == 1
        assert (line["top_p"], line["commit"], line["quick"]) == (0.95 if line["temperature"] else 1.0, "abc", True)
        assert line["versions"]["sglang"] == "0.5.17" and line["versions"]["flashinfer"] == "0.6.15"
        assert line["start_s"] >= 0 and line["versions"]["torch"]
    assert server_tables.tables(file) == []  # quick ones make no table


def test_sglang_gets_vllm_s_fa3_where_it_has_none(sglang, gpu, tmp_path, capsys, monkeypatch):
    """Its lines name the build; without one, and on a GPU that is none of Hopper's, the system is left out."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    more = ["--system", "sglang+fa3", "--case", "4/3/8"]
    assert call(sglang, *more, directory=tmp_path / "vllm") == 0
    lines = kept(tmp_path / "vllm")
    assert [line["versions"]["fa3"] for line in lines] == ["vLLM's build"] * 2
    assert all(
        (line["system"], line["attention_backend"], line["parts"]) == ("sglang+fa3", "fa3", []) for line in lines
    )
    write_own_fa3(tmp_path / "site")
    importlib.invalidate_caches()
    capsys.readouterr()
    assert call(sglang, *more, directory=tmp_path / "own") == 0
    assert not any("fa3" in line["versions"] for line in kept(tmp_path / "own"))
    assert "| of sglang+fa3 |" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert call(sglang, *more) == 0
    assert capsys.readouterr().out == "sglang+fa3: FlashAttention 3 needs a Hopper GPU\n"


@pytest.mark.slow
def test_requests_are_sent_at_once(sglang, gpu, fail, tmp_path, capsys):
    systems = ["sglang+triton", "sglang+eagle_kernels", "eagle_kernels"]
    more = ["--case", "requests plain", "requests 1/1/2", "--system", *systems]
    assert call(sglang, *more, directory=tmp_path / "results") == 0
    lines = kept(tmp_path / "results")
    assert [(line["case"], line["system"]) for line in lines] == [
        (case, system) for case in ("requests plain", "requests 1/1/2") for system in systems[:2]
    ]
    for line in lines:
        assert line["requests_per_s"] == pytest.approx(64 / line["raw"][0], rel=0.01) and line["batch"] == 48
        assert line["accept_length"] == pytest.approx(1.7 if line["tree"] else 1.0)
    written = server_tables.request_table([line | {"shape": "llama-3.1-8b"} for line in lines])
    assert written[0][-2] == "in the pull request (70B, 2 H20)"
    assert [(row[0], row[1], row[-2]) for row in written[1:]] == [
        ("plain", "sglang+triton", "0.62"),
        ("plain", "sglang+eagle_kernels", "0.62"),
        ("1/1/2 (naive)", "sglang+triton", "0.68"),
        ("1/1/2 (naive)", "sglang+eagle_kernels", "0.68"),
    ]
    fail(triton="short")
    assert call(sglang, "--case", "requests plain", "--system", "sglang+triton") == 1
    assert "some texts are not as long as was asked for" in capsys.readouterr().out


def test_what_is_missing_is_said(sglang, capsys, tmp_path, monkeypatch):
    assert call(sglang, "--system", "sglang+flashinfer") == 0
    said = "sglang+flashinfer: FlashInfer is not installed; --flashinfer names a folder that holds it\n"
    assert capsys.readouterr().out == said
    (tmp_path / "peers" / "vllm_fa3.so.xz").unlink()
    assert call(sglang, "--system", "sglang+fa3") == 0
    said = "neither SGLang's own build (sgl_kernel/flash_ops) nor vLLM's (.peers/vllm_fa3.so) is here\n"
    assert capsys.readouterr().out == f"sglang+fa3: {said}"
    assert call(["--shape", "small", "--logs", str(tmp_path / "logs")], "--system", "sglang+triton") == 0
    assert capsys.readouterr().out == "SGLang is not installed; --sglang names a folder that holds it\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call([]) == 2
    assert capsys.readouterr().out == "a model of this size needs a GPU\n"


def test_another_acceptance_fails(sglang, fail, capsys):
    fail(eagle_kernels="accept")
    more = ["--case", "8/5/64", "--system", "sglang+triton", "sglang+eagle_kernels"]
    assert call(sglang, *more) == 1
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == "8/5/64 B=1 T=0.8 sglang+eagle_kernels: accepted length 3.920, stock's is 4.000"
    assert second.startswith("8/5/64 B=1 T=0 sglang+eagle_kernels: ")


def test_a_stock_system_of_another_draw_is_no_fault():
    about = {"case": "4/3/8", "batch": 32, "temperature": 0.0, "top_p": 1.0}
    lengths = {"sglang+flashinfer": 2.5, "sglang+triton": 2.55, "sglang+eagle_kernels": 2.551, "eagle_kernels": 2.49}
    lines = [about | {"system": system, "accept_length": length} for system, length in lengths.items()]
    assert server_tables.off_stock(lines) == []
    lines[2]["accept_length"] = 2.58
    assert server_tables.off_stock(lines) == [
        "4/3/8 B=32 T=0 sglang+eagle_kernels: accepted length 2.580, stock's is 2.500 and 2.550"
    ]


def test_engines_start_together_and_are_timed_in_turn(sglang, fail, tmp_path):
    """One generates at a time, none twice while others wait, and all are there from the first to the last."""
    fail(flashinfer="slow", triton="slow", eagle_kernels="slow")
    logs = tmp_path / "together"
    more = ["--case", "plain", "--system", *THREE, "--flashinfer", str(tmp_path / "flashinfer")]
    assert call(sglang, *more, "--together", "--logs", str(logs)) == 0
    ups, downs, spans = [], [], []
    for log in logs.iterdir():
        lines = [line.split() for line in log.read_text().splitlines()]
        ups += [float(line[1]) for line in lines if line[0] == "up"]
        downs += [float(line[1]) for line in lines if line[0] == "down"]
        spans += [(*map(float, line[1:]), log.name) for line in lines if line[0] == "timed"]
    spans.sort()
    assert len(spans) == 3 * 3 * 3 and len(ups) == len(downs) == 3
    assert max(ups) < spans[0][0] and spans[-1][1] < min(downs)
    assert all(first[1] < second[0] for first, second in pairwise(spans))
    turns = [who for *_, who in spans[::3]]  # of three generations each
    for place, (first, second) in enumerate(pairwise(turns)):
        assert first != second or set(turns[place:]) == {first}


@pytest.mark.slow
def test_an_engine_s_time_is_its_own(sglang, tmp_path):
    """The time for which others keep it waiting is not."""
    installation, records = sglang_engine.Installation(tmp_path / "site"), []
    for record in engine.run(order("triton"), installation, tmp_path / "log.txt", 6.0, with_flashinfer=False):
        records.append(record["kind"])
        if record["kind"] in ("started", "done"):
            time.sleep(6.5)
    assert records == ["started", "measured", "done"]


@pytest.mark.slow
def test_an_engine_that_hangs_in_its_turn_is_the_only_one_that_fails(sglang, fail, capsys):
    """Also where those that wait for it took longer to start, and have less time left."""
    fail(triton="stuck", eagle_kernels="late")
    more = ["--case", "8/5/64", "--system", "sglang+triton", "sglang+eagle_kernels", "sglang+match"]
    assert call(sglang, *more, "--together", "--limit", "8") == 1
    said = capsys.readouterr().out
    assert said.count("took longer than 8 s") == 1 and "8/5/64 sglang+triton: took longer" in said
    assert said.count("| sglang+eagle_kernels |") == 2 and said.count("| sglang+match |") == 1


@pytest.mark.cross
@pytest.mark.parametrize("together", [[], ["--together"]], ids=["alone", "together"])
@pytest.mark.parametrize(
    "fault, told",
    [
        ("crash", "RuntimeError: no kernel image"),
        ("other backend", "ran with other; asked for triton"),
        ("hot", "B=1 T=0.8: ValueError: too hot"),
    ],
)
def test_a_failure_is_named_and_the_others_run(fault, told, together, sglang, fail, capsys):
    fail(triton=fault)
    more = ["--case", "8/5/64", "--system", "sglang+triton", "sglang+eagle_kernels", *together]
    assert call(sglang, *more) == 1
    said = capsys.readouterr().out
    assert told in said and "8/5/64 sglang+triton: " in said
    assert said.count("| sglang+eagle_kernels |") == 2 and said.count("| sglang+triton |") == (fault == "hot")


@pytest.mark.parametrize(
    ("fault", "systems", "case", "told"),
    [
        ("no plug-in", ["sglang+eagle_kernels"], ["--case", "plain"], "the plug-in's attention was not used"),
        ("no match", ["sglang+match"], ["--case", "8/5/64"], "the plug-in's match was not used"),
        # where SGLang takes NCCL instead
        ("no all-reduce", ["sglang+triton", "sglang+eagle_kernels"], ["--tp", "2", "--case", "8B plain"],
         "SGLang's own all-reduce cannot be used here"),
    ],
)  # fmt: skip
def test_what_was_not_used_is_not_measured(fault, systems, case, told, sglang, fail, capsys):
    fail(eagle_kernels=fault)
    assert call(sglang, *case, "--system", *systems) == 1
    said = capsys.readouterr().out
    assert f"{case[-1]} {systems[-1]}: {told}" in said and f"| {systems[-1]} |" not in said
    assert said.count("| sglang+triton |") == 3 * (systems[0] == "sglang+triton")


def test_without_a_flashinfer_that_fails_the_others_run(sglang, fail, capsys, tmp_path):
    fail(flashinfer="crash")
    systems = ["--system", "sglang+flashinfer", "sglang+triton"]
    assert call(sglang, "--flashinfer", str(tmp_path / "flashinfer"), "--case", "8/5/64", *systems) == 1
    said = capsys.readouterr().out
    assert "from here on the other systems run without FlashInfer" in said and "| sglang+triton |" in said


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_with_what_it_started(sglang, fail, tmp_path):
    fail(triton="hang")
    log = tmp_path / "log.txt"
    installation = sglang_engine.Installation(tmp_path / "site")
    with pytest.raises(engine.EngineFailure, match="took longer than 3 s"):
        list(engine.run(order("triton"), installation, log, 3.0, with_flashinfer=False))
    other = int(log.read_text().split("started ")[1].split()[0])
    assert has_ended(other)


@pytest.mark.slow
def test_an_engine_ends_with_its_caller(sglang, fail, tmp_path):
    """Also where the caller is killed, and cannot end anything itself."""
    fail(triton="hang")
    log = tmp_path / "logs" / "8_5_64_sglang_triton.txt"
    command = [sys.executable, "-m", "bench.run", "--app", "server", *sglang, "--system", "sglang+triton"]
    command += ["--case", "8/5/64", "--results", "none"]
    caller = subprocess.Popen(command, cwd=engine.ROOT, stdout=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and "started" in log.read_text())
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    other = int(log.read_text().split("started ")[1].split()[0])
    wait_for(lambda: has_ended(other))


def has_ended(pid: int) -> bool:
    """Tells whether a process is gone, or dead and not yet collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, limit_s=60.0):
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def measured(system, ms, case="8/5/64", batch=1, temperature=0.0, **fields):
    about = {"op": "server", "shape": "llama-3.1-8b", "gpu": GPU, "commit": "abc", "run": "a", "quick": False}
    about |= {"case": case, "system": system, "batch": batch, "temperature": temperature, "prompt_tokens": 512}
    about |= {"top_p": 0.95 if temperature else 1.0, "versions": {"sglang": "0.5.17", "torch": "2.11", "triton": "3.6"}}
    return about | {"ms_per_step": ms, "tokens_per_s": 4000 * batch / (ms or 1), "accept_length": 4.0} | fields


def test_the_readme_s_row_is_beside_the_faster_stock_system(tmp_path):
    file = tmp_path / "Some_GPU_80GB" / "server.jsonl"
    for system, ms in (("sglang+triton", 20.0), ("sglang+flashinfer", 15.5), ("eagle_kernels", 9.0)):
        results.append(tmp_path, measured(system, ms, case="4/3/8", batch=32))
    assert server_tables.front_row(file) is None
    results.append(tmp_path, measured("sglang+eagle_kernels", 2.0, case="4/3/8", batch=32, commit="new"))
    assert server_tables.front_row(file) is None
    results.append(tmp_path, measured("sglang+eagle_kernels", 10.0, case="4/3/8", batch=32))
    results.append(tmp_path, measured("sglang+eagle_kernels", 1.0, case="4/3/8", batch=32, quick=True))
    name = "K/S/N=4/3/8 B=32, 8B model, Some GPU 80GB"
    row = ["SGLang's step, plugged", name, "10000", "sglang+flashinfer", "15500", "1.6×"]
    assert server_tables.front_row(file) == row


def test_a_ratio_is_of_one_commit():
    """Also where a system was timed again and another one was not."""
    lines = [measured("sglang+triton", 10.0), measured("sglang+flashinfer", 8.0, commit="new")]
    lines.append(measured("sglang+eagle_kernels", 4.0, commit="new"))
    (_, *rows) = server_tables.table(lines)
    assert [row[7:9] for row in rows] == [["1.00×", "-"], ["-", "1.00×"], ["2.00×", "-"]]


def test_a_table_of_models():
    lines = [
        measured(system, 4.0, case=case, batch=batch, tokens_per_s=speed * batch)
        for system, speed in (("sglang+triton", 200), ("sglang+eagle_kernels", 300))
        for case in ("Qwen3-32B plain", "Qwen3-4B 4/3/8")
        for batch in (1, 2, 8)
    ]
    header, *rows = server_tables.model_table(lines)
    assert header[3:7] == ["B = 1", "B = 2", "B = 4", "B = 8"]
    assert rows[:4] == [
        ["Qwen3-4B", "4/3/8", "sglang+triton", "200", "400", "-", "1600", "`abc`"],
        ["Qwen3-4B", "4/3/8", "sglang+eagle_kernels", "300", "600", "-", "2400", "`abc`"],
        ["Qwen3-32B", "plain", "sglang+triton", "200", "400", "-", "1600", "`abc`"],
        ["Qwen3-32B", "plain", "sglang+eagle_kernels", "300", "600", "-", "2400", "`abc`"],
    ]
    assert [row[3:7] for row in rows[4:]] == [
        ["41.5", "40.1", "39.3", "24.4"], ["95.2", "77.4", "61.2", "57.2"],
        ["30.6", "25.5", "24.1", "20.1"], ["76.1", "43.9", "37.5", "35.3"],
    ]  # fmt: skip
    assert server_tables.table(lines) == server_tables.request_table(lines) == []


def test_a_table_of_ranks():
    """Each number of GPUs by itself, and none of them among the steps of one."""
    lines = [
        measured(system, ms, case=case, batch=8, **ranks)
        for ranks, factor in (({}, 1), ({"tp": 2, "all_reduce": "own"}, 2), ({"tp": 2, "all_reduce": "nccl"}, 3))
        for case in ("8B 4/3/8", "32B plain")
        for system, ms in (("sglang+triton", 40.0 / factor), ("sglang+eagle_kernels", 20.0))
    ]
    header, *rows = server_tables.rank_table(lines)
    assert header[3:6] == ["GPUs", "all-reduce", "system"]
    assert [(row[0], *row[3:7], row[10]) for row in rows[:6]] == [
        ("8B 4/3/8", "1", "-", "sglang+triton", "40.000", "1.00×"),
        ("8B 4/3/8", "1", "-", "sglang+eagle_kernels", "20.000", "2.00×"),
        ("8B 4/3/8", "2", "nccl", "sglang+triton", "13.333", "1.00×"),
        ("8B 4/3/8", "2", "nccl", "sglang+eagle_kernels", "20.000", "0.67×"),
        ("8B 4/3/8", "2", "own", "sglang+triton", "20.000", "1.00×"),
        ("8B 4/3/8", "2", "own", "sglang+eagle_kernels", "20.000", "1.00×"),
    ]
    assert len(rows) == 12 and server_tables.table(lines) == []
    apart = [measured("sglang+triton", 10.0), measured("sglang+triton", 5.0, tp=2, accept_length=3.0)]
    assert [row[4] for row in server_tables.table(apart)[1:]] == ["10.000"] and server_tables.off_stock(apart) == []


def test_a_table_of_acceptance():
    """Of the steps, the share that accepted drafts to each level."""
    line = measured("sglang+triton", None, case="pair 4/3/8", batch=32, tree=[4, 3, 8], accepted=[10, 20, 30, 40])
    (header, row) = server_tables.acceptance_table([line | {"accept_length": 3.0}])
    assert dict(zip(header, row)) == {
        "tree": "4/3/8", "sampling": "greedy", "system": "sglang+triton", "steps": "100", "tokens a step": "3.000",
        "of all levels": "66.7%", "level 1": "90.0%", "level 2": "70.0%", "level 3": "40.0%", "level 4": "-",
        "level 5": "-", "at commit": "`abc`",
    }  # fmt: skip


def test_a_page_tells_what_was_accepted(tmp_path):
    """Of the pair's drafts, and where simulated lengths are apart; the pair's are apart by chance."""
    about = {"tree": [4, 3, 8], "accepted": [10, 20, 30, 40], "batch": 32}
    pair = [measured(system, None, case="pair 4/3/8", accept_length=length, **about)
            for system, length in (("sglang+triton", 3.0), ("sglang+eagle_kernels", 3.1))]  # fmt: skip
    lines = [*pair, measured("sglang+triton", 9.0), measured("eagle_kernels", 6.0, accept_length=4.05)]
    for line in lines:
        results.append(tmp_path, line)
    *_, acceptance, apart = server_tables.tables(tmp_path / "Some_GPU_80GB" / "server.jsonl")
    assert acceptance == markdown(server_tables.acceptance_table(pair)) and acceptance.count("\n") == 3
    bullets = [line for line in apart.splitlines() if line.startswith("* ")]
    assert bullets == ["* 8/5/64 B=1 T=0 eagle_kernels: accepted length 4.050, stock's is 4.000"]


def test_tables(tmp_path, monkeypatch):
    """In the folder of the GPU, and between the marks of the plug-in's page."""
    lines = [
        measured("sglang+flashinfer", 99.0),
        measured("sglang+eagle_kernels", 5.0, case="4/4/16", batch=8, temperature=0.8, prompt_tokens=8192),
        measured("sglang+flashinfer", 8.0),
        measured("sglang+triton", 10.0),
        measured("sglang+eagle_kernels", 4.0, versions={"sglang": "0.5.17", "flashinfer": "0.6", "torch": None}),
        measured("eagle_kernels", 1.0, quick=True),
    ]
    for line in lines:
        results.append(tmp_path / "results", line)
    (tmp_path / "README.md").write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    monkeypatch.setattr(report, "declared", list)
    page = tmp_path / report.SERVER_PAGE
    where = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    assert report.main(where) == 0 and not page.exists()
    text = (tmp_path / "results" / "Some_GPU_80GB" / "README.md").read_text()
    assert text.startswith("# Some_GPU_80GB\n\n## SGLang, stock and with the plug-in\n\nDummy weights, ")
    assert "SGLang 0.5.17, FlashInfer 0.6, torch 2.11, triton 3.6." in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert (
        "| of sglang+flashinfer | of sglang+triton (not the default on Hopper, the one on AMD) "
        "| of sglang+fa3 (vLLM's build of FlashAttention 3) |"
    ) in rows[0]
    assert rows[2:] == [
        "| 8/5/64 | 1 | greedy | sglang+flashinfer | 8.000 | 500 | 4.00 | 1.00× | 1.25× | - | `abc` |",
        "| 8/5/64 | 1 | greedy | sglang+triton | 10.000 | 400 | 4.00 | 0.80× | 1.00× | - | `abc` |",
        "| 8/5/64 | 1 | greedy | sglang+eagle_kernels | 4.000 | 1000 | 4.00 | 2.00× | 2.50× | - | `abc` |",
        "| 4/4/16, prompts of 8192 | 8 | temperature 0.8, top-p 0.95 | sglang+eagle_kernels "
        "| 5.000 | 6400 | 4.00 | - | - | - | `abc` |",
    ]
    page.parent.mkdir(parents=True)
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="README.md must hold the marks server:begin"):
        report.main([*where, "--check"])
    page.write_text("before\n<!-- server:begin -->\n<!-- server:end -->\nafter\n")
    assert report.main([*where, "--check"]) == 1 and report.main(where) == 0 and report.main([*where, "--check"]) == 0
    written = page.read_text()
    assert written.startswith("before\n<!-- server:begin -->\n**Some GPU 80GB**\n\nDummy weights, ")
    assert rows[4] in written and written.endswith("\n<!-- server:end -->\nafter\n")
    (tmp_path / "results" / "Some_GPU_80GB" / "server.jsonl").unlink()
    assert report.main(where) == 0
    assert "<!-- server:begin -->\nNo results yet.\n<!-- server:end -->" in page.read_text()


def test_engines_of_vllm_take_turns(vllm, gpu, tmp_path, monkeypatch):
    """Each is started once for all cases with its drafts."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    names, systems = ["vllm plain", "vllm plain 8k", "vllm chain3 8k", "vllm first token 8k"], VLLM_SYSTEMS[:3]
    assert call(vllm, "--case", *names, "--system", *systems, directory=tmp_path / "results") == 0
    lines, parts = kept(tmp_path / "results"), ["attention", "draft", "verify"]
    found = Counter((line["case"], line["batch"], line["temperature"]) for line in lines)
    sizes = {"vllm plain": (1, 8, 32), "vllm plain 8k": (8,), "vllm chain3 8k": (8,)}
    settings = [(name, batch, degrees) for name, batches in sizes.items() for batch in batches for degrees in (0, 0.8)]
    assert found == dict.fromkeys([*settings, ("vllm first token 8k", 1, 0)], 3)
    for line in lines:
        assert line["accept_length"] == pytest.approx(2.5 if line["tree"] else 1.0) and line["together"]
        assert line["parts"] == (parts if "eagle" in line["system"] else [])
        assert line["ms_per_step"] == pytest.approx(0.1, abs=1e-3)
        assert line["versions"]["vllm"] == "0.26.0" and (line["raw"][0][0] > 0) == ("first" not in line["case"])
    said = [line.split() for log in (tmp_path / "logs").glob("vllm_plain*") for line in log.read_text().splitlines()]
    spans = sorted(tuple(map(float, words[1:])) for words in said if words[0] == "timed")
    downs = [float(words[1]) for words in said if words[0] == "down"]
    assert len(downs) == 3 and spans[-1][1] < min(downs) and all(a[1] < b[0] for a, b in pairwise(spans))


def test_a_profile_of_vllm(vllm, gpu, tmp_path, capsys):
    """Of the last steps; it is kept with the times, and shown."""
    system = "vllm+triton"
    assert call(vllm, "--case", "vllm plain", "--system", system, "--profile", directory=tmp_path / "results") == 0
    said, lines = capsys.readouterr().out, kept(tmp_path / "results")
    assert said.count("| all of a step | 1 launches | 0.410 | 1.000 | 0.050 |") == 6
    assert said.count(f"| {system} | `gemm` | 1 | 0.400 |") == 6 == said.count(f"| {system} | 0.1")
    assert [line.get("section") for line in lines] == [None] * 6 + ["profile"] * 6
    assert all(line["steps"] == 5 for line in lines[6:])
    with pytest.raises(SystemExit):
        call(vllm, "--engine", "sglang", "--profile")
    assert "--profile: of --engine vllm alone" in capsys.readouterr().err


def test_times_stay_where_a_profile_fails(vllm, gpu, tmp_path, capsys, fail):
    fail(TRITON_ATTN="no steps")
    asked = "--case", "vllm plain", "--system", "vllm+triton", "--profile"
    assert call(vllm, *asked, directory=tmp_path / "results") == 1
    assert [line["ms_per_step"] > 0 for line in kept(tmp_path / "results")] == [True] * 6
    assert capsys.readouterr().out.count("no two calls of _gather_block_tables_kernel") == 6


def test_how_long_any_event_lasts():
    events = [{"ts": begin, "dur": end - begin} for begin, end in ((0, 10), (4, 6), (5, 12), (20, 30), (31, 33))]
    assert engine_child.covered_us(events, 0.0) == 24 and engine_child.covered_us(events, 1.0) == 25
    assert engine_child.covered_us(events[::-1], 8.0) == 33 and engine_child.covered_us([], 1.0) == 0


def test_what_vllm_did_not_use_is_not_measured(vllm, fail, capsys):
    fail(FLASH_ATTN="old", CUSTOM="no plug-in")
    assert call(vllm, "--case", "vllm chain3", "--system", *VLLM_SYSTEMS[:3]) == 1
    said = capsys.readouterr().out
    assert "vllm chain3 vllm+fa3: vLLM ran FlashAttention 2 in place of 3" in said
    assert "vllm+eagle_kernels: the plug-in's attention was not used" in said and said.count("| vllm+triton |") == 6


@pytest.mark.slow
def test_our_engine_is_timed_beside_vllm(vllm, monkeypatch, capsys):
    for name, value in (("SHORT", 8), ("QUICK_LONG", 40), ("SMALLER", 256)):
        monkeypatch.setattr(server, name, value)
    assert call(vllm, "--case", "vllm chain3 8k", "vllm first token 8k", "--system", "vllm+fa3", "eagle_kernels") == 0
    assert capsys.readouterr().out.count("| eagle_kernels |") == 3


def test_texts_of_vllm(vllm, capsys, monkeypatch):
    """Each engine's are held against stock's plain ones, or in fp32 against its own plain ones."""
    monkeypatch.setattr(server_rows, "NUM_SAMPLES", 50)
    assert call(vllm, "--check-only", "--jobs", "2") == 0
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    lines = [dict(zip(header, cells, strict=True)) for cells in rows]
    assert [line["engine"] for line in lines] == [row.name for row in VLLM_ROWS]
    wanted = server_rows.vllm_traffic(VLLM_ROWS[1])
    greedy = [new for new in wanted["joining"] if not new["is_sampled"]]
    # those that end, and have more than one token, begin again
    again = [new for new in greedy if wanted["requests"][new["index"]]["max_new_tokens"] > max(1, new["abort_at"] or 0)]
    for line, row in zip(lines, VLLM_ROWS):
        num = 64 if row.dtype else 37 + 4 + len(greedy) + sum(new["abort_at"] is None for new in again)
        num -= (64 if row.dtype else 37) * (row.reference == row.name)
        assert line["compared with"] == row.reference and line["ties"] == "0" and line["fault"] == ""
        assert (int(line["aborted"]) > 5) == (row.dtype is None) and line["same texts"] == f"{num} of {num}"
        assert (line["tokens a step"] == "2.000") == (row.tree != "plain")
    samples = [line["samples"].partition(", p = ") for line in lines]
    assert [each[0] for each in samples if each[2]] == ["500"] * 2
    assert all(float(each[2]) > 0.01 for each in samples if each[2])


def test_what_is_wrong_in_vllm_is_named(vllm, fail, capsys, monkeypatch):
    monkeypatch.setattr(server_rows, "NUM_SAMPLES", 50)
    fail(CUSTOM="no plug-in")
    assert call(vllm, "--check-only", "--row", "plugged-chain") == 1
    assert "plugged-chain: the plug-in's attention, draft, verify was not used\n" in capsys.readouterr().out
    fail(CUSTOM="wrong", TRITON_ATTN="wrong")
    assert call(vllm, "--check-only", "--jobs", "2", "--row", "plugged-chain", "eager", "seeded-chain") == 1
    said = capsys.readouterr().out
    for told in (
        "plugged-chain: request 18 (127 + 40 tokens, together): token 5 is ",
        "plugged-chain: request 18 (127 + 40 tokens, joining): token 5 is ",
        "plugged-chain: no draft was accepted\n",
        "plugged-chain: no prefix was found in the cache\n",
        "plugged-chain: 500 samples do not follow stock-plain's law: p = ",
        "eager: no request was preempted\n",
        "seeded-chain: request 63 (64 + 64 tokens, together): token 0 is ",
        "seeded-chain: no draft was accepted\n",
    ):
        assert told in said
    assert "plugged-chain: no request was preempted" not in said and "eager: no prefix" not in said
    assert "| 0 of 64 | 0 |" in said and "stock-chain" not in said


def test_rows_of_vllm(tmp_path):
    """Of what plugged chains differ by, each pair of values occurs; the longest requests fit, and few at once do."""
    chains = [row for row in VLLM_ROWS if row.tree == "chain" and row.asked == "all"]
    differ = [
        (row.has_graphs, row.has_overlap, row.page_size > 16, row.chunk_tokens > 256, row.has_radix_cache,
         row.has_small_pool) for row in chains
    ]  # fmt: skip
    assert len(chains) == 6 and {row.page_size for row in chains} == {16, 32, 64, 256}
    for first, second in combinations(range(6), 2):
        assert len({(values[first], values[second]) for values in differ}) == 4
    for row in VLLM_ROWS:
        wanted = server_rows.vllm_traffic(row)
        used = [wanted["requests"][index] for index in {*wanted["together"], *wanted.get("samples", ())}]
        longest = max(len(request["prompt"]) + request["max_new_tokens"] for request in used)
        assert longest == (128 if row.dtype else vllm_engine.TEXT_LENGTH) and used == wanted["requests"]
        tokens = vllm_engine.SMALL_POOL // 3584 - row.page_size  # vLLM keeps one page
        assert not row.has_small_pool or 1024 + row.page_size < tokens < 24 * 100
    mixes = [server_rows.seeded(index) for index in range(server_rows.NUM_SEEDED)]
    assert len({json.dumps({**mix, "seed": 0}, sort_keys=True) for mix in mixes}) == 64
    assert len({mix["seed"] for mix in mixes}) == 64


def test_samples_of_one_law_are_alike():
    """Of another law they are not; nor where a law is right token by token, but tokens depend on each other."""
    draw = random.Random(3)
    law = lambda weights: [(prompt, *draw.choices(range(4), weights, k=3)) for prompt in (0, 1) for _ in range(2000)]  # noqa: E731
    one, other = law((8, 4, 2, 1)), law((8, 4, 2, 1))
    assert server_texts.p_alike(one, other) > 0.01
    assert server_texts.p_alike(one, law((7, 5, 2, 1))) < 1e-4
    twice = [(prompt, token, token, last) for prompt, token, _, last in other]
    assert server_texts.p_alike(one, twice) < 1e-4
    assert server_texts.p_alike(one, one) == server_texts.p_alike([(0, 1)], [(0, 1)]) == 1.0


def test_a_table_of_trees_in_vllm(tmp_path):
    """Speeds are held against the fastest chain's, and steps against our own engine's."""
    about = {"case": "vllm 8/5/64", "batch": 1, "together": True}
    speeds = {"vllm+eagle_kernels": (8.0, 500.0), **dict(zip(CHAINS, ((5.0, 300.0), (6.0, 400.0), (7.0, 350.0))))}
    for system, (step_ms, speed) in {**speeds, "eagle_kernels": (7.5, 520.0)}.items():
        results.append(tmp_path, measured(system, step_ms, **about) | {"tokens_per_s": speed})
    title, _, _, table = server_tables.section(tmp_path / "Some_GPU_80GB" / "server.jsonl", "vLLM")
    assert [row.split(" | ")[3:4] + row.split(" | ")[-3:-1] for row in table.splitlines()[2:]] == [
        ["vllm+eagle_kernels", "1.25×", "1.07×"], ["vllm+fa3 chain3", "0.75×", "-"], ["vllm+fa3 chain5", "1.00×", "-"],
        ["vllm+fa3 chain7", "0.88×", "-"], ["eagle_kernels", "1.30×", "1.00×"],
    ]  # fmt: skip


def test_trees_in_vllm_are_beside_its_chains(tmp_path):
    bench = server.Bench(server.parsed(["--engine", "vllm", "--logs", str(tmp_path)]), None, {})
    (case,), bench.num_together = [case for case in VLLM_CASES if case.name == "vllm 8/5/64"], 4
    orders = {system: bench.order(case, system) for system in VLLM_SYSTEMS if case.sampling_of(system)}
    made = {system: order.engine_arguments(tmp_path) for system, order in orders.items()}
    assert list(made) == ["vllm+eagle_kernels", *list(CHAINS)[:3], "eagle_kernels"] and len({
        orders[system].compiled for system in list(made)[:-1]
    }) == 4  # fmt: skip
    for system, arguments in list(made.items())[:-1]:
        drafts, is_tree = arguments["speculative_config"], system not in CHAINS
        assert drafts["num_speculative_tokens"] == (63 if is_tree else CHAINS[system][0])
        assert drafts["synthetic_acceptance_length"] == (4.0 if is_tree else CHAINS[system][1])
        assert arguments["attention_backend"] == ("CUSTOM" if is_tree else "FLASH_ATTN")
        assert arguments.get("additional_config") == ({"eagle_kernels": {"topk": 8, "depth": 5}} if is_tree else None)
        assert arguments["gpu_memory_utilization"] == 0.225
    (chain,) = [case for case in VLLM_CASES if case.name == "vllm chain3"]
    assert [system for system in VLLM_SYSTEMS if chain.sampling_of(system)] == [*VLLM_SYSTEMS[:3], "eagle_kernels"]


def test_the_pair_is_timed_by_what_it_accepts(vllm, gpu, tmp_path, monkeypatch):
    """All trees and chains at the same time, an engine for each."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    names = ["vllm pair 4/8/32", "vllm pair 4/11/48"]
    assert call(vllm, "--case", *names, directory=tmp_path / "results") == 0
    lines = kept(tmp_path / "results")
    found = Counter((line["case"], line["batch"], line["system"]) for line in lines)
    settings = [(name, batch) for name in names for batch in (1, 8)]
    assert found == {(*each, system): 2 for each in settings for system in ("vllm+eagle_kernels", *CHAINS)}
    assert all(line["shape"] == "pair" and line["accept_length"] == pytest.approx(2.0) for line in lines)
    assert len(list((tmp_path / "logs").iterdir())) == 2 + len(CHAINS)


def test_turns_of_the_pair_have_other_prompts(monkeypatch):
    """Times of all turns count alike, and a generation that took no time is told."""
    seen, told, spent_s = [], [], [0.0]
    monkeypatch.setattr(engine_child.time, "perf_counter", lambda: sum(spent_s))

    class Made:
        def generate(self, prompts, sampling, length):
            seen.append([prompt[0] for prompt in prompts])
            spent_s.append(len(seen) * length)
            return [[0] * length] * len(prompts)

        def steps(self):
            return sum(map(len, seen))

    sizes = {"lengths": [2, 4], "repeats": 3, "prompt_tokens": 1, "vocab_size": 512, "turns": None, "case": "pair",
             "profile": False}  # fmt: skip
    order = sizes | {"sampling": [{"temperature": 0.0}], "batches": [1, 8], "is_speculative": False}
    engine_child.measure_all(
        Made(), order | {"prompts": [[n] for n in range(10)]}, lambda *_, **line: told.append(line)
    )
    assert seen[2::3] == [[0], [1], [2], [*range(8)], [8, 9, *range(6)], [6, 7, 8, 9, *range(4)]]
    assert all(seen[place : place + 3] == [seen[place]] * 3 for place in range(0, len(seen), 3))
    tokens, seconds = 2 * 3 * 8, sum(long_s - short_s for short_s, long_s, *_ in told[1]["raw"])
    assert len(told) == 2 and told[1]["tokens_per_s"] == pytest.approx(tokens / seconds, rel=1e-3)
    del seen[:]
    engine_child.measure_all(Made(), order | {"prompts": []}, lambda *_, **line: None)
    assert all(turn == seen[9] for turn in seen[9:]) and len(set(seen[9])) > 1
    monkeypatch.setattr(engine_child.time, "perf_counter", lambda: 1.0)
    engine_child.measure_all(Made(), order | {"prompts": []}, lambda *_, **line: told.append(line))
    assert "4 tokens took 0.0000 s and 2 took 0.0000: nothing was timed" in told[2]["error"]


def test_a_soak_of_vllm(vllm, capsys, fail):
    """Random requests of a row, beside as much of stock's texts; early ends and lost blocks are told."""
    assert call(vllm, "--check-only", "--row", "tree-4/4/16", "--soak", "1") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tree-4/4/16")]
    same = line.split("|")[9].split()
    assert same[0] == same[2] and int(same[0]) > 40
    aborted = line.split("|")[11].strip()
    assert 0 < int(aborted) < int(same[0])
    fail(CUSTOM="ends early")
    assert call(vllm, "--check-only", "--row", "tree-4/4/16", "--soak", "1") == 1
    assert "4 tokens, stock has " in capsys.readouterr().out
    fail(CUSTOM="leak")
    assert call(vllm, "--check-only", "--row", "tree-4/4/16", "--soak", "1") == 1
    assert "tree-4/4/16: 25.00% of the pool is not free when no request is left\n" in capsys.readouterr().out


def test_ranks_of_vllm(vllm, monkeypatch, tmp_path):
    """Plugged engines are on both GPUs, each of which has its part of the pool, and the stock one on one."""
    started, run = {}, engine.run
    monkeypatch.setattr(engine, "run", lambda order, *given: started.update({order.asked: order}) or run(order, *given))
    assert call(vllm, "--check-only", "--row", "tree-4/4/16", "--tp", "2", "--all-reduce", "nccl") == 0
    unfused = {"pass_config": {"fuse_allreduce_rms": False}}
    for asked, wanted in (("", (None, None, None)), ("all", (2, True, unfused))):
        order = started[asked]
        arguments, told = order.for_child(tmp_path)["engine"], order.environment(engine.Installation(), tmp_path)
        names = ("tensor_parallel_size", "disable_custom_all_reduce", "compilation_config")
        found = [arguments.get(name) for name in names]
        assert tuple(found) == wanted and ("VLLM_ALLREDUCE_USE_SYMM_MEM" in told) == (asked == "all")
    assert arguments["kv_cache_memory_bytes"] == vllm_engine.SMALL_POOL // 2


def test_a_table_of_vllm(tmp_path):
    """Ratios of turns that were taken together, apart from SGLang's."""
    about = {"case": "vllm chain3", "batch": 8, "together": True}
    turns = [(8, 8.8, 8), (10, 10, 10), (4, 4, 4), (5,)]
    for system, times in zip([system for system in VLLM_SYSTEMS if system not in CHAINS], turns, strict=True):
        raw = [[1.0, 1.0 + ms / 10, 100, 400] for ms in times]
        results.append(tmp_path, measured(system, times[0], raw=raw, **about))
    results.append(tmp_path, measured("sglang+triton", 9.0))
    file = tmp_path / "Some_GPU_80GB" / "server.jsonl"
    title, _, _, table = server_tables.section(file, "vLLM")
    header, _, *rows = table.splitlines()
    assert title == "## vLLM, stock and with the plug-in" and "| of vllm+triton (not the default on Hopper) |" in header
    assert [row.split(" | ")[-3:-1] for row in rows] == [
        ["1.00×", "1.25× (1.14 to 1.25)"], ["0.80× (0.80 to 0.88)", "1.00×"],
        ["2.00× (2.00 to 2.20)", "2.50× (2.50 to 2.50)"], ["1.60×", "2.00×"],
    ]  # fmt: skip
    assert server_tables.tables(file)[0] == "## SGLang, stock and with the plug-in"
    lines = [measured("vllm+fa3", 8.0, raw=raw, **about), measured("vllm+eagle_kernels", 8.0, **about)]
    off = [server_tables.off_stock([lines[0], lines[1] | {"accept_length": length}]) for length in (4.4, 4.5)]
    assert off[0] == [] and len(off[1]) == 1  # of 800 steps
