"""vLLM's own tests of rejection sampling, samplers, drafting and tree attention: its cases and expectations, our code.

Mapped, from its repository (tests/v1/)
    sample/test_rejection_sampler.py                 test_greedy_chains and on, down to test_placeholders_end_a_chain
    sample/test_rejection_sampler_block_verify.py    test_block_verification_accepts_what_the_target_prefers
    sample/test_sampler.py, logits_processors/test_correctness.py      test_presence_penalty and on
    sample/test_min_p_spec_decode.py                 test_min_p_is_each_requests_own
    sample/test_topk_topp_sampler.py, test_tree_rejection_sampler.py   test_top_k_and_top_p and on
    spec_decode/test_ngram.py, test_ngram_gpu.py     test_ngrams*: "earliest" is the CPU's choice, "latest" the GPU's
    spec_decode/test_eagle.py (trees)                test_trees_of_tuples, test_levels_of_the_proposer
    spec_decode/test_tree_attention.py               test_tree_attention_equals_that_of_every_branch

Not mapped, and why
    requests without a generator: our noise is keyed by (seed, position) always, nothing else is random
    sample_recovered_tokens and the uniforms of block verification, token by token: noise of torch's generators
    FLy, fp64 exponentials, logprobs, bad words of several tokens, thinking budgets, DRY, mirostat: not here
    mixed children per level (9 nodes of 3 and 2 a node), as test_propose_tree drafts them: a level of ours keeps topk
        beams; the tree itself is mapped
    drafts past the end of a match: vLLM stops or repeats the last sampled token, we go on copying from the match
    trimming of equal probabilities at the edge of top-p: here tokens that tie with an edge all stay
    a row of nothing but -inf: vLLM leaves it as it is, our sampler draws token 0
    configurations, metadata builders, CUDA graph keys, model runners: not ops
"""

from __future__ import annotations

import pytest
import torch

import eagle_kernels
from op_tests.harness.statistics import assert_follows_law

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


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_seed_decides(num_drafts, device, backend):
    """Whatever the batch around a request."""
    probs = torch.rand(2, 4 * num_drafts, 200, device=device).softmax(dim=-1)
    more = torch.rand(4, 200, device=device).softmax(dim=-1)
    target = torch.cat([probs[0].view(4, num_drafts, 200), more[:, None]], dim=1)
    candidates, positions = torch.randint(200, (4, num_drafts + 1), device=device), torch.arange(num_drafts + 1)

    def run(rows):
        return eagle_kernels.verify_chain(
            candidates[rows], None, None, positions.repeat(len(rows)).to(device), torch.tensor(rows, device=device),
            None, target_probs=target[rows].flatten(0, 1),
            draft_probs=probs[1].view(4, num_drafts, 200)[rows].flatten(0, 1),
        )  # fmt: skip

    first, again, turned = run([0, 1, 2, 3]), run([0, 1, 2, 3]), run([3, 2, 1, 0])
    assert all(torch.equal(got, want) for got, want in zip(again, first))
    assert turned.predicts.view(4, -1).flip(0).tolist() == first.predicts.view(4, -1).tolist()


@pytest.mark.full
def test_many_samples_have_the_targets_law(device):
    """Two drafts each, from a distribution of their own; 100,000 requests, tokens before the bonus."""
    draft, target = (torch.rand(10).softmax(dim=-1).to(device) for _ in range(2))
    rows = 100_000
    drafts = torch.multinomial(draft.expand(rows, 10), 2, replacement=True)
    result = eagle_kernels.verify_chain(
        torch.cat([torch.zeros_like(drafts[:, :1]), drafts], dim=1), None, None,
        torch.arange(3, device=device).repeat(rows), torch.arange(rows, device=device), None,
        target_probs=target.expand(rows * 3, 10).contiguous(), draft_probs=draft.expand(rows * 2, 10).contiguous(),
    )  # fmt: skip
    tokens = result.predicts.view(rows, 3)[:, :2]
    assert_follows_law(tokens[tokens >= 0].long().cpu(), target.cpu())


@pytest.mark.parametrize("how", ["in the verifier", "before it"])
@pytest.mark.parametrize(("top_k", "top_p"), [(1, None), (5, None), (99, None), (None, 0.5), (None, 0.9), (None, 0.99)])
def test_filters_hold_for_what_replaces_a_draft(top_k, top_p, how, device):
    """Random drafts, most of them rejected; logits that barely favour the kept tokens."""
    batch_size, width = 4, 4
    kept = torch.zeros(batch_size * width, VOCAB_SIZE, dtype=torch.bool)
    if top_k is not None:
        kept.scatter_(1, torch.stack([torch.randperm(VOCAB_SIZE)[:top_k] for _ in kept]), True)
        logits = 0.1 * kept.float()
    else:
        logits = torch.randn(kept.shape)
        ordered, order = logits.sort(dim=-1)
        stays = ordered.softmax(dim=-1).cumsum(dim=-1) > 1 - top_p
        stays[:, -1] = True
        kept.scatter_(1, order, stays)
    logits = logits.to(device)
    drafts = torch.randint(VOCAB_SIZE, (batch_size, width - 1))
    tree = chain_tree(drafts.tolist(), device)
    seeds, positions = torch.arange(batch_size, device=device), torch.arange(width, device=device).repeat(batch_size)
    rows = len(logits) if how == "before it" else batch_size
    limits = {
        "top_k": None if top_k is None else torch.full((rows,), top_k, device=device),
        "top_p": None if top_p is None else torch.full((rows,), top_p, device=device),
    }
    if how == "in the verifier":
        temperature = torch.ones(batch_size, device=device)
        result = eagle_kernels.verify_tree_sampled(
            *tree, logits, positions, seeds, temperature, **limits, spec_steps=width - 1
        )
    else:
        probs = logits.softmax(dim=-1)
        probs = eagle_kernels.top_k_renorm(probs, limits["top_k"]) if top_p is None else probs
        probs = eagle_kernels.top_p_renorm(probs, limits["top_p"]) if top_k is None else probs
        draft_probs = torch.rand(batch_size * (width - 1), VOCAB_SIZE, device=device).softmax(dim=-1)
        result = eagle_kernels.verify_chain(
            tree[0], None, None, positions, seeds, None, target_probs=probs, draft_probs=draft_probs
        )
    tokens = torch.tensor(emitted(result))
    for row, stays in zip(tokens, kept.view(batch_size, width, VOCAB_SIZE)):
        assert all(bool(stays[node, token]) for node, token in enumerate(row.tolist()) if token >= 0)


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


@pytest.mark.parametrize("is_proposed", [True, False], ids=["proposed", "sampled"])
@pytest.mark.parametrize("vocab_size", [100, 8193, 10000, pytest.param(151936, marks=pytest.mark.full)])
def test_what_replaces_a_draft_is_a_token(vocab_size, is_proposed, device, backend):
    """The last 8192 tokens begin a tile that the vocabulary does not fill, and have no mass; or only the draft has."""
    tail = vocab_size // 8192 * 8192
    target = torch.rand(6, vocab_size)
    target[:, tail:] = 0.0
    if tail == 0:
        target[:, 0] = 1.0
    target /= target.sum(dim=-1, keepdim=True)
    drafts = torch.randint(vocab_size, (2, 2)) if tail else torch.zeros(2, 2).long()
    draft_probs = torch.rand(4, vocab_size).softmax(dim=-1)
    if is_proposed:
        draft_probs = torch.nn.functional.one_hot(drafts.flatten(), vocab_size).float()
    values = (torch.cat([torch.zeros(2, 1).long(), drafts], dim=1), torch.arange(3).repeat(2), torch.tensor([42, 43]))
    candidates, positions, seeds, target, draft_probs = (v.to(device) for v in (*values, target, draft_probs))
    result = eagle_kernels.verify_chain(
        candidates, None, None, positions, seeds, None, target_probs=target, draft_probs=draft_probs
    )
    for row, tokens, count in zip(
        result.predicts.view(2, 3).tolist(), drafts.tolist(), result.accept_token_num.tolist()
    ):
        assert row[:count] == tokens[:count]
        assert 0 <= row[count] < (tail or vocab_size)


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


# the sampler: rows of logits that are all alike, 0.01


def one_node(batch_size, device):
    return chain_tree([[]] * batch_size, device)


def alike(batch_size, device, vocab_size=128):
    return torch.full((batch_size, vocab_size), 1e-2, device=device)


def counted(outputs, device, vocab_size=128):
    return torch.stack([torch.bincount(torch.tensor(row), minlength=vocab_size) for row in outputs]).int().to(device)


def extremes(logits):
    """The lowest and the highest token of every row."""
    return zip(logits.argmin(dim=-1).tolist(), logits.argmax(dim=-1).tolist())


@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_presence_penalty(penalty, device, backend):
    outputs = torch.randint(128, (3, 20)).tolist()
    logits = eagle_kernels.penalize_logits(
        *one_node(3, device), alike(3, device), presence_penalty=torch.full((3,), penalty, device=device),
        output_counts=counted(outputs, device),
    )  # fmt: skip
    for row, (lowest, highest) in zip(outputs, extremes(logits)):
        assert ((lowest in row), (highest in row)) == ((True, False) if penalty > 0 else (False, True))


@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_frequency_penalty(penalty, device, backend):
    """Each token of an output occurs once more than the one before."""
    distinct = [torch.randperm(128)[:count].tolist() for count in (1, 4, 9)]
    outputs = [[token for times, token in enumerate(row, start=1) for _ in range(times)] for row in distinct]
    logits = eagle_kernels.penalize_logits(
        *one_node(3, device), alike(3, device), frequency_penalty=torch.full((3,), penalty, device=device),
        output_counts=counted(outputs, device),
    )  # fmt: skip
    for row, (lowest, highest) in zip(distinct, extremes(logits)):
        most, other = (lowest, highest) if penalty > 0 else (highest, lowest)
        assert most == row[-1] and other not in row


@pytest.mark.parametrize("penalty", [0.1, 1.9])
def test_repetition_penalty(penalty, device, backend):
    prompts, outputs = torch.randint(128, (3, 10)), torch.randint(128, (3, 20)).tolist()
    seen = torch.zeros(3, 128, dtype=torch.bool).scatter_(1, prompts, True)
    logits = eagle_kernels.penalize_logits(
        *one_node(3, device), alike(3, device), repetition_penalty=torch.full((3,), penalty, device=device),
        prompt_mask=words_of(seen).to(device), output_counts=counted(outputs, device),
    )  # fmt: skip
    for prompt, output, (lowest, highest) in zip(prompts.tolist(), outputs, extremes(logits)):
        known = set(prompt) | set(output)
        assert ((lowest in known), (highest in known)) == ((True, False) if penalty > 1 else (False, True))


def test_min_tokens(device, backend):
    """Requests that are too short may not stop; the others may."""
    stops = torch.stack([torch.randperm(128)[:40] for _ in range(3)]).to(device)
    logits = eagle_kernels.penalize_logits(
        *one_node(3, device), alike(3, device), min_tokens=torch.tensor([25, 3, 21], device=device),
        num_output_tokens=torch.full((3,), 20, device=device), end_token_ids=stops,
    )  # fmt: skip
    expected = torch.zeros(3, 128, dtype=torch.bool, device=device).scatter_(1, stops, True)
    expected[1] = False
    assert torch.equal(logits == float("-inf"), expected)


@pytest.mark.parametrize("bias", [-0.1, 1.2])
def test_logit_bias(bias, device, backend):
    biases = torch.zeros(3, 128, device=device)
    biases[torch.arange(3), torch.arange(3)] = bias
    logits = eagle_kernels.penalize_logits(*one_node(3, device), alike(3, device), logit_bias=biases)
    torch.testing.assert_close(logits, biases + 1e-2)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_allowed_tokens_of_a_row(count, device, backend):
    """Of even rows some ids are masked, of odd ones none."""
    allowed = torch.ones(5, 128, dtype=torch.bool)
    for row in (0, 2, 4):
        allowed[row, row : row + count] = False
    tree = one_node(5, device)
    logits = eagle_kernels.penalize_logits(*tree, alike(5, device), token_bitmask=words_of(allowed).to(device))
    assert torch.equal((logits == float("-inf")).cpu(), ~allowed)


@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_min_p(min_p, device):
    logits = alike(3, device)
    logits[:, 0] = 10.0
    probs = eagle_kernels.min_p_renorm(logits.softmax(dim=-1), torch.full((3,), min_p, device=device))
    assert (probs > 0).sum(dim=-1).tolist() == [1 if min_p else 128] * 3
    assert bool((probs[:, 0] > 0).all())


@pytest.mark.parametrize(("limits", "drafts"), [((0.0, 0.0), (2, 3)), ((0.1, 0.05), (2, 3)), ((0.0, 0.2), (2, 2))])
def test_min_p_is_each_requests_own(limits, drafts, device):
    """Of all its rows: by itself, and in the verifier, which never emits what it masks."""
    min_p = torch.tensor(limits, device=device).repeat_interleave(torch.tensor(drafts, device=device))
    logits = torch.randn(len(min_p), 64, device=device)
    probs = logits.softmax(dim=-1)
    kept = probs >= probs.amax(dim=-1, keepdim=True) * min_p[:, None]
    assert torch.equal(eagle_kernels.min_p_renorm(probs, min_p) > 0, kept)
    rows = torch.arange(2 * 3, device=device) % len(min_p)
    tree = chain_tree(torch.randint(64, (2, 2)).tolist(), device)
    limits = torch.tensor(limits, device=device)
    result = eagle_kernels.verify_tree_sampled(
        *tree, logits[rows], torch.arange(3, device=device).repeat(2), torch.arange(2, device=device),
        torch.ones(2, device=device), min_p=limits, spec_steps=2,
    )  # fmt: skip
    row_probs = probs[rows]
    allowed = row_probs >= row_probs.amax(dim=-1, keepdim=True) * limits.repeat_interleave(3)[:, None] * 0.999999
    for request, tokens in enumerate(emitted(result)):
        assert all(bool(allowed[3 * request + node, token]) for node, token in enumerate(tokens) if token >= 0)


# top-k and top-p: the kernels run here on the GPU only, where sizes are vLLM's; the ops' own tests interpret them


def sorted_out(logits, top_k, top_p):
    """What stays of each row, by sorting: the top_k best, then the fewest of those that hold top_p."""
    ordered, order = logits.float().sort(dim=-1)
    if top_k is not None:
        place = (logits.shape[1] - top_k.long().clamp(max=logits.shape[1]))[:, None]
        ordered = torch.where(ordered < ordered.gather(1, place), float("-inf"), ordered)
    stays = ordered > float("-inf")
    if top_p is not None:
        is_outside = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[:, None]
        is_outside[:, -1] = False
        stays &= ~is_outside
    return torch.zeros_like(stays).scatter_(1, order, stays)


def filtered(logits, top_k, top_p):
    probs = logits.softmax(dim=-1)
    probs = probs if top_k is None else eagle_kernels.top_k_renorm(probs, top_k)
    return (probs if top_p is None else eagle_kernels.top_p_renorm(probs, top_p)) > 0


def assert_filtered(logits, top_k, top_p):
    """As vLLM asks: the same tokens for top-k; for top-p a few more or less, where a sum was rounded."""
    logits, *limits = (None if t is None else t.to(logits.device) for t in (logits, top_k, top_p))
    got, want = filtered(logits, *limits), sorted_out(logits, *limits)
    if top_p is None:
        assert torch.equal(got, want)
    difference = (got.sum(dim=-1) - want.sum(dim=-1)).abs().max()
    assert int(difference) <= max(3, 0.005 * int(want.sum(dim=-1).max()))
    assert bool((got.sum(dim=-1) > 0).all())


@pytest.mark.parametrize("kind", ["top_k", "top_p", "both"])
@pytest.mark.parametrize(
    ("rows", "vocab_size"),
    [(4, 1024)] + [pytest.param(r, v, marks=pytest.mark.full) for r in (1, 32, 512) for v in (32000, 128256)],
)
def test_top_k_and_top_p(rows, vocab_size, kind, device):
    logits = torch.randn(rows, vocab_size, device=device)
    top_k, top_p = torch.randint(1, 100, (rows,)), torch.rand(rows) * 0.9 + 0.1
    top_k[torch.randint(4, (rows,)) == 0] = vocab_size
    top_p[torch.randint(4, (rows,)) == 0] = 1.0
    assert_filtered(logits, None if kind == "top_p" else top_k, None if kind == "top_k" else top_p)


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        ([1] * 4, None), ([1024] * 4, None), ([1, 1024, 2, 1023], None),
        (None, [0.01] * 4), (None, [1.0] * 4), (None, [0.1, 0.5, 0.9, 1.0]),
    ],
)  # fmt: skip
def test_extreme_limits(top_k, top_p, device):
    limits = (None if values is None else torch.tensor(values) for values in (top_k, top_p))
    assert_filtered(torch.randn(4, 1024, device=device), *limits)


@pytest.mark.parametrize("kind", ["top_k", "top_p", "both"])
def test_rows_apart_in_memory(kind, device):
    backing = torch.full((4, 1032), -1000.0, device=device)
    logits = torch.linspace(10.0, -10.0, 1024) + torch.arange(4)[:, None] / 1000
    probs = backing[:, :1024].copy_(logits.softmax(dim=-1))
    apart = probs.contiguous()
    if kind != "top_p":
        top_k = torch.full((4,), 154, device=device)
        probs, apart = (eagle_kernels.top_k_renorm(values, top_k) for values in (probs, apart))
    if kind != "top_k":
        top_p = torch.full((4,), 0.95, device=device)
        probs, apart = (eagle_kernels.top_p_renorm(values, top_p) for values in (probs, apart))
    assert torch.equal(probs, apart)


@pytest.mark.parametrize("fraction", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["top_k", "top_p", "both"])
def test_masked_logits(kind, fraction, device):
    """A grammar leaves few tokens: draws are among them, and within the limits."""
    logits = torch.randn(4, 2000)
    logits[torch.rand(4, 2000) < fraction] = float("-inf")
    top_k = None if kind == "top_p" else torch.randint(1, 50, (4,))
    top_p = None if kind == "top_k" else torch.rand(4) * 0.9 + 0.1
    assert_filtered(logits.to(device), top_k, top_p)
    stays = sorted_out(logits, top_k, None if top_p is None else (top_p + 1e-4).clamp(max=1))
    tokens = eagle_kernels.sample_from_logits(
        *(tensor.to(device) for tensor in (logits, torch.arange(4), torch.arange(4), torch.ones(4))),
        **{name: t.to(device) for name, t in (("top_k", top_k), ("top_p", top_p)) if t is not None},
    )
    assert bool(stays[torch.arange(4), tokens.cpu()].all())


@pytest.mark.parametrize("num_valid", [1, 2, 5, 50])
def test_few_equal_logits(num_valid, device):
    """At least one of them stays, whatever is asked for; ties with the edge all do here."""
    logits = torch.full((3, 2000), float("-inf"))
    for row in logits:
        row[torch.randperm(2000)[:num_valid]] = 1.0
    probs = logits.softmax(dim=-1).to(device)
    for top_k, top_p in ((max(1, num_valid - 1), 1.0), (2000, 0.95), (max(1, num_valid - 1), 0.95)):
        kept = eagle_kernels.top_k_renorm(probs, torch.full((3,), top_k, device=device))
        kept = eagle_kernels.top_p_renorm(kept, torch.full((3,), top_p, device=device))
        assert (kept > 0).sum(dim=-1).tolist() == [num_valid] * 3
        assert not bool(kept.isnan().any())


def test_grammar_rows_get_their_top_p(device):
    """30 tokens of a row are finite, so that a top_k of 50 does nothing: top_p must cut them all the same."""
    logits = torch.full((5, 2000), float("-inf"))
    for row in logits[:3]:
        row[torch.randperm(2000)[:30]] = torch.randn(30)
    logits[3:] = torch.randn(2, 2000)
    top_k, top_p = torch.tensor([50, 50, 50, 2000, 50]), torch.tensor([0.5, 0.5, 0.5, 0.9, 0.9])
    assert_filtered(logits.to(device), top_k, top_p)
    limits = top_k.to(device), top_p.to(device)
    kept = filtered(logits.to(device), *limits).sum(dim=-1)
    assert bool((kept[:3] < filtered(logits.to(device), limits[0], None)[:3].sum(dim=-1)).all())


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


@pytest.mark.parametrize(
    ("batch_size", "num_heads", "prefix", "head_dim", "page_size"),
    [(1, 2, 16, 32, 16), (2, 4, 37, 32, 16)]
    + [pytest.param(b, h, p, 128, 32, marks=pytest.mark.full) for b in (1, 16) for h in (2, 4) for p in (16, 1024)],
)
@pytest.mark.parametrize("name", ["chain", "binary"])
def test_tree_attention_equals_that_of_every_branch(name, batch_size, num_heads, prefix, head_dim, page_size, device):
    """Two KV heads, pages in any order; every node sees what the chain of its ancestors does."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    rows = [[cell == "1" for cell in row] for row in TREES[name][1].split()]
    size = len(rows)
    num_pages = -(-(prefix + size) // page_size)
    block_table = torch.randperm(batch_size * num_pages, device=device).view(batch_size, num_pages)
    cache = torch.randn(2, batch_size * num_pages, page_size, 2, head_dim, device=device).to(dtype)
    query = torch.randn(batch_size, size, num_heads, head_dim, device=device).to(dtype)
    key, value = torch.randn(2, batch_size, size, 2, head_dim, device=device).to(dtype)
    lengths = torch.full((batch_size,), prefix, device=device)
    paged = {"block_table": block_table, "seq_lens": lengths}
    words = torch.tensor([sum(1 << node for node, seen in enumerate(row) if seen) for row in rows], device=device)
    mask = words[None, :, None].expand(batch_size, size, 1).contiguous()
    output = eagle_kernels.tree_attention(query, *cache, mask, draft_key=key, draft_value=value, **paged).output
    for row in rows:
        branch = [node for node, seen in enumerate(row) if seen]
        chain = [tensor[:, branch].contiguous() for tensor in (query, key, value)]
        alone = eagle_kernels.tree_attention(
            chain[0], *cache, draft_key=chain[1], draft_value=chain[2], is_causal=True, **paged
        ).output
        torch.testing.assert_close(output[:, branch].float(), alone.float(), rtol=0.0, atol=7.81e-3)
