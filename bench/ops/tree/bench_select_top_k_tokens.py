"""select_top_k_tokens on draft logits of both usual vocabulary sizes, and on the root's own."""

import torch

from bench.harness import Floor, grid
from bench.peers.torch_compile import compiled

DEFAULTS = {"topk": 8, "level": 2}
CASES = [
    *grid(vocab_size=[32000, 128256], batch_size=[1, 8, 32]),
    {"batch_size": 8, "vocab_size": 128256, "level": 0},
    {"batch_size": 4, "vocab_size": 128256, "topk": 16},
]
SMALL_CASES = [
    {"batch_size": 2, "vocab_size": 300},
    {"batch_size": 2, "vocab_size": 300, "level": 0},
    {"batch_size": 1, "vocab_size": 300, "topk": 16, "level": 4},
]
FLOOR = Floor("read", 5.0)


def name(batch_size, vocab_size, topk, level):
    rows = batch_size * (topk if level else 1)
    return f"rows={rows} V={vocab_size}" + (f" K={topk}" if topk != 8 else "") + ("" if level else " level 0")


def make(device, batch_size, vocab_size, topk, level):
    rows = batch_size * (topk if level else 1)
    values = {"logits": torch.randn(rows, vocab_size, device=device).to(torch.bfloat16), "topk": topk, "level": level}
    if level:
        values["scores"] = torch.rand(batch_size, topk, device=device).log().sort(descending=True).values
        num_words = -(-level * topk // 64)
        values["ancestors"] = torch.randint(2 ** min(level * topk, 62), (batch_size, topk, num_words), device=device)
    return values


def count_bytes(batch_size, vocab_size, topk, level):
    return batch_size * (topk if level else 1) * vocab_size * 2


def _prepare_level(values):
    """Computes everything that the op returns."""
    logits, topk, level = values["logits"], values["topk"], values["level"]
    scores, ancestors = values.get("scores"), values.get("ancestors")
    num_beams = topk if level else 1
    batch_size = len(logits) // num_beams
    slot = torch.arange(level * topk, (level + 1) * topk, device=logits.device)
    own = torch.zeros(topk, -(-(level + 1) * topk // 64), dtype=torch.int64, device=logits.device)
    own[torch.arange(topk, device=logits.device), slot // 64] = torch.ones_like(slot) << slot % 64
    first_row = torch.arange(batch_size, device=logits.device)[:, None] * num_beams
    first_candidate = topk + topk * topk * (level - 1) if level else 0

    def run():
        log_probs, tokens = torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(topk)
        candidate_scores = log_probs.view(batch_size, num_beams, topk)
        if level:
            candidate_scores = candidate_scores + scores[:, :, None]
        candidate_scores = candidate_scores.flatten(1)
        kept_scores, kept = candidate_scores.topk(topk)
        parents = kept // topk
        words = own.expand(batch_size, -1, -1)
        if level:
            inherited = ancestors.gather(1, parents[:, :, None].expand(-1, -1, ancestors.shape[2]))
            words = words | torch.nn.functional.pad(inherited, (0, own.shape[1] - ancestors.shape[2]))
        kept_tokens = tokens.view(batch_size, -1).gather(1, kept)
        others = kept_tokens, parents, first_row + parents, kept + first_candidate, tokens, words
        return kept_scores, candidate_scores, *others

    return run


def prepare_torch(values, prepare=_prepare_level):
    run = prepare(values)

    def compared():
        # torch.topk orders ties as it likes, so tokens and what follows from them cannot be compared
        scores, candidate_scores, *_ = run()
        return {"scores": scores, "candidate_scores": candidate_scores}

    return compared


PEERS = {"torch_compile": lambda values: prepare_torch(values, compiled(_prepare_level))}
