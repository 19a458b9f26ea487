"""What `train-head` reads: every format, its mask, its windows and prompts, and refusals by file and line."""

import json

import pytest

from bench.lab.training import chat, head_data
from eagle_kernels.engine.models.tokenizer import ByteTokenizer, load_tokenizer

CONVERSATION = [("human", "Hi a"), ("gpt", " a"), ("human", "assistant?"), ("gpt", "yes: é")]


def read(path, window=30, needs_answers=True) -> list[head_data.Example]:
    return head_data.read_examples([path], ByteTokenizer(), chat.PlainFormat(), window, needs_answers=needs_answers)


def prompts_of(example) -> list[bytes]:
    return [bytes(prompt) for prompt in head_data.prompts_of(example, ByteTokenizer(), chat.PlainFormat(), 9)]


@pytest.mark.parametrize(
    ("record", "text", "learnt"),
    [
        ({"text": "plain"}, "plain", "plain"),
        ({"prompt": "1+1=", "response": " 2"}, "1+1= 2", " 2"),
        ({"conversations": [{"from": role, "value": text} for role, text in CONVERSATION]},
         "user:\nHi a\nassistant:\n a\nuser:\nassistant?\nassistant:\nyes: é", " a\nyes: é"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
         "user:\nx\nassistant:\ny", "y"),
    ],
)  # fmt: skip
def test_formats_and_masks(tmp_path, record, text, learnt):
    """Of byte tokens, by the plain format; an end of text is learnt after each."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n\n" + json.dumps({"text": "other"}) + "\n")
    example = read(path, 99)[0]
    tokens = example.tokens.tolist()
    assert tokens == [*text.encode(), 256]
    after = [token for token, is_learnt in zip(tokens[1:], example.is_learnt.tolist()) if is_learnt]
    first = b"" if "text" not in record else learnt[:1].encode()
    assert first + bytes(after[:-1]) == learnt.encode() and after[-1] == 256


def test_windows_and_prompts(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("0123456789" * 2)
    examples = read(path, 10)
    # a lone end of text is nothing to learn from
    assert [bytes(example.tokens.tolist()) for example in examples] == [b"0123456789"] * 2
    assert prompts_of(examples[0]) == [b"01234"]
    path = tmp_path / "data.jsonl"
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b" * 30), ("user", "c"))]
    path.write_text(json.dumps({"messages": turns}))
    first = b"user:\na\nassistant:\n"
    prompts = [prompts_of(window) for window in read(path, needs_answers=False)]
    assert prompts == [[first, first + b"b" * 30 + b"\nuser:\nc\nassistant:\n"], []]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"body": "x"}', "needs one of text, prompt, conversations or messages, has none"),
        ('{"text": "x", "prompt": "y"}', "has text and prompt"),
        ('{"text": " "}', "text must be a string that is not blank"),
        ('{"prompt": "x", "response": 3}', "response must be a string"),
        ('{"prompt": "x"}', "there is no answer to learn"),
        ('{"conversations": []}', "conversations must be a list of objects"),
        ('{"conversations": [{"from": "tool", "value": "x"}]}', "role must be one of .* got 'tool'"),
        ('{"conversations": [{"from": ["gpt"], "value": "x"}]}', r"role must be one of .* got \['gpt'\]"),
        ('{"conversations": [{"from": "gpt", "value": "x"}]}', "must not begin with an answer"),
        ('{"conversations": [{"from": "human"}]}', "value must be a string"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, complaint):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"data.jsonl:2: .*{complaint}"):
        read(path)


def test_bad_files_are_named(tmp_path):
    for name, content, message in (
        ("data.txt", b"one\ntwo \xff\n", "data.txt:2: not UTF-8"),
        ("data.csv", b"short", "data.csv: data files must end in .txt or .jsonl"),
        ("data.txt", b"short", "1 examples of up to 30 tokens"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


def test_held_out_examples_are_nowhere_else():
    examples = [head_data.learn_answer([1, index % 7], [2, 3]) for index in range(70)]
    train, held_out = head_data.split_held_out(examples, 0.2)
    assert len(held_out) == 10 and len(train) == 60
    assert not {example.digest for example in train} & {example.digest for example in held_out}
    with pytest.raises(ValueError, match="all examples of the data are equal"):
        head_data.split_held_out(examples[:1] * 3, 0.5)


def test_the_chat_template_of_the_target(tmp_path):
    """Marks of its own around every turn, trimmed texts: the mask is on the answer and the mark that ends it."""
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<s>", "<u>", "<a>", "<end>", "hello", "there", "yes", "no", "?"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(9))), unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "<s>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content | trim }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 3}))
    form, name = chat.chat_format_of(tmp_path)
    assert name == "the target's chat template"
    turns = [chat.Turn("prompt", "hello there"), chat.Turn("response", " yes no ")]
    ids, is_answer = chat.encode_turns(turns, form, load_tokenizer(tmp_path))
    assert ids == [0, 1, 4, 5, 3, 2, 6, 7, 3]
    assert is_answer == [False] * 6 + [True] * 3
    assert chat.encode_prompt(turns[:1], form, load_tokenizer(tmp_path)) == [0, 1, 4, 5, 3, 2]
    with pytest.raises(ValueError, match="the chat template refuses this conversation: no system"):
        chat.encode_turns([chat.Turn("system", "x"), *turns], form, load_tokenizer(tmp_path))
