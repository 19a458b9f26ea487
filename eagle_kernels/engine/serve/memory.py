"""The bytes that a configuration needs, counted before anything is allocated."""

from collections.abc import Sequence

from ...runtime.placement import free_memory_bytes
from ..batch.kv_types import read_cache_dtype
from ..config.eagle_config import EAGLEConfig
from ..drafters.methods import make_drafter, make_readers, trees_of
from ..models.protocol import DraftModel, TargetModel, elements_of

# for KV pools on the CPU if kv_cache_bytes is not given
_CPU_CACHE_BYTES = 1 << 30


def count_pages(target: TargetModel, drafts: Sequence[DraftModel], config: EAGLEConfig, max_pages: int) -> int:
    """Returns the pages that kv_cache_bytes holds, at most those that max_batch requests of max_pages each use."""
    budget = config.kv_cache_bytes
    if budget is None:
        budget = free_memory_bytes(target.device) // 2 if target.device.type == "cuda" else _CPU_CACHE_BYTES
    return max(1, min(budget // _page_bytes(target, drafts, config), config.max_batch * max_pages))


def workspace_bytes(
    target: TargetModel, drafts: Sequence[DraftModel], config: EAGLEConfig, max_pages: int, num_pages: int | None = None
) -> dict[str, int]:
    """Returns the bytes besides the weights, by purpose, and their `total`; num_pages: of pools that exist already.
    kv_cache  the pools of all models
    rows      the state of a batch's rows, without penalties (4 bytes more per token of the vocabulary)
    step      the largest tensors of the largest step: logits, and the features that the draft reads"""
    element, rows, of_drafts = target.dtype.itemsize, config.max_batch, 0
    num_streams, readers = sum(len(draft.aux_layers) for draft in drafts), make_readers(config, target, drafts)
    draft_vocab_size = max((draft.draft_vocab_size for draft in drafts), default=0)
    for each, draft in zip(readers, drafts):
        # width of the draft's own state: a head's is about as wide as the target's, a language model has none
        hidden_size, of_features = target.hidden_size if draft.aux_layers else 0, each.columns.stop - each.columns.start
        of_drafts += element * (draft.draft_vocab_size + hidden_size) + 8 * (each.number > 0)
        of_drafts += each.reader.num_kept * (8 + element * of_features)
    trees = trees_of(config, readers) if config.may_speculate else ()
    drafters = [make_drafter(tree, reader, target.device) for _, tree, reader in trees if tree is not None]
    keeps_history = any(drafter.reads_history for drafter in drafters)
    history = 4 * max_pages * config.page_size if keeps_history else 0
    # (rows, nodes, levels or beams of the draft) of each kind of step; a plain one drafts nothing
    shapes, fewer = [(rows, 1, 0)], 0
    for most, tree, _ in trees:
        is_reached, fewer = fewer < rows, most if isinstance(config.adaptive, tuple) else 0
        if tree is None or not is_reached:  # for more requests than there are
            continue
        num_drafted = max(tree.topk, tree.num_steps + 1)
        # of trees that share a budget, the logits are unpacked
        nodes = tree.num_verify_tokens + (0 if tree.mean_draft_tokens is None else tree.mean_draft_tokens)
        shapes.append((rows if most is None else min(rows, most), nodes, num_drafted))
    if num_pages is None:
        num_pages = count_pages(target, drafts, config, max_pages)
    sizes = {
        "kv_cache": num_pages * _page_bytes(target, drafts, config),
        "rows": rows * (4 * max_pages + 76 + history + of_drafts),
        "step": element * max(
            count * (nodes * (target.vocab_size + num_streams * target.hidden_size) + drafted * draft_vocab_size)
            for count, nodes, drafted in shapes
        ),
    }  # fmt: skip
    return sizes | {"total": sum(sizes.values())}


def check_fits(
    target: TargetModel, drafts: Sequence[DraftModel], config: EAGLEConfig, max_pages: int, num_pages: int
) -> None:
    """Raises ValueError if pools and rows do not fit into free memory, before either is allocated."""
    sizes = workspace_bytes(target, drafts, config, max_pages, num_pages)
    free = free_memory_bytes(target.device)
    if free is not None and sizes["kv_cache"] + sizes["rows"] > free:
        pools, rows, free = (f"{size / 2**30:.2f} GiB" for size in (sizes["kv_cache"], sizes["rows"], free))
        rule = f"kv_cache_bytes and the rows of max_batch={config.max_batch} must fit into free memory"
        raise ValueError(f"EAGLEInference: {rule}, got {pools} and {rows} with {free} free on {target.device}")


def _page_bytes(target: TargetModel, drafts: Sequence[DraftModel], config: EAGLEConfig) -> int:
    pools = [(target, read_cache_dtype(config.kv_cache_dtype, target)), *((draft, target.dtype) for draft in drafts)]
    return config.page_size * sum(elements_of(model.kv_shape) * dtype.itemsize for model, dtype in pools)
