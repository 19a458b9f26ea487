"""Every kind of draft, from its folder, for targets whose layers are not Llama's: text is that of plain decoding.

Targets of keys and values, and of latents; heads, modules, blocks, smaller models, and drafts without a model.
"""

import random
from functools import partial

import pytest
from safetensors.torch import load_file

pytest.importorskip("transformers")

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from op_tests.engine import dflash_folders, heads, latent_heads
from op_tests.engine.deepseek import write_with_modules
from op_tests.engine.drafting import PROMPTS
from op_tests.engine.ernie import write_with_module
from op_tests.engine.families import CASES, write_target
from op_tests.engine.head_folders import hydra_tensors, medusa_tensors, write_hydra, write_medusa, write_peagle
from op_tests.engine.toys import random_llama, write_decoder

WITHOUT_MODULES = ("glm4", "qwen3 moe", "mixtral", "gpt oss")
FAMILIES = ("glm moe", "deepseek_v3", "kimi_k2", "ernie moe", "glm moe lite", *WITHOUT_MODULES)
# what heads of all formats fit; as few layers as their streams need
SIZES = {name: heads.WIDTHS[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
SIZES |= {"num_attention_heads": heads.HEADS, "num_hidden_layers": 5}
TREE = {"topk": 2, "num_steps": 3, "num_draft_tokens": 6}
CHAIN = {"topk": 1, "num_draft_tokens": None}


def write_model(folder, target, **settings):
    return write_decoder(random_llama(num_layers=1, seed=1), folder, **settings)


def write_hydra_with_layer(folder, target):
    """Hydra++, whose layer over the features is of the target's kind: here the target's first one."""
    begin, stored = "prefix_embeding_layer.", load_file(target / "model.safetensors")
    tensors = {
        name: each for name, each in hydra_tensors("prefix-mlp").items() if not name.startswith(f"{begin}layers")
    }
    first = {name: each for name, each in stored.items() if name.startswith("model.layers.0.")}
    tensors |= {begin + name.removeprefix("model."): each for name, each in first.items()}
    return write_hydra(folder, tensors, hydra_head_arch="prefix-mlp")


STREAMS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in heads.STREAMS]}}
# of each kind what writes its folder, given the target's, and a configuration
KINDS = {
    "EAGLE-1": (lambda folder, _: heads.write_official(folder, heads.eagle1_tensors()), TREE),
    "EAGLE-3": (lambda folder, _: heads.write_specforge(folder, heads.eagle3_tensors()), TREE),
    "EAGLE-3 of latents": (lambda folder, _: latent_heads.write(folder), TREE),
    "P-EAGLE": (lambda folder, _: write_peagle(folder, **STREAMS), TREE),
    "DFlash": (lambda folder, _: dflash_folders.write(folder), TREE),
    "Medusa": (lambda folder, _: write_medusa(folder, medusa_tensors()), TREE),
    "Hydra": (lambda folder, _: write_hydra(folder, hydra_tensors()), TREE),
    "Hydra++": (write_hydra_with_layer, TREE),
    "a smaller model": (write_model, TREE),
    "PARD": (partial(write_model, architectures=["LlamaForCausalLM"], pard_token=59), TREE),
    "a model of its family": ("family", TREE),
    "modules": ("modules", TREE | {"method": "mtp"}),
    "hybrid": (write_model, {"method": "hybrid", "num_steps": 6, "num_model_steps": 2, "min_ngram_size": 1}),
    "a shared budget": (write_model, TREE | {"topk": 3, "num_draft_tokens": 12, "mean_draft_tokens": 3}),
    "ngram": (None, TREE | {"method": "ngram", "min_ngram_size": 1}),
    "suffix": (None, TREE | {"method": "suffix", "num_steps": 5}),
}
# without a GPU and --slow, each kind for one family, in turn
CROSS = [
    pytest.param(family, kind, marks=() if number % len(FAMILIES) == place else pytest.mark.slow)
    for number, kind in enumerate(KINDS)
    for place, family in enumerate(FAMILIES)
    if kind != "modules" or family not in WITHOUT_MODULES
]


def folders_of(family: str, kind: str, folder):
    """(the draft's, the target's)."""
    write, (name, changes) = KINDS[kind][0], CASES[family]
    changes, target = changes | SIZES, folder / "target"
    if "kv_lora_rank" in changes:
        changes["num_key_value_heads"] = heads.HEADS
    if write != "modules":
        write_target(name, changes, target)
    elif family == "ernie moe":
        write_with_module(target, **changes)
    else:
        write_with_modules(target, 1, name, **changes)
    if write == "family":
        write_target(name, changes | {"num_hidden_layers": 2, "initializer_range": 0.2}, folder / "draft")
        return folder / "draft", target
    return write(folder / "draft", target) if callable(write) else None, target


@pytest.mark.parametrize(("family", "kind"), CROSS)
def test_text_is_that_of_plain_decoding(family, kind, tmp_path, device):
    """A tree and a chain, greedy and sampled; requests that come while others decode, prompts in parts, plain steps."""
    draft, target = folders_of(family, kind, tmp_path)
    options = {"page_size": 4, "prefill_chunk": 7, "max_batch": 3, "eos_token_ids": ()}
    coin = random.Random(f"{family} {kind}")
    for shape in {}, CHAIN:
        config = EAGLEConfig(**KINDS[kind][1] | options | shape)
        engine = EAGLEInference.from_pretrained(draft, target, config, device=device, dtype="float32")
        requests = []
        for number, prompt in enumerate(PROMPTS):
            sampling = {} if number % 2 else {"temperature": 0.8, "top_k": 20}
            params = SamplingParams(max_new_tokens=coin.randrange(4, 12), seed=number, **sampling)
            requests.append(engine.submit(prompt, params))
            for _ in range(coin.randrange(3)):
                engine.is_speculating = coin.randrange(4) > 0
                engine.step()
        engine.is_speculating = True
        engine.collect()
        engine.is_speculating = False
        again = [engine.submit(request.prompt, request.params) for request in requests]
        engine.collect()
        assert [request.error for request in requests] == [None] * len(requests)
        assert [request.output_ids for request in requests] == [request.output_ids for request in again]
