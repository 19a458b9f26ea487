"""`Decoder` against the formula, for every family, scaling, bias and window; `causal_attend` for all that it takes."""

import itertools
import random

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.decoder_formula import CASES, config_of, decoder_formula, weights_of
from op_tests.engine.toys import ToyModel

TOLERANCE = {"atol": 3e-5, "rtol": 1e-5}


def make(changes: dict, device="cpu", seed: int = 0) -> tuple[dict, dict, Decoder]:
    """Returns a config.json, random weights, and the decoder that has both."""
    config = config_of(changes)
    model = Decoder(DecoderConfig.from_dict(config)).eval()
    weights = weights_of(config, seed)
    model.load_state_dict(weights)  # strict: no weight is missing, and none too many
    return config, weights, model.to(device)


@torch.no_grad()
def assert_same(changes: dict, device, seed: int = 0) -> None:
    config, weights, model = make(changes, device, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config["vocab_size"], (2, 33), generator=generator)
    starts = torch.tensor([[0], [config["max_position_embeddings"] - 33]])
    positions = starts + torch.arange(33)
    capture = tuple(range(config["num_hidden_layers"] + 1))
    output = model(tokens.to(device), positions.to(device), causal_attend, capture=capture)
    for row in range(2):
        logits, streams = decoder_formula(config, weights, tokens[row], positions[row])
        torch.testing.assert_close(output.features[row].cpu(), torch.cat(streams[:-1], -1).float(), **TOLERANCE)
        torch.testing.assert_close(output.logits[row].cpu(), logits.float(), **TOLERANCE)
    last = model(tokens.to(device), positions.to(device), causal_attend, last_only=True)
    assert last.features is None and last.logits.shape == (2, 1, config["vocab_size"])
    torch.testing.assert_close(last.logits, output.logits[:, -1:], **TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_a_decoder_is_the_formula(name, device):
    assert_same(CASES[name], device)


def random_changes(rng: random.Random) -> dict:
    """Returns a config.json of several settings at once, each of which may be as it is anyway."""
    changes = {
        "model_type": rng.choice(["llama", "mistral", "qwen2", "qwen3", "mimo"]),
        "num_hidden_layers": rng.randint(1, 4),
        "tie_word_embeddings": rng.random() < 0.5, "head_dim": rng.choice([4, 6, 16, 22]),
        "num_key_value_heads": rng.choice([1, 2, 3, 6]), "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "rope_theta": rng.choice([40.0, 1e4, 1e6]), "hidden_size": rng.choice([24, 60]),
    }  # fmt: skip
    if changes["model_type"] in ("llama", "qwen3"):
        changes["attention_bias"] = rng.random() < 0.5
    if changes["model_type"] == "llama":
        changes["mlp_bias"] = rng.random() < 0.5
    else:
        changes |= {"sliding_window": rng.choice([1, 2, 7, 95]), "use_sliding_window": rng.random() < 0.7}
        if changes["model_type"] == "mistral":
            changes["use_sliding_window"] = True
        else:
            changes["max_window_layers"] = rng.randint(0, 4)
    factor, length = rng.choice([0.6, 1.0, 1.5, 8.0]), rng.choice([9, 33, 96])
    low, fast = rng.choice([0.5, 1.0]), rng.choice([4.0, 32.0])
    scaling = rng.choice([
        {}, {"type": "linear", "factor": factor},
        {"type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": 4 * low},
        {"type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": low},
        {"type": "yarn", "beta_fast": fast, "truncate": rng.random() < 0.5},
    ])  # fmt: skip
    return changes | {"rope_scaling": scaling | {"original_max_position_embeddings": length} if scaling else None}


@pytest.mark.parametrize("seed", range(40))
def test_settings_together_are_the_formula(seed, device):
    assert_same(random_changes(random.Random(seed)), device, seed)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral, windows", "qwen2, windows by layer"])
def test_trees_of_a_decoder_are_the_formula(name, device):
    """Plain and with drafts, of its own and of a stranger's."""
    config, weights, model = make(CASES[name], device)
    wanted = []
    for prompt in ([7, 3, 60, 11, 1, 25, 40, 2, 9], [5, 66]):  # longer and shorter than a window
        text = list(prompt)
        for _ in range(10):
            text.append(int(decoder_formula(config, weights, torch.tensor(text))[0][-1].argmax()))
        wanted.append((prompt, text[len(prompt) :]))
    prompts, texts = map(list, zip(*wanted))
    stranger = ToyModel(vocab_size=config["vocab_size"], device=model.device)
    for draft, tree in itertools.product((model, stranger), ({"topk": 2, "num_draft_tokens": 9}, {"topk": 1})):
        engine = EAGLEInference(draft, model, EAGLEConfig(**tree, num_steps=4, page_size=4, eos_token_ids=()))
        output = engine.generate(prompts, 10)
        assert output.output_ids == texts
        if draft is model and tree["topk"] == 1:
            assert output.stats.mean_accept_length == 5  # all of its own guesses are right
    assert engine.generate(prompts, 10, speculative=False).output_ids == texts


OPTIONS = {
    "window": [None, 1, 4, 9],
    "sm_scale": [None, 0.4],
    "soft_cap": [None, 1.5],
    "sinks": [None, torch.tensor([0.5, -1.0, 2.0, 0.0])],
}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_without_a_pool(num_kv_heads, device):
    """All that a layer may ask of it, alone and together, row by row in float64."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 9, heads, 8, generator=generator).to(device) for heads in (4, num_kv_heads, num_kv_heads)
    )
    for chosen in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, chosen))
        window, sm_scale, soft_cap, sinks = chosen
        wanted = torch.zeros(2, 9, 4, 8, dtype=torch.float64)
        for request, row, head in itertools.product(range(2), range(9), range(4)):
            seen = list(range(row + 1))[-window:] if window else list(range(row + 1))
            of_head = head * num_kv_heads // 4
            scores = key[request, seen, of_head].cpu().double() @ query[request, row, head].cpu().double()
            scores = scores * (8**-0.5 if sm_scale is None else sm_scale)
            scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
            sink = scores[:0] if sinks is None else sinks[head : head + 1].double()
            probs = torch.cat([scores, sink]).softmax(-1)[: len(seen)]
            wanted[request, row, head] = probs @ value[request, seen, of_head].cpu().double()
        sinks = None if sinks is None else sinks.to(device)
        found = causal_attend(0, query, key, value, **options | {"sinks": sinks})
        torch.testing.assert_close(found.cpu(), wanted.float(), atol=2e-6, rtol=2e-5)
