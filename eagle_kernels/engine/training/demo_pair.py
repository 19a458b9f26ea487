"""Train the demo pair: `python -m eagle_kernels.engine.training.demo_pair --output DIR`.

A byte-level Llama learns Python source, is rounded to bf16, and an EAGLE-3 head learns to guess what the rounded model
will say next. A few minutes on one data-centre GPU give a pair that is small enough to ship, and whose acceptance is
high enough that a silent engine fault shows as a drop.

The head is trained with the training-time test of the EAGLE-3 paper (arXiv 2503.01840, section 3.2): the head is
unrolled over its own outputs, as in drafting. At depth i, row j sits at position j + i, reads the true token t_{j+1+i}
and its own output of depth i - 1 (the target's features at depth 0), and predicts what the target predicts there, i.e.
t_{j+2+i}. It attends to the depth-0 rows up to j, and to itself at depths 1..i.

With `--checkpoint-dir` a run that was cut off goes on where it stopped when the same command is given again, and ends
with the same weights (to the bit where the device's arithmetic is deterministic).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.eagle_head import EagleConfig, EagleHead
from ..models.llama import Llama, LlamaConfig
from ..models.loading import save_folder
from .corpus import END_OF_TEXT, Corpus, held_out_prompts, read_corpus, token_stream

LossFunction = Callable[[Tensor], Tensor]  # of a batch of windows [B, T] int64

VOCAB_SIZE = 257
ADAM_BETAS = (0.9, 0.95)
DEPTH_DISCOUNT = 0.8  # weight of depth i is DEPTH_DISCOUNT**i
LOSS_SMOOTHING = 0.02
REPORT_EVERY = 50
SAVE_EVERY = 250
PROMPT_COUNT = 40
PROMPT_BYTES = 64

# The pair lives in the repository and in every wheel.
MAX_PARAMETERS = 5_900_000
MAX_FILE_MIB = 11.5

EXIT_UNFINISHED = 75  # stopped at the time budget; EX_TEMPFAIL of sysexits.h, "try again"


# ---------------------------------------------------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """How one of the two models is trained; the learning rate rises linearly, then falls to 0 along a cosine."""

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


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, apart from the corpus and the device."""

    target_config: dict[str, Any]
    head_config: dict[str, Any]
    target: Stage
    head: Stage
    window: int  # tokens per training sequence
    depths: int  # unrolled steps of the training-time test
    evaluation_windows: int
    seed: int

    def fingerprint(self, corpus: Corpus) -> str:
        """A checkpoint may only be continued under the fingerprint it was made with."""
        return json.dumps({"corpus": corpus.sha256, **asdict(self)}, sort_keys=True)


def make_recipe(arguments: argparse.Namespace) -> Recipe:
    tiny = arguments.tiny
    shared = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32 if tiny else 256,
        "intermediate_size": 64 if tiny else 640,
        "num_attention_heads": 4 if tiny else 8,
        "num_key_value_heads": 2 if tiny else 4,
        "head_dim": 8 if tiny else 32,
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
            # Layers whose outputs are taken: hidden_states 1, 2, 3 and 1, 3, 5. The default choice of EAGLE-3 would
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
            "target",
            arguments.steps_target,
            arguments.batch_target,
            learning_rate=2e-3,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        head=Stage(
            "head", arguments.steps_head, arguments.batch_head, learning_rate=1e-3, weight_decay=0.0, clip_norm=0.5
        ),
        window=shared["max_position_embeddings"],
        depths=3 if tiny else 5,
        evaluation_windows=8 if tiny else 256,
        seed=arguments.seed,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Attention during training
# ---------------------------------------------------------------------------------------------------------------------


def causal_attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`protocol.Attend` over the sequence itself, without a cache."""
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2)


class UnrolledAttend:
    """`protocol.Attend` of the training-time test; the i-th call is depth i.

    Row j sees the depth-0 keys of rows ≤ j and its own key of each later depth. The later depths add one score per row
    and depth, so scores are [B, Hq, T, T + i] and no mask over T·(i + 1) keys is ever built.
    """

    def __init__(self) -> None:
        self._first: tuple[Tensor, Tensor] | None = None  # depth-0 key and value, [B, Hq, T, D]
        self._later: list[tuple[Tensor, Tensor]] = []  # those of depths 1..i

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[2] // key.shape[2]
        expanded = tuple(x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (key, value))
        if self._first is None:
            self._first = expanded
            return causal_attend(layer, query, key, value)
        self._later.append(expanded)

        query = query.transpose(1, 2) * query.shape[-1] ** -0.5
        first_key, first_value = self._first
        rows = query.shape[2]
        future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        first_scores = (query @ first_key.transpose(2, 3)).masked_fill(future, float("-inf"))
        own_scores = torch.stack([(query * own_key).sum(-1) for own_key, _ in self._later], dim=-1)
        probs = torch.cat((first_scores, own_scores), dim=-1).float().softmax(-1).to(first_value.dtype)
        attended = probs[..., :rows] @ first_value
        for depth, (_, own_value) in enumerate(self._later):
            attended = attended + probs[..., rows + depth, None] * own_value
        return attended.transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Losses and measures
# ---------------------------------------------------------------------------------------------------------------------


def positions_of(tokens: Tensor) -> Tensor:
    """0, 1, 2, ... for every row of tokens [B, T]."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def target_loss(target: Llama, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, nats; tokens [B, T + 1]."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = target(inputs, positions_of(inputs), causal_attend).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def unroll(head: EagleHead, tokens: Tensor, features: Tensor, depths: int) -> Iterator[Tensor]:
    """The head's logits at each depth i: [B, T - 1 - i, Vd], whose row j stands against the target's row j + 1 + i.

    tokens [B, T], features [B, T, F] of the same rows. The last i rows of depth i would need tokens beyond the window:
    they run on padding, no other row sees them, and they are cut off.
    """
    attend = UnrolledAttend()
    hidden = features[:, :-1]
    positions = positions_of(tokens[:, 1:])
    for depth in range(depths):
        inputs = F.pad(tokens[:, 1 + depth :], (0, depth), value=END_OF_TEXT)
        logits, hidden = head(inputs, hidden, positions + depth, attend, from_target=depth == 0)
        yield logits[:, : logits.shape[1] - depth].float()


def draft_vocabulary_of(head: EagleHead) -> Tensor:
    """Target ids of the draft ids, [Vd] int64."""
    return head.d2t + torch.arange(head.draft_vocab_size, device=head.d2t.device)


@torch.no_grad()
def observe(target: Llama, head: EagleHead, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The target's logits [B, T, V] in fp32 and the features [B, T, F] that the head reads."""
    logits, features = target(tokens, positions_of(tokens), causal_attend, capture=head.aux_layers)
    return logits.float(), features


def head_loss(head: EagleHead, target: Llama, tokens: Tensor, depths: int) -> Tensor:
    """Discounted soft cross-entropy to the target's distribution over the draft vocabulary; tokens [B, T].

    Rows whose most likely token lies outside the draft vocabulary count as 0, as in the published training code: the
    renormalised rest of such a distribution is no teacher.
    """
    target_logits, features = observe(target, head, tokens)
    target_probs = target_logits[..., draft_vocabulary_of(head)].softmax(-1)
    teaches = head.t2d[target_logits.argmax(-1)]
    loss = torch.zeros((), device=tokens.device)
    for depth, logits in enumerate(unroll(head, tokens, features, depths)):
        rows = slice(1 + depth, None)
        cross_entropy = -(target_probs[:, rows] * logits.log_softmax(-1)).sum(-1)
        loss = loss + DEPTH_DISCOUNT**depth * (cross_entropy * teaches[:, rows]).mean()
    return loss


def mixed_precision(device: torch.device) -> torch.autocast:
    """bf16 matrix products on GPUs, plain fp32 on CPUs."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def evaluation_batches(stream: Tensor, recipe: Recipe, batch_size: int, length: int) -> Iterator[Tensor]:
    """Evenly spaced windows of the held-out stream, in batches of [≤ batch_size, length] int64."""
    count = min(recipe.evaluation_windows, len(stream) // length)
    if count == 0:
        raise ValueError(f"the held-out files hold {len(stream)} tokens, less than one window of {length}")
    starts = torch.linspace(0, len(stream) - length, count, dtype=torch.float64).long()
    for some in starts.split(batch_size):
        yield windows(stream, some, length)


@torch.no_grad()
def held_out_loss(target: Llama, stream: Tensor, recipe: Recipe) -> float:
    """Nats per byte on held-out windows; each starts without context, which costs a little."""
    losses, sizes = [], []
    for tokens in evaluation_batches(stream, recipe, recipe.target.batch_size, recipe.window + 1):
        with mixed_precision(stream.device):
            losses.append(float(target_loss(target, tokens)))
        sizes.append(len(tokens))
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


@torch.no_grad()
def accuracy_by_depth(head: EagleHead, target: Llama, stream: Tensor, recipe: Recipe) -> list[float]:
    """Share of held-out rows at which the head's first choice is the target's, given a true token at each depth."""
    hits = torch.zeros(recipe.depths, dtype=torch.int64)
    rows = torch.zeros(recipe.depths, dtype=torch.int64)
    for tokens in evaluation_batches(stream, recipe, recipe.head.batch_size, recipe.window):
        with mixed_precision(stream.device):
            target_logits, features = observe(target, head, tokens)
            choices = target_logits.argmax(-1)
            for depth, logits in enumerate(unroll(head, tokens, features, recipe.depths)):
                agrees = draft_vocabulary_of(head)[logits.argmax(-1)] == choices[:, 1 + depth :]
                hits[depth] += int(agrees.sum())
                rows[depth] += agrees.numel()
    return (hits / rows).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The training loop
# ---------------------------------------------------------------------------------------------------------------------


class TimeBudgetReached(Exception):
    """The run stopped in order, with a checkpoint, because its time was up."""


@dataclass
class Run:
    """What both stages share: where they compute, and how they stop and resume."""

    device: torch.device
    fingerprint: str
    checkpoint_folder: Path | None
    deadline: float = math.inf  # in time.monotonic() seconds
    final_losses: dict[str, float] = field(default_factory=dict)
    training_seconds: dict[str, float] = field(default_factory=dict)

    def fit(
        self, stage: Stage, module: nn.Module, stream: Tensor, window: int, seed: int, loss_of: LossFunction
    ) -> None:
        """Train the module's parameters that require a gradient, from the last checkpoint if there is one.

        Batches are windows at random offsets, all drawn here: step s sees the same batch however often the run was
        resumed.
        """
        starts = torch.randint(
            len(stream) - window + 1, (stage.steps, stage.batch_size), generator=torch.Generator().manual_seed(seed)
        )
        optimizer = make_optimizer(module, stage)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        step, smoothed, seconds = self._restore(stage, module, optimizer)
        progress = Progress(stage, done=step, tokens_per_step=stage.batch_size * window)
        began = time.monotonic() - seconds
        while step < stage.steps:
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate_at(step)
            with mixed_precision(self.device):
                loss = loss_of(windows(stream, starts[step], window))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, stage.clip_norm)
            optimizer.step()
            step += 1
            smoothed = loss.detach() if smoothed is None else smoothed.lerp(loss.detach(), LOSS_SMOOTHING)
            progress.update(step, smoothed)
            out_of_time = time.monotonic() >= self.deadline
            if step == stage.steps or step % SAVE_EVERY == 0 or out_of_time:
                seconds = time.monotonic() - began
                self._save(stage, module, optimizer, step, smoothed, seconds)
            if out_of_time and step < stage.steps:
                raise TimeBudgetReached(f"{stage.name}: {step} of {stage.steps} steps")
        self.final_losses[stage.name] = float(smoothed)
        self.training_seconds[stage.name] = seconds

    def _checkpoint_path(self, stage: Stage) -> Path | None:
        return self.checkpoint_folder and self.checkpoint_folder / f"{stage.name}.pt"

    def _restore(
        self, stage: Stage, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, Tensor | None, float]:
        """(finished steps, smoothed loss, seconds spent) of the stage's checkpoint, or those of a fresh start."""
        path = self._checkpoint_path(stage)
        if path is None or not path.is_file():
            return 0, None, 0.0
        checkpoint = torch.load(path, map_location=self.device, weights_only=True)
        if checkpoint["fingerprint"] != self.fingerprint:
            raise ValueError(f"{path} was made with other settings or another corpus; use another --checkpoint-dir")
        module.load_state_dict(checkpoint["module"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        return checkpoint["step"], checkpoint["loss"], checkpoint["seconds"]

    def _save(
        self,
        stage: Stage,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        loss: Tensor,
        seconds: float,
    ) -> None:
        path = self._checkpoint_path(stage)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = {
            "fingerprint": self.fingerprint,
            "step": step,
            "loss": loss,
            "seconds": seconds,
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        # Renamed into place, so that being killed while writing leaves the previous checkpoint whole.
        unfinished = path.with_suffix(".tmp")
        torch.save(checkpoint, unfinished)
        unfinished.replace(path)


class Progress:
    """A bar on a terminal where tqdm is installed, else a line every `REPORT_EVERY` steps."""

    def __init__(self, stage: Stage, done: int, tokens_per_step: int) -> None:
        self._stage = stage
        self._done = done
        self._tokens_per_step = tokens_per_step
        self._began = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=stage.steps, initial=done, desc=stage.name, unit="step")

    def update(self, step: int, loss: Tensor) -> None:
        """Called after every step; reads the loss, which waits for the device, only when it is shown."""
        last = step == self._stage.steps
        shown = last or step % REPORT_EVERY == 0
        if self._bar is not None:
            self._bar.update()
            if shown:
                self._bar.set_postfix(loss=f"{float(loss):.4f}")
            if last:
                self._bar.close()
        elif shown:
            loss_value = float(loss)
            seconds_per_step = (time.monotonic() - self._began) / (step - self._done)
            print(
                f"{self._stage.name} {step}/{self._stage.steps}  loss {loss_value:.4f}  "
                f"{self._tokens_per_step / seconds_per_step:,.0f} tok/s  "
                f"{seconds_per_step * (self._stage.steps - step):.0f} s left",
                flush=True,
            )


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """stream[start : start + length] of each start [B], as [B, length] int64 on the stream's device."""
    offsets = starts[:, None] + torch.arange(length)
    return stream[offsets.to(stream.device)].long()


def make_optimizer(module: nn.Module, stage: Stage) -> torch.optim.AdamW:
    """AdamW; norm weights are not decayed."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": stage.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=stage.learning_rate, betas=ADAM_BETAS, fused=parameters[0].is_cuda)


def initialise(module: nn.Module, num_layers: int, seed: int) -> None:
    """Normal weights of deviation 0.02; projections that end in the residual stream shrink with the depth (GPT-2)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            ends_in_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 / math.sqrt(2 * num_layers) if ends_in_residual else 0.02
            nn.init.normal_(parameter, std=deviation, generator=generator)


# ---------------------------------------------------------------------------------------------------------------------
# The two models
# ---------------------------------------------------------------------------------------------------------------------


def train_target(run: Run, recipe: Recipe, stream: Tensor) -> Llama:
    """The trained target, frozen, its fp32 weights rounded to the bf16 values that will be saved."""
    config = LlamaConfig.from_dict(recipe.target_config)
    target = Llama(config)
    initialise(target, config.num_hidden_layers, recipe.seed)
    target.to(run.device)
    run.fit(recipe.target, target, stream, recipe.window + 1, recipe.seed, lambda tokens: target_loss(target, tokens))
    return target.bfloat16().float().requires_grad_(False)


def train_head(run: Run, recipe: Recipe, target: Llama, stream: Tensor) -> EagleHead:
    """The head trained against `target`, rounded in the same way."""
    head = EagleHead(EagleConfig.from_dict(recipe.head_config))
    initialise(head, num_layers=1, seed=recipe.seed + 1)
    draft_vocabulary = choose_draft_vocabulary(stream, head.draft_vocab_size)
    head.d2t.copy_(draft_vocabulary - torch.arange(head.draft_vocab_size))
    head.t2d[draft_vocabulary] = True
    head.to(run.device).bind(target)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[draft_vocabulary_of(head)])
    run.fit(
        recipe.head,
        head,
        stream,
        recipe.window,
        recipe.seed + 1,
        lambda tokens: head_loss(head, target, tokens, recipe.depths),
    )
    return head.bfloat16().float().requires_grad_(False)


def choose_draft_vocabulary(stream: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens, ties to the lower id, ascending [size] int64; the end of text is always one."""
    frequency = torch.bincount(stream.cpu().int(), minlength=VOCAB_SIZE)
    frequency[END_OF_TEXT] = len(stream)
    return frequency.sort(descending=True, stable=True).indices[:size].sort().values


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check_size(target: nn.Module, head: nn.Module, folder: Path) -> None:
    """Refuse a pair that has outgrown the repository."""
    parameters = count_parameters(target) + count_parameters(head)
    file_mib = sum((folder / part / "model.safetensors").stat().st_size for part in ("target", "draft")) / 2**20
    if parameters > MAX_PARAMETERS or file_mib > MAX_FILE_MIB:
        raise ValueError(
            f"the pair has {parameters} parameters in {file_mib:.2f} MiB; {MAX_PARAMETERS} in {MAX_FILE_MIB} may ship"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The model card
# ---------------------------------------------------------------------------------------------------------------------


def write_model_card(folder: Path) -> None:
    """Write `README.md` from `training.json`, and from nothing else.

    Whoever measures the pair adds a key "acceptance", a list of rows (dicts with the same keys), and calls this again
    (`--card-only`); the rows become the table of that section.
    """
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    corpus, parameters, steps = record["corpus"], record["parameters"], record["steps"]
    loss, seconds, accuracy = record["final_loss"], record["training_seconds"], record["head_accuracy_by_depth"]
    card = f"""# Demo pair: a byte-level Llama and its EAGLE-3 head

Generated from `training.json` by `python -m eagle_kernels.engine.training.demo_pair`; do not edit.

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

The `.py` files of the standard library of Python {record["python_version"]}, © Python Software Foundation, PSF License:
{corpus["train_files"]} files ({corpus["train_tokens"]:,} tokens) for training, and {corpus["held_out_files"]} held out
by a hash of their path. SHA-256 of the corpus: `{corpus["sha256"]}`.

## Held-out quality

Target: {record["held_out_loss"]:.4f} nats/byte. Draft: how often its first choice is the target's, by depth of the
draft, when the tokens before it are the true ones:

| depth | {" | ".join(str(depth) for depth in range(len(accuracy)))} |
|---|{"---|" * len(accuracy)}
| accuracy | {" | ".join(f"{share:.3f}" for share in accuracy)} |

## Acceptance

{_acceptance_table(record.get("acceptance"))}

The prompts for it are in `prompts.json`: {record["prompts"]} cuts of {PROMPT_BYTES} bytes from held-out files.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")


def _acceptance_table(rows: list[dict[str, Any]] | None) -> str:
    if not rows:
        return "Not measured yet."
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *([str(row[name]) for name in header] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_kernels.engine.training.demo_pair", description="Train the byte-level demo pair."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for target/, draft/, training.json, ...")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="where the text is")
    parser.add_argument("--device", default="auto", help="auto: cuda where there is one, else cpu")
    parser.add_argument("--steps-target", type=int, help="default 5000 (tiny: 10)")
    parser.add_argument("--steps-head", type=int, help="default 2000 (tiny: 10)")
    parser.add_argument("--batch-target", type=int, help="windows per target step, default 32 (tiny: 4)")
    parser.add_argument("--batch-head", type=int, help="windows per head step, default 16 (tiny: 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", type=Path, help="save here every few hundred steps, and resume from here")
    parser.add_argument(
        "--time-budget-s",
        type=float,
        help=f"stop with a checkpoint after this long and exit with {EXIT_UNFINISHED}; give the command again to go on",
    )
    parser.add_argument("--tiny", action="store_true", help="a pair of no use that trains in seconds on a CPU")
    parser.add_argument("--card-only", action="store_true", help="rewrite README.md from training.json, train nothing")
    arguments = parser.parse_args(argv)
    if arguments.time_budget_s is not None and arguments.checkpoint_dir is None:
        parser.error("--time-budget-s needs --checkpoint-dir")
    defaults = (10, 10, 4, 4) if arguments.tiny else (5000, 2000, 32, 16)
    names = ("steps_target", "steps_head", "batch_target", "batch_head")
    for name, default in zip(names, defaults, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Train, measure, write; returns the exit status."""
    began = time.monotonic()
    arguments = parse_arguments(argv)
    output: Path = arguments.output
    if arguments.card_only:
        write_model_card(output)
        return 0

    device_name = arguments.device
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name)
    recipe = make_recipe(arguments)
    corpus = read_corpus(arguments.stdlib)
    train_stream = token_stream(corpus.train).to(device)
    held_out_stream = token_stream(corpus.held_out).to(device)
    run = Run(device, recipe.fingerprint(corpus), arguments.checkpoint_dir)
    if arguments.time_budget_s is not None:
        run.deadline = began + arguments.time_budget_s

    try:
        target = train_target(run, recipe, train_stream)
        head = train_head(run, recipe, target, train_stream)
    except TimeBudgetReached as reached:
        print(f"time budget used up at {reached}; give the same command again to go on", file=sys.stderr)
        return EXIT_UNFINISHED

    save_folder(target, recipe.target_config, output / "target")
    save_folder(head, recipe.head_config, output / "draft")
    check_size(target, head, output)
    _write_json(
        output / "target" / "tokenizer_config.json",
        {"tokenizer_class": "ByteTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    )
    prompts = held_out_prompts(corpus.held_out, PROMPT_COUNT, PROMPT_BYTES)
    _write_json(output / "prompts.json", prompts)
    record = {
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "seed": recipe.seed,
        "corpus": {
            "train_files": len(corpus.train),
            "held_out_files": len(corpus.held_out),
            "train_tokens": len(train_stream),
            "held_out_tokens": len(held_out_stream),
            "sha256": corpus.sha256,
        },
        "parameters": {"target": count_parameters(target), "draft": count_parameters(head)},
        "steps": {"target": recipe.target.steps, "head": recipe.head.steps},
        "batch_size": {"target": recipe.target.batch_size, "head": recipe.head.batch_size},
        "window": recipe.window,
        "depths": recipe.depths,
        "training_seconds": run.training_seconds,
        "final_loss": run.final_losses,
        "held_out_loss": held_out_loss(target, held_out_stream, recipe),
        "head_accuracy_by_depth": accuracy_by_depth(head, target, held_out_stream, recipe),
        "prompts": len(prompts),
    }
    _write_json(output / "training.json", record)
    write_model_card(output)
    print(
        f"{output}: held-out loss {record['held_out_loss']:.4f} nats/byte, "
        f"head accuracy by depth {', '.join(f'{share:.3f}' for share in record['head_accuracy_by_depth'])}"
    )
    return 0


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
