"""Steps with trees in vLLM on Hopper: all kernels of attention that they launch are compiled before requests come."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.integrations.vllm.trees import Level, Trees, TreeShape
from eagle_kernels.runtime import launch, target
from op_tests.integrations import vllm_stub as stub

REQUESTS, ROWS, LONGEST = 40, 4096, 2048


class Steps:
    """A target's layer and a draft's, steps of which launch nothing: what they would compile is noted in `kinds`."""

    def __init__(self, attention, monkeypatch, shape: TreeShape, heads: tuple[int, ...], page_size: int):
        drafting = importlib.import_module("eagle_kernels.integrations.vllm.tree_drafting")
        num_heads, num_kv_heads, head_size = heads
        self.shape, self.kinds = shape, set()
        monkeypatch.setattr(attention.Implementation, "forward", lambda *given: None)  # FlashAttention 3's
        config = SimpleNamespace(
            num_speculative_tokens=shape.num_nodes - 1, scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS)
        )
        self.builder = attention.EagleKernelsBuilder(None, [], config, torch.device("cpu"))
        self.trees = self.builder.trees = Trees(shape, REQUESTS, ROWS, torch.device("cpu"))
        cache = torch.zeros(2, page_size, num_kv_heads, 2 * head_size, dtype=torch.bfloat16).transpose(1, 2)
        given = num_heads, head_size, head_size**-0.5, num_kv_heads, None, None, "auto"
        self.layers = {
            name: SimpleNamespace(impl=attention.EagleKernelsImpl(*given), kv_cache=cache, num_kv_heads=num_kv_heads)
            for name in ("target", "draft")
        }  # fmt: skip
        self.layers["target"].impl.reads_trees = True
        beams = torch.zeros(REQUESTS, shape.topk * (shape.depth - 1), num_kv_heads, head_size, dtype=torch.bfloat16)
        self.table = torch.zeros(REQUESTS, LONGEST // page_size, dtype=torch.int32)
        self.speculator = object.__new__(drafting.TreeDrafts)
        vars(self.speculator).update(
            shape=shape, trees=self.trees, max_num_reqs=REQUESTS, max_num_tokens=ROWS, max_model_len=LONGEST,
            dtype=torch.bfloat16, device=torch.device("cpu"), beam_caches={"draft": (beams, beams)},
            first={"ancestors": torch.zeros(REQUESTS, shape.topk, 1, dtype=torch.int64)},
            vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=self.layers)),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[*self.layers])]),
            block_tables=SimpleNamespace(input_block_tables=[self.table]),
        )  # fmt: skip

    def note(self, op, kernel, grid, arguments) -> None:
        def kind(name, value):
            if isinstance(value, torch.Tensor):
                return str(value.dtype), value.data_ptr() % 16 == 0
            if isinstance(value, tuple) and hasattr(value, "_fields") and not name.isupper():
                return tuple(kind(field, each) for field, each in zip(value._fields, value))
            # other numbers are told not to make other kernels
            return repr(value) if name.isupper() or name in ("num_warps", "num_stages") else value is None

        self.kinds.add((kernel.__name__, *((name, kind(name, value)) for name, value in sorted(arguments.items()))))

    def step(self, rows: list[int], has_trees: bool) -> None:
        """Lets both layers attend with these numbers of rows."""
        self.trees.current = self.trees.state if has_trees else None
        bounds = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
        metadata = self.builder.build(0, stub.CommonAttentionMetadata(
            query_start_loc=bounds, query_start_loc_cpu=bounds, num_reqs=len(rows), num_actual_tokens=sum(rows),
            seq_lens=torch.zeros(REQUESTS, dtype=torch.int32)[: len(rows)], max_query_len=max(rows),
            max_seq_len=LONGEST, block_table_tensor=self.table[: len(rows)], slot_mapping=None,
        ))  # fmt: skip
        for layer in self.layers.values():
            self.speculator._attend(layer, sum(rows), metadata)

    def levels(self, count: int) -> None:
        for number in range(1, self.shape.depth):
            words = -(-number * self.shape.topk // 64)
            ancestors = torch.zeros(count, self.shape.topk, words, dtype=torch.int64)
            prefixes = torch.zeros(count, dtype=torch.int32)
            level = Level(number, *self.speculator.beam_caches["draft"], self.table[:count], prefixes, ancestors)
            self.speculator._attend(self.layers["draft"], count * self.shape.topk, level)


@pytest.mark.parametrize("captured", [(1, 2, 4, 8), (24,)], ids=["graphs", "eager"])
@pytest.mark.parametrize(("heads", "page_size"), [((8, 4, 32), 16), ((32, 8, 128), 16), ((4, 2, 256), 64)], ids=str)
@pytest.mark.parametrize("shape", [TreeShape(8, 5, 64), TreeShape(4, 3, 8), TreeShape(1, 4, 5)], ids=str)
def test_what_is_launched_later_is_compiled_before(monkeypatch, shape, heads, page_size, captured):
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "triton")
    nodes = shape.num_nodes
    with stub.installed(stub.HOPPER), target.assume("sm_90"):
        attention = importlib.import_module("eagle_kernels.integrations.vllm.attention")
        steps = Steps(attention, monkeypatch, shape, heads, page_size)
        with launch.intercept(steps.note):
            for count in captured:  # as vLLM captures them, or decodes once before
                steps.step([nodes] * count, has_trees=False)
                steps.levels(count)
            steps.step([nodes + 1] * captured[-1], has_trees=False)  # vLLM's own
            for call in steps.speculator.later_steps():
                call()
            compiled = set(steps.kinds)
            for count in (1, 2, 3, 7, 8, 9, 31, 32, 33, 39):
                steps.levels(count)
                for longest in {nodes + 1, 2 * nodes, 100, 2000, ROWS - nodes * count}:
                    steps.step([1] * count + [longest], has_trees=True)
                    steps.step([nodes] * count + [longest], has_trees=True)
                for longest in (1, 2, nodes // 2, nodes):
                    steps.step([longest] + [1] * (count - 1), has_trees=longest > 1)
            steps.step([1], has_trees=False)
    assert steps.kinds <= compiled, f"{len(steps.kinds - compiled)} kernels were launched later alone"
    assert {name for name, *_ in compiled} >= {"_attention_kernel", "_merge_kernel", "_prefill_attention_kernel"}
