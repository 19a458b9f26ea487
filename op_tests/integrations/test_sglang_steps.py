"""Drafting, verification and KV moves of the SGLang plug-in on made batches, beside what SGLang's functions compute."""

import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.integrations.sglang import cache_locs, drafting, layers, parts, trees, verification
from op_tests.harness.trees import random_drafts
from op_tests.integrations import sglang_stub as stub
from op_tests.integrations.oracles import oracle_build, oracle_sample, oracle_verify
from op_tests.integrations.sglang_server import ADJUSTED, adjusted_nodes, make_adjustments

BATCH, TOPK, STEPS, NODES, VOCAB = 3, 4, 3, 12, 97


@pytest.fixture
def sglang(monkeypatch):
    """The functions of SGLang that these parts import when they run."""
    return stub.imported_by_steps(monkeypatch)


class Runner:
    """A draft model whose logits depend on the token and on the hidden state; it notes what it is given."""

    model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Llama"]), model_is_mrope=False)
    canary_manager = None

    def __init__(self, table: torch.Tensor):
        self.table, self.seen = table, []

    def forward(self, batch):
        hidden = batch.spec_info.hidden_states
        self.seen.append((batch.input_ids.clone(), batch.out_cache_loc.clone(), batch.positions.clone(), hidden))
        logits = self.table[batch.input_ids] + hidden.sum(-1, keepdim=True) * torch.linspace(
            0, 1, self.table.shape[1], device=hidden.device
        )
        hidden = torch.tanh(hidden + batch.input_ids[:, None] / VOCAB)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden))


def draft_as_sglang(worker, batch):
    """SGLang's draft_forward: products of probabilities, the best K of each level, then the best of all."""
    info, hot = batch.spec_info, worker.hot_token_id
    probs, tokens, hidden, scores = info.topk_p, info.topk_index, info.hidden_states, None
    tokens = tokens if hot is None else hot[tokens]
    slots = batch.out_cache_loc.view(BATCH, TOPK, STEPS).permute(2, 0, 1).reshape(STEPS, -1)
    all_scores, all_tokens, all_parents = [], [], []
    for step in range(STEPS):
        if step == 0:
            ids, scores, hidden = tokens.flatten(), probs, hidden.repeat_interleave(TOPK, 0)
            all_scores.append(probs)
            all_tokens.append(tokens)
            all_parents.append(torch.arange(-1, TOPK, device=tokens.device).expand(BATCH, -1))
        else:
            products = scores[..., None] * probs.view(BATCH, TOPK, TOPK)
            scores, best = products.flatten(1).topk(TOPK)
            flat = tokens.view(BATCH, -1)
            ids = flat.gather(1, best).flatten()
            hidden = hidden[(best // TOPK + torch.arange(BATCH, device=ids.device)[:, None] * TOPK).flatten()]
            all_scores.append(products.flatten(1))
            all_tokens.append(flat)
            all_parents.append(best + TOPK + TOPK**2 * (step - 1))
        if step == STEPS - 1:
            break
        batch.input_ids, batch.out_cache_loc, info.hidden_states = ids, slots[step], hidden
        result = worker.draft_runner.forward(batch).logits_output
        probs, tokens = result.next_token_logits.softmax(-1).topk(TOPK)
        tokens = tokens if hot is None else hot[tokens]
        hidden = result.hidden_states
        batch.positions = batch.positions + 1
    index = torch.cat(all_scores, 1).topk(NODES - 1).indices.sort().values
    return torch.cat(all_parents[:-1], 1), index, torch.cat(all_tokens, 1).gather(1, index), None


def make_worker(device, table, hot_token_id=None):
    return SimpleNamespace(
        topk=TOPK, speculative_num_steps=STEPS, speculative_num_draft_tokens=NODES, hot_token_id=hot_token_id,
        index_share_for_mtp_iteration=False, draft_runner=Runner(table), device=device,
        draft_attn_backend=SimpleNamespace(attn_backends=[None] * STEPS), req_to_token_pool=SimpleNamespace(size=8),
    )  # fmt: skip


def make_draft_batch(device, vocab_size):
    torch.manual_seed(1)
    probs, tokens = torch.randn(BATCH, vocab_size, device=device).softmax(-1).topk(TOPK)
    info = SimpleNamespace(topk_p=probs, topk_index=tokens, hidden_states=torch.randn(BATCH, 8, device=device))
    return SimpleNamespace(
        spec_info=info, batch_size=BATCH, forward_mode=stub.Mode.DECODE,
        out_cache_loc=torch.arange(BATCH * TOPK * STEPS, device=device),
        positions=torch.arange(BATCH, device=device).repeat_interleave(TOPK),
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(3, 4, 3, 12), (1, 2, 2, 6), (2, 3, 6, 30), (3, 2, 9, 17), (2, 9, 4, 64)], ids=str)
@pytest.mark.parametrize("has_map", [False, True])
def test_drafts_are_those_of_sglang(has_map, sizes, sglang, monkeypatch, device):
    """For given numbers of requests, beams, levels and nodes; levels may equal beams in number, or either be more."""
    for name, size in zip(("BATCH", "TOPK", "STEPS", "NODES"), sizes):
        monkeypatch.setattr(sys.modules[__name__], name, size)
    hot = torch.randperm(VOCAB, device=device)[:50].sort().values if has_map else None
    table = torch.randn(VOCAB, 50 if has_map else VOCAB, device=device) * 3
    workers = [make_worker(device, table, hot) for _ in range(2)]
    wanted = draft_as_sglang(workers[0], make_draft_batch(device, table.shape[1]))
    drafted = drafting.draft_forward(None, workers[1], make_draft_batch(device, table.shape[1]))
    for name, ours, theirs in zip(("parents", "index", "tokens"), drafted, wanted):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(workers[1].draft_runner.seen, workers[0].draft_runner.seen, strict=True):
        for mine, other in zip(ours, theirs):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    "change", ["chains", "one level", "shares an index", "idle", "rejection", "several positions", "a canary"]
)
def test_what_we_do_not_draft_is_sglangs(change, sglang, monkeypatch, device):
    worker, batch = make_worker(device, torch.randn(VOCAB, VOCAB, device=device)), make_draft_batch(device, VOCAB)
    owner, name, value = {
        "chains": (worker, "topk", 1),
        "one level": (worker, "speculative_num_steps", 1),
        "shares an index": (worker, "index_share_for_mtp_iteration", True),
        "idle": (batch, "forward_mode", stub.Mode.IDLE),
        "rejection": (stub.SPEC, "speculative_use_rejection_sampling", True),
        "several positions": (worker.draft_runner.model_config, "model_is_mrope", True),
        "a canary": (worker.draft_runner, "canary_manager", "one"),
    }[change]
    (monkeypatch.setitem if owner is stub.SPEC else monkeypatch.setattr)(owner, name, value)
    assert drafting.draft_forward(lambda *given: given, worker, batch) == (worker, batch)


def is_taken(function, *arguments, **options) -> bool:
    """Tells whether an op takes such sizes."""
    try:
        return bool(function(*arguments, **options))
    except ValueError as error:
        assert "must" in str(error)
        return False


def test_we_draft_exactly_the_trees_that_our_ops_take(sglang, monkeypatch, device):
    """Of branching trees: by the candidates of all levels, which are ranked together, and those of a beam."""

    class Ours(Exception):
        """What drafting by our ops raises here at once."""

    def begin(worker):
        raise Ours

    monkeypatch.setattr(drafting, "_constants", begin)
    found, wanted = {}, {}
    for topk in range(2, 20):
        logits = torch.zeros(1, 32, device=device)
        fits_beam = is_taken(drafting.select_top_k_tokens, logits, topk=topk, level=0)
        most = 1 + (4096 - topk) // topk**2
        for num_steps in {2, 3, most // topk, most - 1, most, most + 1, most + 2, topk * most} - {0, 1}:
            scores = torch.zeros(1, topk + (num_steps - 1) * topk**2, device=device)
            is_ranked = is_taken(drafting.organize_draft_results, scores, scores.long(), num_verify_tokens=2)
            worker, batch = make_worker(device, logits), make_draft_batch(device, VOCAB)
            worker.topk, worker.speculative_num_steps = topk, num_steps
            batch.out_cache_loc = torch.arange(BATCH * topk * num_steps, device=device)
            sizes = topk, num_steps
            wanted[sizes] = fits_beam and is_ranked
            try:
                found[sizes] = drafting.draft_forward(lambda *_: False, worker, batch)
            except Ours:
                found[sizes] = True
    assert found == wanted and {*wanted.values()} == {True, False}


def make_verify_batch(device, **sampling):
    """Trees of three requests, the drafts of two of which the target likes; each has a temperature of its own."""
    table = torch.randn(VOCAB, VOCAB, device=device) * 3
    fields = {
        "acc_additive_penalties": None, "acc_scaling_penalties": None, "logit_bias": None, "is_all_greedy": True,
        "need_top_k_sampling": False, "need_top_p_sampling": False,
        "temperatures": torch.tensor([[0.5], [0.8], [1.3]], device=device), "top_ks": None, "top_ps": None,
    }  # fmt: skip
    seq_lens = torch.tensor([5, 9, 2], device=device)
    parents, index, tokens, _ = draft_as_sglang(make_worker(device, table), make_draft_batch(device, VOCAB))
    mask, positions, *links, nodes = trees.build_tree_kernel_efficient(
        None, torch.arange(BATCH, device=device), parents, index, tokens, seq_lens, 0, TOPK, STEPS, NODES, trees.PACKED
    )
    logits = 2 * torch.randn(BATCH * NODES, VOCAB, device=device)
    candidates = nodes.view(BATCH, NODES)
    for request in range(BATCH):
        for node in range(NODES):
            child = int(links[1][request, node])
            while child >= 0 and request != 1:
                logits[request * NODES + node, candidates[request, child]] += 11.0
                child = int(links[2][request, child])
    verify_input = SimpleNamespace(
        draft_token=nodes, draft_token_num=NODES, max_tree_depth=STEPS + 1, retrieve_index=links[0],
        retrieve_next_token=links[1], retrieve_next_sibling=links[2],
    )  # fmt: skip
    batch = SimpleNamespace(
        forward_mode=stub.Mode.TARGET_VERIFY, seq_lens=seq_lens, sampling_info=SimpleNamespace(**(fields | sampling))
    )
    return verify_input, batch, logits


def check_verdict(verdict, verify_input, walk, *arguments) -> list[int]:
    """Holds a verdict against a walk in plain Python; returns how many drafts were accepted."""
    size, path = BATCH * NODES, [[-1] * (STEPS + 1) for _ in range(BATCH)]
    predicts, names = [0] * size, ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    tree = [verify_input.draft_token.view(BATCH, NODES), *(getattr(verify_input, name) for name in names)]
    counts = walk(predicts, path, [tensor.tolist() for tensor in tree], *arguments)
    assert [part.tolist() for part in verdict] == [predicts, [count + 1 for count in counts], path]
    assert {part.dtype for part in verdict} == {torch.int32}
    return counts


@pytest.mark.parametrize("names", ADJUSTED, ids=" ".join)
def test_greedy_verification(names, sglang, device):
    fields, mask = make_adjustments(names, BATCH, NODES, VOCAB, device)
    verify_input, batch, logits = make_verify_batch(device, **fields)
    wanted = adjusted_nodes(logits, batch.sampling_info, mask)
    best = wanted.argmax(-1).view(BATCH, NODES).tolist()
    output = SimpleNamespace(next_token_logits=logits)
    verdict = verification.eagle_sample(None, verify_input, batch, output, mask)
    torch.testing.assert_close(output.next_token_logits, wanted.float())  # log-probabilities are made of them
    walk = lambda predicts, path, tree: oracle_verify(predicts, path, *tree, best)  # noqa: E731
    assert sum(check_verdict(verdict, verify_input, walk)) > 1


@pytest.mark.parametrize("names", ADJUSTED, ids=" ".join)
@pytest.mark.parametrize("has_top_p", [False, True])
@pytest.mark.parametrize("has_top_k", [False, True])
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.2, 0.9), (0.9, 0.3)], ids=str)
def test_sampled_verification(names, has_top_k, has_top_p, thresholds, sglang, monkeypatch, device):
    """SGLang's rule of coins in float64, with filters one after another, and other ones for each request.

    Logits that are no numbers are mended before.
    """
    fields, mask = make_adjustments(names, BATCH, NODES, VOCAB, device)
    top_ks = torch.tensor([3, 9, 5], dtype=torch.int32, device=device)
    top_ps = torch.tensor([0.9, 0.5, 0.7], device=device)
    verify_input, batch, logits = make_verify_batch(
        device, **fields, is_all_greedy=False, top_ks=top_ks, top_ps=top_ps, need_top_k_sampling=has_top_k,
        need_top_p_sampling=has_top_p,
    )  # fmt: skip
    logits[::2, 5] = -1e30
    for name, value in zip(("single", "acc"), thresholds):
        monkeypatch.setitem(stub.SPEC, f"speculative_accept_threshold_{name}", value)
    rows = lambda values: values.repeat_interleave(NODES, 0)  # noqa: E731
    probs = (adjusted_nodes(logits, batch.sampling_info, mask) / rows(batch.sampling_info.temperatures)).softmax(-1)
    if has_top_k:
        edge = probs.sort(-1, descending=True).values.gather(1, rows(top_ks)[:, None].long() - 1)
        probs = probs * (probs >= edge)
        probs = probs / probs.sum(-1, keepdim=True)
    if has_top_p:
        ordered, order = probs.sort(-1, descending=True)
        is_kept = ordered.cumsum(-1) - ordered < rows(top_ps)[:, None]
        probs = probs * torch.zeros_like(probs).scatter(1, order, is_kept.double())
        probs = probs / probs.sum(-1, keepdim=True)

    def toss(*, sampling_info, seq_lens, draft_token_num, candidates, device):
        assert sampling_info is batch.sampling_info and seq_lens is batch.seq_lens and draft_token_num == NODES
        assert torch.equal(candidates.flatten(), verify_input.draft_token) and device == logits.device
        return coins, last_coins

    monkeypatch.setattr(sglang["sglang.srt.speculative.eagle_utils"], "_verify_coins", toss)
    walk = lambda predicts, path, *more: oracle_sample((predicts, path), *more)  # noqa: E731
    counts = []
    for _ in range(6):
        coins, last_coins = torch.rand(BATCH, NODES, device=device), torch.rand(BATCH, device=device)
        output = SimpleNamespace(next_token_logits=logits.masked_fill(logits == -1e30, float("nan")))
        verdict = verification.eagle_sample(None, verify_input, batch, output, mask)
        given = (coins.tolist(), last_coins.tolist(), probs.view(BATCH, NODES, -1).tolist(), *thresholds)
        counts += check_verdict(verdict, verify_input, walk, *given)
    assert len(set(counts)) > 1


class Requests:
    """Stands for what match keeps of requests: seeds, penalties that change nothing, and what was counted."""

    def __init__(self):
        self.counted = []

    def seeds(self, rows):
        return 7 + rows

    def penalize(self, tree, logits, rows):
        return logits

    def count(self, rows, tokens, is_output):
        self.counted.append((tokens * is_output).tolist())


@pytest.mark.parametrize("is_amd", [False, True])
@pytest.mark.parametrize("greedy", [0, 1, BATCH])
@pytest.mark.parametrize("rule", ["coins", "match"])
@pytest.mark.parametrize("has_attention_ranks", [False, True])
def test_ranks_take_the_first_one_s_verdict(has_attention_ranks, rule, greedy, is_amd, sglang, monkeypatch, device):
    """In one message, whatever logits their own are; where all is greedy, each takes its own, but for AMD GPUs."""
    monkeypatch.setattr(parts.SWITCHES, "on", {"verify", "match"} if rule == "match" else {"verify"})
    monkeypatch.setattr(torch.version, "hip", "7.0" if is_amd else None, raising=False)
    top_ks = torch.tensor([1] * greedy + [50] * (BATCH - greedy), dtype=torch.int32, device=device)
    verify_input, batch, logits = make_verify_batch(
        device, is_all_greedy=greedy == BATCH, is_any_greedy=greedy > 0, top_ks=top_ks, need_top_k_sampling=True,
        need_min_p_sampling=False, penalizer_orchestrator=None, eagle_kernels_is_penalised=True,
    )  # fmt: skip
    batch.req_pool_indices = torch.arange(BATCH, device=device)
    verify_input.positions = batch.req_pool_indices.repeat_interleave(NODES)
    sent, messages = [], []

    def verify(logits, group):
        """Returns the verdict, and what is counted of it."""
        parallel = SimpleNamespace(**{"attn_tp_group" if has_attention_ranks else "tp_group": group})
        sglang["sglang.srt.layers.dp_attention"].is_dp_attention_enabled = lambda: has_attention_ranks
        monkeypatch.setattr(sys.modules["sglang.srt.runtime_context"], "get_parallel", lambda: parallel)
        monkeypatch.setattr(verification.matching, "REQUESTS", requests := Requests())
        output = SimpleNamespace(next_token_logits=logits.clone())
        verdict = verification.eagle_sample(None, verify_input, batch, output)
        assert [part.dtype for part in verdict] == 3 * [torch.int32]
        return [part.tolist() for part in verdict], requests.counted

    def send(message, src):
        sent.append(message.clone())
        assert src == 0

    def receive(message, src):
        assert message.dtype == sent[-1].dtype
        messages.append(message.copy_(sent[-1]))

    alone = SimpleNamespace(world_size=1)
    first = verify(logits, SimpleNamespace(world_size=2, broadcast=send))
    second = logits.flip(0)
    others, own = verify(second, SimpleNamespace(world_size=2, broadcast=receive)), verify(second, alone)
    assert first == verify(logits, alone) != own
    agrees = greedy < BATCH or is_amd
    assert others == (first if agrees else own) and len(sent) == len(messages) == int(agrees)
    assert len(first[1]) == (rule == "match")


def test_simulated_acceptance(sglang, device):
    """SGLang's function for it is told of the verdict, and changes it in place but for the paths, which it returns."""
    verify_input, batch, logits = make_verify_batch(device)
    module, told = sglang["sglang.srt.speculative.spec_utils"], []
    module.SIMULATE_ACC_LEN = 1.0

    def simulate(*, accept_index, predict, num_correct_drafts, **given):
        told.append((predict.clone(), num_correct_drafts + 1, accept_index))
        assert torch.equal(given.pop("candidates").flatten(), verify_input.draft_token)
        assert given == {
            "target_predict": None, "simulate_acc_len": 1.0, "simulate_acc_token_mode": "fixed", "bs": BATCH,
            "spec_steps": STEPS,
        }  # fmt: skip
        predict.fill_(7)
        num_correct_drafts.fill_(1)
        return accept_index[:, :1] + torch.arange(STEPS + 1, device=device)

    module.generate_simulated_accept_index = simulate
    verify = lambda: verification.eagle_sample(  # noqa: E731
        None, verify_input, batch, SimpleNamespace(next_token_logits=logits.clone())
    )
    predicts, lengths, paths = verify()
    assert set(predicts.tolist()) == {7} and set(lengths.tolist()) == {2}
    assert paths.tolist() == [list(range(first, first + STEPS + 1)) for first in range(0, BATCH * NODES, NODES)]
    module.SIMULATE_ACC_LEN = -1.0
    assert all(map(torch.equal, told[0], verify()))


@pytest.mark.parametrize("change", ["idle", "rejection", "watermark", "simulated", "more"])
def test_what_we_do_not_verify_is_sglangs(change, sglang, monkeypatch, device):
    verify_input, batch, logits = make_verify_batch(device)
    if change == "idle":
        batch.forward_mode = stub.Mode.IDLE
    elif change == "simulated":
        module = sglang["sglang.srt.speculative.spec_utils"]
        module.SIMULATE_ACC_LEN, module.SIMULATE_ACC_TOKEN_MODE = 2.0, "real-draft-token"
    monkeypatch.setitem(stub.SPEC, "speculative_use_rejection_sampling", change == "rejection")
    options = {"watermark_state": "a state", "watermark_full_mask": True} if change == "watermark" else {}
    given = (verify_input, batch, SimpleNamespace(next_token_logits=logits), None)
    given += ("what newer versions have",) if change == "more" else ()
    original = lambda *given, **more: (given, more)  # noqa: E731
    assert verification.eagle_sample(original, *given, **options) == (given, options)


def test_what_says_nothing_leaves_verification_to_us(sglang, device):
    verify_input, batch, logits = make_verify_batch(device)
    sglang["sglang.srt.speculative.spec_utils"].SIMULATE_ACC_TOKEN_MODE = "real-draft-token"  # of no simulation
    output, options = SimpleNamespace(next_token_logits=logits), {"watermark_state": None, "watermark_full_mask": True}
    assert len(verification.eagle_sample(None, verify_input, batch, output, **options)) == 3


@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 4, 12), (2, 8, 5, 70), (2, 3, 1, 4), (2, 1, 3, 4)], ids=str)
def test_trees_in_packed_words(shape, has_buffer, device):
    """The links are those of SGLang's op; bit j of a node's words says whether it sees node j."""
    batch_size, topk, depth, num_nodes = shape
    parents, kept, tokens = (part.to(device) for part in random_drafts(*shape, vocab_size=VOCAB))
    seq_lens, roots = torch.arange(3, 3 + batch_size, device=device), torch.arange(batch_size, device=device)
    buffer = torch.full((batch_size + 2, num_nodes, trees.num_words(num_nodes)), -7, device=device)
    built = trees.build_tree_kernel_efficient(
        None, roots, parents, kept, tokens, seq_lens, 0, topk, depth, num_nodes, trees.PACKED,
        buffer if has_buffer else None,
    )  # fmt: skip
    mask, positions, index, *links, nodes = built
    rows, *expected = oracle_build(parents, kept, seq_lens, topk, depth, num_nodes)
    bits = mask[..., None] >> torch.arange(64, device=device) & 1
    assert bits.flatten(2)[..., :num_nodes].flatten(0, 1).bool().tolist() == rows
    assert [positions.tolist(), *(link.tolist() for link in links)] == expected
    assert index.flatten().tolist() == list(range(batch_size * num_nodes))
    assert nodes.tolist() == torch.cat([roots[:, None], tokens], 1).flatten().tolist()
    if has_buffer:
        assert mask.data_ptr() == buffer.data_ptr() and (buffer[batch_size:] == -7).all()


def test_other_trees_are_sglangs():
    original, given = lambda *given: given, tuple(range(9))
    assert trees.build_tree_kernel_efficient(original, *given, 2, "buffer", False) == (*given, 2, "buffer", False)
    assert trees.build_tree_kernel_efficient(original, *given) == (*given, 0, None, True)


def test_walks_along_given_tokens(device):
    """What SGLang's function of this name returns, with its names."""
    verify_input, _, logits = make_verify_batch(device)
    target = logits.argmax(-1).view(BATCH, NODES)
    predicts = torch.zeros(BATCH * NODES, dtype=torch.int32, device=device)
    path = torch.full((BATCH, STEPS + 1), -1, dtype=torch.int32, device=device)
    verdict = verification.verify_tree_greedy_func(
        None, predicts=predicts, accept_index=path, accept_token_num=predicts.new_empty(BATCH),
        candidates=verify_input.draft_token.view(BATCH, NODES), retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token, target_predict=target, topk=TOPK,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
    )  # fmt: skip
    assert verdict[0] is predicts and verdict[1] is path
    walk = lambda predicts, path, tree: oracle_verify(predicts, path, *tree, target.tolist())  # noqa: E731
    assert sum(check_verdict((predicts, verdict[2] + 1, path), verify_input, walk)) > 1


def test_accepted_paths_move_to_the_front(device):
    slots = torch.arange(100, 100 + BATCH * NODES, device=device)
    paths = torch.full((BATCH, 5), -1, dtype=torch.int32)
    for request, nodes in enumerate([[0, 2, 5], [0], [0, 1, 3, 7, 9]]):
        paths[request, : len(nodes)] = torch.tensor(nodes) + request * NODES
    moved = {}
    pool = SimpleNamespace(move_kv_cache=lambda target, source: moved.update(zip(target.tolist(), source.tolist())))
    batch = SimpleNamespace(out_cache_loc=slots, seq_lens=torch.zeros(BATCH, device=device))
    cache_locs.move_accept_tokens_to_target_kvcache(
        None, batch, paths.to(device), torch.tensor([2, 0, 4], device=device), SimpleNamespace(get_kvcache=lambda: pool)
    )
    first, third = 100, 100 + 2 * NODES
    assert moved == {
        0: 0, first: first, first + 1: first + 2, first + 2: first + 5, 100 + NODES: 100 + NODES, third: third,
        third + 1: third + 1, third + 2: third + 3, third + 3: third + 7, third + 4: third + 9,
    }  # fmt: skip


class MLATokenToKVPool:
    """SGLang's pool of latents: its buffers, and how it moves rows."""

    def __init__(self, num_layers: int, device):
        self.size, self.native_moves = (num_layers, 60, 1, 48), 0
        self.create(device)

    def create(self, device) -> None:
        self.kv_buffer = [torch.rand(self.size[1:], device=device) for _ in range(self.size[0])]

    def move_kv_cache(self, target, source):
        self.native_moves += 1
        for kv_cache in self.kv_buffer:
            kv_cache[target] = kv_cache[source]


class DSATokenToKVPool(MLATokenToKVPool):
    """Keeps keys of an index beside latents."""


def test_latents_of_all_layers_move_in_one_launch(device, backend):
    """As the pool itself moves them, also after it was emptied and has other buffers."""
    table = torch.randperm(59)[: BATCH * NODES].to(device) + 1
    paths = torch.full((BATCH, 5), -1, dtype=torch.int32)
    for request, nodes in enumerate([[0, 2, 5], [0], [0, 1, 3, 4, 9]]):
        paths[request, : len(nodes)] = torch.tensor(nodes) + request * NODES
    batch = SimpleNamespace(out_cache_loc=table, seq_lens=torch.full((BATCH,), 7, device=device))
    given = batch, paths.to(device), torch.tensor([2, 0, 4], dtype=torch.int32, device=device)
    pool, derived = MLATokenToKVPool(3, device), DSATokenToKVPool(3, device)
    for _ in range(2):
        derived.kv_buffer = [buffer.clone() for buffer in pool.kv_buffer]
        for each in (pool, derived):
            cache_locs.move_accept_tokens_to_target_kvcache(None, *given, SimpleNamespace(get_kvcache=lambda: each))  # noqa: B023
        assert all(map(torch.equal, pool.kv_buffer, derived.kv_buffer))
        freed = [weakref.ref(each) for each in pool.kv_buffer]
        pool.kv_buffer = []
        assert not any(each() is not None for each in freed), "the table keeps buffers alive"
        pool.create(device)
    assert (pool.native_moves, derived.native_moves) == (0, 2)


def test_slots_of_trees(device):
    table = torch.arange(40, dtype=torch.int32, device=device).view(2, 20)
    rows, starts = torch.tensor([1, 0], device=device), torch.tensor([3, 5], device=device)
    given = (rows, table, starts, 2, 3, device)
    assert cache_locs.assign_extend_cache_locs_uniform_func(None, *given).tolist() == [23, 24, 25, 5, 6, 7]
    original = lambda *given, **more: more  # noqa: E731
    assert cache_locs.assign_extend_cache_locs_uniform_func(original, *given, full_v2p=rows) == {"full_v2p": rows}


def make_norm(device, **changes):
    fields = {"variance_size_override": None, "cast_x_before_out_mul": False, "variance_epsilon": 0.3}
    return SimpleNamespace(**(fields | changes), weight=torch.nn.Parameter(1 + torch.rand(64, device=device)))


def test_norms(sglang, device):
    norm, x, residual = make_norm(device), torch.randn(5, 64, device=device), torch.randn(5, 64, device=device)
    wanted = torch.nn.functional.rms_norm(x, (64,), norm.weight, 0.3)
    torch.testing.assert_close(layers.forward_norm(None, norm, x.clone()), wanted)
    total = x + residual
    given = x.clone(), residual.clone()
    output = layers.forward_norm(None, norm, *given)
    torch.testing.assert_close(output[0], torch.nn.functional.rms_norm(total, (64,), norm.weight, 0.3))
    torch.testing.assert_close(output[1], total)
    assert output[0] is given[0] and output[1] is given[1]


@pytest.mark.parametrize(
    "case",
    [
        *("part of a row", "rounds as Hugging Face", "quantises", "adds more", "invariant", "three axes", "one axis"),
        *("half", "double", "no rows", "every second row", "too wide", "half of a residual", "a strided residual"),
    ],
)
def test_other_norms_are_sglangs(case, sglang, device):
    changes = {
        "part of a row": {"variance_size_override": 32},
        "rounds as Hugging Face": {"cast_x_before_out_mul": True},
        "quantises": {"_quant_linear": "a layer"},
    }
    norm, x, more = make_norm(device, **changes.get(case, {})), torch.randn(4, 64, device=device), None
    if case == "adds more":
        more = x
    rows = {
        "three axes": x[None], "one axis": x[0], "half": x.half(), "double": x.double(), "no rows": x[:0],
        "every second row": x[::2], "too wide": x.new_empty(1, 1 << 17),
    }  # fmt: skip
    residual = {"half of a residual": x.half(), "a strided residual": x.T.contiguous().T}.get(case)
    x = rows.get(case, x)
    if case == "too wide":
        norm.weight = torch.nn.Parameter(x[0].clone())
    if case == "invariant":
        sglang["sglang.srt.layers.layernorm"].is_batch_invariant_mode_enabled = lambda: True
    found = layers.forward_norm(lambda *given: given, norm, x, residual, more)
    assert len(found) == 4 and all(one is other for one, other in zip(found, (norm, x, residual, more)))


def test_activation(device):
    x = torch.randn(2, 3, 16, device=device)
    wanted = torch.nn.functional.silu(x[..., :8]) * x[..., 8:]
    torch.testing.assert_close(layers.forward_activation(None, None, x), wanted)
    apart = x.transpose(0, 1)
    assert layers.forward_activation(lambda layer, given: given, None, apart) is apart
