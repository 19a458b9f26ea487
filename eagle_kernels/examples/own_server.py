"""Token trees in your own server: the whole speculative loop around a Hugging Face Llama, without our engine.

    pip install -e '.[transformers]' && python -m eagle_kernels.examples.own_server

A step drafts level by level, builds a tree, reads all its nodes in one forward pass of the target, verifies them, and
keeps the keys and values of the accepted path. The text is that of plain decoding, greedy or sampled. The draft here is
the target itself without two of its layers; replace it by any model with the same vocabulary.

One request, so that the loop is easy to read; every op takes a batch of B requests of different lengths.
"""

from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

import eagle_kernels as ek
from eagle_kernels.engine.models.loading import demo_pair
from eagle_kernels.ops.tree.build_tree_from_scores import Output as Tree

TOPK, SPEC_STEPS, NUM_NODES = 4, 4, 16  # beams per level, levels, and nodes verified, the root included
SKIPPED_LAYERS = (1, 3)
SEED = 7


def main() -> None:
    """Prints a continuation and its tokens per step, and checks both texts against plain decoding."""
    folder, _ = demo_pair()  # any Llama in Hugging Face layout; this one reads bytes
    target, draft = LlamaForCausalLM.from_pretrained(folder), LlamaForCausalLM.from_pretrained(folder)
    layers: Any = [layer for index, layer in enumerate(draft.model.layers) if index not in SKIPPED_LAYERS]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index  # where it finds its keys and values in the cache
    draft.model.layers = torch.nn.ModuleList(layers)
    prompt = list(b"import os\n\ndef walk(")
    for temperature in (0.0, 0.8):
        tokens, num_steps = speculate(target, draft, prompt, 80, temperature)
        expected = decode_plainly(target, prompt, 80, temperature)
        print(f"temperature {temperature}: {len(tokens) / num_steps:.2f} tokens a step, "
              f"{'the text of plain decoding' if tokens == expected else 'ANOTHER TEXT'}")  # fmt: skip
        print(bytes(prompt + tokens).decode(errors="replace"), "\n")


@torch.inference_mode()
def speculate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: list[int], max_new_tokens: int, temperature: float
) -> tuple[list[int], int]:
    """Returns the new tokens, and the number of steps that they took."""
    target_cache, draft_cache = DynamicCache(), DynamicCache()
    logits = target(torch.tensor([prompt]), past_key_values=target_cache).logits[:, -1]
    tokens = prompt + [sample(logits, len(prompt), temperature)]
    num_steps = 0
    while len(tokens) < len(prompt) + max_new_tokens:
        tree = draft_tree(draft, draft_cache, tokens)
        logits = read_tree(target, target_cache, tree)
        verdict = ek.verify_tree(
            tree.draft_tokens.view(1, NUM_NODES), tree.retrieve_index, tree.retrieve_next_token,
            tree.retrieve_next_sibling, logits, positions=tree.positions, seeds=torch.tensor([SEED]),
            temperature=torch.tensor([temperature]), spec_steps=SPEC_STEPS,
        )  # fmt: skip
        # the path from the root: accepted drafts, and then the target's own token, the bonus
        path = verdict.accept_index[0, : int(verdict.accept_token_num[0]) + 1].long()
        length = len(tokens) - 1
        keep(target_cache, torch.cat([torch.arange(length), length + path]))
        tokens += verdict.predicts[path].tolist()
        num_steps += 1
    return tokens[len(prompt) : len(prompt) + max_new_tokens], num_steps


def draft_tree(draft: LlamaForCausalLM, cache: DynamicCache, tokens: list[int]) -> Tree:
    """Drafts TOPK beams for SPEC_STEPS levels (EAGLE-2), and returns the tree of the best NUM_NODES nodes. Afterwards
    the draft's cache holds all of `tokens`; the target's does not hold the last one, the root of the tree."""
    new = torch.tensor([tokens[cache.get_seq_length() :]])
    logits = draft(new, past_key_values=cache).logits[:, -1]
    length = len(tokens)
    level = ek.select_top_k_tokens(logits, topk=TOPK, level=0)
    levels = [level]
    for depth in range(1, SPEC_STEPS):
        # beams read the text and their own ancestors, whose keys lie in slots 0 .. depth * TOPK - 1 after it
        slots = torch.arange(depth * TOPK)
        sees = (level.ancestors[..., slots // 64] >> (slots % 64)) & 1
        mask = torch.cat([torch.ones(1, TOPK, length, dtype=torch.bool), sees.bool()], dim=-1)
        positions = torch.full((1, TOPK), length + depth - 1)
        logits = draft(
            level.tokens, attention_mask=as_bias(mask, draft.dtype), position_ids=positions, past_key_values=cache
        ).logits
        level = ek.select_top_k_tokens(logits[0], level.scores, level.ancestors, topk=TOPK, level=depth)
        levels.append(level)
    keep(cache, torch.arange(length))
    return ek.build_tree_from_scores(
        torch.tensor([tokens[-1]]),
        torch.cat([level.candidate_scores for level in levels], dim=1),
        torch.cat([level.candidate_tokens for level in levels], dim=1),
        # slot 0 stands for the root; the last level's beams have no children
        torch.cat([torch.tensor([[-1]]), *(level.parent_slots for level in levels[:-1])], dim=1),
        torch.tensor([length - 1]),
        topk=TOPK, spec_steps=SPEC_STEPS, num_verify_tokens=NUM_NODES, tree_mask_mode="qlen_only",
    )  # fmt: skip


def read_tree(target: LlamaForCausalLM, cache: DynamicCache, tree: Tree) -> torch.Tensor:
    """Returns the target's logits [N, V] at all nodes; their keys and values are in the cache after the text."""
    prefix = torch.ones(1, NUM_NODES, cache.get_seq_length(), dtype=torch.bool)
    mask = as_bias(torch.cat([prefix, tree.tree_mask], dim=-1), target.dtype)
    logits: torch.Tensor = target(
        tree.draft_tokens[None], attention_mask=mask, position_ids=tree.positions[None], past_key_values=cache
    ).logits[0]
    return logits


def keep(cache: DynamicCache, slots: torch.Tensor) -> None:
    """Keeps the keys and values of these slots, in this order."""
    layers: Any = cache.layers
    for layer in layers:
        layer.keys, layer.values = layer.keys[:, :, slots], layer.values[:, :, slots]


def as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what a Hugging Face model adds to its scores: [B, 1, rows, keys], 0 where a row sees a key."""
    return torch.where(mask[:, None], 0.0, torch.finfo(dtype).min).to(dtype)


def sample(logits: torch.Tensor, position: int, temperature: float) -> int:
    """Draws the token at `position` with the noise that verification uses, or the most likely one at temperature 0."""
    at, seed = torch.tensor([position]), torch.tensor([SEED])
    return int(ek.sample_from_logits(logits, at, seed, torch.tensor([temperature])))


@torch.inference_mode()
def decode_plainly(target: LlamaForCausalLM, prompt: list[int], max_new_tokens: int, temperature: float) -> list[int]:
    """Returns the target's own text, one token per step."""
    cache = DynamicCache()
    new, tokens = prompt, list(prompt)
    for _ in range(max_new_tokens):
        logits = target(torch.tensor([new]), past_key_values=cache).logits[:, -1]
        new = [sample(logits, len(tokens), temperature)]
        tokens += new
    return tokens[len(prompt) :]


if __name__ == "__main__":
    main()
