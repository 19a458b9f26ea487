"""Sets of prompts: from files, from the hub, built in."""

import itertools
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from bench.lab import prompts, sources
from bench.lab.prompts import Prompt, PromptDataset
from bench.lab.sources import DOMAINS, builtin_texts, read_file, read_questions
from eagle_kernels.engine.models.tokenizer import ByteTokenizer

from .stock import refused

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Now shorter."]},
    {"question_id": "x", "category": "coding", "turns": ["Write a function."], "reference": ["def f(): pass"]},
    {"question_id": 2, "category": "summarization", "turns": ["Article. Summarize."]},
    {"question_id": 3, "turns": ["Why?"]},
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    return path


@pytest.fixture
def built_in():
    return PromptDataset.build("bytes", download=False)


def test_texts_of_our_own(built_in):
    assert built_in.domains == list(DOMAINS) == ["code", "conversation", "summarization"]
    for domain in DOMAINS:
        found = built_in.get_by_domain(domain)
        assert len(found) == 50 and len({prompt.raw_text for prompt in found}) == len(found)
        assert [prompt.prompt_id for prompt in found[:2]] == [f"{domain}_000", f"{domain}_001"]
        for prompt in found:
            assert prompt.domain == domain and prompt.token_count == len(prompt.raw_text.encode()) < 800
        assert built_in.sources[domain] == "built in (the hub was not asked)"
    assert all(text.endswith("\n") and '"""' in text for text in builtin_texts("code"))
    assert all(text.endswith("\n\nSummarize the above article:") for text in builtin_texts("summarization"))
    for text in builtin_texts("code"):  # the beginning of something that compiles
        compile(text + "        pass\n" if text.endswith(":\n") else text, "prompt", "exec")


def test_a_set_by_domain(built_in, capsys):
    assert len(built_in) == len(built_in.get_all()) == sum(len(built_in.get_by_domain(domain)) for domain in DOMAINS)
    assert refused(lambda: built_in.get_by_domain("poetry"), KeyError).endswith("summarization, got 'poetry'\"")
    few = built_in.first(2)
    assert len(few) == 6 and few.get_by_domain("code") == built_in.get_by_domain("code")[:2]
    assert repr(few) == "PromptDataset(6 prompts: code 2, conversation 2, summarization 2)"
    for count in (0, -1, 1.5, True):
        assert "n_per_domain must be an int of at least 1" in refused(partial(built_in.first, count), ValueError)
    assert repr(PromptDataset([])) == "PromptDataset(0 prompts: none)"
    own = PromptDataset([Prompt("a", "code", "x", 4), Prompt("b", "code", "y", 8)], {"code": "mine"})
    assert own.stats() == {"code": {"n": 2, "min": 4, "mean": 6.0, "max": 8}}
    own.print_stats()
    assert capsys.readouterr().out.splitlines()[1].split() == ["code", "2", "4", "6.0", "8", "mine"]
    with pytest.raises(KeyError, match="domain must be one of code, got 'conversation'"):
        own.get_by_domain("conversation")


def test_there_and_back(built_in, tmp_path):
    path = tmp_path / "new" / "prompts.json"
    built_in.save(path)
    loaded = PromptDataset.load(path)
    assert loaded.get_all() == built_in.get_all() and loaded.sources == built_in.sources
    for text in ("[]", "{", '{"prompts": [{"prompt_id": 1}], "sources": {}}'):
        path.write_text(text)
        assert f"{path} is not what save writes: " in refused(lambda: PromptDataset.load(path))


def test_a_text_that_is_none(tmp_path):
    file = tmp_path / "prompts.json"
    prompt = {"prompt_id": "a", "domain": "code", "raw_text": 5, "token_count": 1}
    file.write_text(json.dumps({"sources": {}, "prompts": [prompt]}))
    said = f"PromptDataset.load: {file} is not what save writes: raw_text of a must be a string, got 5"
    assert refused(lambda: PromptDataset.load(file)) == said


def test_sets_that_cannot_be():
    prompt = Prompt("a", "code", "x", 1)
    assert "prompt_id must be of one prompt, got 'a' twice" in refused(lambda: PromptDataset([prompt, prompt]))
    said = refused(lambda: PromptDataset([Prompt("a", "poetry", "x", 1)]))
    assert said == "PromptDataset: domain of a must be one of code, conversation, summarization, got 'poetry'"
    for count, options in itertools.product((0, True, 1.5), ({}, {"download": False})):
        said = refused(partial(PromptDataset.build, "bytes", count, **options))
        assert said == f"PromptDataset.build: n_per_domain must be an int of at least 1, got {count!r}"
    said = refused(lambda: PromptDataset.build("bytes", files={"poetry": "x"}))
    assert said.endswith("files must be of code, conversation, summarization, got one of 'poetry'")


def test_files_come_first(tmp_path, questions):
    (tmp_path / "code.txt").write_text("def f():\n\ndef g():\n")
    (tmp_path / "talk.jsonl").write_text('{"prompt": "Hello"}\n{"text": "Hi"}\n\n')
    files = {"code": tmp_path / "code.txt", "conversation": tmp_path / "talk.jsonl", "summarization": questions}
    dataset = PromptDataset.build(ByteTokenizer(), 2, files=files)
    assert [prompt.raw_text for prompt in dataset.get_all()] == [
        "def f():", "def g():", "Hello", "Hi", "Compose a post.", "Write a function."
    ]  # fmt: skip
    assert dataset.sources["code"] == str(tmp_path / "code.txt")
    with pytest.raises(ValueError, match="nothing.txt: there is no such file of prompts"):
        PromptDataset.build("bytes", files={"code": tmp_path / "nothing.txt"})
    for text, message in (('{"a": 1}\n', "line 1: an object with prompt, text or turns"), ("\n", "there is no prompt")):
        (tmp_path / "talk.jsonl").write_text(text)
        assert message in refused(lambda: read_file(tmp_path / "talk.jsonl"))


def fake_datasets(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def test_data_sets_of_the_hub(monkeypatch):
    """Empty rows and long articles are passed over; no more is read than is wanted."""
    read = []

    def load(name, configuration, split, streaming):
        assert streaming and name in {entry[0] for entry in sources._DATASETS.values()}
        for number in range(1000):
            read.append((name, number))
            article = "a" * (600 if number % 2 else 300)
            yield {"prompt": f"def f{number}():", "instruction": f"Say {number}.", "article": article,
                   "input": "x" if number % 3 else ""}  # fmt: skip

    fake_datasets(monkeypatch, load)
    dataset = PromptDataset.build("bytes", 3)
    assert [prompt.raw_text for prompt in dataset.get_by_domain("code")] == ["def f0():", "def f1():", "def f2():"]
    assert [prompt.raw_text for prompt in dataset.get_by_domain("conversation")] == ["Say 0.", "Say 3.", "Say 6."]
    articles = dataset.get_by_domain("summarization")
    assert [prompt.token_count for prompt in articles] == [300 + len(sources._ASK_FOR_SUMMARY)] * 3
    assert set(dataset.sources.values()) == {"Hugging Face hub"} and len(read) == 3 + 7 + 5


def test_a_hub_that_is_not_there(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("no route\nto host")

    fake_datasets(monkeypatch, refuse)
    assert PromptDataset.build("bytes", 2).sources["code"] == "built in (no route)"
    fake_datasets(monkeypatch, lambda *_, **__: iter(()))
    assert PromptDataset.build("bytes", 2).sources["code"] == "built in (the data set has none)"
    monkeypatch.setitem(sys.modules, "datasets", None)
    dataset = PromptDataset.build("bytes", 2)
    assert "datasets" in dataset.sources["conversation"] and len(dataset) == 6


def test_questions_are_read(questions):
    first, second, _, last = read_questions(questions)
    assert first == ("conversation", "Compose a post.") and second == ("code", "Write a function.")
    assert last == ("conversation", "Why?")
    dataset = PromptDataset.build("bytes", questions=questions)
    assert repr(dataset) == "PromptDataset(4 prompts: code 1, conversation 2, summarization 1)"
    assert dataset.get_by_domain("conversation")[1].raw_text == "Why?" and dataset.sources["code"] == str(questions)
    assert len(PromptDataset.build("bytes", 1, questions=questions)) == 3


def test_lines_end_at_line_feeds_alone(tmp_path):
    """JSON lets U+2028 and its like stand in strings; editors put a byte order mark before the first line."""
    texts = ["one\u2028two", "one\u2029two", "one\x85two"]
    lines = [json.dumps({"question_id": 1, "turns": [text]}, ensure_ascii=False) for text in texts]
    (tmp_path / "question.jsonl").write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8")
    assert [text for _, text in read_questions(tmp_path / "question.jsonl")] == texts
    assert read_file(tmp_path / "question.jsonl") == texts
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "talk.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    assert read_file(tmp_path / "talk.jsonl") == texts


@pytest.mark.parametrize(
    "line",
    ['{"question_id": 1}', '{"turns": []}', '{"turns": [1]}', '{"turns": {"a": 1}}', '{"turns": null}', "[1]", "{"],
)
def test_questions_that_are_none(tmp_path, line):
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n" + line + "\n")
    said = refused(lambda: read_questions(path))
    assert said == f"{path}, line 2: an object with turns was expected, got {line}"
    path.write_text("")
    assert "there is no prompt in it" in refused(lambda: read_questions(path))


def test_the_command(tmp_path, questions, folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    output = tmp_path / "out" / "prompts.json"
    assert prompts.main(["--tokenizer", "bytes", "--output", str(output), "--file", f"code={questions}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["domain", "n", "min", "mean", "max"] and lines[1].split()[:2] == ["code", "4"]
    assert len(PromptDataset.load(output).get_by_domain("code")) == 4
    assert len(PromptDataset.load(tmp_path / "out" / "prompts_tiny.json")) == 14
    command = ["--tokenizer", str(folder), "--output", str(output), "--questions", str(questions)]
    assert prompts.main([*command, "--n-per-domain", "1"]) == 0
    assert [prompt.token_count for prompt in PromptDataset.load(output).get_all()] == [3, 3, 2]
    monkeypatch.chdir(tmp_path)
    assert prompts.main(["--tokenizer", "bytes", "--no-download"]) == 0
    assert [len(PromptDataset.load(f"data/prompts{part}.json")) for part in ("", "_tiny")] == [150, 15]
    assert prompts.main(["--tokenizer", "bytes", "--output", str(output), "--no-download", "--file", "x=y"]) == 1
    assert capsys.readouterr().err.startswith("error: PromptDataset.build: files must be of code, ")
    for count in ("0", "-1"):
        assert prompts.main([*command, "--n-per-domain", count]) == 1
        rule = "n_per_domain must be an int of at least 1"
        assert capsys.readouterr().err == f"error: PromptDataset.build: {rule}, got {count}\n"
