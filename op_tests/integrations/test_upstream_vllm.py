"""vLLM's own tests of rejection sampling, drafting and proposers, where they say what must come out: our code.

From its repository (tests/v1/)
    sample/test_rejection_sampler.py                 test_greedy_chains and on, down to test_placeholders_end_a_chain
    sample/test_rejection_sampler_block_verify.py    test_block_verification_accepts_what_the_target_prefers
    spec_decode/test_ngram.py, test_ngram_gpu.py     test_ngrams*: "earliest" is the CPU's choice, "latest" the GPU's
    spec_decode/test_eagle.py (trees)                test_trees_of_tuples, test_levels_of_the_proposer

Not here, and why
    random numbers against a formula (samplers, penalties, top-k, top-p, min-p, tree attention): op_tests/ops, the laws
    requests without a generator: our noise is keyed by (seed, position) always, nothing else is random
    sample_recovered_tokens and the uniforms of block verification, token by token: noise of torch's generators
    FLy, fp64 exponentials, bad words of several tokens, thinking budgets, DRY, mirostat: not ours
    mixed children per level (9 nodes of 3 and 2 a node), as test_propose_tree drafts them: a level of ours keeps topk
        beams; the tree itself is here
    drafts past the end of a match: vLLM stops or repeats the last sampled token, we go on copying from the match
    configurations, metadata builders, CUDA graph keys, model runners: not ops
"""

import pytest
import torch

import eagle_kernels

VOCAB_SIZE = 100


def chain_tree(drafts, device):
    """Candidates and links of ragged chains below a root of token 0, each as long as the longest with its root."""
    width = 1 + max(len(row) for row in drafts)
    lists = [[0, *row] + [-1] * (width - 1 - len(row)) for row in drafts]
    below = [[node + 1 if node < len(row) else -1 for node in range(width)] for row in drafts]
    candidates, next_token = torch.tensor(lists, device=device), torch.tensor(below, device=device)
    index = torch.arange(candidates.numel(), device=device).view_as(candidates)
    return candidates, index, next_token, torch.full_like(index, -1)


def decided_logits(rows, width, device, second=None):
    """Logits [B * width, V] that decide for the tokens of `rows`; 99 for `second`, 100 for the token."""
    logits = torch.full((len(rows), width, VOCAB_SIZE), -100.0)
    for request, tokens in enumerate(rows):
        for node, token in enumerate(tokens):
            logits[request, node, token] = 100.0
    if second is not None:
        logits[..., second] = 99.0
    return logits.flatten(0, 1).to(device)


def emitted(result):
    """Tokens of each request along its path, -1 padded, as vLLM's sampled_token_ids."""
    predicts, path = result.predicts.tolist(), result.accept_index.tolist()
    return [[predicts[index] if index >= 0 else -1 for index in row] for row in path]


def verify(verifier, tree, logits, temperature=0.0, **options):
    """One of the verifiers that take drafts as vLLM does without draft_probs: proposed with certainty."""
    candidates, device = tree[0], logits.device
    batch_size, width = candidates.shape
    if verifier == "greedy":
        return eagle_kernels.verify_tree_greedy(*tree, target_logits=logits, spec_steps=width - 1)
    positions = torch.arange(width, device=device).repeat(batch_size)
    seeds, temperature = torch.arange(batch_size, device=device), torch.full((batch_size,), temperature, device=device)
    if verifier == "sampled":
        return eagle_kernels.verify_tree_sampled(*tree, logits, positions, seeds, temperature, spec_steps=width - 1)
    proposed = candidates[:, 1:].flatten().clamp(min=0)
    draft_probs = torch.nn.functional.one_hot(proposed, VOCAB_SIZE).float()
    return eagle_kernels.verify_chain(
        candidates, logits, None, positions, seeds, temperature, draft_probs=draft_probs, **options
    )


VERIFIERS = ("greedy", "sampled", "chain")

# the drafts, the target's tokens with the bonus, and what comes out
GREEDY = [
    ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
    ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4, -1]]),
    ([[1]], [[1, 2]], [[1, 2]]),
    ([[]], [[5]], [[5]]),
    ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7, -1], [4, 8, -1, -1]]),
    ([[1, 2]], [[1, 2, 3]], [[1, 2, 3]]),
    ([[1]], [[2, 3]], [[2, -1]]),
    ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5, -1], [3, 4, 7]]),
]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(("drafts", "target", "expected"), GREEDY, ids=str)
def test_greedy_chains(drafts, target, expected, verifier, device, backend):
    tree = chain_tree(drafts, device)
    logits = decided_logits(target, tree[0].shape[1], device)
    assert emitted(verify(verifier, tree, logits)) == expected


def penalized(verifier, tree, logits, **options):
    """By the op of its own before a greedy walk, or within the sampling one."""
    if verifier == "greedy":
        return verify("greedy", tree, eagle_kernels.penalize_logits(*tree, logits, **options))
    batch_size, width = tree[0].shape
    zeros = torch.zeros(batch_size, dtype=torch.int64, device=logits.device)
    positions = torch.arange(width, device=logits.device).repeat(batch_size)
    return eagle_kernels.verify_tree_sampled(
        *tree, logits, positions, zeros, zeros.float(), **options, spec_steps=width - 1
    )


@pytest.mark.parametrize("verifier", ["greedy", "sampled"])
def test_frequency_penalties_count_the_drafts_before(verifier, device, backend):
    """Token 1 has 100, token 15 has 99: after one draft, or two, the penalty turns it."""
    tree = chain_tree([[1, 1, 1], [], [1, 1, 1]], device)
    tree[0][:, 0] = torch.tensor([2, 3, 4], device=device)  # the root is the output so far
    counts = torch.zeros(3, VOCAB_SIZE, dtype=torch.int32, device=device)
    counts[torch.arange(3), tree[0][:, 0]] = 1
    logits = decided_logits([[1, 1, 1, 1], [7], [1, 1, 1, 1]], 4, device, second=15)
    penalty = torch.tensor([1.5, 1.5, 0.7], device=device)
    result = penalized(verifier, tree, logits, frequency_penalty=penalty, output_counts=counts)
    assert emitted(result) == [[1, 15, -1, -1], [7, -1, -1, -1], [1, 1, 15, -1]]


def test_bad_words(device, backend):
    """Of requests 0 and 2, not of the one between."""
    tree = chain_tree([[1, 2, 3], [1, 15, 3], [1, 2, 3]], device)
    logits = decided_logits([[1, 2, 3, 4], [1, 15, 3, 4], [1, 2, 3, 4]], 4, device, second=15)
    logits[4 + 1, 15] = 100.0
    bad = torch.tensor([[2], [-1], [2]], device=device)
    result = penalized("greedy", tree, logits, bad_token_ids=bad)
    assert emitted(result) == [[1, 15, -1, -1], [1, 15, 3, 4], [1, 15, -1, -1]]


def words_of(allowed):
    """The grammar bitmask [R, ceil(V / 32)] of bool [R, V]."""
    rows, size = allowed.shape
    bits = torch.nn.functional.pad(allowed, (0, -size % 32)).view(rows, -1, 32).long()
    words = (bits << torch.arange(32)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("verifier", ["greedy", "sampled"])
def test_allowed_token_ids(verifier, device, backend):
    """Request 0 may not say 0..4, request 2 not 2..6; the row of the bonus is free, which vLLM draws elsewhere."""
    tree = chain_tree([[1, 2, 10], [10, 5, 3], [7, 10, 12]], device)
    logits = decided_logits([[1, 2, 10, 5], [10, 5, 10, 5], [7, 10, 12, 5]], 4, device, second=15)
    allowed = torch.ones(3, 4, VOCAB_SIZE, dtype=torch.bool)
    allowed[0, :3, 0:5] = False
    allowed[2, :3, 2:7] = False
    result = penalized(verifier, tree, logits, token_bitmask=words_of(allowed.flatten(0, 1)).to(device))
    assert emitted(result) == [[15, -1, -1, -1], [10, 5, 10, -1], [7, 10, 12, 5]]


@pytest.mark.parametrize(("rate", "expected"), [(1.0, [[1, 2, 50], [3, 40, -1]]), (0.0, None)])
@pytest.mark.parametrize("verifier", ["greedy", "sampled"])
def test_synthetic_acceptance(verifier, rate, expected, device, backend):
    """All drafts of a target that wants other tokens, or none of them."""
    tree = chain_tree([[1, 2], [3]], device)
    logits = decided_logits([[10, 20, 50], [30, 40]], 3, device)
    seeds, positions = torch.arange(2, device=device), torch.arange(3, device=device).repeat(2)
    policy = {"accept_policy": "simulate", "simulated_rates": torch.full((2,), rate, device=device), "spec_steps": 2}
    if verifier == "greedy":
        result = eagle_kernels.verify_tree_greedy(
            *tree, target_logits=logits, seeds=seeds, positions=positions, **policy
        )
    else:
        temperature = torch.ones(2, device=device)
        result = eagle_kernels.verify_tree_sampled(*tree, logits, positions, seeds, temperature, **policy)
    if expected is not None:
        assert emitted(result) == expected
    else:
        assert all(row[0] >= 0 and row[1:] == [-1, -1] for row in emitted(result))


def test_placeholders_end_a_chain(device, backend):
    """A draft of -1 is not accepted, nor looked up in any row; what takes its place is a token."""
    tree = chain_tree([[1, 99, -1]], device)
    result = verify("chain", tree, decided_logits([[1, 99, 7, 9]], 4, device), temperature=1.0)
    assert emitted(result) == [[1, 99, 7, -1]]


def test_block_verification_accepts_what_the_target_prefers(device, backend):
    """Drafts that the target gives more than the draft does: whatever the coins."""
    draft = torch.tensor([[0.0, 0.6, 0.0, 0.4], [0.1, 0.2, 0.3, 0.4]], device=device)
    target = torch.tensor([[0.0, 0.8, 0.0, 0.2], [0.2, 0.1, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0]], device=device)
    result = eagle_kernels.verify_chain(
        torch.tensor([[0, 1, 0]] * 8, device=device), None, None, torch.arange(3, device=device).repeat(8),
        torch.arange(8, device=device), None, target_probs=target.repeat(8, 1), draft_probs=draft.repeat(8, 1),
        method="block",
    )  # fmt: skip
    assert emitted(result) == [[1, 0, 3]] * 8


# n-gram drafts

EARLIEST = [  # tokens, smallest and largest n, k, drafts
    ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 2, []), ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
    ([1, 2, 3, 4, 1, 2, 3], 2, 2, 2, [4, 1]), ([1, 2, 3, 4, 1, 2, 3], 1, 1, 3, [4, 1, 2]),
    ([1, 2, 3, 4, 1, 2, 3], 1, 1, 2, [4, 1]), ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
    ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [6, 2]), ([1, 2, 3, 4, 5], 2, 2, 2, []),
    ([1, 2, 3, 4, 1, 2, 3], 4, 4, 2, []), ([1, 2, 3, 4, 1, 2, 3], 3, 4, 2, [4, 1]),
    ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]), ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2]),
    ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [100, 1]),
]  # fmt: skip
LATEST = [
    ([0] * 27 + [1, 2, 3, 1, 2], 2, 2, 2, [3, 1]), ([0] * 295 + [1, 2, 3, 1, 2], 2, 2, 2, [3, 1]),
    ([1, 2, 3, 4, 5], 2, 2, 2, []), ([1, 2, 3, 4, 1, 2, 3], 4, 4, 2, []), ([1, 2, 3, 4, 1, 2, 3], 3, 4, 2, [4, 1]),
    ([1, 2, 3, 4, 50, 51, 2, 3, 4, 60, 61, 1, 2, 3, 4], 3, 4, 2, [50, 51]),
    ([2, 3, 4, 50, 51, 3, 4, 60, 61, 1, 2, 3, 4], 2, 4, 2, [50, 51]),
    ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [300, 1]),
    ([1, 2, 3, 100] + [0] * 1000 + [1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [300, 1]),
    ([5, 6], 2, 2, 2, []), ([1, 2, 1, 2], 2, 2, 2, [1, 2]), ([1, 2, 3, 4, 1], 1, 1, 2, [2, 3]),
]  # fmt: skip


def ngrams(rows, smallest, largest, count, prefer, device, **options):
    """What ngram_match says of each row; more of what it looks for stands behind the rows."""
    width = max(len(row) for row in rows) + 7
    tokens = [(row + [1, 2, 3, 999, 1, 2, 3] + [0] * width)[:width] for row in rows]
    return eagle_kernels.ngram_match(
        torch.tensor(tokens, device=device), torch.tensor([len(row) for row in rows], device=device),
        num_speculative_tokens=count, max_ngram_size=largest, min_ngram_size=smallest, prefer=prefer, **options,
    )  # fmt: skip


def drafts_of(result):
    return [row[:count] for row, count in zip(result.tokens.tolist(), result.num_drafts.tolist())]


@pytest.mark.parametrize(
    ("prefer", "case"), [("earliest", case) for case in EARLIEST] + [("latest", case) for case in LATEST], ids=str
)
def test_ngrams(prefer, case, device, backend):
    tokens, smallest, largest, count, expected = case
    result = ngrams([tokens], smallest, largest, count, prefer, device)
    assert drafts_of(result) == [expected]
    assert (int(result.match_len) >= smallest) == bool(expected)


def test_ngrams_of_a_batch(device, backend):
    """Every row for itself, each with the longest n that it has; one that may not draft does not."""
    rows = [[1, 2, 3, 1, 2], [4, 5, 6]]
    assert drafts_of(ngrams(rows, 2, 2, 2, "latest", device)) == [[3, 1], []]
    rows = [[9, 1, 2, 3, 8, 1, 2, 3], [7, 1, 2, 9, 1, 2]]
    assert drafts_of(ngrams(rows, 2, 3, 2, "latest", device)) == [[8, 1], [9, 1]]
    most = torch.tensor([2, 0], device=device)
    assert drafts_of(ngrams(rows, 2, 3, 2, "latest", device, max_drafts=most)) == [[8, 1], []]


# the proposer's trees, as tuples of child numbers

CHAIN, STAR = [(0,), (0, 0), (0, 0, 0)], [(0,), (1,), (2,)]
TREES = {
    "chain": (CHAIN, "1000 1100 1110 1111"),
    "star": (STAR, "1000 1100 1010 1001"),
    "binary": (
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)],
        "1000000 1100000 1010000 1101000 1100100 1010010 1010001",
    ),
    "mixed": (
        [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
        "1000000000 1100000000 1010000000 1001000000 1100100000 1100010000 1010001000 1010000100 1001000010 1001000001",
    ),
}


def parents_of(tree):
    """The node that each draft follows, 0 the root."""
    return [1 + tree.index(node[:-1]) if len(node) > 1 else 0 for node in tree]


@pytest.mark.parametrize("name", TREES)
def test_trees_of_tuples(name, device, backend):
    tree, rows = TREES[name]
    size = 1 + len(tree)
    tokens = torch.arange(10, 10 + size - 1, device=device)[None]
    result = eagle_kernels.tree_from_parents(
        torch.tensor([7], device=device), tokens, torch.tensor([parents_of(tree)], device=device),
        torch.tensor([5], device=device), num_verify_tokens=size, tree_mask_mode="qlen_only",
    )  # fmt: skip
    expected = [[cell == "1" for cell in row] for row in rows.split()]
    assert result.tree_mask[0].tolist() == expected
    assert result.positions.tolist() == [5 + sum(row) - 1 for row in expected]


@pytest.mark.parametrize(("num_levels", "topk"), [(1, 1), (3, 1), (1, 3)])
def test_levels_of_the_proposer(num_levels, topk, device, backend):
    """A model whose best tokens are consecutive drafts consecutive ones: a single token, a chain, a star."""
    base, tokens, state = torch.tensor([42, 60], device=device), [], {}
    for level in range(num_levels):
        logits = torch.full((2, VOCAB_SIZE), -100.0, device=device)
        for child in range(topk):
            logits[torch.arange(2), base + level + child] = 100.0 - child
        chosen = eagle_kernels.select_top_k_tokens(logits, **state, topk=topk, level=level)
        state = {"scores": chosen.scores, "ancestors": chosen.ancestors}
        tokens.append(chosen.tokens)
    assert torch.equal(torch.cat(tokens, dim=1), base[:, None] + torch.arange(num_levels * topk, device=device))
