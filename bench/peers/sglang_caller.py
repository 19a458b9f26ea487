"""What SGLang does around its tree ops: its CUDA and its Triton kernels have one signature and leave the same to do.

The buffers are allocated once, which a server does not; everything else that a caller must do is in the timed call.
"""

from collections.abc import Callable

import torch

from ..harness.declaration import Run

MASK_MODES = {"full_mask": 0, "qlen_only": 1, "qlen_only_bitpacking": 2}
LINKS = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")


def build_tree(values: dict, op: Callable[..., None]) -> Run:
    """The bonus token before the drafts, links filled with -1, the mask with True (bit-packed: zeros), then `op`.

    For "packed", which SGLang does not have, `op` makes the layout that it would be used in place of, "qlen_only"; the
    mask is then not compared.
    """
    seq_lens, num_nodes = values["seq_lens"], values["num_verify_tokens"]
    batch_size, device = len(seq_lens), seq_lens.device
    mode = values["tree_mask_mode"]
    shape, dtype = (batch_size, num_nodes, num_nodes), torch.bool
    if mode == "full_mask":
        shape = (num_nodes * (values["seq_lens_sum"] + batch_size * num_nodes),)
    elif mode == "qlen_only_bitpacking":
        shape = shape[:2]
        dtype = torch.uint8 if num_nodes <= 8 else torch.uint16 if num_nodes <= 16 else torch.uint32
    tree_mask = torch.empty(shape, dtype=dtype, device=device)
    cells, fill = (tree_mask.view(torch.uint8), 0) if mode == "qlen_only_bitpacking" else (tree_mask, True)
    positions = torch.empty(batch_size * num_nodes, dtype=torch.int64, device=device)
    links = torch.empty(3, batch_size, num_nodes, dtype=torch.int64, device=device)

    def run():
        draft_tokens = torch.cat([values["verified_id"][:, None], values["draft_tokens"]], dim=1).flatten()
        cells.fill_(fill)
        links.fill_(-1)
        op(
            values["parent_list"], values["top_scores_index"], seq_lens, tree_mask.flatten(), positions, *links,
            values["topk"], values["spec_steps"], num_nodes, MASK_MODES.get(mode, MASK_MODES["qlen_only"]),
        )  # fmt: skip
        outputs = {"positions": positions, **dict(zip(LINKS, links)), "draft_tokens": draft_tokens}
        return outputs if mode == "packed" else outputs | {"tree_mask": tree_mask}

    return run


def verify_tree_coins(values: dict, op: Callable[..., None], is_bare: bool = False) -> Run:
    """Two fills and draft_probs, as large as the target's, with zeros; `op`; the bonus counted.

    is_bare: `op` alone, on buffers that were filled once: it leaves draft_probs dirty where it rejected, which makes no
    difference to the same walk made again.
    """
    walk = _coin_walk(values, values["target_probs"].shape, op, is_bare)
    return lambda: walk(values["target_probs"])


def verify_tree_sampled(
    values: dict,
    op: Callable[..., None],
    top_k_renorm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    top_p_renorm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Run:
    """Softmax of the fp32 logits of all nodes over the temperature, the filters asked for, then `verify_tree_coins`.

    The logits are made fp32, parameters are laid out by node and coins are drawn outside of the timed call. All coins
    are one half: where each row is all but decided, they take the path that any coins would.
    """
    batch_size, num_nodes = values["candidates"].shape
    logits = values["target_logits"].float()
    by_node = {
        name: values[name].repeat_interleave(num_nodes)
        for name in ("temperature", "top_k", "top_p")
        if values.get(name) is not None
    }
    temperature = by_node["temperature"][:, None]
    shape = (batch_size, num_nodes, logits.shape[1])
    half = torch.full((batch_size, num_nodes), 0.5, device=logits.device)
    coins = {"uniform_samples": half, "uniform_samples_for_final_sampling": half[:, 0].contiguous()}
    walk = _coin_walk(values | coins, shape, op)

    def run():
        probs = torch.softmax(logits / temperature, dim=-1)
        if "top_k" in by_node:
            probs = top_k_renorm(probs, by_node["top_k"])
        if "top_p" in by_node:
            probs = top_p_renorm(probs, by_node["top_p"])
        return walk(probs.view(shape))

    return run


def _coin_walk(values: dict, shape: tuple, op: Callable[..., None], is_bare: bool = False) -> Callable:
    """walk(target_probs) with the coins in `values`, buffers for target_probs of this shape."""
    draft_probs = torch.zeros(shape, device=values["candidates"].device)
    coins = [values["uniform_samples"], values["uniform_samples_for_final_sampling"]]
    thresholds = [values.get("threshold_single", 1.0), values.get("threshold_acc", 1.0)]
    walk = _walk(values, op, is_bare)

    def run(target_probs):
        if not is_bare:
            draft_probs.zero_()
        return walk(*coins, target_probs, draft_probs, *thresholds, True)

    return run


def _walk(values: dict, op: Callable[..., None], is_bare: bool) -> Callable:
    """walk(*more) calls `op` with the outputs, the tree and more; unless is_bare, with what its caller does around."""
    device, (batch_size, num_nodes) = values["candidates"].device, values["candidates"].shape
    predicts = torch.full((batch_size * num_nodes,), -1, dtype=torch.int32, device=device)
    accept_index = torch.full((batch_size, values["spec_steps"] + 1), -1, dtype=torch.int32, device=device)
    accept_token_num = torch.empty(batch_size, dtype=torch.int32, device=device)
    outputs = {"predicts": predicts, "accept_index": accept_index, "accept_token_num": accept_token_num}
    arguments = (*outputs.values(), *(values[name] for name in ("candidates", *LINKS)))

    def run(*more):
        if not is_bare:
            predicts.fill_(-1)
            accept_index.fill_(-1)
        op(*arguments, *more)
        if not is_bare:
            torch.add(accept_token_num, 1)  # its accept lengths count the bonus
        return outputs

    return run


def verify_tree_greedy(values: dict, op: Callable[..., None], is_bare: bool = False) -> Run:
    """Two fills, `op`, and the bonus counted; torch's argmax before it where the target gives logits.

    is_bare: `op` alone, on buffers that were filled once.
    """
    walk = _walk(values, op, is_bare)

    def run():
        target_predict = values.get("target_predict")
        if target_predict is None:
            target_predict = values["target_logits"].argmax(-1).view(values["candidates"].shape)
        return walk(target_predict)

    return run
