"""The vLLM plug-in's switches, refusals and checks, on a made vLLM with the functions that it hooks."""

import importlib
import importlib.metadata
import logging
import pickle
import sys
from types import SimpleNamespace

import pytest

from eagle_kernels.integrations.shared.hooks import Hook
from eagle_kernels.integrations.vllm import guards, hooks, parts, plugin, register
from op_tests.integrations import vllm_stub as stub

ALL = (*hooks.GUARDS, *hooks.HOOKS)
EVERYTHING = set(parts.PARTS)
OF_PARTS = [hook for hook in hooks.HOOKS if hook.part in EVERYTHING]  # those of trees are in test_vllm_tree_guards.py
CONFIG, WORKER, REQUESTS, *_ = hooks.GUARDS
OURS, THEIRS = "ours", SimpleNamespace(name="TRITON_ATTN")  # attention backends
name_of = lambda hook: hook.target.rpartition(".")[2]  # noqa: E731
GROUPS = {
    "model": {"is_encoder_decoder": False, "use_mla": False, "is_hybrid": False,
              "is_attention_free": False, "rswa_window": None},
    "parallel": {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_ubatching": False},
    "cache": {"cache_dtype": "auto"},
    "speculative": {"rejection_sample_method": "standard", "draft_sample_method": "greedy"},
    "attention": {"backend": OURS},  # which has a name in each form
}  # fmt: skip


def configuration(**changes) -> SimpleNamespace:
    """vLLM's configuration with our backend and drafts; a group's fields are given as model_.., and so on."""
    fields = {"use_v2_model_runner": True, "lora_config": None, "additional_config": {}}
    for group, values in GROUPS.items():
        given = [name for name in changes if name.startswith(f"{group}_") and name != f"{group}_config"]
        own = values | {name.removeprefix(f"{group}_"): changes.pop(name) for name in given}
        fields[f"{group}_config"] = SimpleNamespace(**own)
    attention = fields["attention_config"]
    if attention.backend == OURS:
        attention.backend = SimpleNamespace(name=parts.backend_name())
    return SimpleNamespace(**fields | changes)


PLAIN = {"attention_backend": THEIRS}


def arguments(config=None, backend=None, speculation=(("method", "eagle3"),), **options):
    kind, backend = sys.modules["vllm.engine.arg_utils"].EngineArgs, backend or parts.backend_name()
    return kind(config or configuration(), backend, SimpleNamespace(backend=None), dict(speculation), **options)


@pytest.fixture(autouse=True, params=stub.FORMS)
def form(request):
    """The release in whose form vLLM is made."""
    with stub.installed(stub.form(request.param).hooked()):
        yield request.param


def registered() -> dict[str, str]:
    """The names that were registered, and the paths."""
    return {backend.name: path for backend, path in stub.OVERRIDES.items()}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No part is on, none was used, no variable is set, and no plug-in has the backend."""
    monkeypatch.setattr(parts.SWITCHES, "on", set())
    monkeypatch.setattr(parts.SWITCHES, "used", set())
    monkeypatch.delenv(parts.VARIABLE, raising=False)
    monkeypatch.delenv(plugin.FORCE, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: hooks.TESTED[0])
    yield
    stub.OVERRIDES.clear()
    stub.form("0.33").AttentionBackendEnum.forget()


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
def test_a_wrong_word_ends_the_process(monkeypatch, value, wrong):
    monkeypatch.setenv(parts.VARIABLE, value)
    told = f"{parts.VARIABLE} must be none, all, or parts among attention, verify, draft, .*; got '{wrong}'"
    with pytest.raises(SystemExit, match=told):
        register()
    assert not any(map(is_hooked, ALL)) and not stub.OVERRIDES


def test_a_wrong_reader_of_prompts_ends_the_process(monkeypatch):
    monkeypatch.setenv(parts.PROMPTS, "our")
    with pytest.raises(SystemExit, match=f"{parts.PROMPTS} must be ours or not be set; got 'our'$"):
        register()
    assert not any(map(is_hooked, ALL)) and not stub.OVERRIDES


@pytest.mark.parametrize(
    ("value", "backend", "asked"),
    [
        (None, OURS, EVERYTHING), (None, THEIRS, set()), (None, None, set()),
        ("none", OURS, set()), ("verify", THEIRS, {"verify"}), ("draft", None, {"draft"}),
        ("attention,draft", OURS, {"attention", "draft"}),
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
        ("0.26.0", True), ("0.26.0+cu129", True), ("0.26.0.post1", True), ("0.27.1", True), ("0.31.0", True),
        ("0.33.0", True), ("0.25.9", False), ("0.28.0", False), ("0.30.9", False), ("0.33.1", False), ("1.0", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("force", ["", "0", "1"])
def test_a_version_outside_of_the_ranges_is_left_alone(form, monkeypatch, caplog, version, accepted, force):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setenv(plugin.FORCE, force)
    with caplog.at_level(logging.INFO, "vllm.eagle_kernels"):
        register()
    registers = accepted or force == "1"
    assert list(map(is_hooked, ALL)) == [registers] * len(hooks.GUARDS) + [False] * len(hooks.HOOKS)
    assert registered() == ({stub.BACKEND[form]: hooks.BACKEND_CLASS} if registers else {})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (not registers)
    assert registers or f"vLLM {version} is outside of" in told[0] and f"{plugin.FORCE}=1 tries" in told[0]


def test_registering_again_hooks_nothing_twice(monkeypatch):
    register()
    before = [found(hook) for hook in ALL]
    register()
    assert [found(hook) for hook in ALL] == before
    start_worker(configuration())
    hooked = [found(hook) for hook in ALL]
    start_worker(configuration())
    assert [found(hook) for hook in ALL] == hooked and all(map(is_hooked, (*hooks.GUARDS, *OF_PARTS)))
    called = []
    monkeypatch.setattr(guards, "refusals", lambda config: called.append(config) or [])
    monkeypatch.setattr(Hook, "function", lambda hook: getattr(guards, hook.ours.rpartition(".")[2]))
    arguments().create_engine_config()
    assert len(called) == 1


def test_the_backend_is_where_the_table_says(form):
    with stub.installed(stub.form(form).MODULES):
        module, _, name = hooks.BACKEND_CLASS.rpartition(".")
        assert getattr(importlib.import_module(module), name).get_name() == stub.BACKEND[form]
        for hook in ALL:
            assert callable(hook.function())


def test_a_name_of_our_own_is_known_where_plug_ins_are_not_loaded_yet(form):
    """As in a process that vLLM spawns, which gets the configuration first."""
    kind = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum
    register()
    member = kind[stub.BACKEND[form]]
    sent = pickle.dumps(member) if form == "0.33" else b""
    if form == "0.26":  # CUSTOM is known everywhere
        assert plugin.registered_backend() is member
        return
    stub.OVERRIDES.clear()
    kind.forget()
    assert pickle.loads(sent) is kind["EAGLE_KERNELS"] is not member
    assert registered() == {"EAGLE_KERNELS": hooks.BACKEND_CLASS}
    register()
    assert pickle.loads(sent) is kind["EAGLE_KERNELS"]


def test_another_plug_in_keeps_its_backend(form):
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    name = stub.BACKEND[form]
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM if name == "CUSTOM" else name, "another.Backend")
    register()
    assert registered() == {name: "another.Backend"}
    with pytest.raises(ValueError, match=f"--attention-backend {name} is another.Backend, of another plug-in"):
        arguments().create_engine_config()
    assert arguments(configuration(**PLAIN), "TRITON_ATTN").create_engine_config()


# what the configuration refuses


REFUSED = {
    "runner": ({"use_v2_model_runner": False}, "Model Runner V1 (vLLM chose it, or VLLM_USE_V2_MODEL_RUNNER=0 did)"),
    "decode contexts": ({"parallel_decode_context_parallel_size": 2}, "--decode-context-parallel-size above 1"),
    "prefill contexts": ({"parallel_prefill_context_parallel_size": 2}, "--prefill-context-parallel-size above 1"),
    "overlap": ({"parallel_use_ubatching": True}, "--enable-dbo and other overlap of small batches"),
    "encoder": ({"model_is_encoder_decoder": True}, "encoder-decoder models"),
    "hybrid": ({"model_is_hybrid": True}, "models with recurrent layers"),
    "recurrent": ({"model_is_attention_free": True}, "models with recurrent layers"),
    "windows": ({"model_rswa_window": 5}, "reference sliding windows"),
    "dtype": ({"cache_cache_dtype": "fp8_e5m2"},
              "--kv-cache-dtype fp8_e5m2; use one of auto, float16, bfloat16, fp8, fp8_e4m3"),
    "LoRA": ({"lora_config": "some"}, "LoRA with speculation"),
    "blocks": ({"speculative_rejection_sample_method": "block"},
               "rejection_sample_method 'block'; use standard or synthetic"),
    "drafts": ({"speculative_draft_sample_method": "probabilistic"}, "draft_sample_method 'probabilistic'; use greedy"),
    # what came after 0.26
    "fly": ({"speculative_rejection_sample_method": "fly"}, "rejection_sample_method 'fly'; use standard or synthetic"),
    "adaptive": ({"speculative_enable_adaptive_verification": True}, "enable_adaptive_verification"),
    "shards": ({"parallel_enable_batch_sharded_sampling": True}, "--enable-batch-sharded-sampling"),
    "watermarks": ({"watermark_config": "some"}, "--watermark-config"),
}  # fmt: skip
OF_PART = {"hybrid": "attention", "recurrent": "attention", "windows": "attention",
           "dtype": "attention", "blocks": "verify", "drafts": "verify", "fly": "verify", "shards": "verify",
           "watermarks": "verify"}  # fmt: skip
SPECULATIVE = ("LoRA", "blocks", "drafts", "fly", "adaptive")


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(name):
    changes, text = REFUSED[name]
    register()
    with pytest.raises(ValueError) as refused:
        arguments(configuration(**changes)).create_engine_config()
    assert str(refused.value) == f"eagle_kernels: the plug-in does not support {text}"


@pytest.mark.parametrize(
    ("version", "fields", "text"),
    [
        ("0.26.0", {}, None),
        ("0.33.0", {}, "latent attention (MLA) in vLLM 0.33.0; use 0.26.x"),
        ("0.26.0", {"index_topk": 64}, "sparse attention over latents (DSA)"),
    ],
)
def test_latent_attention_is_that_of_one_release(monkeypatch, version, fields, text):
    monkeypatch.setattr(guards, "installed_version", lambda name: version)
    config = configuration(model_use_mla=True, model_hf_text_config=SimpleNamespace(**fields))
    assert guards.refusals(config) == ([] if text is None else [text])
    monkeypatch.setenv(parts.VARIABLE, "verify")
    assert guards.refusals(config) == []


@pytest.mark.parametrize("use_mla", [False, True])
def test_layers_of_latents_are_hooked_where_there_are_any(monkeypatch, use_mla):
    monkeypatch.setattr(parts.SWITCHES, "on", set())
    register()
    start_worker(configuration(model_use_mla=use_mla))
    of_latents = [hook for hook in hooks.HOOKS if hook.part == parts.LATENTS]
    assert len(of_latents) == 2 and {is_hooked(hook) for hook in of_latents} == {use_mla}
    assert parts.SWITCHES.is_on(parts.LATENTS) == use_mla


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("part", ["none", *parts.PARTS])
def test_a_part_refuses_what_it_cannot_serve_alone(monkeypatch, name, part):
    monkeypatch.setenv(parts.VARIABLE, part)
    config = configuration(**REFUSED[name][0], **PLAIN)
    refuses = part != "none" and OF_PART.get(name, part) == part
    assert guards.refusals(config) == ([REFUSED[name][1]] if refuses else [])
    if name in SPECULATIVE:
        config.speculative_config = None
        assert guards.refusals(config) == []


def test_it_names_all_reasons():
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
def test_it_does_not_refuse(changes):
    register()
    config = configuration(**changes)
    assert arguments(config).create_engine_config() is config


@pytest.mark.parametrize("value", ["none", "verify"])
def test_the_backend_without_its_part_is_refused(monkeypatch, value):
    monkeypatch.setenv(parts.VARIABLE, value)
    register()
    told = f"{parts.backend_name()} needs the part attention, which EAGLE_KERNELS_VLLM leaves out"
    with pytest.raises(ValueError, match=told):
        arguments().create_engine_config()


# drafts


@pytest.mark.parametrize(
    ("backend", "of_group", "speculation", "expected"),
    [
        (OURS, None, {"method": "eagle3"}, {"method": "eagle3", "attention_backend": OURS}),
        (None, OURS, {"method": "eagle3"}, {"method": "eagle3", "attention_backend": OURS}),
        (OURS, None, {"attention_backend": "FLASH_ATTN"}, {"attention_backend": "FLASH_ATTN"}),
        ("FLASH_ATTN", None, {"method": "eagle3"}, {"method": "eagle3"}),
        (None, None, {"method": "eagle3"}, {"method": "eagle3"}),
        (OURS, None, None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["name", "in small letters", "member"])
def test_drafts_get_the_backend(form, backend, of_group, speculation, expected, how):
    register()
    name = stub.BACKEND[form]
    member = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum[name]
    ours = {"name": name, "in small letters": name.lower(), "member": member}[how]
    backend, of_group = (ours if each == OURS else each for each in (backend, of_group))
    if expected and expected.get("attention_backend") == OURS:
        expected = expected | {"attention_backend": name}
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
def test_a_missing_guard_ends_a_process_that_asks_for_parts(monkeypatch, caplog, hook, value):
    """In others the backend is missing too, so that vLLM refuses its name: nobody would say what else does not work."""
    without(hook, monkeypatch)
    if value:
        monkeypatch.setenv(parts.VARIABLE, value)
    if value == "verify":
        with pytest.raises(
            SystemExit, match=f"this vLLM is not as the plug-in expects: .*{hook.target} does not exist"
        ):
            register()
        return
    register()
    assert not stub.OVERRIDES and f"{hook.target} does not exist" in caplog.text and "is not registered" in caplog.text


@pytest.mark.parametrize("hook", OF_PARTS, ids=name_of)
@pytest.mark.parametrize("how", ["missing", "other parameters"])
def test_a_missing_function_stops_the_worker(monkeypatch, hook, how):
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


def test_a_guard_that_another_plug_in_takes_away_is_missed(monkeypatch):
    register()
    monkeypatch.setattr(*owner_of(CONFIG), lambda self: self.config)
    told = f"guard: {CONFIG.target} is not hooked; is the plug-in filtered out by VLLM_PLUGINS?"
    with pytest.raises(RuntimeError, match=told.replace("?", r"\?")):
        start_worker(configuration())


def test_a_wrapper_of_another_plug_in_is_no_fault(monkeypatch):
    register()
    inner = found(CONFIG)
    monkeypatch.setattr(*owner_of(CONFIG), lambda self: inner(self))
    assert start_worker(configuration()) == "device"


# parts that are off and on


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("value", [None, *parts.PARTS])
def test_parts_are_hooked_in_workers_that_ask_for_them(monkeypatch, caplog, value, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
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
    told = [f"eagle_kernels: {part} is on: {what}{more.get(part, '')}"
            for part, what in parts.PARTS.items() if part in asked]  # fmt: skip
    how = ["eagle_kernels: vLLM 0.33.0 was checked, not run; vLLM 0.26.0 was run"] if version == "0.33.0" else []
    assert [record.getMessage() for record in caplog.records] == told + how


@pytest.mark.parametrize("asks", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}, {}], ids=str)
@pytest.mark.parametrize(("value", "is_lifted"), [("verify", True), ("draft", False), (None, True), ("none", False)])
def test_what_vllm_refuses_with_drafts_is_taken_where_ours_verifies(monkeypatch, value, is_lifted, asks):
    register()
    if value:
        monkeypatch.setenv(parts.VARIABLE, value)
    check = found(REQUESTS)
    owner, _ = owner_of(REQUESTS)
    params, told = SimpleNamespace(**{"min_p": 0.0, "logit_bias": None} | asks), "one of ['generate']"
    assert check(owner(configuration(speculative_config=None)), params, ["generate"]) == told
    processor = owner(configuration())
    if asks and not is_lifted:
        with pytest.raises(ValueError, match="not yet supported"):
            check(processor, params, ["generate"])
    else:
        assert check(processor, params, ["generate"]) == told
    if asks:
        params.trace_decode_token_ids = [1]  # which stays refused
        with pytest.raises(ValueError, match="not yet supported"):
            check(processor, params, ["generate"])
    assert processor.speculative_config is not None


@pytest.mark.parametrize("hook", OF_PARTS, ids=name_of)
def test_a_hook_calls_ours(monkeypatch, hook):
    register()
    original = found(hook)
    start_worker(configuration())
    monkeypatch.setattr(Hook, "function", lambda self: lambda *given, **options: (self.target, given, options))
    given = tuple(object() for _ in hook.parameters)
    assert found(hook)(*given, more=7) == (hook.target, (original, *given), {"more": 7})
    assert parts.SWITCHES.used == {hook.part}


@pytest.mark.parametrize("value", [None, "none"])
def test_nothing_is_changed_when_nothing_is_asked_for(monkeypatch, caplog, value):
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


def test_who_reads_prompts_is_said(form):
    with stub.installed(stub.form(form).HOPPER):
        assert guards._who_reads() == "steps with prompts are FlashAttention 3's"
    with stub.installed(stub.form(form).MODULES):
        assert guards._who_reads() == "prompts are ours"
