"""Hostile files, configurations and commands: one clear line for each, before anything large is made of it.

Each table has a row for a call: what is done to a good folder (or given to the command), and the error that names it.
"""

import functools
import json
import os
import pickle
import shutil
import struct
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors_torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams, verify_tree
from eagle_kernels.engine.models import checkpoint
from eagle_kernels.engine.models.chat_template import read_chat_template
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.end_tokens import read_eos_token_ids
from eagle_kernels.engine.models.loading import load_draft, load_target, read_head
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.tokenizer import check_same_vocabulary, load_tokenizer
from eagle_kernels.runtime.values import parse_json
from eagle_kernels.tools.cli.main import main
from op_tests.engine import heads
from op_tests.engine.heads import edit_config, edit_tensors, save_folder
from op_tests.engine.hostile import DEEP, Command, refused, write_saved
from op_tests.engine.toys import random_llama

HUGE, ENORMOUS = 10**9, 10**12
NAN, INFINITY = float("nan"), float("inf")
SIZES = heads.WIDTHS | {"num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
WINDOWED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}


def shown(value) -> str:
    """Of a row, in its name."""
    return str(value)[:40]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A good folder of each kind."""
    root = tmp_path_factory.mktemp("originals")
    torch.manual_seed(0)
    for name, changes in (("target", {}), ("windowed", WINDOWED)):
        config = SIZES | changes | {"tokenizer_class": "ByteTokenizer"}
        save_folder(Decoder(DecoderConfig.from_dict(config)), config, root / name)
    heads.write_official(root / "eagle1", heads.eagle1_tensors())
    heads.write_specforge(root / "eagle3", heads.eagle3_tensors())
    heads.write_speculators(root / "speculators", heads.eagle3_tensors())
    heads.write_modelopt(root / "modelopt", heads.eagle3_tensors())
    target = random_llama(num_layers=2, vocab_size=heads.TARGET_VOCAB).state_dict()
    heads.write_modules(root / "modules", target | heads.module_tensors(2), 2)
    return root


@pytest.fixture
def folder_of(originals, tmp_path):
    """Copies a good folder, to be spoilt."""
    return lambda kind: Path(shutil.copytree(originals / kind, tmp_path / kind))


@pytest.fixture(scope="module")
def target():
    return random_llama(num_layers=8, vocab_size=heads.TARGET_VOCAB)


def load(folder: Path, target=None, **options):
    """The model of a folder that is named by its kind."""
    if folder.name in ("target", "windowed"):
        return load_target(folder, **options)
    return read_head(folder, **options) if target is None else load_draft(folder, target, **options)


# (folder, field, value, message): sizes that the tensors' headers contradict,
CONTRADICTED = [
    ("target", "num_hidden_layers", HUGE, "must be 8 to match the tensors model.layers.*, got 1000000000"),
    ("target", "num_hidden_layers", 9, "must be 8 to match the tensors model.layers.*, got 9"),
    ("target", "vocab_size", HUGE, "must be 61 to match model.embed_tokens.weight of shape [61, 32], got 1000000000"),
    ("target", "hidden_size", 64, "must be 32 to match model.layers.0.post_attention_layernorm.weight of shape [32]"),
    ("target", "intermediate_size", HUGE, "must be 40 to match model.layers.0.mlp.gate_proj.weight of shape [40, 32]"),
    ("target", "num_attention_heads", HUGE, "must be 32 to match model.layers.0.self_attn.q_proj.weight of shape [32,"),
    ("target", "num_key_value_heads", 2, "must be 16 to match model.layers.0.self_attn.k_proj.weight of shape [16, "),
    ("target", "head_dim", 32, "model.layers.0.self_attn.q_proj.weight of shape [32, 32], got 2 * 32"),
    ("windowed", "num_hidden_layers", HUGE, "must be 8 to match the tensors model.layers.*, got 1000000000"),
    ("eagle1", "hidden_size", HUGE, "must be 32 to match layers.0.post_attention_layernorm.weight of shape [32], got"),
    ("eagle1", "target_hidden_size", HUGE, "must be 64 to match fc.weight of shape [32, 64], got 32 + 1000000000"),
    ("eagle1", "vocab_size", HUGE, "must be 61 to match embed_tokens.weight of shape [61, 32], got 1000000000"),
    ("eagle3", "vocab_size", HUGE, "must be 61 to match t2d of shape [61], got 1000000000"),
    ("eagle3", "draft_vocab_size", 24, "must be 23 to match lm_head.weight of shape [23, 32], got 24"),
    ("eagle3", "intermediate_size", HUGE, "must be 40 to match midlayer.mlp.gate_proj.weight of shape [40, 32], got"),
    ("eagle3", "num_attention_heads", HUGE, "must be 64 to match midlayer.self_attn.q_proj.weight of shape [64, 64]"),
    ("eagle3", "target_hidden_size", 48, "must be 96 to match fc.weight of shape [32, 96], got 3 * 48"),
    ("modules", "num_hidden_layers", HUGE, "must be 2 to match the tensors model.layers.*, got 1000000000"),
    ("modules", "num_nextn_predict_layers", HUGE, "must be 2 to match the tensors mtp_layers.*, got 1000000000"),
    ("modules", "hidden_size", HUGE, "must be 32 to match mtp_layers.0.post_attention_layernorm.weight of shape [32]"),
]  # fmt: skip
# sizes that nothing could hold, and other values that are none,
LARGEST = "must be at most 2147483647, got 10000000"
STREAMS = {"eagle_aux_hidden_state_layer_ids": [1] * 20_000}
OUT_OF_RANGE = [
    ("target", "vocab_size", ENORMOUS, LARGEST),
    ("target", "hidden_size", 10**400, LARGEST),
    ("target", "max_position_embeddings", ENORMOUS, LARGEST),
    ("target", "original_max_position_embeddings", 10**400, LARGEST),
    ("eagle1", "max_position_embeddings", ENORMOUS, LARGEST),
    ("modelopt", "vocab_size", ENORMOUS, LARGEST),
    ("windowed", "max_window_layers", "x", "must be an integer of at least 0, got 'x'"),
    ("windowed", "max_window_layers", -1, "must be an integer of at least 0, got -1"),
    ("eagle3", "architectures", 5, "must be a list of strings, got 5"),
    ("eagle3", "eagle_config", STREAMS, "eagle_aux_hidden_state_layer_ids must be a list of at most 1000 integers"),
    ("target", "hidden_act", "x" * 5000, "is not implemented (only 'silu')"),
    ("target", "layer_types", ["full_attention"] * 5000, "is not implemented for this model_type"),
]
# and numbers with which every logit would be NaN.
FLOAT = "must be a finite number that fp32 holds, got "
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NUMBERS = [
    ("target", "rms_norm_eps", NAN, f"rms_norm_eps {FLOAT}nan"),
    ("target", "rms_norm_eps", INFINITY, f"rms_norm_eps {FLOAT}inf"),
    ("target", "rms_norm_eps", 10**400, f"rms_norm_eps {FLOAT}1000"),
    ("target", "rms_norm_eps", 1e300, f"rms_norm_eps {FLOAT}1e+300"),
    ("target", "rms_norm_eps", -1e-6, "rms_norm_eps must be at least 0, got -1e-06"),
    ("eagle1", "rms_norm_eps", NAN, f"rms_norm_eps {FLOAT}nan"),
    ("modules", "rms_norm_eps", -INFINITY, f"rms_norm_eps {FLOAT}-inf"),
    ("eagle3", "rope_theta", NAN, f"rope_theta {FLOAT}nan"),
    ("target", "rope_theta", INFINITY, f"rope_theta {FLOAT}inf"),
    ("target", "rope_theta", 10**400, f"rope_theta {FLOAT}1000"),
    ("target", "rope_theta", 1e-320, f"rope_theta {FLOAT}1e-320"),
    ("target", "rope_scaling", LLAMA3 | {"factor": INFINITY}, f"factor {FLOAT}inf"),
    ("target", "rope_scaling", LLAMA3 | {"high_freq_factor": NAN}, f"high_freq_factor {FLOAT}nan"),
    ("target", "rope_scaling", {"type": "linear", "factor": NAN}, f"factor {FLOAT}nan"),
    ("target", "rope_scaling", {"type": "yarn", "attention_factor": NAN}, f"attention_factor {FLOAT}nan"),
    ("target", "rope_scaling", {"type": "yarn", "attention_factor": -1}, "attention_factor must be above 0 for rope_t"),
    ("target", "rope_scaling", {"type": "yarn", "mscale": INFINITY}, f"mscale {FLOAT}inf"),
    ("target", "rope_scaling", {"type": "yarn", "mscale_all_dim": -1.0}, "mscale_all_dim must be at least 0, got -1.0"),
    ("target", "rope_scaling", {"type": "yarn", "beta_slow": 1e-320}, f"beta_slow {FLOAT}1e-320"),
    ("target", "rope_scaling", {"type": "linear", "factor": 1e-37}, "rope_type='linear' turns position 95 by an angle"),
    ("target", "rope_parameters", {"rope_theta": NAN}, f"rope_theta {FLOAT}nan"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value", "message"), [*CONTRADICTED, *OUT_OF_RANGE, *NUMBERS], ids=shown)
def test_values_of_a_config(folder_of, monkeypatch, kind, field, value, message):
    """Refused by what the headers say, before weights are read."""
    folder = folder_of(kind)
    edit_config(folder, **{field: value})
    monkeypatch.setattr(checkpoint.Checkpoint, "read", None)
    told = refused(load, folder)
    assert told.startswith(f"{folder}: config.json: ") and message in told
    assert field in told or isinstance(value, dict)


def test_sizes_of_a_section(folder_of):
    folder = folder_of("speculators")
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, transformer_layer_config=config["transformer_layer_config"] | {"hidden_size": HUGE})
    told = refused(load, folder)
    assert "hidden_size must be 32 to match midlayer.post_attention_layernorm.weight of shape [32]" in told


def test_a_vocabulary_that_no_tensor_tells_is_held_against_the_target(folder_of, target):
    """ModelOpt writes neither an embedding nor t2d."""
    folder = folder_of("modelopt")
    assert load(folder, target).t2d.sum() == heads.DRAFT_VOCAB
    edit_config(folder, vocab_size=2**31 - 1)
    assert refused(load, folder, target).endswith("the head's vocab_size 2147483647 is not the target's 61")


def test_more_positions_than_memory_holds(folder_of, monkeypatch):
    folder = folder_of("target")
    edit_config(folder, max_position_embeddings=2**20)
    monkeypatch.setattr(checkpoint, "free_memory_bytes", lambda device: 2**26)
    told = refused(load, folder)
    assert "config.json: max_position_embeddings=1048576 needs 0.16 GiB for the angles of its positions, but" in told


def test_layers_without_files():
    with pytest.raises(ModelError, match="num_hidden_layers must be at most 1000, got 1000000000"):
        DecoderConfig.from_dict(SIZES | {"num_hidden_layers": HUGE})


def test_layers_of_a_model_behind_transformers(tmp_path, monkeypatch):
    """Its constructor would go on for hours."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_head=2, n_layer=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    edit_config(tmp_path, n_layer=HUGE)
    told = refused(load_target, tmp_path)
    assert "config.json: n_layer must be at most 2 to match the tensors transformer.h.*, got 1000000000" in told
    edit_config(tmp_path, n_layer=2, model_type="its own", auto_map={"AutoModelForCausalLM": "code.Model"})
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked whether code of a folder may run"))
    assert "transformers cannot load the model: " in refused(load_target, tmp_path)


VALUES = {
    "spec_steps": (
        lambda: verify_tree(*[torch.zeros(1, 4, dtype=torch.int64)] * 4, torch.zeros(4, 9), spec_steps=ENORMOUS),
        "spec_steps must lie in 0..1024, got 1000000000000",
    ),
    "num_steps": (lambda: EAGLEConfig(num_steps=ENORMOUS), "num_steps must lie in 1..64 for topk=8, got 1000000000000"),
    "tree depth": (
        lambda: EAGLEConfig(method="suffix", suffix_decoding_max_tree_depth=ENORMOUS),
        "EAGLEConfig: suffix_decoding_max_tree_depth must lie in 2..65536, got 1000000000000",
    ),
    "verify_window": (
        lambda: EAGLEConfig(verify_strategy="topp", verify_window=10**30),
        f"EAGLEConfig: verify_window must lie in 0..256, got {10**30}",
    ),
    "drafter": (
        lambda: EAGLEInference(random_llama(), random_llama()).submit([1], SamplingParams(drafter="ngram")),
        "drafter must be None for method=None, with which the draft model drafts for all requests, got 'ngram'",
    ),
    "drafter of one": (
        lambda: EAGLEInference(None, random_llama(), EAGLEConfig(method="suffix")).submit(
            [1], SamplingParams(drafter="ngram")
        ),
        "drafter must be None or one of the methods ['suffix'], got 'ngram'",
    ),
}


@pytest.mark.parametrize("row", VALUES)
def test_values_of_a_call(row):
    call, message = VALUES[row]
    assert message in refused(call)


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def write_index(file_name: str):
    """In the place of the tensors an index, all of whose entries name this file."""

    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        index = {"weight_map": {"model.norm.weight": file_name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return edit


def write_pickle(content: bytes):
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return edit


def write_header(dtype: str, num_bytes: int):
    """A norm of 32 weights in a dtype that torch may not know."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = safetensors_torch.load_file(path)
        del tensors["model.norm.weight"]
        content = safetensors_torch.save(tensors)
        size = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        places = [len(data), len(data) + num_bytes]
        header["model.norm.weight"] = {"dtype": dtype, "shape": [32], "data_offsets": places}
        told = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(told)) + told + data + bytes(num_bytes))

    return edit


OUTSIDE = "model.safetensors.index.json: weight_map must name files inside the folder, got {!r} for model.norm.weight"
NO_PICKLE = "pytorch_model.bin cannot be read: it is no complete torch.save file"
NO_TABLE = "pytorch_model.bin holds no dictionary of tensors"
DEEPLY = "{} is not JSON: its values are nested too deeply"
FILES = {
    "deep config": (write("config.json", DEEP), DEEPLY.format("config.json")),
    "deep object": (write("config.json", '{"a":' * 100_000), DEEPLY.format("config.json")),
    "deep index": (lambda folder: (write_index("x")(folder), write("model.safetensors.index.json", DEEP)(folder)),
                   DEEPLY.format("model.safetensors.index.json")),
    "above": (write_index("../../../../etc/passwd"), OUTSIDE.format("../../../../etc/passwd")),
    "absolute": (write_index("/etc/passwd"), OUTSIDE.format("/etc/passwd")),
    "within and above": (write_index("a/../../b"), OUTSIDE.format("a/../../b")),
    "backslashes": (write_index("..\\b.safetensors"), OUTSIDE.format("..\\b.safetensors")),
    "a drive": (write_index("C:b.safetensors"), OUTSIDE.format("C:b.safetensors")),
    "no name": (write_index(""), OUTSIDE.format("")),
    "the folder": (write_index("."), OUTSIDE.format(".")),
    "a zero byte": (write_index("a\0b"), OUTSIDE.format("a\0b")),
    "a long name": (write_index("a" * 5000), OUTSIDE.partition(", got")[0]),
    "code in a pickle": (
        write_pickle(write_saved({"model.norm.weight": Command()})),
        f"pytorch_model.bin cannot be read: it names {os.system.__module__}.system, but code in files is not run",
    ),
    "code in an old pickle": (write_pickle(pickle.dumps(Command(), protocol=2)),
                              "pytorch_model.bin cannot be read: it "),
    "half a file": (write_pickle(write_saved({"model.norm.weight": torch.zeros(5000)})[:9000]),
                    "pytorch_model.bin cannot be read: "),
    "no pickle": (write_pickle(b"\x80\x02nonsense"), NO_PICKLE),
    "an empty file": (write_pickle(b""), "pytorch_model.bin cannot be read: "),
    "text": (write_pickle(b"hello"), NO_PICKLE),
    "a number": (write_pickle(write_saved(3)), NO_TABLE),
    "numbers for names": (write_pickle(write_saved({1: torch.ones(1)})), NO_TABLE),
    "a pointer": (write_pickle(b"version https://git-lfs.github.com/spec/v1\n"),
                  "pytorch_model.bin is only a Git LFS pointer: git lfs pull fetches the file itself"),
    "four bits": (write_header("F4", 16), "tensor model.norm.weight has dtype F4, which is not implemented"),
    "six bits": (write_header("F6_E2M3", 24), "tensor model.norm.weight has dtype F6_E2M3, which is not implemented"),
    "no dtype": (write_header("XX", 32), "model.safetensors cannot be read: "),
}  # fmt: skip


@pytest.mark.parametrize("row", FILES)
def test_files_of_a_folder(folder_of, row):
    edit, message = FILES[row]
    folder = folder_of("target")
    edit(folder)
    told = refused(load_target, folder)
    assert told.startswith(f"{folder}: ") and message in told
    for advice in ("weights_only", "still be loaded", "trust"):
        assert advice not in told


def test_a_cache_of_the_hub_is_read(folder_of, tmp_path):
    """Its snapshots are links to files elsewhere, and shards may lie in folders of their own."""
    folder, blobs, snapshot = folder_of("target"), tmp_path / "blobs", tmp_path / "snapshots" / "hash"
    blobs.mkdir()
    (snapshot / "part").mkdir(parents=True)
    names = list(safetensors_torch.load_file(folder / "model.safetensors"))
    for name, place in (("model.safetensors", "part/model-1.safetensors"), ("config.json", "config.json")):
        (folder / name).rename(blobs / name)
        (snapshot / place).symlink_to(os.path.relpath(blobs / name, (snapshot / place).parent))
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "part/model-1.safetensors")})
    )
    assert load_target(snapshot).kv_shape.num_layers == 8


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_files_beside_the_weights(folder_of, name):
    folder = folder_of("target")
    (folder / name).write_text(DEEP)
    read = load_tokenizer if name == "tokenizer_config.json" else read_eos_token_ids
    assert DEEPLY.format(name) in refused(read, folder)


TABLES = {
    "null": ('{"model": null, "added_tokens": null}', None),
    "a list": ('{"model": [1]}', "tokenizer.json: model must be an object, got [1]"),
    "words": ('{"model": {"vocab": "x"}}', "tokenizer.json: vocab must be a table of tokens, got 'x'"),
    "pieces": ('{"model": {"vocab": [1]}}', "tokenizer.json: vocab must be a table of tokens, got [1]"),
    "added": ('{"model": {}, "added_tokens": [{}]}',
              "tokenizer.json: added_tokens must be objects with content and id"),
    "deep": (DEEP, DEEPLY.format("tokenizer.json")),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLES)
def test_vocabularies_that_are_compared(tmp_path, row):
    content, message = TABLES[row]
    (tmp_path / "tokenizer.json").write_text(content)
    if message is None:
        assert check_same_vocabulary(tmp_path, tmp_path)
    else:
        assert message in refused(check_same_vocabulary, tmp_path, tmp_path)


SIZES_OF_FILES = [  # (file, most MiB, what reads it)
    ("config.json", 64, load_target),
    ("config.json", 64, load_tokenizer),
    ("generation_config.json", 64, read_eos_token_ids),
    ("tokenizer_config.json", 64, load_tokenizer),
    ("tokenizer.json", 512, lambda folder: check_same_vocabulary(folder, folder)),
    ("tokenizer.json", 512, lambda folder: edit_config(folder, tokenizer_class=None) or load_tokenizer(folder)),
    ("model.safetensors.index.json", 512, load_target),
]


@pytest.mark.parametrize(("name", "most", "read"), SIZES_OF_FILES, ids=lambda each: getattr(each, "__name__", each))
def test_files_that_are_too_large_are_not_read(folder_of, monkeypatch, name, most, read):
    folder = folder_of("target")
    if "index" in name:
        (folder / "model.safetensors").unlink()
    with (folder / name).open("wb") as file:
        file.truncate(3 * 2**30)
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: read_text(path, **how) if path.name != name else 1 / 0)
    assert refused(read, folder) == f"{folder}: {name} must have at most {most} MiB, got 3072 MiB"


NAMES = ["x" * 5000, "a\nb", "model.layers.0.\x1b[31m", "model.layers.\r1.weight", "layers.0.\u2028", "\0"]


@pytest.mark.parametrize("name", NAMES, ids=shown)
@pytest.mark.parametrize("kind", ["target", "eagle1", "eagle3", "modules"])
def test_names_of_tensors_stay_in_one_short_line(folder_of, target, kind, name):
    folder = folder_of(kind)
    name = heads.MODULE_PREFIX + name if kind == "modules" else name
    edit_tensors(folder, **{name: torch.zeros(1)})
    told = refused(load, folder)
    assert "unexpected tensors: " in told and told.isprintable()


def test_names_of_folders_and_settings_stay_in_one_short_line(folder_of, target):
    folder = folder_of("target")
    folder = folder.rename(folder.parent / "a\nb")
    edit_config(folder, hidden_size=64)
    assert refused(load_target, folder).startswith(f"{folder.parent}/a\\nb: config.json: hidden_size must be 32")
    for change in ({"medusa\n": 1}, {"architectures": ["a\n" * 5000]}, {"model_type": "a\n" * 5000}):
        edit_config(folder, **change)
        assert refused(load_draft, folder, target).isprintable() and refused(load_target, folder).isprintable()
        edit_config(folder, **dict.fromkeys(change))
    assert "xxx...: there is no such folder" in refused(load_target, "x" * 5000)


NO_NUMBERS = "tensors with NaN or infinite values as torch.float32: "
NOT_FINITE = NO_NUMBERS + "{}; check_weights=False (--no-check-weights) loads them"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("target", "model.norm.weight"), ("target", "model.layers.7.self_attn.k_proj.weight"), ("eagle1", "fc.bias"),
        ("eagle3", "lm_head.weight"), ("modules", "mtp_layers.1.input_proj.weight"),
    ],
)  # fmt: skip
def test_weights_that_are_no_numbers(folder_of, kind, name):
    folder = folder_of(kind)
    stored = "model." + name if kind == "modules" else name
    weight = safetensors_torch.load_file(folder / "model.safetensors")[stored]
    for value in (NAN, -INFINITY):
        weight.view(-1)[-1] = value
        edit_tensors(folder, **{stored: weight})
        assert refused(load, folder) == f"{folder}: " + NOT_FINITE.format(name)
    assert load(folder, check_weights=False)


def test_several_tensors_are_named_and_waited_for_once(folder_of, monkeypatch):
    folder = folder_of("target")
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(8)]
    edit_tensors(folder, **{name: torch.full((32,), NAN) for name in names})
    waits, read = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(list(tensor.shape)) or read(tensor))
    told = refused(load, folder)
    assert ", ".join(names[:4]) + " and 4 more; check_weights=False" in told and waits == [[8 * 9 + 3]]


def test_weights_beyond_their_dtype(folder_of):
    """fp16 has no 1e5; eight-bit floats are read as what they stand for."""
    folder = folder_of("target")
    edit_tensors(folder, **{"model.norm.weight": torch.tensor([1e5] + [1.0] * 31)})
    assert "infinite values as torch.float16: model.norm.weight;" in refused(load, folder, dtype=torch.float16)
    assert load(folder, dtype=torch.bfloat16).model.norm.weight[0] > 9e4
    edit_tensors(folder, **{"model.norm.weight": torch.full((32,), 2.0).to(torch.float8_e4m3fn)})
    assert load(folder).model.norm.weight.tolist() == [2.0] * 32
    edit_tensors(folder, **{"model.norm.weight": torch.full((32,), NAN).to(torch.float8_e4m3fn)})
    assert "as torch.float32: model.norm.weight;" in refused(load, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.float8_e4m3fn, torch.float64, torch.int8])
def test_every_dtype_is_checked(dtype):
    """Of models of transformers the weights may be stored in any; empty ones hold nothing."""
    good = torch.ones(3000).to(dtype)
    assert checkpoint.not_finite({"good": good, "empty": good[:0]}) == []
    if dtype.is_floating_point:
        bad = good.float().clone()
        bad[-1] = NAN
        assert checkpoint.not_finite({"good": good, "bad": bad.to(dtype)}) == ["bad"]


@pytest.mark.gpu
def test_the_check_waits_once_and_makes_nothing_large(note):
    weights = {str(index): torch.ones(2**20, device="cuda", dtype=torch.bfloat16) for index in range(40)}
    weights["large"] = torch.ones(2**30, device="cuda", dtype=torch.bfloat16)
    assert checkpoint.not_finite(weights) == []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            assert checkpoint.not_finite(weights) == []
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "called a synchronizing" in str(wait.message)]) == 1
    assert torch.cuda.max_memory_allocated() - before < 2**22
    began = time.perf_counter()
    checkpoint.not_finite(weights)
    size = sum(tensor.nbytes for tensor in weights.values())
    note(f"weights are checked at {size / (time.perf_counter() - began) / 1e9:.0f} GB/s")


def test_weights_behind_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_head=2, n_layer=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.ln_f.bias[3] = NAN
    model.save_pretrained(tmp_path)
    assert refused(load_target, tmp_path) == f"{tmp_path}: " + NOT_FINITE.format("transformer.ln_f.bias")
    assert load_target(tmp_path, check_weights=False)


def test_the_check_can_be_left_out(folder_of, capsys):
    folder = folder_of("target")
    edit_tensors(folder, **{"model.norm.weight": torch.full((32,), NAN)})
    config, place = EAGLEConfig(method="ngram"), {"device": "cpu", "dtype": torch.float32}
    told = refused(EAGLEInference.from_pretrained, None, folder, config, **place)
    assert told == f"{folder}: " + NOT_FINITE.format("model.norm.weight")
    assert EAGLEInference.from_pretrained(None, folder, config, check_weights=False, **place)
    broken = folder_of("eagle3")
    edit_tensors(broken, **{"norm.weight": torch.full((32,), NAN)})
    command = ["inspect", str(broken), "--device", "cpu"]
    assert main(command) == 1
    assert capsys.readouterr().err == f"error: {broken}: " + NOT_FINITE.format("norm.weight") + "\n"
    assert main([*command, "--no-check-weights"]) == 0


FOLDERS = {"/no/such/folder": "/no/such/folder: there is no such folder, and nothing is downloaded"}
FOLDERS |= {
    name: f"{name}: there is no such folder, and nothing is downloaded: hf download {name} --local-dir FOLDER makes one"
    for name in ("meta-llama/Llama-3.1-8B", "gpt2")
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_not_there(tmp_path, monkeypatch, target, name):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: load_target(name),
        lambda: load_draft(name, target),
        lambda: EAGLEInference.from_pretrained(None, name, EAGLEConfig(method="ngram"), device="cpu"),
        lambda: load_tokenizer(name),
    ):
        assert refused(call) == FOLDERS[name]


@functools.cache
def word_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request, tmp_path):
    """Of 257 bytes, or of three words in a model that has room for 257."""
    config = {"vocab_size": 257, "tokenizer_class": "ByteTokenizer" if request.param == "bytes" else "PreTrained"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if request.param == "file":
        word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([-1], "decode: token_ids must lie in 0..256, got -1"),
        ([0, 99999], "decode: token_ids must lie in 0..256, got 99999"),
        ([10**30], f"decode: token_ids must lie in 0..256, got {10**30}"),
        ([1.5], "decode: token_ids must be integers, got 1.5"),
        ("ab", "decode: token_ids must be integers, got 'a'"),
        (7, "decode: token_ids must be a sequence of integers, got 7"),
    ],
)
def test_ids_that_are_no_tokens(tokenizer, token_ids, message):
    assert refused(tokenizer.decode, token_ids) == message


def test_ids_of_a_models_padding_are_no_text(tokenizer):
    assert tokenizer.decode([200, 256]) in ("", "\N{REPLACEMENT CHARACTER}")
    assert tokenizer.decode(torch.tensor([], dtype=torch.int64)) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\udc80b", r"encode: text must be UTF-8, its character 1 is '\udc80', half of a surrogate pair"),
        ("\ud800", r"encode: text must be UTF-8, its character 0 is '\ud800', half of a surrogate pair"),
        (5, "encode: text must be a string, got 5"),
        (b"a", "encode: text must be a string, got b'a'"),
    ],
    ids=["escaped", "half", "number", "bytes"],
)
def test_texts_that_are_none(tokenizer, text, message):
    assert refused(tokenizer.encode, text) == message
    assert refused(tokenizer.encode_with_spans, text, False) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": 3}, "chat_template must be a text, or a list of named templates, got 3"),
        ({"chat_template": [{"name": "a"}]},
         "chat_template must be a text, or a list of named templates, got {'a': None}"),
        (None, "chat_template.jinja cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
    ids=["number", "no text", "no UTF-8"],
)  # fmt: skip
def test_bad_chat_templates(folder_of, settings, message):
    folder = folder_of("target")
    if settings is None:
        (folder / "chat_template.jinja").write_bytes(b"\xff")
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert refused(read_chat_template, folder).startswith(f"{folder}: {message}")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "c": 2, "a": 1}}]'])
def test_a_field_that_is_there_twice_is_refused(originals, tmp_path, text, capsys):
    """In the command line and in files: Python would keep the last one alone."""
    assert refused(parse_json, text) == "the field a occurs more than once"
    with pytest.raises(SystemExit):
        main(["generate", "a", "--speculative-config", text])
    assert "(the field a occurs more than once)" in capsys.readouterr().err
    shutil.copytree(originals / "target", tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(text)
    assert "config.json" in (told := refused(load_target, tmp_path / "target")) and "the field a occurs" in told
