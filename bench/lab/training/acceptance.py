"""Acceptance of drafts on held-out prompts: the number that drops when something is silently wrong.

If a head reads its features a row off, or a tree mask has a bit too many, the text can still be right: only acceptance
shows the fault.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_kernels.engine.config.eagle_config import EAGLEConfig
from eagle_kernels.engine.inference import EAGLEInference
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.draft_head import DraftHead
from eagle_kernels.engine.models.loading import load_draft, load_target
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.engine.serve.output import GenerationStats
from eagle_kernels.runtime.placement import device_name

from .trainer import decode

NEW_TOKENS = 128
BATCH_SIZE = 8
TEMPERATURES = (0.0, 1.0)
# Without end tokens, every prompt gives the same number of tokens.
TREES = (EAGLEConfig(num_draft_tokens=32, eos_token_ids=()), EAGLEConfig(topk=1, num_steps=5, eos_token_ids=()))


def measure_acceptance(folder: Path, device: torch.device, new_tokens: int = NEW_TOKENS) -> list[dict[str, Any]]:
    """Measures the pair in `folder`, in fp32, on the prompts of its `prompts.json`; returns `acceptance_rows`."""
    target = load_target(folder / "target", device)
    draft = load_draft(folder / "draft", target)
    tokenizer = load_tokenizer(folder / "target")
    prompts = [tokenizer.encode(text) for text in json.loads((folder / "prompts.json").read_text(encoding="utf-8"))]
    return acceptance_rows(draft, target, prompts, TREES, TEMPERATURES, new_tokens)


def acceptance_rows(
    draft: DraftHead,
    target: Decoder,
    prompts: list[list[int]],
    trees: Sequence[EAGLEConfig],
    temperatures: Sequence[float],
    new_tokens: int,
    tell: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Returns a row for each temperature and tree, and compares the texts with those of plain decoding.

    tell  gets a line of progress from time to time
    """
    engines = [EAGLEInference(draft, target, tree) for tree in trees]

    def generate(engine: EAGLEInference, **options: Any) -> tuple[list[list[int]], list[GenerationStats]]:
        """Returns the texts of all prompts and the statistics of each batch; prompt i has seed i in any batch."""
        texts, stats = [], []
        name = _describe(engine.config) if options.get("speculative", True) else "plain decoding"
        for start in range(0, len(prompts), BATCH_SIZE):
            batch = prompts[start : start + BATCH_SIZE]
            place = f"{name}, prompt {start + 1} of {len(prompts)} and on"
            told = None if tell is None else lambda line, place=place: tell(f"{place}: {line}")
            output = decode(engine, batch, new_tokens, told, seeds=range(start, start + len(batch)), **options)
            texts.extend(output.output_ids)
            stats.append(output.stats)
        return texts, stats

    rows = []
    for temperature in temperatures:
        plain_texts, _ = generate(engines[0], temperature=temperature, speculative=False)
        for engine in engines:
            texts, stats = generate(engine, temperature=temperature)
            steps = sum(batch.steps for batch in stats)
            accepted = [sum(counts) for counts in zip(*(batch.accepted_per_depth for batch in stats), strict=True)]
            rows.append(
                {
                    "tree": _describe(engine.config),
                    "temperature": temperature,
                    "prompts": len(prompts),
                    "new_tokens": sum(map(len, texts)),
                    "steps": steps,
                    "mean_accept_length": round(1 + sum(accepted) / steps, 4),
                    "accepted_per_depth": [round(count / steps, 4) for count in accepted],
                    "identical_to_plain": texts == plain_texts,
                    "device": device_name(target.device),
                }
            )
    return rows


def _describe(tree: EAGLEConfig) -> str:
    """Describes the drafting tree."""
    if tree.topk == 1:
        return f"chain of {tree.num_steps}"
    return f"top {tree.topk}, {tree.num_steps} levels, {tree.num_verify_tokens} nodes"
