"""Keys and values of accepted drafts, moved in place, are those that a prefill of the accepted tokens writes."""

from __future__ import annotations

import pytest
import torch

from eagle_kernels import ops
from eagle_kernels.engine.batch.kv_pool import KVPool, PrefillAttend, TreeAttend
from eagle_kernels.engine.models.decoder import Decoder
from eagle_kernels.engine.models.decoder_config import DecoderConfig

CONFIG = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 5000.0,
}  # fmt: skip
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
PATHS = [[0, 2, 5], [0], [0, 1, 3, 6]]
PREFIXES = [5, 17, 30]


def run(model, attend, tokens, positions):
    with torch.no_grad():
        model(tokens, positions, attend)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_moved_drafts_equal_a_fresh_prefill(page_size, device):
    model = Decoder(DecoderConfig.from_dict(CONFIG)).to(device).eval()
    num_nodes, most = len(PARENTS), max(len(path) for path in PATHS)
    ancestors = torch.eye(num_nodes, dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        ancestors[node] |= ancestors[parent]
    words = (ancestors.long() << torch.arange(num_nodes)).sum(-1)[None, :, None].expand(len(PATHS), -1, -1)
    depths = ancestors.sum(-1) - 1
    prompts = [torch.randint(CONFIG["vocab_size"], (1, length), device=device) for length in PREFIXES]
    drafts = torch.randint(CONFIG["vocab_size"], (len(PATHS), num_nodes), device=device)
    lengths = torch.tensor(PREFIXES, device=device)

    table = torch.arange(len(PATHS) * 60, dtype=torch.int32, device=device).view(len(PATHS), 60)

    def prefilled(sequences):
        pool = KVPool(model.kv_shape, table.numel(), page_size, torch.float32, torch.device(device))
        for request, tokens in enumerate(sequences):
            count = tokens.shape[1]
            attend = PrefillAttend(pool, table[request : request + 1], [(0, count)])
            run(model, attend, tokens, torch.arange(count, device=device)[None])
        return pool

    pool = prefilled(prompts)
    positions = lengths[:, None] + depths.to(device)
    slots = ops.find_slots(table, lengths, count=num_nodes, page_size=page_size).slots
    words = words.contiguous().to(device)
    run(model, TreeAttend(pool, table, lengths, slots, num_nodes, words, positions), drafts, positions)
    accept_index = torch.full((len(PATHS), most), -1, dtype=torch.int32)
    for request, path in enumerate(PATHS):
        accept_index[request, : len(path)] = torch.tensor(path) + request * num_nodes
    accepted = torch.tensor([len(path) - 1 for path in PATHS], dtype=torch.int32, device=device)
    ops.move_accepted_kv(
        pool.k_cache, pool.v_cache, table, lengths, accept_index.to(device), accepted,
        num_verify_tokens=num_nodes,
    )  # fmt: skip

    sequences = [torch.cat([prompt[0], draft[path]])[None] for prompt, draft, path in zip(prompts, drafts, PATHS)]
    fresh = prefilled(sequences)
    for request, tokens in enumerate(sequences):
        begin = torch.zeros(1, dtype=torch.int64, device=device)
        own = table[request : request + 1]
        rows = ops.find_slots(own, begin, count=tokens.shape[1], page_size=page_size).slots[0]
        for name in ("k_cache", "v_cache"):
            moved, expected = (getattr(each, name).flatten(1, 2)[:, rows] for each in (pool, fresh))
            torch.testing.assert_close(moved, expected, atol=2e-5, rtol=1e-5)
