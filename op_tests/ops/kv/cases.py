"""Sizes that the KV ops are tested on, and tables of random slots."""

import torch

TOPK, NUM_STEPS, PAGE_SIZES, BATCH_SIZES = (1, 2, 4, 8), (1, 3, 5, 8), (1, 16, 64, 256), (1, 3, 64)


def random_rows(batch_size: int, columns: int, *, dtype=torch.int64, device="cpu") -> dict:
    """req_pool_indices of `batch_size` requests in a table of two rows more; every slot of it is another one."""
    num_rows = batch_size + 2
    values = {
        "req_pool_indices": torch.randperm(num_rows)[:batch_size],
        "req_to_token": torch.randperm(num_rows * columns).view(num_rows, columns),
    }
    return {name: value.to(device=device, dtype=dtype) for name, value in values.items()}


def example_rows(*rows: int, columns: int = 32, device="cpu") -> dict:
    """The table of SGLang's worked examples: row r is 1000 * (r + 1) and counts up; requests have these rows."""
    first = torch.tensor([[1000], [2000]], device=device)
    table = first + torch.arange(columns, device=device)
    return {"req_pool_indices": torch.tensor(rows, device=device), "req_to_token": table}
