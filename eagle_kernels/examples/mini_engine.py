"""A small complete engine: a paged KV cache, an EAGLE head, token trees, and a step that is one CUDA graph.

    pip install -e '.[models]' && python -m eagle_kernels.examples.mini_engine "import os" "class Stack:"

Read it from top to bottom: the data, then the loop in which requests begin and end, then the step. A step

    drafts    a tree for each request: from the best beams of one level the head proposes the next level (EAGLE-2);
    reads     all nodes of all trees in one pass of the target;
    verifies  the tree: the target's token is drawn at a node, and the child that carries it is the next node;
    moves     keys and values of the nodes on that path to where the text continues;
    follows   the path with the head, which reads the accepted tokens with the target's own features;
    records   the accepted tokens, and which requests end with them.

It waits for nothing, and allocates nothing whose size depends on data: on a GPU it is captured once and replayed.
Greedy or sampled, the text is that of plain decoding with the same seed, and so of `EAGLEInference`.

A request with n committed tokens has t_0 .. t_{n-1} in the target's cache, in slots 0 .. n-1. Its root t_n is drawn,
but not yet read. Row i of the head's cache is made from the target's features at t_i and the token t_{i+1}, so the
head has n rows, too, and both caches share one page table.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import eagle_kernels as ek
from eagle_kernels.engine.models.end_tokens import read_eos_token_ids
from eagle_kernels.engine.models.loading import demo_pair, load_draft, load_target
from eagle_kernels.engine.models.protocol import Angles, TargetModel
from eagle_kernels.engine.models.tokenizer import load_tokenizer
from eagle_kernels.types import DraftHead, GenerationOutput, SampledVerifyOutput

PAGE_SIZE = 16
PROMPT_ROWS = 256  # most prompt tokens that are read at once
PROMPTS = ("import os\n\ndef walk(", "class Stack:\n", "def area(", "for i in range(10):\n")


@dataclass
class Request:
    """Holds what a caller asks for and, once it has ended, its new tokens and the steps that they took."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    num_steps: int = 0
    pages: list[int] = field(default_factory=list)  # while it runs


@dataclass(frozen=True)
class TreeShape:
    """Holds the sizes of a tree: beams per level, levels, and nodes verified, the root included."""

    topk: int = 4
    num_levels: int = 4
    num_nodes: int = 16

    @property
    def num_slots(self) -> int:
        """Returns how many slots after a request's committed tokens a step may write."""
        return max(self.num_nodes, (self.num_levels - 1) * self.topk, self.num_levels + 1)


@dataclass
class Pool:
    """Holds the pages of one model: two tensors [layers, pages, PAGE_SIZE, heads, head_dim]."""

    k_cache: Tensor
    v_cache: Tensor


@dataclass
class Batch:
    """Holds R rows, each one request's or nobody's, in tensors that never move, as a CUDA graph needs."""

    text: Tensor  # [R, L] prompt and output; the root is text[r, lengths[r]]
    lengths: Tensor  # [R] committed tokens, without the root
    num_prompt_tokens: Tensor  # [R]
    max_tokens: Tensor  # [R] the most tokens of the request, prompt included
    seeds: Tensor  # [R]
    temperature: Tensor  # [R]
    num_steps: Tensor  # [R]
    is_live: Tensor  # [R] 0: the row is still computed, but its text no longer grows
    block_table: Tensor  # [R, P] the request's pages in both pools; -1: none, and nothing is written
    draft_logits: Tensor  # [R, draft tokens] the head's logits after the root
    draft_hidden: Tensor  # [R, width] its hidden state there

    @classmethod
    def empty(cls, num_rows: int, num_pages: int, target: TargetModel, draft: DraftHead) -> Batch:
        """Returns a batch whose rows are nobody's, with room for `num_pages` pages in each."""
        new = partial(torch.zeros, dtype=torch.int64, device=target.device)
        counts = ("lengths", "num_prompt_tokens", "max_tokens", "seeds", "num_steps", "is_live")
        return cls(
            text=new(num_rows, num_pages * PAGE_SIZE), **{name: new(num_rows) for name in counts},
            temperature=new(num_rows, dtype=torch.float32),
            block_table=new(num_rows, num_pages, dtype=torch.int32) - 1,
            draft_logits=new(num_rows, draft.draft_vocab_size, dtype=target.dtype),
            draft_hidden=new(num_rows, draft.config.hidden_size, dtype=target.dtype),
        )  # fmt: skip

    def row(self, index: int) -> Batch:
        """Returns one row as a batch of its own, whose tensors are views."""
        return Batch(**{each.name: getattr(self, each.name)[index : index + 1] for each in fields(self)})


@dataclass
class Tree:
    """Holds a tree of N nodes for each row: node 0 is the root, and a parent comes before its children."""

    tokens: Tensor  # [R, N]
    links: tuple[Tensor, Tensor, Tensor]  # each [R, N]: number in the batch, first child, next sibling (-1: none)
    positions: Tensor  # [R, N] committed tokens before the root, plus the node's depth
    mask: Tensor  # [R, N, words] bits of the nodes that each node sees: its ancestors and itself


@dataclass
class Snapshot:
    """Holds which rows are live after a step, which the host knows once it is `copied`, and whose rows they were."""

    is_live: Tensor
    requests: dict[int, Request]
    copied: torch.Event | None


@dataclass
class Attend:
    """Writes new keys and values into a pool, and attends to what each token sees; a model calls it in every layer. The
    T new tokens of each of B rows see the row's committed tokens. Of the `num_keys` keys after these they see those in
    `tree_mask`; without a mask they are a chain, in which each sees those before it."""

    pool: Pool
    batch: Batch
    slots: Tensor  # [B, T] of the new tokens in the pool; -1: not written
    tree_mask: Tensor | None = None  # [B, T, words]
    num_keys: int | None = None  # None: T

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, *,
                 angles: Angles | None = None, **options: Any) -> Tensor:  # fmt: skip
        """Returns [B, T, query heads, head_dim]; query, key and value are [B, T, heads, head_dim]."""
        assert angles is not None  # these models leave the rotation to `attend`
        k_cache, v_cache = self.pool.k_cache[layer], self.pool.v_cache[layer]
        shape, query, key, value = query.shape, query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        # one launch rotates queries and keys to their positions, and writes keys and values
        rotated = ek.write_kv(key, value, k_cache, v_cache, self.slots, query=query, **angles._asdict())
        return ek.tree_attention(
            rotated.view(shape), k_cache, v_cache, self.tree_mask, is_causal=self.tree_mask is None,
            num_draft_keys=self.num_keys, block_table=self.batch.block_table, seq_lens=self.batch.lengths,
            window=window, **options,
        ).output  # fmt: skip


class MiniEngine:
    """Serves requests in a batch of `num_rows` rows, which they join and leave between steps. A request waits until a
    row and enough pages are free; num_pages=None: enough for all rows."""

    def __init__(self, target: TargetModel, draft: DraftHead, shape: TreeShape, *, num_rows: int = 4,
                 num_pages: int | None = None, end_token_ids: tuple[int, ...] = ()) -> None:  # fmt: skip
        self.target, self.draft, self.shape = target, draft, shape
        most_pages = min(target.max_length, draft.max_length) // PAGE_SIZE
        num_pages = num_rows * most_pages if num_pages is None else num_pages
        self.most_pages = min(most_pages, num_pages)  # of a request
        self.batch = Batch.empty(num_rows, most_pages, target, draft)
        new = partial(torch.zeros, dtype=target.dtype, device=target.device)
        sizes = [(layers, num_pages, PAGE_SIZE, *head) for layers, *head in (target.kv_shape, draft.kv_shape)]
        self.target_pool, self.draft_pool = (Pool(new(size), new(size)) for size in sizes)
        self.end_token_ids = torch.tensor(end_token_ids, dtype=torch.int64, device=target.device)
        self.free_rows, self.free_pages = deque(range(num_rows)), deque(range(num_pages))
        self.waiting, self.snapshots = deque[tuple[Request, int]](), deque[Snapshot]()  # (request, pages it needs)
        self.running: dict[int, Request] = {}  # by row
        self.on_gpu = target.device.type == "cuda"
        self.lag = 1 if self.on_gpu else 0  # steps that are launched before the host looks at one
        self.launch = self.capture() if self.on_gpu else self.step

    def capture(self) -> Callable[[], None]:
        """Returns a function that replays a step; all rows are nobody's yet, so running it here changes no request."""
        self.step()  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def run(self, requests: list[Request]) -> float:
        """Serves requests until all have ended; returns the mean milliseconds of a step after the first prompts."""
        for request in requests:
            self.submit(request)
        self.admit()
        self.batch.lengths.tolist()  # waits until the prompts have been read
        start, num_steps = time.perf_counter(), 0
        while self.waiting or self.running:
            self.advance()
            num_steps += 1
        self.snapshots.clear()
        return 1e3 * (time.perf_counter() - start) / max(num_steps, 1)

    def submit(self, request: Request) -> None:
        """Queues a request; it needs pages for all of its tokens and for the last tree after them."""
        num_pages = -(-(len(request.prompt) + request.max_new_tokens + self.shape.num_slots) // PAGE_SIZE)
        if not request.prompt or request.max_new_tokens < 1 or num_pages > self.most_pages:
            rule = f"have a prompt, new tokens and at most {self.most_pages} pages, got {num_pages} pages"
            raise ValueError(f"MiniEngine: a request must {rule}")
        self.waiting.append((request, num_pages))

    def advance(self) -> None:
        """Starts waiting requests, launches a step, and ends requests whose end is known. On a GPU the host looks at a
        step after it has launched the next one, so that the device never waits. A request ends on the device
        (`record`), and the step after its end leaves it unchanged."""
        self.admit()
        self.launch()
        self.snapshots.append(self.take_snapshot())
        while len(self.snapshots) > self.lag:
            self.collect(self.snapshots.popleft())

    def admit(self) -> None:
        """Gives waiting requests a row and pages, in their order, and reads their prompts."""
        while self.waiting and self.free_rows and self.waiting[0][1] <= len(self.free_pages):
            (request, num_pages), index = self.waiting.popleft(), self.free_rows.popleft()
            request.pages = [self.free_pages.popleft() for _ in range(num_pages)]
            self.running[index] = request
            row, num_tokens = self.batch.row(index), len(request.prompt)
            row.text[0, :num_tokens] = torch.tensor(request.prompt)
            row.block_table[0, :num_pages] = torch.tensor(request.pages)
            row.num_prompt_tokens.fill_(num_tokens)
            row.max_tokens.fill_(num_tokens + request.max_new_tokens)
            row.seeds.fill_(request.seed)
            row.temperature.fill_(request.temperature)
            row.num_steps.zero_()
            row.is_live.fill_(1)
            self.read_prompt(row, num_tokens)

    def take_snapshot(self) -> Snapshot:
        """Starts to copy what the host must know about the step that was launched last."""
        is_live = torch.empty_like(self.batch.is_live, device="cpu", pin_memory=self.on_gpu)
        is_live.copy_(self.batch.is_live, non_blocking=True)
        copied = torch.Event() if self.on_gpu else None
        if copied is not None:
            copied.record()
        return Snapshot(is_live, dict(self.running), copied)

    def collect(self, snapshot: Snapshot) -> None:
        """Takes the tokens of requests that have ended, and frees their rows and pages."""
        if snapshot.copied is not None:
            snapshot.copied.synchronize()
        for index, request in snapshot.requests.items():
            if snapshot.is_live[index] or self.running.get(index) is not request:
                continue
            row = self.batch.row(index)
            request.tokens = row.text[0, len(request.prompt) : int(row.lengths) + 1].tolist()
            request.num_steps = int(row.num_steps)
            row.lengths.zero_()
            row.block_table.fill_(-1)
            self.free_pages.extend(request.pages)
            self.free_rows.append(index)
            del self.running[index]

    def read_prompt(self, row: Batch, num_tokens: int) -> None:
        """Reads a prompt with both models, part by part, and draws the token after it."""
        for start in range(0, num_tokens, PROMPT_ROWS):
            stop = min(start + PROMPT_ROWS, num_tokens)
            row.lengths.fill_(start)
            slots, positions = ek.find_slots(row.block_table, row.lengths, count=stop - start, page_size=PAGE_SIZE)
            logits, features = self.target.forward(
                row.text[:, start:stop], positions, Attend(self.target_pool, row, slots), last_only=True,
                capture=self.draft.aux_layers,
            )  # fmt: skip
            if stop == num_tokens:
                root = ek.sample_from_logits(logits[:, 0], row.num_prompt_tokens, row.seeds, row.temperature)
                row.text[:, stop] = root  # the head, whose tokens are one ahead, reads it last
            tokens, attend = row.text[:, start + 1 : stop + 1], Attend(self.draft_pool, row, slots)
            draft_logits, hidden = self.draft.forward(tokens, features, positions, attend, from_target=True)
            row.draft_logits.copy_(draft_logits[:, -1])
            row.draft_hidden.copy_(hidden[:, -1])
        row.lengths.fill_(num_tokens - 1)
        self.record(row, row.text[:, num_tokens, None].clone())  # the root may end the request

    def step(self) -> None:
        """Gives every live request its accepted drafts and one token of the target."""
        batch, pool, shape = self.batch, self.target_pool, self.shape
        slots, positions = ek.find_slots(batch.block_table, batch.lengths, count=shape.num_slots, page_size=PAGE_SIZE)
        tree = self.draft_tree(slots)
        logits, features = self.read_tree(tree, slots)
        verdict = ek.verify_tree_sampled(  # greedy in rows of temperature 0
            tree.tokens, *tree.links, logits, tree.positions.flatten(), batch.seeds, batch.temperature,
            seq_lens=batch.lengths, is_live=batch.is_live, spec_steps=shape.num_levels,
        )  # fmt: skip
        ek.move_accepted_kv(
            pool.k_cache, pool.v_cache, batch.block_table, batch.lengths, verdict.accept_index,
            verdict.accept_token_num, num_verify_tokens=shape.num_nodes,
        )  # fmt: skip
        self.follow_path(verdict, features, slots, positions)
        batch.num_steps.add_(batch.is_live)
        self.record(batch, verdict.tokens)

    def draft_tree(self, slots: Tensor) -> Tree:
        """Drafts level by level, and keeps the best nodes of all levels. The candidates of a level are the K best
        tokens after each beam, and the K best of these K * K are the next beams, K being `topk`. Their keys go to the
        slots after the text, level after level."""
        batch, shape, topk, offsets = self.batch, self.shape, self.shape.topk, self.draft.draft_to_target
        states = batch.draft_hidden  # the head's own, a row for each row of logits
        level = ek.select_top_k_tokens(batch.draft_logits, draft_to_target=offsets, topk=topk, level=0)
        levels = [level]
        for depth in range(1, shape.num_levels):
            num_keys = depth * topk
            attend = Attend(self.draft_pool, batch, slots[:, num_keys - topk : num_keys], level.ancestors, num_keys)
            positions = (batch.lengths + depth - 1)[:, None].expand(-1, topk)
            hidden = states[level.hidden_rows]  # of each beam's parent
            logits, states = self.draft.forward(level.tokens, hidden, positions, attend, from_target=False)
            logits, states = logits.flatten(0, 1), states.flatten(0, 1)
            level = ek.select_top_k_tokens(logits, level.scores, level.ancestors, offsets, topk=topk, level=depth)
            levels.append(level)
        roots = batch.text.gather(1, batch.lengths[:, None])
        built = ek.build_tree_from_scores(
            roots[:, 0],
            torch.cat([level.candidate_scores for level in levels], dim=1),
            torch.cat([level.candidate_tokens for level in levels], dim=1),
            # the candidates that may be parents: -1 for the root, and the beams of all levels but the last
            torch.cat([torch.full_like(roots, -1), *(level.parent_slots for level in levels[:-1])], dim=1),
            batch.lengths, topk=topk, spec_steps=shape.num_levels, num_verify_tokens=shape.num_nodes,
        )  # fmt: skip
        links = built.retrieve_index, built.retrieve_next_token, built.retrieve_next_sibling
        tokens, positions = (each.view(len(roots), -1) for each in (built.draft_tokens, built.positions))
        return Tree(tokens, links, positions, built.tree_mask)

    def read_tree(self, tree: Tree, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the target's logits and features [R * N, ..] at all nodes."""
        attend = Attend(self.target_pool, self.batch, slots[:, : self.shape.num_nodes], tree.mask)
        logits, features = self.target.forward(tree.tokens, tree.positions, attend, capture=self.draft.aux_layers)
        assert features is not None
        return logits.flatten(0, 1), features.flatten(0, 1)

    def follow_path(self, verdict: SampledVerifyOutput, features: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Reads the accepted tokens with the head, each with the target's features at the node before it. Their keys
        replace those of the beams. Shorter paths have padding after them, which the next step replaces."""
        batch, count = self.batch, verdict.tokens.shape[1]
        attend, tokens = Attend(self.draft_pool, batch, slots[:, :count]), verdict.tokens.clamp(min=0)
        features, positions = features[verdict.hidden_rows], positions[:, :count]
        logits, hidden = self.draft.forward(tokens, features, positions, attend, from_target=True)
        batch.draft_logits.copy_(logits.flatten(0, 1)[verdict.last_row])
        batch.draft_hidden.copy_(hidden.flatten(0, 1)[verdict.last_row])

    def record(self, batch: Batch, tokens: Tensor) -> None:
        """Appends tokens [B, T], -1 padded, to the text of live rows, up to the token that ends a request."""
        kept = ek.append_output(
            batch.text, batch.lengths + 1, batch.num_prompt_tokens, tokens, batch.max_tokens, self.end_token_ids,
            is_live=batch.is_live,
        )  # fmt: skip
        batch.lengths.copy_(kept.new_num_tokens - 1)
        batch.is_live.mul_(kept.finish_reason == 0)


def main() -> None:
    """Prints texts, and compares them and, on a GPU, the time of a step with those of `EAGLEInference`."""
    shape, (target_folder, draft_folder) = TreeShape(), demo_pair()
    torch.set_num_threads(1)  # on a CPU, threads of such small models only wait for each other
    target = load_target(target_folder, "cuda" if torch.cuda.is_available() else "cpu")
    draft, tokenizer = load_draft(draft_folder, target), load_tokenizer(target_folder)
    prompts, ends = map(tokenizer.encode, sys.argv[1:] or PROMPTS), read_eos_token_ids(target_folder)
    requests = [Request(ids, 32 + 16 * (i % 3), temperature=0.8 * (i % 2), seed=i) for i, ids in enumerate(prompts)]
    MiniEngine(target, draft, shape, num_rows=2, end_token_ids=ends).run(requests)  # the third one waits for a row
    config = ek.EAGLEConfig(shape.topk, shape.num_levels, shape.num_nodes, eos_token_ids=ends)
    engine = ek.EAGLEInference(draft, target, config)
    for request, expected in zip(requests, generate(engine, requests).output_ids):
        same = "the text of EAGLEInference" if request.tokens == expected else "ANOTHER TEXT"
        speed = (len(request.tokens) - 1) / max(request.num_steps, 1)  # the first token comes with the prompt
        print(f"temperature {request.temperature}: {speed:.2f} tokens a step, {same}:")
        print(tokenizer.decode(request.prompt + request.tokens), "\n")
    if target.device.type == "cuda":
        longer = [replace(request, max_new_tokens=256) for request in requests]
        mini = MiniEngine(target, draft, shape, num_rows=len(longer), end_token_ids=ends)
        times = [(mini.run(longer), generate(engine, longer).stats.warm_step_ms) for _ in range(2)]
        print("{} requests: {:.3f} ms a step, EAGLEInference {:.3f}".format(len(longer), *times[1]))


def generate(engine: ek.EAGLEInference, requests: list[Request]) -> GenerationOutput:
    """Returns what the library's engine makes of the same requests."""
    params = [{name: getattr(each, name) for name in ("temperature", "seed", "max_new_tokens")} for each in requests]
    return engine.generate([each.prompt for each in requests], params)


if __name__ == "__main__":
    main()
