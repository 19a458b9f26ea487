"""Random tries of drafts, for the tests of several ops."""

import torch


def random_tries(batch_size: int, num_drafts: int, branching: float, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Tokens and parents [B, M] of random trees, most nodes below the one before, others below any earlier one."""
    node = torch.arange(1, num_drafts + 1)
    elsewhere = (torch.rand(batch_size, num_drafts) * node).long()
    parents = torch.where(torch.rand(batch_size, num_drafts) < branching, elsewhere, node - 1)
    return torch.randint(vocabulary, (batch_size, num_drafts)), parents
