"""No noise is looked at twice in a whole run, whichever strategy verifies and whoever drafts.

Runs on the references (harness/noise_keys.py says what counts as looking); kernels draw what the references draw.
"""

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.reference.residual import Draws
from op_tests.engine.toys import Markov, Walker, WalkerHead, random_llama, random_modules
from op_tests.harness.noise_keys import NoiseKeys

TREE, CHAIN = (3, 3, 9), (1, 4, 5)
REJECTION = {"verify_strategy": "rejection"}
DRAWN = {"TARGET", "DRAFT", "ACCEPT", "RESIDUAL"}
# tree, configuration and the streams of which something is inspected: the first token of every text, and those of plain
# steps, are of TARGET (of greedy requests too, to which their noise does nothing)
CASES = {
    "target_match": (TREE, {}, {"TARGET"}),
    "target_match, ngram": (TREE, {"method": "ngram"}, {"TARGET"}),
    "target_match, simulated": (CHAIN, {"simulated_accept_length": 2.5}, {"TARGET", "SIMULATE"}),
    "greedy": (TREE, {"verify_strategy": "greedy"}, {"TARGET"}),
    "topp": (TREE, {"verify_strategy": "topp", "max_candidate_len": 3}, {"TARGET"}),
    "typical": (TREE, {"verify_strategy": "typical"}, {"TARGET"}),
    "rejection, tree": (TREE, REJECTION, DRAWN),
    "rejection, chain": (CHAIN, REJECTION, DRAWN),
    "rejection, head": (TREE, REJECTION, DRAWN),
    "rejection, modules": ((1, 3, 4), REJECTION | {"method": "mtp"}, DRAWN),
    "rejection, chosen drafts": (TREE, REJECTION | {"method": "ngram"}, DRAWN - {"DRAFT"}),
    "rejection, trees that change": (TREE, REJECTION | {"adaptive": ((1, CHAIN), (2, None), (3, (2, 2, 5)))}, DRAWN),
}
# strategies that take tokens which nothing was drawn for
NO_DRAWS = ("greedy", "topp", "typical")
# more requests than rows, of texts that end one after another
PROMPTS, LENGTHS = [[1, 2], [3], [0, 1, 2, 3, 4, 5, 0, 1], [5, 5], [2, 4, 1]], [16, 18, 22, 27, 33]


def models_of(name):
    if name == "rejection, head":
        return WalkerHead(20, 8), Walker(20, 8)
    if name == "rejection, modules":
        target = random_llama()
        return random_modules(target, 3), target
    target = Markov(vocab_size=6, max_length=96)
    return Markov(vocab_size=6, max_length=96, seed=1), target


def run(name):
    """Requests of other seeds and parameters; some have to wait for a row."""
    tree, options, _ = CASES[name]
    config = EAGLEConfig(**dict(zip(("topk", "num_steps", "num_draft_tokens"), tree)), **options, max_batch=3)
    draft, target = models_of(name)
    engine = EAGLEInference(draft if config.needs_model else None, target, config)
    others = [{"temperature": 0.0 if config.verify_strategy == "greedy" else 1.5}] * len(PROMPTS)
    if config.verify_strategy not in ("greedy", "typical"):
        others[1:3] = {"temperature": 1.0, "frequency_penalty": 0.5}, {"temperature": 0.7, "top_p": 0.9}
    requests = []
    for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
        params = SamplingParams(max_new_tokens=length, seed=index - 2, **others[index])
        requests.append(engine.submit(prompt, params))
    engine.collect()
    assert [len(request.output_ids) for request in requests] == LENGTHS
    return requests


@pytest.mark.cross
@pytest.mark.parametrize("name", CASES)
def test_no_noise_is_inspected_twice(name, monkeypatch):
    keys = NoiseKeys(monkeypatch)
    requests = run(name)
    assert not keys.faults
    assert keys.streams == CASES[name][2]
    # so that no token was drawn of noise that was not seen, or from where none was recorded
    seen = {(key.seed, key.position) for key in keys.inspected}
    for request in requests:
        place = len(request.prompt)
        drawn = {(request.seed, place + index) for index in range(len(request.output_ids))}
        assert drawn <= seen or name in NO_DRAWS
        assert (request.seed, place) in seen
    assert sum(sum(request.accepted) for request in requests) > 5
    # keys of drafts do come again, as the drafter says: then not to look twice means something
    again = {key for key, drawings in keys.drawings.items() if len(drawings) > 1}
    assert len(again & keys.inspected.keys()) > 5 or "DRAFT" not in keys.streams


# the recorder: what must not be, planted; op_tests/mutants plants noise of drafts that is found again


def a_coin_for_all_children(monkeypatch):
    coin = Draws.uniform
    monkeypatch.setattr(Draws, "uniform", lambda draws, position, draw=0: coin(draws, position))


def a_residual_with_the_noise_of_the_token_before(monkeypatch):
    choose = Draws.choose
    monkeypatch.setattr(Draws, "choose", lambda draws, weights, position: choose(draws, weights, position // 2))


FAULTS = {a_coin_for_all_children: "ACCEPT", a_residual_with_the_noise_of_the_token_before: "RESIDUAL"}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_second_look_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    keys = NoiseKeys(monkeypatch)
    run("rejection, tree")
    assert any(FAULTS[plant] in fault for fault in keys.faults)
