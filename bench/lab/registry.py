"""Model pairs by name: `python -m bench.lab.registry` lists them, `loader.load_pair` makes an engine of one.

A language model may draft for another one only if both mean the same text by the same token ids: the vocabulary rule.
Two well-known pairs break it; they stay listed, marked, so that whoever looks for them learns why.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

DType = Literal["float16", "bfloat16", "float32", "int4"]

# where the weights come with this package: `loader.resolve`
EMBEDDED = "embedded/"


class Vocabulary(NamedTuple):
    """Whose tokenizer it is, and the rows of the model's embedding."""

    tokenizer: str
    size: int


_GPT2, _LLAMA2 = Vocabulary("GPT-2", 50257), Vocabulary("Llama-2", 32000)
_LLAMA3, _LLAMA31 = Vocabulary("Llama-3", 128256), Vocabulary("Llama-3.1", 128256)
# as their config.json and tokenizer files say; models that are not here are checked by their files alone
VOCABULARIES: dict[str, Vocabulary] = {
    "gpt2": _GPT2,
    "gpt2-xl": _GPT2,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _LLAMA2,
    "microsoft/Phi-3-mini-4k-instruct": Vocabulary("Phi-3, Llama-2's with more special tokens", 32064),
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA3,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA31,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA31,
}


@dataclass(frozen=True)
class ModelPair:
    """A draft and its target."""

    pair_name: str
    draft_model_id: str  # of the Hugging Face hub, a folder, or `embedded/...`
    target_model_id: str
    draft_dtype: DType = "bfloat16"  # of the weights
    target_dtype: DType = "bfloat16"
    # "draft_model": the draft is a language model; "eagle": a head, which shares the target's tokens by construction
    method: Literal["draft_model", "eagle"] = "draft_model"

    @property
    def vocabulary_fault(self) -> str | None:
        """How it breaks the vocabulary rule; None: it does not, as far as is known without its files."""
        draft, target = (VOCABULARIES.get(model_id) for model_id in (self.draft_model_id, self.target_model_id))
        if self.method != "draft_model" or None in (draft, target) or draft == target:
            return None
        return (
            f"the draft must have the target's tokens, {self.draft_model_id} has {draft.size} of {draft.tokenizer} and "
            f"{self.target_model_id} {target.size} of {target.tokenizer}"
        )

    def check(self) -> None:
        """ValueError for a pair that cannot be run."""
        if self.vocabulary_fault:
            usable = [pair.pair_name for pair in REGISTRY.values() if pair.vocabulary_fault is None]
            raise ValueError(f"{self.pair_name}: {self.vocabulary_fault}; pairs that fit: {', '.join(usable)}")


_LLAMA3_8B = "meta-llama/Meta-Llama-3-8B-Instruct"
_LLAMA31_8B = "meta-llama/Llama-3.1-8B-Instruct"
_FP16 = ("float16", "float16")
_BF16 = ("bfloat16", "bfloat16")
_PAIRS = (
    ModelPair("gpt2_dev", "gpt2", "gpt2-xl", *_FP16),
    ModelPair("tinyllama_llama3", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", _LLAMA3_8B, *_FP16),
    ModelPair("phi3_llama3", "microsoft/Phi-3-mini-4k-instruct", _LLAMA3_8B, *_FP16),
    ModelPair("llama3_self", _LLAMA3_8B, _LLAMA3_8B, "int4", "float16"),
    # what the two that break the rule were after: a small model of the target's own family
    ModelPair("llama32_llama31", "meta-llama/Llama-3.2-1B-Instruct", _LLAMA31_8B, *_BF16),
    ModelPair("llama31_eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", _LLAMA31_8B, *_BF16, "eagle"),
    ModelPair(
        "llama33_eagle3", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "meta-llama/Llama-3.3-70B-Instruct", *_BF16, "eagle"
    ),
    ModelPair("qwen3_8b_eagle3", "AngelSlim/Qwen3-8B_eagle3", "Qwen/Qwen3-8B", *_BF16, "eagle"),
    ModelPair("qwen3_14b_eagle3", "AngelSlim/Qwen3-14B_eagle3", "Qwen/Qwen3-14B", *_BF16, "eagle"),
    ModelPair("embedded", EMBEDDED + "draft", EMBEDDED + "target", "float32", "float32", "eagle"),
)
REGISTRY: dict[str, ModelPair] = {pair.pair_name: pair for pair in _PAIRS}


def list_pairs() -> list[str]:
    """All names, those included whose `vocabulary_fault` says why they cannot be run."""
    return list(REGISTRY)


def get_pair(name: str) -> ModelPair:
    """KeyError for a name that is not there."""
    if name not in REGISTRY:
        raise KeyError(f"get_pair: name must be one of {', '.join(REGISTRY)}, got {name!r}")
    return REGISTRY[name]


def main() -> None:
    for pair in REGISTRY.values():
        models = f"{pair.draft_model_id} ({pair.draft_dtype}) -> {pair.target_model_id} ({pair.target_dtype})"
        print(f"{pair.pair_name:<18} {pair.method:<12} {models}")
        if pair.vocabulary_fault:
            print(f"{'':<18} CANNOT BE RUN: {pair.vocabulary_fault}")


if __name__ == "__main__":
    main()
