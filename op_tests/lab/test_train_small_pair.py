"""The small pair on made-up packages: which ones are learnt from, the vocabulary, the files, and the whole command."""

import json

import pytest
import torch

pytest.importorskip("tokenizers")

from bench.lab import train_small_pair
from bench.lab.training import packages
from bench.lab.training.trainer import EXIT_UNFINISHED
from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.loading import load_target, read_kind
from eagle_kernels.engine.models.tokenizer import load_tokenizer

LICENCES = {
    "alpha": "License-Expression: BSD-3-Clause",
    "beta": "Classifier: License :: OSI Approved\nClassifier: License :: OSI Approved :: Apache Software License",
    "gamma": "License: PSF License\n        and a second line of its text",
    "delta": "License-Expression: Apache-2.0 OR BSD-2-Clause",
    "copyleft": "License-Expression: GPL-3.0-only",
    "both": "License-Expression: BSD-3-Clause AND MPL-2.0",
    "unsaid": "Summary: says nothing",
}


def add_package(root, name, licence, count=12):
    folder, paths = root / name, []
    folder.mkdir(parents=True)
    for index in range(count):
        lines = [f"def {name}_{index}_{line}(self, value={line}):\n    return self.{name} + value" for line in range(9)]
        (folder / f"part_{index}.py").write_text("\n\n\n".join(lines) + "\n")
        paths.append(f"{name}/part_{index}.py")
    (folder / "copy.py").write_text((folder / "part_0.py").read_text())
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    paths += [f"{name}/copy.py", f"{name}/latin.py", f"{name}/gone.py", "../bin/outside.py"]
    about = root / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{licence}\n")
    (about / "RECORD").write_text("".join(f"{path},,\n" for path in paths))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    root = tmp_path_factory.mktemp("packages")
    for name, licence in LICENCES.items():
        add_package(root, name, licence)
    return root


def test_packages_of_three_licences_are_learnt_from(installed):
    found = packages.read_packages(installed)
    assert [package.name for package in found] == ["alpha==1.0", "beta==1.0", "delta==1.0", "gamma==1.0"]
    assert [package.licence for package in found][1:3] == ["Apache Software License", "Apache-2.0, BSD-2-Clause"]
    assert {len(package.files) for package in found} == {13}  # no other text, nothing outside, nothing that is gone
    corpus = packages.corpus_of(found)
    files = [*corpus.train, *corpus.held_out]
    assert len(files) == 4 * 12 and len({file.contents for file in files}) == len(files) and corpus.held_out
    assert corpus == packages.corpus_of(packages.read_packages(installed))


def test_what_differs_from_the_list_is_named(installed):
    found = packages.read_packages(installed)
    known = packages.listed(found)
    assert packages.tell_differences(found, known) is None
    other = {name: told for name, told in known.items() if name != "beta==1.0"} | {"zeta==2.0": {}}
    other["alpha==1.0"] = {"sha256": "0"}
    told = packages.tell_differences(found, other)
    assert told == ("packages differ from packages.json: 1 more (beta==1.0); 1 fewer (zeta==2.0); "
                    "1 with other files (alpha==1.0)")  # fmt: skip
    assert all({"licence", "files", "sha256"} == told.keys() for told in packages.read_list().values())
    with pytest.raises(ValueError, match="under BSD, Apache and PSF licences give 0 training and 0 held-out files"):
        packages.corpus_of([])


@pytest.mark.parametrize("vocab_size", [8192, 16384])
def test_the_target_is_as_large_as_promised(vocab_size):
    with torch.device("meta"):
        target = Decoder(DecoderConfig.from_dict(train_small_pair.sizes_of(vocab_size, False)))
    count = sum(parameter.numel() for parameter in target.parameters())
    assert 20_000_000 < count <= train_small_pair.MAX_PARAMETERS


@pytest.mark.parametrize("is_tied", [False, True])
def test_files_of_a_model_are_small(is_tied, tmp_path):
    config = train_small_pair.sizes_of(400, True) | {"tie_word_embeddings": is_tied}
    model = Decoder(DecoderConfig.from_dict(config))
    train_small_pair.save_in_files(model, config, tmp_path, most_bytes=2**16 + 40_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1 and all(file.stat().st_size < 2**16 + 40_000 for file in files)
    loaded = load_target(tmp_path).state_dict()
    assert all(torch.equal(tensor.bfloat16().float(), loaded[name]) for name, tensor in model.state_dict().items())


def run(installed, output, *arguments):
    always = ["--tiny", "--packages", installed, "--device", "cpu", "--output", output, "--checkpoint-dir",
              output / "work", "--prompts", 2, "--new-tokens", 6]  # fmt: skip
    return train_small_pair.main([*map(str, (*always, *arguments))])


def test_the_whole_command_in_two_calls(installed, tmp_path, capsys):
    """The first call ends in the target; the second goes on, and a third has nothing left to train but drafts."""
    assert run(installed, tmp_path, "--time-budget-s", "0.01") == EXIT_UNFINISHED
    assert "time budget used up at target" in capsys.readouterr().err
    assert not (tmp_path / "drafts").exists()
    assert run(installed, tmp_path, "--kind", "medusa", "block") == 0
    told = capsys.readouterr()
    assert "packages differ from packages.json" in told.err and "| block | tree of 4 nodes |" in told.out
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["packages"].keys() == {"alpha==1.0", "beta==1.0", "delta==1.0", "gamma==1.0"}
    assert record["vocab_size"] == 280 and 0 < record["held_out_loss"] < 7
    assert "alpha==1.0" in (tmp_path / "README.md").read_text()
    tokenizer = load_tokenizer(tmp_path / "target")
    text = "def alpha_1(self):\n    return é\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {0, 1}.isdisjoint(tokenizer.encode("<|endoftext|> <mask> <|end of a file|>"))
    assert [read_kind(tmp_path / "drafts" / kind) for kind in ("medusa", "block")] == ["Medusa", "DFlash"]
    config = EAGLEConfig(topk=2, num_steps=3)
    engine = EAGLEInference.from_pretrained(tmp_path / "drafts" / "block", tmp_path / "target", config, device="cpu")
    texts = [engine.generate(["def alpha("], 8, speculative=kind, progress=False).output_ids for kind in (True, False)]
    assert texts[0] == texts[1]
    before = (tmp_path / "target" / "model.safetensors.index.json").stat().st_mtime_ns
    assert run(installed, tmp_path, "--kind", "eagle3") == 0
    assert (tmp_path / "target" / "model.safetensors.index.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--vocab-size", "5000"], "--vocab-size must be at most"),
        (["--window", "128"], "--window must be below the 128 positions of the target, got 128"),
    ],
)
def test_what_cannot_be_is_named(installed, tmp_path, capsys, arguments, told):
    assert run(installed, tmp_path, *arguments) == 1
    assert told in capsys.readouterr().err


def test_whole_vocabularies_have_their_limits(tmp_path, capsys):
    always = ["--output", str(tmp_path), "--device", "cpu"]
    assert train_small_pair.main([*always, "--checkpoint-dir", str(tmp_path), "--vocab-size", "4000"]) == 1
    assert "--vocab-size must lie in 8192..16384, got 4000" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_small_pair.main(always)
    assert "--checkpoint-dir must be given" in capsys.readouterr().err
