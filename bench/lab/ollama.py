"""Whether an Ollama server runs here and what its models say: `python -m bench.lab.ollama [--model llama3:8b]`.

To see whether a model fits this machine before its weights are fetched, and for nothing that is measured: the server
shows no logits and no cache, quantizes as it likes, and times itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import UnionType
from typing import Any, NamedTuple

DEFAULT_HOST = "http://localhost:11434"


class OllamaError(RuntimeError):
    """The server is not there, or says no; in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # the server's own words may be several


class OllamaModelInfo(NamedTuple):
    """parameter_size and quantization_level as the server says them, "" where it does not; size_gb: 10^9 bytes."""

    name: str
    parameter_size: str
    quantization_level: str
    size_gb: float


def is_running(host: str | None = None) -> bool:
    """Whether a server answers within two seconds."""
    try:
        list_models(host, timeout=2)
    except OllamaError:
        return False
    return True


def list_models(host: str | None = None, timeout: float = 10) -> list[OllamaModelInfo]:
    """What the server at host (None: $OLLAMA_HOST, else this machine) has fetched."""
    answer, models = _call(host, "/api/tags", None, timeout), []
    for model in _field(answer, "models", list):
        name, num_bytes = _field(model, "name", str), _field(model, "size", int | float, 0)
        details = _field(model, "details", dict | None) or {}
        sizes = (_field(details, field, str | None) or "" for field in ("parameter_size", "quantization_level"))
        models.append(OllamaModelInfo(name, *sizes, num_bytes / 1e9))
    return models


def generate(
    model: str,
    prompt: str,
    max_tokens: int = 128,
    temperature: float = 0.0,
    timeout: float = 120,
    host: str | None = None,
) -> str:
    """The model's answer; timeout in seconds."""
    body = {"model": model, "prompt": prompt, "stream": False}
    body["options"] = {"num_predict": max_tokens, "temperature": temperature}
    return _field(_call(host, "/api/generate", body, timeout), "response", str)


def check_and_print_status(host: str | None = None) -> bool:
    """Prints whether the server runs and what it has; returns the former."""
    print(f"Ollama at {_base_url(host)}: ", end="")
    try:
        models = list_models(host)
    except OllamaError as error:
        print(f"not running ({error})")
        return False
    print(f"running, {len(models)} models")
    if models:
        print(f"{'model':<34} {'params':>8} {'quant':>8} {'size (GB)':>10}")
    for model in models:
        print(f"{model.name:<34} {model.parameter_size:>8} {model.quantization_level:>8} {model.size_gb:>10.1f}")
    return True


def _base_url(host: str | None) -> str:
    """With http:// and the port, either of which $OLLAMA_HOST may leave out."""
    url = host or os.environ.get("OLLAMA_HOST") or DEFAULT_HOST
    url = url if "://" in url else f"http://{url}"
    scheme, _, place = url.rstrip("/").partition("://")
    place, slash, path = place.partition("/")
    place = place if ":" in place.rpartition("]")[2] or scheme == "https" else f"{place}:11434"
    place = re.sub(r"^0\.0\.0\.0(?=:|$)", "localhost", place)  # what a server listens on is no address
    return f"{scheme}://{place}{slash}{path}"


def _call(host: str | None, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
    """The server's whole answer within the timeout."""
    url = _base_url(host) + path
    data = None if body is None else json.dumps(body).encode()
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def ask() -> None:
        try:
            answer.set_result(_ask(url, data, timeout))
        except Exception as error:
            answer.set_exception(error)

    # A socket's timeout begins anew with each byte, and finding an address has none: a thread alone can be left behind.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:
        raise OllamaError(f"{url}: no whole answer within {timeout:g} s") from None


def _ask(url: str, data: bytes | None, timeout: float) -> Any:
    """timeout: of each read."""
    # the server is on this machine or this network: a proxy would not find it
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with opener.open(request, timeout=timeout) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise OllamaError(f"{url}: {error.code} {_reason(error)}") from None
    except (OSError, ValueError, http.client.InvalidURL) as error:  # not there, too slow, no JSON, or no address
        raise OllamaError(f"{url}: {getattr(error, 'reason', None) or error}") from None
    except http.client.HTTPException as error:
        raise OllamaError(f"{url}: no whole answer of HTTP: {error!r}") from None
    if isinstance(answer, dict) and answer.get("error"):  # it may find out when it has said 200
        raise OllamaError(f"{url}: {answer['error']}")
    return answer


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's own words, as `model "x" not found`."""
    try:
        return json.loads(error.read())["error"]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return error.reason


def _field(answer: Any, name: str, kind: type | UnionType, default: Any = None) -> Any:
    """default: where the answer leaves it out."""
    value = answer.get(name, default) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise OllamaError(f"the server's answer has no {name} as Ollama's has, got {value!r:.60}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the status, and what --model answers; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.lab.ollama", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="lets it answer")
    parser.add_argument("--prompt", default="Explain speculative decoding in one sentence.")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--host", help=f"of the server (default: $OLLAMA_HOST, else {DEFAULT_HOST})")
    options = parser.parse_args(arguments)
    if not check_and_print_status(options.host):
        return 1
    if options.model is None:
        return 0
    try:
        print(generate(options.model, options.prompt, options.max_tokens, options.temperature, host=options.host))
    except OllamaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
