"""Calls of the engine with the types of their results: `test_types.py` has type checkers read them, and runs them."""

from collections.abc import Callable

import torch
from typing_extensions import assert_type

import eagle_kernels as ek
from eagle_kernels import types

Top = list[tuple[int, float]]
Either = list[int] | list[list[int]]


def one_prompt(engine: ek.EAGLEInference) -> None:
    result = engine.generate("ab", 2, logprobs=True, top_logprobs=1, logprob_start_len=0)
    assert_type(result, types.GenerationOutput[list[int]])
    output_ids, stats = result
    assert_type(output_ids, list[int])
    assert_type(stats, types.GenerationStats)
    assert_type(result.logprobs, list[float] | None)
    assert_type(result.top_logprobs, list[Top] | None)
    assert_type(result.prompt_logprobs, list[float | None] | None)
    assert_type(result.prompt_top_logprobs, list[Top | None] | None)
    assert_type(engine.generate([1, 2], 2).output_ids, list[int])
    assert_type(stats["seeds"], object)
    assert_type(stats.to_dict(), dict[str, object])


def several_prompts(engine: ek.EAGLEInference) -> None:
    scored, plain = ek.SamplingParams(max_new_tokens=2, logprobs=True, top_logprobs=1), {"max_new_tokens": 2}
    result = engine.generate(["ab", "c"], sampling_params=[scored, plain])
    assert_type(result, types.GenerationOutput[list[list[int]]])
    assert_type(result.output_ids, list[list[int]])
    assert_type(result.logprobs, list[list[float] | None] | None)
    assert_type(result.top_logprobs, list[list[Top] | None] | None)
    assert_type(engine.generate([[1, 2], [3]], 2, n=2).output_ids, list[list[int]])


def prompts_of_either_form(engine: ek.EAGLEInference) -> None:
    for prompt in (torch.tensor([1, 2]), torch.tensor([[1, 2]])):
        result = engine.generate(prompt, 2, logprobs=True)
        assert_type(result, types.GenerationOutput)
        assert_type(result.output_ids, Either)
        assert_type(result.logprobs, list[float] | list[list[float] | None] | None)
    for count in (1, 2):
        assert_type(engine.generate("ab", 2, n=count).output_ids, Either)


def streams(engine: ek.EAGLEInference) -> None:
    stream = engine.stream("ab", 2)
    assert_type(stream, types.TokenStream[list[int]])
    for event in stream:
        assert_type(event, types.TokenEvent)
        assert_type(event.logprob, float | None)
    assert_type(stream.requests, list[types.Request])
    assert_type(stream.output().output_ids, list[int])
    assert_type(engine.stream(["a", "b"], 2).output().output_ids, list[list[int]])
    assert_type(engine.stream({"input_ids": [1, 2]}, 2).output().output_ids, Either)


def streams_of_text(engine: ek.EAGLEInference) -> None:
    text = engine.stream_text("ab", 2)
    assert_type(text, types.TextStream[str])
    assert_type("".join(text), str)
    assert_type(text.output().output_ids, list[int])
    texts = engine.stream_text(["ab", "c"], 2)
    assert_type(texts, types.TextStream[types.TextPiece])
    for piece in texts:
        assert_type(piece, types.TextPiece)
    assert_type(texts.output().output_ids, list[list[int]])
    for count in (1, 2):
        for either in engine.stream_text("ab", 2, n=count):
            assert_type(either, str | types.TextPiece)


def requests(engine: ek.EAGLEInference) -> None:
    request = engine.submit([1, 2], ek.SamplingParams(max_new_tokens=2))
    assert_type(request, types.Request)
    assert_type(engine.step(), list[types.TokenEvent])
    engine.collect()
    engine.abort(request)
    assert_type(request.output_ids, list[int])
    assert_type(request.finish_reason, str | None)


def others(engine: ek.EAGLEInference) -> None:
    result = engine.benchmark(["ab"], 2)
    assert_type(result, types.BenchmarkResult)
    assert_type(result.plain, types.RunStats)
    assert_type(result.to_dict(), dict[str, object])
    assert_type(engine.workspace_bytes(), dict[str, int])
    assert_type(engine.next_token_logits("ab"), torch.Tensor)
    assert_type(engine.config, ek.EAGLEConfig)
    assert_type(engine.config.sampling, types.SamplingFields)
    assert_type(ek.SamplingParams(**engine.config.sampling), ek.SamplingParams)
    assert_type(engine.tokenizer, types.Tokenizer)
    assert_type(engine.tokenizer.encode("a"), list[int])
    assert_type(engine.lock, types.EngineLock)
    assert_type(engine.on_tree, Callable[[types.Verified], None] | None)


def conversations(engine: ek.EAGLEInference) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert_type(engine.encode_chat(messages), list[int])
    assert_type(engine.encode_chat([messages, messages]), list[list[int]])


def references(x: torch.Tensor) -> None:
    assert_type(ek.rms_norm(x, x[0]), types.RMSNormOutput)
    assert_type(ek.silu_and_mul.reference(x), torch.Tensor)
    assert_type(ek.silu_and_mul.__name__, str)


def keep(op: types.Operator[[torch.Tensor], torch.Tensor, [torch.Tensor], torch.Tensor]) -> None:
    """A caller's own function may take an op."""
    assert_type(op(torch.ones(2, 2)), torch.Tensor)
