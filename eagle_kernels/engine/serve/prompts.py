"""Reading prompts, a part at a time, until their requests can step with the others."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch.kv_pool import PrefillAttend
from ..batch.prefix_cache import Held
from ..batch.state import BatchState
from ..batch.transfer import to_device, to_host
from ..drafters.protocol import PromptPart
from ..models.protocol import TargetModel, takes_rows
from ..models.running import run_target
from ..requests.request import Request
from ..requests.sampling_params import Features
from ..step.packed_rows import PromptOutput, PromptRows
from ..step.runner import Launch
from ..step.stepper import Stepper
from ..step.verification import Scores, score

# The least tokens of prompts that tell where rows go among experts.
_MANY_TOKENS = 64


@dataclass(eq=False)
class Row:
    """Holds a request's place in the batch. Its prompt is read up to `num_read`; it runs once all of it is read."""

    request: Request
    pages: Held
    index: int
    number: int  # of the admission
    # [1, max_pages]; copied into the batch only once the row runs, since rows that do not run must write no keys
    block_table: Tensor | None = None
    drafts: set[int] = field(default_factory=set)  # numbers of those that read its text
    num_read: int = 0
    num_shared: int = 0  # tokens that others have read
    is_running: bool = False
    # launches that the host has not read yet; each brings at least one token
    num_pending: int = 0
    # copies for the host, of the prompt's tokens as far as it is read
    scores: list[Scores] = field(default_factory=list)

    @property
    def needs_step(self) -> bool:
        """Returns whether the row runs and its pending launches do not reach the request's token limit yet."""
        num_tokens = len(self.request.output_ids) + self.num_pending
        return self.is_running and num_tokens < self.request.params.max_new_tokens

    def text(self, size: int) -> list[int]:
        """Returns the next `size` tokens of the prompt and the one after them, which the draft reads with their last
        feature; after the last part there is none."""
        return self.request.prompt[self.num_read : self.num_read + size + 1]


class ReadPart(NamedTuple):
    """Holds a part of `size` tokens of a row's prompt, and what the target makes of it."""

    row: Row
    size: int
    tokens: Tensor  # [P + 1]: with the one after it; [P] if it is the last part
    logits: Tensor  # [1, V]: after its last token, until the next pass
    features: Tensor | None  # [1, P, F]; None: nobody reads them
    scored: Tensor | None = None  # [K, V]: logits of its `scored_rows`; None without any

    @property
    def is_last(self) -> bool:
        """Returns whether the prompt ends with it, until the row has noted that it is read."""
        return self.row.num_read + self.size == len(self.row.request.prompt)


def scored_rows(row: Row, size: int) -> range:
    """Returns the rows of the next `size` tokens after which a token comes whose log-probability is asked for."""
    first = row.request.params.logprob_start_len
    if first is None:
        return range(0)
    return range(max(0, first - 1 - row.num_read), min(size, len(row.request.prompt) - 1 - row.num_read))


def take_rows(prompts: PromptRows, output: PromptOutput, parts: Sequence[tuple[Row, int]]) -> list[ReadPart]:
    """Returns the parts that the step has read in these rows; the next step overwrites them."""
    (logits, features), read, text_begin, begin = output, [], 0, 0
    for number, (row, size) in enumerate(parts):
        text_stop, stop = text_begin + min(size + 1, len(row.request.prompt) - row.num_read), begin + size
        own = None if features is None else features[:, begin:stop]
        read.append(ReadPart(row, size, prompts.texts[text_begin:text_stop], logits[number, None], own))
        text_begin, begin = text_stop, stop
    return read


def read_parts(stepper: Stepper, state: BatchState, parts: Sequence[tuple[Row, int]]) -> list[ReadPart]:
    """Reads the next `size` prompt tokens of each row; of several rows only where the target `reads_several`."""
    device, spans = state.roots.device, [(row.num_read, size) for row, size in parts]
    texts = [row.text(size) for row, size in parts]
    tokens = to_device(list(itertools.chain(*texts)), device).split([len(text) for text in texts])
    scored, begins = [scored_rows(*part) for part in parts], [0, *itertools.accumulate(size for _, size in parts)]
    # those whose logits are needed, a part's last one after its others
    rows = [begin + at for begin, inner, (_, size) in zip(begins, scored, parts) for at in (*inner, size - 1)]
    if len(rows) == 1:
        last = {"last_only": True}
    else:
        rows = to_device(rows, device)
        last = {"last_rows": rows} if takes_rows(stepper.target) else {}
    attend = PrefillAttend(state.target_pool, torch.cat([row.block_table for row, _ in parts]), spans)
    ids = torch.cat([text[:size] for text, (_, size) in zip(tokens, parts)])[None]
    positions = torch.cat([torch.arange(start, start + size, device=device) for start, size in spans])[None]
    with _noting(stepper.target, texts):
        logits, features = run_target(stepper.target, ids, positions, attend, stepper.aux_layers, **last)
    logits = logits[0] if last else logits[0, rows]
    read = []
    for part, text, own, begin in zip(parts, tokens, logits.split([1 + len(inner) for inner in scored]), begins):
        own_features = None if features is None else features[:, begin : begin + part[1]]
        read.append(ReadPart(*part, text, own[-1:], own_features, own[:-1] if len(own) > 1 else None))
    return read


def _noting(target: TargetModel, texts: Sequence[Sequence[int]]) -> AbstractContextManager:
    """Lets a target with experts note where the rows of texts go, if they are many and not all alike, as in a warm-up:
    the first choice of a tree goes by them."""
    tells = sum(map(len, texts)) >= _MANY_TOKENS and len(set().union(*texts)) > 1
    return getattr(target, "noting", nullcontext)() if tells else nullcontext()


def hand_scores(row: Row) -> None:
    """Gives the request the scores of its prompt, whose copies the device has finished with its first token."""
    if row.request.params.logprob_start_len is not None:
        parts = zip(*row.scores) if row.scores else [[None]] * 3
        row.request.score_prompt(*([] if part[0] is None else torch.cat(part).tolist() for part in parts))
        row.scores.clear()


def take_parts(stepper: Stepper, state: BatchState, parts: Sequence[ReadPart]) -> Launch | None:
    """Lets the draft read parts, too; returns the first tokens of the rows whose prompts end with them.
    The batch changes last of all, so that a failure leaves every row as it was, but for what is read again."""
    ended = [part for part in parts if part.is_last]
    scores = [_score_part(part) for part in parts]  # before the launch, whose end they are waited for with
    roots, launch = iter(()), None
    if ended:
        rows = [part.row for part in ended]
        places = to_device([(row.index, len(row.request.prompt)) for row in rows], state.roots.device)
        indices, lengths = places.unbind(1)
        features = Features.of([row.request.params for row in rows])
        logits = torch.cat([part.logits for part in ended])  # a copy, which nothing overwrites
        first = stepper.draw_first(logits, state, indices, lengths, features)
        roots, tables = iter(first.tokens), torch.cat([row.block_table for row in rows])
        launch = Launch(first, [*enumerate(rows)])
    if stepper.resting:
        read = []
        for part in parts:
            row, tokens = part.row, torch.cat([part.tokens, next(roots)]) if part.is_last else part.tokens
            place = row.index, row.block_table, tokens, part.features, row.num_read, row.num_shared
            read.append(PromptPart(*place, part.is_last))
        for each in stepper.resting:
            own = [prompt for prompt, part in zip(read, parts) if each.number in part.row.drafts]
            if own:
                each.read_prompts(state, own)
    for part, scored in zip(parts, scores):
        part.row.scores += scored
    if ended:
        state.begin(indices, lengths, first.tokens[:, 0], tables, features)
    return launch


def _score_part(part: ReadPart) -> list[Scores]:
    """Returns the scores of a part's tokens, on their way to the host."""
    if part.scored is None:
        return []
    has_top, inner = part.row.request.params.top_logprobs > 0, scored_rows(part.row, part.size)
    after = part.tokens[inner.start + 1 : inner.stop + 1]
    return [  # some at a time, since they are widened to fp32
        Scores(*(values if values is None else to_host(values) for values in score(*each, has_top)))
        for each in zip(part.scored.split(256), after.split(256))
    ]
