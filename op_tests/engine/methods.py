"""Every method of drafting: configurations, models for them, and engines."""

from eagle_kernels import EAGLEConfig, EAGLEInference
from op_tests.engine.toys import MaskedDraft, MaskedHead, ToyModel, Walker, WalkerBlock, WalkerHead

METHODS = {
    "naive": {"method": "naive"},
    "ngram chain": {"method": "ngram", "topk": 1, "num_steps": 5, "min_ngram_size": 1},
    "ngram tree": {"method": "ngram", "topk": 4, "num_steps": 4, "num_draft_tokens": 12, "min_ngram_size": 1},
    "ngram earliest": {"method": "ngram", "topk": 1, "num_steps": 3, "ngram_prefer": "earliest", "min_ngram_size": 1},
    "suffix chain": {"method": "suffix", "topk": 1, "num_steps": 6},
    "suffix tree": {"method": "suffix", "topk": 2, "num_steps": 6, "num_draft_tokens": 13},
    "hybrid chain": {"method": "hybrid", "topk": 1, "num_steps": 6, "num_model_steps": 2, "min_ngram_size": 1},
    "hybrid tree": {
        "method": "hybrid", "topk": 2, "num_steps": 6, "num_model_steps": 2, "num_draft_tokens": 12,
        "min_ngram_size": 1,
    },
    "draft_model": {"method": "draft_model", "topk": 2, "num_steps": 3, "num_draft_tokens": 8},
}  # fmt: skip


def toys(device, seed=0) -> tuple[ToyModel, ToyModel]:
    """A target over few tokens, whose text repeats itself, and a draft that knows nothing of it."""
    return ToyModel(vocab_size=20, seed=seed, device=device), ToyModel(vocab_size=20, seed=seed + 1, device=device)


MIXED = {
    "method": ("draft_model", "ngram", "suffix", "hybrid", "naive"), "topk": 2, "num_steps": 4, "num_draft_tokens": 8,
    "num_model_steps": 2, "min_ngram_size": 1,
}  # fmt: skip


# those whose texts are proven
PROVEN = {name: options for name, options in METHODS.items() if name != "ngram earliest"} | {
    "eagle": {"method": "eagle", "topk": 3, "num_steps": 3, "num_draft_tokens": 9},
    "mtp": {"method": "mtp", "topk": 1, "num_steps": 3},
    "medusa chain": {"method": "medusa", "topk": 1, "num_steps": 4},
    "medusa tree": {"method": "medusa", "topk": 3, "num_steps": 4, "num_draft_tokens": 14},
    "masks chain": {"method": "draft_model", "topk": 1, "num_steps": 4},
    "masks tree": {"method": "draft_model", "topk": 3, "num_steps": 4, "num_draft_tokens": 14},
    "masks head": {"method": "eagle", "topk": 2, "num_steps": 3, "num_draft_tokens": 9},
    "medusa hybrid": {
        "method": "hybrid",
        "topk": 2,
        "num_steps": 6,
        "num_model_steps": 2,
        "num_draft_tokens": 12,
        "min_ngram_size": 1,
    },
}
# walks of eight tokens, so that texts jump often
SIZES = {"vocab_size": 20, "walk": 8}


def engine_of(name: str, device, sizes=SIZES, tokenizer=None, **others) -> EAGLEInference:
    """Drafts of a model are right wherever the target walks, and by chance where it jumps."""
    config = EAGLEConfig(**PROVEN[name] | others)
    target, sizes = Walker(**sizes, device=device), {**sizes, "seed": 1, "device": device}
    kind = Walker if name in ("draft_model", "hybrid tree") else WalkerHead
    if "medusa" in name:
        draft = WalkerBlock(**sizes, of=target)
    elif "masks" in name:
        draft = MaskedHead(**sizes) if "head" in name else MaskedDraft(**sizes)
    else:
        draft = kind(**sizes) if config.needs_model else None
    return EAGLEInference(draft, target, config, tokenizer=tokenizer)


def plain_of(device, sizes=SIZES, **options) -> EAGLEInference:
    """Plain decoding by an engine that has never had a draft."""
    return EAGLEInference(None, Walker(**sizes, device=device), EAGLEConfig(method="naive", **options))
