"""Quality of the trained pair on held-out text, without the engine, and the pair's model card."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.heads import EagleHead

from .corpus import PROMPT_BYTES, windows
from .recipe import Recipe
from .trainer import mixed_precision
from .unrolled import draft_vocabulary_of, observe, target_loss, unroll


def evaluation_batches(stream: Tensor, recipe: Recipe, batch_size: int, length: int) -> Iterator[Tensor]:
    """Yields evenly spaced windows of the held-out stream, in batches of [≤ batch_size, length] int64."""
    count = min(recipe.evaluation_windows, len(stream) // length)
    if count == 0:
        raise ValueError(f"the held-out files hold {len(stream)} tokens; one window has {length}")
    starts = torch.linspace(0, len(stream) - length, count, dtype=torch.float64, device="cpu").long()
    for some in starts.split(batch_size):
        yield windows(stream, some, length)


@torch.no_grad()
def held_out_loss(target: Decoder, stream: Tensor, recipe: Recipe) -> float:
    """Returns the loss in nats per byte on held-out windows; each starts without context, which costs a little."""
    losses, sizes = [], []
    for tokens in evaluation_batches(stream, recipe, recipe.target.batch_size, recipe.window + 1):
        with mixed_precision(stream.device):
            losses.append(float(target_loss(target, tokens)))
        sizes.append(len(tokens))
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


@torch.no_grad()
def accuracy_by_depth(head: EagleHead, target: Decoder, stream: Tensor, recipe: Recipe) -> list[float]:
    """Returns for each depth the share of held-out rows whose first choice is the target's, after the true tokens."""
    hits, rows = torch.zeros(2, recipe.depths, dtype=torch.int64, device="cpu")
    for tokens in evaluation_batches(stream, recipe, recipe.head.batch_size, recipe.window):
        with mixed_precision(stream.device):
            target_logits, features = observe(target, head, tokens)
            choices = target_logits.argmax(-1)
            for depth, logits in enumerate(unroll(head, tokens, features, recipe.depths)):
                agrees = draft_vocabulary_of(head)[logits.argmax(-1)] == choices[:, 1 + depth :]
                hits[depth] += int(agrees.sum())
                rows[depth] += agrees.numel()
    return (hits / rows).tolist()


def write_model_card(folder: Path) -> None:
    """Writes `README.md` from `training.json` alone.

    The rows of the key "acceptance" come from `acceptance.measure_acceptance`; without that key the card says so.
    """
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    corpus, parameters, steps = record["corpus"], record["parameters"], record["steps"]
    loss, seconds, accuracy = record["final_loss"], record["training_seconds"], record["head_accuracy_by_depth"]
    card = f"""# Demo pair: a byte-level Llama and its EAGLE-3 head

Generated from `training.json` by `python -m bench.lab.train_demo_pair`; do not edit.

The pair exists so that speculative decoding can be run, tested and measured without a download. The target writes
Python-like text byte by byte; it knows nothing else.

| | target | draft |
|---|---|---|
| architecture | `LlamaForCausalLM` | `LlamaForCausalLMEagle3` |
| parameters | {parameters["target"]:,} | {parameters["draft"]:,} |
| training steps | {steps["target"]} | {steps["head"]} |
| final training loss (nats; draft: discounted sum over depths) | {loss["target"]:.4f} | {loss["head"]:.4f} |
| training time on {record["device"]} | {seconds["target"]:.0f} s | {seconds["head"]:.0f} s |

Tokens are UTF-8 bytes; id 256 ends a text and stands before the next. Weights are bf16.

## Data

The `.py` files of the standard library of Python {record["stdlib_version"]}, © Python Software Foundation, PSF License:
{corpus["train_files"]} files ({corpus["train_tokens"]:,} tokens) for training, and {corpus["held_out_files"]} held out
by a hash of their path. SHA-256 of the corpus: `{corpus["sha256"]}`.

## Held-out quality

Target: {record["held_out_loss"]:.4f} nats/byte. Draft: how often its first choice is the target's, by depth of the
draft, when the tokens before it are the true ones:

| depth | {" | ".join(str(depth) for depth in range(len(accuracy)))} |
|---|{"---|" * len(accuracy)}
| accuracy | {" | ".join(f"{share:.3f}" for share in accuracy)} |

## Acceptance

{_acceptance(record.get("acceptance"))}

The prompts for it are in `prompts.json`: {record["prompts"]} cuts of {PROMPT_BYTES} bytes from held-out files.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")


def _acceptance(rows: list[dict[str, Any]] | None) -> str:
    if not rows:
        return "Not measured yet."
    lines = [
        "Tokens per verification step, the target's own included, with end tokens ignored; share of steps in which the",
        "draft at depth 1, 2, ... was accepted; whether the text is that of plain decoding, token by token.",
        "",
        "| tree | temperature | tokens | steps | mean acceptance length | accepted at depth 1, 2, ... | as plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        per_depth = ", ".join(f"{rate:.3f}" for rate in row["accepted_per_depth"])
        lines.append(
            f"| {row['tree']} | {row['temperature']:g} | {row['new_tokens']} | {row['steps']} "
            f"| {row['mean_accept_length']:.2f} | {per_depth} | {'yes' if row['identical_to_plain'] else 'no'} |"
        )
    devices = ", ".join(sorted({row["device"] for row in rows}))
    return "\n".join([*lines, "", f"Measured in fp32 on {devices} with `--measure-acceptance`."])
