"""The public functions: one-line errors, no derivatives, torch.compile, and how many variants a server compiles."""

import sys
import warnings

import numpy
import pytest
import torch

import eagle_kernels
from eagle_kernels.runtime import library
from op_tests.ops.tree.cases import make_tree
from op_tests.ops.verify.cases import make_logits

from .harness.ahead_of_time import PATHS, count_variants, module_of_tests


def test_a_missing_argument_is_named():
    values = make_tree(2, 4, 3, 8)
    del values["topk"]
    with pytest.raises(TypeError, match="^eagle_kernels.build_tree: missing a required .*'topk'$"):
        eagle_kernels.build_tree(**values)


def test_what_is_given_by_position_is_told():
    values, sizes = make_tree(2, 4, 3, 8), ("topk", "spec_steps", "num_verify_tokens")
    given = [values[name] for name in ("verified_id", "parent_list", "top_scores_index", "draft_tokens", "seq_lens")]
    rule = "too many positional arguments, of which verified_id, .*, seq_lens_sum may be; give the others by name"
    with pytest.raises(TypeError, match=f"^eagle_kernels.build_tree: {rule}$"):
        eagle_kernels.build_tree(*given, None, *(values[name] for name in sizes))


@pytest.mark.parametrize("module", [eagle_kernels, eagle_kernels.raw])
def test_numbers_of_numpy_are_told_from_those_of_python(module):
    values = make_tree(2, 4, 3, 8)
    with pytest.raises(TypeError, match=r"^eagle_kernels.build_tree: topk must be an int, got numpy\.int64$"):
        module.build_tree(**{**values, "topk": numpy.int64(values["topk"])})
    with pytest.raises(TypeError, match="seq_lens must be a tensor, got numpy.ndarray$"):
        module.build_tree(**{**values, "seq_lens": values["seq_lens"].numpy()})


def test_debug_mode_checks_the_length_sum(monkeypatch):
    values = make_tree(2, 4, 3, 8, mode="full_mask")
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    eagle_kernels.build_tree(**values)
    with pytest.raises(ValueError, match="seq_lens_sum must be .*, the sum of seq_lens, got 1000"):
        eagle_kernels.build_tree(**{**values, "seq_lens_sum": 1000})


def test_debug_mode_leaves_tracing_alone(monkeypatch):
    """While torch.compile traces there are no values to check; the compiled call checks the real ones."""
    values = make_logits(3, 20, temperature=1.0)
    monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    compiled = torch.compile(eagle_kernels.sample_from_logits, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**values), eagle_kernels.sample_from_logits(**values))


def test_compiles_into_one_graph_with_a_dynamic_batch(device):
    def build_and_verify(values, logits):
        tree = eagle_kernels.build_tree(**values)
        links = (tree.draft_tokens.view_as(tree.retrieve_index), tree.retrieve_index)
        links += (tree.retrieve_next_token, tree.retrieve_next_sibling)
        return tree.positions, eagle_kernels.verify_tree(*links, logits, spec_steps=3).predicts

    compiled = torch.compile(build_and_verify, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch_size in (2, 3, 5):
        values = make_tree(batch_size, 4, 3, 8, device=device)
        logits = torch.randn(batch_size * 8, 97, device=device)
        for got, want in zip(compiled(values, logits), build_and_verify(values, logits)):
            assert torch.equal(got, want)


def test_a_compiled_function_may_use_an_op_first(monkeypatch):
    """Also where the name has not been asked for before, as in a program that begins with torch.compile."""
    ops, node, logits = eagle_kernels.ops, torch.zeros(1, 1, dtype=torch.int64), torch.randn(1, 8)

    def verify(logits):
        return eagle_kernels.verify_tree(node, node, node - 1, node - 1, logits, spec_steps=0).predicts

    expected = verify(logits)
    for names in (vars(eagle_kernels), vars(ops)):
        monkeypatch.delitem(names, "verify_tree", raising=False)
    monkeypatch.setattr(ops.operators, "made", {})
    monkeypatch.setattr(ops, "front_door", None, raising=False)
    monkeypatch.delitem(sys.modules, "eagle_kernels.ops.front_door")
    assert torch.equal(torch.compile(verify, fullgraph=True, backend="aot_eager")(logits), expected)
    assert {*ops.operators.made} == {"verify_tree_greedy", "verify_tree_sampled"}


def test_seeds_may_be_int32(device):
    values = make_logits(4, 30, device=device, temperature=1.0)
    values["seeds"] = torch.tensor([-3, 5, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    want = eagle_kernels.raw.sample_from_logits(**{**values, "seeds": values["seeds"].long()})
    assert torch.equal(eagle_kernels.raw.sample_from_logits(**values), want)


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, 9e-6])
def test_tiny_temperatures_are_greedy(temperature, device):
    values = make_logits(4, 30, device=device, temperature=temperature)
    want = values["logits"].argmax(-1)
    for function in (eagle_kernels.raw.sample_from_logits, eagle_kernels.sample_from_logits):
        assert torch.equal(function(**values), want)


def test_a_nan_filter_is_off_in_kernel_and_reference(device):
    nan = float("nan")
    values = make_logits(4, 30, device=device, temperature=1.0, min_p=nan)
    plain = eagle_kernels.raw.sample_from_logits(**{**values, "min_p": None})
    for function in (eagle_kernels.raw.sample_from_logits, eagle_kernels.sample_from_logits):
        assert torch.equal(function(**values), plain)


@pytest.mark.parametrize("path", PATHS)
def test_batch_and_lengths_compile_at_most_two_variants(path):
    """A server sees every batch size and length; each must not cost a compilation. An op that needs more says why."""
    module = module_of_tests(path)
    assert callable(getattr(module, "size_sweep", None)), f"{module.__name__} declares no size_sweep()"
    variants = count_variants(path)
    most = getattr(module, "MOST_VARIANTS", {})
    assert variants and all(count <= most.get(kernel, 2) for kernel, count in variants.items()), variants


def straight_calls(monkeypatch) -> list[str]:
    """Names of the ops whose public functions called their launchers without the dispatcher, from now on."""
    made, goes = [], library._goes_straight

    def noting(args, kwargs, buffers):
        made.append(goes(args, kwargs, buffers))
        return made[-1]

    monkeypatch.setattr(library, "_goes_straight", noting)
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "triton")
    return made


def test_calls_that_nobody_watches_go_straight_to_the_launcher(monkeypatch, device):
    """With the results of the dispatcher's way, to which a mode, a profiler, a transform or a subclass sends a call."""
    made = straight_calls(monkeypatch)
    x, weight = torch.randn(2, 8, device=device), torch.nn.Parameter(torch.rand(8, device=device))
    with torch.no_grad():
        expected = eagle_kernels.rms_norm(x, weight)
        out = type(expected)(torch.empty_like(x), x.new_empty(0, 8))
        assert eagle_kernels.rms_norm(x=x, weight=weight, out=out) is out
        assert made == [True, True] and torch.equal(out.output, expected.output)

        class Mode(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {}))

        class Named(torch.Tensor):
            pass

        with Mode():
            assert torch.equal(eagle_kernels.rms_norm(x, weight).output, expected.output)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert torch.equal(eagle_kernels.rms_norm(x, weight).output, expected.output)
        assert any(event.name == "eagle_kernels::rms_norm" for event in profile.events())
        assert torch.equal(eagle_kernels.rms_norm(x.as_subclass(Named), weight).output, expected.output)
        assert eagle_kernels.rms_norm(x.to("meta"), weight.to("meta")).output.is_meta
        assert eagle_kernels.rms_norm(x, weight, out=(out.output, out.residual)).output is out.output
        assert made[2:] == [False] * 4  # a plain tuple does not even ask
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(lambda x: eagle_kernels.rms_norm(x, x[0]).output, (x,), check_trace=False)
        assert "eagle_kernels::rms_norm" in str(traced.graph)
    with pytest.raises(RuntimeError, match="rms_norm: weight must not require grad"):
        eagle_kernels.rms_norm(x, weight)
    with pytest.raises(TypeError, match=r"^eagle_kernels.rms_norm: missing a required argument: 'weight'"):
        eagle_kernels.rms_norm(x)
    with pytest.raises(ValueError, match=r"^eagle_kernels.rms_norm: weight must have H = 8 in axis 0 "):
        eagle_kernels.rms_norm(x, x[0, :4])
