"""Feed-forwards of experts in our decoder: against transformers' modules, shared experts in the table, refusals."""

import re

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.layers import experts as kinds
from eagle_kernels.engine.models.layers.linear import Linear
from eagle_kernels.engine.models.layers.mixture import MixtureOfExperts, Router, count_touched, experts_touched
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.step.choice import Fastest
from eagle_kernels.reference.causal_attend import causal_attend
from eagle_kernels.tools.cli.main import main
from op_tests.engine import expert_models
from op_tests.engine.families import CASES, SIZES, write_target
from op_tests.engine.heads import edit_config, edit_tensors

transformers = pytest.importorskip("transformers")

FAMILIES = ("qwen3 moe", "mixtral", "gpt oss", "ernie moe", "glm moe")
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
DEEPSEEK = {
    "hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 20, "num_experts_per_tok": 3,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


def folder_of(case: str, folder):
    write_target(*CASES[case], folder)
    return folder


def mixtures(model) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def _deepseek(version: str, **changes):
    """(the block of transformers, our layer with its weights), of DeepSeek-V2 or -V3."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    settings = DEEPSEEK | GROUPS | changes
    if version == "V3":
        config, block = v3.DeepseekV3Config(**settings), v3.DeepseekV3MoE
    else:
        config, block = v2.DeepseekV2Config(**settings), v2.DeepseekV2Moe
    theirs = block(config)
    with torch.no_grad():
        for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            tensor.normal_(std=0.1 if "correction" in name else 0.3)
    read = kinds.DeepseekExperts if version == "V3" else kinds.DeepseekV2Experts
    plain = {"linear": Linear, "mlp_bias": False}
    ours = read.read(settings | changes | plain).make(1).requires_grad_(False)
    state = theirs.state_dict()
    fused = {name: state.pop(f"experts.{name}") for name in ("gate_up_proj", "down_proj")}
    for number in range(8):
        gate, up = fused["gate_up_proj"][number].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": fused["down_proj"][number]}
        state |= {f"experts.{number}.{name}.weight": tensor for name, tensor in parts.items()}
    places = _wrapped(ours).state_dict()
    assert places.keys() == {f"mlp.{name}" for name in state}
    for name, tensor in state.items():
        places[f"mlp.{name}"].copy_(tensor)
    return theirs, ours


def _wrapped(mixture) -> torch.nn.Module:
    holder = torch.nn.Module()
    holder.mlp = mixture
    return holder


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        ("V3", {}), ("V3", {"norm_topk_prob": False}), ("V3", {"n_shared_experts": 1}),
        ("V2", {"topk_method": "greedy"}), ("V2", {"topk_method": "group_limited_greedy"}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_deepseek_s_experts_are_those_of_transformers(version, changes):
    changes = ({"norm_topk_prob": version == "V3"}) | changes
    theirs, ours = _deepseek(version, **changes)
    x = torch.randn(2, 9, 48)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected, atol=2e-5, rtol=1e-5)
    ours.pack()
    assert ours.shared_experts is None and ours.num_packed == changes.get("n_shared_experts", 2)
    torch.testing.assert_close(ours(x), expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_shared_experts_are_published_from_the_table(tmp_path):
    """What was packed comes out as it was; so it does from what loads it again."""
    target = load_target(folder_of("ernie moe", tmp_path))
    assert all(mixture.num_packed == 2 for mixture in mixtures(target)) and mixtures(target)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    state, name = target.state_dict(), "model.layers.2.mlp.shared_experts.{}.weight"
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(state[name.format(projection)], theirs[name.format(projection)])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_dict_is_loaded_by_published_names(family, tmp_path):
    one, other = (load_target(folder_of(family, tmp_path)) for _ in range(2))
    for mixture in mixtures(other):
        mixture.gate_up.zero_()
        mixture.down.fill_(7.0)
        mixture.router.weight.zero_()
    state = one.state_dict()
    if family not in ("ernie moe", "glm moe"):  # whose shared experts are in the table
        other.load_state_dict(dict(state))
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_wide_routers_stay_wide(tmp_path):
    target = load_target(folder_of("ernie moe", tmp_path), dtype=torch.bfloat16).to(torch.float16)
    for mixture in mixtures(target):
        assert mixture.down.dtype == torch.float16
        assert {tensor.dtype for tensor in mixture.router.parameters()} == {torch.float32}
    mixture = mixtures(target)[0]
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert torch.equal(mixture.router.weight, stored["model.layers.1.mlp.gate.weight"])
    assert type(mixtures(load_target(folder_of("mixtral", tmp_path / "2"), dtype=torch.float16))[0].router) is Router


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, "kimi_k2", "glm moe lite", "glm4, a quarter turns"])
def test_steps_are_captured(family, tmp_path, device):
    """Chains and trees of the model's own guesses in CUDA graphs have the text of plain eager steps."""
    target = load_target(folder_of(family, tmp_path), device)
    prompts = torch.randint(1, SIZES["vocab_size"], (3, 9))
    expected = EAGLEInference(target, target, EAGLEConfig(cuda_graph=False)).generate(prompts, 12, speculative=False)
    for tree in {"topk": 2, "num_draft_tokens": 9}, {"topk": 1, "num_draft_tokens": 5}:
        engine = EAGLEInference(target, target, EAGLEConfig(**tree, num_steps=4, cuda_graph=True))
        assert engine.generate(prompts, 12).output_ids == expected.output_ids


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("qwen3 moe", {"num_local_experts": None}, "num_experts must be a positive integer, got None"),
        ("qwen3 moe", {"num_experts_per_tok": 8}, "num_experts_per_tok must be at most 7, got 8"),
        ("qwen3 moe", {"num_local_experts": 513}, "num_local_experts must be at most 512, got 513"),
        ("qwen3 moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of integers"),
        ("qwen3 moe", {"num_local_experts": 8}, "missing tensors: model.layers.0.mlp.experts.7.down_proj.weight, "),
        ("qwen3 moe", {"moe_intermediate_size": 21}, "but config.json says [60, 21]"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ("gpt oss", {"layer_types": None}, "layer_types"),
        ("gpt oss", {"swiglu_limit": -1.0}, "swiglu_limit must be a number of at least 0, got -1.0"),
        ("ernie moe", {"moe_gate": "norm"}, "moe_gate='norm' is not implemented"),
        ("ernie moe", {"moe_num_shared_experts": 9}, "shared experts must be at most 8, got 9"),
        ("ernie moe", {"moe_layer_interval": "2"}, "moe_layer_interval must be an integer, got '2'"),
    ],
)
def test_what_does_not_fit_is_named(family, change, told, tmp_path):
    edit_config(folder_of(family, tmp_path), **change)
    with pytest.raises(ModelError) as caught:
        load_target(tmp_path)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n_group": 3}, "n_group must divide 8 experts in pairs, got 3"),
        ({"n_group": 8}, "n_group must divide 8 experts in pairs, got 8"),
        ({"topk_group": 1}, "topk_group must leave num_experts_per_tok experts, got 1"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not implemented"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace must be an integer, got '1'"),
    ],
)
def test_groups_that_do_not_fit_are_named(change, told):
    settings = DEEPSEEK | GROUPS | {"linear": Linear, "mlp_bias": False} | change
    with pytest.raises(ModelError) as caught:
        kinds.DeepseekExperts.read(settings)
    assert told in str(caught.value)


def test_quantised_experts_are_named(tmp_path):
    """As unexpected tensors: experts are read in 16 bit alone."""
    folder = folder_of("qwen3 moe", tmp_path)
    edit_tensors(folder, **{"model.layers.0.mlp.experts.0.up_proj.qweight": torch.zeros(2, 2, dtype=torch.int32)})
    with pytest.raises(ModelError, match="unexpected tensors: .*experts.0.up_proj.qweight"):
        load_target(folder)


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(128, 8), (8, 2), (6, 6)])
def test_experts_touched_by_even_routing(num_experts, num_chosen):
    for num_rows in (1, 3, 16, 64):
        chosen = torch.rand(4000, num_rows, num_experts).argsort(dim=2)[..., :num_chosen].flatten(1)
        is_touched = torch.zeros(4000, num_experts).scatter_(1, chosen, 1.0)
        expected = float(is_touched.sum(1).mean())
        assert abs(experts_touched(num_rows, num_experts, num_chosen) - expected) < 0.02 * expected


def test_bytes_of_a_step_are_those_of_the_experts_touched(tmp_path):
    """One row reads three of seven experts, many read all; a model without experts reads all of its weights."""
    target = load_target(folder_of("qwen3 moe", tmp_path))
    held = sum(tensor.nbytes for tensor in target.parameters())
    each = 3 * 20 * SIZES["hidden_size"] * 4
    assert target.read_bytes(1) == pytest.approx(held - len(mixtures(target)) * 4 * each)
    assert target.read_bytes(1000) == pytest.approx(held)
    plain = load_target(folder_of("llama", tmp_path / "2"))
    assert plain.read_bytes(1) == plain.read_bytes(64) == sum(tensor.nbytes for tensor in plain.parameters())


def test_bytes_of_a_step_are_those_of_the_first_long_prompt(tmp_path):
    """Neither short ones nor those of a warm-up tell where rows go; what was noted once stays."""
    target = load_target(folder_of("glm moe", tmp_path))
    engine = EAGLEInference(None, target, EAGLEConfig(method="naive", cuda_graph=False, eos_token_ids=()))
    even = target.read_bytes(8)
    for prompt in [3, 1, 4, 1, 5], [0] * 70:
        engine.generate([prompt], 2)
        assert target.read_bytes(8) == even
    prompt = [7, 8] * 35  # few experts
    engine.generate([prompt], 2)
    other = load_target(tmp_path)
    with torch.inference_mode(), other.noting():
        other(torch.tensor([prompt]), torch.arange(70)[None], causal_attend, last_only=True)
    each = 3 * 28 * SIZES["hidden_size"] * 4
    unread = each * sum(6 - count_touched(mixture.noted, 8) for mixture in mixtures(other))
    expected = sum(tensor.nbytes for tensor in target.parameters()) - unread
    assert target.read_bytes(8) == pytest.approx(expected)
    assert target.read_bytes(8) < even and target.read_bytes(999) == target.read_bytes(70)
    engine.generate([list(range(70))], 2)
    assert target.read_bytes(8) == pytest.approx(expected)
    assert not any(mixture.is_noting for mixture in mixtures(target))


def test_a_tree_of_many_experts_is_not_tried_first():
    """Its rows read more than twice what those of a plain step do; without experts they are free."""
    rows = (1, 4, 32)
    assert Fastest((1, 4, 8), None, rows).choose(1) == 2
    for held, expected in ((100, 1), (2.0, 0), (10**6, 2)):
        of_experts = Fastest((1, 4, 8), None, rows, read_bytes=lambda n, held=held: held + 40 * min(n, 32) / 16)
        assert of_experts.choose(1) == (2 if held >= 100 else expected)
    assert Fastest((1, 4, 8), None, rows, read_bytes=lambda n: 1.0 + n / 3).choose(1) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_modules"),
    [*((family, 0) for family in expert_models.FAMILIES), *((family, 1) for family in expert_models.WITH_MODULES)],
)
def test_the_command_compares(family, num_modules, tmp_path, capsys):
    expert_models.main([str(tmp_path), "--family", family, "--modules", str(num_modules)])
    command = ["generate", "a prompt", "--target", str(tmp_path), "--draft", str(tmp_path), "--compare"]
    options = ["--topk", "2", "--num-steps", "2", "--num-draft-tokens", "6"] if num_modules else []
    assert main([*command, *options, "--max-new-tokens", "9", "--dtype", "float32"]) == 0
    told = capsys.readouterr().out
    assert "identical: yes" in told
    # a model that drafts for itself is right, a random module hardly ever
    assert num_modules or float(re.search(r"mean acceptance length: ([\d.]+)", told)[1]) > 2
