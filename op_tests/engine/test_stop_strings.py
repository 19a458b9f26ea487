"""Stop strings: where a text ends, and what a stream may show of it, against a search in all texts that there were."""

import importlib.util
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from eagle_kernels import SamplingParams
from eagle_kernels.engine.models.tokenizer import ByteTokenizer, PythonTokenizer
from eagle_kernels.engine.requests.request import Request, StopStrings
from eagle_kernels.engine.serve.stream import TextStream
from op_tests.engine import made_tokenizers as made
from op_tests.engine.made_tokenizers import BYTE_LEVEL, BYTES, SPECIAL, WORDS, made_tokenizer


class InPython:
    """A tokenizer as those of transformers that are written in Python: bytes, special tokens, and no first space."""

    all_special_tokens, all_special_ids, eos_token_id, special_tokens_map = SPECIAL, [0, 1, 2], None, {}

    def __len__(self):
        return 3 + 256

    def encode(self, text, **_):
        return [3 + byte for byte in text.encode()]

    def decode(self, token_ids, **_):
        return (
            bytes(token_id - 3 for token_id in token_ids if token_id > 2).decode("utf-8", "replace").removeprefix(" ")
        )


def tokenizer_and_ids(name: str) -> tuple:
    """A tokenizer, and ids of which texts are made: of letters, spaces, parts of characters, and special tokens."""
    some = "é🦅".encode()
    if name == "bytes":
        return ByteTokenizer(), [*b"aabb ", *some, 0xFF, 256, 256]
    if name == "in Python":
        return PythonTokenizer(InPython()), [3 + byte for byte in (*b"aabb ", *some, 0xFF)] + [0, 1, 2, 2]
    if name.startswith("GPT-2"):
        tokens, ids = BYTE_LEVEL, [*map(BYTE_LEVEL.index, ("a", "a", "b", "b", "Ġ", "æ", "Ĺ", "¥", "ðŁ", "¦ħ", "ÿ"))]
    else:
        tokens, ids = [*WORDS, *BYTES], [*map(WORDS.index, ("a", "b", "ab", "▁", "▁a", "é", "b</w>c"))]
        ids += [len(WORDS) + byte for byte in (*some, 0xFF)]
    tokenizer = made_tokenizer(tokens, made.decoders_of_models()[name])
    specials = [token for token, special in tokenizer.special_tokens.items() if special in SPECIAL]
    return tokenizer, ids + 2 * specials


class Search:
    """Searches everything anew after each id.

    text, whole  what is certain of the text so far, and all of it if it ended here
    place        where the text ends, once a string is complete
    num_certain  characters that no string can begin in any more which is not complete yet
    """

    def __init__(self, tokenizer, context: list[int], strings: tuple[str, ...]):
        self._tokenizer, self._context, self._strings = tokenizer, context, strings
        self._detokenizer = tokenizer.detokenizer(context)
        self._ids, self._named, self.text, self.whole, self.place = [], [], "", "", None

    def push(self, token: int) -> None:
        self._ids.append(token)
        self.text += self._detokenizer.push([token])
        self.whole = made.beyond(self._tokenizer, self._context, self._ids)
        assert self.whole.startswith(self.text)
        name = self._tokenizer.special_tokens.get(token)
        if name is not None and any(name in string for string in self._strings):
            self._named.append((len(self.whole), name))
            self.place = self._first(self.text, self.whole)
        else:
            self.place = self._first(self.text, self.text)

    def finish(self) -> None:
        self.place = self._first(self.whole, self.whole)

    def _units(self, text: str) -> list[tuple[str, int]]:
        """Characters and names of special tokens, each with its place in the text without names."""
        units = []
        for place in range(len(text) + 1):
            units += [(name, place) for at, name in self._named if at == place]
            units += [(text[place], place)] if place < len(text) else []
        return units

    def _first(self, text: str, whole: str) -> int | None:
        places = [text.index(string) for string in self._strings if string in text]
        units = self._units(whole) if self._named else []
        for first, last in itertools.combinations(range(len(units) + 1), 2):
            part = [unit for unit, _ in units[first:last]]
            if any(len(unit) > 1 for unit in part) and "".join(part) in self._strings:
                places.append(units[first][1])
        return min(places, default=None)

    @property
    def num_certain(self) -> int:
        places, units = [len(self.text)], self._units(self.text)
        rests = [(self.text[place:], place) for place in range(len(self.text))]
        rests += [("".join(unit for unit, _ in units[first:]), place) for first, (_, place) in enumerate(units)]
        return min(places + [place for rest, place in rests if any(s.startswith(rest) for s in self._strings)])


def random_strings(random, spelled: str) -> tuple[str, ...]:
    """Strings of any length: of the text and its special tokens as they are spelled, and others."""
    parts, strings = ["a", "b", " ", "é", "\ufffd", "<", *SPECIAL], []
    for _ in range(random.integers(1, 4)):
        begin, size = random.integers(0, len(spelled) + 1), random.choice((1, 2, 3, 5, 12))
        strings.append(spelled[begin : begin + size] * int(random.random() < 0.7))
        strings[-1] += "".join(random.choice(parts, random.integers(0, 3)))
    return tuple(string for string in strings if string) or ("a",)


class Tokens:
    """Stands for the tokens of one request, which has these steps: how many tokens there are then, and which text."""

    is_single = True

    def __init__(self, request: Request, ids: list[int], steps: list[tuple[int, str]]):
        self.requests, self._ids, self._steps, self.shown = [request], ids, steps, ""

    def __iter__(self):
        (request,), begin = self.requests, 0
        for end, text in self._steps:
            is_last = end == self._steps[-1][0]
            request.push(self._ids[begin : end + 3 * is_last])  # a step may bring more than the text takes
            yield from request.collect()
            assert self.shown == text, f"{request.params.stop} of {self._ids}: {self.shown!r} after {end}, not {text!r}"
            begin = end


MODELS = ["GPT-2, Qwen, Llama 3", "Llama 2, Mistral", "Gemma", "BERT", "GPT-1", "none", "strips the whole"]
SESSION = SimpleNamespace(lock=SimpleNamespace(refuse=lambda caller: None))


@pytest.mark.parametrize("name", ["bytes", "in Python", *(MODELS if importlib.util.find_spec("tokenizers") else ())])
def test_texts_and_streams_end_where_a_search_says(name):
    """The first token that completes a string ends the text, before the earliest place of all that are complete.

    A stream shows what no later token can take back, all of it, after each step; and in the end exactly the text.
    """
    tokenizer, pool = tokenizer_and_ids(name)
    random, reasons = np.random.default_rng(len(name)), []
    for _ in range(120):
        ids, context = random.choice(pool, 12).tolist(), random.choice(pool, random.integers(0, 4)).tolist()
        if random.random() < 0.2:  # more of them than a tokenizer in Python looks back
            some, place = (ids, 4) if random.random() < 0.5 else (context, len(context))
            some[place:place] = 9 * random.choice([*tokenizer.special_tokens], 1).tolist()
        spelled = [tokenizer.special_tokens.get(token) or tokenizer.decode([pool[0], token])[1:] for token in ids]
        strings = random_strings(random, "".join(spelled)) if random.random() < 0.9 else ()
        ends = frozenset(random.choice(pool, 1).tolist()) if random.random() < 0.2 else frozenset()
        search, steps, reason, begin = Search(tokenizer, context, strings), [], None, 0
        while reason is None:
            for token in ids[begin : begin + int(random.integers(1, 5))]:
                search.push(token)
                begin += 1
                is_stopped = search.place is not None
                reason = "eos" if token in ends else "stop" if is_stopped else "length" if begin == len(ids) else None
                if reason is not None:
                    break
            if reason is not None and not is_stopped:
                search.finish()
                reason = reason if search.place is None else "stop"
            text = search.text[: search.num_certain] if reason is None else search.whole[: search.place]
            steps.append((begin, text))
        stops = StopStrings(strings, tokenizer, context) if strings else None
        request = Request(
            0, context, SamplingParams(max_new_tokens=len(ids), stop=strings), 0, ends, stop_strings=stops
        )
        tokens = Tokens(request, ids, steps)
        for piece in TextStream(tokens, tokenizer, SESSION):
            tokens.shown += piece
        told = ids, context, strings, ends
        assert (request.finish_reason, request.output_ids) == (reason, ids[:begin]), told
        assert tokens.shown == text and request.text == (text if strings else None), told
        reasons.append(reason)
    assert min(map(reasons.count, ("eos", "stop", "length"))) > 5


@pytest.mark.parametrize("string", ["s><s>", "><s>s", "<s><s>"])
def test_letters_that_are_those_of_special_tokens(string):
    """A string that begins or ends inside a name is not there; one that begins behind may be."""
    tokenizer, num_found = PythonTokenizer(InPython()), 0
    for ids in itertools.product((0, 3 + ord("s"), 3 + ord(">")), repeat=5):
        search, stops = Search(tokenizer, [], (string,)), StopStrings((string,), tokenizer, [])
        for token in ids:
            search.push(token)
            assert stops.push(token) == (search.place is not None), ids
            if search.place is not None:
                break
            assert stops.num_certain == search.num_certain
        num_found += search.place is not None
        assert stops.text == search.whole[: search.place], ids
    assert 0 < num_found < 243


@pytest.mark.parametrize(
    ("before", "stop", "text"),
    [
        ("🦅".encode(), "<|im_end|>", "🦅"),  # whole, but another byte could have broken it
        ("🦅".encode(), "🦅<|im_end|>", ""),
        (b"\xe6\x97", "<|im_end|>", "\ufffd" * 2),
        (b"b\xff", "\ufffd<|im_end|>", "b"),
    ],
)
def test_a_special_token_ends_what_is_held_back(before, stop, text):
    tokenizer = made_tokenizer([*WORDS, *BYTES], made.decoders_of_models()["Llama 2, Mistral"])
    stops = StopStrings((stop,), tokenizer, [])
    ids = [WORDS.index("b") if byte == ord("b") else len(WORDS) + byte for byte in before]
    assert [stops.push(token_id) for token_id in ids] == [False] * len(ids)
    assert stops.push(*tokenizer.encode("<|im_end|>")) and stops.text == text
