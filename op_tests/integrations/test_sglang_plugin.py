"""The plug-in's switches, refusals and checks, on a stand-in with the functions that it hooks."""

import importlib
import importlib.metadata
import logging
import sys
from types import SimpleNamespace

import pytest

from eagle_kernels.integrations.sglang import guards, hooks, parts, plugin, prompts
from eagle_kernels.integrations.shared.hooks import Hook
from op_tests.integrations import sglang_stub as stub

ALL = (*hooks.GUARDS, *hooks.HOOKS)
FUNCTIONS = {hook.target: hook.parameters for hook in ALL}


def name_of(hook: Hook) -> str:
    return hook.target.rpartition(".")[2]


def word_of(hook: Hook) -> str:
    """What EAGLE_KERNELS_SGLANG calls the part of a hook: `match` comes with `verify`."""
    return "verify" if hook.part in parts.MATCH else hook.part


EVERYTHING = {*parts.PARTS, *parts.MATCH}
BY_NAME = {name_of(hook): hook for hook in ALL}
CHECKED = pytest.mark.parametrize("hook", ALL, ids=name_of)
REPLACING = pytest.mark.parametrize("hook", hooks.HOOKS, ids=name_of)
MODEL = {
    "attention_arch": SimpleNamespace(name="MHA"), "is_encoder_decoder": False, "is_hybrid_swa": False,
    "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]), "recurrent": None,
}  # fmt: skip


def arguments(**changes) -> SimpleNamespace:
    """Server arguments of an EAGLE-3 server with our backend; a model's fields are given as model_..."""
    fields = {
        "attention_backend": "eagle_kernels", "prefill_attention_backend": None, "decode_attention_backend": None,
        "speculative_draft_attention_backend": None, "speculative_algorithm": "EAGLE3", "device": "cuda",
        "kv_cache_dtype": "auto", "disable_hybrid_swa_memory": False, "speculative_eagle_topk": 4,
        "speculative_num_steps": 5, "speculative_num_draft_tokens": 16, "dcp_size": 1,
        "enable_dp_attention": False, "speculative_attention_mode": "prefill",
    }  # fmt: skip
    model = MODEL | {name.removeprefix("model_"): changes.pop(name) for name in list(changes) if name[:6] == "model_"}
    return SimpleNamespace(**(fields | changes), get_model_config=lambda: SimpleNamespace(**model))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No part is on, none was used, and no variable is set but that of the rule, which has hooks of its own."""
    monkeypatch.setattr(parts.SWITCHES, "on", set())
    monkeypatch.setattr(parts.SWITCHES, "used", set())
    monkeypatch.setattr(parts, "_is_naive", False)
    monkeypatch.delenv(parts.VARIABLE, raising=False)
    monkeypatch.setenv(parts.RULE, "match")
    monkeypatch.delenv(plugin.FORCE, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: hooks.TESTED[0])
    monkeypatch.setattr(guards, "is_interpreting", lambda: False)
    monkeypatch.setattr(prompts, "architecture", lambda device: "sm_80")


@pytest.fixture
def framework():
    made = stub.Framework(FUNCTIONS)
    with stub.installed(made.modules):
        yield made


@pytest.fixture
def started(framework, monkeypatch):
    """`started(value)`: SGLang with the plug-in, and a scheduler that was started with a value of the variable."""

    def start(value: str | None = None, **changes) -> stub.Framework:
        if value is not None:
            monkeypatch.setenv(parts.VARIABLE, value)
        plugin.register()
        framework.apply_hooks()
        framework.function(BY_NAME["__init__"].target)("scheduler", arguments(**changes))
        framework.calls.clear()
        return framework

    return start


# the variable


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ("verify", {"verify"}), (" verify , draft,", {"verify", "draft"}), ("none", set()), ("all", set(parts.PARTS)),
        ("", None), (" ", None),
    ],
)  # fmt: skip
def test_the_variable_names_parts(monkeypatch, value, asked):
    monkeypatch.setenv(parts.VARIABLE, value)
    assert parts.asked_by_variable() == asked


NO_PARTS = f"{parts.VARIABLE} must be none, all, or parts among .*; got "


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        (parts.VARIABLE, "verfy", f"{NO_PARTS}'verfy'"), (parts.VARIABLE, "verify,atention", f"{NO_PARTS}'atention'"),
        (parts.VARIABLE, "all,none", f"{NO_PARTS}'all'"), (parts.VARIABLE, "ALL", f"{NO_PARTS}'ALL'"),
        (parts.RULE, "matches", f"{parts.RULE} must be coins or match; got 'matches'"),
        (parts.PRESET, "eager", f"eagle_kernels: {parts.PRESET} must be naive; got 'eager'"),
    ],
)  # fmt: skip
def test_a_wrong_word_ends_the_process(framework, monkeypatch, variable, value, told):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=told):
        plugin.register()
    assert not framework.hooks


@pytest.mark.parametrize(
    ("variable", "backend", "asked"),
    [
        (None, "triton", set()), (None, "eagle_kernels", EVERYTHING), ("none", "eagle_kernels", set()),
        ("verify", "triton", {"verify", "match"}), ("verify", "eagle_kernels", {"verify", "match"}),
        ("draft", "eagle_kernels", {"draft"}),
    ],
)  # fmt: skip
def test_the_backend_asks_for_parts_and_the_variable_decides(monkeypatch, variable, backend, asked):
    if variable:
        monkeypatch.setenv(parts.VARIABLE, variable)
    assert parts.asked_by(arguments(attention_backend=backend)) == asked


@pytest.mark.parametrize("name", ["prefill", "decode", "speculative_draft"])
def test_a_backend_of_one_phase_asks_too(name):
    given = arguments(attention_backend="triton", **{f"{name}_attention_backend": "eagle_kernels"})
    assert parts.asked_by(given) == EVERYTHING


@pytest.mark.parametrize("rule", ["", "coins", " coins "])
def test_without_the_rule_nothing_of_it_is_asked_for(monkeypatch, rule):
    monkeypatch.setenv(parts.RULE, rule)
    assert parts.asked_by(arguments()) == set(parts.PARTS)


def test_arguments_are_read_as_resolved(framework):
    """Newer versions keep what they resolved beside the record, and describe the model by a function."""
    record = SimpleNamespace(attention_backend=None, device=None)
    resolved = arguments(device="cpu")
    del resolved.get_model_config
    framework.modules["sglang.srt.arg_groups.overrides"] = {
        "resolving_view": lambda given: resolved if given is record else given,
        "model_config_of": lambda given: SimpleNamespace(**(MODEL | {"is_encoder_decoder": given is record})),
    }
    with stub.installed(framework.modules):
        assert set(parts.backends(record).values()) == {"eagle_kernels"}
        assert guards.refusals(record) == ["device 'cpu'; it needs a GPU", "encoder-decoder models"]


# registration


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        (hooks.TESTED[0], True), (hooks.TESTED[-1], True), (hooks.TESTED[-1] + "+cu129", True), ("0.5.20.post1", True),
        ("0.5.16", False), ("0.4.18", False), (hooks.TESTED[-1] + "1", False), ("0.6.0", False), ("1.0", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("force", ["", "0", "1"])
def test_a_version_outside_of_the_range_is_left_alone(framework, monkeypatch, caplog, version, accepted, force):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setenv(plugin.FORCE, force)
    with caplog.at_level(logging.INFO, "eagle_kernels"):
        plugin.register()
    registers = accepted or force == "1"
    assert set(framework.hooks) == (set(FUNCTIONS) if registers else set())
    assert set(framework.backends) == ({"eagle_kernels"} if registers else set())
    assert framework.choices == (["triton", "eagle_kernels"] if registers else ["triton"])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (not registers)
    assert registers or f"SGLang {version} is outside of" in told[0] and f"{plugin.FORCE}=1 tries" in told[0]


def test_hooks_are_registered_around_the_functions(framework):
    plugin.register()
    assert all(kind is stub.HookType.AROUND for [(_, kind)] in framework.hooks.values())
    assert framework.backends["eagle_kernels"] is guards.create_backend


def test_the_table_names_functions_of_ours():
    for hook in ALL:
        assert callable(hook.function())


# parts that are off and on


@REPLACING
@pytest.mark.parametrize("value", [None, "none", "another"])
def test_a_hook_is_inert_while_its_part_is_off(started, monkeypatch, hook, value):
    others = ",".join({word_of(each) for each in hooks.HOOKS} - {word_of(hook)})
    framework = started(others if value == "another" else value, attention_backend="triton")
    monkeypatch.setattr(Hook, "function", lambda self: pytest.fail("ours was called"))
    given = tuple(object() for _ in hook.parameters)
    last = {hook.parameters[-1]: given[-1], "more": 7}
    assert framework.function(hook.target)(*given[:-1], **last) == hook.target
    assert framework.calls == [(hook.target, (*given, 7))]
    assert hook.part not in parts.SWITCHES.used


@REPLACING
@pytest.mark.parametrize("value", [None, "all", "own"])
def test_a_hook_calls_ours_while_its_part_is_on(started, monkeypatch, hook, value):
    framework = started(word_of(hook) if value == "own" else value)
    original = framework.function(hook.target).__wrapped__
    monkeypatch.setattr(Hook, "function", lambda self: lambda *args, **options: (self.target, args, options))
    given = tuple(object() for _ in hook.parameters)
    called = framework.function(hook.target)(*given, more=7)
    assert called == (hook.target, (original, *given), {"more": 7})
    assert framework.calls == [] and parts.SWITCHES.used == {hook.part}


def test_the_scheduler_says_what_is_on(started, caplog):
    with caplog.at_level(logging.INFO, "eagle_kernels"):
        started("verify,draft", attention_backend="triton")
    told = [record.getMessage() for record in caplog.records]
    texts = parts.PARTS | parts.MATCH
    assert told == [f"eagle_kernels: {part} is on: {texts[part]}" for part in ("verify", "draft", "match")]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "; prompts are read by eagle_kernels, nothing faster was measured on sm_80"),
        ({"prefill_attention_backend": "fa3"}, "; prompts are read by fa3, as asked for"),
        ({"attention_backend": "triton"}, ""),
    ],
)
def test_the_scheduler_says_who_reads_prompts(started, caplog, monkeypatch, changes, told):
    with caplog.at_level(logging.INFO, "eagle_kernels"):
        started("attention", **changes)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"eagle_kernels: attention is on: {parts.PARTS['attention']}{told}"


def test_arguments_reach_sglang_s_own_functions(started):
    framework = started()
    given = arguments()
    assert framework.function(BY_NAME["check_server_args"].target)(given) == BY_NAME["check_server_args"].target
    framework.function(BY_NAME["__init__"].target)("scheduler", given, more=3)
    assert framework.calls == [
        (BY_NAME["check_server_args"].target, (given, None)),
        (BY_NAME["__init__"].target, ("scheduler", given, 3)),
    ]


# what the backend refuses


LATENT = {
    "model_attention_arch": SimpleNamespace(name="MLA"), "model_kv_lora_rank": 512, "model_qk_rope_head_dim": 64,
    "model_hf_text_config": SimpleNamespace(),
}  # fmt: skip
REFUSED = {
    "prompts": ({"prefill_attention_backend": "aiter", "speculative_attention_mode": "decode"},
                "--prefill-attention-backend aiter, which may keep keys elsewhere; use fa3, fa4, flashinfer, triton"),
    "trees": ({"prefill_attention_backend": "fa3"},
              "trees that fa3 verifies; add --speculative-attention-mode decode"),
    "decode": ({"decode_attention_backend": "fa3", "speculative_draft_attention_backend": "eagle_kernels"},
               "another backend for decode; eagle_kernels leaves only prompts to others"),
    "drafts": ({"speculative_draft_attention_backend": "fa3"},
               "another backend for draft; eagle_kernels leaves only prompts to others"),
    "draft alone": ({"attention_backend": "triton", "speculative_draft_attention_backend": "eagle_kernels"},
                    "another backend for decode; eagle_kernels leaves only prompts to others"),
    "device": ({"device": "cpu"}, "device 'cpu'; it needs a GPU"),
    "wide latents": (LATENT | {"model_kv_lora_rank": 1024}, "latents of 1024 elements; at most 512"),
    "wide keys": (LATENT | {"model_qk_rope_head_dim": 192}, "keys of 192 elements beside latents; at most 128"),
    "latents of 8 bits": (LATENT | {"kv_cache_dtype": "fp8_e4m3"},
                          "--kv-cache-dtype fp8_e4m3 with latent attention (MLA)"),
    "sparse latents": (LATENT | {"model_hf_text_config": SimpleNamespace(index_topk=64)},
                       "sparse attention over latents (DSA)"),
    "encoder": ({"model_is_encoder_decoder": True}, "encoder-decoder models"),
    "dtype": ({"kv_cache_dtype": "fp8_e5m2"},
              "--kv-cache-dtype fp8_e5m2; use one of auto, bf16, bfloat16, float16, fp8_e4m3"),
    "windows": ({"model_is_hybrid_swa": True},
                "a separate KV pool for sliding windows; add --disable-hybrid-swa-memory"),
    "deterministic": ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
    "two batches": ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    "pdmux": ({"enable_pdmux": True}, "--enable-pdmux"),
    "unified": ({"enable_unified_memory": True}, "--enable-unified-memory"),
    "adaptive": ({"speculative_adaptive": True}, "--speculative-adaptive"),
    "layers": ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    "context": ({"dcp_size": 2}, "decode context parallelism (--dcp-size above 1)"),
    "algorithm": ({"speculative_algorithm": "DFLASH"},
                  "--speculative-algorithm DFLASH; use EAGLE, EAGLE3, NEXTN or STANDALONE"),
    "nodes": ({"speculative_num_draft_tokens": 257}, "trees of 257 nodes; at most 256"),
    "topk": ({"speculative_eagle_topk": 17}, "--speculative-eagle-topk 17; at most 16"),
    "keys": ({"speculative_eagle_topk": 4, "speculative_num_steps": 129}, "topk * steps = 516; at most 512"),
    "candidates": ({"speculative_eagle_topk": 16, "speculative_num_steps": 17}, "4112 drafts"),
    "ranks": ({"enable_dp_attention": True}, "--enable-dp-attention with speculation"),
    "split contexts": ({"attn_cp_size": 2}, "context parallelism (--attn-cp-size above 1)"),
    "images": ({"model_hf_config": SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])},
               "the model Gemma3ForConditionalGeneration, which needs SGLang's own Triton backend"),
    "recurrent": ({"model_recurrent": "a state"}, "models with recurrent layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(started, name):
    """Before any weight is loaded, and alone: the text names one reason."""
    changes, text = REFUSED[name]
    framework = started()
    with pytest.raises(ValueError) as refused:
        framework.function(BY_NAME["check_server_args"].target)(arguments(**changes))
    assert str(refused.value).startswith(f"eagle_kernels: the attention backend eagle_kernels does not support {text}")
    assert "; nor " not in str(refused.value)
    assert framework.calls == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"enable_custom_logit_processor": True}, "--enable-custom-logit-processor"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH; use EAGLE, EAGLE3, NEXTN or STANDALONE"),
    ],
)
@pytest.mark.parametrize("rule", ["coins", "match"])
def test_what_match_refuses(started, monkeypatch, changes, text, rule):
    monkeypatch.setenv(parts.RULE, rule)
    framework = started("verify", attention_backend="triton")
    check = framework.function(BY_NAME["check_server_args"].target)
    given = arguments(attention_backend="triton", **changes)
    if rule == "coins":
        assert check(given) == BY_NAME["check_server_args"].target
        return
    with pytest.raises(ValueError, match=f"{parts.RULE}=match does not support {text}$"):
        check(given)


@pytest.mark.parametrize(("variable", "is_refused"), [("draft", True), ("none", False), (None, False)])
def test_match_without_the_part_that_samples(started, monkeypatch, caplog, variable, is_refused):
    """Where other parts are on it is refused, and where the plug-in is off the log says that nothing matches."""
    told = f"{parts.RULE}=match needs the part verify: {parts.VARIABLE}=verify, or --attention-backend eagle_kernels"
    monkeypatch.setenv(parts.RULE, "coins")
    check = started(variable or "none", attention_backend="triton").function(BY_NAME["check_server_args"].target)
    monkeypatch.setenv(parts.RULE, "match")
    if is_refused:
        with pytest.raises(ValueError, match=f"^eagle_kernels: {told}$"):
            check(arguments(attention_backend="triton"))
        return
    check(arguments(attention_backend="triton"))
    assert f"{told}; SGLang samples by its own rule" in caplog.text


def test_it_names_all_reasons(framework):
    given = arguments(device="cpu", speculative_eagle_topk=17)
    assert len(guards.refusals(given)) == 2
    with pytest.raises(ValueError, match="; nor --speculative-eagle-topk 17"):
        guards.check_server_args(None, given)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_backend": "triton", "device": "cpu"}, {}, {"speculative_algorithm": None, "dcp_size": 1},
        {"model_is_hybrid_swa": True, "disable_hybrid_swa_memory": True}, {"kv_cache_dtype": "fp8_e4m3"},
        {"speculative_num_draft_tokens": 256, "speculative_eagle_topk": 16, "speculative_num_steps": 16},
        {"speculative_algorithm": None, "speculative_eagle_topk": 17},
        {"attention_backend": "triton", "prefill_attention_backend": "eagle_kernels",
         "decode_attention_backend": "eagle_kernels"},
        {"prefill_attention_backend": "fa3", "speculative_attention_mode": "decode"},
        {"prefill_attention_backend": "triton", "speculative_algorithm": None},
    ],
    ids=range(10),
)  # fmt: skip
def test_it_does_not_refuse(framework, changes):
    assert guards.refusals(arguments(**changes)) == []


def test_sizes_are_refused_from_where_our_ops_refuse_them_on(framework):
    """Beams, keys of all levels and candidates of all levels, each up to its limit."""
    for topk in (1, 2, 3, 4, 8, 15, 16, 17):
        edges = [512 // topk, 1 + (4096 - topk) // topk**2]
        for steps in {1, 2, *(edge + step for edge in edges for step in (-1, 0, 1))}:
            fits = topk <= 16 and topk * steps <= 512 and topk + (steps - 1) * topk**2 <= 4096
            given = arguments(speculative_eagle_topk=topk, speculative_num_steps=steps)
            assert (guards.refusals(given) == []) == fits, (topk, steps)
    for nodes in (1, 2, 255, 256, 257):
        assert (guards.refusals(arguments(speculative_num_draft_tokens=nodes)) == []) == (nodes <= 256)


def test_the_interpreter_needs_no_gpu(framework, monkeypatch):
    monkeypatch.setattr(guards, "is_interpreting", lambda: True)
    assert guards.refusals(arguments(device="cpu")) == []


@pytest.mark.parametrize("value", ["none", "verify"])
def test_the_backend_without_its_part_is_refused(started, value):
    framework = started(value, attention_backend="triton")
    with pytest.raises(ValueError, match="needs the part attention, which EAGLE_KERNELS_SGLANG leaves out"):
        framework.function(BY_NAME["check_server_args"].target)(arguments())


# trees with pages

PAGE_TREES = (
    "speculative_eagle_topk > 1 with page_size > 1 is only supported on ('flashinfer', 'fa3', 'triton'); "
    "got attention_backend={backend!r}. Use page_size == 1 or one of those backends."
)


@pytest.mark.parametrize(
    ("error", "swallowed"),
    [
        (ValueError(PAGE_TREES.format(backend="eagle_kernels")), True),
        (ValueError(PAGE_TREES.format(backend="flashmla")), False),
        (ValueError("EAGLE does not support 'eagle_kernels'"), False),
        (RuntimeError(PAGE_TREES.format(backend="eagle_kernels")), False),
    ],
    ids=["ours", "another backend", "another error", "another class"],
)
def test_only_the_refusal_of_pages_is_swallowed(error, swallowed):
    def original(server_args):
        raise error

    if swallowed:
        assert guards.handle_eagle_family(original, arguments()) is None
        return
    with pytest.raises(type(error)) as raised:
        guards.handle_eagle_family(original, arguments())
    assert raised.value is error


def test_what_sglang_says_of_other_trees_passes_through():
    original = lambda *given, **options: (given, options)  # noqa: E731
    assert guards.handle_eagle_family(original, 1, 2, three=3) == ((1, 2), {"three": 3})


# the preset of naive EAGLE


def test_the_preset_chooses_the_drafts(started, monkeypatch):
    """Where the user named none, with any part or without: one draft by a chain."""
    framework = started("none", attention_backend="triton")
    choose = framework.function(BY_NAME["_auto_choose_speculative_params"].target)
    assert choose(arguments(), "LlamaForCausalLM") == BY_NAME["_auto_choose_speculative_params"].target
    monkeypatch.setenv(parts.PRESET, "naive")
    assert choose(arguments(), "LlamaForCausalLM") == (1, 1, 2)


NAIVE = {"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2}


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("value", [None, "none", "verify"])
def test_what_the_preset_refuses(started, monkeypatch, value, is_named):
    """Other drafts and, unless it is named as an algorithm, other algorithms."""
    monkeypatch.setattr(parts, "_is_naive", is_named)
    if not is_named:
        monkeypatch.setenv(parts.PRESET, "naive")
    target = BY_NAME["check_server_args"].target
    check = started(value, attention_backend="triton").function(target)
    assert check(arguments(attention_backend="triton", **NAIVE)) == target
    who = "--speculative-algorithm NAIVE_EAGLE" if is_named else parts.PRESET
    told = rf"{who} gives steps, topk and draft tokens \(1, 1, 2\), and the server has --speculative-num-steps 3, "
    with pytest.raises(ValueError, match=told):
        check(arguments(attention_backend="triton", **NAIVE | {"speculative_num_steps": 3}))
    if not is_named:
        with pytest.raises(ValueError, match=f"{who} needs --speculative-algorithm EAGLE, EAGLE3, NEXTN or STAND"):
            check(arguments(attention_backend="triton", **NAIVE | {"speculative_algorithm": None}))


def alias(algorithm, draft, trust_remote_code=False, kwargs=None):
    """SGLang's own resolution of names."""
    return "EAGLE" if algorithm == "NEXTN" else algorithm


class Algorithms:
    """SGLang's SpeculativeAlgorithm, with the hook around `from_string`."""

    known = ("EAGLE", "EAGLE3", "NGRAM")

    @classmethod
    def from_string(cls, name):
        return guards.know_algorithm(Algorithms._from_string, cls, name)

    def _from_string(cls, name):
        if name.upper() not in cls.known:
            raise ValueError(f"Unknown speculative algorithm name: {name}")
        return name.upper()


def resolve(algorithm, draft=None, known=Algorithms.known, original=alias, architectures=("LlamaForCausalLM",)):
    """Returns what an algorithm is resolved to, and the preset that then holds."""
    config = SimpleNamespace(architectures=list(architectures))
    modules = {
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": type("Known", (Algorithms,), {"known": known})},
        "sglang.srt.utils.hf_transformers.config": {"get_config": lambda *args, **options: config},
    }
    with stub.installed(modules):
        return guards.resolve_algorithm(original, algorithm, draft, trust_remote_code=False, kwargs={}), parts.preset()


HEAD = {"draft": "head", "architectures": ["LlamaForCausalLMEagle3"]}


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({"algorithm": "NAIVE_EAGLE"}, ("EAGLE", (1, 1, 2))),
        ({"algorithm": "NAIVE_EAGLE", "draft": "head"}, ("EAGLE", (1, 1, 2))),
        ({"algorithm": "NAIVE_EAGLE"} | HEAD, ("EAGLE3", (1, 1, 2))),
        ({"algorithm": "NEXTN"}, ("EAGLE", None)),
        ({"algorithm": "EAGLE3"} | HEAD, ("EAGLE3", None)),
        ({"algorithm": None}, (None, None)),
        # a SGLang that has the name, as an algorithm or as another one's
        ({"algorithm": "NAIVE_EAGLE", "known": (*Algorithms.known, "NAIVE_EAGLE")}, ("NAIVE_EAGLE", None)),
        ({"algorithm": "NAIVE_EAGLE", "original": lambda *args, **options: "EAGLE"}, ("EAGLE", None)),
    ],
)
def test_naive_eagle_is_an_algorithm(monkeypatch, given, resolved):
    """One that holds for the server that names it, and not for the next one in the same process."""
    monkeypatch.setattr(parts, "_is_naive", True)
    assert resolve(**given) == resolved


def test_naive_eagle_is_known_where_names_are_read():
    assert Algorithms.from_string("naive_eagle") == "EAGLE"
    with pytest.raises(ValueError, match="Unknown speculative algorithm name: NAIVE"):
        Algorithms.from_string("NAIVE")


# a SGLang that is not as expected


def expect_told(hook, text):
    """The server arguments, each scheduler and the backend's maker tell what is wrong with a hook."""
    given = arguments()
    for check in (
        lambda: guards.check_server_args(lambda server_args: None, given),
        lambda: guards.start_scheduler(lambda *all: pytest.fail("it starts"), "scheduler", given),
        lambda: guards.create_backend(SimpleNamespace(server_args=given)),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as told:
            patch.setenv(parts.VARIABLE, "all")
            check()
        assert text in str(told.value) and hook.target in str(told.value)
        assert f"use a version in {hooks.TESTED[0]}..{hooks.TESTED[-1]}" in str(told.value)


def gone(hook) -> str:
    """What is said of a function that is not there; every class has a constructor, that of `object`."""
    return f"{hook.target} takes self, args, kwargs" if name_of(hook) == "__init__" else f"{hook.target} does not exist"


def test_a_module_that_is_gone_is_told(framework):
    plugin.register()
    del sys.modules["sglang.srt.speculative.eagle_utils"]
    for name in ("build_tree_kernel_efficient", "eagle_sample", "verify_tree_greedy_func"):
        expect_told(BY_NAME[name], gone(BY_NAME[name]))


@CHECKED
@pytest.mark.parametrize("change", ["removed", "renamed"])
def test_a_function_that_is_gone_is_told(framework, hook, change):
    owner, name = framework.owner(hook.target)
    if change == "renamed":
        setattr(owner, name + "_v3", getattr(owner, name))
    delattr(owner, name)
    plugin.register()
    assert hook.target not in framework.hooks
    framework.apply_hooks()
    expect_told(hook, gone(hook))


@CHECKED
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_parameter_with_another_name_is_told(hook, place):
    index = 0 if place == "first" else len(hook.parameters) - 1
    changed = (*hook.parameters[:index], "renamed", *hook.parameters[index + 1 :])
    framework = stub.Framework(FUNCTIONS | {hook.target: changed})
    with stub.installed(framework.modules):
        plugin.register()
        assert hook.target not in framework.hooks
        framework.apply_hooks()
        found, expected = ", ".join((*changed, "more")), ", ".join(hook.parameters)
        expect_told(hook, f"{hook.target} takes {found}; expected first {expected}")


@pytest.mark.parametrize("hook", hooks.GUARDS, ids=name_of)
def test_parts_that_are_asked_for_by_name_need_the_guards(framework, monkeypatch, hook):
    """Where guards are gone, nothing else might tell that the parts are not on."""
    owner, name = framework.owner(hook.target)
    delattr(owner, name)
    monkeypatch.setenv(parts.VARIABLE, "none")
    plugin.register()
    monkeypatch.setenv(parts.VARIABLE, "verify")
    with pytest.raises(SystemExit, match=f"not as the plug-in expects: {gone(hook)}"):
        plugin.register()


@CHECKED
def test_a_hook_that_is_not_in_place_is_told(framework, hook):
    """As where SGLANG_PLUGINS leaves the plug-in out, or another one puts a function of its own in the place."""
    plugin.register()
    framework.apply_hooks()
    guards.check_hooks(frozenset(parts.PARTS))
    owner, name = framework.owner(hook.target)
    setattr(owner, name, framework.function(hook.target).__wrapped__)
    expect_told(hook, f"{hook.target} is not hooked; is the plug-in filtered out by SGLANG_PLUGINS?")


def test_a_plug_in_that_was_filtered_out_is_told(framework):
    with pytest.raises(RuntimeError) as told:
        guards.create_backend(SimpleNamespace(server_args=arguments()))
    assert all(f"{hook.target} is not hooked" in str(told.value) for hook in ALL)


def test_hooks_of_others_around_ours_are_no_fault(framework):
    plugin.register()
    framework.apply_hooks()
    for target in FUNCTIONS:
        framework.hooks[target] = [(lambda original, *args, **options: original(*args, **options), None)]
    framework.apply_hooks()
    guards.check_hooks(frozenset(parts.PARTS))


@pytest.mark.parametrize("part", sorted({hook.part for hook in hooks.HOOKS}))
def test_parts_that_are_off_need_nothing(framework, part):
    plugin.register()
    framework.apply_hooks()
    for hook in hooks.HOOKS:
        if hook.part != part:
            owner, name = framework.owner(hook.target)
            delattr(owner, name)
    guards.check_hooks(frozenset({part}))
    guards.check_hooks(frozenset())


# drafts, and parts that SGLang passes by


@pytest.mark.parametrize("name", ["create_decode_backend", "create_draft_extend_backend"])
@pytest.mark.parametrize(("draft", "base"), [(None, "triton"), ("fa3", "eagle_kernels")])
def test_drafts_with_another_backend_are_sglang_s(name, draft, base):
    runner = SimpleNamespace(server_args=arguments(attention_backend=base))
    factory = SimpleNamespace(draft_attn_backend=draft, draft_model_runner=runner, speculative_num_steps=5, topk=4)
    assert getattr(guards, name)(lambda given: ("original", given is factory), factory) == ("original", True)


@pytest.mark.parametrize(("draft", "base"), [(None, "eagle_kernels"), ("eagle_kernels", "triton")])
def test_one_step_of_drafting_has_no_levels(draft, base):
    runner = SimpleNamespace(server_args=arguments(attention_backend=base))
    factory = SimpleNamespace(draft_attn_backend=draft, draft_model_runner=runner, speculative_num_steps=1, topk=4)
    assert guards.create_decode_backend(lambda given: pytest.fail("SGLang's"), factory) is None


@pytest.mark.parametrize("missed", [["attention"], ["verify"], ["draft"], ["draft", "verify"], []], ids=" ".join)
def test_a_part_that_sglang_passes_by_is_told(missed):
    on = {"attention", "verify", "draft"}
    parts.turn_on(frozenset(on | {"nn"}))
    for part in on.difference(missed):
        parts.note_use(part)
    batch = SimpleNamespace(forward_mode=stub.Mode.DECODE)
    verify = lambda: guards.run_eagle_verify(lambda *given, **options: (given, options), batch, topk=4)  # noqa: E731
    if not missed:
        assert verify() == ((batch,), {"topk": 4})
        return
    with pytest.raises(RuntimeError, match=f"{', '.join(missed)} did not run in SGLang's verification step"):
        verify()


def test_idle_batches_and_parts_that_are_off_are_no_fault():
    original = lambda batch: "verified"  # noqa: E731
    assert guards.run_eagle_verify(original, SimpleNamespace(forward_mode=stub.Mode.DECODE)) == "verified"
    parts.turn_on(frozenset(parts.PARTS))
    assert guards.run_eagle_verify(original, SimpleNamespace(forward_mode=stub.Mode.IDLE)) == "verified"
