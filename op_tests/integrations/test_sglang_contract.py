"""What the plug-in relies on in SGLang is held against the sources of released versions, which are never imported.

So are the stand-ins of the other tests: of what they compute in SGLang's place, SGLang's own functions run alone.

Plain runs skip this. EAGLE_KERNELS_SGLANG_WHEELS is a folder of wheels, or `download`, which reads single files of
those on the package index:

    EAGLE_KERNELS_SGLANG_WHEELS=download python -m pytest op_tests/integrations/test_sglang_contract.py
"""

from __future__ import annotations  # also of what is compiled here

import ast
import builtins
import dataclasses
import enum
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from eagle_kernels.integrations.sglang import contract, hooks, prompts
from eagle_kernels.integrations.shared.contract import rules
from eagle_kernels.integrations.shared.sources import Sources
from op_tests.integrations import sglang_readers as readers
from op_tests.integrations import sglang_server as server
from op_tests.integrations import sglang_stub as stub
from op_tests.integrations.releases import releases_of

released = releases_of("SGLang", "sglang")
PAIRS = list(rules((*hooks.GUARDS, *hooks.HOOKS), contract.CONTRACT))
RULES = dict(PAIRS)


@pytest.fixture(scope="module", params=hooks.TESTED)
def sources(request) -> Sources:
    return released(request.param)


def test_no_two_rules_have_one_name():
    assert len(RULES) == len(PAIRS)


@pytest.mark.parametrize("name", RULES)
def test_it_holds(sources, name):
    assert RULES[name](sources) is None


def define(sources: Sources, module: str, *names: str, **given) -> SimpleNamespace:
    """Runs the definitions of these names; what else they use is given, or stood in for."""
    nodes = [node for name in names if (node := sources.find(f"sglang.srt.{module}.{name}")) is not None]
    used = {node.id for node in ast.walk(ast.Module(nodes, [])) if isinstance(node, ast.Name)}
    scope = {name: MagicMock() for name in used if not hasattr(builtins, name)}
    scope |= {"torch": torch, "dataclasses": dataclasses, "is_pin_memory_available": lambda *_: False} | given
    exec(compile(ast.Module(nodes, []), module, "exec"), scope)  # with the future of this file: annotations are not run
    return SimpleNamespace(**{node.name: scope[node.name] for node in nodes})


def test_filters_of_the_small_server(sources, monkeypatch):
    made = define(sources, "layers.sampler", "top_k_top_p_min_p_sampling_from_probs_torch")
    requests = [server.mixed(number) for number in range(60)]
    params = [each.sampling_params for each in requests]
    logits, seen = torch.randn(60, server.VOCAB, dtype=torch.float64), []
    monkeypatch.setattr(torch, "multinomial", lambda probs, num_samples: seen.append(probs) or probs[:, :1].long())
    wanted = torch.stack([server.kept(row, each) for row, each in zip(logits, params)])
    probs = torch.stack([row / each.temperature for row, each in zip(logits, params)]).softmax(-1)
    lists = [torch.tensor([getattr(each, name) for each in params]) for name in ("top_k", "top_p", "min_p")]
    made.top_k_top_p_min_p_sampling_from_probs_torch(probs.clone(), *lists, True, None, None)
    kept = torch.zeros_like(probs).scatter(1, probs.argsort(-1, descending=True), seen[0])
    torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), wanted.softmax(-1), atol=1e-7, rtol=1e-6)


def test_ends_of_the_small_server(sources):
    made = define(sources, "managers.schedule_batch", "Req._check_token_based_finish")
    for number in range(6):
        each = server.mixed(number, ignore_eos=False, stop_token_ids={11, 12} if number % 2 else None)
        each.eos_token_ids, each.tokenizer.additional_stop_token_ids = ({13}, None) if number % 3 else (None, {14})
        if number == 5:
            each.tokenizer = None
        ends = {token for token in range(server.VOCAB) if made._check_token_based_finish(each, [token])}
        assert ends == server.ends_of(each)


def test_batches_of_the_small_server(sources, monkeypatch):
    """Their fields, when they are made, merged, filtered and copied."""
    names = ("_rows_to_device_indices", "ProcessorEntry", "merge_bias_tensor", "SamplingBatchInfo")
    theirs = define(sources, "sampling.sampling_batch_info", *names, TOP_K_ALL=server.TOP_K_ALL).SamplingBatchInfo
    fields = [field.name for field in dataclasses.fields(server.Info)]
    assert set(fields) <= {field.name for field in dataclasses.fields(theirs)}

    def run(cls, penalisers):
        made = []
        for numbers in ((0, 1, 2), (3, 4), (5,)):
            requests = [server.mixed(number) for number in numbers]
            for each in requests:
                each.custom_logit_processor, each.return_sampling_mask = None, False
                each.sampling_logprobs_mode, each.sampling_params.custom_params = "full", None
            made.append(cls.from_schedule_batch(SimpleNamespace(reqs=requests, device="cpu"), server.VOCAB))
            made[-1].penalizer_orchestrator = penalisers
        first, second, third = made
        first.merge_batch(second)
        first.filter_batch([4, 0, 2], torch.tensor([4, 0, 2]))
        third.merge_batch(first)
        return *made, third.copy_for_forward()

    nothing = SimpleNamespace(is_required=False, filter=lambda kept: None, merge=lambda other: None)
    with stub.installed({"sglang.srt.managers.schedule_batch": {"ScheduleBatch": server.ScheduleBatch}}):
        pairs = list(zip(run(server.Info, nothing), run(theirs, nothing), strict=True))
    for ours, original in pairs:
        for name in set(fields) - {"return_sampling_masks"}:
            mine, other = getattr(ours, name), getattr(original, name)
            same = torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
            assert same, name


@pytest.mark.parametrize("names", server.ADJUSTED, ids=" ".join)
def test_adjustments_of_the_small_server(sources, names):
    scaled = define(sources, "sampling.penaltylib.repetition_penalty", "apply_scaling_penalties")
    info = define(sources, "sampling.sampling_batch_info", "SamplingBatchInfo", **vars(scaled)).SamplingBatchInfo
    fields, mask = server.make_adjustments(names, 3, 1, server.VOCAB, "cpu")
    logits = 2 * torch.randn(3, server.VOCAB, dtype=torch.float64)
    wanted = server.adjusted_nodes(logits, SimpleNamespace(**fields), mask)
    every = dict.fromkeys((field.name for field in dataclasses.fields(info)), None)
    info(**(every | fields | {"grammar_mask": mask})).apply_logits_bias(logits)
    torch.testing.assert_close(logits, wanted)


def test_slots_of_drafts_in_the_stand_in(sources, monkeypatch):
    module, name = "speculative.eagle_utils", "per_step_draft_out_cache_loc"
    ours = getattr(stub.imported_by_steps(monkeypatch)[f"sglang.srt.{module}"], name)
    given = (torch.randperm(30), 3, 5, 2)
    assert torch.equal(ours(*given), getattr(define(sources, module, name), name)(*given))


@pytest.mark.parametrize(("device", "named", "changes", "wanted"), readers.CASES)
def test_who_reads_prompts(sources, monkeypatch, device, named, changes, wanted):
    """By SGLang's own choice of a backend, in the place of the stand-in's."""
    is_device = lambda name: lambda *_: device == name  # noqa: E731
    facts = {
        "is_hopper_with_cuda_12_3": is_device("sm_90"), "is_sm100_supported": is_device("sm_100"),
        "is_hip": lambda: device.startswith("gfx"), "is_mps": lambda: False, "is_flashinfer_available": lambda: True,
    }  # fmt: skip
    same = lambda view: view  # noqa: E731
    platform = SimpleNamespace(
        is_hopper_with_cuda_12_3=device == "sm_90", is_sm100=device == "sm_100", is_hip=device.startswith("gfx"),
        has_flashinfer=True,
    )  # fmt: skip
    scope = facts | {
        "resolved_view": same, "resolving_view": same, "get_platform": lambda: platform,
        "current_platform": SimpleNamespace(is_out_of_tree=lambda: False), "_forces_eagle_topk_one": lambda name: False,
        **vars(define(sources, "utils.common", "is_no_spec_infer_or_topk_one")),
    }  # fmt: skip
    own = {
        **vars(define(sources, "server_args", "ServerArgs._get_default_attn_backend", **scope)),
        **vars(define(sources, "arg_groups.model_override_base", "get_default_attn_backend", **scope)),
    }
    (choose,) = own.values()
    model = readers.MODEL | {
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]), "has_asymmetric_kv": False,
        "has_attention_sinks": False,
    }  # fmt: skip
    view = readers.view_of(named, model, own=choose, **changes)
    view.use_mla_backend = lambda: False
    given = {"use_mla_backend": lambda view: False, "model_config_of": lambda view: view.get_model_config()}
    defined = define(sources, "arg_groups.overrides", "_attention_backend_default", **own, **given,
                     register_post_process=same)  # fmt: skip
    monkeypatch.setattr(prompts, "architecture", lambda given: device)
    monkeypatch.setattr(prompts.importlib, "import_module", lambda name: None)
    readers.resolved_by(defined._attention_backend_default, view, wanted, named)


class Half:
    """One backend of two, which notes what it is called for."""

    needs_cpu_seq_lens = False

    def __init__(self, name: str):
        self.name, self.verify_mask, self.called = name, f"the mask of {name}", []

    def __getattr__(self, name: str):
        return lambda *given, **options: self.called.append(name)


def test_which_of_two_backends_gets_which_pass(sources):
    mode = define(sources, "model_executor.forward_batch_info", "ForwardMode", IntEnum=enum.IntEnum, auto=enum.auto)
    spec = SimpleNamespace(speculative_attention_mode="decode", speculative_algorithm="EAGLE3")
    made = define(
        sources, "layers.attention.hybrid_attn_backend", "HybridAttnBackend", AttentionBackend=object,
        ForwardMode=mode.ForwardMode, get_spec=lambda: spec,
        get_exec=lambda: SimpleNamespace(dllm=SimpleNamespace(dllm_algorithm=None)),
    )  # fmt: skip
    theirs, ours = Half("theirs"), Half("ours")
    runner = MagicMock(server_args=spec)
    both = made.HybridAttnBackend(runner, prefill_backend=theirs, decode_backend=ours)
    assert both.prefill_backend is theirs and both.verify_mask == "the mask of ours"
    both.init_cuda_graph_state(8, 64)
    assert ours.called == ["init_cuda_graph_state"] and theirs.called == []
    for each in mode.ForwardMode:
        theirs.called, ours.called = [], []
        batch = SimpleNamespace(forward_mode=each)
        for name in ("init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph"):
            getattr(both, name)(batch)
        both.forward(None, None, None, None, batch)
        is_ours = each.name in ("DECODE", "IDLE", "TARGET_VERIFY")
        called, idle = (ours, theirs) if is_ours else (theirs, ours)
        assert len(called.called) == 4 and idle.called == [], each
