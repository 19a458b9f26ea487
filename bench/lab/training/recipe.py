"""Recipes of the demo pair: the sizes of both models and the length of their training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .corpus import END_OF_TEXT, VOCAB_SIZE, Corpus, windows


@dataclass(frozen=True)
class Stage:
    """The training of one model; its learning rate rises linearly, then falls to 0 along a cosine."""

    name: str
    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    clip_norm: float

    def learning_rate_at(self, step: int) -> float:
        warm_up = min(200, max(1, self.steps // 10))
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (self.steps - warm_up)))

    def resized(self, steps: int | None, batch_size: int | None) -> Stage:
        """Returns the stage with other sizes; None keeps a size."""
        changes = {"steps": steps, "batch_size": batch_size}
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result except the corpus and the device."""

    target_config: dict[str, Any]
    head_config: dict[str, Any]
    target: Stage
    head: Stage
    window: int  # tokens per training sequence
    depths: int  # unrolled steps of the training-time test
    evaluation_windows: int
    seed: int

    def fingerprint(self, corpus: Corpus) -> str:
        """Returns the text that must be the same for a checkpoint to be continued."""
        return json.dumps({"corpus": corpus.sha256, **asdict(self)}, sort_keys=True)


def make_recipe(*, tiny: bool = False, seed: int = 0) -> Recipe:
    """Returns the recipe of the shipped pair, or of a useless `tiny` one that trains in seconds on a CPU."""
    shared = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32 if tiny else 256,
        "intermediate_size": 64 if tiny else 640,
        "num_attention_heads": 2 if tiny else 8,
        "num_key_value_heads": 1 if tiny else 4,
        "head_dim": 16 if tiny else 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64 if tiny else 1024,
        "tie_word_embeddings": False,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "torch_dtype": "bfloat16",
    }
    target_config = {
        "architectures": ["LlamaForCausalLM"],
        "tokenizer_class": "ByteTokenizer",
        "num_hidden_layers": 3 if tiny else 6,
        **shared,
    }
    head_config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 64 if tiny else 128,
        "target_hidden_size": shared["hidden_size"],
        "norm_before_residual": False,
        "norm_output": False,
        "eagle_config": {
            # Layers whose outputs are read: hidden_states 1, 2, 3 and 1, 3, 5. The default choice of EAGLE-3 would
            # name one layer twice in targets this shallow.
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2] if tiny else [0, 2, 4],
            "use_aux_hidden_state": True,
        },
        **shared,
    }
    return Recipe(
        target_config=target_config,
        head_config=head_config,
        target=Stage(
            "target", 10 if tiny else 6500, 4 if tiny else 32, learning_rate=2e-3, weight_decay=0.1, clip_norm=1.0
        ),
        head=Stage(
            "head", 10 if tiny else 3000, 4 if tiny else 16, learning_rate=1e-3, weight_decay=0.0, clip_norm=0.5
        ),
        window=shared["max_position_embeddings"],
        depths=3 if tiny else 5,
        evaluation_windows=8 if tiny else 256,
        seed=seed,
    )


def random_windows(stream: Tensor, stage: Stage, window: int, seed: int) -> Callable[[int], list[Tensor]]:
    """Draws all batches: windows [B, window] int64 at random offsets of the stream, one piece a step."""
    starts = torch.randint(
        len(stream) - window + 1,
        (stage.steps, stage.batch_size),
        generator=torch.Generator().manual_seed(seed),
        device="cpu",
    )
    return lambda step: [windows(stream, starts[step], window)]
