"""The client of Ollama, against a server of our own that answers as it does."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.lab import ollama
from bench.lab.ollama import OllamaError, OllamaModelInfo

MODELS = [
    {
        "name": "llama3:8b", "size": 4_661_224_676,
        "details": {"parameter_size": "8.0B", "quantization_level": "Q4_0", "family": "llama"},
    },
    {"name": "own:latest", "size": 0, "details": None},
]  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == "/api/tags"
        self.answer(200, self.server.tags)

    def do_POST(self):
        assert self.path == "/api/generate"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if body["model"] != "llama3:8b":
            return self.answer(404, json.dumps({"error": f"model {body['model']!r} not found"}))
        self.answer(200, json.dumps({"response": "Because.", "done": True}))

    def answer(self, status, text):
        if self.server.raw is not None:
            for place in range(0, len(self.server.raw), self.server.num_at_once):
                if not self.server.is_over.wait(0.02):
                    self.wfile.write(self.server.raw[place : place + self.server.num_at_once])
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """Found by $OLLAMA_HOST; a proxy that is set must not be asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.tags, server.bodies = json.dumps({"models": MODELS}), []
    server.raw, server.num_at_once, server.is_over = None, 1 << 20, threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.is_over.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def nobody(server, monkeypatch):
    """An address at which nobody listens any more."""
    closed = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    closed.server_close()
    monkeypatch.setenv("OLLAMA_HOST", f"http://127.0.0.1:{closed.server_port}/")


def test_models_are_listed(server):
    assert ollama.is_running()
    first = OllamaModelInfo("llama3:8b", "8.0B", "Q4_0", 4.661224676)
    assert ollama.list_models() == [first, OllamaModelInfo("own:latest", "", "", 0.0)]


def test_a_model_answers(server):
    assert ollama.generate("llama3:8b", "Why?", max_tokens=7, temperature=0.5) == "Because."
    options = {"num_predict": 7, "temperature": 0.5}
    assert server.bodies == [{"model": "llama3:8b", "prompt": "Why?", "stream": False, "options": options}]
    ollama.generate("llama3:8b", "Why?")
    assert server.bodies[1]["options"] == {"num_predict": 128, "temperature": 0.0}
    with pytest.raises(OllamaError, match="/api/generate: 404 model 'other' not found$"):
        ollama.generate("other", "Why?")


def test_a_server_that_is_something_else(server):
    cases = {
        "{}": "the server's answer has no models as Ollama's has, got None",
        "<html>": "/api/tags: Expecting value",
        "[]": "has no models",
        '{"models": ["x"]}': "has no name",
        '{"models": [{"name": "x", "size": null}]}': "has no size as Ollama's has, got None",
        '{"models": [{"name": "x", "details": "d"}]}': "has no details as Ollama's has, got 'd'",
        '{"models": [{"name": "x", "details": {"parameter_size": [7]}}]}': r"has no parameter_size .* got \[7\]",
        '{"error": "out of\\nmemory"}': "/api/tags: out of memory$",
    }
    for tags, message in cases.items():
        server.tags = tags
        check_refused(message)


def check_refused(message):
    with pytest.raises(OllamaError, match=message) as caught:
        ollama.list_models()
    assert "\n" not in str(caught.value) and not ollama.is_running()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no whole answer of HTTP: BadStatusLine.*SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "no whole answer of HTTP: IncompleteRead"),
        (b"HTTP/1.1 500 Sorry\r\nContent-Length: 100\r\n\r\n{", "/api/tags: 500 Sorry$"),
        (b"", "/api/tags: Remote end closed connection"),
    ],
)
def test_a_server_that_breaks_off(server, raw, message):
    server.raw = raw
    check_refused(message)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 Sorry\r\n\r\n"])
def test_a_server_that_trickles_does_not_outlast_the_timeout(server, head):
    """At its pace, be it of the head or of the body, the whole would take seconds."""
    server.raw, server.num_at_once = head + b" " * 200, 1 + len(head)
    start_s = time.monotonic()
    with pytest.raises(OllamaError, match="/api/generate: (no whole answer within 0.2 s|timed out)$"):
        ollama.generate("llama3:8b", "Why?", timeout=0.2)
    assert time.monotonic() - start_s < 2


@pytest.mark.parametrize("host", ["localhost:abc", "http://[::1", "my host", "nothing://box"])
def test_a_host_that_is_no_address(host, capsys):
    assert not ollama.is_running(host)
    assert ollama.main(["--host", host]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("Ollama at ") and "not running (" in shown and shown.count("\n") == 1
    assert "no whole answer" not in shown  # nobody was asked


def test_nobody_is_there(nobody, capsys):
    assert not ollama.is_running() and not ollama.check_and_print_status()
    assert "not running (http://127.0.0.1:" in capsys.readouterr().out
    with pytest.raises(OllamaError, match="refused"):
        ollama.generate("llama3:8b", "Why?")
    assert ollama.main([]) == 1


def test_the_command(server, capsys):
    assert ollama.main([]) == 0 and not server.bodies
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Ollama at http://127.0.0.1:{server.server_port}: running, 2 models"
    assert lines[2].split() == ["llama3:8b", "8.0B", "Q4_0", "4.7"]
    command = ["--model", "llama3:8b", "--prompt", "Why?", "--max-tokens", "5", "--temperature", "0.1"]
    assert ollama.main(command) == 0 and capsys.readouterr().out.endswith("Because.\n")
    assert server.bodies[0]["options"] == {"num_predict": 5, "temperature": 0.1}
    assert ollama.main(["--model", "other"]) == 1
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        (None, "http://localhost:11434"), ("box", "http://box:11434"), ("box:80", "http://box:80"),
        ("https://box/", "https://box"), ("0.0.0.0", "http://localhost:11434"), ("http://[::1]", "http://[::1]:11434"),
        ("0.0.0.0:80", "http://localhost:80"), ("10.0.0.0", "http://10.0.0.0:11434"),
        ("0.0.0.0.box", "http://0.0.0.0.box:11434"), ("http://box/prefix", "http://box:11434/prefix"),
        ("https://box/a:b/", "https://box/a:b"), ("0.0.0.0/a", "http://localhost:11434/a"),
    ],
)  # fmt: skip
def test_addresses(host, url, monkeypatch):
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    assert ollama._base_url(host) == url
