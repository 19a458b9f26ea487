"""Tokenizers of a few tokens, with the decoders that models have."""

import os

import pytest

from eagle_kernels.engine.models.tokenizer import FileTokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "▁", "▁▁", "▁a", "a", "b", "ab", "aab", "é", "🦅", " x", "x ", "##ing", ".", "'s", "foo</w>", "b</w>c", "<0x4",
    "<0x+F>",
]  # fmt: skip
BYTE_LEVEL = [*"abéÃ©日ÿ", "Ġ", "Ġthe", "æ", "Ĺ", "¥", "ð", "Ł", "¦", "ħ", "ðŁ", "¦ħ", "æĹ¥"]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def made_tokenizer(tokens: list[str], decoder) -> FileTokenizer:
    """One whose ids are these tokens, three special ones, one that was added, and five of the model alone."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["日本 x"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return FileTokenizer(tokenizer, (), tokenizer.get_vocab_size() + 5)


def decoders_of_models() -> dict:
    decoders, regex = pytest.importorskip("tokenizers").decoders, pytest.importorskip("tokenizers").Regex
    spaces, fallback, fuse, several = (
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Sequence,
    )  # fmt: skip
    return {
        "GPT-2, Qwen, Llama 3": decoders.ByteLevel(),
        "Llama 2, Mistral": several([spaces, fallback, fuse, decoders.Strip(" ", 1, 0)]),
        "Gemma": several([spaces, fallback, fuse]),
        "T5": decoders.Metaspace(),
        "prepends never": several([fallback, decoders.Metaspace(prepend_scheme="never")]),
        "prepends first": decoders.Metaspace(prepend_scheme="first"),
        "BERT": decoders.WordPiece(),
        "GPT-1": decoders.BPEDecoder(),
        "wav2vec 2": decoders.CTC(),
        "none": None,
        "replaces in the whole": several([fuse, decoders.Replace("aab", "X"), decoders.Replace("ba", "")]),
        "replaces by pattern": several([decoders.Replace(regex("[ab]+"), "<>"), several([fuse])]),
        "strips the whole": several([fuse, decoders.Strip("▁", 2, 0)]),
        "strips tokens": several([decoders.Strip("▁", 1, 0), fallback]),
        "looks far": several([fuse, decoders.Replace(regex("ab*a"), "-"), decoders.Strip("-", 1, 0)]),
    }


def random_decoder(random):
    """A chain of steps that replace and strip letters, digits and spaces, in tokens and in the joined text."""
    decoders = pytest.importorskip("tokenizers").decoders

    def word(least: int) -> str:
        return "".join(random.choice([*"ab1 ▁"], random.integers(least, 4)))

    def step():
        if random.random() < 0.5:
            return decoders.Replace(word(1), word(0))
        return decoders.Strip(random.choice([*"ab1 ▁"]).item(), int(random.integers(1, 4)), 0)

    steps = [step() for _ in range(random.integers(0, 3))] + [decoders.ByteFallback()] * random.integers(0, 2)
    if random.random() < 0.8:
        steps += [decoders.Fuse(), *(step() for _ in range(random.integers(0, 3)))]
    return decoders.Sequence(steps)


def beyond(tokenizer, context: list[int], ids: list[int]) -> str:
    """What the text of a context and ids has more than that of the context alone."""
    before, whole = tokenizer.decode(context), tokenizer.decode(context + ids)
    return whole[len(os.path.commonprefix([before, whole])) :]
