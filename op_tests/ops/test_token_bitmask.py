"""generate_token_bitmask with a small grammar: rows against fresh matchers, and matchers left as they were."""

import pytest
import torch

import eagle_kernels
from op_tests.ops.tree.masks import links_from, random_parents, visible_from

VOCABULARY = 40
STOP = 39


class Digits:
    """A matcher of xgrammar's protocol: tokens alternate in parity, at most `most` of them, then STOP; it keeps a log.

    Like xgrammar it raises where it is used after its end, and where more is rolled back than was accepted.
    """

    def __init__(self, accepted=(), most=6):
        self.tokens, self.most, self.most_held = list(accepted), most, 0

    def _allows(self, token):
        if token == STOP:
            return bool(self.tokens)
        return 0 <= token < STOP and len(self.tokens) < self.most and token % 2 == len(self.tokens) % 2

    def accept_token(self, token):
        assert 0 <= token < VOCABULARY and not self.is_terminated()
        if not self._allows(token):
            return False
        self.tokens.append(token)
        self.most_held = max(self.most_held, len(self.tokens))
        return True

    def rollback(self, num_tokens):
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]

    def is_terminated(self):
        return self.tokens[-1:] == [STOP]

    def fill_next_token_bitmask(self, bitmask, index):
        assert not self.is_terminated()
        bitmask[index] = 0
        for token in filter(self._allows, range(VOCABULARY)):
            word = int(bitmask[index, token // 32]) & 0xFFFFFFFF | 1 << token % 32
            bitmask[index, token // 32] = word - (word >> 31 << 32)
        return True


def allowed(bitmask):
    """bool [rows, VOCABULARY]"""
    token = torch.arange(VOCABULARY)
    return (bitmask[:, token // 32] >> (token % 32)) & 1 == 1


def random_tokens(parents):
    """Tokens that the grammar mostly allows where they stand."""
    depth = visible_from(parents).sum(-1) - 1
    tokens = 2 * torch.randint(19, parents.shape) + (depth + 1) % 2
    tokens[:, 5::9] += 1
    tokens[:, 6::9] = STOP
    return tokens


def path_tokens(parents, tokens, node):
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def expected_rows(matcher, parents, tokens):
    """Each node on its own: a fresh matcher is fed the whole path."""
    rows = torch.full((len(parents), 2), -1, dtype=torch.int32)
    for node in range(len(parents)):
        fresh = Digits(matcher.tokens, matcher.most)
        path = path_tokens(parents, tokens, node)
        if all(not fresh.is_terminated() and fresh.accept_token(token) for token in path):
            if not fresh.is_terminated():
                fresh.fill_next_token_bitmask(rows, node)
    return rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_flat", [True, False])
def test_rows_equal_those_of_fresh_matchers(dtype, is_flat):
    num_nodes = 48
    parents = random_parents(5, num_nodes)
    tokens = random_tokens(parents)
    matchers = [Digits(), Digits([2, 5]), None, Digits([4] * 6), Digits([2, STOP])]
    before = [list(matcher.tokens) if matcher else None for matcher in matchers]
    links = [link.to(dtype) for link in links_from(parents)]
    bitmask = eagle_kernels.generate_token_bitmask(
        matchers, (tokens.flatten() if is_flat else tokens).to(dtype), *links, vocab_size=VOCABULARY
    )
    assert bitmask.dtype == torch.int32 and bitmask.shape == (5 * num_nodes, 2)
    for request, matcher in enumerate(matchers):
        rows = bitmask[request * num_nodes : (request + 1) * num_nodes]
        if matcher is None:
            assert (rows == -1).all()
        else:
            assert torch.equal(rows, expected_rows(matcher, parents[request].tolist(), tokens[request].tolist()))
            assert matcher.tokens == before[request]
    num_constrained = (bitmask[:num_nodes] != -1).any(1).sum()
    assert 10 < num_constrained < num_nodes and matchers[0].most_held > 2  # the nodes are not all alike


def test_worked_example():
    """Root 0 -> 1 (token 4) -> 2 (token 7) and 3 (token 8, refused) -> 4; 1's sibling is 5, STOP, refused at first."""
    children, siblings = torch.tensor([[1, 2, -1, 4, -1, -1]]), torch.tensor([[-1, 5, 3, -1, -1, -1]])
    tokens = torch.tensor([0, 4, 7, 8, 9, STOP])
    bitmask = eagle_kernels.generate_token_bitmask([Digits()], tokens, children, siblings, vocab_size=VOCABULARY)
    even, odd, stop = 0x55555555, 0xAAAAAAAA - 2**32, 1 << STOP - 32
    assert bitmask.tolist() == [[even, 0x55], [odd, 0x2A | stop], [even, 0x55 | stop], [-1, -1], [-1, -1], [-1, -1]]


def test_the_end_of_a_grammar_frees_what_follows():
    children, siblings = torch.tensor([[1, 2, 3, -1]]), torch.full((1, 4), -1)
    matcher = Digits()
    bitmask = eagle_kernels.generate_token_bitmask(
        [matcher], torch.tensor([0, 2, STOP, 2]), children, siblings, vocab_size=VOCABULARY
    )
    assert (bitmask[:2] != -1).any(1).all() and (bitmask[2:] == -1).all() and matcher.tokens == []


def test_greedy_walks_obey_the_grammar():
    """The masked target never leaves the grammar, whatever the tree holds: path and bonus are accepted in order."""
    parents = random_parents(8, 32)
    tokens = random_tokens(parents)
    links = links_from(parents)
    bitmask = eagle_kernels.generate_token_bitmask([Digits() for _ in range(8)], tokens, *links, vocab_size=VOCABULARY)
    logits = torch.randn(8 * 32, VOCABULARY)
    # the target wants the first child wherever there is one, allowed or not
    wanted = tokens.gather(1, links[0].clamp(min=0)).flatten()
    logits.scatter_add_(1, wanted[:, None], 9.0 * (links[0] >= 0).flatten()[:, None])
    logits.masked_fill_(~allowed(bitmask), float("-inf"))
    verdict = eagle_kernels.verify_tree(tokens, torch.arange(8 * 32).view(8, 32), *links, logits, spec_steps=6)
    for path in verdict.accept_index.tolist():
        matcher = Digits()
        for node in filter(lambda node: node >= 0, path):
            assert matcher.is_terminated() or matcher.accept_token(int(verdict.predicts[node]))
    assert (verdict.accept_token_num > 0).any()


@pytest.mark.parametrize("num_nodes", [1, 2, 20, 200])
def test_malformed_links_end(num_nodes):
    """Cycles, backward and wild links; node i naming i + 1 twice has 2^N paths, of which one is walked."""
    wild = torch.randint(-3, num_nodes + 3, (2, 4, num_nodes))
    wild[:, 0] = 0
    wild[:, 1] = torch.arange(num_nodes) + 1
    wild[:, 2] = 2**62
    matchers = [Digits(most=10**6) for _ in range(4)]
    tokens = torch.arange(num_nodes).repeat(4, 1)
    bitmask = eagle_kernels.generate_token_bitmask(matchers, tokens, *wild, vocab_size=VOCABULARY)
    assert bitmask.shape == (4 * num_nodes, 2) and all(matcher.tokens == [] for matcher in matchers)
    assert (bitmask[::num_nodes] != -1).any(1).all()


def rows_of_any_links(matcher, tokens, children, siblings):
    """As the definition says: forward links alone count, the first to a node only, each node asks a fresh matcher."""
    rows, met = torch.full((len(tokens), 2), -1, dtype=torch.int32), {0}

    def is_first(link, node):
        is_new = node < link < len(tokens) and link not in met
        met.update([link] if is_new else [])
        return is_new

    def walk(node, above):
        has_sibling = node > 0 and is_first(siblings[node], node)
        path, fresh = above + tokens[node : node + 1] * (node > 0), Digits(matcher.tokens, matcher.most)
        is_allowed = all(
            not fresh.is_terminated() and 0 <= token < VOCABULARY and fresh.accept_token(token) for token in path
        )
        if is_allowed and not fresh.is_terminated():
            fresh.fill_next_token_bitmask(rows, node)
            if is_first(children[node], node):
                walk(children[node], path)
        if has_sibling:
            walk(siblings[node], above)

    walk(0, [])
    return rows


def test_rows_of_malformed_links_are_those_of_the_definition():
    """Links back, away, to oneself and to nodes that others name too; nothing that is given changes."""
    num_trees, num_nodes, num_other = 160, 12, 0
    parents = random_parents(num_trees, num_nodes)
    tokens, links = random_tokens(parents), links_from(parents)
    tokens[torch.rand(tokens.shape) < 0.05] = -1
    malformed = [
        torch.where(torch.rand(link.shape) < 0.25, torch.randint(-2, num_nodes + 3, link.shape), link) for link in links
    ]
    given = tokens, *malformed
    before = [tensor.clone() for tensor in given]
    matchers = [Digits() for _ in range(num_trees)]
    bitmask = eagle_kernels.generate_token_bitmask(matchers, *given, vocab_size=VOCABULARY).view(num_trees, -1, 2)
    assert all(map(torch.equal, given, before))
    for request, matcher in enumerate(matchers):
        expected = rows_of_any_links(matcher, *(tensor[request].tolist() for tensor in given))
        assert torch.equal(bitmask[request], expected) and matcher.tokens == []
        sound = rows_of_any_links(matcher, *(tensor[request].tolist() for tensor in (tokens, *links)))
        num_other += not torch.equal(sound, expected)
    assert num_other > num_trees // 2


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
def test_tokens_out_of_range_are_refused_unasked(token):
    links = torch.tensor([[1, -1]]), torch.full((1, 2), -1)
    bitmask = eagle_kernels.generate_token_bitmask([Digits()], torch.tensor([0, token]), *links, vocab_size=VOCABULARY)
    assert (bitmask[0] != -1).any() and (bitmask[1] == -1).all()


def test_a_matcher_that_raises_is_left_as_it_was():
    class Failing(Digits):
        def fill_next_token_bitmask(self, bitmask, index):
            if index == 2:
                raise RuntimeError("no more")
            super().fill_next_token_bitmask(bitmask, index)

    matcher = Failing([2, 3])
    children, siblings = torch.tensor([[1, 2, -1]]), torch.full((1, 3), -1)
    with pytest.raises(RuntimeError, match="no more"):
        eagle_kernels.generate_token_bitmask(
            [matcher], torch.tensor([0, 2, 3]), children, siblings, vocab_size=VOCABULARY
        )
    assert matcher.tokens == [2, 3]


def test_given_buffers_are_written_whole():
    links = torch.tensor([[1, -1]]), torch.full((1, 2), -1)
    out = torch.full((2, 2), 77, dtype=torch.int32)
    result = eagle_kernels.generate_token_bitmask([None], torch.tensor([0, 1]), *links, vocab_size=VOCABULARY, out=out)
    assert result is out and (out == -1).all()


def test_empty_batch():
    none = torch.zeros(0, 4, dtype=torch.int64)
    assert eagle_kernels.generate_token_bitmask([], none, none, none, vocab_size=33).shape == (0, 2)


NODE = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matchers": [None]}, "matchers must hold one matcher or None for each of 2 requests, got 1"),
        ({"matchers": [None, "digits"]}, r"matchers\[1\] must have accept_token, rollback, .*, got str"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"draft_tokens": NODE[:1]}, "draft_tokens must have B = 2 in axis 0"),
        ({"draft_tokens": NODE.flatten()[1:]}, r"draft_tokens must have shape \[8\], got \[7\]"),
        ({"retrieve_next_sibling": NODE[:, :3]}, "retrieve_next_sibling must have N = 4 in axis 1"),
        ({"retrieve_next_token": NODE.float()}, "retrieve_next_token must have dtype int32 or int64, got float32"),
        ({"out": torch.zeros(8, 3, dtype=torch.int32)}, r"out must have shape \[8, 2\], got \[8, 3\]"),
        ({"out": torch.zeros(8, 2, dtype=torch.int64)}, "out must have dtype int32, got int64"),
        (dict.fromkeys(("draft_tokens", "retrieve_next_token", "retrieve_next_sibling"), NODE.to("meta")),
         "retrieve_next_token must be on the cpu, like all tensors here: grammar matchers work there, got meta"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, message):
    values = {"matchers": [None, None], "draft_tokens": NODE, "retrieve_next_token": NODE}
    values |= {"retrieve_next_sibling": NODE, "vocab_size": VOCABULARY}
    with pytest.raises((ValueError, TypeError), match="eagle_kernels.generate_token_bitmask: .*" + message):
        eagle_kernels.generate_token_bitmask(**(values | change))
