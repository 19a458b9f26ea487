"""move_accepted_kv in all layers of an 8B model: four accepted drafts, none of them in place already."""

import torch

from bench.harness import grid
from bench.harness.inputs import paged_cache
from eagle_kernels import cache_addresses
from eagle_kernels.raw import move_accepted_kv

NUM_NODES = 64
# the accepted path, root first
PATH = (0, 3, 9, 20, 40)
PAGE_SIZE = 16

CASES = grid(batch_size=[1, 8, 32], layers=32, prefix=1024, num_heads=8, head_dim=128)
SMALL_CASES = grid(batch_size=2, layers=2, prefix=20, num_heads=2, head_dim=16)


def name(batch_size, layers, **others):
    return f"B={batch_size} layers={layers}"


def make(device, batch_size, layers, prefix, num_heads, head_dim):
    values = paged_cache(device, batch_size, prefix + NUM_NODES, PAGE_SIZE, num_heads, head_dim, layers=(layers,))
    path = torch.tensor(PATH, device=device)
    return values | {
        "seq_lens": torch.full((batch_size,), prefix, device=device),
        "accept_index": path + NUM_NODES * torch.arange(batch_size, device=device)[:, None],
        "accept_token_num": torch.full((batch_size,), len(PATH) - 1, dtype=torch.int32, device=device),
        "num_verify_tokens": NUM_NODES,
    }


def count_bytes(batch_size, layers, prefix, num_heads, head_dim):
    """Keys and values of the moved rows, read and written; the root stays."""
    return 2 * 2 * 2 * layers * batch_size * (len(PATH) - 1) * num_heads * head_dim


def prepare_addresses(values):
    """The layers by a table of their addresses, as servers have them that allocate each by itself."""
    table = cache_addresses([*values["k_cache"]], [*values["v_cache"]])
    caches = {name: values[name][:1] for name in ("k_cache", "v_cache")}
    return lambda: move_accepted_kv(**values | caches, cache_addresses=table)


def prepare_layer_by_layer(values):
    """A call a layer, what such a server does without the table."""
    pairs = zip(values["k_cache"].split(1), values["v_cache"].split(1))
    calls = [values | {"k_cache": keys, "v_cache": layer} for keys, layer in pairs]

    def run():
        for call in calls:
            move_accepted_kv(**call)

    return run


def prepare_torch(values):
    """Gather and scatter with indices of all columns of accept_index, for paths that are accepted whole."""
    caches = values["k_cache"], values["v_cache"]
    table, depth = values["block_table"].long(), torch.arange(len(PATH), device=values["seq_lens"].device)

    def run():
        first = values["seq_lens"][:, None]
        source, target = first + values["accept_index"] % NUM_NODES, first + depth
        source_page, target_page = table.gather(1, source // PAGE_SIZE), table.gather(1, target // PAGE_SIZE)
        for cache in caches:
            cache[:, target_page, target % PAGE_SIZE] = cache[:, source_page, source % PAGE_SIZE]

    return run
