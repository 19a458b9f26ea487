"""The examples of the laboratory `speculative-decoding`, as its README has them, with our modules under its names.

The model `gpt2` is a small one of random weights with GPT-2's layers and heads, in a folder of this name.
"""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench.lab import autoregressive, config, loader, ollama, prompts, registry, wrapper
from eagle_kernels.tools import measure

from .stock import stock

MODULES = {
    "src.models.loader": loader,
    "src.models.wrapper": wrapper,
    "src.models.registry": registry,
    "src.data.prompts": prompts,
    "src.decoding.autoregressive": autoregressive,
    "src.profiling.timer": measure,
    "src.profiling.metrics": SimpleNamespace(
        GenerationResult=measure.GenerationResult, BenchmarkConfig=config.BenchmarkConfig
    ),
}

REGISTRY = """
from src.models.registry import list_pairs, get_pair

print(list_pairs())
# ['gpt2_dev', 'tinyllama_llama3', 'phi3_llama3', 'llama3_self']

pair = get_pair("gpt2_dev")
print(pair.draft_model_id)   # gpt2
print(pair.target_model_id)  # gpt2-xl
print(pair.draft_dtype)      # float16
"""

DATASET = """
from src.data.prompts import PromptDataset

dataset = PromptDataset.load("data/prompts.json")

code_prompts = dataset.get_by_domain("code")       # list[Prompt]
all_prompts  = dataset.get_all()                    # list[Prompt]

print(len(dataset))                                 # 150
print(code_prompts[0].prompt_id)                    # "code_000"
print(code_prompts[0].token_count)
"""

WRAPPER = """
import torch
from src.models.loader import load_model
from src.models.wrapper import ModelWrapper

model, tokenizer = load_model("gpt2", "float32")
device = next(model.parameters()).device
wrapper = ModelWrapper(model, tokenizer, device)

# --- Prefill ---
prompt_ids = tokenizer.encode("The quick brown fox", return_tensors="pt").to(device)
logits, cache = wrapper.forward(prompt_ids)

print(wrapper.get_cache_length(cache))   # 4  (one entry per prompt token)
# logits shape: [1, 4, 50257]

# --- Decode one token ---
next_token = logits[:, -1, :].argmax(dim=-1, keepdim=True)   # greedy
logits, cache = wrapper.forward(next_token, past_key_values=cache)
print(wrapper.get_cache_length(cache))   # 5

# --- Simulate rejection at position 3: roll back to position 3 ---
cache = wrapper.truncate_cache(cache, keep_length=3)
print(wrapper.get_cache_length(cache))   # 3

# Continue from position 3 with a replacement token
replacement = torch.tensor([[1234]]).to(device)
logits, cache = wrapper.forward(replacement, past_key_values=cache)
print(wrapper.get_cache_length(cache))   # 4
"""

TIMER = """
import torch
from src.profiling.timer import CUDATimer, CUDATimerCollection, cuda_sync_time

# --- Single operation ---
with CUDATimer() as t:
    result = torch.mm(
        torch.randn(2048, 2048, device="cuda"),
        torch.randn(2048, 2048, device="cuda"),
    )
print(f"matmul: {t.elapsed_ms:.2f} ms")

# --- Multi-phase profiling ---
timers = CUDATimerCollection()

timers.start("draft")
# ... draft model forward passes ...
timers.stop("draft")

timers.start("verify")
# ... target model verification pass ...
timers.stop("verify")

print(timers)
# CUDATimerCollection:
#   draft  :    1.243 ms
#   verify :    4.817 ms

print(timers.summary())   # {'draft': 1.243, 'verify': 4.817}
"""

METRICS = """
from src.profiling.metrics import GenerationResult, BenchmarkConfig

# --- Build a result (normally returned by the decoder) ---
result = GenerationResult(
    generated_ids=[1, 2, 3, 4, 5],
    per_token_latencies=[0.08, 0.09, 0.08, 0.10, 0.09],   # seconds
    total_time=0.44,
    peak_memory_mb=1823.0,
    time_to_first_token=0.08,
    # Speculative-only fields:
    acceptance_rate=0.78,
    tokens_per_step=4.12,
    num_speculation_rounds=18,
    draft_time_total_ms=120.5,
    verify_time_total_ms=310.2,
    sampling_time_total_ms=9.3,
)

print(result.tokens_per_second)    # 5 / 0.44 ≈ 11.36
print(result.latency_p50)          # median per-round latency
print(result.latency_p95)          # 95th-percentile latency
print(result.summary())
# SD  | 5 tok | 11.4 tok/s | p50=90ms p95=100ms | mem=1823MB | accept=0.78 rounds=18

# --- Serialise to JSONL for results files ---
with open("results/run.jsonl", "a") as f:
    f.write(result.to_json_line())   # one JSON object per line

# --- Round-trip from JSON ---
import json
restored = GenerationResult.from_dict(json.loads(result.to_json_line()))

# --- Config hashing for deduplication ---
config = BenchmarkConfig(
    model_pair_name="gpt2_dev",
    K=4,
    temperature=0.0,
    max_new_tokens=200,
    prompt_domain="code",
    seed=42,
)
print(config.decoder_label)     # "SD-K4"
print(config.config_hash())     # e.g. "a3f9c1b20d44"  (12-char SHA-256 prefix)
"""

DECODER = """
import torch
from src.models.loader import load_model
from src.models.wrapper import ModelWrapper
from src.decoding.autoregressive import AutoregressiveDecoder

model, tokenizer = load_model("gpt2", "float32")
device = next(model.parameters()).device
wrapper = ModelWrapper(model, tokenizer, device)
decoder = AutoregressiveDecoder(wrapper)

# --- Token-ID interface (returns GenerationResult) ---
prompt_ids = tokenizer.encode("The quick brown fox", return_tensors="pt").to(device)
result = decoder.generate(prompt_ids, max_new_tokens=50, temperature=0.0)

print(result.num_tokens)           # ≤ 50
print(f"{result.tokens_per_second:.1f} tok/s")
print(f"p50={result.latency_p50*1000:.0f}ms  p95={result.latency_p95*1000:.0f}ms")
print(result.summary())
# AR  | 50 tok | 63.2 tok/s | p50=15ms p95=21ms | mem=0MB

# --- Plain-text convenience wrapper ---
text = decoder.generate_text("The quick brown fox", max_new_tokens=50, temperature=0.0)
print(text)

# --- Temperature sampling ---
result_sampled = decoder.generate(prompt_ids, max_new_tokens=50, temperature=0.8)
"""


@pytest.fixture
def run(monkeypatch, tmp_path, device, capsys):
    """Runs an example in a folder of its own; returns its names and the lines that it prints."""
    monkeypatch.chdir(tmp_path)
    for name in ("src", "src.models", "src.data", "src.decoding", "src.profiling"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)

    def run_example(example: str) -> tuple[dict, list[str]]:
        names: dict = {}
        exec(compile(example.replace('"cuda"', repr(str(device))), "README", "exec"), names)
        return names, capsys.readouterr().out.splitlines()

    return run_example


@pytest.fixture
def gpt2(run, tmp_path):
    """The folder `gpt2`."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = dict(zip([*(f"w{index}" for index in range(1300)), "The", "quick", "brown", "fox"], range(1304)))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1299").save_pretrained("gpt2")
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 192, "vocab_size": len(words)}
    stock("gpt2", **sizes, initializer_range=0.1).save_pretrained("gpt2")


def test_the_registry(run):
    _, printed = run(REGISTRY)
    assert printed[0].startswith("['gpt2_dev', 'tinyllama_llama3', 'phi3_llama3', 'llama3_self'")
    assert printed[1:] == ["gpt2", "gpt2-xl", "float16"]


def test_prompts_without_a_network(run, gpt2, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prompts.main(["--tokenizer", "gpt2", "--output", "data/prompts.json"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:4]] == [
        ["code", "50"], ["conversation", "50"], ["summarization", "50"]
    ]  # fmt: skip
    names, printed = run(DATASET)
    assert printed[:2] == ["150", "code_000"] and int(printed[2]) == names["code_prompts"][0].token_count
    assert len(names["all_prompts"]) == 150 and len(names["code_prompts"]) == 50
    assert prompts.main(["--tokenizer", "gpt2"]) == 0  # the same file, and a small one beside it
    assert len(prompts.PromptDataset.load("data/prompts_tiny.json")) == 15


@pytest.mark.cross
@pytest.mark.parametrize("arguments", [["--n-tokens", "20"], []])
def test_a_model_is_loaded_and_tried(run, gpt2, arguments, capsys):
    assert loader.main(["--model", "gpt2", "--dtype", "float32", *arguments]) == 0
    assert f"{arguments[1] if arguments else 10} tokens: 'The quick brown fox " in capsys.readouterr().out


def test_the_wrapper_cuts_back(run, gpt2):
    names, printed = run(WRAPPER)
    assert printed == ["4", "5", "3", "4"] and names["logits"].shape == (1, 1, names["wrapper"].vocab_size)
    wrapped, cache = names["wrapper"], names["cache"]
    assert len(cache) == 12 and all(part.shape == (1, 12, 4, 16) for part in cache[0])
    tokens = torch.cat([names["prompt_ids"][:, :3], names["replacement"]], dim=1)
    torch.testing.assert_close(names["logits"], wrapped.forward(tokens)[0][:, 3:])
    # the model that was wrapped generates as before
    greedy = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(names["prompt_ids"])}
    text = wrapped.model.generate(names["prompt_ids"], **greedy)[0, 4:].tolist()
    fresh, _ = loader.load_model("gpt2", "float32")
    assert text == fresh.generate(names["prompt_ids"], **greedy)[0, 4:].tolist()


def test_timers(run):
    _, printed = run(TIMER)
    assert printed[0].startswith("matmul: ") and printed[1] == "CUDATimerCollection:"
    assert [line.split(":")[0].strip() for line in printed[2:4]] == ["draft", "verify"]


def test_results_and_configurations(run, tmp_path):
    (tmp_path / "results").mkdir()
    names, printed = run(METRICS)
    assert [round(float(value), 3) for value in printed[:3]] == [11.364, 0.09, 0.098]
    assert printed[3] == "SD  | 5 tok | 11.4 tok/s | p50=90ms p95=98ms | mem=1823MB | accept=0.78 rounds=18"
    assert printed[4] == "SD-K4" and len(printed[5]) == 12 and int(printed[5], 16) >= 0
    assert names["restored"] == names["result"]
    assert json.loads((tmp_path / "results" / "run.jsonl").read_text())["peak_memory_mb"] == 1823.0


def test_the_decoder(run, gpt2):
    names, printed = run(DECODER)
    assert printed[0] == "50" and printed[3].startswith("AR  | 50 tok | ")
    assert printed[4].startswith("The quick brown fox ") and len(printed[4].split()) == 54
    assert names["result_sampled"].num_tokens <= 50


def test_ollama_is_asked(run, monkeypatch, capsys):
    monkeypatch.setenv("OLLAMA_HOST", "http://127.0.0.1:9")  # nobody is there
    assert ollama.main([]) == 1
    assert capsys.readouterr().out.startswith("Ollama at http://127.0.0.1:9: not running")
