"""The comparison of texts inside a server, without SGLang and without a GPU: a made engine takes SGLang's place."""

import itertools
import json

import pytest
import torch

from bench import run
from bench.apps import server, server_rows, server_texts
from bench.apps.server_rows import PLUGGED_ROWS, STOCK_ROWS, TREES
from bench.apps.server_texts import SAME, TIE, verdict
from bench.peers.sglang_texts import GRAPH_SIZES, MAX_RUNNING, TextOrder

# Its texts follow from their prompts. FAKE is what goes wrong in plugged engines.
FAKE = """
import asyncio, os, types

__version__ = "0.5.17"
ALL = "attention,verify,draft,kv,nn"


class Engine:
    def __init__(self, **arguments):
        self.server_args = types.SimpleNamespace(**arguments)
        self.loop, self.aborted = asyncio.new_event_loop(), set()
        self.tokenizer_manager = types.SimpleNamespace(abort_request=lambda rid: self.aborted.add(rid))
        is_plugged = os.environ["SGLANG_PLUGINS"] == "eagle_kernels"
        self.fault = os.environ.get("FAKE") if is_plugged else os.environ.get("FAKE_STOCK")
        parts = os.environ.get("EAGLE_KERNELS_SGLANG", "all" if arguments["attention_backend"] != "triton" else "")
        parts = ALL if parts == "all" else parts
        for part in filter(None, parts.split(",")) if is_plugged else ():
            if self.fault != f"no {part}":
                print(f"eagle_kernels: {part} is in use", flush=True)
        assert arguments["speculative_algorithm"] == "EAGLE3"

    async def async_generate(self, input_ids, sampling_params, rid, stream):
        assert stream and sampling_params["ignore_eos"] and 0 < len(input_ids) <= 400
        return self._outputs(input_ids, sampling_params, rid)

    async def _outputs(self, prompt, parameters, rid):
        if self.fault == "raises" and rid.startswith("alone-0001"):
            raise ValueError("no room")
        number, is_sampled = parameters["max_new_tokens"], parameters["temperature"] > 0
        tokens = [(sum(prompt) + 7 * place) % 256 for place in range(number)]
        if self.fault == "token" and len(prompt) == 127 and rid.startswith("joining"):
            tokens[5] = 255 - tokens[5]
        accept = 4 * {"accept": 0.98, "sampled": 0.96 if is_sampled else 1}.get(self.fault, 1)
        for end in range(1, number + 1, 4):
            meta_info = {"spec_verify_ct": (end - 1) / accept, "finish_reason": None}
            if rid in self.aborted:
                if self.fault == "abort":
                    tokens[0] = 300
                yield {"output_ids": tokens[:end], "meta_info": meta_info | {"finish_reason": {"type": "abort"}}}
                return
            yield {"output_ids": tokens[:end], "meta_info": meta_info}
            await asyncio.sleep(0)
        if self.fault == "leak" and rid.startswith("sampled-0003"):
            print("ValueError: pool memory leak detected! [full] total=9, available=8", flush=True)
            os._exit(1)
        meta_info = {"spec_verify_ct": (number - 1) / accept, "finish_reason": {"type": "length"}}
        meta_info["spec_accept_histogram"] = [0, number, 0, number]
        yield {"output_ids": tokens, "meta_info": meta_info}

    def shutdown(self):
        pass
"""


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Returns a function that checks texts with the made SGLang, and returns the exit status."""
    for name in ("FAKE", "FAKE_STOCK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_rows, "IDLE_S", 0.01)
    monkeypatch.setattr(server_rows, "SAMPLED_ROUNDS", 1)
    (tmp_path / "site" / "sglang").mkdir(parents=True)
    (tmp_path / "site" / "sglang" / "__init__.py").write_text(FAKE)
    options = ["--sglang", str(tmp_path / "site"), "--shape", "small", "--logs", str(tmp_path / "logs")]
    return lambda *more: run.main(["--app", "server", "--check-only", *options, *more, "--results", "none"])


def table(said):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line[:1] == "|"]


@pytest.mark.slow
def test_equal_texts_pass(texts, capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(server.Bench, "keep", lambda bench, line: kept.append(line))
    assert texts("--jobs", "2") == 0
    assert [(line["case"], line["system"], line["temperature"]) for line in kept] == [
        (f"pair {row.tree}", system, temperature)
        for system, rows in (("sglang+triton", STOCK_ROWS), ("sglang+eagle_kernels", PLUGGED_ROWS))
        for row in rows
        if row.asked in ("", None, "all")
        for temperature in (0.0, 0.8)
    ]
    assert all(line["accept_length"] == 3.0 and line["accepted"][1] == line["accepted"][3] > 3000 for line in kept)
    header, _, *rows = table(capsys.readouterr().out)
    assert [row[0] for row in rows] == [row.name for row in (*STOCK_ROWS, *PLUGGED_ROWS)]
    for cells, row in zip(rows, (*STOCK_ROWS, *PLUGGED_ROWS)):
        line = dict(zip(header, cells))
        num = 32 * 2 + 5 - 4 - (32 if row.is_stock else 0)  # four join with sampling
        assert line["same texts"] == f"{num} of {num}" and line["ties"] == "0" and int(line["aborted"]) >= 5
        assert line["tokens a step"] == "4.000, stock 4.000" and line["sampled"] == "4.000, stock 4.000 (± 0.000)"
        assert line["fault"] == "" and line["page"] == str(row.page_size)


@pytest.mark.cross
@pytest.mark.parametrize(
    "fault, told",
    [
        ("token", "default: request 18 (127 + 40 tokens, joining): token 5 is "),
        ("abort", "tokens, joining, aborted): token 300 is none of the vocabulary"),
        ("accept", "default: greedy: accepted length 3.920, stock's is 4.000\n"),
        ("sampled", "default: sampled: accepted length 3.840, stock's is 4.000, standard error of the difference 0.0"),
        ("leak", "default: SGLang says: memory leak detected (the whole log: "),
        ("raises", "default: wave alone: ValueError: no room\n"),
        ("no kv", "default: the plug-in's kv was not used\n"),
    ],
)
def test_a_difference_fails(fault, told, texts, capsys, monkeypatch):
    monkeypatch.setenv("FAKE", fault)
    assert texts("--row", "default") == 1
    said = capsys.readouterr().out
    assert told in said and "stock-8/5/32: started in 0 s, served all\n" in said and "chain" not in said


@pytest.mark.slow
def test_a_stock_engine_that_fails_is_named(texts, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_STOCK", "raises")
    assert texts("--row", "attention") == 1
    said = capsys.readouterr().out
    assert "stock-chain: wave alone: ValueError: no room\n" in said and "\nattention: " not in said.partition("|")[2]
    monkeypatch.setenv("FAKE_STOCK", "token")  # it differs from itself, which is no fault of the plug-in
    assert texts("--row", "attention") == 0
    assert "stock-chain differs from itself: request 18 (" in capsys.readouterr().out


def test_without_sglang(tmp_path, capsys, monkeypatch):
    arguments = ["--app", "server", "--check-only", "--logs", str(tmp_path), "--shape", "small"]
    monkeypatch.setattr(server.Installation, "is_here", lambda _: False)
    assert run.main(arguments) == 2
    assert capsys.readouterr().out == "SGLang is not installed; --sglang names a folder that holds it\n"
    for wrong in (["--row", "stock-chain"], ["--dtype", "float32"], ["--jobs", "0"]):
        with pytest.raises(SystemExit):
            server.parsed(wrong)


def test_rows_cover_pairs():
    values = [(row.has_graphs, row.has_overlap, row.page_size > 1, row.tree == "chain") for row in PLUGGED_ROWS]
    for first, second in itertools.combinations(range(4), 2):
        assert len({(row[first], row[second]) for row in values}) == 4
    assert {row.page_size for row in PLUGGED_ROWS} == {1, 16, 64} and {row.tree for row in PLUGGED_ROWS} == set(TREES)
    assert len(STOCK_ROWS) + len(PLUGGED_ROWS) == 8


@pytest.mark.parametrize("row", [*STOCK_ROWS, *PLUGGED_ROWS], ids=lambda row: row.name)
def test_an_engine_has_room(row, tmp_path):
    traffic = server_rows.traffic()
    order = TextOrder(
        row.backend, row.asked, row.page_size, row.has_graphs, row.has_overlap, row.has_radix_cache, "float16", traffic,
        tree=TREES[row.tree],
    )  # fmt: skip
    arguments = order.engine_arguments()
    topk, steps, nodes = order.tree
    longest = 400 + max(200, server_rows.SAMPLED_TOKENS) + nodes
    assert arguments["context_length"] > longest
    pages = -(-(longest + steps) // row.page_size) + topk * (-(-steps // row.page_size) + 1)
    assert arguments["max_total_tokens"] > MAX_RUNNING * pages * row.page_size + 32 * 640  # beside cached texts
    assert ("cuda_graph_bs_decode" in arguments) == row.has_graphs != arguments.get("disable_cuda_graph", False)
    assert max(GRAPH_SIZES) < MAX_RUNNING < len(traffic["requests"])
    assert arguments["chunked_prefill_size"] % row.page_size == 0
    assert all(0 <= token < 256 for request in traffic["requests"] for token in request["prompt"])
    assert (order.needed == frozenset()) == row.is_stock == (not order.is_plugged)
    json.dumps(order.for_child(tmp_path))


def test_a_text_within_rounding_is_a_tie(monkeypatch):
    """The model itself says which tokens are near: its own greedy text, and one with the second best token."""
    prompt, stock = list(b"def f(x):\n    "), []
    for _ in range(6):
        stock.append(best(prompt + stock)[0])
    assert max(server_texts.gaps(prompt, stock)) == 0
    assert verdict(prompt, stock, stock, False, 0.0) == SAME
    other = stock[:3] + [best(prompt + stock[:3])[1]]
    for _ in range(2):
        other.append(best(prompt + other)[0])
    gap = max(server_texts.gaps(prompt, other))
    assert gap > 0 and verdict(prompt, other, stock, False, gap) == TIE
    assert verdict(prompt, other, stock, False, 0.9 * gap).startswith(f"token 3 is {other[3]}, stock's is {stock[3]};")
    wrong = other[:5] + [best(prompt + other[:5])[1]]  # what follows the tie counts too
    monkeypatch.setattr(server_texts, "gaps", lambda _, text: [0.0] * 5 + [99.0] * (len(text) - 5))
    assert "that of token 5 is 99.000 below" in verdict(prompt, wrong, stock, False, gap)
    assert verdict(prompt, stock[:4], stock, True, 0.0) == SAME
    assert verdict(prompt, stock[:4], stock, False, 0.0) == "4 tokens, stock has 6"
    assert verdict(prompt, [], stock, True, 0.0) == SAME


def best(tokens):
    ids = torch.tensor([tokens])
    logits = server_texts.target()(ids, server_texts.positions_of(ids), server_texts.causal_attend).logits[0, -1]
    return logits.topk(2).indices.tolist()
