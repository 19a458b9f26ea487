"""A tiny random model of transformers, and how errors are read."""

from collections.abc import Callable

import pytest
import torch

VOCAB = 97
# in the tokenizer of the fixture `folder` a word is a token
PROMPT, PROMPT_IDS = "w5 w9 w2 w7", [5, 9, 2, 7]


def stock(family: str = "gpt2", seed: int = 0, **changes):
    """A tiny random model of transformers with its own attention."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 96, "initializer_range": 0.2, "intermediate_size": 48}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0} | changes
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def refused(call: Callable, kind: type[Exception] = ValueError) -> str:
    """The one line that says why."""
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
