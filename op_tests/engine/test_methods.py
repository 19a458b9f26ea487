"""Methods of drafting: drafts are as good as they can be, and what a method cannot do is told."""

import concurrent.futures
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.drafters.methods import MixedDrafter
from eagle_kernels.engine.drafters.protocol import Proposal, tree_of
from eagle_kernels.engine.drafters.suffix import SuffixCache, SuffixDrafter, SuffixFeed, _limits
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.requests.request import Request
from eagle_kernels.tools.cli.generate import warm_up
from op_tests.engine.drafters.suffix_oracle import num_states
from op_tests.engine.methods import METHODS, MIXED, toys
from op_tests.engine.toys import ToyModel
from op_tests.engine.view import View

# ragged, with much to look up
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 5, 6], [4], [8, 8, 8, 8]]


class Parrot(ToyModel):
    """A target that says the same seven tokens again and again."""

    def forward(self, input_ids, positions, attend, *, capture=(), last_only=False):
        output = super().forward(input_ids, positions, attend, capture=capture, last_only=last_only)
        following = (input_ids[:, -1:] if last_only else input_ids) + 1
        logits = torch.nn.functional.one_hot(following % 7, self.vocab_size).float()
        return output._replace(logits=logits)


def test_what_is_being_repeated_comes_before_the_model(device):
    """As many right drafts as the history alone has, beside a model that is always wrong; but where fewer tokens than
    `max_ngram_size` match, the model's drafts take their places."""
    target, stranger = Parrot(vocab_size=20, device=device), ToyModel(vocab_size=20, seed=1, device=device)
    sizes = {"topk": 1, "num_steps": 6, "num_draft_tokens": 7, "min_ngram_size": 1}
    lengths = {}
    for method, options in (("ngram", {}), ("hybrid", {"num_model_steps": 2})):
        for max_ngram_size in (5, 32):
            config = EAGLEConfig(method=method, max_ngram_size=max_ngram_size, **sizes, **options)
            engine = EAGLEInference(stranger if method == "hybrid" else None, target, config)
            stats = engine.generate([0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], 22).stats
            lengths[method, max_ngram_size] = stats.mean_accept_length
    assert lengths["ngram", 5] == lengths["ngram", 32] == lengths["hybrid", 5] == 7, lengths
    assert lengths["hybrid", 32] < 6, lengths


LAYOUTS = {
    "rejection": {"method": "draft_model", "topk": 2, "num_steps": 3, "num_draft_tokens": 7,
                  "verify_strategy": "rejection"},
    "ngram": METHODS["ngram tree"],
    "suffix": METHODS["suffix tree"],
    "hybrid": METHODS["hybrid tree"],
    "several": {"method": ("ngram", "naive"), "topk": 2, "num_steps": 4},
}  # fmt: skip


@pytest.mark.parametrize("mode", ["qlen_only", "qlen_only_bitpacking", "full_mask"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_masks_of_every_layout(name, mode, device):
    if (name, mode) == ("several", "full_mask"):
        pytest.skip("refused")
    target, draft = toys(device)
    engine = EAGLEInference(draft, target, EAGLEConfig(**LAYOUTS[name], tree_mask_mode=mode))
    params = [SamplingParams(max_new_tokens=12) for _ in range(2)]
    if name == "several":
        params[1] = SamplingParams(max_new_tokens=12, drafter="naive")
    requests = list(map(engine.submit, PROMPTS, params))
    engine.collect()
    assert [request.error for request in requests] == [None, None]
    plain = engine.generate(PROMPTS[:2], 12, speculative=False).output_ids
    assert [request.output_ids for request in requests] == plain


def test_suffix_trees_remember_responses(device):
    target, _ = toys(device)
    engine = EAGLEInference(None, target, EAGLEConfig(**METHODS["suffix chain"]))
    first = engine.generate([3, 1, 4], 40).stats
    again = engine.generate([3, 1, 4], 40).stats
    assert again.mean_accept_length > first.mean_accept_length
    forgetful = EAGLEInference(
        None, target, EAGLEConfig(**METHODS["suffix chain"], suffix_decoding_max_cached_requests=0)
    )
    lengths = [forgetful.generate([3, 1, 4], 40).stats.mean_accept_length for _ in range(2)]
    assert lengths[0] == lengths[1] == first.mean_accept_length


def test_a_warmup_is_not_remembered(device):
    target, _ = toys(device)
    sizes = {"suffix_decoding_max_cached_requests": 8, "max_batch": 4}
    engine = EAGLEInference(None, target, EAGLEConfig.chain(4, method="suffix", **sizes))
    engine.generate([[3], [4]], 24)
    (cache,) = engine.session.suffix_caches.values()
    before = [list(response) for response in cache._responses]
    engine.warmup(most_requests=2)
    assert len(before) == 2 and [list(response) for response in cache._responses] == before


def remembering(device) -> tuple[EAGLEInference, SuffixCache]:
    """An engine whose suffix trees know one response."""
    config = EAGLEConfig(**METHODS["suffix chain"], suffix_decoding_max_cached_requests=8)
    engine = EAGLEInference(None, toys(device)[0], config)
    engine.generate([3, 1, 4], 24)
    (cache,) = engine.session.suffix_caches.values()
    return engine, cache


def test_requests_of_other_threads_wait_for_a_benchmark(device):
    """Which would be measured with it, and be told what it forgets."""
    engine, cache = remembering(device)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with engine.session.alone("this", engine.config):
            waiting = pool.submit(engine.generate, [4, 1], 8)
            engine.generate([3, 1], 8)
            with pytest.raises(concurrent.futures.TimeoutError):
                waiting.result(1)
            assert len(cache._responses) == 1
        assert len(waiting.result().output_ids) == 8
    assert len(cache._responses) == 2


@pytest.mark.slow
def test_a_benchmark_is_told_no_answers(device):
    """Neither by its warm-up nor by the benchmark before it; nor does it tell any."""
    engine, cache = remembering(device)
    before = [list(response) for response in cache._responses]
    lengths = [engine.benchmark(PROMPTS[:1], 24).speculative.mean_accept_length for _ in range(2)]
    alone = engine.generate(PROMPTS[0], 24, suffix_decoding_max_cached_requests=0).stats.mean_accept_length
    assert lengths == [alone, alone]
    assert len(before) == 1 and [list(response) for response in cache._responses] == before
    # of two batches of one prompt the second one knows the text of the first
    assert engine.benchmark(PROMPTS[:1] * 2, 24).speculative.mean_accept_length > alone
    engine.submit([1], SamplingParams(max_new_tokens=3))
    with pytest.raises(RuntimeError, match="benchmark: the batch must be empty; collect or abort the requests in it"):
        engine.benchmark(PROMPTS, 24)


def test_a_batch_is_empty_where_nobody_is_in_it(lag, device):
    """Whatever step the device was left with."""
    target, _ = toys(device)
    engine = EAGLEInference(None, target, EAGLEConfig(**METHODS["suffix chain"]))
    request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=30))
    for _ in range(3):
        engine.step()
    engine.abort(request)
    assert engine.benchmark([[1, 2, 3]], 6).identical == 1.0
    engine.abort(engine.submit([1]))
    engine.warmup(SamplingParams())


def test_the_warm_up_of_the_command_tells_no_answers(device):
    engine, cache = remembering(device)
    # as on a GPU: on a CPU there is no warm-up
    as_if = SimpleNamespace(
        device=torch.device("cuda"), config=engine.config, generate=engine.generate, session=engine.session
    )
    warm_up(as_if, PROMPTS[0], SimpleNamespace(max_new_tokens=24, compare=True))
    assert len(cache._responses) == 1


@pytest.mark.parametrize("depth", [64, 9])
@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize("num_since", [0, 1, 3])
def test_what_is_left_of_an_offer(num_since, factor, depth, device):
    """A step behind: as many as the match that the host knew allows, longer by the tokens since, and no fewer."""
    sizes = {"suffix_decoding_max_spec_factor": factor, "suffix_decoding_max_tree_depth": depth}
    config = EAGLEConfig(method="suffix", topk=1, num_steps=8, num_draft_tokens=9, **sizes)
    text, since = [*range(20), 39, *range(8)], [*range(8, 8 + num_since)]
    length = torch.tensor([len(text) - 1], device=device)
    feed = SuffixFeed([config], SuffixCache(depth, 0), SimpleNamespace(num_rows=1, lengths=length), lag=1)
    request = Request(0, text, SamplingParams(), 0, frozenset())
    feed.start(request)
    feed.send([(0, request)])
    drafter = SuffixDrafter(config, feed)
    history = torch.tensor([[*text, *since, *(30 * [-1])]], device=device)
    batch = SimpleNamespace(
        rows=slice(0, 1), state=SimpleNamespace(history=history), lengths=length + num_since,
        roots=history[:, len(text) - 1 + num_since],
    )  # fmt: skip
    proposal = drafter.propose(batch)
    made = feed._made[request]
    allowed = int(factor * min(8 + num_since, depth - 1) + 1e-6)
    count = min(allowed, 8, len(made.draft.token_ids) - num_since)
    probs = proposal.path_probs()[0].tolist()
    assert made.match == 8 and int((proposal.tree.retrieve_next_token >= 0).sum()) == count > 0
    assert proposal.tree.draft_tokens.flatten().tolist()[1 : 1 + count] == [
        *range(8 + num_since, 8 + num_since + count)
    ]
    assert all(prob >= 0.5 for prob in probs[:count]) and all(map(math.isnan, probs[count:]))


@pytest.mark.parametrize("num_since", [0, 2])
def test_any_factor_of_any_match_is_rounded_down_alike(num_since, device, monkeypatch):
    """By host and device: to what exact arithmetic of the factor as it is written says, up to as deep as trees go."""
    depth, num_nodes = 64, 200
    config = EAGLEConfig(method="suffix", topk=1, num_steps=num_nodes - 1, num_draft_tokens=num_nodes)
    factors, lengths = [f"{count / 100:.2f}" for count in range(301)], range(depth + 2)
    matches = torch.tensor(lengths, device=device)
    nodes = torch.arange(1, num_nodes, device=device).repeat(len(lengths), 1)
    sent = SimpleNamespace(tokens=nodes, parents=nodes - 1, bases=torch.zeros_like(matches), matches=matches)
    drafter = SuffixDrafter(config, SimpleNamespace(offers=sent, most_tokens=3))
    batch = SimpleNamespace(
        rows=slice(None), state=SimpleNamespace(history=torch.zeros_like(nodes)), lengths=0 * matches + num_since
    )
    found = SimpleNamespace(tokens=nodes, parents=nodes - 1)
    monkeypatch.setattr("eagle_kernels.engine.drafters.suffix.ops.reroot_drafts", lambda *_, **__: found)
    monkeypatch.setattr("eagle_kernels.engine.drafters.suffix.tree_of", lambda batch, tokens, parents, config: tokens)
    for factor in factors:
        config = EAGLEConfig(method="suffix", topk=1, suffix_decoding_max_spec_factor=float(factor))
        assert config.suffix_decoding_max_tree_depth == depth
        drafter._config = config
        known = [min(length + num_since, depth - 1) for length in lengths]
        wanted = [min(num_nodes - 1, math.floor(Fraction(factor) * length)) for length in known]
        assert (drafter.propose(batch).tree >= 0).sum(1).tolist() == wanted, factor
        drafts, _ = _limits(depth, num_nodes - 1, float(factor), 0.0)
        assert [drafts[length] for length in known] == wanted, factor


def test_requests_that_end_leave_no_suffix_tree(device):
    target, _ = toys(device)
    engine = EAGLEInference(None, target, EAGLEConfig(**METHODS["suffix tree"], max_batch=2))
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=10)) for prompt in PROMPTS]
    engine.step()
    engine.abort(requests[1])
    engine.collect()
    (cache,) = engine.session.suffix_caches.values()
    assert num_states(cache)[0] == 0 and not View(engine).plan.feed._made
    assert requests[0].output_ids == engine.generate(PROMPTS[0], 10, speculative=False).output_ids


@pytest.mark.parametrize("mode", ["packed", "qlen_only", "qlen_only_bitpacking"])
@pytest.mark.parametrize("seed", range(8))
def test_a_row_of_a_mixed_batch_has_all_that_its_method_proposes(seed, mode):
    """In any order of methods and rows, whichever of the methods know how probable their drafts are."""
    coin = torch.Generator().manual_seed(seed)
    names = ("draft_model", "ngram", "suffix", "naive")
    order = [names[place] for place in torch.randperm(4, generator=coin)]
    config = EAGLEConfig(**MIXED | {"method": tuple(order), "num_model_steps": None}, tree_mask_mode=mode)
    size, rows, num_drafts = 12, slice(3, 15), config.num_verify_tokens - 1
    methods = torch.randint(4, (20,), generator=coin)
    batch = SimpleNamespace(
        state=SimpleNamespace(methods=methods), rows=rows, roots=torch.arange(size), lengths=torch.arange(size) * 3
    )

    def made(is_known: bool) -> Proposal:
        """A tree of its own for each row, some of its nodes without a draft."""
        tokens = torch.randint(100, (size, num_drafts), generator=coin)
        parents = (torch.rand(size, num_drafts, generator=coin) * torch.arange(1, num_drafts + 1)).long()
        parents[torch.rand(size, generator=coin) < 0.4, -2:] = -1
        probs = torch.rand(size, num_drafts, generator=coin)
        return Proposal(tree_of(batch, tokens, parents, config), path_probs=(lambda: probs) if is_known else None)

    known = [bool(seed >> place & 1) for place in range(3)] + [seed % 3 == 0]
    proposals = list(map(made, known))
    parts = [SimpleNamespace(num_slots=1, reads_history=False, propose=lambda _, own=own: own) for own in proposals]
    mixed = MixedDrafter(config, None, parts).propose(batch)
    probs = mixed.path_probs()
    assert probs.shape == (size, num_drafts)
    for row, number in enumerate(methods[rows].tolist()):
        own = proposals[number]
        for name, tensor in mixed.tree._asdict().items():
            wanted = getattr(own.tree, name)
            assert (tensor is None) == (wanted is None)
            if tensor is not None:
                assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
                assert tensor.view(size, -1)[row].tolist() == wanted.view(size, -1)[row].tolist(), (row, name)
        if known[number]:
            assert torch.equal(probs[row], own.path_probs()[row]), row
        else:
            assert probs[row].isnan().all(), row


def test_a_drafter_is_one_of_the_methods():
    engine = EAGLEInference(ToyModel(), ToyModel(), EAGLEConfig(**MIXED))
    with pytest.raises(ValueError, match=r"drafter must be None or one of the methods \[.*\], got 'eagle'"):
        engine.submit([1, 2], SamplingParams(drafter="eagle"))


def test_a_method_that_needs_a_model_says_so():
    target = ToyModel()
    with pytest.raises(ValueError, match="draft_model must be given for method='hybrid' "):
        EAGLEInference(None, target, EAGLEConfig(**METHODS["hybrid chain"]))
    engine = EAGLEInference(None, target, EAGLEConfig(method="naive"))
    with pytest.raises(ValueError, match="draft_model must be given for method='draft_model'"):
        engine.generate([1, 2], 3, method="draft_model")
    with pytest.raises(ValueError, match="draft_model must be given for method=None"):
        engine.workspace_bytes(EAGLEConfig())


def test_a_method_is_that_of_the_draft():
    """A speed that is told under a method's name was that method's. A class of somebody else's may leave it open."""
    target, draft = ToyModel(), CausalDraft(ToyModel(seed=1))
    refusal = "method must be '{}' or None for a draft of {}, got '{}'"
    for config in (EAGLEConfig(method="eagle"), EAGLEConfig(method=("mtp", "ngram"))):
        with pytest.raises(ValueError, match=refusal.format("draft_model", "CausalDraft", config.methods[0])):
            EAGLEInference(draft, target, config)
    for method in (None, "draft_model", "ngram", "naive"):
        EAGLEInference(draft, target, EAGLEConfig(method=method))
    engine = EAGLEInference(draft, target)
    with pytest.raises(ValueError, match=refusal.format("draft_model", "CausalDraft", "eagle")):
        engine.generate([1, 2], 3, method="eagle")

    target_folder, head_folder = demo_pair()
    refused = refusal.format("eagle", "EagleHead", "mtp")
    with pytest.raises(ValueError, match=refused):
        EAGLEInference.from_pretrained(head_folder, target_folder, EAGLEConfig(method="mtp", topk=1))
    EAGLEInference.from_pretrained(head_folder, target_folder, EAGLEConfig(method="eagle"), device="cpu")
    for draft.method in (None, print):  # or mean something else by it
        EAGLEInference(draft, target, EAGLEConfig(method="mtp", topk=1))
