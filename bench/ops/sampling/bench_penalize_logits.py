"""penalize_logits with all three penalties, an output still too short for its end tokens, and a few bad tokens."""

import torch

from bench.harness import grid
from bench.harness.inputs import LARGE_VOCABULARY, ODD_BATCH, TREES, VOCABULARY, accepted_tree, of_vocabulary
from bench.harness.torch_forms import Walk

LINKS = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")

CASES = [
    *grid(tree=TREES[0], batch_size=[1, 8, 32, 128], vocab_size=VOCABULARY),
    *grid(tree=TREES[1], batch_size=[1, 8, 32], vocab_size=VOCABULARY),
    {"tree": TREES[0], "batch_size": ODD_BATCH, "vocab_size": LARGE_VOCABULARY},
]
SMALL_CASES = grid(batch_size=2, tree=TREES[0], vocab_size=300)
HEADLINES = ["K/S/N=4/3/8 B=8"]


def name(batch_size, tree, vocab_size):
    return f"{tree} B={batch_size}{of_vocabulary(vocab_size)}"


def is_checked(batch_size, tree, vocab_size):
    return batch_size * tree.num_nodes <= 512


def make(device, batch_size, tree, vocab_size):
    accepted = accepted_tree("cpu", batch_size, tree, vocab_size)
    values = {name: accepted[name].to(device) for name in LINKS}
    rows, words = batch_size * tree.num_nodes, -(-vocab_size // 32)
    output = torch.randint(vocab_size, (batch_size, 512), device=device)
    counts = torch.zeros(batch_size, vocab_size, dtype=torch.int32, device=device)
    counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
    return values | {
        "target_logits": torch.empty(rows, vocab_size, dtype=torch.bfloat16, device=device).normal_(),
        "repetition_penalty": torch.full((batch_size,), 1.1, device=device),
        "frequency_penalty": torch.full((batch_size,), 0.25, device=device),
        "presence_penalty": torch.full((batch_size,), 0.5, device=device),
        "prompt_mask": torch.randint(2**31 - 1, (batch_size, words), dtype=torch.int32, device=device),
        "output_counts": counts,
        "min_tokens": torch.full((batch_size,), 1024, device=device),
        "num_output_tokens": torch.full((batch_size,), 512, device=device),
        "end_token_ids": torch.randint(vocab_size, (2,), device=device),
        "bad_token_ids": torch.randint(vocab_size, (batch_size, 16), device=device),
    }


def count_bytes(batch_size, tree, vocab_size):
    """Logits read as bf16 and written as fp32, counts and prompt mask of each request read once."""
    return batch_size * vocab_size * (tree.num_nodes * (2 + 4) + 4) + batch_size * vocab_size // 8


def prepare_torch(values):
    """Ancestors and the prompt's tokens, which a torch user has as truth values, are made once."""
    candidates, logits = values["candidates"], values["target_logits"]
    device, (batch_size, num_nodes) = candidates.device, candidates.shape
    vocab_size = logits.shape[1]
    on_path = Walk(values).visible.int()
    on_path[:, :, 0] = 0  # the root is in output_counts
    token = torch.arange(vocab_size, device=device)
    in_prompt = ((values["prompt_mask"][:, token // 32] >> (token % 32)) & 1).bool()
    tokens = candidates[:, None, :].expand(batch_size, num_nodes, num_nodes)
    shape = (batch_size, num_nodes, vocab_size)
    repetition, frequency, presence = (
        values[name][:, None, None] for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    ends = values["end_token_ids"].expand(batch_size, num_nodes, -1)
    bad = values["bad_token_ids"][:, None].expand(-1, num_nodes, -1)

    def run():
        counts = values["output_counts"][:, None].expand(shape).contiguous().scatter_add_(2, tokens, on_path)
        changed = logits.view(shape).float()
        repeated = torch.where(changed > 0, changed / repetition, changed * repetition)
        changed = torch.where((counts > 0) | in_prompt[:, None], repeated, changed)
        changed = changed - frequency * counts - presence * (counts > 0)
        length = values["num_output_tokens"][:, None] + on_path.sum(-1)
        held = torch.where((length < values["min_tokens"][:, None])[:, :, None], float("-inf"), 0.0)
        changed.scatter_add_(2, ends, held.expand(ends.shape).contiguous())
        return changed.scatter_(2, bad, float("-inf")).view(logits.shape)

    return run
