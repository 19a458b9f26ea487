"""Counts the experts that rows go to: `python -m bench.lab.experts_touched --target FOLDER`.

Of a target with experts, by the routing of real text: for each number of neighbouring rows, in the mean over the text
and over layers, next to what even routing gives. Rows of a tree of drafts are near each other in the text, and so
touch about what this many neighbours do: a tree step reads that share of the experts, a plain step one row's.

With --train the folder is written first: a small Qwen3-MoE of bytes, trained by transformers on this package's sources.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eagle_kernels import ops
from eagle_kernels.engine.models.layers.mixture import MixtureOfExperts, experts_touched
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.reference.causal_attend import causal_attend

ROWS = (1, 2, 4, 8, 16, 32, 64)
PACKAGE = Path(__file__).parents[2] / "eagle_kernels"
TRAINED = {
    "vocab_size": 257, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 64,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "max_position_embeddings": 2048, "output_router_logits": True,
    "router_aux_loss_coef": 0.01, "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.experts_touched", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="the folder of a model with experts")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a file of text (default: this one)")
    parser.add_argument("--tokens", type=int, default=1024, help="how many of its tokens are read (default: 1024)")
    parser.add_argument("--train", type=int, metavar="STEPS", help="write the target first, trained for so many steps")
    options = parser.parse_args(arguments)
    if options.train is not None:
        train(options.target, options.train)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(options.target, device, dtype)
    tokens = load_tokenizer(options.target).encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    print("| rows | experts touched | by even routing |\n|---|---|---|")
    for num_rows, touched, even in touched_by_rows(target, torch.tensor(tokens, device=device)):
        print(f"| {num_rows} | {touched:.1f} | {even:.1f} |")
    return 0


def train(folder: Path, num_steps: int, batch_size: int = 8, length: int = 128) -> None:
    """Writes a small model with experts to the folder, trained on the bytes of this package's sources."""
    import transformers

    torch.manual_seed(0)
    files = sorted(path for path in PACKAGE.rglob("*.py") if PACKAGE / "reference" not in path.parents)
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files)), dtype=torch.int64)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TRAINED))
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for step in range(num_steps):
        starts = torch.randint(len(text) - length, (batch_size, 1), dtype=torch.int64)
        rows = text[starts + torch.arange(length, dtype=torch.int64)]
        loss = model(rows, labels=rows).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))


@torch.inference_mode()
def touched_by_rows(
    target: torch.nn.Module, tokens: torch.Tensor, rows: Sequence[int] = ROWS
) -> Iterator[tuple[int, float, float]]:
    """Yields a number of rows, how many experts as many neighbouring tokens go to in the mean, and what even routing
    gives."""
    chosen: list[torch.Tensor] = []
    mixtures = [module for module in target.modules() if isinstance(module, MixtureOfExperts)]
    handles = [mixture.router.register_forward_hook(_noting(mixture, chosen)) for mixture in mixtures]
    try:
        positions = torch.arange(len(tokens), device=tokens.device)[None]
        target(tokens[None], positions, causal_attend, last_only=True)
    finally:
        for handle in handles:
            handle.remove()
    settings = mixtures[0].settings
    for num_rows in (each for each in rows if each <= len(tokens)):
        means = [count_touched(experts, num_rows) for experts in chosen]
        even = experts_touched(num_rows, settings.num_experts, settings.num_chosen)
        yield num_rows, sum(means) / len(means), even


def _noting(mixture: MixtureOfExperts, chosen: list[torch.Tensor]):
    def note(module, inputs, logits):
        settings = mixture.settings
        routed = ops.route_experts(
            logits.flatten(0, 1), module.choice_bias, top_k=settings.num_chosen, **settings.routing
        )
        chosen.append(routed.experts)

    return note


def count_touched(experts: torch.Tensor, num_rows: int) -> float:
    """Returns how many experts [T, K] differ among num_rows neighbouring rows, in the mean."""
    groups = experts[: len(experts) // num_rows * num_rows].view(-1, num_rows * experts.shape[1])
    ordered = groups.sort(dim=1).values
    return float(1.0 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).double().mean())


if __name__ == "__main__":
    raise SystemExit(main())
