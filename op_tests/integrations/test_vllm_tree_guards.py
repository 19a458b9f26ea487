"""What the vLLM plug-in makes of a configuration that asks for trees of drafts, and what it refuses."""

import importlib
import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.integrations.shared.hooks import resolve
from eagle_kernels.integrations.vllm import guards, hooks, parts, register
from eagle_kernels.integrations.vllm.trees import OPTION, TreeShape, preset, shape_of
from op_tests.integrations import vllm_stub as stub

SHAPE, NODES = {"topk": 4, "depth": 3}, 8
OURS, THEIRS = SimpleNamespace(name="CUSTOM"), SimpleNamespace(name="FLASH_ATTN")
MODEL = {
    "is_encoder_decoder": False, "use_mla": False, "is_hybrid": False,
    "is_attention_free": False, "rswa_window": None,
    "uses_mrope": False, "uses_xdrope_dim": 0, "window": None,
}  # fmt: skip
PARALLEL = {
    "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_ubatching": False,
    "pipeline_parallel_size": 1, "data_parallel_size": 1,
}  # fmt: skip
SPECULATION = {
    "rejection_sample_method": "standard", "draft_sample_method": "greedy", "num_speculative_tokens": NODES - 1,
    "method": "eagle3", "attention_backend": OURS, "num_speculative_tokens_per_batch_size": None, "is_gemma4": False,
}  # fmt: skip


def configuration(**changes) -> SimpleNamespace:
    """vLLM's configuration that asks for trees; changes are of any of its groups."""
    groups = [SimpleNamespace(**{name: changes.pop(name, value) for name, value in group.items()})
              for group in (MODEL, PARALLEL, SPECULATION)]  # fmt: skip
    model, parallel, speculation = groups
    model.get_sliding_window = lambda: model.window
    speculation.use_gemma4_mtp = lambda: speculation.is_gemma4
    fields = {
        "use_v2_model_runner": True, "lora_config": None, "kv_transfer_config": None,
        "additional_config": {OPTION: SHAPE}, "model_config": model, "parallel_config": parallel,
        "speculative_config": speculation, "attention_config": SimpleNamespace(backend=OURS),
        "cache_config": SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto")),
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


@pytest.fixture(autouse=True)
def _made(monkeypatch):
    monkeypatch.delenv(parts.VARIABLE, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.26.0")
    with stub.installed(stub.form("0.26").hooked()):
        yield
    stub.OVERRIDES.clear()


def test_the_shape_is_read():
    assert shape_of(configuration()) == TreeShape(4, 3, 8) and guards.refusals(configuration()) == []


@pytest.mark.parametrize(
    "changes",
    [{"additional_config": {}}, {"additional_config": "another plug-in's"}, {"speculative_config": None},
     {"additional_config": {"other": {}}}],
    ids=str,
)  # fmt: skip
def test_without_it_drafts_are_chains(changes):
    config = configuration(**changes)
    assert shape_of(config) is None and guards.refusals(config) == []
    made = object()
    with stub.vllm("0.26"):
        drafting = importlib.import_module("eagle_kernels.integrations.vllm.tree_drafting")
        assert drafting.init_speculator(lambda *given: made, config, "device") is made


@pytest.mark.parametrize("name", ["eagle_kernel", "eagle-kernels"])
def test_a_misspelt_name_is_refused(name):
    """Else vLLM would draft a chain of all nodes."""
    with pytest.raises(ValueError, match=f"must name 'eagle_kernels' where trees are wanted; got .*'{name}'"):
        guards.refusals(configuration(additional_config={"other": 1, name: SHAPE}))


@pytest.mark.parametrize(
    ("asked", "tokens", "told"),
    [
        ({}, 7, "must name topk and depth, or be {}"), ({"topk": 4}, 7, "must name topk and depth"),
        ({"topk": 4, "depth": 3, "nodes": 8}, 7, "must name"), ("8/5/64", 63, "must name"),
        ({"topk": 0, "depth": 3}, 7, r"topk must be an integer in 1..16, got 0"),
        ({"topk": 17, "depth": 3}, 7, "topk"), ({"topk": 4.0, "depth": 3}, 7, "topk"),
        ({"topk": True, "depth": 3}, 7, "topk"), ({"topk": 4, "depth": 0}, 7, "depth"),
        ({"topk": 1, "depth": 256}, 255, "depth must be an integer in 1..255"),
        ({"topk": 16, "depth": 18}, 63, "4368 candidates and 272 beams"),
        ({"topk": 8, "depth": 66}, 99, "520 beams"),
        ({"topk": 4, "depth": 3}, 2, r"num_speculative_tokens must be in 3..36 for trees of topk 4 and depth 3, got 2"),
        ({"topk": 4, "depth": 3}, 37, "got 37"), ({"topk": 8, "depth": 5}, 256, r"in 5..255 .*, got 256"),
        ({"topk": 2, "depth": 1}, 1, r"in 2..2 .*, got 1"),
    ],
)  # fmt: skip
def test_wrong_shapes_are_refused(asked, tokens, told):
    config = configuration(additional_config={OPTION: asked}, num_speculative_tokens=tokens)
    with pytest.raises(ValueError, match=told):
        shape_of(config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "dflash"}, "method 'dflash'; use eagle, eagle3, mtp"),
        ({"method": "mtp", "is_gemma4": True}, "method 'mtp'; use eagle, eagle3, mtp"),
        ({"attention_backend": THEIRS}, "attention_backend FLASH_ATTN of drafts; use CUSTOM"),
        ({"attention_backend": None}, "attention_backend None of drafts; use CUSTOM"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 2)]}, "num_speculative_tokens_per_batch_size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size above 1"),
        ({"data_parallel_size": 2}, "--data-parallel-size above 1"),
        ({"kv_transfer_config": "a connector"}, "--kv-transfer-config"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8"), ({"window": 4096}, "sliding windows"),
        ({"uses_mrope": True}, "positions of several axes (M-RoPE)"),
        ({"uses_xdrope_dim": 4}, "positions of several axes (M-RoPE)"),
    ],
)  # fmt: skip
def test_what_trees_do_not_support_is_refused(changes, told):
    assert guards.refusals(configuration(**changes)) == [f"with trees of drafts {told}"]
    chains = configuration(**changes, additional_config={})
    assert guards.refusals(chains) == []


@pytest.mark.parametrize("asked", ["verify,draft", "attention", "draft"])
def test_trees_need_all_parts(monkeypatch, asked):
    monkeypatch.setenv(parts.VARIABLE, asked)
    names = ", ".join(sorted(asked.split(",")))
    assert guards.refusals(configuration()) == [f"with trees of drafts some of the parts ({names}); use all"]


def test_trees_need_our_backend(monkeypatch):
    """Else vLLM would draft a chain of all nodes."""
    config = configuration(attention_config=SimpleNamespace(backend=THEIRS))
    assert guards.refusals(config) == ["trees of drafts without --attention-backend CUSTOM"]
    config.additional_config = {}
    assert guards.refusals(config) == []
    monkeypatch.setenv(parts.VARIABLE, "none")
    assert guards.refusals(configuration()) == ["trees of drafts without --attention-backend CUSTOM"]


def test_trees_need_a_version_that_drafts_as_ours_expects(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0")
    assert guards.refusals(configuration()) == ["with trees of drafts vLLM 0.33.0; use 0.26.x"]


@pytest.mark.parametrize(
    ("requests", "shape"),
    [(1, (8, 5, 64)), (4, (8, 5, 64)), (5, (4, 4, 16)), (16, (4, 4, 16)), (17, (4, 3, 8)), (None, (4, 3, 8))],
)
def test_a_preset_follows_the_load(requests, shape):
    assert preset(requests) == shape


@pytest.mark.parametrize(("given", "tokens"), [({}, 15), ({"num_speculative_tokens": 9}, 9)])
def test_what_is_not_named_is_chosen(given, tokens):
    kind = stub.EngineArgs
    arguments = kind(configuration(), "CUSTOM", SimpleNamespace(backend=None), {"method": "eagle3"} | given,
                     {OPTION: {}, "other": 1}, max_num_seqs=8)  # fmt: skip
    guards._name_trees(arguments)
    assert arguments.additional_config == {OPTION: {"topk": 4, "depth": 4}, "other": 1}
    assert arguments.speculative_config == {"method": "eagle3", "num_speculative_tokens": tokens}


@pytest.mark.parametrize(
    ("speculation", "options"),
    [(None, {OPTION: {}}), ({"method": "eagle3"}, {}), ({"method": "eagle3"}, {OPTION: SHAPE}),
     ({"method": "eagle3"}, "another plug-in's")],
)  # fmt: skip
def test_nothing_else_is_chosen(speculation, options):
    arguments = stub.EngineArgs(configuration(), "CUSTOM", None, speculation, options)
    guards._name_trees(arguments)
    assert arguments.speculative_config == speculation and arguments.additional_config == options


def test_too_few_tokens_for_the_beams_are_refused():
    class Speculator:
        def __init__(self, config, device):
            self.max_num_reqs, self.max_num_tokens = 65, 256

    with stub.vllm("0.26"):
        drafting = importlib.import_module("eagle_kernels.integrations.vllm.tree_drafting")
        with pytest.raises(ValueError, match=r"at least --max-num-seqs \* topk = 260 for trees, got 256"):
            drafting.init_speculator(Speculator, configuration(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "told"),
    [({"sliding_window": 9}, "it has a sliding window"), ({"kv_cache_dtype": "fp8"}, "its cache is fp8"),
     ({"alibi_slopes": [1.0]}, "ours does not read it"), ({}, None)],
)  # fmt: skip
def test_layers_that_cannot_read_trees_are_named(options, told):
    with stub.vllm("0.26"):
        if stub.SITE:
            pytest.skip("of the made one")
        attention = importlib.import_module("eagle_kernels.integrations.vllm.attention")
        given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
        layer = attention.EagleKernelsImpl(4, 16, 0.25, 2, **given)
        if told is None:
            assert layer.check_trees("model.0") is None
            return
        with pytest.raises(RuntimeError, match=f"not supported in layer model.0: {told}"):
            layer.check_trees("model.0")


def test_a_step_with_trees_that_ours_cannot_read_is_told():
    with stub.installed(stub.form("0.26").MODULES):
        attention = importlib.import_module("eagle_kernels.integrations.vllm.attention")
        builder = object.__new__(attention.EagleKernelsBuilder)
        builder.trees = SimpleNamespace(current="trees")
        with pytest.raises(RuntimeError, match="a step with trees holds rows that are not causal"):
            builder.build(3, SimpleNamespace(causal=True))


@pytest.mark.parametrize("place", range(2))
def test_workers_hook_what_trees_need(monkeypatch, caplog, place):
    """A function that is not as expected is told, where trees are asked for."""
    monkeypatch.setattr(parts.SWITCHES, "on", set())
    register()
    hook = [hook for hook in hooks.HOOKS if hook.part == parts.TREES][place]
    worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    with caplog.at_level("INFO", "vllm.eagle_kernels"):
        assert worker(configuration()).init_device() == "device"
    assert "trees is on: drafts are trees, in place of chains; topk 4, depth 3, 8 nodes" in caplog.text
    path, _, name = hook.target.rpartition(".")
    owner = sys.modules.get(path) or resolve(path)
    assert getattr(owner, name).eagle_kernels_hook == hook.target
    monkeypatch.setattr(owner, name, lambda other: None)
    with pytest.raises(RuntimeError, match=f"trees: {hook.target} takes other; expected first"):
        worker(configuration()).init_device()
    assert worker(configuration(additional_config={})).init_device() == "device"
