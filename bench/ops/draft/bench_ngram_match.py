"""ngram_match over batch sizes and lengths: chains, trees, and chains under a budget of the batch."""

import torch

from bench.harness import Floor, Unavailable, grid

VOCABULARY = 32000
NGRAM = 4
# of eight rows, so that most end in something that they hold already
PLANTED = 6

KINDS = ["chain", "tree"]
CASES = [
    *grid(kind=KINDS, shape=[(1, 1024), (1, 131072), (32, 8192), (256, 8192), (256, 131072)]),
    {"kind": "budget", "shape": (256, 8192)},
]
SMALL_CASES = grid(shape=(8, 1024), kind=[*KINDS, "budget"])
HEADLINES = [f"B=256 L=128k {kind}" for kind in KINDS]
# the goal: at most 1.3 of reading the histories once, and 5 us
FLOOR = Floor("read", 5.0)


def name(shape, kind):
    return f"B={shape[0]} L={shape[1] // 1024}k {kind}"


def make(device, shape, kind):
    """Zipf-distributed tokens; three of four rows also hold their last tokens once before, somewhere."""
    batch_size, length = shape
    weight = 1.0 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    shares = (weight.cumsum(0) / weight.sum()).float().to(device)
    token_ids = torch.empty(batch_size, length, dtype=torch.int32, device=device)
    for row in token_ids:  # one at a time: the numbers that it takes are larger than the tokens
        row.copy_(torch.searchsorted(shares, torch.rand(length, device=device)).clamp(max=VOCABULARY - 1))
    place = torch.randint(length - 64, (batch_size, 1)).to(device) + torch.arange(2 * NGRAM, device=device)
    is_planted = (torch.arange(batch_size, device=device) % 8 < PLANTED)[:, None]
    planted = torch.where(is_planted, token_ids[:, -2 * NGRAM :], token_ids.gather(1, place))
    token_ids.scatter_(1, place, planted)
    sizes = {
        "chain": {"num_speculative_tokens": 8, "max_matches": 1},
        "tree": {"num_speculative_tokens": 32, "spec_steps": 8, "max_matches": 8},
        "budget": {"num_speculative_tokens": 8, "max_matches": 1, "token_budget": 4 * batch_size},
    }[kind]
    seq_lens = torch.full((batch_size,), length, device=device)
    return {"token_ids": token_ids, "seq_lens": seq_lens, "max_ngram_size": NGRAM} | sizes


def count_bytes(shape, kind):
    return 4 * shape[0] * shape[1]


def prepare_torch(values):
    """FastDeploy's two phases: the longest n-gram that stood before, longest n first; then the batch's budget."""
    if values["max_matches"] > 1:
        raise Unavailable("the two-phase search drafts chains only")
    token_ids, num_drafts = values["token_ids"], values["num_speculative_tokens"]
    batch_size, length = token_ids.shape
    device, budget = token_ids.device, values.get("token_budget")
    step = torch.arange(num_drafts, device=device)
    nothing = torch.full((batch_size, num_drafts), -1, device=device)

    def run():
        match_len = torch.zeros(batch_size, dtype=torch.int64, device=device)
        end = torch.zeros(batch_size, dtype=torch.int64, device=device)
        for size in range(values["max_ngram_size"], 0, -1):
            # the last window is the end of the text itself
            window = token_ids[:, :-1].unfold(1, size, 1)
            is_match = (window == token_ids[:, None, -size:]).all(-1)
            latest = is_match.shape[1] - 1 - is_match.flip(1).int().argmax(1)
            is_new = is_match.any(1) & (match_len == 0)
            match_len = torch.where(is_new, size, match_len)
            end = torch.where(is_new, latest + size - 1, end)
        wanted = torch.where(match_len > 0, num_drafts, 0)
        if budget is not None:
            room = max(0, budget - batch_size) - (wanted.cumsum(0) - wanted)
            wanted = wanted.minimum(room.clamp(min=0))
        first = end[:, None] + 1
        tokens = token_ids.gather(1, first + step % (length - first)).long()
        is_draft = step < wanted[:, None]
        return {
            "tokens": torch.where(is_draft, tokens, nothing),
            "parents": torch.where(is_draft, step, nothing),
            "num_drafts": wanted,
            "match_len": match_len,
        }

    return run
