"""Verified trees as text, as SVG and as JSON, and the command that draws them."""

import json
import random
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from eagle_kernels import EAGLEConfig, EAGLEInference
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.tools.cli.main import main
from eagle_kernels.tools.trees.svg import trees_svg
from eagle_kernels.tools.trees.text import num_columns, title, tree_text, wrapped
from eagle_kernels.tools.trees.view import Stop, TargetChoice, TreeNode, VerifiedTree
from op_tests.engine import dflash_folders
from op_tests.engine.toys import random_llama, write_decoder

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
PROMPT = "import os\n\ndef walk("
SIZES = ("--topk", "3", "--num-steps", "3", "--num-draft-tokens", "10")


def node(number, text, parent, depth, probs=(None, None, None), target=None, state="rejected"):
    is_accepted, is_in_text = state != "rejected", state == "accepted"
    return TreeNode(number, ord(text[0]), text, parent, depth, *probs, target, is_accepted, is_in_text)


def known_tree() -> VerifiedTree:
    choice = TargetChoice(33, "", 0.75)
    nodes = (
        node(0, "(", -1, 0, target=TargetChoice(115, "self", 0.5), state="accepted"),
        node(1, "self", 0, 1, (0.625, 0.625, 0.5), choice, "accepted"),
        node(2, "'\n", 0, 1, (0.25, 0.25, 0.125)),
        node(4, ",", 1, 2, (1.0, 0.625, 0.001)),
        node(5, "漢", 2, 2, (0.5, 0.125, None)),
        node(6, " ", 4, 3),
    )
    return VerifiedTree(2, "def f", nodes, 3, Stop("target", 1, choice, False), (115, 33), None)


KNOWN = """\
step 2 after 'def f': 1 of 5 drafts accepted, 2 tokens
              draft    path  target
● '('
├─● 'self'     0.62    0.62    0.50
│ ├─○ ','      1.00    0.62    0.00
│ │ └─○ ' '
│ └─▸ <33>                     0.75
└─○ "'\\n"      0.25    0.25    0.12
  └─○ '漢'     0.50    0.12
stopped at depth 1, after 'self': the target chose <33> (0.75), which was not drafted there"""


def test_a_known_tree_in_a_notebook():
    tree = known_tree()
    assert repr(tree) == "VerifiedTree(step 2 after 'def f': 1 of 5 drafts accepted, 2 tokens)"
    assert tree._repr_svg_() == trees_svg([tree])
    ElementTree.fromstring(tree._repr_svg_())


KNOWN_IN_ASCII = """\
step 2 after 'def f': 1 of 5 drafts accepted, 2 tokens
                 draft    path  target
* '('
|-* 'self'        0.62    0.62    0.50
| |-o ','         1.00    0.62    0.00
| | `-o ' '
| `-> <33>                        0.75
`-o "'\\n"         0.25    0.25    0.12
  `-o '\\u6f22'    0.50    0.12
stopped at depth 1, after 'self': the target chose <33> (0.75), which was not drafted there"""


def test_a_known_tree_as_text():
    """In ASCII escapes take the columns that they are shown in."""
    assert tree_text(known_tree()) == KNOWN and tree_text(known_tree(), is_ascii=True) == KNOWN_IN_ASCII


REASONS = ["target", "leaf", "no_drafts", "length", "end_token", "stop_string", "end_token of the target"]


@pytest.mark.parametrize("use_color", [False, True])
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("seed", range(4))
def test_every_line_in_ascii_is_ascii(seed, reason, use_color):
    """Whatever is drawn, in whatever width, for whatever reason the path stopped; every line is there."""
    tree = random_tree(seed, num_nodes=12, longest=12)
    states = [("accepted", True, True), ("cut", True, False), ("rejected", False, False)]
    nodes = [tree.nodes[0]] + [
        replace(each, is_accepted=is_accepted, is_in_text=is_in_text, text=mark + each.text)
        for each, (mark, is_accepted, is_in_text) in zip(tree.nodes[1:], states * 4)
    ]
    has_choice = reason not in ("length", "end_token", "stop_string")
    stop = Stop(reason.split()[0], 1, TargetChoice(1, "漢é…│", 0.5) if has_choice else None, seed % 2 == 0)
    tree = replace(tree, nodes=tuple(nodes), stop=stop, finish_reason="é")
    for width in (48, 80, 1000):
        drawn, plain = (tree_text(tree, width, use_color, is_ascii) for is_ascii in (True, False))
        assert drawn.isascii()
        lines = re.sub(r"\033\[[\d;]*m", "", drawn).splitlines()
        assert all(line.isprintable() and len(line) <= width for line in lines)
    below = len(nodes) + has_choice
    assert len(lines) == len(plain.splitlines()) == 3 + below
    assert sum(bool(re.match(r"[|` -]*[*+o>] ", line)) for line in lines) == below
    assert r"\u6f22\xe9" in lines[0]
    assert lines[-1].startswith("stopped at") and (r"\u6f22\xe9\u2026\u2502" in lines[-1]) == has_choice


def test_the_accepted_path_is_green_on_a_terminal():
    lines = tree_text(known_tree(), use_color=True).splitlines()
    assert [re.sub(r"\033\[[\d;]*m", "", line) for line in lines] == KNOWN.splitlines()
    green = [line for line in lines if "\033[1;32m" in line]
    assert len(green) == 3 and all(line.endswith("\033[0m") for line in green)
    assert green[1] == "├─\033[1;32m● 'self'     0.62    0.62    0.50\033[0m"


def random_tree(seed: int, num_nodes: int = 40, longest: int = 30) -> VerifiedTree:
    generator = random.Random(seed)
    nodes = [node(0, "root", -1, 0, target=TargetChoice(1, "x", 0.5), state="accepted")]
    for number in range(1, num_nodes):
        parent = generator.choice(nodes[-6:] if seed % 2 else nodes)
        text = "".join(generator.choice("ab<&>\"'\n\x1b\u202e漢é ") for _ in range(generator.randint(1, longest)))
        nodes.append(node(number, text, parent.number, parent.depth + 1, (0.5, 0.25, 0.125)))
    stop = Stop("target", 0, TargetChoice(1, "x", 0.5), False)
    return VerifiedTree(seed, "<&\x00" + "漢é" * 14, tuple(nodes), 9, stop, (1,), None)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [20, 48, 80, 200])
def test_lines_keep_to_the_width(seed, width):
    tree = random_tree(seed, num_nodes=60)
    lines = tree_text(tree, width).splitlines()
    assert max(map(num_columns, lines)) <= max(width, 48)
    assert sum("○" in line for line in lines) == len(tree.nodes) - 1
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (2, ["a", "bc", "漢", "字", "漢", "字", "漢", "字", "e\u0301e\u0301", "d"]),
        (9, ["a bc 漢字", "漢字漢字", "e\u0301e\u0301  d"]),
        (14, ["a bc", "漢字漢字漢字", "e\u0301e\u0301  d"]),
        (30, ["a bc 漢字漢字漢字 e\u0301e\u0301  d"]),
    ],
)
def test_lines_are_broken_at_spaces_and_within_words_that_are_wider(width, lines):
    assert wrapped("a bc 漢字漢字漢字 e\u0301e\u0301  d", width) == lines
    assert max(map(num_columns, lines)) <= width


def boxes_of(svg: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of all boxes."""
    found = []
    for box in svg.iter(f"{SVG}rect"):
        if box.get("class").split()[0] == "node":
            left, top, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
            found.append((left, top, left + width, top + height))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_boxes_of_an_svg_do_not_overlap(seed):
    trees = [random_tree(seed, num_nodes) for num_nodes in (1, 2, 12, 70)]
    text = trees_svg(trees)
    assert text == trees_svg(trees)
    svg = ElementTree.fromstring(text)
    boxes = boxes_of(svg)
    assert len(boxes) == sum(len(tree.nodes) + 1 for tree in trees)
    for one, other in combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    width, height = float(svg.get("width")), float(svg.get("height"))
    assert all(left > 0 and top > 0 and right < width and bottom < height for left, top, right, bottom in boxes)
    assert len(list(svg.iter(f"{SVG}path"))) == len(boxes) - len(trees)


def numbers_of(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+", text)]


@pytest.mark.parametrize("seed", range(6))
def test_where_boxes_edges_and_numbers_of_an_svg_are(seed):
    """Leaves in rows, parents in the middle of their children, columns as wide as their widest text, edges between."""
    trees = [random_tree(seed, num_nodes, longest) for num_nodes, longest in ((1, 1), (9, 3), (40, 30))]
    svg = ElementTree.fromstring(trees_svg(trees))
    middle_of = lambda box: (box[1] + box[3]) / 2  # noqa: E731
    boxes = boxes_of(svg)
    near = lambda one, other: abs(one - other) < 0.21  # noqa: E731  numbers have one digit after the point

    def box_at(side: int, x: float, y: float):
        (found,) = [box for box in boxes if near(box[side], x) and near(middle_of(box), y)]
        return found

    place_of = lambda line: (float(line.get("x")), float(line.get("y")))  # noqa: E731
    texts = [(line.get("class"), *place_of(line), line.text) for line in svg.iter(f"{SVG}text")]
    tokens, children = [text for text in texts if text[0] == "token"], {box: [] for box in boxes}
    for (_, x, y, _), box in zip(tokens, boxes, strict=True):
        assert near(x, (box[0] + box[2]) / 2) and near(y, middle_of(box) + 4.5)
    for edge in svg.iter(f"{SVG}path"):
        start, above, turn, row, stop = numbers_of(edge.get("d"))
        child, parent = box_at(0, stop, row), box_at(2, start, above)
        assert near(turn, start + 16) and near(stop, start + 66)
        children[parent].append(child)
    kinds = [edge.get("class") for edge in svg.iter(f"{SVG}path")]
    assert kinds == sorted(kinds, key=lambda kind: kind == "edge accepted")
    roots = [box for box in boxes if box[0] == 16]
    assert len(roots) == len(trees) and sum(map(len, children.values())) == len(boxes) - len(trees)
    for tree, root, after in zip(trees, roots, [*roots[1:], None]):
        first = boxes.index(root)
        of_tree = boxes[first : None if after is None else boxes.index(after)]
        leaves = [middle_of(box) for box in of_tree if not children[box]]
        assert [round(y - min(leaves)) for y in sorted(leaves)] == [38 * row for row in range(len(leaves))]
        for box in of_tree:
            rows = [middle_of(child) for child in children[box]]
            assert not rows or near(middle_of(box), (min(rows) + max(rows)) / 2)
        for left in {box[0] for box in of_tree}:
            column = [(box, token[3]) for box, token in zip(of_tree, tokens[first:]) if box[0] == left]
            widest = max(num_columns(label) for _, label in column)
            assert all(near(box[2] - left, max(7.9 * widest + 16, 40)) for box, _ in column)
            assert widest <= 16
        heights = min(box[1] for box in of_tree), max(box[3] for box in of_tree)
        beside = [text for text in texts if text[0] in ("draft", "target-prob")]
        beside = [text for text in beside if heights[0] < text[2] < heights[1] + 9]
        assert sum(text[0] == "draft" for text in beside) == len(tree.nodes) - 1
        for kind, x, y, _ in beside:
            assert box_at(0, x + 25, y + 5 if kind == "draft" else y - 13)


@pytest.mark.parametrize("seed", range(3))
def test_sentences_keep_to_the_card(seed):
    tree = random_tree(seed, num_nodes=4, longest=3)
    svg = ElementTree.fromstring(trees_svg([tree]))
    sentences = [line for line in svg.iter(f"{SVG}text") if line.get("class") is None]
    assert "".join(line.text for line in sentences).replace(" ", "").startswith(title(tree).replace(" ", ""))
    # of the font a column is 0.6 of the 13 pixels that a line is high
    assert all(float(line.get("x")) + 7.8 * num_columns(line.text) < float(svg.get("width")) for line in sentences)


def test_an_svg_says_what_the_tree_holds():
    text = trees_svg([known_tree()])
    svg = ElementTree.fromstring(text)
    kinds = [box.get("class") for box in svg.iter(f"{SVG}rect")][1:]
    assert kinds.count("node accepted") == 2 and kinds.count("node rejected") == 4 and kinds.count("node target") == 1
    edges = [edge.get("class") for edge in svg.iter(f"{SVG}path")]
    assert edges.count("edge accepted") == 1 and edges.count("edge target") == 1
    shown = [line.text for line in svg.iter(f"{SVG}text")]
    assert {"'self'", "<33>", "0.62", "0.75"} < set(shown)
    assert "stopped at depth 1, after 'self': the target chose <33> (0.75), which" in " ".join(shown)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "<script" not in text
    assert "prefers-color-scheme:dark" in text


def show(*arguments, prompt=PROMPT) -> int:
    return main(["show-tree", prompt, *SIZES, "--dtype", "float32", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_draws_what_the_engine_generates(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert show("--steps", 2) == 0
    shown = capsys.readouterr().out
    assert shown.count("stopped at") == 2 and "\033" not in shown
    assert shown.startswith("step 1 after 'import os\\n\\ndef walk(': ") and "\n\nstep 2 after " in shown
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert show("--steps", 2) == 0
    assert re.sub(r"\033\[[\d;]*m", "", capsys.readouterr().out) == shown

    assert show("--steps", 2, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    target, draft = demo_pair()
    config = EAGLEConfig(topk=3, num_steps=3, num_draft_tokens=10)
    engine = EAGLEInference.from_pretrained(draft, target, config, device="cpu")
    prompt = engine.tokenizer.encode(PROMPT)
    tokens = [token for step in report["steps"] for token in step["tokens"]]
    assert engine.generate(prompt, 1 + len(tokens)).output_ids[1:] == tokens
    assert report["prompt"] == PROMPT and len(report["steps"]) == 2
    step = report["steps"][0]
    assert set(step) >= {"step", "nodes", "stop", "why", "num_accepted", "finish_reason"}
    assert step["why"] in shown and len(step["nodes"]) == 10


def test_a_seed_that_was_not_given_is_named(capsys):
    assert show("--temperature", 1) == 0
    shown, _, seed = capsys.readouterr().out.rpartition("\n\nseed: ")
    assert show("--temperature", 1, "--seed", seed.strip()) == 0
    assert capsys.readouterr().out.startswith(shown)
    assert show("--temperature", 1, "--json") == 0
    assert isinstance(json.loads(capsys.readouterr().out)["seed"], int)


@pytest.mark.slow
def test_svg_files(tmp_path, capsys):
    one, folder = tmp_path / "tree.svg", tmp_path / "steps"
    assert show("--steps", 2, "--svg", one) == 0 and show("--steps", 2, "--svg", folder, "--json") == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step_001.svg", "step_002.svg"]
    both = [ElementTree.parse(path).getroot() for path in (one, *sorted(folder.iterdir()))]
    whole, *parts = [len(boxes_of(svg)) for svg in both]
    assert whole == sum(parts) == 22
    picture = tmp_path / "tree.png"
    assert show("--svg", picture) == 1 and not picture.exists()
    rule = "--svg must be a file that ends with .svg or a folder"
    assert capsys.readouterr().err == f"error: {rule}, got {picture}\n"
    (tmp_path / "steps.v2").mkdir()
    assert show("--svg", tmp_path / "steps.v2") == 0 and (tmp_path / "steps.v2" / "step_001.svg").is_file()


def test_methods_without_a_model_and_texts_without_a_step(capsys):
    method = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert main(["show-tree", "abcabcabcab", "--speculative-config", method]) == 0
    assert "stopped at" in capsys.readouterr().out
    assert show("--max-new-tokens", 1) == 0
    assert capsys.readouterr().out.startswith("no step: ")


def test_a_block_drafter(tmp_path, capsys):
    """Its nodes are paths through the levels of a block: a token is as likely after each draft of the level above, and
    never the mask."""
    model = random_llama(std=0.4, num_layers=4, vocab_size=257)
    target = write_decoder(model, tmp_path / "target", tokenizer_class="ByteTokenizer")
    draft, num_levels = dflash_folders.write(tmp_path / "draft", vocab_size=257), dflash_folders.BLOCK - 1
    command = ["show-tree", PROMPT, "--target", str(target), "--draft", str(draft), "--num-steps", str(num_levels)]
    assert main(command) == 0
    assert re.match(re.escape(f"step 1 after {PROMPT!r}: ") + r"\d of 31 drafts accepted", capsys.readouterr().out)
    assert main([*command, "--json"]) == 0
    nodes = json.loads(capsys.readouterr().out)["steps"][0]["nodes"]
    places = {(node["depth"], node["token_id"]): node["draft_prob"] for node in nodes[1:]}
    assert 1 < max(depth for depth, _ in places) <= num_levels and len(places) < len(nodes) - 1 == 31
    assert dflash_folders.MASK not in {token for _, token in places}
    for node in nodes[1:]:
        prob = places[node["depth"], node["token_id"]]
        above = nodes[node["parent"]]["path_prob"] if node["parent"] else 1.0
        assert node["draft_prob"] == pytest.approx(prob, rel=1e-3)
        assert node["path_prob"] == pytest.approx(prob * above, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", 0], "--steps must be at least 1, got 0"),
        (["--accept-policy", "accept_all"], "--accept-policy must be normal for trees that the target has verified"),
        (["--svg", __file__], "--svg must be a file that ends with .svg or a folder, got"),
        (["--svg", "/no/folder/a.svg"], "--svg must be in a folder that exists, got /no/folder/a.svg"),
        (["--max-new-tokens", 0], "--max-new-tokens must be at least 1, got 0"),
        (None, "the prompt is empty; it must hold at least one token"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(capsys, arguments, message):
    assert (show(prompt="") if arguments is None else show(*arguments)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1


def test_the_picture_of_the_readme_is_what_the_command_draws(tmp_path, capsys):
    """But for what other machines round differently: the numbers."""
    assert show("--svg", tmp_path / "tree.svg", prompt=PROMPT + "self") == 0
    shown = ROOT / "eagle_kernels" / "assets" / "show_tree.svg"
    assert "eagle_kernels/assets/show_tree.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
    drawn, kept = (re.sub(r"\d\.\d+", "0", path.read_text(encoding="utf-8")) for path in (tmp_path / "tree.svg", shown))
    assert drawn == kept and shown.stat().st_size < 10_000
