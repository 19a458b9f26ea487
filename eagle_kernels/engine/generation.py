"""The calls of an engine that take prompts and return tokens or text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from ..runtime.values import read_flag
from .config.eagle_config import EAGLEConfig
from .models.chat_template import encode_chat
from .requests import inputs
from .requests.inputs import DEFAULT_TOKENS, Asked, OnePrompt, Params, Prompts, Seeds, SeveralPrompts
from .requests.names import takes_other_names
from .serve.lock import Unique
from .serve.output import GenerationOutput
from .serve.session import Session
from .serve.stream import TextPiece, TextStream, TokenStream, open_stream, progress_bar

# prompts of which a type checker cannot tell whether there is one, or how many samples there are
Either = Tensor | Mapping[str, Any] | OnePrompt


@takes_other_names
class Generation(Unique):
    """Holds `generate`, `stream`, `stream_text` and `encode_chat`; one prompt has a result of its own form. Type
    checkers know the form where they know that there is one prompt, and one sample of it, or that there are more."""

    session: Session
    _config: EAGLEConfig

    @overload
    def generate(
        self, input_ids: OnePrompt, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: Literal[1] = 1, seeds: Seeds = None, speculative: bool = True, progress: bool | None = None, **overrides: Any
    ) -> GenerationOutput[list[int]]: ...  # fmt: skip
    @overload
    def generate(
        self, input_ids: Either, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: int = 1, seeds: Seeds = None, speculative: bool = True, progress: bool | None = None, **overrides: Any
    ) -> GenerationOutput: ...  # fmt: skip
    @overload
    def generate(
        self, input_ids: SeveralPrompts, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: int = 1, seeds: Seeds = None, speculative: bool = True, progress: bool | None = None, **overrides: Any
    ) -> GenerationOutput[list[list[int]]]: ...  # fmt: skip

    def generate(
        self, input_ids: Prompts, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: int = 1, seeds: Seeds = None, speculative: bool = True, progress: bool | None = None, **overrides: Any
    ) -> GenerationOutput:  # fmt: skip
        """Generates up to `max_new_tokens` tokens for each prompt.

        Args:
            input_ids: One prompt, a text or [L] token ids; or several: lists of any lengths, an array or tensor [B, L].
            max_new_tokens: A request ends after its first end token or stop string, or with exactly this many tokens.
            sampling_params: `SamplingParams`, or a dict of its fields, for all prompts, or a list with one per prompt;
                may also be given as max_new_tokens. Overrides must then not name sampling.
            n: Samples of each prompt, which are equal at temperature 0; their seeds count up from the prompt's.
            seeds: One for all prompts, or one per prompt; None: fresh ones from torch's generator, see `stats.seeds`.
            speculative: False decodes plainly, with the same code and pools.
            progress: Whether a bar counts finished requests; None: for several prompts, if stderr is a terminal.
            overrides: Fields of `EAGLEConfig` and `SamplingParams` for this call, such as temperature=0.8.

        Returns:
            The new tokens: a list for one prompt; for several prompts or samples a list of lists, a prompt's samples
            side by side. Also the call's statistics and, as attributes, the log-probabilities asked for.

        Raises:
            ValueError: An argument breaks its rule, or a prompt is empty, too long or holds an invalid token id.
            RuntimeError: Requests with another configuration are still running.

        Example:
            >>> prompt = engine.tokenizer.encode("import os\\n\\ndef walk(")  # the engine of the class's example
            >>> output_ids, stats = engine.generate(prompt, 16)
            >>> engine.tokenizer.decode(output_ids), stats.mean_accept_length
            ('self, size, walk', 3.4)
        """
        stream = self._open("generate", input_ids, max_new_tokens, sampling_params, n, seeds, speculative, overrides)
        _run(stream, n, progress)
        return stream.output()

    @overload
    def stream(
        self, input_ids: OnePrompt, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: Literal[1] = 1, seeds: Seeds = None, speculative: bool = True, **overrides: Any
    ) -> TokenStream[list[int]]: ...  # fmt: skip
    @overload
    def stream(
        self, input_ids: Either, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: int = 1, seeds: Seeds = None, speculative: bool = True, **overrides: Any
    ) -> TokenStream: ...  # fmt: skip
    @overload
    def stream(
        self, input_ids: SeveralPrompts, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: int = 1, seeds: Seeds = None, speculative: bool = True, **overrides: Any
    ) -> TokenStream[list[list[int]]]: ...  # fmt: skip

    def stream(
        self, input_ids: Prompts, max_new_tokens: Asked = DEFAULT_TOKENS, *, sampling_params: Params = None,
        n: int = 1, seeds: Seeds = None, speculative: bool = True, **overrides: Any
    ) -> TokenStream:  # fmt: skip
        """Returns an iterator, for `for` and `async for`, that yields a `TokenEvent` for each token once it is known.

        Args:
            input_ids, max_new_tokens, sampling_params, n, seeds, speculative, overrides: As for `generate`. After the
                last token, the iterator's `output()` returns what `generate` would.

        Raises:
            ValueError, RuntimeError: As for `generate`; errors in the pools or in a step are raised during iteration.

        Example:
            >>> [event.token_id for event in engine.stream(prompt, 4)]  # the prompt of `generate`'s example
            [115, 101, 108, 102]
        """
        return self._open("stream", input_ids, max_new_tokens, sampling_params, n, seeds, speculative, overrides)

    def _open(
        self, caller: str, input_ids: Prompts, max_new_tokens: Asked, sampling_params: Params, n: int, seeds: Seeds,
        speculative: bool, overrides: dict[str, Any],
    ) -> TokenStream:  # fmt: skip
        """Checks the arguments of a call; returns its stream."""
        session = self.session
        session.lock.refuse(caller)
        speculative = read_flag(f"{caller}: speculative", speculative)
        prompts, is_single = inputs.read_prompts(input_ids, f"{caller}: input_ids", session.tokenizer_for)
        n = inputs.read_samples(n, len(prompts), caller)
        asked = max_new_tokens, sampling_params
        config, params = session.read_call(caller, self._config, len(prompts), *asked, seeds, overrides, n)
        prompts = [prompt for prompt in prompts for _ in range(n)]
        return open_stream(session, prompts, params, config, speculative, is_single and n == 1, caller, n)

    @overload
    def stream_text(
        self, text: OnePrompt, max_new_tokens: Asked = DEFAULT_TOKENS, *, n: Literal[1] = 1, **options: Any
    ) -> TextStream[str]: ...
    @overload
    def stream_text(
        self, text: Either, max_new_tokens: Asked = DEFAULT_TOKENS, *, n: int = 1, **options: Any
    ) -> TextStream: ...
    @overload
    def stream_text(
        self, text: SeveralPrompts, max_new_tokens: Asked = DEFAULT_TOKENS, *, n: int = 1, **options: Any
    ) -> TextStream[TextPiece]: ...

    def stream_text(self, text: Prompts, max_new_tokens: Asked = DEFAULT_TOKENS, **options: Any) -> TextStream:
        """Returns an iterator over the text that follows `text`, which may be any prompt that `generate` takes.

        It yields strings; with several prompts or n samples, it yields `TextPiece`s. `max_new_tokens` and
        `options`: as for `generate`.

        Raises:
            ValueError, RuntimeError: As for `stream`; also if there is no tokenizer, or `text` has no tokens.
        """
        tokenizer = self.session.tokenizer_for("stream_text needs")
        prompts, is_single = inputs.read_prompts(text, "stream_text: text", self.session.tokenizer_for)
        tokens = self.stream(prompts[0] if is_single else prompts, max_new_tokens, **options)
        return TextStream(tokens, tokenizer, self.session)

    @overload
    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]: ...
    @overload
    def encode_chat(
        self, messages: Sequence[Sequence[Mapping[str, Any]]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[list[int]]: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]], *,
        add_generation_prompt: bool = True, **variables: Any,
    ) -> list[int] | list[list[int]]:  # fmt: skip
        """Returns the token ids of a conversation in the target's chat template; for several, a list of lists.

        Args:
            messages: Dicts such as {"role": "user", "content": "Hello"}, or several conversations as lists of them.
            add_generation_prompt: Whether the ids end with the start of the next answer.
            variables: Other values for the template, such as tools=[...] or enable_thinking=False.

        Raises:
            ValueError: An argument breaks its rule, there is no template, or it refuses the conversation.
        """
        read_flag("encode_chat: add_generation_prompt", add_generation_prompt)
        return encode_chat(self.session.tokenizer_for("encode_chat needs"), messages, add_generation_prompt, variables)


def _run(stream: TokenStream, num_samples: int, wanted: bool | None) -> None:
    """Reads a stream to its end. Of several prompts, or if `wanted`, a bar counts the requests that have ended."""
    wanted = False if wanted is None and len(stream.requests) == num_samples else wanted
    with progress_bar("generate", len(stream.requests), "request", wanted) as bar:
        if bar is None:
            for _ in stream:
                pass
            return
        start_s, ended = time.perf_counter(), set()
        for count, event in enumerate(stream, start=1):
            if stream.requests[event.request].is_finished and event.request not in ended:
                ended.add(event.request)
                speed = count / (time.perf_counter() - start_s)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                bar.update()
