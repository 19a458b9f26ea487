"""The vLLM plug-in's switches, refusals and checks, on a made vLLM with the functions that it hooks."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from types import SimpleNamespace

import pytest

from eagle_kernels.integrations.shared.hooks import Hook
from eagle_kernels.integrations.vllm import guards, hooks, parts, plugin, register
from op_tests.integrations import vllm_stub as stub

ALL = (*hooks.GUARDS, *hooks.HOOKS)
EVERYTHING = set(parts.PARTS)
CONFIG, WORKER = hooks.GUARDS
BACKENDS = stub.AttentionBackendEnum
name_of = lambda hook: hook.target.rpartition(".")[2]  # noqa: E731
GROUPS = {
    "model": {"is_encoder_decoder": False, "use_mla": False, "is_hybrid": False, "is_attention_free": False,
              "rswa_window": None},
    "parallel": {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_ubatching": False},
    "cache": {"cache_dtype": "auto"},
    "speculative": {"rejection_sample_method": "standard", "draft_sample_method": "greedy"},
    "attention": {"backend": BACKENDS.CUSTOM},
}  # fmt: skip


def configuration(**changes) -> SimpleNamespace:
    """vLLM's configuration with our backend and drafts; a group's fields are given as model_.., and so on."""
    fields = {"use_v2_model_runner": True, "lora_config": None}
    for group, values in GROUPS.items():
        own = {name: changes.pop(f"{group}_{name}", value) for name, value in values.items()}
        fields[f"{group}_config"] = SimpleNamespace(**own)
    return SimpleNamespace(**fields | changes)


PLAIN = {"attention_backend": BACKENDS.TRITON_ATTN}


def arguments(config=None, backend="CUSTOM", speculation=(("method", "eagle3"),), **options):
    kind = sys.modules["vllm.engine.arg_utils"].EngineArgs
    return kind(config or configuration(), backend, SimpleNamespace(backend=None), dict(speculation), **options)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No part is on, none was used, no variable is set, and no plug-in has the backend."""
    monkeypatch.setattr(parts.SWITCHES, "on", set())
    monkeypatch.setattr(parts.SWITCHES, "used", set())
    monkeypatch.delenv(parts.VARIABLE, raising=False)
    monkeypatch.delenv(plugin.FORCE, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: hooks.TESTED[0])
    stub.OVERRIDES.clear()
    yield
    stub.OVERRIDES.clear()


@pytest.fixture
def framework():
    with stub.installed(stub.hooked()):
        yield


def owner_of(hook: Hook):
    path, _, name = hook.target.rpartition(".")
    if path in sys.modules:
        return sys.modules[path], name
    module, _, kind = path.rpartition(".")
    return getattr(sys.modules[module], kind), name


def found(hook: Hook):
    owner, name = owner_of(hook)
    return getattr(owner, name)


def is_hooked(hook: Hook) -> bool:
    return getattr(found(hook), "eagle_kernels_hook", None) == hook.target


def start_worker(config):
    return sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase(config).init_device()


# the variable


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ("verify", {"verify"}), (" verify , draft,", {"verify", "draft"}), ("none", set()), ("all", EVERYTHING),
        ("", None), (" ", None),
    ],
)  # fmt: skip
def test_the_variable_names_parts(monkeypatch, value, asked):
    monkeypatch.setenv(parts.VARIABLE, value)
    assert parts.asked_by_variable() == asked


@pytest.mark.parametrize(
    ("value", "wrong"), [("verfy", "verfy"), ("verify,kv", "kv"), ("all,none", "all"), ("ALL",) * 2]
)
def test_a_wrong_word_ends_the_process(framework, monkeypatch, value, wrong):
    monkeypatch.setenv(parts.VARIABLE, value)
    told = f"{parts.VARIABLE} must be none, all, or parts among attention, verify, draft, .*; got '{wrong}'"
    with pytest.raises(SystemExit, match=told):
        register()
    assert not any(map(is_hooked, ALL)) and not stub.OVERRIDES


@pytest.mark.parametrize(
    ("value", "backend", "asked"),
    [
        (None, BACKENDS.CUSTOM, EVERYTHING), (None, BACKENDS.TRITON_ATTN, set()), (None, None, set()),
        ("none", BACKENDS.CUSTOM, set()), ("verify", BACKENDS.TRITON_ATTN, {"verify"}), ("draft", None, {"draft"}),
        ("attention,draft", BACKENDS.CUSTOM, {"attention", "draft"}),
    ],
)  # fmt: skip
def test_the_backend_asks_for_parts_and_the_variable_decides(monkeypatch, value, backend, asked):
    if value:
        monkeypatch.setenv(parts.VARIABLE, value)
    assert parts.asked_by(configuration(attention_backend=backend)) == asked


# registration


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("0.26.0", True), ("0.26.0+cu129", True), ("0.26.0.post1", True), ("0.25.9", False), ("0.26.1", False),
        ("0.27.0", False), ("1.0", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("force", ["", "0", "1"])
def test_a_version_outside_of_the_range_is_left_alone(framework, monkeypatch, caplog, version, accepted, force):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setenv(plugin.FORCE, force)
    with caplog.at_level(logging.INFO, "vllm.eagle_kernels"):
        register()
    registers = accepted or force == "1"
    assert list(map(is_hooked, ALL)) == [registers] * len(hooks.GUARDS) + [False] * len(hooks.HOOKS)
    expected = {BACKENDS.CUSTOM: hooks.BACKEND_CLASS} if registers else {}
    assert expected == stub.OVERRIDES
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (not registers)
    assert registers or f"vLLM {version} is outside of" in told[0] and f"{plugin.FORCE}=1 tries" in told[0]


def test_registering_again_hooks_nothing_twice(framework, monkeypatch):
    register()
    before = [found(hook) for hook in ALL]
    register()
    assert [found(hook) for hook in ALL] == before
    start_worker(configuration())
    hooked = [found(hook) for hook in ALL]
    start_worker(configuration())
    assert [found(hook) for hook in ALL] == hooked and all(map(is_hooked, ALL))
    called = []
    monkeypatch.setattr(guards, "refusals", lambda config: called.append(config) or [])
    monkeypatch.setattr(Hook, "function", lambda hook: getattr(guards, hook.ours.rpartition(".")[2]))
    arguments().create_engine_config()
    assert len(called) == 1


def test_the_backend_is_where_the_table_says():
    with stub.installed():
        module, _, name = hooks.BACKEND_CLASS.rpartition(".")
        assert getattr(importlib.import_module(module), name).get_name() == parts.BACKEND
        for hook in ALL:
            assert callable(hook.function())


def test_another_plug_in_keeps_its_backend(framework):
    stub.OVERRIDES[BACKENDS.CUSTOM] = "another.Backend"
    register()
    assert stub.OVERRIDES == {BACKENDS.CUSTOM: "another.Backend"}
    with pytest.raises(ValueError, match="--attention-backend CUSTOM is another.Backend, of another plug-in"):
        arguments().create_engine_config()
    assert arguments(configuration(**PLAIN), "TRITON_ATTN").create_engine_config()


# what the configuration refuses


REFUSED = {
    "runner": ({"use_v2_model_runner": False}, "Model Runner V1 (vLLM chose it, or VLLM_USE_V2_MODEL_RUNNER=0 did)"),
    "decode contexts": ({"parallel_decode_context_parallel_size": 2}, "--decode-context-parallel-size above 1"),
    "prefill contexts": ({"parallel_prefill_context_parallel_size": 2}, "--prefill-context-parallel-size above 1"),
    "overlap": ({"parallel_use_ubatching": True}, "--enable-dbo and other overlap of small batches"),
    "encoder": ({"model_is_encoder_decoder": True}, "encoder-decoder models"),
    "MLA": ({"model_use_mla": True}, "models with multi-head latent attention (MLA)"),
    "hybrid": ({"model_is_hybrid": True}, "models with recurrent layers"),
    "recurrent": ({"model_is_attention_free": True}, "models with recurrent layers"),
    "windows": ({"model_rswa_window": 5}, "reference sliding windows"),
    "dtype": ({"cache_cache_dtype": "fp8_e5m2"},
              "--kv-cache-dtype fp8_e5m2; use one of auto, float16, bfloat16, fp8, fp8_e4m3"),
    "LoRA": ({"lora_config": "some"}, "LoRA with speculation"),
    "blocks": ({"speculative_rejection_sample_method": "block"},
               "rejection_sample_method 'block'; standard or synthetic"),
    "drafts": ({"speculative_draft_sample_method": "probabilistic"}, "draft_sample_method 'probabilistic'; greedy"),
}  # fmt: skip
OF_PART = {"MLA": "attention", "hybrid": "attention", "recurrent": "attention", "windows": "attention",
           "dtype": "attention", "blocks": "verify", "drafts": "verify"}  # fmt: skip
SPECULATIVE = ("LoRA", "blocks", "drafts")


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(framework, name):
    changes, text = REFUSED[name]
    register()
    with pytest.raises(ValueError) as refused:
        arguments(configuration(**changes)).create_engine_config()
    assert str(refused.value) == f"eagle_kernels: the plug-in does not support {text}"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("part", ["none", *parts.PARTS])
def test_a_part_refuses_what_it_cannot_serve_alone(framework, monkeypatch, name, part):
    monkeypatch.setenv(parts.VARIABLE, part)
    config = configuration(**REFUSED[name][0], **PLAIN)
    refuses = part != "none" and OF_PART.get(name, part) == part
    assert guards.refusals(config) == ([REFUSED[name][1]] if refuses else [])
    if name in SPECULATIVE:
        config.speculative_config = None
        assert guards.refusals(config) == []


def test_it_names_all_reasons(framework):
    register()
    with pytest.raises(ValueError, match="support encoder-decoder models; nor LoRA with speculation$"):
        arguments(configuration(model_is_encoder_decoder=True, lora_config="some")).create_engine_config()


@pytest.mark.parametrize(
    "changes",
    [
        {}, PLAIN, {"speculative_config": None}, {"speculative_rejection_sample_method": "synthetic"},
        {"lora_config": "some", "speculative_config": None},
        *({"cache_cache_dtype": kind} for kind in guards.KV_DTYPES),
    ],
    ids=str,
)  # fmt: skip
def test_it_does_not_refuse(framework, changes):
    register()
    config = configuration(**changes)
    assert arguments(config).create_engine_config() is config


@pytest.mark.parametrize("value", ["none", "verify"])
def test_the_backend_without_its_part_is_refused(framework, monkeypatch, value):
    monkeypatch.setenv(parts.VARIABLE, value)
    register()
    with pytest.raises(ValueError, match="CUSTOM needs the part attention, which EAGLE_KERNELS_VLLM leaves out"):
        arguments().create_engine_config()


# drafts


@pytest.mark.parametrize(
    ("backend", "of_group", "speculation", "expected"),
    [
        ("CUSTOM", None, {"method": "eagle3"}, {"method": "eagle3", "attention_backend": "CUSTOM"}),
        (BACKENDS.CUSTOM, None, {"method": "eagle3"}, {"method": "eagle3", "attention_backend": "CUSTOM"}),
        (None, BACKENDS.CUSTOM, {"method": "eagle3"}, {"method": "eagle3", "attention_backend": "CUSTOM"}),
        ("CUSTOM", None, {"attention_backend": "FLASH_ATTN"}, {"attention_backend": "FLASH_ATTN"}),
        ("FLASH_ATTN", None, {"method": "eagle3"}, {"method": "eagle3"}),
        (None, None, {"method": "eagle3"}, {"method": "eagle3"}),
        ("CUSTOM", None, None, None),
    ],
)  # fmt: skip
def test_drafts_get_the_backend(framework, backend, of_group, speculation, expected):
    register()
    given = sys.modules["vllm.engine.arg_utils"].EngineArgs(
        configuration(), backend, SimpleNamespace(backend=of_group), speculation
    )
    before = speculation and dict(speculation)
    given.create_engine_config()
    assert given.speculative_config == expected and speculation == before  # the user's own is left as it is


# what is missing


def without(hook: Hook, monkeypatch) -> None:
    """Takes a function out of this vLLM."""
    owner, name = owner_of(hook)
    if isinstance(owner, type):
        path, _, kind = hook.target.rpartition(".")[0].rpartition(".")
        monkeypatch.setattr(sys.modules[path], kind, type(kind, (), {}))
    else:
        monkeypatch.delattr(owner, name)


@pytest.mark.parametrize("hook", hooks.GUARDS, ids=name_of)
@pytest.mark.parametrize("value", [None, "none", "verify"])
def test_a_missing_guard_ends_a_process_that_asks_for_parts(framework, monkeypatch, caplog, hook, value):
    """In others the backend is missing too, so that vLLM refuses its name: nobody would say what else does not work."""
    without(hook, monkeypatch)
    if value:
        monkeypatch.setenv(parts.VARIABLE, value)
    if value == "verify":
        with pytest.raises(SystemExit, match=f"this vLLM is not as the plug-in expects: {hook.target} does not exist"):
            register()
        return
    register()
    assert not stub.OVERRIDES and f"{hook.target} does not exist" in caplog.text and "is not registered" in caplog.text


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=name_of)
@pytest.mark.parametrize("how", ["missing", "other parameters"])
def test_a_missing_function_stops_the_worker(framework, monkeypatch, hook, how):
    told = f"{hook.part}: {hook.target} does not exist"
    if how == "missing":
        without(hook, monkeypatch)
    else:
        monkeypatch.setattr(*owner_of(hook), lambda other: None)
        told = f"{hook.part}: {hook.target} takes other; expected first {', '.join(hook.parameters)}"
    register()
    with pytest.raises(RuntimeError, match=f"{told}.*; leave these parts out by {parts.VARIABLE}, or use a version in"):
        start_worker(configuration())
    assert parts.SWITCHES.on == set()
    monkeypatch.setenv(parts.VARIABLE, "attention")  # the others work without it
    assert start_worker(configuration()) == "device"


def test_a_guard_that_another_plug_in_takes_away_is_missed(framework, monkeypatch):
    register()
    monkeypatch.setattr(*owner_of(CONFIG), lambda self: self.config)
    told = f"guard: {CONFIG.target} is not hooked; is the plug-in filtered out by VLLM_PLUGINS?"
    with pytest.raises(RuntimeError, match=told.replace("?", r"\?")):
        start_worker(configuration())


def test_a_wrapper_of_another_plug_in_is_no_fault(framework, monkeypatch):
    register()
    inner = found(CONFIG)
    monkeypatch.setattr(*owner_of(CONFIG), lambda self: inner(self))
    assert start_worker(configuration()) == "device"


# parts that are off and on


@pytest.mark.parametrize("value", [None, *parts.PARTS])
def test_parts_are_hooked_in_workers_that_ask_for_them(framework, monkeypatch, caplog, value):
    if value:
        monkeypatch.setenv(parts.VARIABLE, value)
    asked = {value} if value else EVERYTHING
    register()
    assert not any(map(is_hooked, hooks.HOOKS))  # processes without a worker import nothing of vLLM's for it
    with caplog.at_level(logging.INFO, "vllm.eagle_kernels"):
        assert start_worker(configuration(**({} if value in (None, "attention") else PLAIN))) == "device"
    assert [is_hooked(hook) for hook in hooks.HOOKS] == [hook.part in asked for hook in hooks.HOOKS]
    assert parts.SWITCHES.on == asked
    more = {"attention": "; prompts are ours"}
    assert [record.getMessage() for record in caplog.records] == [
        f"eagle_kernels: {part} is on: {what}{more.get(part, '')}"
        for part, what in parts.PARTS.items()
        if part in asked
    ]


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=name_of)
def test_a_hook_calls_ours(framework, monkeypatch, hook):
    register()
    original = found(hook)
    start_worker(configuration())
    monkeypatch.setattr(Hook, "function", lambda self: lambda *given, **options: (self.target, given, options))
    given = tuple(object() for _ in hook.parameters)
    assert found(hook)(*given, more=7) == (hook.target, (original, *given), {"more": 7})
    assert parts.SWITCHES.used == {hook.part}


@pytest.mark.parametrize("value", [None, "none"])
def test_nothing_is_changed_when_nothing_is_asked_for(framework, monkeypatch, caplog, value):
    if value:
        monkeypatch.setenv(parts.VARIABLE, value)
    register()
    config = configuration(**PLAIN, use_v2_model_runner=False, model_is_encoder_decoder=True)
    given = arguments(config, "TRITON_ATTN")
    with caplog.at_level(logging.DEBUG):
        assert given.create_engine_config() is config and given.speculative_config == {"method": "eagle3"}
        assert start_worker(config) == "device"
    assert not any(map(is_hooked, hooks.HOOKS)) and parts.SWITCHES.on == set() and not caplog.records
    assert not any(name in sys.modules for name in stub.OURS)


def test_who_reads_prompts_is_said(monkeypatch):
    with stub.installed(stub.HOPPER):
        assert guards._who_reads() == "steps with prompts are FlashAttention 3's"
    with stub.installed():
        assert guards._who_reads() == "prompts are ours"
