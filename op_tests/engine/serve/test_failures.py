"""What goes wrong for one request, or in one step, is not the concern of others."""

import asyncio
import gc
import weakref

import pytest
import torch

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.models.protocol import KVShape, ModelError, TargetOutput
from op_tests.engine.engines import all_of, make, prompt_of
from op_tests.engine.hostile import refused
from op_tests.engine.toys import ToyModel, Walker, WalkerHead
from op_tests.engine.view import View


def test_who_cannot_run_fails_alone(target, draft):
    engine = make(draft, target, kv_cache_bytes=40_000, page_size=4)
    engine.submit([1], SamplingParams(max_new_tokens=1))
    engine.collect()
    num_pages = View(engine).pages.num_pages
    assert num_pages < 3 * (256 // 4), "the pool holds everyone, so the case proves little"
    fine = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=5))
    too_long = engine.submit([1] * 250, SamplingParams(max_new_tokens=10))
    empty = engine.submit([], SamplingParams())
    strange = engine.submit([1, 99], SamplingParams())
    engine.collect()
    assert fine.finish_reason == "length" and len(fine.output_ids) == 5
    assert "exceed the 256 tokens" in too_long.error and too_long.finish_reason == "error"
    assert "must hold at least one token" in empty.error and "the prompt holds 99" in strange.error
    tiny = make(draft, target, kv_cache_bytes=10_000, page_size=4)
    full = tiny.submit([1] * 100, SamplingParams(max_new_tokens=100))
    assert "kv_cache_bytes makes it larger" in full.error and not tiny.has_work
    with pytest.raises(ValueError, match="kv_cache_bytes makes it larger"):
        tiny.generate([1] * 100, 100)


class Odd(RuntimeError):
    """Cannot be copied."""

    def __init__(self, text, number):
        super().__init__(f"{text} {number}")


class Mute(RuntimeError):
    """Cannot be told, copied or shown."""

    def __str__(self):
        raise RuntimeError("and this neither")

    __repr__ = __copy__ = __str__


def test_an_error_that_cannot_be_told_ends_its_requests_alone(target, draft):
    engine = make(draft, target, max_batch=2)
    want = engine.generate(prompt_of(3), 9).output_ids

    def fails(verified):
        raise Mute

    engine.on_tree = fails
    first, second, waiting = (engine.submit(prompt_of(each), SamplingParams(max_new_tokens=9)) for each in (1, 2, 3))
    engine.collect()
    assert [request.error for request in (first, second, waiting)] == [
        "Mute: Mute", "RuntimeError: Mute: Mute", "Mute: Mute",
    ]  # fmt: skip
    assert "in fails" in str(first.exception.__cause__) and not View(engine).state.is_live.any()
    with pytest.raises(Mute):
        engine.generate(prompt_of(3), 9)
    engine.on_tree = None
    assert engine.generate(prompt_of(3), 9).output_ids == want


@pytest.mark.cross
@pytest.mark.parametrize("broken", ["run", "catch_up"])
@pytest.mark.parametrize("error", [MemoryError("no room"), Odd("no room", 7)])
def test_a_step_that_breaks_off_ends_its_requests_alone(target, draft, lag, monkeypatch, error, broken):
    """They say why and leave rows and pages; who waits, and who comes later, does not notice."""
    engine = make(draft, target, max_batch=2)
    want = engine.generate(prompt_of(3), 9).output_ids
    first, second, waiting = (
        engine.submit(prompt_of(number), SamplingParams(max_new_tokens=9)) for number in (1, 2, 3)
    )
    engine.is_speculating = False  # so that the draft has to catch up
    engine.step()
    engine.is_speculating = True

    def breaks(*arguments):
        raise error

    with monkeypatch.context() as patches:
        for runner in View(engine).runners:
            patches.setattr(runner, broken, breaks)
        engine.step()
    assert first.finish_reason == second.finish_reason == "error" and not waiting.is_finished
    assert "no room" in first.error and "no room" in second.error and first.exception is error
    for request in (first, second):
        assert "in breaks" in str(request.exception.__cause__) and request.exception.__traceback__ is None
    assert second.exception is not error and isinstance(second.exception, (MemoryError, RuntimeError))
    engine.collect()
    assert waiting.output_ids == want and engine.generate(prompt_of(3), 9).output_ids == want
    View(engine).check_is_empty()
    stream = engine.stream([prompt_of(1), prompt_of(2)], 9)
    monkeypatch.setattr(View(engine).runners[1], "run", breaks)
    with pytest.raises(type(error), match="no room"):
        list(stream)
    assert not engine.has_work


class Activation:
    """Something large that a forward pass holds."""


@pytest.mark.parametrize("way", ["submit", "for", "async for"])
def test_what_has_failed_holds_no_memory(target, draft, monkeypatch, way):
    """Of the frames that it was raised in, or raised from, only the places stay, in words."""
    engine, held = make(draft, target), []

    def out_of_memory(*arguments, **keywords):
        activation = Activation()
        held.append(weakref.ref(activation))
        try:
            raise KeyError(activation)
        except KeyError as error:
            raise RuntimeError("out of memory") from error

    monkeypatch.setattr(target, "forward", out_of_memory)
    gc.disable()  # what is in no cycle goes at once
    try:
        try:
            raise ValueError("of the caller, who keeps its traceback")
        except ValueError as error:
            if way != "submit":
                stream = engine.stream([1, 2], 5)
                with pytest.raises(RuntimeError, match="out of memory") as raised:
                    next(stream) if way == "for" else asyncio.run(all_of(stream))
                (request,), origin = stream.requests, raised.value.__cause__
                assert request.exception is None, "it holds the frames of the stream"
            else:
                request = engine.submit([1, 2], SamplingParams(max_new_tokens=5))
                engine.collect()
                origin = request.exception.__cause__
            assert error.__traceback__ is not None
        assert len(held) == 1 and held[0]() is None
    finally:
        gc.enable()
    assert request.error == "RuntimeError: out of memory"
    assert "in out_of_memory" in str(origin)


class Wrong(ToyModel):
    """Returns something else from a call on."""

    def __init__(self, change, since=0, **others):
        super().__init__(**others)
        self.change, self.since = change, since

    def forward(self, *args, **kwargs):
        self.since -= 1
        output = super().forward(*args, **kwargs)
        return output if self.since >= 0 else self.change(output)


def with_logits(change):
    return lambda output: output._replace(logits=change(output.logits))


WRONG = {
    "none": (lambda output: None, "with tensors in it, got None"),
    "a tensor": (lambda output: output.logits,
                 r"with tensors in it, got a tensor \[1, 1, 40\] of torch.float32 on cpu"),
    "nones": (lambda output: TargetOutput(None, None), "with tensors in it, got TargetOutput of None, None"),
    "a token less": (with_logits(lambda x: x[..., :-1]), r"with logits \[1, 1, 40\], got a tensor \[1, 1, 39\]"),
    "a token more": (with_logits(lambda x: torch.cat([x, x[..., :1]], -1)),
                     r"with logits \[1, 1, 40\], .* \[1, 1, 41\]"),
    "an axis less": (with_logits(lambda x: x[0]), r"with logits \[1, 1, 40\], got a tensor \[1, 40\]"),
    "half": (with_logits(torch.Tensor.half),
             "with logits in its dtype, torch.float32, or in float32, got .* of torch.float16"),
    "double": (with_logits(torch.Tensor.double), "with logits in its dtype, .* got a tensor .* of torch.float64"),
    "integers": (with_logits(torch.Tensor.long), "with logits in its dtype, .* of torch.int64"),
    "elsewhere": (with_logits(lambda x: x.to("meta")), "with logits on its device, cpu, got a tensor .* on meta"),
    "NaN": (with_logits(lambda x: x.clone().fill_(float("nan"))), "without NaN in its logits, got 40 of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_model_returns_is_checked(name, monkeypatch):
    """In its prompt and in steps, as a target and as a draft: an error and no text."""
    change, rule = WRONG[name]
    if name == "NaN":
        monkeypatch.setattr("eagle_kernels.runtime.check.DEBUG", True)
    config, fine = EAGLEConfig(topk=2, num_steps=2), ToyModel(seed=1)
    told = "^EAGLEInference: forward of Wrong must return TargetOutput"
    with pytest.raises(ModelError, match=rf"{told}\(logits, features\) {rule}"):
        EAGLEInference(fine, Wrong(change), config).generate([1, 2], 8)
    engine = EAGLEInference(fine, Wrong(change, since=2), config)
    with pytest.raises(ModelError, match=told):
        engine.generate([1, 2], 8)
    assert not engine.has_work
    with pytest.raises(ModelError, match=told):
        EAGLEInference(Wrong(change, since=3), fine, config).generate([1, 2], 8)
    with pytest.raises(ModelError, match=told):
        EAGLEInference(None, Wrong(change), EAGLEConfig(method="ngram")).next_token_logits([1, 2])


class WrongHead(WalkerHead):
    """Returns something else."""

    def forward(self, *args, **kwargs):
        return self.change(super().forward(*args, **kwargs))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda output: output._replace(hidden=None), r"with hidden \[1, 3, H\], got None"),
        (lambda output: output._replace(hidden=output.hidden[:, :1]),
         r"with hidden \[1, 3, H\], got a tensor \[1, 1, 32\]"),
        (lambda output: output._replace(hidden=output.hidden.half()), "with hidden in torch.float32, got .*float16"),
        (lambda output: output._replace(hidden=output.hidden.to("meta")),
         "with hidden on cpu, got a tensor .* on meta"),
        (lambda output: output._replace(logits=output.logits.mT.contiguous().mT),
         "with logits without gaps in their last axis, got"),
        (lambda output: list(output), "with tensors in it, got list"),
    ],
)  # fmt: skip
def test_what_a_head_returns_is_checked(change, rule):
    head = WrongHead()
    head.change = change
    with pytest.raises(ModelError, match=rf"forward of WrongHead must return DraftOutput\(logits, hidden\) {rule}"):
        EAGLEInference(head, Walker(), EAGLEConfig(topk=2, num_steps=2)).generate([1, 2, 3], 8)
    head.change = tuple  # which means the same
    assert EAGLEInference(head, Walker(), EAGLEConfig(topk=2, num_steps=2)).generate([1, 2, 3], 2)[0] == [4, 5]


SIZES = [("max_length", None), ("max_length", 1024.0), ("max_length", 0), ("vocab_size", "40"), ("vocab_size", [40])]
SHAPES = [
    ("kv_shape", None),
    ("kv_shape", (1, 1, 16)),
    ("kv_shape", KVShape(1, 1, 16.0)),
    ("kv_shape", KVShape(0, 1, 16)),
]
PLACES = [("device", "cpu"), ("dtype", "float32"), ("dtype", torch.float64), ("dtype", torch.ones(9, 9))]
OF_TARGETS = [("device", None), ("dtype", None), ("hidden_size", None)]
OF_HEADS = [
    *(("aux_layers", value) for value in ((99,), (-2,), "abc", None, (1.0,))),
    *(("token_shift", value) for value in (5, "1", None, True)),
    *(("draft_to_target", value) for value in ("a", torch.zeros(40), torch.zeros(3, dtype=torch.int64))),
    ("draft_to_target", torch.zeros(40, dtype=torch.int64, device="meta")),
    ("draft_vocab_size", 30),
    ("draft_vocab_size", None),
    ("num_modules", "2"),
    ("method", "x"),
]


def test_what_models_say_of_themselves_is_checked():
    """By the name of the attribute, before anything is computed."""
    kinds = [(Walker, "target_model", OF_TARGETS), (WalkerHead, "draft_model", OF_HEADS), (Walker, "draft_model", [])]
    for kind, name, others in kinds:
        for attribute, value in (*SIZES, *SHAPES, *PLACES, *others):
            model = kind()
            setattr(model, attribute, value)
            models = (None, model) if name == "target_model" else (model, Walker())
            told = refused(EAGLEInference, *models, {"method": "ngram"} if name == "target_model" else {"topk": 2})
            attribute = "draft_to_target" if (attribute, value) == ("draft_vocab_size", 30) else attribute
            assert f"EAGLEInference: {attribute} of {name} ({kind.__name__}) must " in told and ", got " in told


@pytest.mark.parametrize("layer", [1, 99, -1, "0", None, 0.0, False])
def test_layers_of_attend_are_those_of_the_pool(layer):
    class Other(Walker):
        def forward(self, tokens, positions, attend, **options):
            return super().forward(
                tokens, positions, lambda _, *rows, **given: attend(layer, *rows, **given), **options
            )

    for draft, target in ((WalkerHead(), Other()), (Other(), Walker())):
        with pytest.raises(ModelError, match=r"EAGLEInference: layer of attend must lie in 0\.\.0, .* got "):
            EAGLEInference(draft, target, EAGLEConfig(topk=2, num_steps=2)).generate([1, 2], 8)
