"""Chat templates: conversations as the text that a model was trained on."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ...runtime.values import first_line, shown, utf8_fault
from .checkpoint import naming, read_json
from .protocol import ModelError

_FORM = "a list of dicts with role and content"
_GIVEN = {"messages", "add_generation_prompt"}
_STANDARD_MARKS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}


class ChatTemplate:
    """Writes conversations by the Jinja templates of a model, which have `sources` and the names of special tokens."""

    def __init__(self, sources: Mapping[str, str], marks: Mapping[str, str]) -> None:
        self._sources, self._marks = sources, marks

    def write(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Returns the text of the messages; `add_generation_prompt`: up to where the next answer begins."""
        name = "tool_use" if variables.get("tools") is not None and "tool_use" in self._sources else "default"
        source = self._sources.get(name) if len(self._sources) != 1 else next(iter(self._sources.values()))
        if source is None:
            raise ValueError(f"the model has chat templates {sorted(self._sources)}, of which none is 'default'")
        template, known = _compiled(source)
        unknown = sorted(name for name, value in variables.items() if value is not None and name not in known)
        if unknown:
            others = ", ".join(sorted(known - _GIVEN - self._marks.keys())) or "none"
            raise ValueError(f"the chat template has no variable {unknown[0]}; those it has: {others}")
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return template.render({**given, **self._marks, **variables})
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template refuses this conversation: {first_line(error)}") from None


class Chats:
    """Gives a tokenizer `encode_chat`.
    num_ids: how many ids the model has, if more than the tokenizer.
    read_chat: returns its chat template, if it has one."""

    def __init__(self, vocab_size: int, num_ids: int, read_chat: Callable[[], ChatTemplate | None] | None) -> None:
        self.vocab_size, self.num_ids, self.read_chat = vocab_size, max(num_ids, vocab_size), read_chat

    def allow(self, num_ids: int) -> None:
        """Takes more ids than the folder said, if the model has them."""
        self.num_ids = max(self.num_ids, num_ids)

    @property
    def chat(self) -> ChatTemplate | None:
        """Returns the chat template, or None."""
        return None if self.read_chat is None else self.read_chat()

    def encode_with_spans(self, text: str, is_marked: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids, and for each the characters [begin, end) of the text that it stands for. A text that is
        marked has its own marks of beginning and end, and gets no others."""
        raise NotImplementedError

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any
    ) -> list[int]:
        """Returns the ids of a conversation."""
        if self.chat is None:
            places = "neither chat_template in tokenizer_config.json nor chat_template.jinja"
            ways = "write the prompt as text, or give a tokenizer= that has one"
            raise ValueError(f"the model has no chat template, {places}; {ways}")
        text = self.chat.write(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode_with_spans(text, is_marked=True)[0]


@cache
def _compiled(source: str) -> tuple[Any, set[str]]:
    """Returns a template as transformers would read it, and the names that it takes from outside."""
    try:
        from jinja2 import TemplateSyntaxError, ext, meta, sandbox
    except ImportError:
        raise ModelError("a chat template needs jinja2: pip install jinja2") from None

    class Generation(ext.Extension):
        """Reads the marks of answers, `{% generation %}`, which leave no text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise ValueError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        known = meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
        return environment.from_string(source), known
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template cannot be read: line {error.lineno}: {first_line(error)}") from None


class FolderChat:
    """Returns the chat template of a folder, which is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> ChatTemplate | None:
        return self._template

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return read_chat_template(self._folder)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Returns the chat template of a model folder, as transformers would find it; None if there is none."""
    with naming(folder):
        config = read_json(folder / "tokenizer_config.json", is_optional=True)
        paths = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
        paths |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
        sources = {} if paths else _sources(config.get("chat_template"))
        for name, path in paths.items():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{path.name} cannot be read: {first_line(error)}") from None
        marks = _read_marks(folder, config)
    return ChatTemplate(sources, marks) if sources else None


def _read_marks(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a folder by name, from whichever of its files transformers takes them."""
    # written by versions before `added_tokens_decoder`, beside which it counts no more
    older = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json", is_optional=True)
    named = older | {name: mark for name, mark in config.items() if mark is not None}
    for each in (config, older):
        extra = each.get("extra_special_tokens")
        named |= extra if isinstance(extra, dict) else {}
    named |= {name: mark for name, mark in older.items() if name in _STANDARD_MARKS}
    marks = {name: mark.get("content") if isinstance(mark, dict) else mark for name, mark in named.items()}
    return {name: mark for name, mark in marks.items() if name.endswith("_token") and isinstance(mark, str)}


def chat_template_of(tokenizer: Any) -> ChatTemplate | None:
    """Returns the chat template of a tokenizer of transformers; None if it has none."""
    sources = _sources(getattr(tokenizer, "chat_template", None))
    return ChatTemplate(sources, tokenizer.special_tokens_map) if sources else None


def _sources(value: Any) -> dict[str, str]:
    """Returns the source of each template by its name."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = {each.get("name"): each.get("template") for each in value}
    sources = value if isinstance(value, dict) else {"default": value} if value else {}
    if not all(isinstance(text, str) for item in sources.items() for text in item):
        raise ModelError(f"chat_template must be a text, or a list of named templates, got {shown(value)}")
    return dict(sources)


def _read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the messages of a conversation, which it checks, without what says nothing."""
    if not messages:
        raise ValueError(f"encode_chat: messages must hold at least one message, got {shown(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"encode_chat: messages must be {_FORM}, but message {index} is {shown(message)}")
        role, content = message.get("role"), message.get("content")
        if not (isinstance(role, str) and role):
            raise ValueError(f"encode_chat: role of message {index} must be a text, got {shown(role)}")
        is_parts = isinstance(content, (list, tuple)) and content and all(isinstance(part, Mapping) for part in content)
        if not (isinstance(content, str) or is_parts or (content is None and message.get("tool_calls"))):
            rule = "be a text or a list of parts (dicts)"
            raise ValueError(f"encode_chat: content of message {index} must {rule}, got {shown(content)}")
        fault = utf8_fault(content) if isinstance(content, str) else None
        if fault is not None:
            raise ValueError(f"encode_chat: content of message {index} must be UTF-8, {fault}")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def encode_chat(
    tokenizer: Any, messages: Any, add_generation_prompt: bool, variables: dict[str, Any]
) -> list[int] | list[list[int]]:
    """Returns the ids of a conversation, or of each of several; see `EAGLEInference.encode_chat`."""
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"encode_chat: messages must be {_FORM}, got {shown(messages)}")
    is_single = not (messages and all(isinstance(each, (list, tuple)) for each in messages))
    conversations = [_read_messages(each) for each in ([messages] if is_single else messages)]
    encode = getattr(tokenizer, "encode_chat", None)
    if encode is None:
        raise ValueError(f"encode_chat: {type(tokenizer).__name__} has no method encode_chat; write the prompt as text")
    try:
        prompts = [encode(each, add_generation_prompt, **variables) for each in conversations]
    except ValueError as error:
        kind = ModelError if isinstance(error, ModelError) else ValueError
        raise kind(f"encode_chat: {str(error).removeprefix('encode: ')}") from None
    if not all(prompts):
        raise ValueError("encode_chat: the chat template writes nothing for this conversation")
    return prompts[0] if is_single else prompts
