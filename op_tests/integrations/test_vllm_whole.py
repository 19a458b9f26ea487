"""Trees of drafts in the whole of vLLM 0.26, on a CPU, beside EAGLEInference: the same texts, steps and acceptance.

Plain runs skip this. EAGLE_KERNELS_VLLM_SITE is a folder with vLLM and all that it imports; a C compiler makes what
stands in the place of libcuda.so.1. Each run takes a minute.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair, load_target
from op_tests.integrations.vllm_grammar import Grammar
from op_tests.integrations.vllm_stub import SITE

pytestmark = pytest.mark.skipif(not (SITE and shutil.which("cc")), reason="no vLLM, or no C compiler")

ROOT = Path(__file__).parents[2]
# what vLLM's libraries link to
SYMBOLS = (
    "cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString "
    "cuGetProcAddress_v2 cuInit cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity "
    "cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled"
)
LENGTHS, TOKENS = (5, 40, 17, 70, 33), 20
TREES = {"4/3/8": (4, 3, 8), "8/5/32": (8, 5, 32), "1/4": (1, 4, 5)}
PREFIXES, ASYNC = {"enable_prefix_caching": True}, {"async_scheduling": True}
# a pool for two of the longest requests, in pages of 16 tokens
SMALL = {"max_model_len": 192, "kv_cache_memory_bytes": 15 * 2 * 7 * 16 * 4 * 32 * 4}


def prompts() -> list[list[int]]:
    file = demo_pair()[0].parent / "prompts.json"
    tokens = list("".join(json.loads(file.read_text(encoding="utf-8"))).encode())
    return [tokens[331 * place :][:length] for place, length in enumerate(LENGTHS)]


@pytest.fixture
def serve(tmp_path):
    """Returns what starts vLLM with drafts, topk and depth (None: none, or a chain), and serves the prompts."""
    stub = tmp_path / "stub.c"
    stub.write_text("".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in SYMBOLS.split()))
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, stub], check=True)
    target, draft = demo_pair()
    shutil.copytree(draft, tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]  # vLLM taps before a layer
    file.write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}))

    def run(drafts=None, tree=None, sampling=None, graphs=(), latents=None, **options) -> dict:
        engine = {
            "model": str(target), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "block_size": 16,
            "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 25, "enable_prefix_caching": False,
            "async_scheduling": False,
        } | options  # fmt: skip
        if latents:  # vLLM gives models that could have experts to its older runner
            engine["model"] = str(latents)
        if drafts and latents:
            engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        elif drafts:
            engine["speculative_config"] = {"method": "eagle3", "model": str(tmp_path / "draft"),
                                            "num_speculative_tokens": drafts}  # fmt: skip
        if tree:
            engine["additional_config"] = {"eagle_kernels": dict(zip(("topk", "depth"), tree))}
        sampling = [{"max_tokens": TOKENS} | (sampling or (lambda place: {"temperature": 0.0}))(place)
                    for place in range(len(LENGTHS))]  # fmt: skip
        requests = [[token % 12 for token in prompt] for prompt in prompts()] if latents else prompts()
        order = {"engine": engine, "requests": requests, "sampling": sampling, "graphs": list(graphs)}
        environment = os.environ | {
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": f"{SITE}:{ROOT}",
        }
        script = ROOT / "op_tests" / "integrations" / "vllm_on_cpu.py"
        command = [sys.executable, script, json.dumps(order), tmp_path / "meeting"]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900)
        (tmp_path / "meeting").unlink(missing_ok=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def grammar_allows(text: list[int]) -> bool:
    return Grammar(257).validate_tokens(text) == text


def of_own_engine(tree: tuple[int, int, int]):
    topk, depth, nodes = tree
    target, draft = demo_pair()
    config = EAGLEConfig(topk=topk, num_steps=depth, num_draft_tokens=nodes)
    engine = EAGLEInference.from_pretrained(draft, target, config, device="cpu", dtype=torch.float32)
    return engine.generate(prompts(), max_new_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ("4/3/8", {"graphs": [8, 16, 32]} | ASYNC | PREFIXES), ("4/3/8", SMALL), ("8/5/32", ASYNC),
        ("1/4", {"graphs": [5, 10]} | PREFIXES),
    ],
    ids=lambda one: one if isinstance(one, str) else ", ".join(one),
)  # fmt: skip
def test_texts_and_steps_are_those_of_our_engine(serve, tree, options):
    wanted, (*shape, nodes) = of_own_engine(TREES[tree]), TREES[tree]
    found = serve(nodes - 1, shape, **options)
    assert found["texts"] == wanted.output_ids and found["lost"] == 0
    assert bool(found["replayed"]) == ("graphs" in options)
    assert (found["preempted"] > 0) == ("max_model_len" in options)
    if not found["preempted"]:  # which drafts anew
        accepted = wanted.stats.accepted
        assert (found["accepted"], found["drafted"]) == (accepted, wanted.stats.drafted)


@pytest.mark.parametrize("options", [ASYNC | {"max_model_len": 300}, PREFIXES], ids=["async", "sync"])
def test_texts_of_a_grammar_are_those_without_drafts(serve, options):
    """Beside requests without one."""
    sampling = lambda place: {"temperature": 0.9, "seed": place, "grammar": place < 4}  # noqa: E731
    plain, trees = serve(sampling=sampling), serve(7, (4, 3), sampling, **options)
    assert trees["texts"] == plain["texts"] and trees["accepted"] > trees["steps"] / 3
    assert all(grammar_allows(text) for text in plain["texts"][:4]) and not grammar_allows(plain["texts"][4])


def test_seeded_texts_are_those_without_drafts(serve):
    filters = ({}, {"top_k": 20}, {"top_p": 0.8, "top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05})
    sampling = lambda place: {"temperature": 0.9, "seed": 100 + place} | filters[place]  # noqa: E731
    plain, trees = serve(sampling=sampling), serve(7, (4, 3), sampling, graphs=[8, 16, 32], **ASYNC)
    assert trees["texts"] == plain["texts"] and trees["accepted"] > trees["steps"] / 2


# Sizes of heads that vLLM takes, no experts, and so few tokens that drafts are accepted by chance.
TINY = {
    "vocab_size": 12, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "kv_lora_rank": 256, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "q_lora_rank": 48, "first_k_dense_replace": 9, "max_position_embeddings": 512,
}  # fmt: skip
ROW = 3 * 16 * 320 * 4  # a page of a token's rows, those of the module included


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (None, {}), ((3,), {"graphs": [4, 8, 16]}), ("4/3/8", {"graphs": [8, 16, 32]} | ASYNC | PREFIXES),
        ("4/3/8", {"max_model_len": 192, "kv_cache_memory_bytes": 15 * ROW}),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)  # fmt: skip
def test_texts_of_latents_are_those_of_our_engine(serve, tmp_path, tree, options):
    """Without drafts, with chains of vLLM's own, and with trees of the model's next-token module."""
    pytest.importorskip("transformers")
    from op_tests.engine.deepseek import write_with_modules

    write_with_modules(tmp_path / "latents", 1, **TINY)
    target = load_target(tmp_path / "latents")
    engine = EAGLEInference(None, target, EAGLEConfig(method="naive", eos_token_ids=()))
    wanted = engine.generate([[token % 12 for token in prompt] for prompt in prompts()], TOKENS).output_ids
    *shape, nodes = TREES.get(tree, (*(tree or (0,)),))
    drafts = nodes - 1 if shape else nodes
    found = serve(drafts or None, shape, latents=tmp_path / "latents", **options)
    assert found["texts"] == wanted and found["lost"] == 0
    assert (found["preempted"] > 0) == ("max_model_len" in options)
    assert bool(found["accepted"]) == (tree == "4/3/8") or tree == (3,)
