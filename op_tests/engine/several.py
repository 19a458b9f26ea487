"""Engines with several drafts: of every kind, those that know the text, and what each of them drafts where."""

import random

import torch

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.config.several_drafts import fit_tree
from eagle_kernels.engine.step.choice import Fastest
from op_tests.engine.methods import SIZES
from op_tests.engine.prophets import Prophet
from op_tests.engine.toys import (
    DEVICE,
    MaskedDraft,
    MaskedHead,
    RowWalker,
    Walker,
    WalkerBlock,
    WalkerHead,
    WalkerModules,
)
from op_tests.engine.view import View

COIN = random.Random(4)
PROMPTS = [[COIN.randrange(18) for _ in range(COIN.choice((1, 3, 12)))] for _ in range(4)]
TREE = {"adaptive": "auto", "topk": 3, "num_steps": 4, "num_draft_tokens": 10}


def drafts_for(target, *names) -> dict:
    """A draft of each kind, or of those named."""
    sizes = {**SIZES, "device": target.device}
    made = {
        "head": lambda: WalkerHead(**sizes, seed=1), "model": lambda: Walker(**sizes, seed=2),
        "modules": lambda: WalkerModules(3, **sizes, seed=3), "masks": lambda: MaskedDraft(**sizes, seed=4),
        "masks head": lambda: MaskedHead(**sizes, seed=5), "block": lambda: WalkerBlock(**sizes, seed=6, of=target),
    }  # fmt: skip
    return {name: made[name]() for name in names or made}


def engine_of(*names, kind=RowWalker, device=DEVICE, **options):
    target = kind(**SIZES, device=device)
    return EAGLEInference(drafts_for(target, *names), target, EAGLEConfig(**TREE | options))


def prophets(target, text, rights):
    return {name: Prophet(text, target.vocab_size, is_right, target.device) for name, is_right in rights.items()}


def at_random(monkeypatch, seed=0):
    """Lets steps be of any kind whose draft does not rest."""
    coin = random.Random(seed)

    def choose(choice, num_rows):
        return coin.choice([number for number in range(choice._count) if choice.fits(number, num_rows)])

    monkeypatch.setattr(Fastest, "choose", choose)


def drafts_by_place(engine, number, monkeypatch) -> tuple[dict, dict]:
    """Will hold what a draft proposes, by tree, request and length, and its logits after the root by these two."""
    engine.generate(PROMPTS[:2], 2)
    proposed, said = {}, {}

    def live_places(batch):
        rows = zip(batch.seeds.tolist(), batch.lengths.tolist(), batch.is_live.tolist())
        return [(row, tuple(place)) for row, (*place, is_live) in enumerate(rows) if is_live]

    def watch(stepper):
        propose, config = stepper.drafter.propose, stepper.config

        def watched(batch):
            made = propose(batch)
            tokens = made.tree.draft_tokens.view(len(batch), -1).tolist()
            for row, place in live_places(batch):
                proposed[(config.topk, config.num_steps, config.num_verify_tokens, *place)] = tokens[row]
            return made

        monkeypatch.setattr(stepper.drafter, "propose", watched)

    runners = [each for each in View(engine).plan.runners[1:] if each.stepper.own.number == number]
    for runner in runners:
        watch(runner.stepper)
    reader = runners[0].stepper.own.reader
    start = reader.levels

    def started(batch):
        levels = start(batch)
        said.update((place, levels.logits[row].clone()) for row, place in live_places(batch))
        return levels

    monkeypatch.setattr(reader, "levels", started)
    return proposed, said


def check_drafts(drafts, name, target, options, run, monkeypatch) -> int:
    """Asserts that one of several drafts says and proposes what it does in an engine of its own, wherever both do in
    `run(engine)`; returns the number of places where both draft."""
    config, number = EAGLEConfig(**TREE | options), list(drafts).index(name)
    several = EAGLEInference(drafts, target, config)
    alone = EAGLEInference(drafts[name], target, fit_tree(config, several.draft[number]))
    found = drafts_by_place(several, number, monkeypatch)
    wanted = drafts_by_place(alone, 0, monkeypatch)
    for engine in (several, alone, alone):
        run(engine)
    trees, places = (one.keys() & other.keys() for one, other in zip(found, wanted))
    assert all(found[0][key] == wanted[0][key] for key in trees)
    for key in places:
        torch.testing.assert_close(found[1][key], wanted[1][key], rtol=1e-4, atol=1e-4)
    return len(places)
