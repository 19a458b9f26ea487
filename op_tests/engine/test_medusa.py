"""Medusa heads: the network against its formula, both published layouts, and every draft against the text alone."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.drafters.model_drafter import ModelDrafter
from eagle_kernels.engine.models.loading import load_draft, load_medusa, load_target, read_head, read_kind
from eagle_kernels.engine.models.protocol import FINAL_NORM, ModelError
from op_tests.engine import drafting
from op_tests.engine.head_folders import NUM_HEADS, medusa_tensors, write_medusa
from op_tests.engine.heads import HIDDEN, TARGET_VOCAB, WIDTHS
from op_tests.engine.toys import random_llama

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
TOKEN_MAP = torch.tensor([60, 3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 0, 44])


def formula(tensors, hidden, head):
    """The official forward of one head, written anew: blocks x + silu(Wx + b), then the output."""
    x, layer = hidden, 0
    while f"{head}.{layer}.linear.weight" in tensors:
        made = x @ tensors[f"{head}.{layer}.linear.weight"].T + tensors.get(f"{head}.{layer}.linear.bias", 0.0)
        x, layer = x + made * torch.sigmoid(made), layer + 1
    return x @ tensors[f"{head}.{layer}.weight"].T


def vllm_names(tensors, prefix=""):
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        is_block = rest[0] == "linear"
        renamed[
            f"{prefix}blocks.{head}.layers.{layer}.{rest[-1]}" if is_block else f"{prefix}lm_heads.{head}.weight"
        ] = tensor
    return renamed


def write_vllm(folder, tensors, *, prefix="", **config):
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": TARGET_VOCAB,
        "num_heads": NUM_HEADS, "num_hidden_layers": 1, "medusa_fc_bias": True, "max_paths": 64, "topk": 10,
        "truncated_vocab_size": TARGET_VOCAB,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(base | config))
    save_file(vllm_names(tensors, prefix), folder / "model.safetensors")
    return folder


def pair(folder, device="cpu", tensors=None, **options):
    """(target, draft)."""
    target = random_llama(std=0.4, device=device)
    write_medusa(folder, medusa_tensors() if tensors is None else tensors, **options)
    return target, load_medusa(folder, target)


LAYOUTS = {
    "official": (write_medusa, {}, {}, "official (FasterDecoding)"),
    "official, pickled": (write_medusa, {}, {"pickled": True}, "official (FasterDecoding)"),
    "official, two layers": (write_medusa, {"num_layers": 2}, {"medusa_num_layers": 2}, "official (FasterDecoding)"),
    "vLLM": (write_vllm, {}, {}, "vLLM"),
    "vLLM, prefix": (write_vllm, {"bias": False}, {"prefix": "medusa_heads."}, "vLLM"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_equal_the_formula(layout, tmp_path):
    write, kind, options, name = LAYOUTS[layout]
    tensors, target = medusa_tensors(**kind), random_llama()
    folder = write(tmp_path, tensors, **options)
    file, draft = read_head(folder), load_medusa(folder, target)
    assert (file.kind, file.format_name, file.remarks, file.dtypes) == ("Medusa", name, [], ["F32"])
    assert read_kind(folder) == "Medusa" and draft.aux_layers == (FINAL_NORM,) and draft.block_length == NUM_HEADS
    assert draft.draft_to_target is None and draft.max_length == target.max_length
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5))
    for count in (1, NUM_HEADS):
        logits = draft.draft_block(hidden, count)
        assert logits.shape == (3, count, TARGET_VOCAB)
        for head in range(count):
            torch.testing.assert_close(logits[:, head], formula(tensors, hidden, head), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [len(TOKEN_MAP), TARGET_VOCAB], ids=["their rows", "all rows"])
def test_heads_of_some_tokens(rows, tmp_path):
    """token_map names the target's ids, in any order; the file may hold the rows of all of them."""
    tensors, target = medusa_tensors(rows=rows), random_llama()
    write_vllm(tmp_path, tensors, truncated_vocab_size=len(TOKEN_MAP))
    save_file(vllm_names(tensors) | {"token_map": TOKEN_MAP}, tmp_path / "model.safetensors")
    draft = load_medusa(tmp_path, target)
    assert torch.equal(draft.draft_to_target + torch.arange(len(TOKEN_MAP)), TOKEN_MAP)
    hidden = torch.randn(2, HIDDEN)
    whole = formula(tensors, hidden, 1)
    wanted = whole if rows == len(TOKEN_MAP) else whole[:, TOKEN_MAP]
    torch.testing.assert_close(draft.draft_block(hidden, 2)[:, 1], wanted, atol=1e-5, rtol=1e-5)
    engine = EAGLEInference(draft, target, EAGLEConfig(topk=2, num_steps=3))
    drafting.assert_plain_text(engine)


@pytest.mark.parametrize("source", ["one output", "the target's"])
def test_heads_that_share_an_output(source, tmp_path):
    tensors, target = medusa_tensors(), random_llama()
    output = tensors["0.1.weight"] if source == "one output" else target.lm_head.weight.detach()
    held = {name: tensor for name, tensor in vllm_names(tensors).items() if name.startswith("blocks")}
    write_vllm(tmp_path, tensors, original_lm_head=True)
    save_file(held | ({"lm_head.weight": output} if source == "one output" else {}), tmp_path / "model.safetensors")
    draft, hidden = load_medusa(tmp_path, target), torch.randn(2, HIDDEN)
    tensors |= {f"{head}.1.weight": output for head in range(NUM_HEADS)}
    for head in range(NUM_HEADS):
        wanted = formula(tensors, hidden, head)
        torch.testing.assert_close(draft.draft_block(hidden, NUM_HEADS)[:, head], wanted, atol=1e-5, rtol=1e-5)


def test_published_configs_name_fewer_heads(tmp_path, caplog):
    """As the official reader says; all heads of the file are used, and a line tells it."""
    target = random_llama()
    draft = load_medusa(write_medusa(tmp_path, medusa_tensors(), medusa_num_heads=2), target)
    assert draft.block_length == NUM_HEADS and "names 2 heads, and the file holds 4: all are used" in caplog.text


REFUSED = {
    "more heads than tensors": ({}, {"medusa_num_heads": 5}, r"number of heads must lie in 1\.\.4, those with tensors, "
                                                             "got 5"),
    "no number": ({}, {"medusa_num_heads": "many"}, r"number of heads must lie in 1\.\.4"),
    "layers": ({}, {"medusa_num_layers": 2}, r"medusa_num_layers must be 1 to match the tensors blocks.*, got 2"),
    "hidden size": ({}, {"hidden_size": 64}, "hidden_size must be 32 to match the tensors, got 64"),
    "vocabulary": ({}, {"vocab_size": 60}, "vocab_size must be 61 to match the tensors, got 60"),
    "a head is missing": ({"1.0.linear.weight": None, "1.0.linear.bias": None}, {}, "must hold tensors k.j.linear"),
    "an output is missing": ({"3.1.weight": None}, {}, "must hold one output, or one for each of the 4 heads, got 3"),
    "a bias is missing": ({"2.0.linear.bias": None}, {}, "missing tensors: blocks.2.layers.0.bias"),
    "another shape": ({"2.0.linear.bias": torch.zeros(3)}, {}, r"tensor blocks.2.layers.0.bias has shape \[3\]"),
    "a tensor more": ({"norm.weight": torch.ones(3)}, {}, "unexpected tensors: norm.weight"),
    "NaN": ({"2.1.weight": torch.full((61, 32), float("nan"))}, {}, "tensors with NaN or infinite values"),
    "scale": ({}, {"logit_scale": 2.0}, "logit_scale=2.0 is not implemented for Medusa heads"),
    "quantised": ({"0.0.linear.weight": None, "0.0.linear.qweight": torch.zeros(3, 3, dtype=torch.int32)},
                  {"quantization_config": {"quant_method": "awq"}},
                  "0.0.linear.qweight is of quantised weights, which are not implemented for Medusa heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused(case, tmp_path):
    changes, config, message = REFUSED[case]
    tensors = {name: tensor for name, tensor in (medusa_tensors() | changes).items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        load_medusa(write_medusa(tmp_path, tensors, **config), random_llama())


def test_targets_that_do_not_fit(tmp_path):
    write_medusa(tmp_path, medusa_tensors())
    with pytest.raises(ModelError, match="the heads read features of width 32, the target's are 48"):
        load_medusa(tmp_path, random_llama(hidden_size=48))
    with pytest.raises(ModelError, match="the heads' vocab_size 61 is not the target's 70"):
        load_medusa(tmp_path, random_llama(vocab_size=70))
    with pytest.raises(ModelError, match="are draft and target swapped"):
        load_target(tmp_path)
    with pytest.raises(ModelError, match="holds Medusa heads, which load_medusa loads"):
        load_draft(tmp_path, random_llama())
    for ids, told in ((TOKEN_MAP + 2, "token_map: draft id 0 maps to target id 62, outside the 61 there are"),
                      (TOKEN_MAP.clamp(min=4), "token_map: target id 4 is there 5 times")):  # fmt: skip
        folder = write_vllm(tmp_path / told[11:20].strip(), medusa_tensors(rows=13), truncated_vocab_size=13)
        save_file(vllm_names(medusa_tensors(rows=13)) | {"token_map": ids}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=told):
            load_medusa(folder, random_llama())


def test_trees_that_heads_cannot_draft(tmp_path):
    target, draft = pair(tmp_path)
    hybrid = EAGLEConfig(method="hybrid", topk=2, num_steps=9, num_model_steps=5)
    for config, name in ((EAGLEConfig.chain(5), "num_steps"), (hybrid, "num_model_steps")):
        with pytest.raises(ValueError, match=f"{name} must be at most 4, the levels that MedusaHeads drafts"):
            EAGLEInference(draft, target, config)
    with pytest.raises(ValueError, match="method must be 'medusa' or None for a draft of MedusaHeads, got 'eagle'"):
        EAGLEInference(draft, target, EAGLEConfig.chain(2, method="eagle"))


class OfHeads(drafting.Oracle):
    """The heads' own choices from features that the whole text gives anew."""

    @torch.inference_mode()
    def drafts(self, text, config):
        target, tensors = self.engine.target, medusa_tensors()
        hidden = drafting.features_of(target, text, (FINAL_NORM,))[-1].cpu()
        return drafting.best_paths(
            torch.stack([formula(tensors, hidden, head) for head in range(config.num_steps)]), config
        )


@pytest.mark.parametrize("policy", drafting.POLICIES)
@pytest.mark.parametrize("chunk", [1, 3, 2048])
@pytest.mark.parametrize("tree", drafting.TREES)
def test_drafts_are_those_of_the_text_alone(tree, chunk, policy, tmp_path, device, monkeypatch):
    """Rows that come and go, prompts in parts, paths of any length."""
    target, draft = pair(tmp_path, device)
    config = EAGLEConfig(**drafting.TREES[tree], **drafting.SMALL, **drafting.POLICIES[policy], prefill_chunk=chunk)
    engine = EAGLEInference(draft, target, config)
    oracle = OfHeads(engine, monkeypatch)
    drafting.come_and_go(engine)
    assert oracle.num_checked > 10


def test_drafts_after_plain_steps(tmp_path, device, monkeypatch):
    """Few and many, so that their features are taken in between, and by steps of other lengths."""
    target, draft = pair(tmp_path, device)
    engine = EAGLEInference(draft, target, EAGLEConfig(**drafting.OF_LENGTHS))
    oracle = OfHeads(engine, monkeypatch)
    drafting.pause_between_drafts(engine, is_long=True)
    assert oracle.num_checked > 20


@pytest.mark.parametrize("options", [{}, {"mean_draft_tokens": 5}, {"adaptive": "auto"}], ids=str)
@pytest.mark.parametrize("tree", drafting.TREES)
def test_text_is_plain_text(tree, options, tmp_path, device):
    """With rows that share nodes, and trees that are chosen by their speed."""
    if tree == "chain" and "mean_draft_tokens" in options:
        options = {"mean_draft_tokens": 3}
    target, draft = pair(tmp_path, device)
    drafting.assert_plain_text(EAGLEInference(draft, target, EAGLEConfig(**drafting.TREES[tree], **options)))


def test_hybrid_drafts_begin_with_the_heads_own(tmp_path, monkeypatch):
    """Level by level, of what comes after drafts that the heads do not read."""
    target, draft = pair(tmp_path)
    config = EAGLEConfig(method="hybrid", topk=1, num_steps=8, num_model_steps=3, min_ngram_size=5, cuda_graph=False)
    engine, seen, draw = EAGLEInference(draft, target, config), [], ModelDrafter._draft

    def watched(drafter, batch):
        tree, places = draw(drafter, batch)
        logits = draft.draft_block(batch.state.draft_hidden[batch.rows], 3)
        seen.append(torch.equal(tree.draft_tokens.view(len(batch), -1)[:, 1:], logits.argmax(-1)))
        return tree, places

    monkeypatch.setattr(ModelDrafter, "_draft", watched)
    engine.generate(drafting.PROMPTS, 12)
    assert len(seen) > 5 and all(seen)


def test_folders_make_an_engine(tmp_path):
    """From the command line's way in; the tokens of requests beyond the heads' text are the target's."""
    target, tensors = tmp_path / "target", random_llama().state_dict()
    target.mkdir()
    (target / "config.json").write_text(json.dumps(WIDTHS | {"num_hidden_layers": 2, "intermediate_size": 48} | SIZES))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    draft = write_medusa(tmp_path / "draft", medusa_tensors())
    engine = EAGLEInference.from_pretrained(draft, target, EAGLEConfig.chain(4), device="cpu")
    assert type(engine.draft).__name__ == "MedusaHeads"
    assert engine.generate([[5, 6]], 9).output_ids == engine.generate([[5, 6]], 9, speculative=False).output_ids


def test_inspect_tells_what_they_are(tmp_path):
    from eagle_kernels.tools.inspection import inspect_head

    rows = dict(inspect_head(write_medusa(tmp_path, medusa_tensors())).rows())
    assert rows["kind"] == "Medusa" and rows["options"] == "num_heads=4, num_layers=1"
    assert rows["layers"] == "no attention, so no keys and no positions" and "heads" not in rows
    assert rows["embedding, lm_head"] == "the target's, its own"
    assert rows["reads"] == "the stream after the final norm"
