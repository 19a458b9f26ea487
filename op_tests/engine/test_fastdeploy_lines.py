"""FastDeploy's documentation of speculative decoding: each of its `--speculative-config` lines, and what it lists."""

import json
import re

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.config.drafting_options import METHODS
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.serve import session
from eagle_kernels.tools.cli.main import main
from op_tests.engine import deepseek
from op_tests.engine.engines import write_with_modules
from op_tests.engine.toys import LetterTokenizer

PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1], [9, 9, 9, 9], [2, 6]]
# as they stand there; a shell puts folders in the place of the variables
LINES = {
    "greedy": '{"method": "mtp", "verify_strategy": "greedy", "num_speculative_tokens": 1, '
    '"model": "${path_to_mtp_model}"}',
    "accept all": '{"method": "mtp", "accept_policy": "accept_all", "num_speculative_tokens": 1}',
    "mtp": '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}"}',
    "hybrid": '{"method": "mtp", "num_model_steps": 2, "mtp_strategy": "with_ngram", "num_speculative_tokens": 5, '
    """"model": "'$model_path'/mtp"}""",
    "quantised": '{"method": "mtp", "num_speculative_tokens": 1, "model": "${path_to_mtp_model}", '
    '"quantization": "wint4"}',
    "ngram": '{"method": "ngram", "num_speculative_tokens": 1}',
    "suffix": '{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64, '
    '"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0, '
    '"suffix_decoding_min_token_prob": 0.1}',
    "naive": '{"method": "naive", "num_speculative_tokens": 1}',
}
# what each of them means: method, the most drafts of a step, those of the model
MEANT = {
    "greedy": ("mtp", 1, None), "accept all": ("mtp", 1, None), "mtp": ("mtp", 1, None), "hybrid": ("hybrid", 5, 2),
    "quantised": ("mtp", 1, None), "ngram": ("ngram", 1, None),
    "suffix": ("suffix", 4, None), "naive": ("naive", 0, None),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with two next-token modules."""
    return write_with_modules(tmp_path_factory.mktemp("target"), 2)


def fields_of(name: str, folder) -> dict:
    """A line's fields, once a shell has read it."""
    line = re.sub(r"\$\{path_to_mtp_model\}|'\$model_path'/mtp", str(folder), LINES[name])
    return json.loads(line)


@pytest.mark.cross
@pytest.mark.parametrize("name", LINES)
def test_lines_run_as_they_stand(name, folder, device):
    """Text is plain decoding's, but where all drafts are accepted."""
    engine = EAGLEInference.from_pretrained(None, folder, fields_of(name, folder), device=device)
    method, most, levels = MEANT[name]
    config = engine.config
    assert (config.method, config.num_model_steps) == (method, levels) and (engine.draft is None) == (
        levels is None and method != "mtp"
    )
    text, stats = engine.generate(PROMPTS, 24, seeds=1)
    plain, _ = engine.generate(PROMPTS, 24, seeds=1, speculative=False)
    assert (stats.num_steps, stats.num_draft_tokens) == (most, most + 1)
    assert (text == plain) == (name != "accept all")
    if name == "accept all":
        assert stats.mean_accept_length == 2


@pytest.mark.parametrize("name", LINES)
def test_the_command_line_takes_them(name, folder, capsys, monkeypatch):
    monkeypatch.setattr(session, "load_tokenizer", lambda folder, num_ids: LetterTokenizer())
    line = ["--target", str(folder), "--speculative-config", json.dumps(fields_of(name, folder)), "--device", "cpu"]
    assert main(["generate", "abcabcabc", "--max-new-tokens", "8", "--compare", "--json", *line]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is (None if name == "accept all" else True)


def test_its_mixed_form_sets_experts_apart(tmp_path):
    """An object of `quantization`, as its class MixQuantConfig reads it."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    deepseek.write_with_modules(tmp_path, 1, "Glm4Moe", **sizes)
    mixed = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "wint4"}
    fields = {"method": "mtp", "num_speculative_tokens": 1, "quantization": mixed}
    layer = EAGLEInference.from_pretrained(None, tmp_path, fields, device="cpu").draft.mtp_layers[0]
    assert layer.mlp.layout.op == "linear_w4a16"
    assert {each.op for each in layer.self_attn.o_proj.layouts.values()} == {"linear_w8a16"}


def test_every_method_and_strategy_of_its_lists_is_one_of_ours():
    assert {"mtp", "ngram", "naive", "suffix"} <= set(METHODS)
    for strategy in ("topp", "greedy", "target_match"):
        for policy in ("normal", "accept_all", "reject_all"):
            fields = {"method": "mtp", "verify_strategy": strategy, "accept_policy": policy}
            if strategy == "topp" and policy != "normal":
                with pytest.raises(ValueError, match="accept_policy must be 'normal' with verify_strategy='topp'"):
                    EAGLEConfig.from_speculative_config(fields)
            else:
                config = EAGLEConfig.from_speculative_config(fields)
                assert (config.verify_strategy, config.accept_policy) == (strategy, policy)


def test_drafts_that_are_given_twice_or_for_nothing(folder, tmp_path):
    fields = fields_of("mtp", folder)
    with pytest.raises(ValueError, match="speculative_config: model must be absent where the draft is given as "):
        EAGLEInference.from_pretrained(folder, folder, fields)
    with pytest.raises(ValueError, match="speculative_config: model must be the folder of a draft, got 3"):
        EAGLEInference.from_pretrained(None, folder, fields | {"model": 3})
    with pytest.raises(ValueError, match="model must be absent with fields of suffix decoding under method='mtp'"):
        EAGLEInference.from_pretrained(None, folder, fields_of("suffix", folder) | {"model": str(folder)})
    with pytest.raises(ModelError, match="there is no such folder"):
        EAGLEInference.from_pretrained(None, folder, fields | {"model": str(tmp_path / "none")})
