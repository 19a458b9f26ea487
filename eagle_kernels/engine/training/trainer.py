"""One training loop for both models: schedule, checkpoints, a time budget, progress."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from .corpus import windows
from .recipe import Stage

LossFunction = Callable[[Tensor], Tensor]  # of a batch of windows [B, T] int64

ADAM_BETAS = (0.9, 0.95)
LOSS_SMOOTHING = 0.02
REPORT_EVERY = 50
SAVE_EVERY = 250


def mixed_precision(device: torch.device) -> torch.autocast:
    """bf16 matrix products on GPUs, plain fp32 on CPUs."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def device_name(device: torch.device) -> str:
    """What a record of a run says about where it ran."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


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


def make_optimizer(module: nn.Module, stage: Stage) -> torch.optim.AdamW:
    """AdamW; norm weights are not decayed."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": stage.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=stage.learning_rate, betas=ADAM_BETAS, fused=parameters[0].is_cuda)
