"""The demo corpus: the Python files of a standard library, as bytes, split by file into training and held-out text.

Everybody who runs Python has it. A hash of its path decides the side of a file, which so stays the same when other
files come or go. Second copies of the same contents are dropped: they could bring held-out text into training.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

END_OF_TEXT = 256
VOCAB_SIZE = 257  # the bytes and the end of text

MAX_FILE_BYTES = 400 * 1024  # larger ones are tables (Unicode names, test vectors), not code
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
SKIPPED_PREFIXES = ("lib2to3/tests/data/",)  # deliberately broken or Python 2 source
HELD_OUT_ONE_IN = 20

PROMPT_COUNT = 40
PROMPT_BYTES = 64


@dataclass(frozen=True)
class SourceFile:
    """One file: path relative to the library's root, with forward slashes, and its bytes."""

    path: str
    contents: bytes

    @property
    def path_hash(self) -> int:
        return int(hashlib.sha256(self.path.encode()).hexdigest(), 16)

    @property
    def is_held_out(self) -> bool:
        return self.path_hash % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """The files of both sides in path order; `sha256` covers every path and every file's contents."""

    train: list[SourceFile]
    held_out: list[SourceFile]
    sha256: str


def read_corpus(root: Path) -> Corpus:
    """Reads the library at `root`; raises ValueError if either side of the split would be empty."""
    digest = hashlib.sha256()
    seen: set[bytes] = set()
    files = []
    for path in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.split("/")) or path.startswith(SKIPPED_PREFIXES):
            continue
        contents = (root / path).read_bytes()
        contents_sha256 = hashlib.sha256(contents)
        if not 0 < len(contents) <= MAX_FILE_BYTES or contents_sha256.digest() in seen:
            continue
        seen.add(contents_sha256.digest())
        digest.update(f"{contents_sha256.hexdigest()}  {path}\n".encode())
        files.append(SourceFile(path, contents))
    corpus = Corpus(
        train=[file for file in files if not file.is_held_out],
        held_out=[file for file in files if file.is_held_out],
        sha256=digest.hexdigest(),
    )
    if not (corpus.train and corpus.held_out):
        raise ValueError(
            f"{root} gives {len(corpus.train)} training and {len(corpus.held_out)} held-out files, both need 1"
        )
    return corpus


def token_stream(files: list[SourceFile]) -> Tensor:
    """Returns the bytes of all files, with `END_OF_TEXT` after each: [tokens] int16, to save memory."""
    total = sum(len(file.contents) + 1 for file in files)
    stream = torch.empty(total, dtype=torch.int16, device="cpu")
    start = 0
    for file in files:
        end = start + len(file.contents)
        stream[start:end] = torch.frombuffer(bytearray(file.contents), dtype=torch.uint8)
        stream[end] = END_OF_TEXT
        start = end + 1
    return stream


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """Returns stream[start : start + length] for each start [B]: [B, length] int64 on the stream's device."""
    offsets = starts[:, None] + torch.arange(length, device="cpu")
    return stream[offsets.to(stream.device)].long()


def held_out_prompts(files: list[SourceFile], count: int = PROMPT_COUNT, num_bytes: int = PROMPT_BYTES) -> list[str]:
    """Returns up to `count` ASCII prompts of `num_bytes` bytes, each from another file.

    A prompt begins at the first line start in the second half of its file. Files are taken in the order of their path
    hash, so that no package of the library dominates.
    """
    prompts = []
    for file in sorted(files, key=lambda file: file.path_hash):
        start = file.contents.find(b"\n", len(file.contents) // 2) + 1
        prompt = file.contents[start : start + num_bytes]
        if start > 0 and len(prompt) == num_bytes and prompt.isascii():
            prompts.append(prompt.decode("ascii"))
    return prompts[:count]
