"""Heads of all published formats against formulas written out in `heads.py`."""

from pathlib import Path

import pytest
import torch

from eagle_kernels.engine.models.checkpoint import Checkpoint
from eagle_kernels.engine.models.loading import load_draft, read_head
from eagle_kernels.engine.models.protocol import FINAL_NORM
from eagle_kernels.reference.causal_attend import causal_attend
from op_tests.engine import heads
from op_tests.engine.heads import HIDDEN, IDS, STREAMS, TARGET_IDS, TARGET_VOCAB, WRITERS, edit_config, edit_tensors
from op_tests.engine.toys import random_llama

OPTIONS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
POSITIONS = torch.arange(4, 10).expand(2, -1)


@pytest.fixture(scope="module")
def target():
    return random_llama(num_layers=8, vocab_size=TARGET_VOCAB)


@torch.inference_mode()
def run(head, hidden, *, from_target):
    return head(IDS, hidden, POSITIONS, causal_attend, from_target=from_target)


def random_features(width):
    return torch.randn(2, 6, width, generator=torch.Generator().manual_seed(5))


def assert_rows_equal(output, formula):
    """`formula(row)` computes (logits, hidden) of one sequence."""
    for row in range(2):
        for got, want in zip(output, formula(row), strict=True):
            torch.testing.assert_close(got[row], want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("form", WRITERS)
def test_eagle3_equals_the_formula(tmp_path, target, form):
    tensors = heads.eagle3_tensors()
    file = read_head(WRITERS[form](tmp_path, tensors))
    assert (file.format_name, file.kind) == (form, "EAGLE-3")
    head = file.head.bind(target)
    assert head.aux_layers == STREAMS
    assert head.draft_to_target.tolist() == (TARGET_IDS - torch.arange(len(TARGET_IDS))).tolist()
    features, embedding = random_features(3 * HIDDEN), target.get_input_embeddings()(IDS)
    first = run(head, features, from_target=True)
    assert_rows_equal(
        first, lambda row: heads.eagle3_formula(tensors, embedding[row], features[row], 4, from_target=True)
    )
    assert_rows_equal(
        run(head, first.hidden, from_target=False),
        lambda row: heads.eagle3_formula(tensors, embedding[row], first.hidden[row], 4, from_target=False),
    )


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_equals_the_formula(tmp_path, target, form, bias):
    tensors = heads.eagle1_tensors(bias=bias)
    file = read_head(WRITERS[form](tmp_path, tensors))
    assert (file.format_name, file.kind) == (form, "EAGLE-1")
    head = file.head.bind(target)
    assert head.aux_layers == (FINAL_NORM,) and head.draft_to_target is None
    feature, embedding = random_features(HIDDEN), tensors["embed_tokens.weight"][IDS]
    first = run(head, feature, from_target=True)
    output = target.lm_head.weight.detach()
    assert_rows_equal(first, lambda row: heads.eagle1_formula(tensors, embedding[row], feature[row], output, 4))
    assert_rows_equal(
        run(head, first.hidden, from_target=False),
        lambda row: heads.eagle1_formula(tensors, embedding[row], first.hidden[row], output, 4),
    )


@pytest.mark.parametrize("form", ["SpecForge/SGLang", "vLLM speculators"])
@pytest.mark.parametrize("option", [*OPTIONS, "all"])
def test_options_of_eagle3(tmp_path, target, form, option):
    """Each changes the result, and into what the formula says."""
    options = dict.fromkeys(OPTIONS if option == "all" else [option], True)
    tensors = heads.eagle3_tensors(**options)
    head = read_head(WRITERS[form](tmp_path, tensors, **options)).head.bind(target)
    features, embedding = random_features(3 * HIDDEN), target.get_input_embeddings()(IDS)
    first = run(head, features, from_target=True)

    def formula(hidden, from_target, **chosen):
        return lambda row: heads.eagle3_formula(
            tensors, embedding[row], hidden[row], 4, from_target=from_target, **chosen
        )

    assert_rows_equal(first, formula(features, True, **options))
    assert_rows_equal(run(head, first.hidden, from_target=False), formula(first.hidden, False, **options))
    with pytest.raises(AssertionError):
        assert_rows_equal(first, formula(features, True))


def test_parts_that_only_the_file_tells_of(tmp_path, target):
    """Biases of Qwen2's attention, query and key norms of Qwen3's: there where the file holds them."""
    sizes = {"q_proj.bias": 64, "k_proj.bias": 32, "v_proj.bias": 32, "q_norm.weight": 16, "k_norm.weight": 16}
    extra = {f"layers.0.self_attn.{name}": torch.linspace(0.5, 1.5, size) for name, size in sizes.items()}
    tensors = heads.eagle1_tensors() | extra
    head = load_draft(heads.write_official(tmp_path, tensors), target)
    feature, embedding = random_features(HIDDEN), tensors["embed_tokens.weight"][IDS]
    output = target.lm_head.weight.detach()
    assert_rows_equal(
        run(head, feature, from_target=True),
        lambda row: heads.eagle1_formula(tensors, embedding[row], feature[row], output, 4),
    )


def test_the_last_feature_instead_of_streams(tmp_path, target):
    """`use_aux_hidden_state: false` of ModelOpt and SGLang: no fc, the target's last feature is h itself."""
    tensors = heads.eagle3_tensors()
    unused = tensors.pop("fc.weight")
    folder = heads.write_modelopt(tmp_path / "without", tensors, use_aux_hidden_state=False)
    head = load_draft(folder, target)
    assert head.aux_layers == (FINAL_NORM,) and head.fc is None
    feature, embedding = random_features(HIDDEN), target.get_input_embeddings()(IDS)
    output = run(head, feature, from_target=True)
    assert_rows_equal(
        output, lambda row: heads.eagle3_formula(tensors, embedding[row], feature[row], 4, from_target=False)
    )
    edit_tensors(folder, **{"fc.weight": unused})
    assert load_draft(folder, target).fc is None


def test_final_norm_is_what_the_language_model_head_reads(target):
    positions = torch.arange(6).expand(2, -1)
    logits, features = target(IDS, positions, causal_attend, capture=(FINAL_NORM, 8, 0))
    last, before, first = features.split(HIDDEN, dim=-1)
    assert torch.equal(target.lm_head(last), logits)
    assert torch.equal(target.model.norm(before), last)
    assert torch.equal(target.get_input_embeddings()(IDS), first)


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="the system does not list mapped files")
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_pytorch_bin_files_are_mapped_and_older_ones_are_read(tmp_path, target, is_zip):
    tensors = heads.eagle1_tensors()
    path = heads.write_official(tmp_path, tensors, as_bin=True) / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
    with Checkpoint(tmp_path)._open(path.name) as file:
        assert (str(path) in Path("/proc/self/maps").read_text()) is is_zip
        assert torch.equal(file.get_tensor("fc.weight"), tensors["fc.weight"])
    assert torch.equal(load_draft(tmp_path, target).fc.weight, tensors["fc.weight"])


def test_what_a_head_lacks_comes_from_the_target(tmp_path, target):
    """Embedding and lm_head: absent, the target's; present, the head's own."""
    tensors = heads.eagle3_tensors()
    whole = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    edit_config(heads.write_modelopt(tmp_path / "shared", whole), draft_vocab_size=None)
    shared = load_draft(tmp_path / "shared", target)
    assert shared.draft_to_target is None and shared.draft_vocab_size == TARGET_VOCAB
    own = {"embed_tokens.weight": target.model.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}
    heads.write_official(tmp_path / "own", whole | {name: weight.detach() for name, weight in own.items()})
    edit_config(tmp_path / "own", draft_vocab_size=TARGET_VOCAB)
    features = random_features(3 * HIDDEN)
    outputs = [run(head, features, from_target=True) for head in (shared, load_draft(tmp_path / "own", target))]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    edit_tensors(tmp_path / "own", **{"lm_head.weight": 2 * target.lm_head.weight.detach()})
    own_output = run(load_draft(tmp_path / "own", target), features, from_target=True)
    torch.testing.assert_close(own_output.logits, 2 * outputs[0].logits)
