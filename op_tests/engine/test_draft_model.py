"""Small language models that draft: whose tokenizer they must have, and whose tables may be padded otherwise."""

import json

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.causal_draft import CausalDraft
from eagle_kernels.engine.models.checkpoint import Checkpoint
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.engine.models.protocol import ModelError
from op_tests.engine import heads
from op_tests.engine.engines import write_with_modules
from op_tests.engine.heads import edit_config
from op_tests.engine.hostile import refused
from op_tests.engine.toys import ToyModel, random_head, random_llama, random_modules, write_decoder

CONFIG = EAGLEConfig(method="draft_model", topk=2, num_steps=3, num_draft_tokens=8)
PROMPTS = [[3, 1, 4, 1, 5], [9], [60, 60, 2]]
WORDS = {f"w{number}": number for number in range(55)}


def padded(model, vocab_size):
    """The same model with a table of another size; ids that it gains it never says."""
    other = random_llama(vocab_size=vocab_size, device=model.device)
    shared = min(vocab_size, model.vocab_size)
    tensors = model.state_dict()
    for name, tensor in other.state_dict().items():
        tensor.copy_(tensors[name]) if tensor.shape == tensors[name].shape else tensor.zero_()
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        other.state_dict()[table][:shared] = tensors[table][:shared]
    return other


@pytest.mark.cross
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("vocab_size", [58, 61, 64])
@pytest.mark.parametrize("strategy", ["target_match", "rejection"])
def test_tables_of_other_sizes(device, vocab_size, sampling, strategy):
    """The prompt holds an id that the smaller table lacks."""
    target = random_llama(device=device)
    config = EAGLEConfig(method="draft_model", topk=1, num_steps=3, verify_strategy=strategy, **sampling)
    engine = EAGLEInference(
        CausalDraft(padded(target, vocab_size), vocab_size=61), target, config, allow_larger_draft=True
    )
    text, stats = engine.generate(PROMPTS, 25, seeds=range(3))
    plain = engine.generate(PROMPTS, 25, seeds=range(3), speculative=False).output_ids
    if not sampling or strategy == "target_match":
        assert text == plain
    if not sampling:
        # the target's own drafts are right, but for ids that are not there
        assert stats.mean_accept_length == 4.0 if vocab_size >= 61 else 2.2 < stats.mean_accept_length < 4.0


def test_sizes_that_nobody_has_explained(device):
    target = random_llama(device=device)
    with pytest.raises(ValueError, match=r"target's 61 tokens, got 64; .*CausalDraft\(model, vocab_size=61\)"):
        EAGLEInference(padded(target, 64), target, CONFIG)


def folder_of(model, path, words=None, added=()):
    write_decoder(model, path)
    if words is not None:
        added = [{"content": content, "id": number} for content, number in added]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))
    return path


def load(tmp_path, draft_words, target_words, vocab_size=64, **added):
    target = random_llama()
    folders = (
        folder_of(padded(target, vocab_size), tmp_path / "draft", draft_words, **added),
        folder_of(target, tmp_path / "target", target_words),
    )
    return EAGLEInference.from_pretrained(*folders, CONFIG, device="cpu", allow_larger_draft=True)


REFUSED = {
    "another id": (WORDS | {"w3": 4, "w4": 3}, WORDS, "must have the same tokenizer, but 'w[34]' is [34] in one and"),
    "a word more": (WORDS | {"more": 55}, WORDS, "must have the same tokenizer, but only the first has 'more'"),
    "no tokenizer": (None, WORDS, "must have the same tokenizer, but only the second has a tokenizer.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_of_other_tokenizers(tmp_path, case):
    draft_words, target_words, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        load(tmp_path, draft_words, target_words)
    with pytest.raises(ModelError, match="only the (first|second) has '<think>'"):
        load(tmp_path / "added", WORDS, WORDS, added=[("<think>", 55)])


def test_folders_without_tokenizers(tmp_path):
    """Nobody knows, so the sizes must be the same."""
    load(tmp_path / "same", None, None, vocab_size=61)
    with pytest.raises(ValueError, match="must have the target's 61 tokens, got 58") as caught:
        load(tmp_path / "other", None, None, vocab_size=58)
    line = str(caught.value).partition("this line: ")[2]  # which can be followed as it is
    names = {"DRAFT": tmp_path / "other" / "draft", "TARGET": tmp_path / "other" / "target"}
    engine = eval(line.split("; ")[1], names | {"EAGLEInference": EAGLEInference} | imported(line.split("; ")[0]))
    assert engine.generate(PROMPTS, 9).output_ids == engine.generate(PROMPTS, 9, speculative=False).output_ids


def imported(line) -> dict:
    """The names that a line of Python imports."""
    names = {}
    exec(line, names)
    return names


@pytest.mark.parametrize("kind", ["bytes", "tokenizer.model", "vocab.json", "another tokenizer.model"])
def test_folders_that_tell_their_tokenizer_otherwise(tmp_path, kind):
    target = random_llama()
    for number, (name, model) in enumerate({"draft": padded(target, 64), "target": target}.items()):
        folder = folder_of(model, tmp_path / name)
        if kind == "bytes":
            edit_config(folder, tokenizer_class="ByteTokenizer")
        else:
            (folder / kind.split()[-1]).write_bytes(b"tokens" + bytes(number if "another" in kind else 0))
    folders = tmp_path / "draft", tmp_path / "target"
    if "another" in kind:
        with pytest.raises(ModelError, match="must have the target's 61 tokens, got 64"):
            EAGLEInference.from_pretrained(*folders, CONFIG, device="cpu", allow_larger_draft=True)
        return
    engine = EAGLEInference.from_pretrained(*folders, CONFIG, device="cpu", allow_larger_draft=True)
    text, stats = engine.generate(PROMPTS, 9)
    assert text == engine.generate(PROMPTS, 9, speculative=False).output_ids and stats.mean_accept_length > 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a smaller language model, a head, modules beside their target, and a model of transformers."""
    root = tmp_path_factory.mktemp("folders")
    target = random_llama(num_layers=8, vocab_size=heads.TARGET_VOCAB)
    return {
        "target": folder_of(target, root / "target"),
        "small": folder_of(random_llama(num_layers=1, vocab_size=heads.TARGET_VOCAB, seed=3), root / "small"),
        "head": heads.write_specforge(root / "head", heads.eagle3_tensors()),
        "modules": write_with_modules(root / "modules", 2),
    }


def test_a_small_model_of_transformers_drafts_as_well(folders, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=61, n_embd=32, n_head=2, n_layer=2, n_positions=128, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    engine = EAGLEInference.from_pretrained(tmp_path, folders["target"], device="cpu")
    text, stats = engine.generate(PROMPTS, 9)
    assert text == engine.generate(PROMPTS, 9, speculative=False).output_ids and stats.drafted > 0


# (draft, target, method, the error)
MISFITS = [
    ("small", "target", "eagle",
     "method must be 'draft_model' or None for a draft of CausalDraft, got 'eagle'; {draft}"),
    ("head", "target", "draft_model", "got 'draft_model'; {draft} holds an EAGLE-3 head"),
    ("head", "target", ("mtp", "ngram"), "method must be 'eagle' or None for a draft of EagleHead, got 'mtp'; "),
    ("small", "target", "mtp", "{draft}: holds no next-token modules, which method='mtp' needs: no tensor is named"),
    (None, "target", "mtp", "{target}: holds no next-token modules, which method='mtp' needs: no tensor is named"),
    (None, "target", "mtp", "model.mtp_layers.* (MiMo), model.layers.*.eh_proj.* (DeepSeek, Kimi, GLM) or model.mtp_b"),
    (None, "target", None, "draft_model must be a folder of an EAGLE head or a smaller language model ('ngram' and"),
    (None, "target", "draft_model", "need none) for method='draft_model', got None"),
    (None, "modules", None, "need none, 'mtp' reads the target's own modules) for method=None, got None"),
    ("target", "head", None, "{target}: holds an EAGLE-3 head: a draft, not a target; are draft and target swapped?"),
]  # fmt: skip


@pytest.mark.parametrize(("draft", "target", "method", "message"), MISFITS)
def test_drafts_of_another_method_are_told_before_any_weights(folders, monkeypatch, draft, target, method, message):
    monkeypatch.setattr(Checkpoint, "read", None)
    draft, target = folders.get(draft), folders[target]
    told = refused(EAGLEInference.from_pretrained, draft, target, EAGLEConfig(method=method), device="cpu")
    assert message.format(draft=draft, target=target) in told


def test_what_holds_modules_drafts_with_them_unless_a_language_model_is_asked_for(folders):
    kinds = {}
    for method in (None, "mtp", "draft_model"):
        config = EAGLEConfig.chain(2, method=method)
        engine = EAGLEInference.from_pretrained(folders["modules"], folders["modules"], config, device="cpu")
        kinds[method] = engine.draft.method
        assert engine.generate(PROMPTS, 9).output_ids == engine.generate(PROMPTS, 9, speculative=False).output_ids
    assert kinds == {None: "mtp", "mtp": "mtp", "draft_model": "draft_model"}


def test_a_swapped_pair_is_refused():
    small, big = random_llama(), random_llama(num_layers=3)
    bytes_of = [sum(weight.nbytes for weight in model.parameters()) for model in (big, small)]
    told = r"got a draft of {:,} bytes and a target of {:,} bytes; the order is .*\(draft_model, target_model\)"
    for draft in (big, CausalDraft(big)):
        with pytest.raises(ValueError, match=told.format(*bytes_of)):
            EAGLEInference(draft, small, CONFIG)
    EAGLEInference(small, big, CONFIG)
    assert EAGLEInference(big, small, CONFIG, allow_larger_draft=True).generate([1, 2], 3).output_ids
    EAGLEInference(random_head(small, aux_layers=(0, 1, 2)), small)
    EAGLEInference(ToyModel(vocab_size=61, hidden_size=256), small, CONFIG)  # nobody knows how large it is
    for head in (random_head(small, aux_layers=(0, 1, 2)), random_modules(small, 2), CausalDraft(big)):
        told = f"target_model must .* got {type(head).__name__}, which is a draft; the orde"
        with pytest.raises(ValueError, match=told):
            EAGLEInference(small, head)
    with pytest.raises(ValueError, match="allow_larger_draft must be True or False, got 1"):
        EAGLEInference(small, big, allow_larger_draft=1)
    with pytest.raises(ValueError, match="target_model must be a TargetModel .* got NoneType"):
        EAGLEInference(None, None)


def test_other_names_of_the_models():
    target, draft = demo_pair()
    engine = EAGLEInference.from_pretrained(draft=draft, target=target, device="cpu")
    assert EAGLEInference(draft=engine.draft, target=engine.target).draft is engine.draft
    with pytest.raises(ValueError, match="draft must agree with draft_model = None, since both mean the same"):
        EAGLEInference(draft=engine.draft, draft_model=None, target_model=engine.target)
