"""The functions of AITER's speculative package: names and order of arguments, counts, shapes, one round end to end."""

import inspect
import itertools
import math

import pytest
import torch

import eagle_kernels
import eagle_kernels.integrations.aiter as aiter
from eagle_kernels.integrations.aiter import EAGLEConfig, EAGLEInference, TreeMaskMode
from op_tests.engine.toys import ToyModel
from op_tests.harness.statistics import assert_follows_law
from op_tests.harness.trees import random_drafts
from op_tests.integrations.oracles import oracle_build, oracle_mask, oracle_sample, oracle_verify

SIGNATURES = {
    "build_tree_efficient_triton": "verified_id parent_list top_scores_index draft_tokens seq_lens seq_lens_sum topk "
    "spec_steps num_verify_tokens tree_mask_mode=0",
    "build_tree_kernel_efficient": "verified_id parent_list top_scores_index draft_tokens seq_lens seq_lens_sum topk "
    "spec_steps num_verify_tokens tree_mask_mode=0",
    "build_tree_kernel_triton": "parent_list selected_index verified_seq_len tree_mask positions retrive_index "
    "retrive_next_token retrive_next_sibling topk depth draft_token_num draft_token_num_p2 tree_mask_mode",
    "verify_tree_greedy_triton": "predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
    "retrive_next_sibling target_predict",
    "verify_tree_greedy_func": "predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
    "retrive_next_sibling target_predict",
    "verify_tree_greedy_kernel": "predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
    "retrive_next_sibling target_predict num_speculative_tokens num_draft_tokens",
    "tree_speculative_sampling_kernel": "predicts accept_index accept_token_num candidates retrive_index "
    "retrive_next_token retrive_next_sibling uniform_samples uniform_samples_final target_probs draft_probs "
    "threshold_single threshold_acc vocab_size num_speculative_tokens num_draft_tokens",
    "organize_draft_results": "score_list token_list parents_list num_draft_tokens",
    "build_tree_structure": "verified_id parent_list top_scores_index draft_tokens seq_lens topk spec_steps "
    "num_draft_tokens tree_mask_mode=0 use_triton=False",
    "verify_tree_greedy": "candidates target_predict retrieve_index retrieve_next_token retrieve_next_sibling "
    "use_triton=False",
    "compute_tree_statistics": "accept_lengths num_draft_tokens num_steps",
    "fast_topk_torch": "scores k dim=-1 sorted=True",
    "select_top_k_tokens": "logits k",
    "generate_token_bitmask": "token_ids vocab_size",
    "sample_from_logits": "logits temperature=1.0 top_p=None top_k=None",
    "calculate_acceptance_rate": "accept_lengths num_draft_tokens",
    "pad_to_alignment": "tensor alignment dim=0 value=0.0",
    "next_power_of_2": "n",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_of_arguments(name):
    parameters = inspect.signature(getattr(aiter, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    defaults = [f"{p.name}" if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert defaults == SIGNATURES[name].split()


def test_every_name_is_there():
    assert {*SIGNATURES, "TreeMaskMode", "EAGLEConfig", "EAGLEInference"} == set(aiter.__all__)


# trees


def make_drafts(batch_size, topk, spec_steps, num_nodes, device):
    drafts = (torch.randint(9, (batch_size,)), *random_drafts(batch_size, topk, spec_steps, num_nodes, vocab_size=9))
    return [tensor.to(device) for tensor in (*drafts, torch.randint(0, 20, (batch_size,)))]


@pytest.mark.parametrize("mode", TreeMaskMode, ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 3, 8), (2, 1, 4, 5), (2, 4, 1, 3)], ids=str)
def test_build(shape, mode, device):
    """Trees, not chains, in a flat mask; the layout of SGLang."""
    batch_size, topk, spec_steps, num_nodes = shape
    drafts = make_drafts(*shape, device)
    if spec_steps == 1:
        drafts[1] = drafts[1][:, :0]  # organize_draft_results gives no parents then
    drafts[2] = drafts[2][:, torch.randperm(num_nodes - 1, device=device)].contiguous()  # in any order, as SGLang may
    roots, parents, kept, tokens, seq_lens = drafts
    rows, *expected = oracle_build(parents, kept, seq_lens, topk, spec_steps, num_nodes)
    by_kernel = aiter.build_tree_efficient_triton(
        *drafts, int(seq_lens.sum()), topk, spec_steps, num_nodes, tree_mask_mode=int(mode)
    )
    for tree in (by_kernel, aiter.build_tree_structure(*drafts, topk, spec_steps, num_nodes, mode, use_triton=True)):
        mask, positions, index, next_token, next_sibling, all_tokens = tree
        assert mask.tolist() == oracle_mask(rows, seq_lens, num_nodes, mode, fill=True)
        assert [positions.tolist(), next_token.tolist(), next_sibling.tolist()] == expected
        assert index.flatten().tolist() == list(range(batch_size * num_nodes))
        assert all_tokens.tolist() == torch.cat([roots[:, None], tokens], dim=1).flatten().tolist()


def test_the_defaults_build_a_full_mask(device):
    *drafts, seq_lens = make_drafts(2, 4, 3, 8, device)
    mask = aiter.build_tree_structure(*drafts, seq_lens, 4, 3, 8)[0]
    assert mask.dtype == torch.bool and mask.shape == (8 * (int(seq_lens.sum()) + 2 * 8),)


def test_organize(device):
    """The worked example of SGLang: K = 2, three steps, five nodes."""
    as_tensor = lambda data: torch.tensor(data, device=device)  # noqa: E731
    scores = [[[0.6, 0.3]], [[0.42, 0.12, 0.27, 0.015]], [[0.02, 0.01, 0.02, 0.01]]]
    tokens = [[[11, 12]], [[21, 22, 23, 24]], [[31, 32, 33, 34]]]
    parents = [[[-1, 0, 1]], [[2, 4]], [[6, 8]]]
    lists = [[as_tensor(step) for step in steps] for steps in (scores, tokens, parents)]
    parent_list, kept, draft_tokens = aiter.organize_draft_results(*lists, num_draft_tokens=5)
    assert parent_list.tolist() == [[-1, 0, 1, 2, 4]]
    assert kept.tolist() == [[0, 1, 2, 4]] and draft_tokens.tolist() == [[11, 12, 21, 23]]
    nested = [lists[0][0][:, None, :], *(step.view(1, 2, 2) for step in lists[0][1:])]
    assert aiter.organize_draft_results(nested, *lists[1:], 5)[1].tolist() == [[0, 1, 2, 4]]
    one_step = aiter.organize_draft_results(*([step[0]] for step in lists), 2)
    assert [tensor.tolist() for tensor in one_step] == [[[]], [[0]], [[11]]]
    two_steps = aiter.organize_draft_results(*(step[:2] for step in lists), 4)
    assert [tensor.tolist() for tensor in two_steps] == [[[-1, 0, 1]], [[0, 1, 2]], [[11, 12, 21]]]


# verification and counts


def test_a_round_from_scores_to_statistics(device):
    batch_size, topk, spec_steps, num_nodes = 4, 3, 3, 9
    scores = [torch.rand(batch_size, size, device=device) * 0.5**step for step, size in enumerate((3, 9, 9))]
    tokens = [torch.randint(7, (batch_size, score.shape[1]), device=device) for score in scores]
    slots = torch.arange(-1, 3 + 9, device=device).expand(batch_size, -1)
    parents = [slots[:, :4], slots[:, 4:7], slots[:, 7:10]]
    parent_list, kept, drafts = aiter.organize_draft_results(scores, tokens, parents, num_nodes)
    roots, seq_lens = drafts[:, 0].clone(), torch.arange(batch_size, device=device)
    arguments = (roots, parent_list, kept, drafts, seq_lens)
    tree = aiter.build_tree_structure(*arguments, topk, spec_steps, num_nodes, TreeMaskMode.QLEN_ONLY)
    candidates = tree[5].view(batch_size, num_nodes)
    target = torch.randint(7, candidates.shape, device=device)
    target[:, 0] = candidates[:, 1]  # the first draft is always right
    predicts, accept_index, accept_length = aiter.verify_tree_greedy(candidates, target, *tree[2:5])

    want_predicts = [0] * candidates.numel()
    want_path = [[-1] * num_nodes for _ in range(batch_size)]
    inputs = (candidates, *tree[2:5], target)
    counts = oracle_verify(want_predicts, want_path, *(tensor.tolist() for tensor in inputs))
    assert predicts.tolist() == want_predicts and accept_index.tolist() == want_path
    assert accept_length.tolist() == counts and min(counts) >= 1
    assert predicts.dtype == accept_index.dtype == accept_length.dtype == torch.int32

    plain = eagle_kernels.verify_tree(candidates, *tree[2:5], target_predict=target, spec_steps=spec_steps)
    assert plain.accept_token_num.tolist() == counts  # the same walk, the bonus in neither count
    statistics = aiter.compute_tree_statistics(accept_length, num_nodes, spec_steps)
    assert (statistics["total_accepted"], statistics["total_proposed"]) == (sum(counts), 4 * num_nodes)
    assert aiter.calculate_acceptance_rate(accept_length, num_nodes) == sum(counts) / (4 * num_nodes)


@pytest.mark.parametrize(
    ("thresholds", "accepted"), [((0.3, 1.0), 1), ((1.0, 0.3), 1), ((0.5, 0.9), 0), ((0.9, 0.5), 1)]
)
def test_each_threshold_of_the_walk_by_coins_has_its_place(thresholds, accepted, device):
    """A draft of probability 0.4 and a coin of 0.6: the first is for a single token, the second for their sum."""
    links = [[[0, 1]], [[1, -1]], [[-1, -1]]]
    tree = [[[5, 2]], *links]
    probs, coins, last = [[[0.1, 0.2, 0.4, 0.3]] * 2], [[0.6, 0.6]], [0.45]
    wanted = [0, 0], [[-1, -1]]
    counts = oracle_sample(wanted, tree, coins, last, probs, *thresholds)
    outputs = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 0], [[-1, -1]], [0])]
    given = [torch.tensor(values, device=device) for values in (*tree, coins, last, probs)]
    aiter.tree_speculative_sampling_kernel[(1,)](*outputs, *given, None, *thresholds, 4, 2, 2)
    assert [output.tolist() for output in outputs] == [*wanted, counts] and counts == [accepted]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 3), "num_speculative_tokens must be the width of accept_index, 3, got 2"),
        ((3, 2), "num_draft_tokens must be the width of candidates, 4, got 2"),
    ],
)
def test_the_walk_s_sizes_are_checked(sizes, message):
    tensors = [torch.zeros(shape, dtype=torch.int32) for shape in ((4,), (1, 3), (1,), *[(1, 4)] * 5)]
    with pytest.raises(ValueError, match=f"verify_tree_greedy_kernel: {message}"):
        aiter.verify_tree_greedy_kernel[(1,)](*tensors, *sizes)


def test_statistics_of_a_batch():
    counts = aiter.compute_tree_statistics(torch.tensor([3, 0, 1, 3], dtype=torch.int32), 8, 3)
    assert counts == {
        "mean_accept_length": 1.75, "max_accept_length": 3, "min_accept_length": 0, "acceptance_rate": 1.75 / 8,
        "total_proposed": 32, "total_accepted": 7, "batch_size": 4,
    }  # fmt: skip


def test_statistics_of_nothing():
    empty = torch.empty(0, dtype=torch.int32)
    assert set(aiter.compute_tree_statistics(empty, 8, 3).values()) == {0}
    assert aiter.calculate_acceptance_rate(empty, 8) == 0.0
    assert aiter.calculate_acceptance_rate(torch.ones(2), 0) == 0.0


# general helpers


def test_fast_topk_orders_ties_by_index(device):
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]], device=device)
    values, indices = aiter.fast_topk_torch(scores, 3)
    assert values.tolist() == [[3.0, 3.0, 2.0], [0.0, 0.0, 0.0]] and indices.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert aiter.fast_topk_torch(scores, 1, dim=0)[1].tolist() == [[0, 0, 0, 0]]
    scores = torch.arange(3000, device=device).remainder(3).float()
    assert aiter.fast_topk_torch(scores, 1500)[1].tolist() == [*range(2, 3000, 3), *range(1, 1500, 3)]


@pytest.mark.parametrize("shape", [(3, 50), (2, 4, 50)], ids=str)
def test_select_top_k_tokens(shape, device):
    logits = torch.randn(shape, device=device)
    scores, tokens = aiter.select_top_k_tokens(logits, 4)
    best = torch.log_softmax(logits, dim=-1).topk(4)
    assert torch.equal(tokens, best.indices) and torch.allclose(scores, best.values, atol=1e-6)


def test_generate_token_bitmask(device):
    bitmask = aiter.generate_token_bitmask(torch.tensor([[1, 3, 3], [-1, 4, 0]], device=device), 4)
    assert bitmask.tolist() == [[False, True, False, True], [True, False, False, False]]
    assert bitmask.dtype == torch.bool and bitmask.is_contiguous()


def test_sampling_follows_the_filtered_law(device):
    probs = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04], device=device)
    logits = probs.log().expand(8000, -1).contiguous()
    assert_follows_law(aiter.sample_from_logits(logits).cpu(), probs.cpu())
    for filters, kept in (
        ({"temperature": 0.5, "top_p": 0.8, "top_k": 3}, [16, 9, 0, 0, 0]), ({"top_k": 2}, [4, 3, 0, 0, 0]),
        ({"top_p": 0.8}, [4, 3, 2, 0, 0]), ({"top_p": 0.55, "top_k": 2}, [1, 0, 0, 0, 0]),  # top-p of what top-k keeps
    ):  # fmt: skip
        wanted = torch.tensor(kept, dtype=torch.float64) / sum(kept)
        assert_follows_law(aiter.sample_from_logits(logits, **filters).cpu(), wanted)
    assert aiter.sample_from_logits(logits[:3], temperature=0.0).tolist() == [0, 0, 0]
    torch.manual_seed(1)
    first = aiter.sample_from_logits(logits)
    torch.manual_seed(1)
    assert torch.equal(first, aiter.sample_from_logits(logits))


def test_every_number_of_sampling_reaches_the_op(monkeypatch, device):
    """0 is a number: of top_p it is the narrowest, of temperature greedy. What is None is not given at all."""
    order = [*inspect.signature(eagle_kernels.sample_from_logits).parameters]
    given, logits = {}, torch.tensor([[0.0, 3.0, 2.9, 1.0]] * 64, device=device)
    monkeypatch.setattr(aiter, "_sample_from_logits", lambda *args: given.update(zip(order, args)))
    for temperature, top_p, top_k in itertools.product((0.0, 0.5), (None, 0.0, 0.5, 1.0), (None, 0, -1, 3)):
        aiter.sample_from_logits(logits, temperature, top_p, top_k)
        asked = {"positions": 0, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        found = {name: None if given[name] is None else {*given[name].tolist()} for name in asked}
        assert found == {name: None if value is None else {value} for name, value in asked.items()}
        assert given["logits"] is logits and len(set(given["seeds"].tolist())) == len(logits)
    monkeypatch.undo()
    assert {*aiter.sample_from_logits(logits, top_p=0.0).tolist()} == {1}
    assert {*aiter.sample_from_logits(logits, top_k=0).tolist()} > {1}


@pytest.mark.parametrize(("dim", "shape"), [(0, (8, 5)), (1, (6, 8)), (-1, (6, 8)), (-2, (8, 5))])
def test_pad_to_alignment(dim, shape, device):
    tensor = torch.ones(6, 5, device=device)
    padded = aiter.pad_to_alignment(tensor, 4, dim, value=-1.0)
    assert padded.shape == shape and torch.equal(padded[:6, :5], tensor)
    assert int((padded == -1).sum()) == padded.numel() - 30
    assert aiter.pad_to_alignment(tensor, 3, 0) is tensor


def test_next_power_of_2():
    assert [aiter.next_power_of_2(n) for n in (-3, 0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 1, 2, 4, 4, 8, 64, 128]


# the engine


@pytest.fixture(scope="module")
def models():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ToyModel(seed=1, device=device), ToyModel(device=device)


def test_the_documented_calls(models, device):
    config = EAGLEConfig(topk=4, num_steps=3, num_draft_tokens=8, temperature=0.0)
    eagle = EAGLEInference(draft_model=models[0], target_model=models[1], config=config, device=device)
    input_ids = torch.tensor([[1, 2, 3, 4]], device=device)
    output_ids, stats = eagle.generate(input_ids=input_ids, max_new_tokens=12)
    plain = eagle_kernels.EAGLEInference(*models).generate(input_ids, 12, speculative=False)
    assert output_ids.tolist() == [[1, 2, 3, 4, *plain.output_ids[0]]] and output_ids.dtype == torch.int64
    assert f"{stats['acceptance_rate']:.2%} {stats['speedup']:.2f}x"
    assert stats["total_tokens_generated"] == 12 and stats["speedup"] > 0
    assert stats["total_draft_tokens"] == stats["total_target_forward"] * 7  # the root is no draft
    assert stats["acceptance_rate"] == stats["total_accepted_tokens"] / (8 * stats["total_target_forward"])
    assert stats["speedup_ratio"] == stats["total_accepted_tokens"] / stats["total_target_forward"]
    assert eagle.generate(input_ids, 3, return_stats=False)[1] is None
    assert math.isnan(eagle.generate(input_ids, 1)[1]["speedup"])  # the prompt brings the only token


def test_batches_overrides_and_benchmark(models, device):
    eagle = EAGLEInference(*models, EAGLEConfig(topk=2, num_steps=2, num_draft_tokens=4, verbose=True))
    texts, _ = eagle.generate([[1, 2], [3]], 5)
    assert [len(text) for text in texts] == [7, 6] and texts[0][:2] == [1, 2] and texts[1][:1] == [3]
    single, _ = eagle.generate([1, 2], 5)
    assert single == texts[0]
    assert eagle.generate(torch.tensor([1, 2], device=device), 5)[0].tolist() == single
    assert eagle.generate([1, 2], 5, temperature=1.0, top_k=1)[0] == single
    stats = eagle.benchmark([[1, 2], torch.tensor([[3]])], max_new_tokens=4)
    assert stats["total_tokens_generated"] == 8 and stats["speedup"] > 0
    with pytest.raises(ValueError, match="test_data must hold at least one prompt"):
        eagle.benchmark([])


def test_what_the_engine_is_told_and_tells(models, monkeypatch):
    """Choices in the engine's words, those of a call in the place of the configuration's, and its counts by name."""
    mode = TreeMaskMode.QLEN_ONLY
    config = EAGLEConfig(3, 2, 5, temperature=0.7, top_p=0.9, top_k=7, tree_mask_mode=mode)
    told, plain = config.for_engine(), EAGLEConfig().for_engine()
    assert (told.topk, told.num_steps, told.num_draft_tokens, told.tree_mask_mode) == (3, 2, 5, "qlen_only")
    assert (told.temperature, told.top_p, told.top_k, told.eos_token_ids) == (0.7, 0.9, 7, ())
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.0, 1.0, 0)

    eagle, calls = EAGLEInference(models[1], models[1], config), []
    generate = eagle.engine.generate

    def noted(*given, **more):
        calls.append((given, more, generate(*given, **more)))
        return calls[-1][2]

    monkeypatch.setattr(eagle.engine, "generate", noted)
    prompts = [[1, 2], [3]]
    _, stats = eagle.generate(prompts, 9)
    eagle.generate(prompts, 3, 0.0, 0.5, 2)
    eagle.generate(prompts, 3, top_k=0)
    given = {"temperature": 0.0, "top_p": 0.5, "top_k": 2}
    assert [call[:2] for call in calls] == [((prompts, 9), {}), ((prompts, 3), given), ((prompts, 3), {"top_k": 0})]
    counts = calls[0][2][1]
    assert counts.steps > counts.batch_steps > 0 < counts.accepted
    rate = counts.accepted / (counts.steps * 5)
    assert stats == {
        "total_tokens_generated": 18, "total_draft_tokens": counts.steps * 4, "total_accepted_tokens": counts.accepted,
        "total_target_forward": counts.batch_steps, "total_draft_forward": counts.batch_steps * 2,
        "mean_acceptance_rate": rate, "acceptance_rate": rate, "speedup_ratio": counts.accepted / counts.batch_steps,
        "speedup": counts.speedup,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, "topk must lie in 1"),
        ({"num_draft_tokens": 99}, "num_draft_tokens must lie in 2"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"tree_mask_mode": 3}, "tree_mask_mode must be 0, 1 or 2, got 3"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        EAGLEConfig(**change)


def test_models_are_checked_not_moved(models):
    with pytest.raises(ValueError, match="dtype must be that of the models, torch.float32, got torch.float16"):
        EAGLEInference(*models, EAGLEConfig(dtype=torch.float16))
    with pytest.raises(ValueError, match="device must be where the models are"):
        EAGLEInference(*models, EAGLEConfig(device="meta"))
