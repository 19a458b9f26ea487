"""Whether an Ollama server runs here and what its models say: `python -m bench.lab.ollama [--model llama3:8b]`.

To see whether a model fits this machine before its weights are fetched, and for nothing that is measured: the server
shows no logits and no cache, quantizes as it likes, and times itself.
"""

from __future__ import annotations

import argparse
import http.client
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
    models = []
    for model in _ask(host, "/api/tags", "models", None, timeout):
        details = model.get("details") or {}
        sizes = (details.get(field) or "" for field in ("parameter_size", "quantization_level"))
        models.append(OllamaModelInfo(model["name"], *sizes, model.get("size", 0) / 1e9))
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
    options = {"num_predict": max_tokens, "temperature": temperature}
    body = {"model": model, "prompt": prompt, "stream": False, "options": options}
    return _ask(host, "/api/generate", "response", body, timeout)


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
    url = (host or os.environ.get("OLLAMA_HOST") or DEFAULT_HOST).rstrip("/")
    scheme, _, place = url.rpartition("://")
    if place.startswith("0.0.0.0"):  # what a server listens on is no address
        place = "localhost" + place.removeprefix("0.0.0.0")
    return f"{scheme or 'http'}://{place}" + ("" if ":" in place or scheme == "https" else ":11434")


def _ask(host: str | None, path: str, field: str, body: dict[str, Any] | None, timeout: float) -> Any:
    """Returns a field of the server's answer. timeout: of each read."""
    url, data = _base_url(host) + path, None if body is None else json.dumps(body).encode()
    # the server is on this machine or this network: a proxy would not find it
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with opener.open(request, timeout=timeout) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise OllamaError(f"{url}: {error.code} {error.read().decode(errors='replace') or error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # not there, too slow, no JSON, or no address
        raise OllamaError(f"{url}: {getattr(error, 'reason', None) or error!r}") from None
    if not isinstance(answer, dict) or field not in answer:  # it may find out what is wrong when it has said 200
        raise OllamaError(f"{url}: {answer!r:.200}")
    return answer[field]


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
