"""Pieces of text as tokens come, the ids that a tokenizer has, and the choice of tokenizer by folder."""

import asyncio
import importlib.util
import itertools
import json
import os
import pickle
import re
import shutil

import numpy as np
import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models import loading
from eagle_kernels.engine.models.chat_template import ChatTemplate
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.models.tokenizer import ByteTokenizer, PythonTokenizer, as_tokenizer, load_tokenizer
from eagle_kernels.engine.requests.request import StopStrings
from eagle_kernels.tools.cli import generate as generate_command
from eagle_kernels.tools.cli.main import main
from op_tests.engine import made_tokenizers as made
from op_tests.engine.made_tokenizers import BYTE_LEVEL, BYTES, WORDS, made_tokenizer
from op_tests.engine.toys import random_llama

TEXTS = ["", "def f(x):\n    return x\n", "naïve — 日本語 🦅", "a\x00b"]


@pytest.mark.parametrize("file_name", ["config.json", "tokenizer_config.json"])
def test_byte_tokenizer_is_named_by_either_config(tmp_path, file_name):
    (tmp_path / file_name).write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


@pytest.fixture
def byte_level_folder(tmp_path):
    """A folder with a byte-level BPE `tokenizer.json`, whose merges cut characters apart."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the eagle and the tree", *TEXTS], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def engine(byte_level_folder):
    """One whose text is noise in such a tokenizer's ids: ends of characters without beginnings, and the end of text."""
    target = random_llama(vocab_size=300)
    config = EAGLEConfig(topk=2, num_steps=2, temperature=1.0)
    return EAGLEInference(target, target, config, tokenizer=load_tokenizer(byte_level_folder))


PROMPT = "the eagle 🦅"


def test_text_that_holds_no_token_is_refused(engine):
    for texts in ("", ["the", ""]):
        with pytest.raises(ValueError, match="stream_text: text must hold at least one token, got ''"):
            engine.stream_text(texts, 3)
    with pytest.raises(ValueError, match="stream_text: text must be text, integer ids .* or a list of texts, got 3"):
        engine.stream_text(3, 3)
    with pytest.raises(ValueError, match="stream_text: text must hold at least one prompt"):
        engine.stream_text([], 3)


@pytest.mark.slow
def test_text_for_async_for(engine):
    """Side by side, each with the text that it has in a `for`; one that is left early ends there."""
    want = ["".join(engine.stream_text(PROMPT, 20, seeds=seed)) for seed in range(3)]

    async def read(seed):
        return "".join([piece async for piece in engine.stream_text(PROMPT, 20, seeds=seed)])

    async def leave():
        stream = engine.stream_text(PROMPT, 20, seeds=0)
        async for piece in stream:
            assert piece and want[0].startswith(piece)
            break
        stream.close()
        return stream.output().stats.finish_reasons

    async def run():
        return await asyncio.gather(*map(read, range(3)), leave())

    assert asyncio.run(run()) == [*want, ["abort"]]
    assert not engine.has_work


@pytest.mark.parametrize("name", made.decoders_of_models() if importlib.util.find_spec("tokenizers") else [])
def test_pieces_are_decode_of_the_whole(name):
    """Whatever ids come, in whatever pieces, after whatever context. Held back is what some next ids would change."""
    is_level = name.startswith("GPT-2")
    tokens = BYTE_LEVEL if is_level else [*WORDS, *BYTES]
    tokenizer, first = made_tokenizer(tokens, made.decoders_of_models()[name]), len(WORDS)
    total, eagle = tokenizer.num_ids, [first + byte for byte in "🦅".encode()]
    kinds = [
        range(total), range(18), range(total - 10, total), range(len(tokens) - 256 if not is_level else 7, len(tokens)),
    ]  # fmt: skip
    tails = [(), *((number,) for number in range(18 if is_level else len(WORDS)))]
    if is_level:
        tails += [tuple(map(BYTE_LEVEL.index, tail)) for tail in ("Ĺ¥", "Ł¦ħ", "¦ħ")]
    else:
        firsts = (0x80, 0x90, 0xA0)
        continued = [*((byte,) for byte in (*firsts, 0xFF)), *((byte, 0x80) for byte in firsts), (0x90, 0x80, 0x80)]
        tails += [[first + byte for byte in tail] for tail in (*continued, (0x80,) * 3)]

    for seed in range(60):
        random, ids = np.random.default_rng(seed), []
        for kind in random.integers(0, 5, random.integers(1, 7)):
            more = eagle if kind == 4 else random.choice(kinds[kind], random.integers(0, 6)).tolist()
            ids += [token_id % total for token_id in more]
        context, ids = ids[: (cut := int(random.integers(0, len(ids) + 1)))], ids[cut:]
        detokenizer, text, place = tokenizer.detokenizer(context), "", 0
        while place < len(ids):
            size = int(random.integers(1, 4))
            text += detokenizer.push(ids[place : place + size])
            place += size
            assert text + detokenizer.finish() == made.beyond(tokenizer, context, ids[:place]), (seed, context, ids)
            if name not in ("wav2vec 2", "looks far"):
                ends = [made.beyond(tokenizer, context, [*ids[:place], *tail]) for tail in tails]
                assert text == os.path.commonprefix(ends), (seed, context, ids)


def test_pieces_of_chains_that_change_letters():
    """As much of a context is read as any step may still change, be it of letters, digits or spaces."""
    tokens = ["a", "b", "1", "ab", "ba1", "a c", " ", "▁", "▁a", "c", "2b", "<0xC3>", "<0xA9>", "<0x62>"]
    for seed in range(1000):
        random = np.random.default_rng(seed)
        tokenizer = made_tokenizer(tokens, made.random_decoder(random))
        pool = [*range(14)] * 3 + [*range(tokenizer.num_ids)]
        for _ in range(4):
            context, ids = (random.choice(pool, size).tolist() for size in random.integers(0, 7, 2))
            detokenizer, text = tokenizer.detokenizer(context), ""
            for place in range(len(ids)):
                text += detokenizer.push(ids[place : place + 1])
                told = tokenizer._tokenizer.decoder.__getstate__(), context, ids
                assert text + detokenizer.finish() == made.beyond(tokenizer, context, ids[: place + 1]), told


@pytest.mark.parametrize("name", ["GPT-2, Qwen, Llama 3", "Llama 2, Mistral", "bytes"])
def test_what_cannot_change_goes_out_at_once(name, monkeypatch):
    """Of a thousand bytes that are no UTF-8, too; nothing is decoded twice."""
    is_level = name.startswith("GPT-2")
    if name == "bytes":
        tokenizer, broken = ByteTokenizer(), 0xFF
    else:
        tokenizer = made_tokenizer(BYTE_LEVEL if is_level else [*WORDS, *BYTES], made.decoders_of_models()[name])
        broken = BYTE_LEVEL.index("ÿ") if is_level else len(WORDS) + 0xFF
    monkeypatch.setattr(type(tokenizer), "decode", None)
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([broken]) for _ in range(1000)] == ["\N{REPLACEMENT CHARACTER}"] * 1000
    stops = StopStrings(("\ufffd\ufffd\ufffd",), tokenizer, [])
    assert [stops.push(broken) for _ in range(3)] == [False, False, True] and stops.text == ""


@pytest.fixture
def word_tokenizer(tmp_path):
    """As of Llama 2: spaces belong to the words behind them, and a text's first one is stripped."""
    tokenizers = pytest.importorskip("tokenizers")
    marks, words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))], [f"▁w{n}." for n in range(40)]
    model = tokenizers.models.Unigram([(token, -1.0) for token in [*marks, *words]], 0, byte_fallback=True)
    tokenizer, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(marks[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


FIRST_WORD = 3 + 256


@pytest.fixture
def word_engine(word_tokenizer):
    target = random_llama(vocab_size=FIRST_WORD + 40)
    with torch.no_grad():
        target.lm_head.weight[:FIRST_WORD] = 0  # words outweigh what is none
    return EAGLEInference(target, target, EAGLEConfig(topk=2, num_steps=2), tokenizer=word_tokenizer)


@pytest.mark.parametrize("are_bytes", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("prompts", [["w3. w5."], ["w3. w5.", "w1.", "w1. w2. w9."]], ids=len)
def test_the_command_tells_texts_as_they_are_decoded(prompts, is_chat, are_bytes, word_engine, monkeypatch, capsys):
    """Of answers what their tokens are alone; of other texts what they add to the prompt. Printed and as JSON."""
    tokenizer = word_engine.tokenizer
    if are_bytes:  # of which the last ones may begin a character
        with torch.no_grad():
            word_engine.target.lm_head.weight.copy_(word_engine.target.lm_head.weight.flip(0))
    tokenizer.read_chat = lambda: ChatTemplate({"default": "w7. {{ messages[0].content }}"}, {})
    monkeypatch.setattr(generate_command, "load_engine", lambda arguments: word_engine)
    command = ["generate", *prompts, "--max-new-tokens", "6", *["--chat"] * is_chat]
    assert main([*command, "--json"]) == 0
    report, texts = json.loads(capsys.readouterr().out), []
    for prompt, result in zip(prompts, report.get("requests", [report]), strict=True):
        context = tokenizer.encode(f"w7. {prompt}" if is_chat else prompt)
        assert result["prompt"] == prompt and len(result["token_ids"]) == 6
        assert result["token_ids"] == word_engine.generate(context, 6).output_ids
        ids = result["token_ids"] if is_chat else context + result["token_ids"]
        texts.append(tokenizer.decode(ids))
        assert ("" if is_chat else prompt) + result["text"] == texts[-1]
    assert main(command) == 0
    assert capsys.readouterr().out.rpartition("\n\ntokens: ")[0].removesuffix("\n") == "\n\n".join(texts)


@pytest.mark.parametrize(
    ("configs", "expected"),
    [({}, ()), ({"config.json": 2}, (2,)), ({"config.json": 2, "generation_config.json": [2, 7]}, (2, 7))],
)  # fmt: skip
def test_end_of_text_ids_come_from_the_configs(byte_level_folder, configs, expected):
    for file_name, eos_token_id in configs.items():
        (byte_level_folder / file_name).write_text(json.dumps({"eos_token_id": eos_token_id}))
    assert load_tokenizer(byte_level_folder).eos_token_ids == expected


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="there is no such folder"):
        load_tokenizer(tmp_path / "absent")


def test_text_says_why_there_is_no_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    target, draft = loading.demo_pair()
    shutil.copytree(target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text()) | {"tokenizer_class": "another"}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    (tmp_path / "target" / "tokenizer_config.json").unlink()
    (tmp_path / "target" / "tokenizer.json").write_text("{")
    engine = EAGLEInference.from_pretrained(draft, tmp_path / "target", device="cpu")
    path = re.escape(str(tmp_path / "target" / "tokenizer.json"))
    with pytest.raises(ValueError, match=f"stream_text needs the tokenizer of the target: {path} cannot be read: "):
        engine.stream_text("a")
    with pytest.raises(ValueError, match=f"needs the tokenizer of the target: {path} cannot be read: "):
        engine.tokenizer.encode("a")
    with pytest.raises(ValueError, match=f"stop strings need the tokenizer of the target: {path} cannot be read: "):
        engine.submit([1], SamplingParams(stop=("a",)))


class OfTransformers:
    """What a tokenizer of transformers that holds one of `tokenizers` has."""

    eos_token_id, special_tokens_map, chat_template = None, {}, None

    def __init__(self, backend):
        self.backend_tokenizer = backend


@pytest.mark.parametrize("wrapped", [lambda backend: backend, OfTransformers], ids=["tokenizers", "transformers"])
def test_a_tokenizer_stays_what_it_was_and_so_does_the_engine_s(wrapped):
    """Ours has neither padding nor truncation, and the caller's may go on to change."""
    backend = pytest.importorskip("tokenizers").Tokenizer.from_str(made_tokenizer(WORDS, None)._tokenizer.to_str())
    backend.enable_padding(length=7, pad_id=3)
    backend.enable_truncation(2)
    before, given = backend.to_str(), wrapped(backend)
    ours = as_tokenizer(given, 300, "x")
    ids = ours.encode("a")
    assert len(ids) == 1 and ours.decode(ids) == "a" and ours.detokenizer().push(ids) == "a"
    assert backend.to_str() == before and len(backend.encode("a").ids) == 7
    unknown = ours.encode("日本")
    backend.add_tokens(["日本"])
    assert ours.encode("日本") == unknown != backend.encode("日本").ids[:1]


class InPython:
    """What a tokenizer of transformers that is written in Python has."""

    all_special_tokens, all_special_ids, eos_token_id, special_tokens_map = (), (), None, {}
    __len__, encode, decode = (lambda self: 257), None, lambda self, ids, **_: "a" * len(ids)


@pytest.mark.parametrize("kind", ["bytes", "file", "Python"])
def test_a_tokenizer_has_the_ids_of_every_model_that_it_was_given_to(kind):
    """And its own, in whatever order the models come."""
    kinds = {
        "bytes": ByteTokenizer,
        "file": lambda: made_tokenizer([*WORDS, *BYTES][:248], None),  # 252 with the special tokens and 5 of a model
        "Python": lambda: PythonTokenizer(InPython()),
    }

    def count(read) -> int:
        """How many ids are read, of those up to 310."""
        with pytest.raises(ValueError, match="token_ids must lie in") as error:
            [read([token]) for token in range(310)]
        return int(str(error.value).rpartition(" ")[2])

    for sizes in itertools.permutations((200, 257, 260, 300)):
        tokenizer, most = kinds[kind](), 257
        for size in (0, *sizes):
            assert as_tokenizer(tokenizer, size, "x") is tokenizer
            most = max(most, size)
            assert count(tokenizer.decode) == most
            assert kind == "bytes" or count(tokenizer.detokenizer().push) == most  # others of bytes have no text


def test_a_tokenizer_goes_to_other_processes(byte_level_folder):
    """With its chat template."""
    for folder in (byte_level_folder, loading.demo_pair()[0]):
        tokenizer = load_tokenizer(folder)
        copied = pickle.loads(pickle.dumps(tokenizer))
        assert copied.encode("import os") == tokenizer.encode("import os")
        assert copied.decode(tokenizer.encode("import os")) == "import os"
        assert (copied.chat is None) == (tokenizer.chat is None)
