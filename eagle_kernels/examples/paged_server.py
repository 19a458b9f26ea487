"""A paged server of your own: block tables, a batch of ragged requests, a CUDA graph, and end tokens on the device.

    pip install -e '.[models]' && python -m eagle_kernels.examples.paged_server

The server owns the KV cache `[pages, page_size, heads, head_dim]` of each layer, the page tables and the text of every
request. A step drafts from the requests' own text (no draft model), verifies all trees in one forward pass, and moves
the accepted keys and values to their places. It never waits for the device and allocates nothing that depends on data,
so on a GPU it is captured once and replayed. The text is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import eagle_kernels as ek
from eagle_kernels.engine.models.loading import demo_pair, load_target
from eagle_kernels.engine.models.protocol import Angles, TargetModel

PAGE_SIZE, MAX_LENGTH = 16, 256
NUM_NODES, SPEC_STEPS = 8, 4  # nodes that are verified for each request, its root included; drafts below one another
END_TOKEN = 256
PROMPTS = ("import os\n\ndef walk(", "class Stack:\n", "for i in range(10):\n    print(i)\n\nfor j in")


class PagedAttention:
    """Writes a layer's keys and values to their slots, and attends over the pages; the model calls it once a layer.

    tree_mask [B, N, W] is what each node sees of the tree; None: a prompt is read, every token sees those before it.
    """

    def __init__(self, caches: Sequence[Tensor], block_table: Tensor, first: Tensor, count: int,
                 tree_mask: Tensor | None = None) -> None:  # fmt: skip
        self.caches, self.block_table, self.first, self.tree_mask = caches, block_table, first, tree_mask
        self.slots = ek.find_slots(block_table, first, count=count, page_size=PAGE_SIZE).slots

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None, *,
                 angles: Angles | None = None, **unused: object) -> Tensor:  # fmt: skip
        """Returns [B, T, query heads, head_dim]; query, key and value are [B, T, heads, head_dim]."""
        assert angles is not None
        k_cache, v_cache = (cache[layer] for cache in self.caches)
        rows = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        # rotary embedding and the cache's write are one launch
        turned = ek.write_kv(
            rows[1], rows[2], k_cache, v_cache, self.slots, query=rows[0], positions=angles.positions,
            cos=angles.cos, sin=angles.sin,
        )  # fmt: skip
        query = turned.view(query.shape)
        if self.tree_mask is not None:
            return ek.tree_attention(
                query, k_cache, v_cache, self.tree_mask, num_draft_keys=NUM_NODES, block_table=self.block_table,
                seq_lens=self.first,
            ).output  # fmt: skip
        batch_size, count = query.shape[:2]
        bounds = torch.arange(batch_size + 1, device=query.device) * count
        return ek.prefill_attention(
            query.flatten(0, 1), bounds, k_cache=k_cache, v_cache=v_cache, block_table=self.block_table,
            seq_lens=self.first + count, max_query=count,
        ).output.view(query.shape)  # fmt: skip


class Server:
    """Holds one batch, all of whose tensors have fixed addresses.

    text     [B, MAX_LENGTH]  prompt and output; the last token is the root, which the cache does not hold yet
    lengths  [B]              tokens in the cache, so the root is text[b, lengths[b]]
    is_live  [B]              0 once a request has ended
    """

    def __init__(self, model: TargetModel, prompts: list[list[int]], max_new_tokens: int) -> None:
        self.model, self.device, size = model, model.device, len(prompts)
        layers, num_heads, head_dim = model.kv_shape
        pages_each = MAX_LENGTH // PAGE_SIZE
        shape = (layers, size * pages_each, PAGE_SIZE, num_heads, head_dim)
        k_cache, v_cache = (torch.zeros(shape, dtype=model.dtype, device=self.device) for _ in range(2))
        self.caches = k_cache, v_cache
        # pages lie anywhere in the pool
        pages = torch.randperm(size * pages_each, dtype=torch.int32).view(size, pages_each)
        self.block_table = pages.to(self.device)
        self.text = torch.zeros(size, MAX_LENGTH, dtype=torch.int64, device=self.device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.num_prompt_tokens, self.is_live = self.lengths.clone(), torch.ones_like(self.lengths)
        self.max_tokens = self.lengths + max_new_tokens
        self.end_tokens = torch.tensor([END_TOKEN], device=self.device)
        self.num_steps = torch.zeros_like(self.lengths)
        for row, prompt in enumerate(prompts):
            self.read_prompt(row, prompt)

    def read_prompt(self, row: int, prompt: list[int]) -> None:
        """Reads a prompt into the cache, and appends the token after it."""
        tokens = torch.tensor([prompt], device=self.device)
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        attend = PagedAttention(self.caches, self.block_table[row : row + 1], first, len(prompt))
        positions = torch.arange(len(prompt), device=self.device)[None]
        logits = self.model.forward(tokens, positions, attend, last_only=True).logits
        self.text[row, : len(prompt)] = tokens[0]
        self.text[row, len(prompt)] = logits[0, -1].argmax()

    def step(self) -> None:
        """Brings every live request its accepted drafts and one token of the model."""
        size = len(self.lengths)
        num_tokens = self.lengths + 1
        root = self.text.gather(1, self.lengths[:, None])[:, 0]
        drafts = ek.ngram_match(
            self.text, num_tokens * self.is_live, num_speculative_tokens=NUM_NODES - 1, spec_steps=SPEC_STEPS,
            max_ngram_size=4, max_matches=3,
        )  # fmt: skip
        tree = ek.tree_from_parents(root, drafts.tokens, drafts.parents, self.lengths, num_verify_tokens=NUM_NODES)
        nodes = tree.draft_tokens.view(size, NUM_NODES)
        attend = PagedAttention(self.caches, self.block_table, self.lengths, NUM_NODES, tree.tree_mask)
        logits = self.model.forward(nodes, tree.positions.view(size, NUM_NODES), attend).logits.flatten(0, 1)
        verdict = ek.verify_tree(
            nodes, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling, logits,
            spec_steps=SPEC_STEPS,
        )  # fmt: skip
        k_cache, v_cache = self.caches
        ek.move_accepted_kv(
            k_cache, v_cache, self.block_table, self.lengths, verdict.accept_index, verdict.accept_token_num,
            num_verify_tokens=NUM_NODES,
        )  # fmt: skip
        committed = ek.verify_commit(
            verdict.predicts, verdict.accept_index, verdict.accept_token_num, self.lengths, self.is_live
        )
        kept = ek.append_output(
            self.text, num_tokens, self.num_prompt_tokens, committed.tokens, self.max_tokens,
            self.end_tokens, is_live=self.is_live,
        )  # fmt: skip
        self.num_steps += self.is_live
        self.lengths.copy_(kept.new_num_tokens - 1)
        self.is_live *= kept.finish_reason == 0

    def run(self) -> list[list[int]]:
        """Steps until every request has ended; returns the new tokens of each."""
        self.step()  # compiles the kernels
        step = self.step if self.device.type == "cpu" else self.capture()
        while bool(self.is_live.any()):  # a real server looks at the step before, and so never waits
            step()
        rows = zip(self.text.tolist(), self.num_prompt_tokens.tolist(), self.lengths.tolist())
        return [tokens[first : length + 1] for tokens, first, length in rows]

    def capture(self) -> Callable[[], None]:
        """Returns a function that replays a step; capturing runs nothing."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


@torch.inference_mode()
def main() -> None:
    """Prints the texts and tokens a step, and checks them against plain decoding."""
    folder, _ = demo_pair()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(folder, device, torch.float32)
    prompts = [list(text.encode()) for text in PROMPTS]
    server = Server(model, prompts, max_new_tokens=60)
    texts = server.run()
    engine = ek.EAGLEInference(None, model, ek.EAGLEConfig(method="ngram", eos_token_ids=(END_TOKEN,)))
    plain, _ = engine.generate(prompts, 60, speculative=False)
    for prompt, tokens, expected, num_steps in zip(PROMPTS, texts, plain, server.num_steps.tolist()):
        same = "the text of plain decoding" if tokens == expected else "ANOTHER TEXT"
        print(f"{len(tokens) / num_steps:.2f} tokens a step, {same}:")
        print(prompt + bytes(token for token in tokens if token < 256).decode(errors="replace"), "\n")


if __name__ == "__main__":
    main()
