"""Counts the experts that the rows of a step go to: `python -m bench.lab.experts_touched --target FOLDER`.

Of a target with experts, in the mean over layers and steps, for each number of rows: the nodes of a request's tree,
neighbours in a text, as in a chain, tokens of different requests, as in a plain step of a batch, and trees of 8 nodes
of different requests. Next to them what even routing gives. The texts are prompts that `training.corpus` holds out, and
the trees are of the target's own guesses.

With --train the folder is written first: a small Qwen3-MoE of bytes, trained by transformers on the rest of the corpus.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from eagle_kernels import EAGLEConfig, EAGLEInference, ops
from eagle_kernels.engine.models.layers.mixture import MixtureOfExperts, count_touched, experts_touched
from eagle_kernels.engine.models.loading import load_target
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.reference.causal_attend import causal_attend

from ..harness import results
from ..harness.markdown import markdown
from .training.corpus import held_out_prompts, read_corpus, token_stream, windows

RESULTS = results.DIRECTORY / "CPU" / "experts_touched.jsonl"
COLUMNS = {"one tree": "nodes of one tree", "text": "neighbours in a text", "requests": "different requests",
           "trees of 8": "trees of 8 nodes", "even": "even routing"}  # fmt: skip
# (topk, num_steps) by the nodes of a tree
TREES = {2: (1, 1), 4: (2, 2), 8: (4, 3), 16: (4, 4), 32: (8, 5), 64: (8, 5)}
ROWS = (1, *TREES)
NUM_PROMPTS, PROMPT_BYTES = 64, 256
TREE_PROMPTS = 16  # of which trees are measured, a step of which takes many passes
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
    parser.add_argument("--train", type=int, metavar="STEPS", help="write the target first, trained for these steps")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help=f"of the texts (default: {NUM_PROMPTS})")
    parser.add_argument("--output", type=Path, help=f"a file of lines to write, such as {RESULTS}")
    options = parser.parse_args(arguments)
    corpus = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    about = {} if options.train is None else train(options.target, token_stream(corpus.train), options.train)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, draft = (load_target(options.target, device, dtype) for _ in range(2))
    tokenizer = load_tokenizer(options.target)
    texts = held_out_prompts(corpus.held_out, options.prompts, PROMPT_BYTES)
    lines = measure(target, draft, [tokenizer.encode(text) for text in texts])
    print(table(lines))
    if options.output is not None:
        lines = [{"table": "touched", **about, **line} for line in lines]
        options.output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


def train(folder: Path, stream: Tensor, num_steps: int, batch_size: int = 16, length: int = 128) -> dict[str, float]:
    """Writes a small model with experts to the folder, trained on a stream of bytes; returns how, and the loss."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TRAINED))
    model.set_experts_implementation("grouped_mm")  # a third of the time of a loop over experts
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, max(num_steps, 2))
    mean = 0.0
    for step in range(num_steps):
        rows = windows(stream, torch.randint(len(stream) - length, (batch_size,)), length)
        output = model(rows, labels=rows)
        optimiser.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        mean += (float(output.loss.detach()) - mean) * max(1 / (step + 1), 0.02)
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {mean:.3f}", flush=True)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    return {"train_steps": num_steps, "loss": round(mean, 3)}


def measure(target: torch.nn.Module, draft: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> list[dict]:
    """Returns a line for each number of rows: the experts that they touch, by column."""
    settings = next(module.settings for module in target.modules() if isinstance(module, MixtureOfExperts))
    text = route_texts(target, prompts)  # [layers, prompts, tokens, K]
    trees = {size: route_trees(target, draft, prompts[:TREE_PROMPTS], size) for size in TREES}
    of_eight = trees[8].transpose(1, 2).flatten(2, 3)  # nodes of the same step of all prompts, after one another
    lines = []
    for rows in ROWS:
        found = {"even": experts_touched(rows, settings.num_experts, settings.num_chosen)}
        if rows in trees:
            found["one tree"] = count_touched(trees[rows].flatten(1, 3), rows)
        if rows <= text.shape[2]:
            found["text"] = count_touched(text, rows)
        if rows <= text.shape[1]:
            found["requests"] = count_touched(text.transpose(1, 2), rows)
        if 8 <= rows <= of_eight.shape[2]:
            found["trees of 8"] = count_touched(of_eight, rows)
        lines.append({"rows": rows} | {name: round(count, 2) for name, count in found.items()})
    return lines


def route_texts(target: torch.nn.Module, texts: Sequence[Sequence[int]]) -> Tensor:
    """Returns the experts [layers, texts, T, K] of the tokens of texts, of all T that the shortest one has."""
    length = min(map(len, texts))
    found = []
    with torch.inference_mode(), routes(target) as passes:
        for text in texts:
            tokens = torch.tensor([text[:length]], device=target.device)
            target(tokens, torch.arange(length, device=target.device)[None], causal_attend, last_only=True)
            found.append(torch.stack(passes))
            passes.clear()
    return torch.stack(found, dim=1)


def route_trees(
    target: torch.nn.Module, draft: torch.nn.Module, prompts: Sequence[Sequence[int]], size: int, num_steps: int = 8
) -> Tensor:  # fmt: skip
    """Returns the experts [layers, prompts, steps, nodes, K] of the nodes of trees of each prompt's first steps."""
    topk, depth = TREES[size]
    config = EAGLEConfig(topk=topk, num_steps=depth, num_draft_tokens=size, cuda_graph=False, eos_token_ids=())
    engine, found = EAGLEInference(draft, target, config), []
    with routes(target) as passes:
        for prompt in prompts:
            # half of each: another number of rows than any tree has
            engine.generate([prompt[: len(prompt) // 2 + 1]], num_steps * (depth + 1) + 1)
            nodes = [experts for experts in passes if len(experts) == size]
            layers = sum(isinstance(module, MixtureOfExperts) for module in target.modules())
            of_steps = torch.stack(nodes).unflatten(0, (-1, layers))[:num_steps]
            found.append(of_steps.transpose(0, 1))
            passes.clear()
    return torch.stack(found, dim=1)


@contextmanager
def routes(target: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list of the experts [rows, K] of each layer and pass, which grows."""
    passes: list[Tensor] = []

    def noting(mixture: MixtureOfExperts):
        def note(module, inputs, logits):
            rows, settings = logits.flatten(0, 1), mixture.settings
            routed = ops.route_experts(rows, module.choice_bias, top_k=settings.num_chosen, **settings.routing)
            passes.append(routed.experts)

        return note

    mixtures = [module for module in target.modules() if isinstance(module, MixtureOfExperts)]
    handles = [mixture.router.register_forward_hook(noting(mixture)) for mixture in mixtures]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def table(lines: Sequence[dict]) -> str:
    """Returns the lines as Markdown."""
    rows = [[str(line["rows"]), *(f"{line[name]:.1f}" if name in line else "-" for name in COLUMNS)] for line in lines]
    return markdown([["rows", *COLUMNS.values()], *rows])


if __name__ == "__main__":
    raise SystemExit(main())
