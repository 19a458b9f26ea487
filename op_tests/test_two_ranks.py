"""Two processes, each with half of the vocabulary, draw the same tokens: ops are functions of their inputs alone.

So ranks of a tensor-parallel model agree without a collective beyond the one that gathers their logits. Each process
has a GPU of its own where there are two.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed

import eagle_kernels
from op_tests.harness import to_device
from op_tests.harness.trees import depths_of, trees_of

ROOT = Path(__file__).parents[1]
NUM_RANKS, BATCH, NODES, VOCAB, STEPS = 2, 3, 5, 512, 4
# of a root with two children, the first of which has two
PARENTS = [-1, 0, 0, 1, 1]
LIMIT_S = 240


def draws(rank: int, folder: Path) -> list[torch.Tensor]:
    """Returns what a rank makes of its own half of each step's logits and those of the other."""
    torch.distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=NUM_RANKS)
    # all but the inputs differs between ranks: threads, the state of generators, what ran before
    torch.set_num_threads(1 + rank)
    torch.manual_seed(rank)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{rank % torch.cuda.device_count()}"
    found = []
    for step in range(STEPS):
        source = torch.Generator().manual_seed(NUM_RANKS * step + rank)
        shard = 4 * torch.randn(BATCH * NODES, VOCAB // NUM_RANKS, generator=source)
        shards = [torch.empty_like(shard) for _ in range(NUM_RANKS)]
        torch.distributed.all_gather(shards, shard)
        found += verify(torch.cat(shards, 1).to(device), step)
        if rank:
            torch.rand(step + 1)
    torch.distributed.destroy_process_group()
    return found


def verify(logits: torch.Tensor, step: int) -> list[torch.Tensor]:
    """Returns the outputs of the ops that draw, for trees of likely drafts."""
    rows, device = logits.view(BATCH, NODES, VOCAB), logits.device
    ranked = rows.argsort(dim=-1, descending=True, stable=True)
    likely = [ranked[:, max(parent, 0), place] for parent, place in zip(PARENTS, (0, 0, 1, 0, 1))]
    tree = to_device(trees_of(PARENTS, torch.stack(likely, 1).tolist()), device)
    seeds = torch.arange(BATCH, device=device) + 100
    positions = (torch.tensor(depths_of(PARENTS), device=device) + step).repeat(BATCH)
    coins = torch.rand(BATCH, NODES + 1, generator=torch.Generator().manual_seed(step)).to(device)
    filters = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
    filters = {name: torch.full((BATCH,), value, device=device) for name, value in filters.items()}
    filters["top_k"] = filters["top_k"].long()
    return [
        *eagle_kernels.verify_tree_greedy(**tree, target_logits=logits, spec_steps=2),
        *eagle_kernels.verify_tree_sampled(
            **tree, target_logits=logits, positions=positions, seeds=seeds, spec_steps=2, **filters
        ),
        *eagle_kernels.verify_tree_coins(
            **tree, target_probs=rows.softmax(-1), uniform_samples=coins[:, :-1].contiguous(),
            uniform_samples_for_final_sampling=coins[:, -1].contiguous(), spec_steps=2,
        ),
        eagle_kernels.sample_from_logits(rows[:, 0].contiguous(), positions[::NODES].contiguous(), seeds, **filters),
    ]  # fmt: skip


def test_ranks_draw_the_same_bits(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "op_tests.test_two_ranks", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment) for rank in range(NUM_RANKS)]
    try:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * NUM_RANKS
    finally:
        for rank in ranks:
            rank.kill()
    one, other = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(NUM_RANKS))
    assert len(one) == len(other) > 3 * STEPS
    for place, (mine, its) in enumerate(zip(one, other)):
        assert mine.dtype == its.dtype and torch.equal(mine, its), f"output {place} differs"
    assert not torch.equal(one[-1], one[len(one) // STEPS - 1]), "all steps are alike"


if __name__ == "__main__":
    outputs = draws(int(sys.argv[2]), Path(sys.argv[1]))
    kept = [tensor.cpu() for tensor in outputs if tensor is not None]
    torch.save(kept, Path(sys.argv[1]) / f"rank{sys.argv[2]}.pt")
