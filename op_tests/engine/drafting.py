"""Watches an engine's drafts, and runs plain steps between them; for tests of drafters."""

import torch

from eagle_kernels import SamplingParams
from eagle_kernels.engine.drafters.block_drafter import BlockDrafter
from eagle_kernels.engine.drafters.model_drafter import ModelDrafter
from eagle_kernels.reference.causal_attend import causal_attend, positions_of
from op_tests.engine.view import View

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6], list(range(40))]
TREES = {"chain": {"topk": 1, "num_steps": 4}, "tree": {"topk": 3, "num_steps": 3, "num_draft_tokens": 12}}
POLICIES = {"what the target takes": {}, "whole paths": {"accept_policy": "accept_all"}}
SMALL = {"page_size": 4, "max_batch": 3, "cuda_graph": False}
# steps of other lengths, and plain ones, as requests come
OF_LENGTHS = {
    "num_steps": 4, "adaptive": ((1, (1, 3, 4)), (2, None), (3, (2, 2, 5)), (4, (1, 4, 5))), "max_batch": 4,
    "cuda_graph": False,
}  # fmt: skip


class Oracle:
    """Checks each step's drafts against `drafts(text, config)`, which a subclass has: those of the text alone.

    All tokens are known when a step begins.
    """

    watched = BlockDrafter, "propose"

    def __init__(self, engine, monkeypatch):
        self.engine, self.num_checked = engine, 0
        propose = getattr(*self.watched)
        monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: 0)

        def checked(drafter, batch):
            tree, *_ = made = propose(drafter, batch)
            drafts = tree.draft_tokens.view(len(batch), -1)[:, 1:].tolist()
            for row in View(engine).rows:
                if row.is_running and row.index < len(batch):
                    text = row.request.prompt + row.request.output_ids
                    if len(text) == batch.lengths[row.index]:  # the first token is not read back yet
                        text.append(int(batch.roots[row.index]))
                    self.check(drafts[row.index], self.drafts(text, drafter._config), text)
                    self.num_checked += 1
            return made

        monkeypatch.setattr(*self.watched, checked)

    def check(self, drafts, wanted, text):
        assert drafts == wanted, f"{drafts} instead of {wanted} after {text}"


class ModelOracle(Oracle):
    """The same of drafters that ask a model level by level."""

    watched = ModelDrafter, "_draft"


def features_of(target, text, capture) -> torch.Tensor:
    """What a target says of a text but its last token, in one pass: features [T, F]."""
    tokens = torch.tensor([text[:-1]], device=target.device)
    return target.forward(tokens, positions_of(tokens), causal_attend, capture=capture).features[0]


def best_paths(logits, config) -> list[int]:
    """Tokens of the best paths through marginals, logits [levels, V], found by listing all of them."""
    paths, level = [], [(0.0, ())]
    for row in torch.log_softmax(logits, -1):
        best = row.topk(config.topk)
        steps = list(zip(best.values.tolist(), best.indices.tolist()))
        level = [(score + step, (*path, token)) for score, path in level for step, token in steps]
        paths += level
    paths.sort(key=lambda each: -each[0])
    return [path[-1] for _, path in paths[: config.num_verify_tokens - 1]]


def drafted_tokens(monkeypatch) -> list[int]:
    """Returns the list of all tokens that a `BlockDrafter` drafts from now on."""
    seen, propose = [], BlockDrafter.propose

    def watched(drafter, batch):
        proposal = propose(drafter, batch)
        tokens = proposal.tree.draft_tokens.view(len(batch), -1)[batch.is_live.bool(), 1:]
        seen.extend(tokens.flatten().tolist())
        return proposal

    monkeypatch.setattr(BlockDrafter, "propose", watched)
    return seen


def step_plainly(engine, count: int) -> None:
    engine.is_speculating = False
    for _ in range(count):
        engine.step()
    engine.is_speculating = True


def come_and_go(engine, least: int = 8, more: int = 4, has_pauses: bool = False) -> list:
    """Returns finished requests, which came one by one, each longer than the one before; plain steps in between."""
    requests = []
    for number, prompt in enumerate(PROMPTS):
        requests.append(engine.submit(prompt, SamplingParams(max_new_tokens=least + more * number)))
        engine.step()
        step_plainly(engine, number if has_pauses else 0)
    step_plainly(engine, 3 if has_pauses else 0)
    engine.collect()
    assert [request.error for request in requests] == [None] * 4
    return requests


def pause_between_drafts(engine, is_long: bool = False) -> list:
    """Returns finished requests; plain steps, few and many, came between their drafts. is_long: one by one, too."""
    requests = []
    for rest, pause in ((40, 0), (3, 1), (25, 2), (50, 7)):
        requests.append(engine.submit(PROMPTS[pause % 4], SamplingParams(max_new_tokens=rest)))
        step_plainly(engine, pause)
        engine.step()
    step_plainly(engine, 19)
    engine.collect()
    if is_long:
        requests.append(engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=20)))
        for _ in range(5):
            engine.step()
            step_plainly(engine, 1)
        engine.collect()
    assert [request.error for request in requests] == [None] * len(requests)
    return requests


def assert_plain_text(engine) -> None:
    """Greedy and, where the rule makes the same draws, seeded."""
    for sampling in ({}, {"temperature": 0.8, "seeds": [1, 2, 3, 4]}):
        if sampling and engine.config.verify_strategy == "rejection":
            continue  # other draws, of the same law
        text = engine.generate(PROMPTS, 12, **sampling).output_ids
        assert text == engine.generate(PROMPTS, 12, speculative=False, **sampling).output_ids
