"""Hydra heads: the network against its formula, the published layout, and every draft against the text alone."""

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.hydra import load_hydra
from eagle_kernels.engine.models.loading import load_draft, load_target, read_kind
from eagle_kernels.engine.models.protocol import FINAL_NORM, ModelError
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine.drafting import (
    POLICIES,
    PROMPTS,
    SMALL,
    TREES,
    ModelOracle,
    assert_plain_text,
    come_and_go,
    features_of,
)
from op_tests.engine.head_folders import NUM_HEADS, hydra_tensors, write_hydra
from op_tests.engine.heads import HIDDEN
from op_tests.engine.toys import random_llama, write_decoder

ARCHITECTURES = ("mlp", "prefix-mlp")


def formula(tensors, h, embeddings, head):
    """The official forward of a grounded head, written anew; h [H], embeddings of the root and the drafts so far."""
    x = torch.cat([h, *embeddings[: head + 1]])
    places = sorted(int(name.split(".")[2]) for name in tensors if name.startswith(f"hydra_mlp.{head}.")
                    and name.endswith("linear.weight"))  # fmt: skip

    def linear(name, x):
        return tensors[name + ".weight"] @ x + tensors[name + ".bias"]

    for number, place in enumerate(places):
        name = f"hydra_mlp.{head}.{place}"
        made = linear(name + ".linear", x)
        x = (x if number else linear(name + ".res_connection", x)) + made * torch.sigmoid(made)
    output = f"hydra_lm_head.{head}"
    return linear(output if output + ".weight" in tensors else output + ".1", x)


def prefix_of(tensors, features):
    """What the layer over the features [T, H] makes of them: the class of the family with this layer's weights."""
    if not any(name.startswith("prefix_embeding_layer.") for name in tensors):
        return features
    model = random_llama(num_layers=1)
    named = {"model." + name.removeprefix("prefix_embeding_layer."): tensor for name, tensor in tensors.items()
             if name.startswith("prefix_embeding_layer.")}  # fmt: skip
    model.load_state_dict(named | {"lm_head.weight": model.lm_head.weight})
    positions = torch.arange(len(features))[None]
    angles = model.model.rotary(positions)
    _, stream, delta = model.model.layers[0](features[None], None, angles, causal_attend, 0)
    return model.model.norm.add(stream, delta)[1][0]


def pair(folder, architecture, device="cpu", num_layers=1, **config):
    """(target, draft)."""
    target, tensors = random_llama(std=0.4, device=device), hydra_tensors(architecture, num_layers)
    write_hydra(folder, tensors, hydra_head_arch=architecture, hydra_num_layers=num_layers, **config)
    return target, load_hydra(folder, target)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_equal_the_formula(architecture, num_layers, tmp_path):
    target, draft = pair(tmp_path, architecture, num_layers=num_layers)
    tensors = hydra_tensors(architecture, num_layers)
    assert read_kind(tmp_path) == "Hydra" and draft.max_levels == NUM_HEADS and draft.aux_layers == (FINAL_NORM,)
    assert draft.kv_shape.num_layers == (architecture == "prefix-mlp") and draft.max_length == target.max_length
    features = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(5))
    text, embed = [7, 3, 60, 11, 0, 25], target.get_input_embeddings()
    positions = torch.arange(6)[None]
    with torch.inference_mode():
        h = prefix_of(tensors, features)
        ids = torch.tensor([text])
        output = draft(ids, features[None], positions, causal_attend, from_target=True)
        for row in range(6):
            wanted = formula(tensors, h[row], [embed.weight[text[row]]], 0)
            torch.testing.assert_close(output.logits[0, row], wanted, atol=2e-4, rtol=2e-4)
        path = [text[-1]]
        for depth, token in enumerate((5, 9, 44), start=1):
            path.append(token)
            hidden = output.hidden[:, -1:]
            output = draft(torch.tensor([[token]]), hidden, positions[:, -1:], causal_attend, from_target=False)
            wanted = formula(tensors, h[-1], [embed.weight[each] for each in path], depth)
            torch.testing.assert_close(output.logits[0, 0], wanted, atol=2e-4, rtol=2e-4)


class Chain(ModelOracle):
    """Each head's own choice after the ones before, from the text alone; of trees, the first head's."""

    def __init__(self, engine, tensors, monkeypatch, offset=0):
        super().__init__(engine, monkeypatch)
        self.tensors = tensors
        self.stream = FINAL_NORM if offset == 0 else engine.target.kv_shape.num_layers - offset

    def check(self, drafts, wanted, text):
        if self.engine.config.topk == 1:
            super().check(drafts, wanted, text)
        else:
            assert wanted[0] in drafts

    @torch.inference_mode()
    def drafts(self, text, config):
        target = self.engine.target
        features = features_of(target, text, (self.stream,)).cpu()
        h, embed = prefix_of(self.tensors, features)[-1], target.get_input_embeddings().weight.cpu()
        path, drafts = [embed[text[-1]]], []
        for head in range(config.num_steps):
            drafts.append(int(formula(self.tensors, h, path, head).argmax()))
            path.append(embed[drafts[-1]])
        return drafts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [3, 2048])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_are_those_of_the_text_alone(architecture, tree, chunk, policy, tmp_path, device, monkeypatch):
    """Rows that come and go, prompts in parts, paths of any length; plain steps in between."""
    config = EAGLEConfig(**TREES[tree], **SMALL, **POLICIES[policy], prefill_chunk=chunk)
    target, draft = pair(tmp_path, architecture, device)
    engine = EAGLEInference(draft, target, config)
    oracle = Chain(engine, hydra_tensors(architecture), monkeypatch)
    come_and_go(engine, has_pauses=True)
    assert oracle.num_checked > 8


def test_an_earlier_stream(tmp_path, device, monkeypatch):
    target, draft = pair(tmp_path, "mlp", device, hidden_state_offset=1)
    assert draft.aux_layers == (1,)
    engine = EAGLEInference(draft, target, EAGLEConfig.chain(3, cuda_graph=False))
    oracle = Chain(engine, hydra_tensors(), monkeypatch, offset=1)
    engine.generate(PROMPTS, 9)
    assert oracle.num_checked > 5


@pytest.mark.parametrize("options", [{}, {"mean_draft_tokens": 4}, {"adaptive": "auto"}, {"method": "hybrid"},
                                     {"verify_strategy": "rejection"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_text_is_plain_text(architecture, options, tmp_path, device):
    target, draft = pair(tmp_path, architecture, device)
    tree = {"num_steps": 6, "num_model_steps": 2} if options.get("method") else {"num_steps": 4}
    assert_plain_text(EAGLEInference(draft, target, EAGLEConfig(topk=2, **options, **tree)))


REFUSED = {
    "another design": ({}, {"hydra_head_arch": "cross-attn"}, "hydra_head_arch='cross-attn' is not implemented"),
    "heads that read no drafts": ({}, {"grounded_heads": False}, "grounded_heads must be true"),
    "heads": ({}, {"hydra_num_heads": 3}, "hydra_num_heads must be 4 to match the tensors, got 3"),
    "layers": ({}, {"hydra_num_layers": 2}, "hydra_num_layers must be 1 to match the tensors, got 2"),
    "stream": ({}, {"hidden_state_offset": 7}, "hidden_state_offset must be at most 2, the target's layers, got 7"),
    "no stream": ({}, {"hidden_state_offset": -1}, "hidden_state_offset must be an integer of at least 0, got -1"),
    "a head is missing": ({"hydra_mlp.1.0.linear.weight": None}, {}, "must hold tensors hydra_mlp.k.j.linear.weight"),
    "a bias is missing": ({"hydra_mlp.1.0.linear.bias": None}, {}, "missing tensors: blocks.1.0.linear.bias"),
    "a shape": ({"hydra_mlp.1.0.linear.bias": torch.zeros(3)}, {}, r"tensor blocks.1.0.linear.bias has shape \[3\]"),
    "NaN": ({"hydra_lm_head.1.bias": torch.full((61,), float("nan"))}, {}, "tensors with NaN or infinite values"),
    "quantised": ({"hydra_mlp.1.0.linear.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}, {},
                  "hydra_mlp.1.0.linear.weight is of quantised weights, which are not implemented for Hydra heads"),
    "not Hydra": ({}, dict.fromkeys(("hydra_num_heads", "hydra_num_layers", "hydra_head_arch")),
                  "holds no Hydra heads: config.json has no hydra_num_heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused(case, tmp_path):
    changes, config, message = REFUSED[case]
    tensors = {name: tensor for name, tensor in (hydra_tensors() | changes).items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        load_hydra(write_hydra(tmp_path, tensors, pickled=False, **config), random_llama())


@pytest.mark.parametrize("adaptive", [None, "auto"])
def test_a_tree_that_nobody_asked_for_has_the_levels_that_there_are(adaptive, tmp_path, caplog):
    target, draft = pair(tmp_path, "mlp")
    with caplog.at_level("INFO", logger="eagle_kernels"):
        engine = EAGLEInference(draft, target, EAGLEConfig(adaptive=adaptive))
    told = "HydraHeads: it cannot draft topk=8, num_steps=5, and drafts topk=8, num_steps=4"
    assert [each.message for each in caplog.records].count(told) == 1
    assert_plain_text(engine)
    assert engine.generate([[5, 6]], 4).stats.num_steps <= NUM_HEADS
    assert max(each.num_steps for each in engine.candidates) == NUM_HEADS < EAGLEConfig().num_steps
    with pytest.raises(ValueError, match="num_steps must be at most 4"):
        EAGLEInference(draft, target, EAGLEConfig(num_draft_tokens=31, adaptive=adaptive))


def test_pairs_that_do_not_fit(tmp_path):
    write_hydra(tmp_path, hydra_tensors())
    with pytest.raises(ModelError, match="the heads' hidden_size 32 is not the target's 48"):
        load_hydra(tmp_path, random_llama(hidden_size=48))
    with pytest.raises(ModelError, match="the heads' vocab_size 61 is not the target's 70"):
        load_hydra(tmp_path, random_llama(vocab_size=70))
    with pytest.raises(ModelError, match="are draft and target swapped"):
        load_target(tmp_path)
    with pytest.raises(ModelError, match="holds Hydra heads, which load_hydra loads"):
        load_draft(tmp_path, random_llama())
    target, draft = pair(tmp_path, "mlp")
    with pytest.raises(ValueError, match="num_steps must be at most 4, the levels that HydraHeads drafts, got 5"):
        EAGLEInference(draft, target, EAGLEConfig.chain(5))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folders_make_an_engine(architecture, tmp_path):
    target = write_decoder(random_llama(std=0.4), tmp_path / "target")
    draft = write_hydra(tmp_path / "draft", hydra_tensors(architecture), hydra_head_arch=architecture)
    engine = EAGLEInference.from_pretrained(
        draft, target, EAGLEConfig(method="hydra", topk=2, num_steps=3), device="cpu"
    )
    assert type(engine.draft).__name__ == "HydraHeads"
    assert engine.generate([[5, 6]], 9).output_ids == engine.generate([[5, 6]], 9, speculative=False).output_ids
