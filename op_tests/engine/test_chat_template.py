"""Conversations as prompts: templates of folders, tokenizers of other packages, and what transformers makes of both."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams  # noqa: E402
from eagle_kernels.engine.models.chat_template import ChatTemplate  # noqa: E402
from eagle_kernels.engine.models.protocol import ModelError  # noqa: E402
from eagle_kernels.engine.models.tokenizer import ByteTokenizer, load_tokenizer  # noqa: E402
from op_tests.engine.toys import random_llama  # noqa: E402

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools\nhere') }}{% endif %}<|im_start|>{{ m.role }}: "
    "{% generation %}{{ m.content | trim }}{% endgeneration %}{{ m | tojson if think else '' }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " the eagle 🦅 <|im_end|> "}]
USER = TALK[1:]


def backend():
    """Byte-level BPE, which puts the mark of the beginning before every text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    marks = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the eagle and the tree"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(5)  # as some published files have it
    tokenizer.enable_padding(length=64)
    return tokenizer


def folder_with(path: Path, chat_template: object = None, jinja: str | None = None) -> Path:
    backend().save(str(path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": chat_template}))
    (path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


def engine_with(tokenizer) -> EAGLEInference:
    target = random_llama(vocab_size=300)
    return EAGLEInference(target, target, EAGLEConfig(topk=2, num_steps=2), tokenizer=tokenizer)


def fast(**options):
    transformers = pytest.importorskip("transformers")
    marks = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend(), **marks, **options)


def in_python(**options):
    """A tokenizer of transformers that is written in Python."""
    return pytest.importorskip("transformers").ByT5Tokenizer(extra_ids=0, **options)


NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]


@pytest.mark.parametrize("where", ["config", "named", "file", "object", "transformers' folder"])
def test_ids_are_those_of_transformers(tmp_path, where):
    """Wherever the template is; the mark of the beginning stands once."""
    judge = fast(chat_template=TEMPLATE)
    if where == "transformers' folder":
        judge.save_pretrained(tmp_path)
        tokenizer = tmp_path
    elif where == "object":
        tokenizer = judge
    else:
        options = {"config": {"chat_template": TEMPLATE}, "named": {"chat_template": NAMED}}
        tokenizer = folder_with(tmp_path, **options.get(where, {"chat_template": "other", "jinja": TEMPLATE}))
    engine = engine_with(tokenizer)
    for options in ({}, {"add_generation_prompt": False}, {"think": [1, "<é>"]}):
        expected = judge.apply_chat_template(TALK, **{"add_generation_prompt": True} | options)["input_ids"]
        assert engine.encode_chat(TALK, **options) == expected and expected.count(0) == 1
    assert engine.encode_chat([TALK, USER]) == [engine.encode_chat(TALK), engine.encode_chat(USER)]
    if where == "named":
        assert engine.tokenizer.decode(engine.encode_chat(USER, tools=["x"])) == "['x']"


def test_of_files_that_differ_the_one_of_transformers_counts(tmp_path):
    """Of special tokens and templates that several files of a folder name, or that only one of them does."""
    transformers = pytest.importorskip("transformers")
    random, marks = np.random.default_rng(3), ("bos_token", "eos_token", "sep_token", "own_token")
    source = "|".join(f"{{{{ {name} }}}}" for name in marks) + "{{ messages[0].content }}{{ tools }}"

    def maybe(share: float, values: dict) -> dict:
        return {name: value for name, value in values.items() if random.random() < share}

    def some_marks() -> dict:
        values = ["<s>", "<|im_start|>", "<|im_end|>", None]
        return maybe(0.7, {name: values[random.integers(len(values))] for name in marks})

    def some_extra() -> dict:
        return maybe(0.3, {"extra_special_tokens": {"own_token": ["<s>", "<|im_end|>"][random.integers(2)]}})

    for number in range(150):
        folder = tmp_path / str(number)
        (folder / "additional_chat_templates").mkdir(parents=True)
        backend().save(str(folder / "tokenizer.json"))
        named = [{"name": name, "template": f"{name} {source}"} for name in ("default", "tool_use")]
        config = some_marks() | some_extra() | {"chat_template": [source, named][random.integers(2)]}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"} | maybe(0.3, {"added_tokens_decoder": {}})
        files = {"tokenizer_config.json": json.dumps(config), "config.json": json.dumps({"vocab_size": 300})}
        files |= maybe(0.7, {"special_tokens_map.json": json.dumps(some_marks() | some_extra())})
        files |= maybe(0.3, {"chat_template.jinja": "file " + source})
        files |= maybe(0.2, {"additional_chat_templates/tool_use.jinja": "more " + source})
        for name, text in files.items():
            (folder / name).write_text(text)
        judge, chat = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder).chat
        for tools in (None, [], [{"name": "é"}]):
            with contextlib.suppress(ValueError):  # it takes a template only by its name, of which there may be another
                wanted = judge.apply_chat_template(USER, tools=tools, tokenize=False)
                assert chat.write(USER, add_generation_prompt=False, tools=tools) == wanted, files


@pytest.mark.parametrize(
    ("config", "older", "expected"),
    [
        ({"bos_token": "<s>"}, {}, "<s>||"),
        ({"bos_token": {"content": "<s>"}}, {}, "<s>||"),
        ({"bos_token": None}, {"bos_token": "<s>"}, "<s>||"),
        ({"bos_token": "<s>"}, {"bos_token": "a", "eos_token": "b"}, "a|b|"),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "a", "eos_token": "b"}, "<s>||"),
        ({"own_token": "<s>"}, {"own_token": "a"}, "||<s>"),
        ({}, {"own_token": "a"}, "||a"),
        ({"own_token": "<s>", "extra_special_tokens": {"own_token": "c"}}, {"own_token": "a"}, "||c"),
        ({"own_token": "<s>", "extra_special_tokens": {"own_token": "c"}}, {"extra_special_tokens": {"own_token": "d"}},
         "||d"),
        ({"eos_token": "<s>", "extra_special_tokens": {"eos_token": "c"}}, {"eos_token": "b"}, "|b|"),
    ],
)  # fmt: skip
def test_of_special_tokens_the_file_that_counts_is_read(tmp_path, config, older, expected):
    """special_tokens_map.json beats tokenizer_config.json for the standard names, if an older version wrote both."""
    source = "{{ bos_token }}|{{ eos_token }}|{{ own_token }}"
    files = {"tokenizer_config": config | {"chat_template": source}, "config": {"vocab_size": 300}}
    for name, values in (files | {"special_tokens_map": older}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    backend().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).chat.write(USER, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "default: None, None, "),
        ({"tools": None}, "default: None, None, "),
        ({"tools": []}, "tool_use: [], None, "),
        ({"tools": ["x"]}, "tool_use: ['x'], None, "),
        ({"documents": None}, "default: None, None, "),
        ({"documents": []}, "default: None, [], "),
        ({"documents": ["x"]}, "default: None, ['x'], "),
        ({"think": None}, "default: None, None, None"),
        ({"think": []}, "default: None, None, []"),
        ({"unheard_of": None}, "default: None, None, "),
        ({"tools": None, "documents": ["x"], "think": 1}, "default: None, ['x'], 1"),
        ({"tools": ["x"], "documents": None, "think": None}, "tool_use: ['x'], None, None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("names", [("default", "tool_use"), ("tool_use", "default"), ("default", "rag"), ("any",)])
def test_tools_alone_choose_the_template_and_only_if_they_are_given(names, variables, text):
    """Where there is one for tools; a template sees None for tools and documents that nobody gave."""
    sources = {name: name + ": {{ tools }}, {{ documents }}, {{ think }}" for name in names}
    wanted, _, rest = text.partition(":")
    wanted = names[0] if len(names) == 1 else wanted if wanted in names else "default"
    written = ChatTemplate(sources, {}).write(USER, add_generation_prompt=False, **variables)
    assert written == f"{wanted}:{rest}"


@pytest.mark.parametrize("options", [{}, {"ensure_ascii": True}, {"ensure_ascii": False}, {"indent": 2},
                                     {"separators": (",", ":")}, {"sort_keys": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("value", [{"z": "Zürich 🦅 <é> & 'it'", "a": [1, 2.5, None, True]}, "ü", "", 0, None, [], {}])
def test_json_in_a_prompt_is_that_of_python(value, options):
    """Letters outside of ASCII stay as they are and HTML is none, unless the template asks for something else."""
    given = ", ".join(f"{name}={option!r}" for name, option in options.items())
    template = ChatTemplate({"default": f"{{{{ think | tojson({given}) }}}}"}, {})
    written = template.write(USER, add_generation_prompt=False, think=value)
    assert written == json.dumps(value, **{"ensure_ascii": False} | options)


def test_bytes_have_templates_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|endoftext|>é")
    assert load_tokenizer(tmp_path).encode_chat(USER, True) == [*USER[0]["content"].encode(), 256, *"é".encode()]


@pytest.mark.parametrize("kind", ["BatchEncoding", "dict of lists", "tensors", "arrays"])
def test_what_transformers_returns_is_a_prompt(kind):
    """Padding is none of it, on either side."""
    tokenizer = fast(chat_template=TEMPLATE)
    engine = engine_with(tokenizer)
    ids, short = engine.encode_chat(TALK), engine.encode_chat(USER)
    options = {"add_generation_prompt": True, "return_dict": True}
    options |= {"return_tensors": {"tensors": "pt", "arrays": "np"}[kind]} if kind in ("tensors", "arrays") else {}
    one, two = (tokenizer.apply_chat_template(each, **options, padding=True) for each in (TALK, [TALK, USER]))
    if kind == "dict of lists":
        one, two = dict(one), dict(two)
    has_axis = kind in ("tensors", "arrays")
    expected = engine.generate([ids, short], 5).output_ids
    assert engine.generate(one, 5).output_ids == (expected[:1] if has_axis else expected[0])
    assert engine.generate(two, 5).output_ids == expected
    assert [event.token_id for event in engine.stream(one, 5)] == expected[0]
    request = engine.submit(one, SamplingParams(max_new_tokens=5))
    engine.collect()
    assert request.output_ids == expected[0]
    with pytest.raises(ValueError, match="submit: prompt must be one prompt, .* got a batch of 2"):
        engine.submit(two)
    for mask in ([[1]], [1, 1], [[1, 1]] * 2, 1):
        with pytest.raises(ValueError, match="generate: input_ids: attention_mask must have the shape of input_ids"):
            engine.generate({"input_ids": [[1, 2]], "attention_mask": mask})
    for wrong in ([[1], 2], "text", [["a"]], [[]]):
        with pytest.raises(ValueError, match="^generate: "):
            engine.generate({"input_ids": wrong, "attention_mask": [[1]]})


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("Hello", {}, "messages must be a list of dicts with role and content, got 'Hello'"),
        (USER[0], {}, "messages must be a list of dicts with role and content, got {'role': 'user', "),
        ([], {}, "messages must hold at least one message, got []"),
        ([USER, []], {}, "messages must hold at least one message, got []"),
        (["Hello"], {}, "messages must be a list of dicts with role and content, but message 0 is 'Hello'"),
        ([*USER, {"content": "x"}], {}, "role of message 1 must be a text, got None"),
        ([{"role": "user"}], {}, "content of message 0 must be a text or a list of parts (dicts), got None"),
        ([{"role": "user", "content": 7}], {}, "content of message 0 must be a text or a list of parts (dicts), got 7"),
        (USER, {"add_generation_prompt": 1}, "add_generation_prompt must be True or False, got 1"),
        (USER, {"thinks": 1}, "the chat template has no variable thinks; those it has: think"),
        ([{"role": "tool", "content": ""}], {}, "the chat template refuses this conversation: no tools"),
        ([{"role": "u", "content": "\ud800"}], {},
         "content of message 0 must be UTF-8, its character 0 is '\\ud800', half of"),
    ],
)  # fmt: skip
def test_bad_conversations(tmp_path, messages, options, message):
    engine = engine_with(folder_with(tmp_path, TEMPLATE))
    with pytest.raises(ValueError, match="^" + re.escape(f"encode_chat: {message}")) as told:
        engine.encode_chat(messages, **options)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "encode_chat: the model has no chat template, neither chat_template in tokenizer_config.json nor "),
        ({"chat_template": "{% for"}, "encode_chat: the chat template cannot be read: line 1: "),
        ({"chat_template": 3}, "chat_template must be a text, or a list of named templates, got 3"),
        ({"chat_template": [{"name": "a", "template": "b"}] + NAMED[1:]},
         "has chat templates ['a', 'tool_use'], of which "),
        ({"chat_template": " {{ x }}"}, ""),
        ({"chat_template": "{{ x }}"}, "encode_chat: the chat template writes nothing for this conversation"),
    ],
)  # fmt: skip
def test_bad_templates(tmp_path, options, message):
    engine = engine_with(folder_with(tmp_path, **options))
    assert engine.tokenizer.encode("the") == [0, *backend().encode("the").ids[1:2]]  # which needs no template
    if message:
        with pytest.raises(ValueError, match=re.escape(message)):
            engine.encode_chat(USER)
    with pytest.raises(ValueError, match="encode_chat needs the tokenizer of the target: it was not given"):
        engine_with(None).encode_chat(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ strftime_now.__globals__ }}",
        "{{ raise_exception.__closure__ }}",
        "{{ ('%s' | attr('format')).__self__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append('more') }}",
        "{% include 'config.json' %}",
        "{% import 'os' as os %}{{ os.listdir('.') }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(tmp_path, source):
    """Neither Python's classes, nor files, nor what the caller holds."""
    messages = [dict(message) for message in USER]
    with pytest.raises(ValueError, match="the chat template (refuses|writes nothing for) this conversation"):
        engine_with(folder_with(tmp_path, source)).encode_chat(messages)
    assert messages == USER


def test_jinja2_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    engine = engine_with(folder_with(tmp_path, TEMPLATE + "{# another #}"))
    with pytest.raises(ModelError, match="^encode_chat: a chat template needs jinja2: pip install jinja2$"):
        engine.encode_chat(USER)


@pytest.mark.parametrize("make", [fast, in_python, backend])
def test_tokenizers_of_other_packages_are_wrapped(make):
    """For text, pieces of it, and stop strings; their settings stay those that they had when they were given."""
    given, text, options = make(), "the eagle 🦅", {"temperature": 1.0, "seeds": 1}
    engine = engine_with(given)
    tokenizer = engine.tokenizer
    if make is not in_python:
        given.add_tokens(["eagle"])
    ids = tokenizer.encode(text)
    assert ids == (given.encode(text) if make is in_python else [0, *fast().encode(text, add_special_tokens=False)])
    size = 259 if make is in_python else backend().get_vocab_size()
    assert tokenizer.decode([*ids, 299]) == text and tokenizer.vocab_size == size
    assert tokenizer.eos_token_ids == {fast: (2,), in_python: (1,), backend: ()}[make]
    output_ids = engine.generate(ids, 20, **options).output_ids
    whole = "".join(engine.stream_text(text, 20, **options))
    assert whole == tokenizer.decode(output_ids)
    stop = whole[3:5]
    assert "".join(engine.stream_text(text, 20, stop=(stop,), **options)) == whole[: whole.index(stop)]
    for seed in range(200):
        random = np.random.default_rng(seed)
        some = random.integers(0, 300, random.integers(0, 20)).tolist() + ids * (seed % 2)
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push([token_id]) for token_id in some]
        assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(some)


def test_a_tokenizer_in_python_goes_on_after_a_prompt():
    """A thousand bytes that are no text leave a few to be decoded again."""
    tokenizer = engine_with(in_python()).tokenizer
    detokenizer = tokenizer.detokenizer(tokenizer.encode("aé"))
    pieces = [detokenizer.push([token_id]) for token_id in [*[3 + 0xFF] * 1000, *tokenizer.encode("日b")]]
    assert "".join(pieces) == "日b" and len(detokenizer._pending) < 8


class Partial:
    """Half a tokenizer."""

    encode = decode = vocab_size = None


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        (Partial(), "detokenizer, eos_token_ids, got <"),
        (ByteTokenizer, "encode, decode, detokenizer, vocab_size, eos_token_ids, got <class"),
        ({"a": 1}, "encode, decode, detokenizer, vocab_size, eos_token_ids, got {'a': 1}"),
    ],
    ids=["partial", "class", "dict"],
)
def test_what_is_no_tokenizer_is_refused_where_it_is_given(given, lacks):
    rule = "EAGLEInference: tokenizer must be a folder, a tokenizer of transformers or tokenizers, or have "
    with pytest.raises(ValueError, match="^" + re.escape(rule + lacks)):
        engine_with(given)


def test_from_pretrained_takes_a_tokenizer(tmp_path):
    from eagle_kernels.engine.models.loading import demo_pair

    target, draft = demo_pair()
    for given in (folder_with(tmp_path, TEMPLATE), backend(), load_tokenizer(tmp_path)):
        engine = EAGLEInference.from_pretrained(draft, target, device="cpu", tokenizer=given)
        assert engine.tokenizer.encode("the") == [0, *backend().encode("the").ids[1:2]]
        assert engine.tokenizer.decode([engine.target.vocab_size - 1]) is not None  # ids of the model without text
    with pytest.raises(ValueError, match="tokenizer must be a folder"):
        EAGLEInference.from_pretrained(draft, target, device="cpu", tokenizer=7)


def test_special_tokens_end_requests(tmp_path):
    """By name, alone or with text after it; in streams nothing of them is shown."""
    engine = engine_with(folder_with(tmp_path))
    with torch.no_grad():
        engine.target.lm_head.weight[:97] *= 2  # special tokens, ASCII
    tokenizer, ids, asked = engine.tokenizer, engine.tokenizer.encode("the"), {"temperature": 1.0, "max_new_tokens": 60}
    requests = []
    for seed, output_ids in enumerate(engine.generate(ids, 60, n=8, temperature=1.0, seeds=0).output_ids):
        for token, name in {1: "<|im_start|>", 2: "<|im_end|>"}.items():
            place = output_ids.index(token) if token in output_ids[:-1] else None
            if place is not None:
                after = tokenizer.decode(output_ids[place + 1 : place + 2])
                is_mixed = bool(after) and "\ufffd" not in after
                stop, count = (name + after, 2) if is_mixed else (name, 1)
                request = engine.submit(ids, SamplingParams(stop=(stop, "never ever"), seed=seed, **asked))
                requests.append((request, output_ids[: place + count], tokenizer.decode(output_ids[:place]), is_mixed))
    engine.collect()
    for request, output_ids, text, _ in requests:
        assert (request.finish_reason, request.output_ids, request.text) == ("stop", output_ids, text)
    assert len({is_mixed for *_, is_mixed in requests}) == 2
    for request, _, text, _ in requests[:3]:
        stream = engine.stream_text("the", 60, temperature=1.0, seeds=request.seed, stop=request.params.stop)
        assert "".join(stream) == text and stream.output().stats.finish_reasons == ["stop"]
