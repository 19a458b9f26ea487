"""The client of Ollama, against a server of our own that answers as it does."""

import json
import threading
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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
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
    with pytest.raises(OllamaError, match="/api/generate: 404 .*model 'other' not found"):
        ollama.generate("other", "Why?")


@pytest.mark.parametrize(
    ("tags", "message"),
    [("{}", "/api/tags: {}"), ("<html>", "Expecting value"), ("[]", r"\[\]"), ('{"error": "no\\nroom"}', "no.*room")],
)
def test_a_server_that_is_something_else(server, tags, message):
    server.tags = tags
    with pytest.raises(OllamaError, match=message) as caught:
        ollama.list_models()
    assert "\n" not in str(caught.value) and not ollama.is_running()


@pytest.mark.parametrize("host", ["localhost:abc", "my host", "nothing://box"])
def test_a_host_that_is_no_address(host, capsys):
    assert not ollama.is_running(host)
    assert ollama.main(["--host", host]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("Ollama at ") and "not running (" in shown and shown.count("\n") == 1


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
        ("https://box/", "https://box"), ("0.0.0.0", "http://localhost:11434"), ("0.0.0.0:80", "http://localhost:80"),
        ("10.0.0.0", "http://10.0.0.0:11434"),
    ],
)  # fmt: skip
def test_addresses(host, url, monkeypatch):
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    assert ollama._base_url(host) == url
