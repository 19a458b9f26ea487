"""The plug-in in SGLang's own engine: one seed gives one text, with and without drafts; grammars hold.

Needs SGLang 0.5.17 and what it imports, for this Python: EAGLE_KERNELS_SGLANG_SITE is the folder that holds both
(`pip install --target FOLDER sglang==0.5.17`), beside a torch that it accepts. No GPU is needed: without one, kernels
run in Triton's interpreter, and what SGLang calls of sgl_kernel has a stand-in (`own_engine/cpu`). An engine takes 15 s
to start there. Tests of two ranks need two GPUs, or none.

    EAGLE_KERNELS_SGLANG_SITE=FOLDER python -m pytest op_tests/integrations/test_sglang_engine.py
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.reference.causal_attend import causal_attend, positions_of
from op_tests.harness.statistics import assert_follows_law

SITE = os.environ.get("EAGLE_KERNELS_SGLANG_SITE", "")
if not SITE:
    pytest.skip("needs SGLang: set EAGLE_KERNELS_SGLANG_SITE=FOLDER", allow_module_level=True)

ROOT, BESIDE = Path(__file__).parents[2], Path(__file__).parent / "own_engine"
ON_GPU = torch.cuda.is_available()
# Of an engine, and told to its processes. On a GPU the norms must be ours too: SGLang's have no fp32.
MACHINE, TOLD = {"device": "cpu", "disable_cuda_graph": True}, {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
PARTS, FOLDERS = "attention,verify,draft,kv", (BESIDE, BESIDE / "cpu")
if ON_GPU:
    MACHINE, TOLD, PARTS, FOLDERS = (
        {"mem_fraction_static": 0.3, "disable_prefill_cuda_graph": True},
        {},
        "all",
        (BESIDE,),
    )
# topk, steps, nodes; none of them where a preset gives them
TREES = {"plain": None, "8/4/16": (8, 4, 16), "3/3/8": (3, 3, 8), "chain": (1, 4, 5), "preset": ()}
WANTED = [
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.8, "frequency_penalty": 0.7},
    {"temperature": 0.8, "presence_penalty": 1.0},
    {"temperature": 0.8, "logit_bias": {"32": -2.0, "101": 1.5}},
    {"temperature": 0.8, "min_new_tokens": 12, "frequency_penalty": 0.3},
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.9, "repetition_penalty": 1.1},
]
NEW_TOKENS, NUM_REQUESTS, END = 32, 64, 256
LIMIT_S, ENDURANCE_S = 1200, 360 if ON_GPU else 60
# of the test of the law: texts of few tokens, each of which is one of few
NUM_TEXTS, TEXT_TOKENS, FILTERS = 10_000, 3, {"temperature": 1.5, "top_k": 5, "top_p": 0.9}

# of the tests of tensor parallelism: verification steps in which some request samples; those of a tree of three levels
# emit hardly more than three tokens of each request
NUM_STEPS, AT_ONCE, LONG, MOST_TOKENS = 10_000 if ON_GPU else 40, 8, 360, 3
TWO_RANKS = {"tp_size": 2, "disable_custom_all_reduce": True}  # NCCL is there on every machine
needs_two = pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer of bytes in the form of Hugging Face, which SGLang needs for grammars and for end tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as themselves; GPT-2 shows the others from 256 on
    names = {byte: chr(byte) for byte in shown}
    names |= {byte: chr(256 + place) for place, byte in enumerate(byte for byte in range(256) if byte not in names)}
    end = "<|endoftext|>"
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    made = {
        "version": "1.0", "added_tokens": [{"id": END, "content": end, "single_word": False, "lstrip": False,
                                            "rstrip": False, "normalized": False, "special": True}],
        "pre_tokenizer": level, "decoder": level, "normalizer": None, "post_processor": None,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)} | {end: END}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    """`run(script, tree, order)`: what a script makes of its order with an engine of these drafts, and the log.

    dies_at: words of the log at which the engine is killed; there is no result then.
    """

    def run(script: str, tree: str, order: dict, *, rule="match", parts=PARTS, dies_at=None, **changes):
        folder = tmp_path_factory.mktemp("engine")
        target, draft = demo_pair()
        engine = {
            "model_path": str(target), "tokenizer_path": str(tokenizer), "dtype": "float32",
            "attention_backend": "eagle_kernels", "sampling_backend": "pytorch", "grammar_backend": "bytes",
            "context_length": 512, "max_running_requests": 16, "max_total_tokens": 6000, "chunked_prefill_size": 64,
            "random_seed": 1, "log_level": "info", **MACHINE,
        }  # fmt: skip
        if TREES[tree] is not None:
            sizes = ("speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens")
            engine |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(draft)}
            engine |= dict(zip(sizes, TREES[tree]))
        order_file, result, log = (folder / name for name in ("order.json", "result.json", "log.txt"))
        order_file.write_text(json.dumps(order | {"engine": engine | changes}), encoding="utf-8")
        plugins = folder / "plugins" / "plugins-0.dist-info"
        plugins.mkdir(parents=True)
        (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 0\n")
        points = (
            "eagle_kernels = eagle_kernels.integrations.sglang:register\nbytes = byte_grammar:register\n"
            "ranks = rank_log:register\n"
        )
        (plugins / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{points}")
        told = {
            "PYTHONPATH": os.pathsep.join(map(str, (*FOLDERS, plugins.parent, ROOT, SITE))), **TOLD,
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # else each of an engine's processes compiles all of SGLang
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            # after every step, and for every page
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
            "EAGLE_KERNELS_SGLANG": parts, "EAGLE_KERNELS_SGLANG_VERIFY": rule,
        }  # fmt: skip
        if "tp_size" in changes:
            # other tests may have memory of one of the GPUs; of a CPU, which core each rank takes
            told |= {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        read = lambda: log.read_text(encoding="utf-8", errors="replace")  # noqa: E731
        with log.open("wb") as output:
            command = [sys.executable, *map(str, (BESIDE / script, order_file, result))]
            child = subprocess.Popen(command, env=os.environ | told, cwd=folder, stdout=output, stderr=output)
            stop_s = time.monotonic() + LIMIT_S
            while child.poll() is None and time.monotonic() < stop_s and not (dies_at and dies_at in read()):
                time.sleep(0.1)
            child.kill()  # SGLang's other processes end with it
            child.wait()
        text = read()
        if dies_at is not None:
            assert dies_at in text and not result.exists()
            return None, text
        assert result.exists(), text[text.find("Traceback") :][:4000]
        assert not re.search(r"mem(?:ory)? leak detected", text, re.IGNORECASE)
        assert ("eagle_kernels: match is in use" in text) == (rule == "match")
        return json.loads(result.read_text(encoding="utf-8")), text

    return run


@pytest.fixture(scope="module")
def serve(run):
    """`serve(tree, rounds)`: what an engine with these drafts makes of rounds of requests; its log says `tells`."""

    def serve(tree: str, rounds, *, tells: str = "", **options) -> list[list[dict]]:
        result, text = run("serve.py", tree, {"rounds": rounds}, **options)
        assert tells in text
        return result

    return serve


def prompts(count: int, *, long: bool = False) -> list[list[int]]:
    """Pieces of the pair's texts: short ones of 3 to 122 tokens, or of 400 each."""
    text = "".join(json.loads((demo_pair()[0].parent / "prompts.json").read_text(encoding="utf-8"))).encode()
    starts = [131 * place % (len(text) - 130) for place in range(count)]
    return [list(text[start : start + (400 if long else 3 + 29 * place % 120)]) for place, start in enumerate(starts)]


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], dict]]:
    common = {"max_new_tokens": NEW_TOKENS}
    return [
        (prompt, common | WANTED[place % len(WANTED)] | {"sampling_seed": 1000 + place})
        for place, prompt in enumerate(prompts(NUM_REQUESTS))
    ]


@pytest.fixture(scope="module")
def plain(serve, requests):
    """All at once, and the last ones by themselves."""
    return serve("plain", [requests, *([each] for each in requests[-4:])])


def test_a_text_does_not_depend_on_the_batch(plain):
    together, *alone = plain
    assert [one["tokens"] for (one,) in alone] == [one["tokens"] for one in together[-4:]]
    assert len({tuple(one["tokens"]) for one in together}) > 0.9 * NUM_REQUESTS


# a DeepSeek-V2 without experts, whose rotary embedding is of the kind that SGLang has for it on every device
LATENTS = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 24,
    "v_head_dim": 20, "q_lora_rank": 48, "first_k_dense_replace": 9, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                        "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(("tree", "page_size"), [("plain", 1), ("8/4/16", 1), ("3/3/8", 16), ("chain", 16)])
def test_texts_of_latents_are_those_of_our_engine(serve, tmp_path, tree, page_size):
    """Of a random model with latent attention, which drafts for itself: nearly all drafts are accepted."""
    pytest.importorskip("transformers")
    from op_tests.engine.families import write_target

    write_target("DeepseekV2", LATENTS, tmp_path / "latents")
    changes = {"model_path": str(tmp_path / "latents"), "page_size": page_size}
    if tree != "plain":
        changes |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": changes["model_path"]}
    given = prompts(6)
    engine = EAGLEInference(None, load_target(tmp_path / "latents"), EAGLEConfig(method="naive", eos_token_ids=()))
    wanted = engine.generate(given, NEW_TOKENS).output_ids
    parameters = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    (found,) = serve(tree, [[(prompt, parameters) for prompt in given]], **changes)
    assert [one["tokens"] for one in found] == wanted
    assert tree == "plain" or all(0 < one["steps"] < NEW_TOKENS / 2 for one in found)


@pytest.mark.parametrize("tree", ["8/4/16", "3/3/8", "chain"])
def test_one_seed_gives_one_text(tree, serve, plain, requests):
    """With and without drafts, in fp32: all of 64, and their log-probabilities."""
    (found,) = serve(tree, [requests])
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain[0]]
    assert sum(one["steps"] for one in found) < 0.7 * sum(len(one["tokens"]) for one in found)
    for one, other in zip(found, plain[0]):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


@pytest.mark.parametrize("changes", [{}, {"speculative_algorithm": "NAIVE_EAGLE"}], ids=["the variable", "the name"])
def test_one_draft_by_the_preset(changes, serve, plain, requests, monkeypatch):
    if not changes:
        monkeypatch.setenv("EAGLE_KERNELS_SGLANG_PRESET", "naive")
    (found,) = serve("preset", [requests[:16]], tells="speculative_num_draft_tokens=2", **changes)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain[0][:16]]
    steps = [(len(one["tokens"]) - 1) / one["steps"] for one in found]
    assert max(steps) <= 2 and sum(steps) / 16 > 1.2


def test_without_overlap_and_on_pages(serve, plain, requests):
    (found,) = serve("3/3/8", [requests], disable_overlap_schedule=True, page_size=16)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain[0]]


@pytest.mark.parametrize(("tree", "changes"), [("plain", {}), ("3/3/8", {}), ("chain", {"page_size": 16})])
def test_prompts_that_another_reads(tree, changes, serve, plain, requests):
    """By SGLang's backend of two; whole prompts, chunks and prefixes, of the target and of the draft."""
    other = "triton" if ON_GPU else "torch_native"
    tells = f"prompts are read by {other}, as asked for"
    (found,) = serve(tree, [requests], tells=tells, prefill_attention_backend=other, **changes)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain[0]]


def test_retracted_requests(serve, plain, requests):
    """A pool that is too small for all that run: some are put back, and read their own output again."""
    changes = {"max_total_tokens": 1100, "schedule_conservativeness": 0.01}
    (found,) = serve("3/3/8", [requests], tells="Retract requests", **changes)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain[0]]


def test_grammars_hold(serve):
    """In trees too; and a seed gives one text under a grammar as well."""
    patterns = [r"([a-z]{1,5}, ){3}[a-z]{1,5}\.", r"\(?[0-9]{2,9}\)?", r"(yes|no|maybe){2,6}!"]
    requests = [
        (prompt, {"max_new_tokens": 60, "temperature": 1.0, "regex": patterns[place % 3], "sampling_seed": place})
        for place, prompt in enumerate(prompts(12))
    ]
    free = (prompts(1)[0], {"max_new_tokens": 20, "temperature": 0.8, "sampling_seed": 5})
    (wanted,) = serve("plain", [[*requests, free]])
    (found,) = serve("8/4/16", [[*requests, free]])
    assert [one["tokens"] for one in found] == [one["tokens"] for one in wanted]
    for one, (_, parameters) in zip(found, requests):
        text = bytes(token for token in one["tokens"] if token != END).decode("latin-1")
        assert re.fullmatch(parameters["regex"], text), text
    assert sum(one["steps"] for one in found) < 0.9 * sum(len(one["tokens"]) for one in found)


def test_endurance(run, serve):
    """Random requests with aborts, copies, long prompts in chunks, shared prefixes, and a pool that is full.

    SGLang looks for lost memory when it is idle at the end. Each text is plain decoding's by the same seed, or begins
    so where it was aborted.
    """
    order = {
        "seconds": ENDURANCE_S, "clients": 24, "texts": prompts(4, long=True), "parameters": WANTED,
    }  # fmt: skip
    changes = {"max_total_tokens": 1300, "schedule_conservativeness": 0.01}
    records, log = run("endure.py", "8/4/16", order, **changes)
    assert len(records) > ENDURANCE_S and "Retract requests" in log
    whole, others = ([one for one in records if one["may_be_cut"] == cut] for cut in (False, True))
    aborted = [one for one in others if 0 < len(one["tokens"]) < one["parameters"]["max_new_tokens"]]
    chosen = [*whole[:: -(-len(whole) // 96)], *aborted[:16]]
    assert len(chosen) > 40 and aborted
    (plain,) = serve("plain", [[(one["prompt"], one["parameters"]) for one in chosen]])
    for one, other in zip(chosen, plain):
        length = len(one["tokens"]) if one["may_be_cut"] else one["parameters"]["max_new_tokens"]
        assert one["tokens"] == other["tokens"][:length]


def test_a_killed_engine_leaves_the_next_alone(run, serve, plain, requests):
    rounds = {"rounds": [requests] * 4}
    run("serve.py", "8/4/16", rounds, dies_at="eagle_kernels: verify is in use")
    (found,) = serve("8/4/16", [requests[:8]])
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain[0][:8]]


def test_coins_are_no_match(serve, plain, requests):
    """A control: by SGLang's own rule the sampled texts are others."""
    (found,) = serve("3/3/8", [requests[:16]], rule="coins")
    same = [one["tokens"] == other["tokens"] for one, other in zip(found, plain[0])]
    assert not all(same) and same[10]  # greedy


@needs_two
@pytest.mark.parametrize("tree", ["plain", "8/4/16"])
def test_two_ranks_give_the_texts_of_one(tree, serve, plain, requests):
    """Greedy and sampled; in fp32, where sums over two halves of the model hardly ever give another token."""
    (found,) = serve(tree, [requests], **TWO_RANKS)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain[0]]


@needs_two
def test_ranks_never_disagree(serve, tmp_path, monkeypatch):
    """In what each of them draws, before SGLang sends rank 0's tokens to the other; and in what it draws from."""
    monkeypatch.setenv("RANK_LOGS", str(tmp_path))
    count = -(-NUM_STEPS * AT_ONCE * MOST_TOKENS // LONG)
    sampled = [wanted for wanted in WANTED if wanted["temperature"] > 0]
    requests = [
        (prompt, sampled[place % len(sampled)] | {"max_new_tokens": LONG, "ignore_eos": True, "sampling_seed": place})
        for place, prompt in enumerate(prompts(count))
    ]
    serve("3/3/8", [requests], max_running_requests=AT_ONCE, **TWO_RANKS)
    logs = [file.read_text(encoding="utf-8").splitlines() for file in sorted(tmp_path.glob("rank*.txt"))]
    assert len(logs) == 2 and len(logs[0]) == len(logs[1])
    lines = [tuple(line.split() for line in pair) for pair in zip(*logs)]
    differing = {name: [place for place, (one, other) in enumerate(lines) if one[column] != other[column]]
                 for column, name in enumerate(("ops", "requests", "arguments", "results"))}  # fmt: skip
    num_steps = sum(one[0].startswith("verify_tree") for one, _ in lines)
    num_rows = sum(int(one[1]) for one, _ in lines if one[0].startswith("verify_tree"))
    print(f"{num_steps} sampled steps of {num_rows / num_steps:.1f} requests, {len(lines) - num_steps} other draws")
    assert not any(differing.values()), {name: (len(places), places[:5]) for name, places in differing.items()}
    assert num_steps >= NUM_STEPS and len(lines) > num_steps


def law_of_texts(prompt: list[int]) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """All texts that these filters leave, and their probabilities: top-p counts what top-k leaves out, as in SGLang."""
    target, texts, law = load_target(demo_pair()[0]), [()], torch.ones(1, dtype=torch.float64)
    for _ in range(TEXT_TOKENS):
        tokens = torch.tensor([[*prompt, *text] for text in texts])
        with torch.no_grad():
            logits = target(tokens, positions_of(tokens), causal_attend).logits[:, -1].double()
        probs, order = (logits / FILTERS["temperature"]).softmax(-1).sort(-1, descending=True)
        probs[:, FILTERS["top_k"] :] = 0
        probs[probs.cumsum(-1) - probs > FILTERS["top_p"]] = 0
        probs = probs[:, : FILTERS["top_k"]] / probs.sum(-1, keepdim=True)
        texts = [(*text, token) for text, row in zip(texts, order.tolist()) for token in row[: FILTERS["top_k"]]]
        law = (law[:, None] * probs).flatten()
    return texts, law


@pytest.mark.parametrize("who", ["SGLang alone, plain", "match, trees"])
def test_texts_follow_the_law(who, serve):
    """10,000 short requests, each with a seed of its own or with none; SGLang alone shows that the law is its own."""
    prompt = prompts(3)[2]
    texts, law = law_of_texts(prompt)
    parameters = FILTERS | {"max_new_tokens": TEXT_TOKENS, "ignore_eos": True}
    requests = [
        (prompt, parameters | ({"sampling_seed": place} if place % 2 else {})) for place in range(NUM_TEXTS)
    ]  # fmt: skip
    changes = {"max_running_requests": 64, "max_total_tokens": 20000}
    if who == "match, trees":
        (found,) = serve("8/4/16", [requests], **changes)
    else:
        stock = {"rule": "coins", "parts": "none", "attention_backend": "torch_native"}
        if ON_GPU:  # where SGLang's norms have no fp32
            stock |= {"parts": "nn", "attention_backend": "triton"}
        (found,) = serve("plain", [requests], **stock, **changes)
    number = {text: place for place, text in enumerate(texts)}
    assert_follows_law(torch.tensor([number[tuple(one["tokens"])] for one in found]), law)
    assert (law > 5 / NUM_TEXTS).sum() > 30
