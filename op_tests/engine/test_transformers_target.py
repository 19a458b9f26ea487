"""Stock models of transformers behind the adapter, in fp32: their text, their hidden states, and what is refused."""

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models import checkpoint
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.heads import Eagle1Config, Eagle1Head
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.engine.models.protocol import FINAL_NORM, KVShape, ModelError
from eagle_kernels.engine.models.transformers_target import TransformersTarget
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.heads import edit_tensors
from op_tests.engine.toys import DEVICE, ToyModel

transformers = pytest.importorskip("transformers")

VOCAB, WIDTH = 83, 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "initializer_range": 0.2,  # attention far from uniform
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}

# family of transformers, what its config says beside SIZES
CASES = {
    "gpt2": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "gemma2": ("Gemma2", CAPS | {"sliding_window": 4, "query_pre_attn_scalar": 9, "num_hidden_layers": 4}),
    "qwen2 moe": ("Qwen2Moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),  # sinks
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": WIDTH}),
    "gpt neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0}),
}
FINAL_NORMS = ("ln_f", "norm", "decoder.final_layer_norm", "final_layer_norm")
MOE = {"qwen2 moe", "olmoe", "gpt oss"}


def make(family: str, changes: dict) -> torch.nn.Module:
    """A random model of transformers with its own eager attention."""
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**SIZES | changes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)
            elif "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif "emb" not in name and "wte" not in name:
                parameter.mul_(2)  # a layer changes more than the embedding, which is often the output too, repeats
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(name, the stock model on the CPU, the adapter read from its folder on the device under test)."""
    theirs, folder = make(*CASES[request.param]), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    if request.param == "gpt oss":  # which our own decoder reads, too; no other family has sinks
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return request.param, theirs, TransformersTarget(stock.to(DEVICE))
    return request.param, theirs, load_target(folder, DEVICE)


def assert_as_exact(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Ours is about as far from float64 as theirs is, whose sums are made in another order."""
    error, allowed = ((part - exact).abs().max().item() for part in (ours, theirs))
    assert error <= 3 * allowed + 1e-6 * exact.abs().max().item(), (error, allowed)


@torch.no_grad()
def test_logits_and_hidden_states_are_those_of_transformers(pair):
    name, theirs, ours = pair
    assert isinstance(ours, TransformersTarget) and type(ours.model) is type(theirs)
    theirs = copy.deepcopy(theirs).to(ours.device)
    exact = copy.deepcopy(theirs).double()
    if name in MOE:
        exact.set_experts_implementation("eager")  # theirs for groups of tokens knows no float64
    tokens = torch.randint(VOCAB, (2, 19), device=ours.device)
    stock, exactly = (model(tokens, output_hidden_states=True) for model in (theirs, exact))
    num_layers = theirs.config.num_hidden_layers
    # theirs end with the normed stream, so the one before the norm is compared by way of the norm
    capture = (1, FINAL_NORM, 0, *range(2, num_layers + 1))
    positions = torch.arange(19, device=ours.device).expand(2, -1)
    logits, features = ours.forward(tokens, positions, causal_attend, capture=capture)
    assert_as_exact(logits, stock.logits, exactly.logits)
    streams = dict(zip(capture, features.split(WIDTH, dim=-1)))
    (norm,) = [part for path, part in theirs.base_model.named_modules() if path in FINAL_NORMS]
    streams["normed by theirs"] = norm(streams.pop(num_layers))
    for layer, stream in streams.items():
        layer = num_layers if layer in ("normed by theirs", FINAL_NORM) else layer
        assert_as_exact(stream, stock.hidden_states[layer], exactly.hidden_states[layer])
    last = ours.forward(tokens, positions, causal_attend, last_only=True)
    assert last.features is None
    torch.testing.assert_close(last.logits, logits[:, -1:], atol=1e-5, rtol=1e-5)


@pytest.mark.cross
def test_greedy_text_is_that_of_transformers(pair):
    """Plain and speculative, trees and chains; the model as its own draft, and drafts of a stranger."""
    _, theirs, ours = pair
    prompts = torch.randint(1, VOCAB, (2, 9))
    expected = theirs.generate(prompts, max_new_tokens=14, do_sample=False, attention_mask=torch.ones_like(prompts))
    expected = expected[:, 9:].tolist()
    assert len(set(expected[0] + expected[1])) > 5, "a text of few tokens proves little"
    stranger = ToyModel(vocab_size=VOCAB, device=ours.device)
    tree, chain = EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=8, page_size=4), EAGLEConfig.chain(4)
    for config in tree, chain:
        for draft in stranger, ours:
            assert EAGLEInference(draft, ours, config).generate(prompts, 14).output_ids == expected
    engine = EAGLEInference(ours, ours, chain)
    assert engine.generate(prompts, 11).stats.mean_accept_length == 5  # all of its own guesses are right
    assert engine.generate(prompts, 14, speculative=False).output_ids == expected


@pytest.mark.cross
def test_sampled_text_is_that_of_plain_decoding(pair):
    _, _, ours = pair
    engine = EAGLEInference(ours, ours, EAGLEConfig(topk=3, num_steps=2, temperature=0.9, top_p=0.95, prefill_chunk=4))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9]]
    text = engine.generate(prompts, 10, seeds=[3, 4]).output_ids
    assert text == engine.generate(prompts, 10, seeds=[3, 4], speculative=False).output_ids
    stranger = EAGLEInference(ToyModel(vocab_size=VOCAB, device=ours.device), ours, engine.config)
    assert text == stranger.generate(prompts, 10, seeds=[3, 4]).output_ids


def test_what_the_engine_is_told(pair):
    name, theirs, ours = pair
    assert (ours.vocab_size, ours.hidden_size, ours.max_length) == (VOCAB, WIDTH, 64)
    heads = (4, 16) if name in ("gpt2", "opt", "gpt neox") else (2, 16)  # those have no key-value heads of their own
    assert ours.kv_shape == KVShape(theirs.config.num_hidden_layers, *heads)
    assert ours.get_input_embeddings() is ours.model.get_input_embeddings()
    assert ours.get_output_embeddings() is ours.model.get_output_embeddings()
    assert not any(parameter.requires_grad for parameter in ours.model.parameters())
    assert ours.can_be_captured == (name not in MOE)


class Reads(TorchDispatchMode):
    """Counts what would wait for a device: values, and sizes that depend on values."""

    names = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.names:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_what_may_be_captured_reads_nothing(pair):
    """Rows of a tree, whose positions are no sequence, and ids of padding."""
    _, _, ours = pair
    tokens, positions = (torch.tensor([ids], device=ours.device) for ids in ([0, 4, 0], [7, 8, 8]))
    with Reads() as reads:
        ours.forward(tokens, positions, lambda layer, query, key, value, **_: query, capture=(1, FINAL_NORM))
    assert not reads.found or not ours.can_be_captured


def test_graphs_of_models_that_wait_are_refused(pair):
    name, _, ours = pair
    toy = ToyModel(vocab_size=VOCAB, device=ours.device)
    config = EAGLEConfig(topk=2, num_steps=2, cuda_graph=True)
    for draft, target in (toy, ours), (ours, toy):
        engine = EAGLEInference(draft, target, config)
        if name not in MOE:
            assert len(engine.generate([1, 2], 2).output_ids) == 2
            continue
        with pytest.raises(ValueError, match="cuda_graph must not be True here: .* waits for the device"):
            engine.generate([1, 2], 2)
    if name in MOE:
        assert len(engine.generate([1, 2], 2, speculative=False).output_ids) == 2, "the toy alone may be captured"


@pytest.mark.cross
def test_an_eagle_head_reads_its_features_and_shares_its_weights(pair):
    """A head without tokens of its own, so embedding and output are the target's modules."""
    _, _, ours = pair
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("vocab_size", "intermediate_size", "num_attention_heads")}
    config = {"hidden_size": WIDTH, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_hidden_layers": 1}
    head = Eagle1Head(Eagle1Config.from_dict({"model_type": "llama"} | sizes | config)).to(ours.device).eval()
    engine = EAGLEInference(head, ours, EAGLEConfig(topk=2, num_steps=3))
    assert head.embed(torch.zeros(1, 1, dtype=torch.int64, device=ours.device)).shape == (1, 1, WIDTH)
    text = engine.generate([[5, 6, 7], [1]], 8).output_ids
    assert text == engine.generate([[5, 6, 7], [1]], 8, speculative=False).output_ids


def test_keys_and_values_that_are_views_of_one_tensor(device):
    """Of latent attention whose heads have one size: keys of all heads, then, are what the pool holds."""
    sizes = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10,
             "qk_rope_head_dim": 6, "v_head_dim": 16, "head_dim": 6}  # fmt: skip
    theirs = make("Youtu", sizes)
    ours, prompts = TransformersTarget(copy.deepcopy(theirs).to(device)), torch.randint(1, VOCAB, (2, 9))
    assert ours.kv_shape == KVShape(3, 4, 16)
    expected = theirs.generate(prompts, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompts))
    engine = EAGLEInference(ours, ours, EAGLEConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=4))
    assert engine.generate(prompts, 8).output_ids == expected[:, 9:].tolist()


@pytest.mark.slow
def test_a_native_family_through_the_adapter(tmp_path, device):
    make("Llama", {}).save_pretrained(tmp_path)
    native = load_target(tmp_path, device)
    stock = TransformersTarget(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(device))
    assert isinstance(native, Decoder)
    for name in ("vocab_size", "hidden_size", "max_length", "kv_shape", "device", "dtype"):
        assert getattr(native, name) == getattr(stock, name), name
    prompts = [[1, 2, 3, 4, 5], [6]]
    for sampling in {}, {"temperature": 1.0, "seeds": 5}:
        texts = [
            EAGLEInference(draft, target, EAGLEConfig(topk=2, num_steps=3)).generate(prompts, 12, **sampling).output_ids
            for draft, target in ((native, native), (native, stock), (stock, native))
        ]
        assert texts[0] == texts[1] == texts[2]


def test_forwards_of_several_threads_do_not_mix(device):
    targets = [TransformersTarget(make("Llama", {"num_hidden_layers": count}).to(device)) for count in (1, 2)]
    tokens = torch.arange(12, device=device)[None]

    @torch.no_grad()
    def run(index):
        seen = []

        def attend(layer, query, key, value, **options):
            seen.append(layer)
            return causal_attend(layer, query, key, value, **options)

        return targets[index].forward(tokens, tokens, attend, capture=(0,)).logits, seen

    alone = [run(index) for index in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        for index, (logits, seen) in zip([0, 1] * 8, pool.map(run, [0, 1] * 8)):
            assert torch.equal(logits, alone[index][0]) and seen == list(range(index + 1))


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}


def test_frequencies_that_depend_on_the_batch():
    """longrope changes them for all rows from its original length on: requests end there."""
    rope = {"rope_parameters": LONG | {"original_max_position_embeddings": 24}, "head_dim": 16}
    target = TransformersTarget(make("Phi3", rope | {"original_max_position_embeddings": 24}))
    assert target.max_length == 24 and not target.can_be_captured
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    target = TransformersTarget(make("Llama", dynamic))
    assert target.max_length == 64 and not target.can_be_captured


MLA = {
    "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip


# four hidden states side by side
STREAMS = {
    "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip


@pytest.mark.cross
@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Bloom", {}, "BloomForCausalLM: its forward takes no position_ids"),
        ("GPT2", {"add_cross_attention": True}, "GPT2LMHeadModel: cross attention is not supported"),
        ("GPT2", {"hidden_size": 8}, r"GPT2LMHeadModel: its head size must lie in 4\.\.512, got 2"),
        ("Gemma2", {"use_bidirectional_attention": True}, "Gemma2ForCausalLM: attention to later tokens is not"),
        ("Llama4Text", {"num_local_experts": 2}, "Llama4ForCausalLM: a layer of type chunked_attention is not"),
        ("Qwen3Next", {"num_hidden_layers": 4}, "Qwen3NextForCausalLM: a layer of type linear_attention is not"),
        ("FalconH1", {}, "FalconH1ForCausalLM: a layer of type hybrid is not supported"),
        ("DeepseekV3", MLA, r"DeepseekV3ForCausalLM: query, key and value heads of different sizes \[24, 24, 16\]"),
        ("Gemma4Text", {"sliding_window": 4},
         r"Gemma4ForCausalLM: its layers must have one \(key heads, head size\), got \["),
        ("DiffLlama", {}, "DiffLlamaForCausalLM: layer 0 attends more than once"),
        ("Doge", {}, "DogeAttention: a mask or a bias of its own is not supported"),
        ("Gemma3nText", STREAMS,
         "Gemma3nForCausalLM: its forward does not run with the engine's attention, RuntimeError: Tensors must"),
    ],
)  # fmt: skip
def test_what_the_adapter_cannot_honour_is_refused(family, changes, message):
    with pytest.raises(ModelError, match=message):
        TransformersTarget(make(family, changes))


def test_the_callers_model_stays_as_it_is(device):
    """Its text, mode, gradients and hooks: before an adapter is made of it, while an engine uses that, and after."""
    model = make("Llama", {}).to(device)
    prompt = torch.randint(1, VOCAB, (1, 7), device=device)

    def text():
        return model.generate(prompt, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompt))

    expected, implementation = text(), model.config._attn_implementation
    model.train()
    target = TransformersTarget(model)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    model.eval()
    assert torch.equal(text(), expected)
    engine = EAGLEInference(target, target, EAGLEConfig.chain(3))
    stream = engine.stream(prompt.tolist()[0], 8)
    ours = [next(stream).token_id]
    assert torch.equal(text(), expected), "in the middle of a request"
    ours += [event.token_id for event in stream]
    assert ours == expected[0, 7:].tolist() and torch.equal(text(), expected)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in target.model.parameters()} == addresses, "no second copy of weights"
    (model(prompt).logits.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_folders_that_cannot_be_loaded_are_named(tmp_path, monkeypatch):
    make("GPT2", {}).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ModelError, match=r"none of llama, .*; other models need .*eagle_kernels\[transformers\]"):
            load_target(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "free_memory_bytes", lambda device: 1000)
        with pytest.raises(ModelError, match="the weights take 0.00 GiB as torch.float16, but cpu has 0.00 GiB free"):
            load_target(tmp_path, dtype=torch.float16)
    assert load_target(tmp_path, dtype=torch.float16).dtype == torch.float16
    assert load_target(tmp_path, "meta").device.type == "cpu", "the adapter runs two tokens"
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    edit_tensors(tmp_path, **{"transformer.h.1.ln_1.bias": None, "transformer.h.1.ln_2.weight": None})
    with pytest.raises(ModelError, match=r"missing tensors: transformer\.h\.1\.ln_1\.bias, .*ln_2\.weight"):
        load_target(tmp_path)
    path.write_text(json.dumps(config | {"model_type": "nothing like it"}))
    with pytest.raises(ModelError, match="transformers cannot load the model: .*nothing like it"):
        load_target(tmp_path)
    for changes, message in (
        ({"n_head": 0}, "transformers cannot load the model: ZeroDivisionError: "),
        ({"n_layer": 0}, "GPT2LMHeadModel: num_hidden_layers must be above 0, got 0"),
        ({"n_layer": None}, "transformers cannot load the model: "),  # an error of huggingface_hub's own class
        ({"model_type": ["gpt2"]}, r"config.json: model_type must be a string, got \['gpt2'\]"),
    ):
        path.write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match=message) as caught:
            load_target(tmp_path)
        assert "\n" not in str(caught.value)
    text = {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4}
    path.write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    with pytest.raises(ModelError, match="config.json: text_config of model_type='mistral3': only text models"):
        load_target(tmp_path)
    path.write_text(json.dumps({"model_type": "vit"}))  # neither has it a text model inside
    with pytest.raises(ModelError, match="transformers cannot load the model: ValueError: Unrecognized configuration"):
        load_target(tmp_path)
    path.write_text(json.dumps(config | {"model_type": None}))
    with pytest.raises(ModelError, match="config.json: "):  # as Llama, as ever
        load_target(tmp_path)


def test_plain_models_are_wrapped_on_the_way(device):
    """Texts end where their own `generate` ends them; the caller's models stay as they were, mode and weights too."""
    theirs = make("Llama", {"num_hidden_layers": 1}).to(device).train()
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    modules, attention = len(list(theirs.modules())), theirs.config._attn_implementation
    prompt = torch.tensor([[7, 5, 3]], device=device)
    greedy = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    theirs.eval()
    text = theirs.generate(prompt, max_new_tokens=20, **greedy)[0, 3:].tolist()
    theirs.train()
    engine = EAGLEInference(theirs, theirs, EAGLEConfig(topk=2, num_steps=3))
    assert engine.generate(prompt, 20)[0][0] == text and isinstance(engine.target, TransformersTarget)
    theirs.generation_config.eos_token_id = [text[4], 99, -1]
    until = text[: text.index(text[4]) + 1]
    assert EAGLEInference(theirs, theirs).generate(prompt, 20)[0][0] == until
    assert EAGLEInference(theirs, theirs, EAGLEConfig(eos_token_ids=())).generate(prompt, 20)[0][0] == text
    assert theirs.training and len(list(theirs.modules())) == modules and not theirs._forward_hooks
    assert theirs.config._attn_implementation == attention
    assert all(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())
    with pytest.raises(ValueError, match="must be a causal language model, .*, got LlamaModel"):
        EAGLEInference(theirs, theirs.model)
    theirs.generation_config.eos_token_id = None
    assert theirs.eval().generate(prompt, max_new_tokens=20, **greedy)[0, 3:].tolist() == text
