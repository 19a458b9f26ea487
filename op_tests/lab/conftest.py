"""What tests of models and of prompts share."""

import pytest

from .stock import VOCAB, stock


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model with a tokenizer of words, as the hub has them."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    words = {f"w{index}": index for index in range(VOCAB - 1)} | {"<end>": VOCAB - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    stock("llama", num_key_value_heads=2, eos_token_id=VOCAB - 1).save_pretrained(folder)
    return folder
