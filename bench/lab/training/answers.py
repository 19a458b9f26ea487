"""Training data from the target: its answers to prompts, written to a file as they come.

A head has to guess what its target says, not what people wrote.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle_kernels.engine.config.eagle_config import EAGLEConfig
from eagle_kernels.engine.inference import EAGLEInference
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.heads import EagleConfig, EagleHead
from eagle_kernels.runtime.values import is_integer, parse_json, shown

from .head_recipe import HeadOptions
from .trainer import TimeBudgetReached, decode, tell_changes

SEED_STRIDE = 1_000_003  # distance between the seeds of two runs


def answer_prompts(
    target: Decoder,
    head_config: EagleConfig,
    prompts: Sequence[list[int]],
    path: Path,
    fingerprint: str,
    options: HeadOptions,
    *,
    end_token_ids: tuple[int, ...],
    deadline: float,
) -> list[list[int]]:
    """Returns the target's answer to each prompt, with its end token; answers that `path` holds are not computed again.

    path          a file with a line for the fingerprint and one for each answer, written batch by batch
    fingerprint   everything that decides the answers; a file with another fingerprint is refused
    options       of which count: answer_tokens, answer_temperature, seed and batch_size
    """
    answers = read_answers(path, fingerprint)
    engine, batch_size, longest = None, options.batch_size, max(map(len, prompts), default=0) + options.answer_tokens
    config = EAGLEConfig(topk=1, num_steps=1, max_batch=batch_size, eos_token_ids=end_token_ids, max_length=longest)
    began, done = time.monotonic(), len(answers)
    with path.open("a", encoding="utf-8") as file:
        while len(answers) < len(prompts):
            if time.monotonic() >= deadline:
                raise TimeBudgetReached(f"answers: {len(answers)} of {len(prompts)}")
            engine = engine or _plain_engine(target, head_config, config)
            batch = prompts[len(answers) : len(answers) + batch_size]
            seeds = [options.seed * SEED_STRIDE + index for index in range(len(answers), len(answers) + len(batch))]
            sampling = {"seeds": seeds, "speculative": False, "temperature": options.answer_temperature}
            output = decode(engine, batch, options.answer_tokens, _tell, **sampling).output_ids
            file.write("".join(json.dumps(answer) + "\n" for answer in output))
            file.flush()
            answers += output
            seconds_each = (time.monotonic() - began) / (len(answers) - done)
            left = seconds_each * (len(prompts) - len(answers))
            _tell(f"{len(answers)}/{len(prompts)}  {left:.0f} s left")
    return answers


def _tell(line: str) -> None:
    print(f"answers {line}", file=sys.stderr, flush=True)


def read_answers(path: Path, fingerprint: str) -> list[list[int]]:
    """Returns the answers in the file, and cuts the file off after its last whole line."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    if not lines:
        path.write_text(fingerprint + "\n", encoding="utf-8")
        return []
    if lines[0] != fingerprint:
        changed = tell_changes(lines[0], fingerprint)
        raise ValueError(f"{path} was made with other settings ({changed}); start in another folder")
    answers = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            answer = parse_json(line)
        except ValueError:
            answer = None
        if not (isinstance(answer, list) and all(map(is_integer, answer))):
            raise ValueError(f"{path}:{number}: must be the ids of an answer, got {shown(line)}")
        answers.append(answer)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return answers


def _plain_engine(target: Decoder, head_config: EagleConfig, config: EAGLEConfig) -> EAGLEInference:
    """Returns an engine for use without speculation: its head is untrained."""
    with torch.device(target.device):
        head = EagleHead(head_config, own_output=False).to(target.dtype)
    return EAGLEInference(head, target, config)
