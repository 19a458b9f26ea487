"""Whether an Ollama server runs here and what its models say: `python -m bench.lab.ollama [--model llama3:8b]`.

To see whether a model fits this machine before its weights are fetched, and for nothing that is measured: the server
shows no logits and no cache, quantizes as it likes, and times itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

DEFAULT_HOST = "http://localhost:11434"


class OllamaError(RuntimeError):
    """The server is not there, or says no; in one line."""


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
        details = model.get("details") or {}
        sizes = details.get("parameter_size") or "", details.get("quantization_level") or ""
        models.append(OllamaModelInfo(_field(model, "name", str), *sizes, model.get("size", 0) / 1e9))
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
    place = place if ":" in place.rpartition("]")[2] or scheme == "https" else f"{place}:11434"
    return f"{scheme}://{place.replace('0.0.0.0', 'localhost')}"  # what a server listens on is no address


def _call(host: str | None, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    url = _base_url(host) + path
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # the server is on this machine or this network: a proxy would not find it
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise OllamaError(f"{url}: {error.code} {_reason(error)}") from None
    except (OSError, ValueError) as error:  # not there, too slow, or no JSON
        raise OllamaError(f"{url}: {getattr(error, 'reason', None) or error}") from None
    return answer


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's own words, as `model "x" not found`."""
    try:
        return json.loads(error.read())["error"]
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason


def _field(answer: Any, name: str, kind: type) -> Any:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise OllamaError(f"the server's answer has no {name}; is it Ollama?")
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
