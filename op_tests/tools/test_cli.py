"""The command line on the embedded pair: what it prints, and one line on stderr for every bad input."""

import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eagle_kernels
from eagle_kernels import EAGLEInference
from eagle_kernels.engine.config.eagle_config import EAGLEConfig
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.models.tokenizer import BYTES, ByteTokenizer, ChainDetokenizer
from eagle_kernels.runtime import language
from eagle_kernels.runtime.library import backend
from eagle_kernels.tools.cli import generate as generate_command
from eagle_kernels.tools.cli.main import main
from op_tests.engine import heads
from op_tests.engine.heads import save_folder
from op_tests.engine.toys import plain_logits, random_llama, write_decoder
from op_tests.tools import command
from op_tests.tools.command import printed, read_rows

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def quicksort(items):\n"
TARGET, DRAFT = demo_pair()
FP32 = ("--dtype", "float32")  # in which texts with and without speculation are the same on every device
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def generate(*arguments: str | Path, prompt: str = PROMPT) -> int:
    return main(["generate", prompt, *FP32, *map(str, arguments)])


@pytest.fixture
def shown(capsys):
    """shown(*options): the text and the table of `generate`."""
    return lambda *options, prompt=PROMPT: split_report(printed(capsys, "generate", prompt, *FP32, *options))


@pytest.fixture
def report(capsys):
    """report(*options): the object of `generate --json`."""
    return lambda *options, prompts=(PROMPT,): json.loads(
        printed(capsys, "generate", *prompts, *FP32, *options, "--json")
    )


def split_report(output: str) -> tuple[str, dict[str, str]]:
    """The text, and the rows of the table below it."""
    text, _, table = output.rpartition("\n\n")
    return text, read_rows(table)


def test_generate_prints_prompt_text_and_table(capsys):
    assert generate("--max-new-tokens", 24) == 0
    captured = capsys.readouterr()
    text, table = split_report(captured.out)
    assert text.startswith(PROMPT) and len(text.rstrip("\n")) <= len(PROMPT) + 24
    rows = ["tokens", "steps", "mean acceptance length", "accepted at depth 1, 2, ...", "tokens/s"]
    assert list(table) == rows
    assert table["tokens"] == "24 (length)"
    assert table["steps"].endswith(" of 32 nodes, 5 levels")
    assert 1 < float(table["mean acceptance length"].split()[0]) <= 6
    assert captured.err == ""


def test_compare_adds_plain_decoding(shown):
    _, table = shown("--max-new-tokens", 24, "--compare")
    assert list(table)[-3:] == ["plain tokens/s", "speedup of warm steps", "identical"]
    assert table["identical"] == "yes" and table["speedup of warm steps"].endswith("x")


@pytest.mark.parametrize("prompts", [["def f("], ["def f(", "class A"]], ids=len)
@pytest.mark.parametrize("seed", [[], ["--seed", "0"], ["--seed", "7"]], ids=" ".join)
def test_compare_draws_with_the_same_seeds(report, prompts, seed):
    """Given or not: at any temperature plain decoding's texts are the same; the seeds are named."""
    found = report("--max-new-tokens", 10, "--temperature", 1.5, "--compare", *seed, prompts=prompts)
    assert all(result["identical"] for result in found.get("requests", [found]))
    assert len(found["seeds"]) == len(prompts)
    assert not seed or found["seeds"] == [int(seed[1])] * len(prompts)


@pytest.mark.cross
@pytest.mark.parametrize(
    ("policy", "mean", "per_depth"),
    [
        (["accept_all"], "6.00", "100%, 100%, 100%, 100%, 100%"),
        (["reject_all"], "1.00", "0%, 0%, 0%, 0%, 0%"),
        (["simulate", "--simulated-accept-length", 4], "4.00", "100%, 100%, 100%, 0%, 0%"),
        (["simulate", "--simulated-accept-rates", "1,1,0,0,0"], "3.00", "100%, 100%, 0%, 0%, 0%"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_accept_policies(shown, policy, mean, per_depth):
    """Texts with planted tokens are not held against plain decoding's."""
    _, table = shown("--max-new-tokens", 13, "--compare", "--topk", 1, "--accept-policy", *policy)
    assert table["mean acceptance length"] == f"{mean} (bonus included)"
    assert table["accepted at depth 1, 2, ..."] == per_depth
    is_own = policy == ["reject_all"]
    assert table["identical"] == ("yes" if is_own else f"not compared: with {policy[0]} texts differ by design")
    assert table["speedup of warm steps"].endswith("x")


@pytest.mark.slow
def test_strategies_that_draw_otherwise_are_not_compared(shown):
    fields = {"method": "eagle", "num_speculative_tokens": 2, "verify_strategy": "rejection"}
    options = ("--max-new-tokens", 9, "--compare", "--speculative-config", json.dumps(fields))
    for temperature, verdict in ((0, "yes"), (1, "not compared: with rejection texts differ by design")):
        assert shown(*options, "--temperature", temperature)[1]["identical"] == verdict


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "remark"), [(0, ""), (0.5, " before the noise")])
def test_compare_says_where_and_by_what_gap_texts_part(shown, report, monkeypatch, temperature, remark):
    generated = EAGLEInference.generate
    seen = []

    def generate_another_token(engine, prompt, *arguments, **keywords):
        output = generated(engine, prompt, *arguments, **keywords)
        if not keywords.get("speculative", True):
            seen.append((engine, prompt[0], list(output.output_ids[0])))
            output.output_ids[0][5] = 90
        return output

    monkeypatch.setattr(EAGLEInference, "generate", generate_another_token)
    arguments = ("--max-new-tokens", 12, "--compare", "--temperature", temperature, "--seed", 1)
    row, found = shown(*arguments)[1]["identical"], report(*arguments)
    engine, prompt, tokens = seen[-1]
    logits = plain_logits(engine, prompt + tokens[:5])[-1]
    gap = float(logits[90] - logits[tokens[5]])
    assert found["identical"] is False and found["parts_at"] == 5
    assert found["logit_gap"] == pytest.approx(abs(gap), abs=1e-3) and abs(gap) > 0.01
    rest = bytes([90, *tokens[6:]]).decode()
    assert row == f"no, from token 5 (logit gap {found['logit_gap']:.4f}{remark}); plain goes on with {rest!r}"


def test_json_is_one_object_and_nothing_else(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate("--max-new-tokens", 24, "--compare", "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["prompt"] == PROMPT
    assert bytes(report["token_ids"]).decode() == report["text"] and len(report["token_ids"]) == 24
    assert report["generated_tokens"] == 24 and report["finish_reasons"] == ["length"]
    assert report["mean_accept_length"] == 1 + report["accepted"] / report["steps"]
    assert report["identical"] is True and report["parts_at"] is None and report["logit_gap"] is None
    assert report["speedup"] > 0 and report["plain_tokens_per_second"] > 0


def test_the_table_shows_what_json_holds(capsys, monkeypatch):
    """Every row, of one run of several texts, whose two ways and figures are not alike."""
    table, tables = generate_command._table, []
    monkeypatch.setattr(generate_command, "_table", lambda *given: tables.append(given) or table(*given))
    options = [*FP32, "--max-new-tokens", "9", "--compare", "--temperature", "0.5"]
    rows = split_report(printed(capsys, "generate", "def f(", "class A", *options))[1]
    ((report, results, *_),) = tables
    shares = ", ".join(f"{count / report['steps']:.0%}" for count in report["accepted_per_depth"])
    speedup = report["mean_accept_length"] * report["plain_step_ms"] / report["warm_step_ms"]
    assert rows == {
        "tokens": "18 (2 length)",
        "steps": f"{report['steps']} of 32 nodes, 5 levels",
        "mean acceptance length": f"{1 + report['accepted'] / report['steps']:.2f} (bonus included)",
        "accepted at depth 1, 2, ...": shares,
        "tokens/s": f"{16 / report['decode_time_s']:.1f}",
        "seed": "{}, {}".format(*report["seeds"]),
        "plain tokens/s": f"{report['plain_tokens_per_second']:.1f}",
        "speedup of warm steps": f"{speedup:.2f}x",
        "identical": "yes",
    }
    assert report["plain_tokens_per_second"] == pytest.approx(2e3 / report["plain_step_ms"])  # 2 rows, all of its steps
    assert [len(result["token_ids"]) for result in results] == [9, 9] and report["generated_tokens"] == 18


def test_json_has_the_text_that_is_printed(shown, report, monkeypatch):
    """Some tokenizers strip a space where a text begins; what stands after a prompt begins none."""

    class Detokenizer(ChainDetokenizer):
        def __init__(self, context):
            super().__init__(BYTES, list, ())
            self.space = "" if not context else " "

        def push(self, token_ids):
            space, self.space = self.space, ""
            return space + super().push(token_ids)

    monkeypatch.setattr(ByteTokenizer, "detokenizer", lambda self, context=(): Detokenizer(context))
    text = report("--max-new-tokens", 8)["text"]
    assert shown("--max-new-tokens", 8)[0] == PROMPT + text and text.startswith(" ")


@pytest.mark.slow
def test_a_seed_repeats_the_text(shown):
    texts = []
    for seed in (7, 7, 8):
        text, table = shown("--max-new-tokens", 40, "--temperature", 0.8, "--seed", seed)
        assert table["seed"] == str(seed)
        texts.append(text)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_a_seed_that_was_not_given_is_printed(shown):
    text, table = shown("--max-new-tokens", 20, "--temperature", 1)
    assert shown("--max-new-tokens", 20, "--temperature", 1, "--seed", table["seed"])[0] == text


def test_nothing_is_drawn_at_temperature_0_so_no_seed_is_printed(shown):
    for temperature in (0, 0.5):
        _, table = shown("--max-new-tokens", 4, "--temperature", temperature, "--seed", 3)
        assert ("seed" in table) == (temperature > 0)


@pytest.mark.slow
def test_prompts_come_from_the_line_a_file_and_standard_input(capsys, report, monkeypatch, tmp_path):
    """They are decoded together, and each text is the one that its prompt has alone."""
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(["class A", "def f(\n"]))
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    options = ["--max-new-tokens", 8, "--compare"]
    found = report("--prompts", file, *options, prompts=(PROMPT, "-"))
    assert [request["prompt"] for request in found["requests"]] == [PROMPT, "import os\n", "class A", "def f(\n"]
    assert found["num_requests"] == 4 and found["plain_tokens_per_second"] > 0
    for request in found["requests"]:
        assert request["identical"] is True and len(request["token_ids"]) == 8
        assert report(*options, prompts=[request["prompt"]])["token_ids"] == request["token_ids"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("class A\n\ndef f(\n"))
    text, table = split_report(printed(capsys, "generate", "--prompts", "-", *FP32, *options))
    first, second = (found["requests"][index]["text"] for index in (2, 3))
    assert text.startswith(f"class A{first}\n\ndef f(") and table["tokens"] == "16 (2 length)"
    assert table["identical"] == "yes" and second


def test_of_several_texts_the_first_that_parts_is_shown(capsys, monkeypatch):
    generated = EAGLEInference.generate

    def generate_another_token(engine, prompts, *arguments, **keywords):
        output = generated(engine, prompts, *arguments, **keywords)
        if not keywords.get("speculative", True):
            output.output_ids[1][2] = 90
        return output

    monkeypatch.setattr(EAGLEInference, "generate", generate_another_token)
    shown = printed(capsys, "generate", "class A", "def f(", *FP32, "--max-new-tokens", 8, "--compare")
    verdict = split_report(shown)[1]["identical"]
    assert verdict.startswith("no, 1 of 2 texts; prompt 1 from token 2 (logit gap ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt; give a text, - for standard input, or --prompts FILE"),
        (["-", "--prompts", "-"], "- (standard input) must be given at most once, got it more than once"),
        (["def f(", ""], "prompt 1 is empty; it must hold at least one token"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert command.complaint(capsys, "generate", *arguments, *FP32) == message


@pytest.fixture
def chat_target(tmp_path) -> Path:
    """The embedded target with a chat template, in which the system's text stands before the user's."""
    shutil.copytree(TARGET, tmp_path / "target")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    return tmp_path / "target"


def test_chat_prints_answers(capsys, shown, report, monkeypatch, chat_target):
    """Of one message or several, from wherever they come: what follows the template's text, without that text."""
    models = ("--target", chat_target, "--draft", DRAFT, "--max-new-tokens", 12)
    walk = "import os\n\ndef walk("
    texts = {prompt: report("--max-new-tokens", 12, prompts=[prompt])["text"] for prompt in (walk, "def f(")}
    assert shown(*models, "--chat", prompt=walk)[0] == texts[walk]
    found = report(*models, "--chat", "--system", walk[:4], "--compare", prompts=[walk[4:]])
    assert (found["prompt"], found["text"], found["identical"]) == (walk[4:], texts[walk], True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f("))
    both = printed(capsys, "generate", *models, *FP32, "--chat", walk, "-")
    assert split_report(both)[0] == "\n\n".join(texts.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--chat"],
            "encode_chat: the model has no chat template, neither chat_template in tokenizer_config.json nor ",
        ),
        (["--system", "be brief"], "--system must be given with --chat: other texts are continued as they are"),
    ],
)
def test_chat_needs_a_template_and_is_asked_for(capsys, arguments, message):
    assert generate(*arguments) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"eagle_kernels {eagle_kernels.__version__}\n"


def test_drafts_are_green_on_a_terminal_only(capsys, monkeypatch):
    assert generate("--max-new-tokens", 24) == 0
    plain = capsys.readouterr().out
    assert "\033" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate("--max-new-tokens", 24) == 0
    colored = capsys.readouterr().out
    assert colored.count("\033[32m") == colored.count("\033[0m") > 0
    assert split_report(re.sub(r"\033\[\d+m", "", colored))[0] == split_report(plain)[0]


@pytest.mark.slow
def test_folders_can_be_named(capsys, shown):
    text, _ = shown("--max-new-tokens", 12)
    format_ = "SpecForge/SGLang format, EAGLE-3, aux layers [0, 2, 4] (layer outputs) = hidden_states [1, 3, 5]"
    for _ in range(2):  # what listens to the loader leaves it as it was
        assert generate("--max-new-tokens", 12, "--target", TARGET, "--draft", DRAFT) == 0
        captured = capsys.readouterr()
        assert split_report(captured.out)[0] == text
        assert captured.err == f"{DRAFT}: {format_}\n"


@pytest.mark.parametrize("vocab_size", [257, 321])
@pytest.mark.parametrize("config", [(), ("--speculative-config", '{"method": "draft_model"}')], ids=["unsaid", "said"])
def test_a_small_language_model_can_be_the_draft(capsys, tmp_path, vocab_size, config):
    """Its table may be padded: both say that their tokens are bytes."""
    small = random_llama(num_layers=1, vocab_size=vocab_size)
    write_decoder(small, tmp_path, tokenizer_class="ByteTokenizer")
    arguments = ("--target", TARGET, "--draft", tmp_path, "--max-new-tokens", 12, "--compare", *config)
    assert generate(*arguments, "--device", "cpu") == 0
    captured = capsys.readouterr()
    assert captured.err == f"{tmp_path}: a language model, which drafts with the target's tokens\n"
    assert split_report(captured.out)[1]["identical"] == "yes"
    if vocab_size == 321:
        heads.edit_config(tmp_path, tokenizer_class=None)
        assert f"{tmp_path}: the draft must have the target's 257 tokens, got 321" in complaint(capsys, *arguments)


@pytest.mark.parametrize("method", ["ngram", "suffix", "naive"])
def test_some_methods_need_a_target_alone(shown, method):
    options = ("--speculative-config", json.dumps({"method": method}), "--max-new-tokens", 6, "--device", "cpu")
    assert shown("--target", TARGET, *options)[1]["tokens"].startswith("6 ")


def test_limits_of_the_engine_can_be_given(tmp_path, capsys, monkeypatch):
    seen, prompts = [], tmp_path / "prompts.txt"
    prompts.write_text("def f(")

    def load(*arguments, **keywords):
        seen.append(arguments[2])
        raise ValueError("seen")

    monkeypatch.setattr(EAGLEInference, "from_pretrained", load)
    options = ("--adaptive", "--max-batch", 3, "--page-size", 64, "--eager")
    assert generate() == generate(*options) == main(["benchmark", str(prompts), *map(str, options)]) == 1
    names = ("adaptive", "max_batch", "page_size", "cuda_graph")
    default, *given = [tuple(getattr(config, name) for name in names) for config in seen]
    assert default == tuple(getattr(EAGLEConfig(), name) for name in names)
    assert given == [("auto", 3, 64, False)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--simulated-accept-rates", "1,x"],
         "--simulated-accept-rates: must be numbers with commas between them, got '1,x'"),
        (["generate", "a", "--target", ""], "--target: must be the path of a folder, got ''"),
        (["inspect", " "], "draft: must be the path of a folder, got ' '"),
    ],
    ids=["rates", "target", "draft"],
)  # fmt: skip
def test_values_are_named_by_their_rule(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--target", "a", "--data", "b", "--output", "c"]])
def test_the_command_that_left_says_where_it_went(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(["train-head", *arguments])
    (out, said), places = capsys.readouterr(), ("python -m bench.lab.train_head", "SpecForge", "speculators")
    assert ended.value.code == 2 and out == "" and said.count("\n") == 1 and all(place in said for place in places)


def test_env_prints_versions_and_backend(capsys):
    rows = read_rows(printed(capsys, "env"))
    assert rows["eagle_kernels"] == str(ROOT / "eagle_kernels")
    assert (rows["python"], rows["torch"]) == (platform.python_version(), torch.__version__)
    assert "triton" in rows and rows["backend on cpu"] == backend(torch.device("cpu"))
    assert "cuda:0" in rows or rows["gpu"] == "none that torch can use"


def test_end_tokens_are_ignored(tmp_path, report):
    """Text goes on after them, as far as it may."""
    target = shutil.copytree(TARGET, tmp_path / "target")
    content = json.loads((target / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": ord(" ")}
    (target / "config.json").write_text(json.dumps(content), encoding="utf-8")
    models = ("--target", target, "--draft", DRAFT, "--max-new-tokens", 16)
    more = ("--ignore-eos", "--top-k", -1)
    for options, ends, text in (((), ["eos"], "self, "), (more, ["length"], "self, size, walk")):
        found = report(*models, *options, prompts=["import os\n\ndef walk("])
        assert (found["finish_reasons"], found["text"]) == (ends, text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max-tokens", "--max-tokens (did you mean --max-new-tokens?)"),
        ("--temprature", "--temprature (did you mean --temperature?)"),
        ("--speculative-eagle-topk=3", "--speculative-eagle-topk=3 (did you mean --topk?)"),
        ("--colour", "unrecognized arguments: --colour 3"),
    ],
)
def test_unknown_options_are_named(capsys, option, message):
    with pytest.raises(SystemExit):
        generate(option, 3)
    assert message in capsys.readouterr().err


def complaint(capsys, *arguments: str | Path, prompt: str = PROMPT) -> str:
    return command.complaint(capsys, "generate", prompt, *FP32, *arguments)


CONFIG, OF_EMBEDDED = "--speculative-config", "the embedded pair has an EAGLE head"
DEVICES = "--device must be auto, cpu, cuda or cuda:N"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", TARGET],
         "--target must come with a source of drafts: --draft HEAD_OR_SMALLER_MODEL, or --speculative-config "
         """'{"method": "ngram"}', which needs no draft"""),
        (["--target", TARGET, CONFIG, '{"method": "draft_model"}'], "--target must come with a source"),
        (["--target", TARGET, CONFIG, '{"method": "mtp"}'], f"{TARGET}: holds no next-token modules"),
        (["--draft", DRAFT], '--draft, or "model" of --speculative-config, must come with --target MODEL'),
        ([CONFIG, '{"method": "draft_model"}'], f"--draft must be given for method='draft_model': {OF_EMBEDDED}"),
        ([CONFIG, '{"method": "mtp"}'], f"--draft must be given for method='mtp': {OF_EMBEDDED}"),
        (["--target", "/no/target", "--draft", DRAFT], "/no/target: there is no such folder"),
        (["--target", TARGET, "--draft", "/no/draft"], "/no/draft: there is no such folder"),
        (["--target", TARGET / "config.json", "--draft", DRAFT], "config.json: is a file, not a folder; name the"),
        (["--target", TARGET, "--draft", TARGET / "config.json"], "config.json: is a file, not a folder; name the"),
        (["--target", DRAFT, "--draft", TARGET], f"{DRAFT}: holds an EAGLE-3 head: a draft, not a target; are draft"),
        (["--target", TARGET, "--draft", TARGET, CONFIG, '{"method": "eagle"}'],
         f"or None for a draft of CausalDraft, got 'eagle'; {TARGET} holds a language model"),
        (["--device", "nonsense"], f"{DEVICES}, got 'nonsense'"),
        (["--device", "meta"], f"{DEVICES}, got 'meta'"),
        (["--device", "mps"], f"{DEVICES}, got 'mps'"),
        (["--device", "cuda:99"], "--device cuda:99: this machine has"),
        (["--topk", 0], "topk must lie in 1..16, got 0"),
        (["--num-steps", 0], "num_steps must be at least 1, got 0"),
        (["--num-steps", 65], "num_steps must lie in 1..64 for topk=8, got 65"),
        (["--num-draft-tokens", 1000], "num_draft_tokens must lie in 2..min(256,"),
        (["--topk", 1, "--num-draft-tokens", 7], "= 6 for topk=1, num_steps=5 (the root counts), got 7"),
        (["--max-new-tokens", 0], "--max-new-tokens must be at least 1, got 0"),
        (["--max-new-tokens", 1024], "exceed the 1024 tokens"),
        (["--temperature", -1], "temperature must be at least 0, got -1.0"),
        (["--temperature", "nan"], "temperature must be a finite int or float, got nan"),
        (["--top-p", 0], "top_p must lie in (0, 1]"),
        (["--accept-policy", "simulate"], "accept_policy must come with one of simulated_accept_length, "),
        (["--accept-policy", "reject_all", "--simulated-accept-length", 3],
         "simulated_accept_length must come with accept_policy='simulate', got 3.0"),
        (["--seed", 2**63], f"seeds must fit in 64 bits, got {2**63}"),
        ([CONFIG, '{"method": "eagle", "model": 3}'],
         "speculative_config: model must be the folder of a draft, got 3"),
        (["--target", TARGET, CONFIG, '{"method": "eagle", "model": ""}'],
         "speculative_config: model must be the folder of a draft, got ''"),
        (["--max-new-tokens", 4000],
         "tokens + --max-new-tokens 4000 exceed the 1024 tokens that the target and max_length allow"),
        ([CONFIG, "{}"], "speculative_config: method must be given, got None"),
        ([CONFIG, '{"method": "eagle", "accept_policy": "normal"}', "--accept-policy", "accept_all"],
         "give acceptance either by --accept-policy or in --speculative-config, not by both"),
    ],
    ids=lambda value: " ".join(Path(str(part)).name for part in value) if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_arguments_are_named(capsys, arguments, message):
    assert message in complaint(capsys, *arguments)


@pytest.mark.parametrize(
    ("missing", "message"),
    [(None, "the triton backend cannot run on cpu tensors"), ("triton 9", "the triton backend needs triton 9")],
)
def test_a_backend_that_cannot_run_is_named(capsys, monkeypatch, missing, message):
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(language, "_IS_INTERPRETING", False)
    monkeypatch.setattr(language, "MISSING", missing)
    assert message in complaint(capsys, "--device", "cpu")


def test_running_out_of_memory_is_one_line(capsys, monkeypatch):
    def run_out(*arguments, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.\nAnd a second line.")

    monkeypatch.setattr(EAGLEInference, "stream", run_out)
    assert complaint(capsys) == "CUDA out of memory. Tried to allocate 2 TiB."


def test_bad_prompts_are_named(capsys):
    assert complaint(capsys, prompt="") == "prompt 0 is empty; it must hold at least one token"
    assert "prompt 0 of 1020 tokens + --max-new-tokens 128 exceed the 1024" in complaint(capsys, prompt="x" * 1020)


def test_limits_are_checked_before_the_warm_up(capsys, monkeypatch):
    """On a GPU a short generation compiles the kernels first; it must not complain in the place of the real one."""

    def short_generation(engine, prompt, arguments):
        engine.generate(prompt, 1)

    monkeypatch.setattr(generate_command, "warm_up", short_generation)
    assert "--max-new-tokens 128 exceed" in complaint(capsys, prompt="x" * 1024)


# of either folder: a file, what it holds, and what is said
BROKEN = [
    ("config.json", "{", "config.json is not JSON"),
    ("config.json", "\xff", "config.json is not JSON"),
    ("config.json", "[]", "config.json holds no JSON object"),
    ("config.json", "{}", "config.json: vocab_size is missing"),
    ("model.safetensors", "no tensors", "model.safetensors cannot be read"),
]
# of one of them: what changes in config.json
CHANGES = [
    ("target", {"rms_norm_eps": "x"}, "config.json: rms_norm_eps must be a number, got 'x'"),
    ("target", {"rope_theta": "abc"}, "config.json: rope_theta must be a number, got 'abc'"),
    ("target", {"rope_scaling": "linear"}, "config.json: rope_scaling must be an object, got 'linear'"),
    ("target", {"tie_word_embeddings": "no"}, "config.json: tie_word_embeddings must be true or false, got 'no'"),
    ("target", {"num_hidden_layers": True}, "config.json: num_hidden_layers must be a positive integer, got True"),
    ("target", {"eos_token_id": "end"}, "eos_token_id must be a token id or a list of them, got 'end'"),
    ("draft", {"eagle_config": [1]}, "config.json: eagle_config must be an object, got [1]"),
    ("draft", {"eagle_config": {LAYER_IDS: 5}}, f"config.json: {LAYER_IDS} must be a list of integers, got 5"),
    ("draft", {"eagle_config": {LAYER_IDS: ["a"]}}, f"config.json: {LAYER_IDS} must be a list of integers, got"),
]


@pytest.mark.parametrize(
    ("which", "file_name", "contents", "message"),
    [*((which, *case) for which in ("target", "draft") for case in BROKEN),
     *((which, "config.json", changes, message) for which, changes, message in CHANGES)],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_broken_folders_are_named(capsys, tmp_path, which, file_name, contents, message):
    broken = shutil.copytree(TARGET if which == "target" else DRAFT, tmp_path / "broken")
    if isinstance(contents, dict):
        contents = json.dumps(json.loads((broken / file_name).read_text()) | contents)
    (broken / file_name).write_text(contents, encoding="latin-1")
    pair = {"target": TARGET, "draft": DRAFT} | {which: broken}
    said = complaint(capsys, "--target", pair["target"], "--draft", pair["draft"])
    assert said.startswith(f"{broken}: {message}")


@pytest.mark.parametrize("index", [{}, {"weight_map": 3}, {"weight_map": {"model.norm.weight": 1}}])
def test_a_bad_index_is_named(capsys, tmp_path, index):
    shutil.copytree(TARGET, tmp_path / "broken", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "broken" / "model.safetensors.index.json").write_text(json.dumps(index))
    said = complaint(capsys, "--target", tmp_path / "broken", "--draft", DRAFT)
    assert said.startswith(f"{tmp_path / 'broken'}: model.safetensors.index.json: weight_map must be an object")


@pytest.mark.parametrize(("changes", "message"), [({"hidden_size": 128}, "128"), ({"vocab_size": 300}, "300")])
def test_a_draft_of_another_target_is_refused(capsys, tmp_path, changes, message):
    config = json.loads((TARGET / "config.json").read_text()) | changes
    save_folder(Decoder(DecoderConfig.from_dict(config)), config, tmp_path)
    assert message in complaint(capsys, "--target", tmp_path, "--draft", DRAFT)


@pytest.mark.slow
def test_as_a_program_from_another_folder(tmp_path):
    program = [sys.executable, "-m", "eagle_kernels", "generate", "def f(", "--max-new-tokens", "8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text, table = split_report(result.stdout)
    assert text.startswith("def f(") and table["tokens"].startswith("8 ")


def test_a_benchmark_tells_what_ran(tmp_path, capsys):
    """The method, by what drafts are kept, what was sampled from, and a max_batch that was raised."""
    file = tmp_path / "prompts.txt"
    file.write_text("aaaa\nbbbb\n", encoding="utf-8")
    fields = {"method": "ngram", "num_speculative_tokens": 3, "verify_strategy": "topp"}
    options = ["--speculative-config", json.dumps(fields), "--temperature", "1", "--top-k", "9", "--top-p", "0.5"]
    benchmark = ["benchmark", str(file), "--max-new-tokens", "3", *options, "--max-batch", "1", "--batch-size", "2"]
    report = json.loads(printed(capsys, *benchmark, "--json"))
    names = ("method", "verify_strategy", "temperature", "top_k", "top_p", "batch_size", "max_batch")
    assert [report[name] for name in names] == ["ngram", "topp", 1.0, 9, 0.5, 2, 2]


def test_a_benchmark_of_one_token_has_no_speedup(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("aaaa\n", encoding="utf-8")
    benchmark = ["benchmark", str(file), "--max-new-tokens", "1"]
    shown = printed(capsys, *benchmark, "--json")
    assert "NaN" not in shown and json.loads(shown)["speedup"] is None
    assert read_rows(printed(capsys, *benchmark))["speedup"] == "-"


@pytest.mark.slow
def test_benchmark(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("import os\n\ndef f(x):\nclass A:\n", encoding="utf-8")
    sizes = ["--max-new-tokens", "8", "--num-prompts", "2", "--topk", "2", "--num-steps", "3"]
    benchmark = ["benchmark", str(file), *sizes, *FP32]
    report = json.loads(printed(capsys, *benchmark, "--json"))
    assert report["prompts"] == 2 and report["identical"] == 1.0 and report["speculative"]["tokens"] == 16
    assert (report["topk"], report["num_steps"], report["num_draft_tokens"]) == (2, 3, 11)
    assert report["dtype"] == "float32" and report["device"] and report["versions"]["torch"] == torch.__version__
    assert report["adaptive"] is None and report["batch_size"] == 1
    assert (report["method"], report["verify_strategy"], report["max_batch"]) == ("eagle", "target_match", 32)
    naive = ["--speculative-config", '{"method": "naive"}']
    report = json.loads(printed(capsys, "benchmark", file, "--max-new-tokens", 8, *naive, "--json"))
    assert (report["topk"], report["num_steps"], report["num_draft_tokens"]) == (1, 0, 1)
    shown = printed(capsys, *benchmark, "--accept-policy", "reject_all")
    assert "mean acceptance length: 1.00" in shown and "identical" in shown
    assert "method: eagle, verified by target_match" in shown
    missing = str(tmp_path / "none.txt")
    for arguments in (["benchmark", missing], ["inspect", "--sweep", missing], ["generate", "--prompts", missing]):
        assert command.complaint(capsys, *arguments) == f"{missing}: there is no such file of prompts"
    for arguments in (["benchmark", file], ["inspect", "--sweep", file]):
        for count in ("0", "-1"):
            said = command.complaint(capsys, *arguments, "--num-prompts", count)
            assert said == f"--num-prompts must be at least 1, got {count}"
