"""Several drafts in one engine, of which adaptive="auto" takes what is fastest; texts do not depend on the choice."""

import json
import shutil
from collections import Counter

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference, SamplingParams
from eagle_kernels.engine.config.several_drafts import folders_of_drafts
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.models.protocol import ModelError
from eagle_kernels.engine.step import choice as choices
from eagle_kernels.engine.step.choice import Fastest
from eagle_kernels.tools.cli.main import main
from op_tests.engine import dflash_folders, heads
from op_tests.engine.methods import SIZES
from op_tests.engine.prophets import LENGTH, PROMPT, planted_ms
from op_tests.engine.several import PROMPTS, at_random, check_drafts, drafts_for, engine_of, prophets
from op_tests.engine.toys import DEVICE, RowWalker, Walker, random_head, random_llama, write_decoder
from op_tests.engine.view import View


@pytest.mark.cross
@pytest.mark.parametrize("kind", [RowWalker, Walker])
def test_texts_are_those_of_plain_decoding(kind, lag, device, monkeypatch):
    """Whoever drafts next, greedy and sampled, in masks of any layout, with filters, penalties and several methods."""
    at_random(monkeypatch)
    engine, seeds = engine_of(kind=kind, device=device), list(range(len(PROMPTS)))
    for options in ({}, {"temperature": 0.8, "top_k": 12}, {"tree_mask_mode": "qlen_only", "frequency_penalty": 0.5},
                    {"verify_strategy": "greedy", "prefill_chunk": 5}):  # fmt: skip
        text, stats = engine.generate(PROMPTS, 40, seeds=seeds, **options)
        assert text == engine.generate(PROMPTS, 40, seeds=seeds, speculative=False, **options).output_ids
        assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("name", [*drafts_for(RowWalker(**SIZES)), pytest.param("context", marks=pytest.mark.slow)])
def test_who_has_rested_drafts_as_if_it_had_not(name, tmp_path, monkeypatch):
    """At the same place of a text the drafts are those of an engine with this draft alone, whoever drafted before."""
    if name == "context":
        target, draft = dflash_folders.pair(tmp_path)
        drafts = {"head": random_head(target, aux_layers=(1, 2, 4)), name: draft}
    else:
        target = RowWalker(**SIZES)
        drafts = drafts_for(target)
    at_random(monkeypatch, seed=1)

    def run(engine):
        for _ in range(4):
            engine.generate(PROMPTS[:2], 60, seeds=[7, 8])

    assert check_drafts(drafts, name, target, {}, run, monkeypatch) > 5


@pytest.fixture(scope="module")
def known():
    """(target, its text)"""
    target = random_llama(num_layers=4, device=DEVICE)
    plain = EAGLEInference(None, target, EAGLEConfig(method="naive"))
    return target, PROMPT + plain.generate(PROMPT, LENGTH)[0]


def settle(known, rights, num_requests, monkeypatch, ms=planted_ms):
    """(steps of each draft once all have been tried, engine); step times are planted."""
    target, text = known
    config = EAGLEConfig(adaptive="auto", topk=4, num_steps=4, num_draft_tokens=16, max_batch=4, max_length=220)
    engine, note = EAGLEInference(prophets(target, text, rights), target, config), Fastest.note
    nodes = []

    def noted(choice, number, num_rows, step_ms, tokens):
        note(choice, number, num_rows, ms(nodes[number], num_rows), tokens)

    monkeypatch.setattr(Fastest, "note", noted)
    monkeypatch.setattr(choices, "COLD_AFTER", 1)  # on a GPU, whose graphs take longer than these texts
    for _ in range(2):
        before = {each[:5]: each.steps for each in engine.candidates}
        requests = [engine.submit(PROMPT, SamplingParams(max_new_tokens=LENGTH)) for _ in range(num_requests)]
        nodes[:] = [runner.stepper.mean_nodes for runner in View(engine).plan.runners]
        engine.collect()
        assert all(request.output_ids == text[len(PROMPT) :] for request in requests)
    seen = Counter()
    for each in engine.candidates:
        seen[each.draft] += each.steps - before[each[:5]]
    return seen, engine


def flat_ms(nodes, num_rows):
    return planted_ms(nodes)


@pytest.mark.cross
@pytest.mark.parametrize("order", [("right", "wrong"), ("wrong", "right")])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_the_draft_that_is_right_is_taken(known, order, num_requests, monkeypatch):
    """One accepts everything and the other nothing; the engine lists what it tried, and what that brought."""
    seen, engine = settle(known, {name: name == "right" for name in order}, num_requests, monkeypatch, flat_ms)
    assert seen["right"] >= 0.8 * seen.total(), seen
    listed = engine.candidates
    assert [each.draft for each in listed] == [None, *[order[0]] * 4, *[order[1]] * 4]
    assert listed[0][1:5] == (0, 0, 1, None) and listed[1][1:5] == (1, 1, 2, None)
    assert [each[1:5] for each in listed[1:5]] == [each[1:5] for each in listed[5:]]
    for each in listed[1:]:
        most = min(each.num_steps + 1, each.mean_draft_tokens or each.num_draft_tokens)
        if each.draft == "right" and each.tokens_per_step is not None:
            assert 1 < each.tokens_per_step <= most
        elif each.tokens_per_step is not None:
            assert each.tokens_per_step == 1


def test_a_draft_is_not_judged_by_the_times_of_another():
    """The slow tree of one says nothing of the short chain of another, which is tried and wins."""
    choice, chosen = Fastest((1, 6, 2), None, kinds=(None, 0, 1)), Counter()
    for _ in range(200):
        number = choice.choose(1)
        chosen[number] += 1
        choice.note(number, 1, (4.0, 40.0, 5.0)[number], (1.0, 3.0, 2.0)[number])
    assert chosen[2] >= 180, chosen


def test_drafts_that_are_all_wrong_leave_plain_decoding(known, monkeypatch):
    seen, _ = settle(known, {"one": False, "two": False}, 2, monkeypatch, flat_ms)
    assert seen[None] >= 0.7 * seen.total(), seen


def test_the_load_decides(known, monkeypatch):
    """Where rows cost much only in a large batch, drafts are taken for one request, and none for four."""

    def ms(nodes, num_rows):
        return 6.0 + (nodes - 1) * (0.1 if num_rows == 1 else 12.0)

    alone, _ = settle(known, {"one": False, "two": True}, 1, monkeypatch, ms)
    monkeypatch.undo()
    together, _ = settle(known, {"one": False, "two": True}, 4, monkeypatch, ms)
    assert alone["two"] >= 0.8 * alone.total() and together[None] >= 0.7 * together.total(), (alone, together)


def test_each_kind_has_the_trees_that_it_can_draft():
    """No more levels than it has, and chains of next-token modules."""
    engine = engine_of("modules", "block", "head", num_steps=6, num_draft_tokens=12)
    engine.generate(PROMPTS, 4)
    trees = {}
    for each in engine.candidates[1:]:
        trees.setdefault(each.draft, []).append(each[1:5])
    assert trees == {
        "modules": [(1, 1, 2, None), (1, 3, 4, None)],
        "block": [(1, 1, 2, None), (1, 3, 4, None), (3, 5, 12, 8), (3, 5, 12, None)],
        "head": [(1, 1, 2, None), (1, 3, 4, None), (3, 6, 12, 8), (3, 6, 12, None)],
    }  # fmt: skip
    plain = engine.generate(PROMPTS, 30, speculative=False).output_ids
    assert [each.draft for each in engine.candidates] == [None]
    assert engine.generate(PROMPTS, 30).output_ids == plain


def test_memory_is_counted():
    """Of every draft, its pool, its rows, and what is kept for it while it rests."""
    engine = engine_of(max_batch=3)
    counted = engine.workspace_bytes()
    engine.generate(PROMPTS[:2], 6)
    state = View(engine).state
    pools = [state.target_pool, *(each.draft_pool for each in state.drafts)]
    assert len(pools) == 7
    held = sum(pool.k_cache.nbytes + pool.v_cache.nbytes for pool in pools)
    rows = sum(tensor.nbytes for tensor in state.tensors())
    assert counted["kv_cache"] == held and rows == counted["rows"]
    assert engine.session.max_length(engine.config, True) == 128


def test_requests_come_and_go(monkeypatch):
    """More of them than rows, prompts beside steps, a limit of time and of drafts, and a warm-up before."""
    at_random(monkeypatch)
    for options in ({"max_step_ms": 0.01, "prefill_chunk": 4}, {"max_spec_batch": 2}, {"mean_draft_tokens": 4}):
        texts = []
        for is_speculating in (True, False):
            engine = engine_of("head", "masks", "block", max_batch=4, **options)
            engine.is_speculating = is_speculating
            if is_speculating and "max_spec_batch" in options:
                engine.warmup(SamplingParams())
            requests = [engine.submit(prompt, SamplingParams(max_new_tokens=20)) for prompt in PROMPTS * 3]
            engine.collect()
            texts.append([request.output_ids for request in requests])
        assert texts[0] == texts[1] and all(len(text) == 20 for text in texts[0])


@pytest.mark.parametrize(
    "options",
    [
        {"method": ("draft_model", "suffix", "ngram"), "share_nodes": True},
        {"method": ("draft_model", "ngram")},
        {"method": "hybrid", "topk": 2, "num_model_steps": 2, "num_draft_tokens": 8},
    ],
    ids=lambda options: str(options["method"]),
)
def test_other_methods_beside_each_draft(options, monkeypatch):
    at_random(monkeypatch)
    engine, trees = engine_of("model", "masks", min_ngram_size=1, **options), []
    plain = engine.generate(PROMPTS, 30, speculative=False).output_ids
    text, stats = engine.generate(PROMPTS, 30)
    engine.on_tree = trees.append
    assert text == plain == engine.generate(PROMPTS, 30).output_ids
    assert stats.accepted > 0 and trees


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(drafts, target): a DFlash draft, the target itself, and an EAGLE-3 head."""
    around = tmp_path_factory.mktemp("several")
    target = write_decoder(random_llama(std=0.4, num_layers=8), around / "target")
    write_decoder(random_llama(std=0.4, num_layers=8), around / "drafts" / "its own")
    dflash_folders.write(around / "drafts" / "block", num_target_layers=8)
    heads.write_official(around / "drafts" / "head", heads.eagle3_tensors(), max_position_embeddings=256)
    return around / "drafts", target


def load(drafts, target, **options):
    config = EAGLEConfig(**{"adaptive": "auto", "topk": 2, "num_steps": 3} | options)
    return EAGLEInference.from_pretrained(drafts, target, config, device="cpu", allow_larger_draft=True)


@pytest.mark.parametrize("is_list", [False, True])
def test_folders_are_loaded_together(folders, is_list, monkeypatch):
    drafts, target = folders
    engine = load([drafts / "head", drafts / "block"] if is_list else drafts, target)
    names = ["head", "block"] if is_list else ["block", "head", "its own"]
    kinds = {"head": "EagleHead", "block": "DFlashDraft", "its own": "CausalDraft"}
    assert [type(draft).__name__ for draft in engine.draft] == [kinds[name] for name in names]
    assert list(engine.session.draft_names) == names
    told = " or ".join(kinds[name] for name in names)
    assert repr(engine).startswith(f"EAGLEInference(target=Decoder, draft={told}, ")
    at_random(monkeypatch)
    prompts = [[5, 6, 7], [8, 9]]
    plain = engine.generate(prompts, 24, speculative=False, progress=False).output_ids
    assert engine.generate(prompts, 24, progress=False).output_ids == plain
    assert sum(each.steps > 0 for each in engine.candidates) > 4


def test_a_list_of_one_is_that_one(folders):
    drafts, target = folders
    assert type(load([drafts / "head"], target, adaptive=None).draft).__name__ == "EagleHead"


def test_the_command_line_takes_them(folders, capsys, tmp_path):
    """And tells how many steps each draft had."""
    target, head = demo_pair()
    shutil.copytree(head, tmp_path / "drafts" / "one")
    write_decoder(random_llama(vocab_size=257, num_layers=1), tmp_path / "drafts" / "two")
    command = ["generate", "def f(", "--target", str(target), "--draft", str(tmp_path / "drafts"), "--device", "cpu",
               "--max-new-tokens", "24", "--compare"]  # fmt: skip
    assert main([*command, "--adaptive", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is True
    assert {each["draft"] for each in report["candidates"]} == {None, "one", "two"}
    assert sum(each["steps"] for each in report["candidates"]) == report["batch_steps"]
    assert main([*command, "--adaptive"]) == 0
    assert "steps of the batch by draft: plain decoding " in capsys.readouterr().out
    assert main(command) == 1
    assert "adaptive must be 'auto' with several drafts (one, two), or one of them be named" in capsys.readouterr().err


def test_what_cannot_be_is_named(folders, tmp_path):
    drafts, target = folders
    rule = r"adaptive must be 'auto' with several drafts \(block, head, its own\), or one of them be named, got "
    for adaptive, got in ((None, "None"), (((8, (2, 3, 5)),), r"\(\(8, ")):
        with pytest.raises(ValueError, match=rule + got):
            load(drafts, target, adaptive=adaptive)
    engine = load([drafts / "head", drafts / "block"], target)
    with pytest.raises(ValueError, match=r"adaptive must be 'auto' with several drafts \(head, block\)"):
        engine.generate([1, 2], 3, adaptive=None)
    with pytest.raises(ValueError, match="draft_model must hold each draft once, got .*head and .*head"):
        load([drafts / "head", drafts / "block", drafts / "block" / ".." / "head"], target)
    with pytest.raises(ValueError, match="draft_model must be a draft, or several of them, got none"):
        load([], target)
    with pytest.raises(
        ValueError, match="method must be 'dflash' or None for a draft of .*, got 'eagle'; .*block holds"
    ):
        load(drafts, target, method="eagle")
    write_decoder(random_llama(vocab_size=70), tmp_path / "wider")
    with pytest.raises(ModelError, match="wider: the draft must have the target's 61 tokens, got 70"):
        load([drafts / "head", tmp_path / "wider"], target)
    head, model = engine.draft[0], random_llama(vocab_size=70)
    for given, name in (([head, model], "Decoder 2"), ({"a": head, "b": model}, "b")):
        with pytest.raises(ValueError, match=f"{name}: EAGLEInference: the draft must have the target's 61 tokens"):
            EAGLEInference(given, engine.target, engine.config)
    with pytest.raises(ValueError, match="must hold each draft once, got EagleHead 1 and EagleHead 2"):
        EAGLEInference([head, head], engine.target, engine.config)
    with pytest.raises(ValueError, match="draft_model must be a draft, or several of them, got none"):
        EAGLEInference({}, engine.target, engine.config)
    with pytest.raises(ValueError, match="a: EAGLEInference: draft_model must be a DraftModel"):
        EAGLEInference({"a": 3, "b": head}, engine.target, engine.config)


def test_other_folders_are_read_as_before(tmp_path):
    """One folder inside, a draft's own, or none: what was said of them is still said."""
    assert folders_of_drafts(None) == {} and folders_of_drafts(tmp_path / "none") == {}
    write_decoder(random_llama(), tmp_path / "inside" / "one")
    assert folders_of_drafts(tmp_path / "inside") == {}
    write_decoder(random_llama(), tmp_path / "inside" / "two")
    assert list(folders_of_drafts(str(tmp_path / "inside"))) == ["one", "two"]
    write_decoder(random_llama(), tmp_path / "inside")
    assert folders_of_drafts(tmp_path / "inside") == {}
    both = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    assert list(folders_of_drafts(both)) == list(map(str, both))
