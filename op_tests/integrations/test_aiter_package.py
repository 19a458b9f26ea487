"""The examples of AITER's speculative package, as its README has them, with our functions in its modules."""

import sys
from types import ModuleType

import pytest
import torch

import eagle_kernels.integrations.aiter as aiter
from op_tests.integrations.oracles import oracle_build, oracle_verify

MODULES = ("aiter.ops.speculative", "aiter.ops.triton._triton_kernels.eagle")

APPLICATION = """
from aiter.ops.speculative import EAGLEInference, EAGLEConfig
import torch

config = EAGLEConfig(
    topk=4,
    num_steps=3,
    num_draft_tokens=8,
    temperature=0.0,
)

eagle = EAGLEInference(
    draft_model=your_draft_model,
    target_model=your_target_model,
    config=config,
    device='cuda',
)

input_ids = torch.tensor([[1, 2, 3, 4]], device='cuda')
output_ids, stats = eagle.generate(
    input_ids=input_ids,
    max_new_tokens=100,
)

print(f"acceptance rate: {stats['acceptance_rate']:.2%}")
print(f"speedup: {stats['speedup']:.2f}x")
"""

PROTOTYPE = """
from aiter.ops.speculative import EAGLEInference, EAGLEConfig

config = EAGLEConfig(topk=4, num_steps=3)
eagle = EAGLEInference(draft_model, target_model, config)
output = eagle.generate(input_ids, max_new_tokens=100)
"""

RESEARCH = """
from aiter.ops.speculative import EAGLEInference, EAGLEConfig

for topk in [2, 4, 8]:
    config = EAGLEConfig(topk=topk, num_steps=3)
    eagle = EAGLEInference(draft_model, target_model, config)
    stats = eagle.benchmark(test_data)
    print(f"topk={topk}, acceptance_rate={stats['acceptance_rate']}")
"""

# where the README has "...", the names of what is returned
KERNELS = """
from aiter.ops.triton._triton_kernels.eagle import build_tree_efficient_triton, verify_tree_greedy_triton

tree_mask, positions, retrive_index, retrive_next_token, retrive_next_sibling, tokens = build_tree_efficient_triton(
    verified_id=verified_id,
    parent_list=parent_list,
    top_scores_index=top_scores_index,
    draft_tokens=draft_tokens,
    seq_lens=seq_lens,
    seq_lens_sum=seq_lens_sum,
    topk=4,
    spec_steps=3,
    num_verify_tokens=8,
)
candidates = tokens.view(len(seq_lens), 8)

predicts, accept_index, accept_length = verify_tree_greedy_triton(
    predicts=predicts,
    accept_index=accept_index,
    accept_token_num=accept_length,
    candidates=candidates,
    retrive_index=retrive_index,
    retrive_next_token=retrive_next_token,
    retrive_next_sibling=retrive_next_sibling,
    target_predict=target_predict,
)
"""

IMPORTS = """
from aiter.ops.triton._triton_kernels.eagle import build_tree_efficient_triton
from aiter.ops.triton._triton_kernels.eagle import (
    build_tree_kernel_triton, tree_speculative_sampling_kernel, verify_tree_greedy_kernel,
    build_tree_kernel_efficient, verify_tree_greedy_func,
)
from aiter.ops.speculative import (
    TreeMaskMode, build_tree_structure, calculate_acceptance_rate, compute_tree_statistics, fast_topk_torch,
    generate_token_bitmask, next_power_of_2, organize_draft_results, pad_to_alignment, sample_from_logits,
    select_top_k_tokens, verify_tree_greedy,
)
"""


@pytest.fixture
def run(monkeypatch, device):
    """Runs an example and returns its names; `cuda` in it is the device under test."""
    for name in ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton._triton_kernels"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, aiter)

    def run_example(example: str, **names):
        exec(compile(example.replace("'cuda'", repr(str(device))), "README", "exec"), names)
        return names

    return run_example


@pytest.fixture
def models(device):
    """A draft and a target, plain models of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "n_positions": 160, "n_embd": 32, "n_head": 2, "initializer_range": 0.2}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    made = []
    for num_layers in (1, 2):
        torch.manual_seed(num_layers)
        config = transformers.GPT2Config(**sizes, n_layer=num_layers)
        made.append(transformers.GPT2LMHeadModel(config).eval().to(device))
    return made


def test_the_application_runs_on_models_of_transformers(run, models, device, capsys):
    draft, target = models
    input_ids = torch.tensor([[1, 2, 3, 4]], device=device)
    greedy = {"do_sample": False, "max_new_tokens": 100, "attention_mask": torch.ones_like(input_ids)}
    want = target.generate(input_ids, **greedy)
    names = run(APPLICATION, your_draft_model=draft, your_target_model=target)
    assert names["output_ids"].tolist() == want.tolist() and len(set(want[0].tolist())) > 10
    assert names["stats"]["speedup"] > 0
    rate, speedup = capsys.readouterr().out.splitlines()
    assert rate == f"acceptance rate: {names['stats']['acceptance_rate']:.2%}"
    assert speedup == f"speedup: {names['stats']['speedup']:.2f}x" != "speedup: nanx"
    names = run(PROTOTYPE, draft_model=draft, target_model=target, input_ids=input_ids)
    assert names["output"][0].tolist() == want.tolist()
    assert target.generate(input_ids, **greedy).tolist() == want.tolist(), "the caller's model generates as before"


@pytest.mark.slow
def test_research_over_widths(run, models, capsys):
    draft, target = models
    run(RESEARCH, draft_model=draft, target_model=target, test_data=[[[1, 2, 3]], [[4, 5]]])
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()] == ["topk=2", "topk=4", "topk=8"]


def test_the_kernels(run, device):
    """A root with two children, of which the second has two; the target takes the second of the second."""
    as_tensor = lambda *rows: torch.tensor(rows, device=device)  # noqa: E731
    drafts = as_tensor([11, 12, 21, 22, 23, 31, 32]), as_tensor([-1, 0, 1, 2, 3, 4, 5, 6, 7])
    kept = as_tensor([0, 1, 8, 9, 10, 20, 21])
    integers = {"dtype": torch.int32, "device": device}
    outputs = torch.zeros(8, **integers), torch.full((1, 4), -1, **integers), torch.zeros(1, **integers)
    target = as_tensor([12, 7, 22, 7, 40, 7, 7, 7])
    names = run(
        KERNELS, verified_id=torch.tensor([5], device=device), parent_list=drafts[1], top_scores_index=kept,
        draft_tokens=drafts[0], seq_lens=torch.tensor([3], device=device), seq_lens_sum=3, predicts=outputs[0],
        accept_index=outputs[1], accept_length=outputs[2], target_predict=target,
    )  # fmt: skip
    _, positions, *links = oracle_build(drafts[1], kept, torch.tensor([3]), 4, 3, 8)
    assert names["positions"].tolist() == positions
    assert [names["retrive_next_token"].tolist(), names["retrive_next_sibling"].tolist()] == links
    predicts, path = [0] * 8, [[-1] * 4]
    index = names["retrive_index"].tolist()
    counts = oracle_verify(predicts, path, names["candidates"].tolist(), index, *links, target.tolist())
    assert [names["predicts"].tolist(), names["accept_index"].tolist()] == [predicts, path]
    assert names["accept_length"].tolist() == counts == [2]
    assert all(names[name] is given for name, given in zip(("predicts", "accept_index", "accept_length"), outputs))


def test_every_name_of_the_package_is_there(run):
    names = run(IMPORTS)
    assert names["build_tree_kernel_efficient"] is names["build_tree_efficient_triton"]


def test_kernels_are_launched_with_a_grid(run, device):
    """They write what the functions around them return; a walk by coins ends at the first refusal. No two numbers are
    the same, so that none can stand for another."""
    names, as_tensor = run(IMPORTS), lambda *rows: torch.tensor(rows, device=device)
    drafts = as_tensor([-1, 0, 1, 2]), as_tensor([0, 1, 3]), torch.tensor([9], device=device)  # parents, kept, lengths
    mask, positions, *links, candidates = aiter.build_tree_efficient_triton(
        torch.tensor([5], device=device), *drafts[:2], as_tensor([11, 12, 21]), drafts[2], 9, 3, 2, 4
    )
    assert positions.tolist() == [9, 10, 10, 11] and links[1].tolist() == [[1, 3, -1, -1]]
    written = [torch.ones_like(mask), torch.zeros_like(positions), *map(torch.zeros_like, links)]
    names["build_tree_kernel_triton"][(1,)](*drafts, *written, 3, 2, 4, 8, 0)
    assert all(map(torch.equal, written, (mask, positions, *links)))
    candidates, target = candidates.view(1, 4), as_tensor([11, 21, 7, 8])

    def outputs():
        integers = {"dtype": torch.int32, "device": device}
        return torch.zeros(4, **integers), torch.full((1, 3), -1, **integers), torch.zeros(1, **integers)

    by_kernel = outputs()
    names["verify_tree_greedy_kernel"][(1,)](*by_kernel, candidates, *links, target, 3, 4)
    for one, other in zip(by_kernel, names["verify_tree_greedy_func"](*outputs(), candidates, *links, target)):
        assert torch.equal(one, other)
    probs, coins = torch.full((1, 4, 30), 1e-9, device=device), torch.full((1, 4), 0.5, device=device)
    for node, token in enumerate((11, 9, 7, 8)):  # nothing below the first draft is likely
        probs[0, node, token] = 1.0
    drawn, thresholds = outputs(), (1.0, 1.0)
    sampled = (*drawn, candidates, *links, coins, coins[:, 0], probs, None, *thresholds)
    names["tree_speculative_sampling_kernel"][(1,)](*sampled, 30, 3, 4)
    assert drawn[0].tolist()[:2] == [11, 9] and drawn[1].tolist() == [[0, 1, -1]] and drawn[2].tolist() == [1]
    for sizes, message in (
        ((31, 3, 4), "vocab_size must be the width of target_probs, 30, got 31"),
        ((30, 2, 4), "num_speculative_tokens must be the width of accept_index, 3, got 2"),
        ((30, 3, 5), "num_draft_tokens must be the width of candidates, 4, got 5"),
    ):
        with pytest.raises(ValueError, match=f"tree_speculative_sampling_kernel: {message}"):
            names["tree_speculative_sampling_kernel"](*sampled, *sizes)
