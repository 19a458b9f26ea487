"""verify_chain by both methods, from logits: half of the requests accept all drafts, the others the first ones."""

import torch

from bench.harness import grid
from bench.harness.inputs import LARGE_VOCABULARY, ODD_BATCH, VOCABULARY, decisive_logits, of_vocabulary

METHODS = ["standard", "block"]
CASES = [
    *grid(method=METHODS, batch_size=[1, 8, 32], num_tokens=6, vocab_size=VOCABULARY),
    *grid(method=METHODS, batch_size=ODD_BATCH, num_tokens=6, vocab_size=LARGE_VOCABULARY),
]
SMALL_CASES = grid(batch_size=4, method=METHODS, num_tokens=4, vocab_size=300)


def name(batch_size, method, num_tokens, vocab_size):
    return f"T={num_tokens} B={batch_size} {method}{of_vocabulary(vocab_size)}"


def is_checked(batch_size, **others):
    return batch_size <= 8


def make(device, batch_size, num_tokens, vocab_size, method):
    """Target and draft have all but no doubt, so that the outcome is the same whatever the coins."""
    num_drafts = num_tokens - 1
    wanted = torch.randint(vocab_size, (batch_size, num_tokens))
    drafts = wanted[:, :num_drafts].clone()
    for request in range(1, batch_size, 2):
        wrong = request // 2 % num_drafts
        drafts[request, wrong] = (wanted[request, wrong] + 1) % vocab_size
    return {
        "candidates": torch.cat([torch.zeros(batch_size, 1, dtype=torch.int64), drafts], dim=1).to(device),
        "target_logits": decisive_logits(wanted.flatten().to(device), vocab_size),
        "draft_logits": decisive_logits(drafts.flatten().to(device), vocab_size),
        "positions": torch.arange(1024, 1024 + num_tokens, device=device).repeat(batch_size),
        "seeds": torch.randint(2**60, (batch_size,), device=device),
        "temperature": torch.ones(batch_size, device=device),
        "method": method,
    }


def count_bytes(batch_size, num_tokens, vocab_size, method):
    """One read of every row, in bf16."""
    return batch_size * (2 * num_tokens - 1) * vocab_size * 2


def prepare_torch(values):
    """Softmax of everything, gathers, and a race of exponentials for the token after."""
    candidates, is_block = values["candidates"], values["method"] == "block"
    batch_size, num_tokens = candidates.shape
    num_drafts = num_tokens - 1
    drafts = candidates[:, 1:, None]
    request = torch.arange(batch_size, device=candidates.device)
    column = torch.arange(num_tokens, device=candidates.device)
    temperature = values["temperature"][:, None, None]

    def once():
        target = torch.softmax(values["target_logits"].view(batch_size, num_tokens, -1).float() / temperature, -1)
        draft = torch.softmax(values["draft_logits"].view(batch_size, num_drafts, -1).float() / temperature, -1)
        ratio = (target[:, :num_drafts].gather(2, drafts) / draft.gather(2, drafts)).squeeze(2)
        coins = torch.rand_like(ratio)
        share = torch.ones_like(temperature[:, 0])
        if is_block:
            shares = [share]
            for index in range(num_drafts):
                shares.append((shares[-1] * ratio[:, index, None]).clamp(max=1.0))
            shares = torch.cat(shares, dim=1)
            mass = (shares[:, 1:num_drafts, None] * target[:, 1:num_drafts] - draft[:, 1:]).clamp(min=0).sum(-1)
            chance = torch.nan_to_num(mass / (mass + 1.0 - shares[:, 1:num_drafts]), nan=1.0)
            chance = torch.cat([chance, shares[:, num_drafts:]], dim=1)
            accepted = torch.where(coins < chance, column[1:], 0).amax(1)
            share = shares.gather(1, accepted[:, None])
        else:
            accepted = (coins < ratio).long().cumprod(1).sum(1)
        last_draft = draft[request, accepted.clamp(max=num_drafts - 1)]
        is_full = (accepted == num_drafts)[:, None]
        weights = torch.where(is_full, 1.0, share) * target[request, accepted] - torch.where(is_full, 0.0, last_draft)
        weights = weights.clamp(min=0)
        bonus = (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)
        emitted = torch.cat([candidates[:, 1:], bonus], dim=1)
        emitted = torch.where(column == accepted[:, None], bonus, emitted)
        is_path = column <= accepted[:, None]
        return {
            "predicts": torch.where(is_path, emitted, -1).flatten().int(),
            "accept_index": torch.where(is_path, request[:, None] * num_tokens + column, -1).int(),
            "accept_token_num": accepted.int(),
        }

    return once
