"""Model folders: round trips in every layout, and one clear line for everything that can be wrong with one."""

import json
import re
import sys

import pytest
import torch
from safetensors import torch as safetensors_torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models import checkpoint, loading
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.end_tokens import end_tokens, read_eos_token_ids
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.tools.inspection import inspect_head
from op_tests.engine.heads import edit_config, edit_tensors, save_folder
from op_tests.engine.hostile import refused

WIDTHS = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
TARGET = WIDTHS | {"num_hidden_layers": 3}
STREAMS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
DRAFT = WIDTHS | STREAMS | {"num_hidden_layers": 1, "draft_vocab_size": 10}


@pytest.fixture
def target_folder(tmp_path):
    torch.manual_seed(0)
    save_folder(Decoder(DecoderConfig.from_dict(TARGET)), TARGET, tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def draft_folder(tmp_path):
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.from_dict(DRAFT))
    head.d2t.copy_(3 * torch.arange(10))
    head.t2d[4 * torch.arange(10)] = True
    save_folder(head, DRAFT, tmp_path / "draft")
    return tmp_path / "draft"


def test_target_round_trip(target_folder):
    stored = safetensors_torch.load_file(target_folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    target = load_target(target_folder)
    assert (target.dtype, target.device.type, target.training) == (torch.float32, "cpu", False)
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, stored[name].float())
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert load_target(target_folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_draft_round_trip(target_folder, draft_folder):
    draft = load_draft(draft_folder, load_target(target_folder), dtype=torch.float16)
    assert draft.aux_layers == (1, 2, 3)
    assert draft.fc.weight.dtype == torch.float16
    assert draft.d2t.dtype == torch.int64 and draft.t2d.dtype == torch.bool
    assert draft.draft_to_target.tolist() == list(range(0, 30, 3))


def test_sharded_target(target_folder):
    whole = safetensors_torch.load_file(target_folder / "model.safetensors")
    (target_folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(whole))}
    for file_name in set(weight_map.values()):
        part = {name: whole[name] for name in whole if weight_map[name] == file_name}
        safetensors_torch.save_file(part, target_folder / file_name)
    (target_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, tensor in load_target(target_folder).state_dict().items():
        assert torch.equal(tensor, whole[name].float())
    (target_folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match="model-1.safetensors, named by model.safetensors.index.json, is missing"):
        load_target(target_folder)


def test_tied_target_is_stored_once(tmp_path):
    config = TARGET | {"tie_word_embeddings": True}
    save_folder(Decoder(DecoderConfig.from_dict(config)), config, tmp_path)
    assert "lm_head.weight" not in safetensors_torch.load_file(tmp_path / "model.safetensors")
    target = load_target(tmp_path)
    assert target.lm_head.weight is target.get_input_embeddings().weight


def test_draft_with_its_own_embedding(target_folder, draft_folder):
    edit_tensors(draft_folder, **{"embed_tokens.weight": torch.randn(40, 16)})
    assert load_draft(draft_folder, load_target(target_folder)).embed_tokens.weight.shape == (40, 16)


def test_identity_mapping_of_a_whole_vocabulary_is_dropped(target_folder, draft_folder):
    target, d2t = load_target(target_folder), torch.zeros(40, dtype=torch.int64)
    whole = {"lm_head.weight": torch.randn(40, 16), "d2t": d2t, "t2d": torch.ones(40, dtype=torch.bool)}
    edit_config(draft_folder, draft_vocab_size=40)
    edit_tensors(draft_folder, **whole)
    assert load_draft(draft_folder, target).draft_to_target is None
    d2t[7], d2t[8] = 1, -1
    edit_tensors(draft_folder, **whole)
    message = "draft: tensor d2t must be 0 everywhere .*, got 1 for draft id 7"
    with pytest.raises(ModelError, match=message):
        load_draft(draft_folder, target)


def test_stored_rope_frequencies_are_ignored(target_folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(target_folder, **{name: torch.zeros(2)})
    load_target(target_folder)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_output_that_is_stored_as_well(tmp_path, caplog, is_same):
    """It is not read twice; where it was trained apart, it is the output, as in transformers."""
    config = TARGET | {"tie_word_embeddings": True}
    save_folder(Decoder(DecoderConfig.from_dict(config)), config, tmp_path)
    table = safetensors_torch.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    stored = table.clone() if is_same else table + 1
    edit_tensors(tmp_path, **{"lm_head.weight": stored})
    target = load_target(tmp_path)
    assert (target.lm_head.weight is target.get_input_embeddings().weight) == is_same
    assert torch.equal(target.lm_head.weight, stored.float())
    told = f"{tmp_path}: lm_head.weight is not the embedding, although config.json ties them: it is used"
    assert caplog.messages == ([] if is_same else [told])


@pytest.mark.parametrize("edit", ["fp64", "no prefix"])
def test_weights_as_other_programs_save_them(target_folder, edit):
    expected = load_target(target_folder).state_dict()
    stored = safetensors_torch.load_file(target_folder / "model.safetensors")
    changed = {name: tensor.double() for name, tensor in stored.items()}
    if edit == "no prefix":
        changed = dict.fromkeys(stored) | {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    edit_tensors(target_folder, **changed)
    found = load_target(target_folder).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_end_tokens_of_a_model_of_images_and_text(target_folder):
    edit_config(target_folder, eos_token_id=None, text_config={"eos_token_id": [3, 99], "vocab_size": 40})
    assert read_eos_token_ids(target_folder, 40) == (3,)
    edit_config(target_folder, eos_token_id=5)
    assert read_eos_token_ids(target_folder, 40) == (5,)


def test_links_that_lead_nowhere_are_told(target_folder):
    (target_folder / "config.json").unlink()
    (target_folder / "config.json").symlink_to("blobs/missing")
    told = "config.json is missing; the folder holds links to files that are missing (config.json): copy it with cp -L"
    assert told in refused(load_target, target_folder)


def test_parts_of_a_fused_projection_are_stored_apart(target_folder, tmp_path):
    """A bf16 model is saved without a conversion, so what is written are views of one tensor."""
    target = load_target(target_folder, dtype=torch.bfloat16)
    save_folder(target, TARGET, tmp_path / "again")
    again = safetensors_torch.load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in safetensors_torch.load_file(target_folder / "model.safetensors").items():
        assert torch.equal(again[name], tensor), name
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (target_folder, tmp_path / "again")]
    assert sizes[0] == sizes[1]


def test_weights_that_do_not_fit_are_refused_before_they_are_read(target_folder, monkeypatch):
    edit_config(target_folder, max_position_embeddings=8)
    target = load_target(target_folder)
    needed = sum(parameter.numel() for parameter in target.parameters()) * 2
    monkeypatch.setattr(checkpoint, "free_memory_bytes", lambda device: needed)
    load_target(target_folder, dtype=torch.bfloat16)
    monkeypatch.setattr(checkpoint.Checkpoint, "read", None)
    with pytest.raises(ModelError, match=r"the weights take 0.00 GiB as torch.float32, but cpu has 0.00 GiB free"):
        load_target(target_folder)


def test_free_memory_is_known(device):
    assert checkpoint.free_memory_bytes(torch.device(device)) > 2**20
    assert checkpoint.free_memory_bytes(torch.device("meta")) is None


def test_a_terminal_is_told_the_shard(target_folder, monkeypatch, capsys):
    load_target(target_folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_target(target_folder)
    assert capsys.readouterr().err == "\rloading 1/1 model.safetensors\033[K\r\033[K"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model.norm.weight": None}, "missing tensors: model.norm.weight"),
        ({"extra": torch.zeros(1)}, "unexpected tensors: extra"),
        ({"model.norm.weight": torch.zeros(8)}, r"model.norm.weight has shape \[8\], but config.json says \[16\]"),
        ({"model.norm.weight": torch.zeros(16, dtype=torch.int64)},
         "model.norm.weight must have dtype torch.float32, got I64"),
        ({f"model.layers.{layer}.self_attn.{part}_proj.weight": None for layer in range(3) for part in "qkvo"},
         "missing tensors: .* and 8 more"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(target_folder, edit, message):
    edit_tensors(target_folder, **edit)
    with pytest.raises(ModelError, match=message) as caught:
        load_target(target_folder)
    assert str(target_folder) in str(caught.value) and "\n" not in str(caught.value)


NO_FOLDERS = [None, "", " ", 3, b"folder", ["folder"]]


@pytest.mark.parametrize("value", NO_FOLDERS, ids=repr)
def test_what_is_no_path_is_named_by_its_argument(target_folder, draft_folder, value):
    target = load_target(target_folder)
    calls = {
        "load_target: folder": lambda: load_target(value),
        "load_draft: folder": lambda: load_draft(value, target),
        "load_tokenizer: folder": lambda: load_tokenizer(value),
        "read_eos_token_ids: folder": lambda: read_eos_token_ids(value),
        "inspect_head: draft": lambda: inspect_head(value),
        "EAGLEInference.from_pretrained: target_model": lambda: EAGLEInference.from_pretrained(draft_folder, value),
    }
    if value is not None and not isinstance(value, list):  # a list has several drafts
        calls["EAGLEInference.from_pretrained: draft_model"] = lambda: EAGLEInference.from_pretrained(
            value, target_folder
        )
    for argument, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        is_one_of_several = argument.endswith("from_pretrained: draft_model") and not isinstance(value, str)
        several = ", or a list of such paths" if is_one_of_several else ""
        assert str(caught.value) == f"{argument} must be the path of a model's folder{several}, got {value!r}"
    with pytest.raises(ValueError, match="load_draft: target must be a TargetModel, as load_target returns, got "):
        load_draft(draft_folder, target_folder)


ENDS = {  # what a file or a model names, and the ids that are kept and dropped; None: refused
    151645: ((), [151645]),
    -1: ((), [-1]),
    (2, 151645, 40, 2, 39): ((2, 39), [151645, 40]),
    (2, None, 2): ((2,), []),
    2.0: ((2,), []),
    None: ((), []),
    False: ((), []),
    (): ((), []),
    2.5: None,
    (2, "x"): None,
    ((2,),): None,
}


@pytest.mark.parametrize("file_name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("ends", "wanted"), ENDS.items(), ids=str)
def test_end_tokens_that_cannot_come(target_folder, caplog, file_name, ends, wanted):
    """From a folder, as from an object; what the user sets is checked."""
    (target_folder / file_name).touch()
    content = (target_folder / file_name).read_text() or "{}"
    (target_folder / file_name).write_text(json.dumps(json.loads(content) | {"eos_token_id": ends}))
    config = {"method": "ngram"}
    if wanted is None:
        for call in (EAGLEInference.from_pretrained, lambda *_, **__: end_tokens(ends, 40, "a model")):
            with pytest.raises(ModelError, match="eos_token_id must be a token id or a list of them, got "):
                call(None, target_folder, config, device="cpu")
        return
    kept, dropped = wanted
    engine = EAGLEInference.from_pretrained(None, target_folder, config, device="cpu")
    assert engine.config.eos_token_ids == kept == read_eos_token_ids(target_folder) == end_tokens(ends, 40, None)
    assert len(engine.generate([1, 2], 3)[0]) <= 3
    fault = f"{target_folder}: eos_token_id {dropped} cannot occur: the model's tokens are 0..39; it ends no text"
    assert caplog.messages == [fault] * bool(dropped)
    own = EAGLEConfig(method="ngram", eos_token_ids=(40,))
    with pytest.raises(ValueError, match=r"eos_token_ids must lie in 0..39, got 40"):
        EAGLEInference.from_pretrained(None, target_folder, own, device="cpu")


@pytest.mark.parametrize(("chat", "wanted"), [("null", 7), ("[]", 7), ("5", 5), ("[5]", 5)])
def test_end_tokens_of_a_chat_come_first_unless_they_say_nothing(target_folder, chat, wanted):
    edit_config(target_folder, eos_token_id=7)
    (target_folder / "generation_config.json").write_text(f'{{"eos_token_id": {chat}}}')
    assert read_eos_token_ids(target_folder) == (wanted,)


def test_end_tokens_of_objects_follow_the_same_rule(caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_head=2, n_layer=1, n_positions=32, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.eos_token_id = [2, 50256, 2]
    assert EAGLEInference(None, model, EAGLEConfig(method="ngram")).config.eos_token_ids == (2,)
    assert [record.message for record in caplog.records if record.name.startswith("eagle_kernels")] == [
        "GPT2LMHeadModel: eos_token_id [50256] cannot occur: the model's tokens are 0..39; it ends no text"
    ]


def write_files(*names, config=None):
    """A folder's files, all but config.json without content that matters."""

    def write(folder):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x")
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))

    return write


BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
OTHERS = {
    "medusa": (write_files("medusa_lm_head.pt", config={"medusa_num_heads": 5}),
               "medusa_lm_head.pt cannot be read: it is no complete torch.save file"),
    "medusa without tensors": (
        write_files(config={"medusa_num_heads": 5}),
        "there is no model.safetensors, model.safetensors.index.json or pytorch_model.bin; the folder holds config",
    ),
    "medusa without a config": (
        write_files("medusa_lm_head.pt"), "config.json is missing; the folder holds tensors of Medusa heads",
    ),
    "hydra": (write_files("hydra_lm_head.pt", config={"hydra_num_heads": 4}), "hydra_lm_head.pt cannot be read: it is"),
    "hydra without a config": (
        write_files("hydra_lm_head.pt"), "config.json is missing; the folder holds tensors of Hydra heads",
    ),
    "speculator": (write_files("model.safetensors", config={"model_type": "mlp_speculator"}),
                   "holds MLP speculators (mlp_speculator), and MLP speculators are not supported yet"),
    "adapter": (write_files("adapter_config.json", "adapter_model.safetensors"),
                "config.json is missing; the folder holds a LoRA adapter: merge it into its base model"),
    "gguf": (write_files("model-q4.gguf"), "the folder holds GGUF files, which are not read: take the model's"),
    "gguf with a config": (
        write_files("model-q4.gguf", config=TARGET),
        "there is no model.safetensors, model.safetensors.index.json or pytorch_model.bin; the folder holds GGUF files",
    ),
    "tokenizer": (write_files("tokenizer.json"), "the folder holds a tokenizer and no model (tokenizer.json)"),
    "cache": (write_files("snapshots/abc/config.json"), "a cache of the hub: give the folder in snapshots"),
    "models": (write_files("small/config.json"), "the folder holds folders of models: give one of them (small/"),
    "pipeline": (write_files("model_index.json"), "a pipeline of diffusers, not a language model"),
    "notes": (write_files("a", "b", "c", "d", "e"), "config.json is missing; the folder holds a, b, c and 2 more"),
    "empty": (write_files(), "config.json is missing; it is empty"),
    "a file": (lambda folder: folder.write_text("x"), "is a file, not a folder; name the model's folder, such as /"),
    "nothing": (lambda folder: None, "there is no such folder, and nothing is downloaded"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_folders_of_other_kinds_say_what_they_hold(target_folder, tmp_path, case):
    write, message = OTHERS[case]
    write(tmp_path / "other")
    target = load_target(target_folder)
    for call in (
        lambda: load_target(tmp_path / "other"),
        lambda: load_draft(tmp_path / "other", target),
        lambda: EAGLEInference.from_pretrained(tmp_path / "other", target_folder, device="cpu"),
        lambda: inspect_head(tmp_path / "other", target_folder),
    ):
        told = refused(call)
        assert told.startswith(f"{tmp_path / 'other'}: ") and message in told


def test_a_model_without_an_output_for_texts(target_folder, tmp_path):
    edit_config(target_folder, **BERT)
    kind = "a model of another kind (model_type='bert', architectures=['BertForMaskedLM'])"
    assert refused(load_target, target_folder) == f"{target_folder}: is {kind}, not a causal language model"
    assert f"{target_folder}: holds {kind}, which is not a draft: drafts are EAGLE, Medusa or Hydra heads, " in refused(
        EAGLEInference.from_pretrained, target_folder, target_folder, device="cpu"
    )
    edit_tensors(target_folder, **{"model.layers.0.mlp.lora_A.weight": torch.zeros(1)})
    assert "holds a LoRA adapter (model.layers.0.mlp.lora_A.weight)" in refused(load_target, target_folder)


def test_draft_and_target_that_are_swapped(target_folder, draft_folder):
    swapped = "holds an EAGLE-3 head: a draft, not a target; are draft and target swapped? EAGLEInference takes"
    assert swapped in refused(load_target, draft_folder)
    assert swapped in refused(EAGLEInference.from_pretrained, target_folder, draft_folder, device="cpu")
    told = refused(load_draft, target_folder, load_target(target_folder))
    assert "holds a language model, not a draft head; EAGLEInference.from_pretrained(draft, target) drafts" in told


def test_sizes_of_joined_projections_are_told(tmp_path):
    pytest.importorskip("transformers")
    from op_tests.engine.families import write_target

    write_target("Glm4", {}, tmp_path)
    edit_config(tmp_path, intermediate_size=75)
    told = "intermediate_size + intermediate_size must be 152 to match model.layers.0.mlp.gate_up_proj.weight of shape"
    assert told in refused(load_target, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "youtu"}, "missing tensors: model.layers.0.self_attn.kv_a_layernorm.weight, "),
        ({"model_type": "gpt2"}, "missing tensors: transformer.h.0.attn.c_attn.bias, "),
        ({"model_type": "granite", "intermediate_size": 32},
         "has shape [16, 24], but config.json says [16, 32], which a model of model_type='granite' has"),
    ],
)  # fmt: skip
def test_tensors_of_another_model_are_refused_before_any_is_made(target_folder, monkeypatch, changes, message):
    """Names and shapes tell; transformers would first fill what is missing with random numbers."""
    transformers = pytest.importorskip("transformers")
    edit_config(target_folder, **changes)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    assert message in refused(load_target, target_folder)


def test_faults_below_the_loader_carry_the_folder(target_folder, draft_folder):
    target = load_target(target_folder)
    edit_tensors(draft_folder, d2t=torch.full((10,), 40))
    with pytest.raises(ModelError, match="draft: d2t: draft id 0 maps to target id 40"):
        load_draft(draft_folder, target)
    edit_config(draft_folder, logit_scale=2.0)
    with pytest.raises(ModelError, match="draft: config.json: logit_scale=2.0"):
        load_draft(draft_folder, target)


def test_missing_safetensors_names_the_extra(target_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModelError, match="eagle_kernels\\[models\\]"):
        load_target(target_folder)


def test_demo_pair_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "DEMO_PAIR_FOLDER", tmp_path)
    with pytest.raises(ModelError, match="python -m bench.lab.train_demo_pair"):
        loading.demo_pair()
    for part in ("target", "draft"):
        (tmp_path / part).mkdir()
    assert loading.demo_pair() == (tmp_path / "target", tmp_path / "draft")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"dtype": "bf16"}, "dtype must be torch.float32, torch.bfloat16 or torch.float16, got 'bf16'"),
        ({"dtype": torch.int8}, "dtype must be torch.float32, torch.bfloat16 or torch.float16, got torch.int8"),
        ({"device": torch.bfloat16}, "cpu, cuda or cuda:N, got torch.bfloat16"),
        ({"device": "nonsense"}, "cpu, cuda or cuda:N, got 'nonsense'"),
        ({"device": "cuda:99"}, "device cuda:99: this machine has"),
    ],
)
def test_placements_are_checked_by_name(target_folder, draft_folder, placement, message):
    target = load_target(target_folder)
    for caller, load in (
        ("load_target", lambda: load_target(target_folder, **placement)),
        ("load_draft", lambda: load_draft(draft_folder, target, **placement)),
        ("from_pretrained", lambda: EAGLEInference.from_pretrained(draft_folder, target_folder, **placement)),
    ):
        with pytest.raises(ValueError, match=f"{caller}: .*{re.escape(message)}"):
            load()


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        ("bfloat16", torch.bfloat16), ("half", torch.float16), ("torch.float16", torch.float16),
        ("float", torch.float32), ("auto", torch.float16),
    ],
)  # fmt: skip
def test_dtypes_have_names(target_folder, draft_folder, named, dtype):
    """Those of torch and of vLLM; auto is that of the folder, by either name that transformers gives it."""
    for field in ("dtype", "torch_dtype"):
        edit_config(target_folder, **{"dtype": None, "torch_dtype": None, field: "float16"})
        engine = EAGLEInference.from_pretrained(draft_folder, target_folder, device="auto", **{field: named})
        assert engine.target.dtype == dtype
    if named == "auto":
        edit_config(target_folder, dtype="float8")
        with pytest.raises(ModelError, match="dtype must name one of float32, .* for dtype='auto', got 'float8'"):
            EAGLEInference.from_pretrained(draft_folder, target_folder, dtype="auto")


def test_on_meta_a_target_is_names_and_sizes(target_folder, draft_folder, monkeypatch):
    monkeypatch.setattr(checkpoint.Checkpoint, "read", None)
    target = load_target(target_folder, "meta")
    assert target.device.type == "meta" and target.kv_shape.num_layers == 3
    with pytest.raises(ValueError, match="load_draft: device must be cpu, cuda or cuda:N, got 'meta'"):
        load_draft(draft_folder, target, "meta")
    edit_tensors(target_folder, **{"lm_head.weight": None})
    with pytest.raises(ModelError, match="missing tensors: lm_head.weight"):
        load_target(target_folder, "meta")
