"""The trees that are shown are those that were verified: held against the text, the models and the ops' own numbers."""

import math
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.drafters.model_drafter import Candidates
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.step import plan as steps
from eagle_kernels.tools.trees.view import VerifiedTree, verified_trees, why
from op_tests.engine.methods import METHODS, toys
from op_tests.engine.toys import ToyModel, plain_logits, random_llama, random_modules
from op_tests.sampling_law import law

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
CODE = "def quicksort(items):\n    return"
SAMPLINGS = {"greedy": {}, "sampled": {"temperature": 0.8}, "filtered": {"temperature": 0.9, "top_k": 6, "top_p": 0.9}}


@pytest.fixture(scope="module")
def pair() -> EAGLEInference:
    target, draft = demo_pair()
    return EAGLEInference.from_pretrained(
        draft, target, EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=10), device="cpu"
    )


def collect(engine, prompt, max_new_tokens=40, **options) -> list[VerifiedTree]:
    return list(verified_trees(engine, prompt, max_new_tokens, **options))


def walked(tree: VerifiedTree, following: list[int]) -> list[int]:
    """The nodes that a text leads through."""
    path = [0]
    for token in following:
        below = [node.number for node in tree.children(path[-1]) if node.token_id == token]
        if not below:
            break
        path += below
    return path


def path_to(tree: VerifiedTree, number: int) -> list[int]:
    """The tokens from the root to a node."""
    tokens = []
    while number >= 0:
        node = tree.node(number)
        tokens, number = [node.token_id, *tokens], node.parent
    return tokens


def check_text(trees: list[VerifiedTree], prompt: list[int], output: list[int]) -> None:
    """Every tree hangs on the text where it should, and its accepted path is what the text took of it."""
    at = 1
    for number, tree in enumerate(trees, start=1):
        assert (tree.step, tree.nodes[0].token_id) == (number, output[at - 1])
        assert list(tree.tokens) == output[at : at + len(tree.tokens)] and tree.tokens
        assert [node.number for node in tree.nodes] == sorted({node.number for node in tree.nodes})
        for node in tree.nodes[1:]:
            parent = tree.node(node.parent)
            assert parent.number < node.number and node.depth == parent.depth + 1
            assert [twin.token_id for twin in tree.children(parent.number)].count(node.token_id) == 1
        path = walked(tree, list(tree.tokens))
        assert [node.number for node in tree.nodes if node.is_in_text] == path
        assert tree.num_accepted == len(path) - 1 and tree.stop.node == path[-1]
        assert len(tree.tokens) - tree.num_accepted == (tree.stop.choice is not None)
        # nothing was accepted that the target had not chosen
        for node in tree.nodes[1:]:
            above = tree.node(node.parent)
            assert node.is_accepted == (above.target is not None and above.target.token_id == node.token_id)
            assert (node.target is not None) == node.is_accepted and (node.target_prob is None) == (not above.target)
        at += len(tree.tokens)
    assert at == len(output)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_trees_of_a_head_are_the_text_and_the_laws(pair, sampling):
    prompt = pair.tokenizer.encode(CODE)
    output = pair.generate(prompt, 40, seeds=3, logprobs=True, **sampling)
    seen = []
    trees = collect(pair, prompt, seeds=3, **sampling)
    check_text(trees, prompt, output.output_ids)
    text, at = pair.tokenizer.decode(prompt + output.output_ids), len(prompt)
    for tree in trees:
        assert text[:at].endswith(tree.context) and tree.nodes[0].text == text[at]
        committed = prompt + output.output_ids[: at - len(prompt) + 1]
        for node in (node for node in tree.nodes if node.is_in_text):
            # of each token that the target chose the op itself tells how probable it was
            chosen_at = at + 1 + node.depth - len(prompt)
            if chosen_at < len(output.output_ids):
                assert node.target.prob == pytest.approx(math.exp(output.logprobs[chosen_at]), rel=1e-3)
            if not sampling:
                law = plain_logits(pair, committed + path_to(tree, node.number)[1:])[-1].softmax(-1)
                for child in tree.children(node.number):
                    assert child.target_prob == pytest.approx(float(law[child.token_id]), abs=1e-4)
        at += len(tree.tokens)
    # the head's logits at the roots, as each step finds them
    pair.on_tree = lambda step: seen.append(step.batch.state.draft_logits[0].softmax(-1))
    pair.generate(prompt, 40, seeds=3, **sampling)
    pair.on_tree = None
    for tree, law in zip(trees, seen):
        ids = torch.arange(len(law))
        ids = (ids if pair.draft.draft_to_target is None else ids + pair.draft.draft_to_target).tolist()
        for node in tree.children(0):
            assert node.draft_prob == node.path_prob == pytest.approx(float(law[ids.index(node.token_id)]), rel=1e-4)


@pytest.mark.parametrize("text", ["日本語のテキスト。" * 6, "🙂" * 20 + "x" + "🙂" * 20, "x" * 40, "é"])
def test_a_context_is_of_whole_characters(pair, text):
    """Here a byte is a token."""
    (tree, *_) = collect(pair, pair.tokenizer.encode(text), 4)
    assert tree.context == text[-32:]


def products(tree: VerifiedTree) -> None:
    """A path's probability is that of its drafts, and falls."""
    for node in tree.nodes[1:]:
        assert (node.draft_prob is None) == (node.path_prob is None)
        if node.path_prob is not None:
            above = tree.node(node.parent).path_prob if node.parent else 1.0
            assert 0 <= node.draft_prob <= 1
            assert node.path_prob == pytest.approx(above * node.draft_prob, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"method": "draft_model", "topk": 3, "num_steps": 3, "num_draft_tokens": 12}, {}),
        (METHODS["hybrid tree"], {}),
        ({"method": "draft_model", "topk": 3, "num_steps": 3, "verify_strategy": "rejection"}, {"temperature": 0.7}),
        ({"method": "draft_model", "topk": 3, "num_steps": 3, "verify_strategy": "rejection"}, {}),
        ({"method": ("draft_model", "ngram"), "topk": 2, "num_steps": 3}, {}),
    ],
    ids=["draft_model", "hybrid", "drawn", "drawn greedily", "one of two methods"],
)
def test_draft_probabilities_are_those_of_the_model(options, sampling, device):
    """A language model drafts: what it says of each path is computed in one causal pass, away from the engine."""
    target, draft = toys(device)
    engine = EAGLEInference(draft, target, EAGLEConfig(**options))
    trees = collect(engine, PROMPT, 12, seeds=1, **sampling)
    output = engine.generate(PROMPT, 12, seeds=1, **sampling).output_ids
    reader, at, num_known = SimpleNamespace(target=draft, device=device), 0, 0
    for tree in trees:
        products(tree)
        for node in tree.nodes[1:]:
            if node.draft_prob is None:
                assert options["method"] == "hybrid"
                continue
            path = path_to(tree, node.number)
            logits = plain_logits(reader, PROMPT + output[:at] + path[:-1])[-1]
            law = (logits / sampling.get("temperature", 1.0)).softmax(-1)
            assert node.draft_prob == pytest.approx(float(law[node.token_id]), rel=2e-3)
            num_known += 1
        at += len(tree.tokens)
    assert num_known >= 4 * len(trees)


ASKED = {
    "greedy": {"frequency_penalty": 1.5, "repetition_penalty": 1.7},
    **{f"{name} alone": {"temperature": 0.9, name: value} for name, value in {
        "top_k": 3, "top_p": 0.6, "min_p": 0.4, "repetition_penalty": 1.8, "frequency_penalty": 1.5,
        "presence_penalty": 2.0, "min_new_tokens": 5,
    }.items()},
    "all": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3,
            "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_new_tokens": 7},
}  # fmt: skip
ENDS = (7, 9, 13)


@pytest.mark.parametrize("sampling", ASKED.values(), ids=ASKED)
def test_target_probabilities_are_those_of_the_law(sampling, device):
    """Of every child of an accepted node and of the target's choice after it, from the definitions."""
    target, draft = toys(device)
    engine = EAGLEInference(draft, target, EAGLEConfig(**METHODS["hybrid tree"]))
    output, num_seen = [], 0
    for tree in collect(engine, PROMPT, 8, seeds=2, stop_token_ids=ENDS, **sampling):
        output = output or [tree.nodes[0].token_id]
        for node in (node for node in tree.nodes if node.target is not None):
            path = output + path_to(tree, node.number)[1:]
            given = {name: value for name, value in sampling.items() if name != "min_new_tokens"}
            given |= {
                "prompt": tuple(PROMPT),
                "output_counts": [path.count(token) for token in range(target.vocab_size)],
            }
            given["temperature"] = given.get("temperature", 0.0) or 1.0  # greedy choices have probabilities at 1
            held_back = ENDS if len(path) < sampling.get("min_new_tokens", 0) else ()
            given["allowed"] = [token for token in range(target.vocab_size) if token not in held_back]
            probs = law(plain_logits(engine, PROMPT + path)[-1].tolist(), given)
            shown = [(node.target.token_id, node.target.prob)]
            shown += [(child.token_id, child.target_prob) for child in tree.children(node.number)]
            for token, prob in shown:
                assert prob == pytest.approx(probs[token], rel=1e-3, abs=1e-6)
                num_seen += 1
        output += tree.tokens
    assert num_seen >= 8


class Counter(ToyModel):
    """A target whose next token is one more, up to 19; so a text, and every right draft, is known."""

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False):
        output = super().forward(input_ids, positions, attend, capture=capture, last_only=last_only)
        following = (input_ids[:, -1:] if last_only else input_ids) + 1
        tokens = torch.arange(self.vocab_size, device=following.device)
        return output._replace(logits=8.0 * (following[..., None] % 20 == tokens))


@pytest.mark.parametrize("lag", [0, 1])
def test_shares_of_suffix_drafts(lag, device, monkeypatch):
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: lag)
    config = EAGLEConfig(method="suffix", topk=2, num_steps=3, suffix_decoding_min_token_prob=0.0)
    engine = EAGLEInference(None, Counter(device=device), config)
    # 1, 2 was there four times, the last one at the end; behind it came 3 twice and 4 once, then 9 once and 8 once
    trees = collect(engine, [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1], 6)
    shares = {tuple(path_to(trees[0], node.number)): node.path_prob for node in trees[0].nodes[1:]}
    want = {(2, 3): 0.5, (2, 4): 0.25, (2, 3, 9): 0.25, (2, 3, 8): 0.25}
    assert (2, 3) in shares and all(shares.get(path, share) == share for path, share in want.items())
    repeating = collect(engine, [*range(20), *range(20), 0], 50)
    for tree in trees + repeating:
        products(tree)
        assert all(node.path_prob is not None for node in tree.nodes[1:])
    assert max(tree.num_accepted for tree in repeating) == 3
    # nothing has followed the last token yet where it stands now; what was offered a step ago has been followed
    firsts = [node.path_prob for tree in repeating for node in tree.children(0)]
    assert (max(firsts) == 1.0) == (lag == 1) and min(firsts) >= 0.5


@pytest.mark.cross
@pytest.mark.parametrize(
    ("sampling", "lag"), [({}, 0), ({"temperature": 0.7}, 1)], ids=["greedy", "sampled, the host a step behind"]
)
@pytest.mark.parametrize("name", [*METHODS, "modules", "adaptive"])
def test_every_method_shows_its_trees_and_goes_on_as_before(name, sampling, lag, device, monkeypatch):
    monkeypatch.setattr("eagle_kernels.engine.serve.scheduler.host_lag", lambda device: lag)
    if name == "modules":
        target = random_llama(num_layers=2, device=device)
        draft, options = random_modules(target, 2), {"topk": 1, "num_steps": 2}
    else:
        target, draft = toys(device)
        options = METHODS.get(name, {"topk": 2, "num_steps": 2, "adaptive": "auto"})
    engine = EAGLEInference(draft, target, EAGLEConfig(**options))
    want = engine.generate(PROMPT, 30, seeds=5, **sampling).output_ids
    used = dict(engine.session.plans)
    trees = collect(engine, PROMPT, 30, seeds=5, **sampling)
    check_text(trees, PROMPT, want)
    for tree in trees:
        products(tree)
    assert trees[-1].finish_reason == "length" and not any(tree.finish_reason for tree in trees[:-1])
    # who looked has left nothing: the same steps as before, and the same text
    assert engine.on_tree is None
    if "suffix" not in name:
        assert engine.generate(PROMPT, 30, seeds=5, **sampling).output_ids == want
    assert engine.session.plans == used and all(made.plain.on_tree is None for made in used.values())


def counting(device, **options) -> EAGLEInference:
    """A target that counts, and drafts that do too."""
    options = {"topk": 1, "num_steps": 3} | options
    return EAGLEInference(Counter(device=device), Counter(device=device), EAGLEConfig(**options))


def last_stop(engine, prompt, *arguments, **options) -> tuple[VerifiedTree, str, str]:
    tree = collect(engine, prompt, *arguments, **options)[-1]
    return tree, tree.stop.reason, why(tree)


def test_an_end_token_among_the_drafts(device):
    tree, reason, sentence = last_stop(counting(device), [1, 2], stop_token_ids=(5,))
    assert (reason, tree.tokens, tree.finish_reason, tree.stop.choice) == ("end_token", (4, 5), "eos", None)
    assert [node.is_in_text for node in tree.nodes] == [True, True, True, False] and tree.nodes[3].is_accepted
    assert sentence == "stopped at depth 2: <5> is an end token"


@pytest.mark.parametrize(("end", "num_accepted"), [(7, 3), (11, 3)])
def test_an_end_token_of_the_target_itself(end, num_accepted, device):
    tree, reason, sentence = last_stop(counting(device), [1, 2], stop_token_ids=(end,))
    assert (reason, tree.num_accepted, tree.stop.choice.token_id) == ("end_token", num_accepted, end)
    assert sentence.startswith(f"stopped at depth 3, after <{end - 1}>: the target chose <{end}> (0.99), an end token")


def test_the_token_limit(device):
    tree, reason, sentence = last_stop(counting(device), [1, 2], 7)
    assert (reason, tree.tokens, tree.num_accepted, tree.stop.choice) == ("length", (8, 9), 2, None)
    assert sentence == "stopped at depth 2, after <9>: the token limit ends the text here"
    # a limit that cuts nothing off is not why the path stopped
    tree, reason, _ = last_stop(counting(device), [1, 2], 9)
    assert (reason, tree.finish_reason) == ("leaf", "length")


def test_a_leaf_and_no_drafts_at_all(device):
    tree, reason, sentence = last_stop(counting(device), [1, 2], 5)
    assert (reason, tree.num_accepted, tree.num_levels) == ("leaf", 3, 3)
    assert sentence == "stopped at depth 3, after <6>: no draft follows; the target goes on with <7> (0.99)"
    tree, reason, sentence = last_stop(counting(device, method="ngram"), [1, 2], 2)
    assert (reason, len(tree.nodes), tree.num_levels) == ("no_drafts", 1, 0)
    assert sentence == "stopped at the root: nothing was drafted; the target goes on with <4> (0.99)"


def test_another_token_of_the_target(device):
    engine = EAGLEInference(None, Counter(device=device), EAGLEConfig(method="ngram", topk=1, num_steps=3))
    tree, reason, sentence = last_stop(engine, [3, 4, 5, 9, 2, 3, 4], 2)
    assert (reason, tree.stop.choice.token_id, tree.stop.is_drafted) == ("target", 6, False)
    assert [node.token_id for node in tree.nodes] == [5, 9, 2, 3] and tree.num_accepted == 0
    assert sentence == "stopped at the root: the target chose <6> (0.99), which was not drafted there"


def test_a_stop_string(pair):
    tree, reason, sentence = last_stop(pair, pair.tokenizer.encode("def quicksort(items):\n"), stop=("ret",))
    assert (reason, tree.finish_reason) == ("stop_string", "stop")
    assert sentence.startswith("stopped at depth") and sentence.endswith("the end of a stop string")


@pytest.mark.slow
def test_lossy_rules_may_choose_what_they_have_refused(pair):
    """Where two candidates are too few for top_p, none is accepted; the token that is drawn may be a draft."""
    options = {"temperature": 1.0, "top_p": 0.9, "verify_strategy": "topp", "max_candidate_len": 2}
    trees = collect(pair, pair.tokenizer.encode("class "), seeds=0, **options)
    stops = [tree for tree in trees if tree.stop.is_drafted]
    for tree in stops:
        refused = {node.token_id for node in tree.children(tree.stop.node) if not node.is_accepted}
        assert tree.stop.choice.token_id in refused and "which was drafted but not accepted" in why(tree)
    assert stops


def test_bytes_that_are_no_character_have_ids(pair):
    """Of an `é` the first byte is no text, the second one is all of it."""
    trees = collect(pair, list("# é é é é é é é é ".encode()) + [0xC3], 12)
    nodes = [node for tree in trees for node in tree.nodes]
    assert all(node.text == "" for node in nodes if node.token_id >= 0xC2)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(node.text for node in nodes)


def test_nobody_looks_nothing_is_computed(pair, monkeypatch):
    """Without on_tree a step asks for no probability of a path, and its runner is the one that it was."""
    asked = []
    unwatched = Candidates.path_probs
    monkeypatch.setattr(Candidates, "path_probs", lambda *arguments: asked.append(1) or unwatched(*arguments))
    prompt = pair.tokenizer.encode("def f(")
    pair.generate(prompt, 10)
    assert not asked
    assert len(collect(pair, prompt, 10)) == len(asked) > 0


def test_graphs_are_for_those_whom_nobody_watches(device, monkeypatch):
    stepper = SimpleNamespace(
        target=SimpleNamespace(device=torch.device("cuda")), config=EAGLEConfig(), on_tree=None, can_be_captured=True
    )
    monkeypatch.setattr(steps, "StepRunner", lambda stepper, state, use_graphs: use_graphs)
    assert steps._runner(stepper, None) is True
    stepper.on_tree = print
    assert steps._runner(stepper, None) is False
    engine = counting(device, cuda_graph=True)
    engine.on_tree = print
    with pytest.raises(ValueError, match="cuda_graph must not be True with on_tree"):
        engine.generate([1, 2], 4)
    with pytest.raises(ValueError, match="on_tree must be None or a callable, got 3"):
        engine.on_tree = 3


def test_one_request_alone_and_nothing_left_behind(device):
    engine = counting(device)
    with pytest.raises(ValueError, match="exceed"):
        collect(engine, [1, 2], 10**6)
    with pytest.raises(ValueError, match="prompt must be one prompt, got 2"):
        collect(engine, [[1], [2]], 4)
    trees = verified_trees(engine, [1, 2], 40)
    next(trees)
    with pytest.raises(RuntimeError, match="no other requests and no on_tree"):
        next(verified_trees(engine, [1, 2], 4))
    trees.close()
    assert engine.on_tree is None and not engine.has_work
    assert engine.generate([1, 2], 4).output_ids == [3, 4, 5, 6]
    engine.submit([1, 2], SamplingParams(max_new_tokens=4))
    with pytest.raises(RuntimeError, match="no other requests and no on_tree"):
        collect(engine, [1, 2], 4)
