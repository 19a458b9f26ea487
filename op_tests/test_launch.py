"""Planned launches: a call that looks like an earlier one skips the checks, and only such a call does."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import eagle_kernels
from eagle_kernels.runtime import launch as launch_module
from eagle_kernels.runtime import recorded
from op_tests.harness import assert_equal
from op_tests.harness.ahead_of_time import module_of_tests
from op_tests.harness.trees import LINKS
from op_tests.ops.tree.cases import make_tree

# of the launcher that `pretend` makes
IN_PLACE = {"out": ("x",)}


@pytest.fixture
def plans(monkeypatch):
    """Counts calls that were planned anew and calls that ran a plan, of a build_tree that has no plans yet."""
    seen = {"recorded": 0, "replayed": 0}

    def count(owner, name, key):
        original = getattr(owner, name)

        def counting(*args):
            seen[key] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counting)

    count(launch_module, "_record", "recorded")
    count(launch_module._Plan, "run", "replayed")
    fresh = launch_module.launcher(eagle_kernels.raw.build_tree.__wrapped__)
    monkeypatch.setattr(eagle_kernels.raw, "build_tree", fresh)
    return seen


def build(values, out=None):
    result = eagle_kernels.raw.build_tree(**values, out=out)
    reference = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    expected = eagle_kernels.reference.ops.tree.build_tree.build_tree(**reference)
    for name, tensor in expected._asdict().items():
        assert_equal("build_tree", "planned", name, getattr(result, name), tensor)
    return result


@pytest.mark.gpu
def test_a_call_that_looks_the_same_is_replayed(plans, device):
    first, second = (make_tree(5, 4, 3, 12, device=device) for _ in range(2))
    out = build(first)
    build(second)
    assert plans == {"recorded": 1, "replayed": 1}
    again = build(second, out=out)
    build(first, out=out)
    assert plans == {"recorded": 2, "replayed": 2}
    assert type(again) is type(out) and all(ours is theirs for ours, theirs in zip(build(first, out=out), out))


@pytest.mark.gpu
@pytest.mark.parametrize("change", [
    lambda v: v | {"seq_lens": v["seq_lens"].int()},
    lambda v: v | make_tree(6, 4, 3, 12, device="cuda"),
    lambda v: v | {"tree_mask_mode": "qlen_only"},
    lambda v: v | {"seq_lens": torch.cat([v["seq_lens"][:1], v["seq_lens"]])[1:]},  # 8 bytes past an aligned address
], ids=["dtype", "size", "mode", "alignment"])  # fmt: skip
def test_a_call_that_looks_different_is_planned_anew(change, plans, device):
    values = make_tree(5, 4, 3, 12, device=device)
    build(values)
    before = plans["recorded"]
    build(change(values))
    assert plans["recorded"] == before + 1
    build(values)
    build(change(values))
    assert plans["recorded"] == before + 1


@pytest.mark.gpu
def test_strides_are_looked_at(device):
    """The same tensors in another layout: a row stride that the plan does not know."""
    scores = torch.randn(3, 40, device=device)
    tokens = torch.randint(97, (3, 40), device=device)
    ours, theirs = eagle_kernels.raw.organize_draft_results, eagle_kernels.reference.ops.tree.organize_draft_results
    for stride in (40, 48, 40, 56):
        wide = torch.zeros(3, stride, device=device)
        wide[:, :40] = scores
        result = ours(wide[:, :40], tokens, num_verify_tokens=8)
        expected = theirs.organize_draft_results(scores, tokens, num_verify_tokens=8)
        assert_equal("organize_draft_results", f"stride {stride}", "index", result[0], expected[0])


@pytest.mark.gpu
def test_sizes_changed_in_place_are_seen(plans, device):
    values = make_tree(5, 4, 3, 12, device=device)
    for _ in range(3):
        build(values)
    values["seq_lens"].resize_(4)
    with pytest.raises(ValueError, match="seq_lens must have B = 5"):
        eagle_kernels.raw.build_tree(**values)
    assert plans["replayed"] == 2


@pytest.mark.gpu
def test_bad_input_is_named_after_a_plan(plans, device):
    values = make_tree(5, 4, 3, 12, device=device)
    for change, message in (
        ({"seq_lens": values["seq_lens"].cpu()}, "seq_lens must be on cuda:0 like verified_id, got cpu"),
        ({"seq_lens": values["seq_lens"].float()}, "seq_lens must have dtype"),
        ({"topk": True}, "topk must be an int, got bool"),
        ({"topk": torch.tensor([4, 4])}, "topk must be an int, got Tensor"),
        ({"verified_id": [1, 2, 3, 4, 5]}, "verified_id must be a tensor, got list"),
    ):
        for _ in range(3):
            build(values)
        with pytest.raises((ValueError, TypeError), match=message):
            eagle_kernels.raw.build_tree(**values | change)
    assert plans["replayed"] >= 14


@pytest.mark.gpu
def test_the_public_function_and_inference_mode_are_replayed_too(plans, device):
    links = make_tree(5, 4, 3, 12, device=device)
    tree = eagle_kernels.raw.build_tree(**links)
    nodes = (tree.draft_tokens.view(5, 12), tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling)
    values = dict(zip(LINKS, nodes))
    values |= {"target_predict": torch.randint(97, (5, 12), device=device), "spec_steps": 3}
    out = eagle_kernels.verify_tree_greedy(**values)
    eagle_kernels.verify_tree_greedy(**values, out=out)
    before = dict(plans)
    for _ in range(3):
        eagle_kernels.verify_tree_greedy(**values, out=out)
    with torch.inference_mode():
        for _ in range(3):
            eagle_kernels.verify_tree_greedy(**values, out=out)
    assert plans == {"recorded": before["recorded"], "replayed": before["replayed"] + 6}


@pytest.mark.gpu
def test_one_tensor_in_two_places_is_not_taken_for_one_argument(device):
    values = make_tree(5, 4, 3, 12, device=device)
    shared = values | {"verified_id": values["seq_lens"]}
    for given in (shared, values, shared):
        build(given)


@pytest.mark.gpu
def test_allocated_scratch_is_fresh_in_every_call(device):
    """Two results of an op with workspaces must not share memory."""
    _, values = next(iter(module_of_tests("sampling.verify_tree_sampled").ahead_of_time_cases()))
    values = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    results = [eagle_kernels.raw.verify_tree_sampled(**values) for _ in range(3)]
    assert len({result.predicts.data_ptr() for result in results}) == 3
    assert torch.equal(results[0].predicts, results[2].predicts)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "stand_in", "recorded", "replayed"),
    [("_knows_triton", lambda: False, 1, 2), ("_guards", lambda tensors: None, 1, 2)],
    ids=["an unknown triton", "no guards of torch"],
)
def test_what_may_be_missing(name, stand_in, recorded, replayed, plans, monkeypatch, device):
    """Plans are run all the same: an unknown triton launches by itself."""
    monkeypatch.setattr(launch_module, name, stand_in)
    values = make_tree(5, 4, 3, 13, device=device)
    for _ in range(3):
        build(values)
    assert plans == {"recorded": recorded, "replayed": replayed}


@pytest.mark.gpu
def test_a_profiler_that_hooks_into_launches_sees_them(plans, device):
    import triton

    seen = []
    hook = seen.append
    values = make_tree(5, 4, 3, 12, device=device)
    build(values)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        build(values)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(seen) == 1


@pytest.mark.gpu
def test_another_stream(device):
    """The launch waits for what its own stream does, and the default stream does not wait for it."""
    values = make_tree(5, 4, 3, 12, device=device)
    out = eagle_kernels.raw.build_tree(**values, out=build(values))
    for tensor in out:
        tensor.zero_()
    assert not out.retrieve_index.any().item()  # also loads this kernel, which would wait for all streams
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        eagle_kernels.raw.build_tree(**values, out=out)
    torch.cuda.current_stream().synchronize()
    before = out.retrieve_index.any().item()
    assert not stream.query() and not before
    stream.synchronize()
    assert out.retrieve_index.any()


@pytest.mark.gpu
def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (0, 1, 0, 1):
        result = build(make_tree(5, 4, 3, 12, device=f"cuda:{index}"))
        assert result.positions.device.index == index and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device):
    values = make_tree(5, 4, 3, 12, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            eagle_kernels.raw.build_tree(**values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_only_addresses_that_follow_from_the_arguments_are_planned():
    argument, other = torch.zeros(4, 8), torch.zeros(8)
    known = recorded.Tensors([argument, other], [argument.data_ptr(), other.data_ptr()])
    assert known.index(other) == 1 and known.index(argument.view(torch.uint8)) == 0
    scratch = torch.empty(3)
    assert known.index(scratch) == 2 == known.index(scratch) and len(known.allocated) == 1
    for view in (argument[1], torch.empty(8)[2:], torch.empty(4, 4).t()):
        with pytest.raises(LookupError):
            known.index(view)


class Named(torch.Tensor):
    """A subclass, which may mean anything."""


def test_calls_that_differ_have_plans_of_their_own(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    tensor = torch.zeros(2)
    calls = [((tensor,), {"topk": 1}), ((tensor,), {"topk": True}), ((tensor,), {"topk": 1.0}),
             ((tensor, None), {"topk": 1}), ((None, tensor), {"topk": 1}), ((), {"x": tensor, "topk": 1}),
             ((tensor,), {"topk": 1, "out": tensor}), ((tensor,), {"topk": 1, "out": (tensor,)})]  # fmt: skip
    plain = [launch_module._split(*call)[0] for call in calls]
    assert all(one != other for index, one in enumerate(plain) for other in plain[:index])
    weight = torch.nn.Parameter(tensor)  # of a module: looks different, and is planned
    assert launch_module._split((weight,), {})[0] not in (None, launch_module._split((tensor,), {})[0])
    assert launch_module._split((tensor.as_subclass(Named),), {})[0] is None
    assert launch_module._split(([1],), {})[0] is None


@pytest.fixture
def pretend(monkeypatch):
    """A launcher of CPU tensors whose kernel notes its arguments: (launcher, notes, streams, the last one current).
    Planning without a GPU."""
    notes, streams = [], ["stream"]

    def scale(x, *, factor, workspace=None, out=None):
        if type(factor) is not int:
            raise TypeError(f"factor must be an int, got {type(factor).__name__}")
        scratch = torch.empty(3, dtype=torch.int32)
        out = torch.empty(4) if out is None else out
        run = lambda *args: notes.append(args)  # noqa: E731
        compiled = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
        arguments = {"x": x, "workspace": workspace, "scratch": scratch, "factor": factor, "out": out}
        kernel, arguments = SimpleNamespace(arg_names=[*arguments]), arguments | {"num_warps": 4}
        if launch_module._recording.launches is not None:
            launch_module._recording.launches.append(recorded.Recorded(kernel, compiled, (7, 2), arguments))
        notes.append("public")
        return out

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: streams[-1]))
    triton = SimpleNamespace(runtime=SimpleNamespace(driver=driver))
    monkeypatch.setattr(launch_module, "language", SimpleNamespace(triton=triton))
    monkeypatch.setattr(launch_module, "_can_plan", lambda: True)
    monkeypatch.setattr(launch_module, "_knows_triton", lambda: True)
    monkeypatch.setattr(launch_module, "_current_device", lambda: 0)
    monkeypatch.setattr(launch_module, "_empty", lambda *spec: torch.empty_strided(*spec[:2], dtype=spec[2]))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    return launch_module.launcher(scale), notes, streams


def test_a_replay_hands_over_what_the_launcher_would(pretend):
    scale, notes, streams = pretend
    first, second, out = torch.zeros(4), torch.ones(4), torch.zeros(4)
    scale(first, factor=2, out=out)
    for x in (second, first):
        assert scale(x, factor=2, out=out) is out
        head, (pointer, workspace, scratch, factor, out_pointer) = notes[-1][:9], notes[-1][9:]
        assert head == (7, 2, 1, "stream", "function", "metadata", None, None, None)
        assert (pointer, workspace, factor, out_pointer) == (x.data_ptr(), None, 2, out.data_ptr())
        assert scratch not in (0, first.data_ptr(), second.data_ptr(), out.data_ptr())
    assert notes.count("public") == 1
    fresh = [scale(first, factor=2) for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in fresh}) == 3 and notes[-1][-1] == fresh[-1].data_ptr()
    assert notes.count("public") == 2


@pytest.mark.parametrize("path", [
    "attention.gqa_decode", "kv.kv_indices", "kv.move_accepted_kv", "nn.rms_norm", "sampling.sample_from_logits",
    "tree.build_tree", "verify.verify_commit",
])  # fmt: skip
def test_an_unknown_triton_is_handed_tensors(path, device, monkeypatch):
    """With bundles, constants and workspaces, as the launcher hands them over; views with another dtype are left to it,
    which `move_accepted_kv` has."""
    monkeypatch.setattr(launch_module, "_knows_triton", lambda: False)
    if device.type == "cpu":
        monkeypatch.setattr(launch_module, "_current_device", lambda: 0)
        monkeypatch.setattr(launch_module, "_empty", lambda *spec: torch.empty_strided(*spec[:2], dtype=spec[2]))
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    name, ran, run = path.partition(".")[2], [], launch_module._Plan.run
    monkeypatch.setattr(launch_module._Plan, "run", lambda self, *call: ran.append(self) or run(self, *call))
    call = launch_module.launcher(getattr(eagle_kernels.raw, name).__wrapped__)
    _, values = next(iter(module_of_tests(path).ahead_of_time_cases()))
    seen = []
    for _ in range(3):
        given = {key: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
                 for key, value in values.items()}  # fmt: skip
        result = call(**given)
        result = result if isinstance(result, tuple) else () if result is None else (result,)
        seen.append([*result, *(value for value in given.values() if isinstance(value, torch.Tensor))])
    assert len(ran) == (0 if name == "move_accepted_kv" else 2)
    for again in seen[1:]:
        for ours, theirs in zip(seen[0], again):
            assert_equal(name, "planned", "a result", ours, theirs)


def test_again_is_for_calls_like_the_one_before(pretend):
    scale, notes, _ = pretend
    x = torch.zeros(4)
    call = ((x,), {"factor": 2})
    assert scale.again(*call) == ()  # there is none
    for _ in range(2):
        scale(x, factor=2)
    result = scale.again(*call)
    assert len(result) == 1 and notes[-1][-1] == result[0].data_ptr() and notes.count("public") == 1
    for other in (((x,), {"factor": 3}), ((x[:3],), {"factor": 2}), ((x.as_subclass(Named),), {"factor": 2}), ((), {})):
        assert scale.again(*other) == ()


def test_calls_in_turn_are_looked_at_once_each(pretend, monkeypatch):
    """As those of a step are, of several sizes; what has not been met for a while is looked for among all plans."""
    scale, notes, _ = pretend
    split, looked = launch_module._split, []
    monkeypatch.setattr(launch_module, "_split", lambda *call: looked.append(1) or split(*call))
    x, most = torch.zeros(9), launch_module._MAX_RECENT
    for _ in range(4):
        for size in range(1, most + 1):
            scale(x[:size], factor=2)
            assert notes[-1] == "public" or notes[-1][9] == x.data_ptr()
    assert len(looked) == 2 * most and notes.count("public") == most  # to record a plan, and to find it
    for size in (most + 1, most + 1, 1, 1):  # the first one was met before all others
        scale(x[:size], factor=2)
    assert len(looked) == 2 * most + 3 and notes.count("public") == most + 1


def test_again_does_not_pass_by_autograd(pretend):
    scale, _, _ = pretend
    x = torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            scale(x, factor=2)
        assert scale.again((x,), {"factor": 2})
        assert scale.again((x.detach(),), {"factor": 2}) == ()
    assert scale.again((x,), {"factor": 2}) == ()


def test_the_same_addresses_in_another_stream(pretend, monkeypatch):
    scale, notes, streams = pretend
    x, out, scratch = torch.zeros(4), torch.zeros(4), torch.zeros(3, dtype=torch.int32)
    monkeypatch.setattr(launch_module, "_empty", lambda *spec: scratch)
    for stream in ("stream", "stream", "stream", "another", "stream"):
        streams.append(stream)
        scale(x, factor=2, out=out)
        assert notes[-1] == "public" or (notes[-1][3], notes[-1][-1]) == (stream, out.data_ptr())
    assert notes.count("public") == 1


def test_whatever_differs_goes_to_the_launcher(pretend):
    scale, notes, _ = pretend
    x = torch.zeros(8)
    for _ in range(3):
        scale(x[:4], factor=2)
    for other in (x[:3], x[::2], x[1:5], x[:4].int(), x[:4].view(2, 2)):
        before = notes.count("public")
        scale(other, factor=2)
        assert notes.count("public") == before + 1
    before = notes.count("public")
    scale(x[:4], factor=3)
    scale(x[:4], factor=2, workspace=x)
    assert notes.count("public") == before + 2
    for factor in (True, 2.0, "2", torch.tensor([2, 2]), None):
        with pytest.raises(TypeError, match="factor must be an int, got"):
            scale(x[:4], factor=factor)


def test_what_cannot_be_planned_is_tried_once(pretend, monkeypatch):
    scale, notes, _ = pretend
    x, tried = torch.zeros(4), []
    record, unknown = launch_module._record, Mock(side_effect=LookupError)
    monkeypatch.setattr(launch_module, "_record", lambda *args: tried.append(1) or record(*args))
    monkeypatch.setattr(recorded.Tensors, "index", unknown)
    launch_module._recording.launches = None
    for _ in range(3):
        assert scale(x, factor=2, out=torch.zeros(4)) is not x
    assert len(tried) == 1 and notes == ["public"] * 3


def test_one_tensor_in_two_places_is_looked_at_as_cheaply_as_others(pretend, monkeypatch):
    scale, _, _ = pretend
    split, looked = launch_module._split, []
    monkeypatch.setattr(launch_module, "_split", lambda *call: looked.append(1) or split(*call))
    x, y = torch.zeros(4), torch.zeros(4)
    for tensor in (x, x, y, y, x):
        scale(tensor, factor=2, out=tensor)
    assert len(looked) == 2  # to record the plan, and to find it
    scale(x, factor=2, out=x.view(4))  # the same address is not the same tensor
    assert len(looked) == 3


def test_buffers_that_overlap_are_looked_at_in_calls_without_a_plan(pretend):
    """The first one of each kind, and those that name one tensor twice; a plan asks for kinds alone."""
    scale, notes, _ = pretend
    memory, x = torch.zeros(8), torch.zeros(4)
    refused = lambda text: pytest.raises(ValueError, match=f"^eagle_kernels.scale: out must {text}, got an offset of")  # noqa: E731
    for _ in range(2):  # nothing was recorded
        with refused("be x itself or not overlap it"):
            scale(memory[:4], factor=2, out=memory[2:6])
    scale(x, factor=2, out=torch.zeros(4))
    with refused("not overlap workspace"):
        scale(x, factor=2, workspace=memory, out=memory)
    assert notes.count("public") == 1


def test_one_tensor_in_two_places_has_a_plan_of_its_own(pretend):
    """In place and not, in any order: what is one tensor in one call may be two in the next."""
    scale, notes, _ = pretend
    x, y = torch.zeros(4), torch.zeros(4)
    for source, out in ((x, x), (x, y), (y, y), (y, x), (x, x), (y, x), (x, x), (y, y)):
        assert scale(source, factor=2, out=out) is out
        if notes[-1] != "public":
            assert (notes[-1][9], notes[-1][-1]) == (source.data_ptr(), out.data_ptr())
    assert notes.count("public") == 2
