"""Tree masks of every layout as truths [B, Nq, Nk] and back."""

import torch

_WORD_BITS = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.int64: 64}


def read_mask(tree_mask: torch.Tensor, seq_lens: torch.Tensor | None, num_nodes: int | None, mode: str) -> torch.Tensor:
    """Returns the mask as bool [B, Nq, Nk]; num_nodes, where given, is Nk. Cells missing in a FULL_MASK are not set."""
    if mode == "qlen_only":
        square = tree_mask.view(-1, num_nodes, num_nodes) if tree_mask.dim() == 1 else tree_mask
        return square != 0
    if mode == "full_mask":
        key = torch.arange(num_nodes, device=tree_mask.device)
        lengths = seq_lens.to(torch.int64)
        width = (lengths + num_nodes)[:, None, None]
        start = num_nodes * (width.cumsum(0) - width)
        cell = start + key[:, None] * width + lengths[:, None, None] + key
        exists = (cell >= 0) & (cell < len(tree_mask))
        return exists & torch.cat([tree_mask, tree_mask.new_zeros(1)])[torch.where(exists, cell, -1)].ne(0)
    words = tree_mask[..., None] if mode == "qlen_only_bitpacking" else tree_mask
    bits = _WORD_BITS[words.dtype]
    if num_nodes is None:
        num_nodes = words.shape[1] if mode == "qlen_only_bitpacking" else bits * words.shape[-1]
    key = torch.arange(num_nodes, device=tree_mask.device)
    return (words.to(torch.int64)[..., key // bits] >> (key % bits)) & 1 == 1


def write_mask(
    visible: torch.Tensor, seq_lens: torch.Tensor | None, mode: str, seq_lens_sum: int | None = None,
    buffer: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns the bool mask [B, Nq, Nk] in the layout that `mode` names.
    FULL_MASK is as long as `buffer`, whose other cells stay, or as seq_lens_sum says; None: as the lengths do."""
    batch_size, num_rows, num_keys = visible.shape
    if mode == "qlen_only":
        return visible
    if mode == "full_mask":
        lengths = [max(length, 0) for length in seq_lens.tolist()]
        if buffer is not None:
            cells = buffer.cpu().clone()
        else:
            seq_lens_sum = sum(lengths) if seq_lens_sum is None else seq_lens_sum
            cells = torch.zeros(num_rows * (seq_lens_sum + batch_size * num_rows), dtype=torch.bool, device="cpu")
        begin = 0
        for length, rows in zip(lengths, visible.cpu()):
            for row in rows:
                # where lengths do not fit the mask, what they place after its end is left out
                first_key = min(begin + length, len(cells))
                cells[begin:first_key] = True
                keys = cells[first_key : first_key + num_keys]
                keys.copy_(row[: len(keys)])
                begin = first_key + len(keys)
        return cells.to(visible.device)
    key = torch.arange(num_keys, device=visible.device)
    words = torch.zeros(batch_size, num_rows, -(-num_keys // 64), dtype=torch.int64, device=visible.device)
    for word in range(words.shape[-1]):
        inside = key // 64 == word
        # bits are distinct, so the sum is their union (bit 63 wraps to the sign as it should)
        words[:, :, word] = (visible[:, :, inside].to(torch.int64) << (key[inside] % 64)).sum(-1)
    if mode == "packed":
        return words
    dtype = torch.uint8 if num_keys <= 8 else torch.uint16 if num_keys <= 16 else torch.uint32
    return words[:, :, 0].to(dtype)
