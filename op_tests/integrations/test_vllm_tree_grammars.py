"""Structured outputs with trees in the vLLM plug-in: a row's mask is that of the grammar after the path to its node."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle_kernels.integrations.vllm import grammars
from eagle_kernels.integrations.vllm.trees import TreeShape
from op_tests.integrations.vllm_grammar import Backend, Grammar
from op_tests.integrations.vllm_server import Tree

SIZE = 70
SHAPE = TreeShape(4, 3, 12)
CONFIG = SimpleNamespace(
    additional_config={"eagle_kernels": {"topk": 4, "depth": 3}},
    speculative_config=SimpleNamespace(num_speculative_tokens=11),
)
END = 9  # the token that ends reasoning


class Manager:
    """vLLM's manager of structured outputs, of a model that reasons before a grammar begins, or does not."""

    def __init__(self, config=CONFIG, reasons=False):
        self.vllm_config, self.backend, self.reasons = config, Backend(SIZE), reasons

    def should_fill_bitmask(self, request) -> bool:
        is_end = lambda text, delta: delta == [END] and text[-1] == END  # noqa: E731
        request.structured_output_request.reasoner = SimpleNamespace(is_reasoning_end_streaming=is_end)
        return not self.reasons


def request(name: str, text=(3, 5), last=None) -> SimpleNamespace:
    grammar = Grammar(SIZE, last)
    grammar.accept_tokens(name, grammar.validate_tokens(list(text)))
    return SimpleNamespace(
        request_id=name, structured_output_request=SimpleNamespace(grammar=grammar), is_prefill_chunk=False,
        spec_token_ids=None, all_token_ids=list(text), is_finished=lambda: False,
    )  # fmt: skip


def encoded(tree: Tree) -> list[int]:
    return [token + (parent << 32) for token, parent in zip(tree.tokens[1:], tree.parents[1:])]


def random_trees(count: int, seed: int) -> list[Tree]:
    coin = np.random.default_rng(seed)
    return [Tree.random(SHAPE, [4, 8, 10], coin) for _ in range(count)]


def mask_after(text: list[int], last=None) -> np.ndarray | None:
    """The mask after a text; None if the grammar forbids it. All is allowed once it has ended."""
    grammar, mask = Grammar(SIZE, last), Backend(SIZE).allocate_token_bitmask(1)
    for token in text:
        if grammar.is_terminated():
            return mask[0].numpy()
        if not grammar.validate_tokens([token]):
            return None
        grammar.accept_tokens("", [token])
    if not grammar.is_terminated():
        grammar.fill_bitmask(mask, 0)
    return mask[0].numpy()


def masks_of(manager, requests, scheduled):
    fail = lambda manager, requests, names, scheduled: np.full((len(names), 3), 7, np.int32)  # noqa: E731
    by_name = {each.request_id: each for each in requests}
    return grammars.grammar_bitmask(fail, manager, by_name, list(by_name), scheduled)


@pytest.mark.parametrize("last", [None, 3, 4])
def test_a_row_is_masked_by_the_path_to_its_node(last):
    trees = random_trees(20, 1)
    requests = [request(str(index), last=last) for index in range(len(trees))]
    scheduled = {each.request_id: encoded(tree) for each, tree in zip(requests, trees)}
    found, num_forbidden = masks_of(Manager(), requests, scheduled).reshape(20, SHAPE.num_nodes, -1), 0
    for each, tree, masks in zip(requests, trees, found):
        text = each.structured_output_request.grammar.tokens
        assert text == [token for token in (3, 5) if token in text]  # as it was before
        for node, mask in enumerate(masks):
            wanted = mask_after([*text, *(tree.tokens[above] for above in tree.path(node)[1:])], last)
            num_forbidden += wanted is None
            assert wanted is None or (mask == wanted).all()
    assert num_forbidden > 20


def test_what_vllm_cuts_is_a_tree_and_others_are_its_own():
    """Rows of requests without drafts, in the order of the requests."""
    tree, requests = random_trees(1, 2)[0], [request("a"), request("b"), request("c")]
    whole = masks_of(Manager(), requests[1:2], {"b": encoded(tree)})
    found = masks_of(Manager(), requests, {"b": encoded(tree)[:5], "c": []})
    assert (found[[0, 7]] == 7).all() and (found[1:7] == whole[:6]).all()
    chains = SimpleNamespace(additional_config={}, speculative_config=CONFIG.speculative_config)
    assert (masks_of(Manager(chains), requests[:1], {"a": [4, 8]}) == 7).all()


def test_a_grammar_begins_after_the_end_of_reasoning():
    tree = Tree([-1, 4, END, 11, 19, 8], [-1, 0, 0, 2, 3, 1])
    found = masks_of(Manager(reasons=True), [request("a", ())], {"a": encoded(tree)})
    assert (found[[0, 1, 5]] == -1).all()
    assert (found[2] == mask_after([])).all() and (found[3] == mask_after([11])).all()
    assert (found[4] == mask_after([11, 19])).all()


def test_drafts_that_are_not_known_are_left():
    known, unknown = request("a"), request("b")
    tree = random_trees(1, 3)[0]
    masks = masks_of(Manager(), [known, unknown], {"a": encoded(tree), "b": [-1] * 4})
    assert not masks[13:].any() and (masks[12] == mask_after(unknown.structured_output_request.grammar.tokens)).all()
    batch = SimpleNamespace(req_ids=["c", "b", "a"], cu_num_logits_np=np.array([0, 2, 7, 19]))
    seen = []
    result = grammars.apply_grammar_bitmask(
        lambda *given: seen.append(given) or "masked", "worker", "logits", batch, ["a", "b"], masks
    )
    assert result == "masked" and seen == [("worker", "logits", batch, ["a", "b"], masks)]
    assert batch.eagle_kernels_unknown == {"b"}


def test_parents_are_those_of_the_trees(device):
    shape = TreeShape(8, 5, 70)
    coin = np.random.default_rng(4)
    trees = [Tree.random(shape, [4, 8, 10, 3, 1], coin) for _ in range(3)]
    drafted = torch.stack([tree.state(shape) for tree in trees], 1).to(device)
    parents = grammars.parents_of(drafted)
    assert parents.tolist() == [tree.parents[1:] for tree in trees]
    drafts = torch.tensor([tree.tokens[1:] for tree in trees], device=device)
    keep = lambda handler, batch, drafts: drafts.tolist()  # noqa: E731
    batch = SimpleNamespace(eagle_kernels_parents=parents)
    assert grammars.set_draft_tokens(keep, None, batch, drafts) == [encoded(tree) for tree in trees]
    assert grammars.set_draft_tokens(keep, None, SimpleNamespace(), drafts) == drafts.tolist()


def test_the_scheduler_gets_drafts_as_they_are():
    one, chunk, ended = request("a"), request("b"), request("c")
    chunk.is_prefill_chunk, ended.is_finished = True, lambda: True
    scheduler = SimpleNamespace(vllm_config=CONFIG, requests={each.request_id: each for each in (one, chunk, ended)})
    nodes = encoded(random_trees(1, 5)[0])
    drafts = SimpleNamespace(req_ids=["a", "b", "c", "gone"], draft_token_ids=[list(nodes) for _ in range(4)])
    grammars.update_draft_token_ids(None, scheduler, drafts)
    assert (one.spec_token_ids, chunk.spec_token_ids, ended.spec_token_ids) == (nodes, [], None)
    output = SimpleNamespace(scheduled_spec_decode_tokens={"a": [-1] * 4, "c": [-1] * 4})
    grammars.update_draft_token_ids_in_output(None, scheduler, drafts, output)
    assert output.scheduled_spec_decode_tokens == {"a": nodes[:4], "c": [-1] * 4}
    assert output.num_invalid_spec_tokens == {}
    scheduler.vllm_config = SimpleNamespace(additional_config=None, speculative_config=None)
    for update, given in (
        (grammars.update_draft_token_ids, (drafts,)), (grammars.update_draft_token_ids_in_output, (drafts, output)),
    ):  # fmt: skip
        assert update(lambda *given: given, scheduler, *given) == (scheduler, *given)
