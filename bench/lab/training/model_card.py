"""The model card of the demo pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .corpus import PROMPT_BYTES


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
