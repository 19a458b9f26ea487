"""One training loop for every model: schedule, checkpoints, a time budget, progress, and the folder it ends in."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from eagle_kernels.engine.inference import EAGLEInference
from eagle_kernels.engine.models.checkpoint import load_pickled, naming, safetensors
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.serve.output import GenerationOutput
from eagle_kernels.runtime.values import is_terminal

from .recipe import Stage

Pieces = Callable[[int], Sequence[Any]]  # from a step to its batch, in pieces that are computed one after another
LossFunction = Callable[[Any], Tensor]  # from a piece to its loss; these losses add up to that of the step

ADAM_BETAS = (0.9, 0.95)
LOSS_SMOOTHING = 0.02
REPORT_EVERY = 50
SAVE_EVERY = 250

REPORT_SECONDS = 10.0  # where no bar is shown there is a line of progress as often, however long a step takes
EXIT_UNFINISHED = 75  # stopped at the time budget; EX_TEMPFAIL of sysexits.h, "try again"


def mixed_precision(device: torch.device, is_mixed: bool | None = None) -> torch.autocast:
    """Returns a context with bf16 matrix products if `is_mixed` (default: on GPUs), else with plain fp32."""
    enabled = device.type == "cuda" if is_mixed is None else is_mixed
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


class TimeBudgetReached(Exception):
    """Error that ends a run, after a checkpoint, when its time is up."""


@dataclass
class Run:
    """The settings that stages share: where they compute, and how they stop, resume and report."""

    device: torch.device
    fingerprint: str  # a JSON object of all that decides the result; checkpoints with another one are refused
    checkpoint_folder: Path | None
    deadline: float = math.inf  # in time.monotonic() seconds
    is_mixed: bool | None = None  # see `mixed_precision`
    save_every: int = SAVE_EVERY  # steps
    report_every: int = REPORT_EVERY
    report_to: TextIO | None = None  # where lines of progress go; None: stdout
    final_losses: dict[str, float] = field(default_factory=dict)
    training_seconds: dict[str, float] = field(default_factory=dict)

    def fit(
        self,
        stage: Stage,
        module: nn.Module,
        pieces_of: Pieces,
        loss_of: LossFunction,
        tokens_per_step: float,
        *,
        tell: Callable[[], str] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        """Trains the module's parameters that require a gradient, from the last checkpoint if there is one.

        pieces_of     depends on the step alone, so that resuming a run does not change the batch of a step
        tell          returns what a line of progress says beside the loss
        after_step    is called with the number of finished steps, after the checkpoint if one was due; a resumed run
                      first calls it with the steps of its checkpoint, after which it was interrupted
        """
        optimizer = make_optimizer(module, stage)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        step, smoothed, seconds = self._restore(stage, module, optimizer)
        progress = Progress(stage, step, tokens_per_step, self.report_every, self.report_to, tell)
        began = time.monotonic() - seconds
        if after_step is not None and step > 0:
            after_step(step)
        while step < stage.steps:
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate_at(step)
            optimizer.zero_grad(set_to_none=True)
            loss = None
            for piece in pieces_of(step):
                with mixed_precision(self.device, self.is_mixed):
                    part = loss_of(piece)
                part.backward()
                loss = part.detach() if loss is None else loss + part.detach()
            nn.utils.clip_grad_norm_(parameters, stage.clip_norm)
            optimizer.step()
            step += 1
            smoothed = loss if smoothed is None else smoothed.lerp(loss, LOSS_SMOOTHING)
            progress.update(step, smoothed)
            out_of_time = time.monotonic() >= self.deadline
            if step == stage.steps or step % self.save_every == 0 or out_of_time:
                seconds = time.monotonic() - began
                states = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
                self._save(stage, step=step, loss=smoothed, seconds=seconds, **states)
            if out_of_time and step < stage.steps:
                raise TimeBudgetReached(f"{stage.name}: {step} of {stage.steps} steps")
            if after_step is not None:
                after_step(step)
        self.final_losses[stage.name] = float(smoothed)
        self.training_seconds[stage.name] = seconds

    def _checkpoint_path(self, stage: Stage) -> Path | None:
        return self.checkpoint_folder and self.checkpoint_folder / f"{stage.name}.pt"

    def _restore(
        self, stage: Stage, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, Tensor | None, float]:
        """Returns (finished steps, smoothed loss, seconds spent), from the stage's checkpoint if there is one."""
        path = self._checkpoint_path(stage)
        if path is None or not path.is_file():
            return 0, None, 0.0
        with naming(path.parent):
            checkpoint = load_pickled(path, map_location=self.device)
            names = {"fingerprint", "step", "loss", "seconds", "module", "optimizer"}
            if not (isinstance(checkpoint, dict) and checkpoint.keys() == names):
                raise ModelError(f"{path.name} cannot be continued: it is not a checkpoint of train-head")
        if checkpoint["fingerprint"] != self.fingerprint:
            changed = tell_changes(checkpoint["fingerprint"], self.fingerprint)
            raise ValueError(
                f"{path} was made with other settings or another corpus ({changed}); start in another folder"
            )
        module.load_state_dict(checkpoint["module"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        return checkpoint["step"], checkpoint["loss"], checkpoint["seconds"]

    def _save(self, stage: Stage, **state: Any) -> None:
        path = self._checkpoint_path(stage)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Renaming it last keeps the previous checkpoint whole if the run is killed while it writes.
            unfinished = path.with_suffix(".tmp")
            torch.save({"fingerprint": self.fingerprint, **state}, unfinished)
            unfinished.replace(path)


def tell_changes(then: str, now: str) -> str:
    """Names the differences between two fingerprints, with both values where these are short."""
    try:
        old, new = dict(json.loads(then)), json.loads(now)
    except (ValueError, TypeError, RecursionError):
        return "by another program"
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return ", ".join(
        name if isinstance(old.get(name), dict) else f"{name} {old.get(name)!r}, now {new.get(name)!r}"
        for name in changed
    )


class Pace:
    """The time since the last line of progress."""

    def __init__(self) -> None:
        self.told()

    def told(self) -> None:
        """Notes that a line was written."""
        self._told_at = time.monotonic()

    def is_due(self) -> bool:
        """Tells whether it is time for the next line."""
        return time.monotonic() - self._told_at >= REPORT_SECONDS


def decode(
    engine: EAGLEInference,
    prompts: list[list[int]],
    max_new_tokens: int,
    tell: Callable[[str], None] | None,
    **options: Any,
) -> GenerationOutput:
    """Generates as `EAGLEInference.generate` does, and tells from time to time how many tokens there are."""
    pace, stream = Pace(), engine.stream(prompts, max_new_tokens, **options)
    for count, _ in enumerate(stream, start=1):
        if tell is not None and pace.is_due():
            tell(f"{count} of {len(prompts) * max_new_tokens} tokens")
            pace.told()
    return stream.output()


@dataclass
class Progress:
    """A bar on a terminal if tqdm is installed, else a line every `report_every` steps and every few seconds."""

    stage: Stage
    done: int  # steps before this run
    tokens_per_step: float
    report_every: int
    report_to: TextIO | None
    tell: Callable[[], str] | None

    def __post_init__(self) -> None:
        self._began, self._pace, self._bar = time.monotonic(), Pace(), None
        if is_terminal(sys.stderr):
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=self.stage.steps, initial=self.done, desc=self.stage.name, unit="step")

    def update(self, step: int, loss: Tensor) -> None:
        """Reports a finished step. The loss, which waits for the device, is read only to be shown. `tell` is called at
        fixed steps, never by the clock, because the record keeps what it measured between its calls."""
        last = step == self.stage.steps
        shown = last or step % self.report_every == 0
        more = self.tell() if shown and self.tell is not None else ""
        if self._bar is not None:
            self._bar.update()
            if shown:
                self._bar.set_postfix_str(f"loss {float(loss):.4f}  {more}".rstrip())
            if last:
                self._bar.close()
        elif shown or self._pace.is_due():
            self._pace.told()
            loss_value = float(loss)
            seconds_per_step = (time.monotonic() - self._began) / (step - self.done)
            print(
                f"{self.stage.name} {step}/{self.stage.steps}  loss {loss_value:.4f}  {more}{'  ' if more else ''}"
                f"{self.tokens_per_step / seconds_per_step:,.0f} tok/s  "
                f"{seconds_per_step * (self.stage.steps - step):.0f} s left",
                file=self.report_to,
                flush=True,
            )


def make_optimizer(module: nn.Module, stage: Stage) -> torch.optim.AdamW:
    """Returns AdamW, without decay of norm weights."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": stage.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=stage.learning_rate, betas=ADAM_BETAS, fused=parameters[0].is_cuda)


def initialise(module: nn.Module, num_layers: int, seed: int) -> None:
    """Draws normal weights of deviation 0.02, less for projections into the residual stream of deep models (GPT-2)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            ends_in_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 / math.sqrt(2 * num_layers) if ends_in_residual else 0.02
            nn.init.normal_(parameter, std=deviation, generator=generator)


def save_folder(module: nn.Module, config: dict[str, Any], folder: str | Path) -> None:
    """Writes `config` and the module's tensors, floating-point ones as bf16, as our loaders and Hugging Face's read
    them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = module.state_dict()
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    # `save_file` would make the file readable by its owner alone.
    (folder / "model.safetensors").write_bytes(safetensors().torch.save(stored, metadata={"format": "pt"}))
    write_json(folder / "config.json", config)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file under another name and renames it, so that an interrupted write leaves the old file whole."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
