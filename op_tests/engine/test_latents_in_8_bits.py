"""DeepSeek's models over latents in 8 bits: what the cache holds, its scales, logits, and texts with all drafters."""

import random

import pytest
import torch

pytest.importorskip("transformers")

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.heads import Eagle1Config, Eagle1Head
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.runtime import target as architectures
from op_tests.engine.deepseek import write_with_modules
from op_tests.engine.drafting import PROMPTS
from op_tests.engine.families import GROUPS, LATENT, SIZES, write_target
from op_tests.engine.heads import edit_tensors

ROW, LAYERS = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"], SIZES["num_hidden_layers"]
SCALES = [0.03, 0.05, 0.02]
HALVES = {"dtype": torch.float16}


def write_scales(folder, name="k_scale", scales=SCALES):
    edit_tensors(folder, **{
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale) for layer, scale in enumerate(scales)
    })  # fmt: skip


def deepseek(folder, device="cpu", scales=SCALES, **changes):
    write_target("DeepseekV3", LATENT | GROUPS | changes, folder)
    write_scales(folder, scales=scales)
    return load_target(folder, device, **HALVES)


def config_of(device="cpu", **fields) -> EAGLEConfig:
    """A GPU's sums depend on what is beside a row, unless it is told that they must not."""
    fixed = {"kv_cache_dtype": "fp8", "page_size": 4, "eos_token_ids": ()}
    return EAGLEConfig(**fixed | {"deterministic": torch.device(device).type == "cuda"} | fields)


TREE, CHAIN = {"topk": 3, "num_steps": 3, "num_draft_tokens": 9}, {"topk": 1, "num_steps": 3}
DRAFTERS = {
    "module tree": {"method": "mtp", **TREE},
    "module chain": {"method": "mtp", **CHAIN},
    "head tree": {"method": "eagle", **TREE},
    "head chain": {"method": "eagle", **CHAIN},
    "the model itself": {"method": "draft_model", **TREE},
    "ngram tree": {"method": "ngram", "topk": 4, "num_steps": 4, "num_draft_tokens": 12, "min_ngram_size": 1},
    "trees that share a budget": {"method": "draft_model", **TREE, "mean_draft_tokens": 4},
}  # fmt: skip


def draft_of(name: str, target, folder, device):
    if name.startswith("module"):
        return load_draft(folder, target)
    if name.startswith("head"):
        torch.manual_seed(3)
        sizes = SIZES | LATENT | GROUPS | {"model_type": "deepseek_v3", "num_hidden_layers": 1}
        head = Eagle1Head(Eagle1Config.from_dict(sizes)).to(device, torch.float16)
        return head.eval().requires_grad_(False).bind(target)
    if name == "the model itself":
        return target
    return None if name.startswith("ngram") else deepseek(folder / "draft", device, initializer_range=0.2)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_do_not_change_the_text(name, tmp_path, device):
    """Greedy and sampled, requests that come while others decode and share what they begin with, prompts in parts; each
    against plain decoding by itself. Drafts' own rows have the weights' type."""
    write_with_modules(tmp_path, 1)
    write_scales(tmp_path, scales=[*SCALES, 0.04])
    target = load_target(tmp_path, device, **HALVES)
    draft = draft_of(name, target, tmp_path, device)
    engine = EAGLEInference(draft, target, config_of(device, **DRAFTERS[name], prefill_chunk=7, max_batch=3))
    coin, requests = random.Random(name), []
    for number, prompt in enumerate([*PROMPTS, PROMPTS[-1][:24], [*PROMPTS[-1], 5]]):
        sampling = {} if number % 2 else {"temperature": 0.8, "top_k": 20}
        requests.append(engine.submit(prompt, SamplingParams(max_new_tokens=12 + number, seed=number, **sampling)))
        for _ in range(coin.randrange(3)):
            engine.step()
    engine.collect()
    state = engine.session.scheduler.state
    assert state.target_pool.latent_cache.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    assert draft is None or state.draft_pool.k_cache.dtype == torch.float16
    assert sum(request.shared_tokens for request in requests) >= 20
    assert name != "the model itself" or sum(sum(request.accepted) for request in requests) > 40
    whole = config_of(device, method="naive", share_prefixes=False, prefill_chunk=7, max_batch=1)
    plain = EAGLEInference(None, target, whole)
    for request in requests:
        again = plain.submit(request.prompt, request.params)
        plain.collect()
        assert request.error is None and request.output_ids == again.output_ids


class ReadRows:
    """transformers' model in float64, whose layers read rows of a cache where they would compute them.
    rows: [L, T, D] of a text, each a latent and its key, neighbours turned together."""

    def __init__(self, theirs, rows, monkeypatch):
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as module

        self.model, self.rows, self.own = theirs, rows, torch.zeros_like(rows)
        rotate = module.apply_rotary_pos_emb_interleave
        monkeypatch.setattr(
            module, "apply_rotary_pos_emb_interleave", lambda *args, **kw: self.turn(rotate, *args, **kw)
        )
        for layer in theirs.model.layers:
            layer.self_attn.kv_a_layernorm.register_forward_hook(self.read_latents)

    def scores(self, text):
        """Log-probabilities of a text's tokens but the first."""
        self.layer = -1
        logits = self.model(torch.tensor([text[:-1]])).logits[0]
        return logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]

    def read_latents(self, _module, _inputs, latents):
        self.layer += 1
        size = latents.shape[-1]
        self.own[self.layer, :, :size] = latents[0]
        return self.rows[None, self.layer, :, :size]

    def turn(self, rotate, query, key, *args, **kwargs):
        """Theirs turns neighbours and returns them in halves."""
        query, key = rotate(query, key, *args, **kwargs)
        size = key.shape[-1]
        self.own[self.layer, :, -size:] = key[0, 0].unflatten(-1, (2, -1)).transpose(1, 2).flatten(1)
        kept = self.rows[self.layer, :, -size:].unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1)
        return query, kept.expand_as(key)


@torch.no_grad()
@pytest.mark.parametrize("has_scales", [False, True])
def test_scores_are_those_of_the_rows_in_the_cache(has_scales, tmp_path, device, monkeypatch):
    """After a prompt in parts, trees and moves the cache holds what float64 computes, to the nearest number of 8 bits,
    and log-probabilities are those of a float64 model that reads these numbers."""
    # without experts, whose choice may turn on the last bit
    theirs = write_target("DeepseekV3", LATENT | GROUPS | {"first_k_dense_replace": LAYERS}, tmp_path)
    scales = SCALES if has_scales else [1.0] * LAYERS
    if has_scales:
        write_scales(tmp_path)
    target = load_target(tmp_path, device, **HALVES)
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: 0)
    config = config_of(device, method="draft_model", **TREE, prefill_chunk=5)
    engine = EAGLEInference(target, target, config)
    params = SamplingParams(max_new_tokens=80, temperature=0.4, seed=1, logprobs="raw")
    request = engine.submit([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], params)
    for _ in range(20):
        engine.step()
    assert request.finish_reason is None and sum(request.accepted) > 10
    state = engine.session.scheduler.state
    count, table = int(state.lengths[0]), state.block_table[0].cpu()
    text, first = [*request.prompt, *request.output_ids], len(request.prompt)
    assert count == len(text) - 1
    slots = table[torch.arange(count) // 4] * 4 + torch.arange(count) % 4
    steps = torch.tensor(scales).double()[:, None, None]
    rows = state.target_pool.latent_cache.flatten(1, 2).float().cpu()[:, slots].double() * steps
    reader = ReadRows(theirs.half().double(), rows, monkeypatch)
    scores, found = reader.scores(text)[first - 1 :], torch.tensor(request.logprobs).double()
    torch.testing.assert_close(found, scores, atol=0.02, rtol=0)
    half_spacing, error = reader.own.abs() / 16 + steps * 2**-10, (rows - reader.own).abs()
    assert (error <= half_spacing + 0.01).all() and (error / half_spacing).mean() > 0.2
    reader.rows = reader.own.clone()  # rows as they were before they had 8 bits give other scores
    assert (found - reader.scores(text)[first - 1 :]).abs().max() > 0.1


def test_8_bits_are_near_16_bits(tmp_path, device):
    """Logits move by little, and they do move."""
    target = deepseek(tmp_path, device)
    engine = EAGLEInference(None, target, config_of(device, method="naive"))
    whole = EAGLEInference(None, target, config_of(device, method="naive", kv_cache_dtype="auto"))
    probs, moved = (each.next_token_logits(PROMPTS[-1]).softmax(-1) for each in (whole, engine))
    assert 0 < (probs - moved).abs().sum() / 2 < 0.1


def test_a_token_takes_a_byte_for_each_element(tmp_path, device):
    """Of the target; a draft's rows keep the weights' type. Pools change with the configuration of a call."""
    write_with_modules(tmp_path, 1)
    target = load_target(tmp_path, device, **HALVES)
    num_bytes, budget = ROW * (LAYERS + 2), 100 * 4 * ROW * (LAYERS + 2) + 7
    config = config_of(device, method="mtp", topk=2, num_steps=2, max_batch=64, kv_cache_bytes=budget)
    engine = EAGLEInference(load_draft(tmp_path, target), target, config)
    assert engine.workspace_bytes()["kv_cache"] == 100 * 4 * num_bytes
    for name, bits, num_pages in (("fp8", 8, 100), ("auto", 16, budget // (4 * 2 * ROW * (LAYERS + 1)))):
        engine.generate([[1, 2, 3]], 2, progress=False, kv_cache_dtype=name)
        state = engine.session.scheduler.state
        assert state.target_pool.latent_cache.shape == (LAYERS, num_pages, 4, ROW)
        assert (state.target_pool.latent_cache.element_size(), state.draft_pool.latent_cache.element_size()) == (
            bits // 8,
            2,
        )


NAMES = ["k_scale", "k_proj.k_scale", "mla_attn.k_scale", "mla_attn.mla_attn.k_scale", "kv_a_proj_with_mqa.k_scale"]


def test_rows_have_the_scale_of_keys(tmp_path):
    """By all names; that of values is not read, and a layer without one has 1."""
    for number, name in enumerate(NAMES):
        folder = tmp_path / str(number)
        write_target("DeepseekV3", LATENT | GROUPS, folder)
        write_scales(folder, name, SCALES[:2])
        write_scales(folder, name.replace("k_scale", "v_scale"), [0.7] * LAYERS)
        engine = EAGLEInference(None, load_target(folder, **HALVES), config_of(method="naive"))
        for fields, factor in (("sm_90", 1), ("gfx942", 448 / 240)):
            with architectures.assume(fields):
                pool = engine.session._target_pool(engine.config, 2)
            scales = [pool.scales(layer) for layer in range(LAYERS)]
            assert [[*each] for each in scales] == [["latent_scale"]] * LAYERS
            found = torch.cat([each["latent_scale"] for each in scales])
            torch.testing.assert_close(found, torch.tensor([*SCALES[:2], 1.0]) * factor)
    assert pool.latent_cache.dtype == torch.float8_e4m3fnuz


def test_what_cannot_be_is_named(tmp_path):
    target = deepseek(tmp_path)
    rule = r"kv_cache_dtype must be 'auto' or 'fp8' for a cache of latents \(MLA\), got 'int8'"
    with pytest.raises(ValueError, match=rule):
        EAGLEInference(None, target, config_of(method="ngram", kv_cache_dtype="int8"))
    engine = EAGLEInference(None, target, config_of(method="ngram"))
    with pytest.raises(ValueError, match=rule):
        engine.generate([[1, 2]], 1, kv_cache_dtype="int8")
    with architectures.assume("sm_80"), pytest.raises(ValueError, match="must be 'auto' on sm_80, without fp8, got 'f"):
        EAGLEInference(None, target, config_of(method="ngram"))
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto' for a target in torch.float32"):
        EAGLEInference(None, load_target(tmp_path), config_of(method="ngram"))
    write_scales(tmp_path, scales=[[0.1] * 6] * LAYERS)
    with pytest.raises(ModelError, match=r"k_scale must have 1 element, for a row of latents, got shape \(6,\)"):
        load_target(tmp_path, **HALVES)
