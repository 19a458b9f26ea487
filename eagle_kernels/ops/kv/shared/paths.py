"""Paths of accepted nodes, as the ops of verification return them: accept_index [B, W] and accept_token_num [B]."""

import torch

from ....runtime import check


def debug_paths(args: check.Arguments, num_nodes: int) -> None:
    """Checks with EAGLE_KERNELS_DEBUG=1 that paths, either of whose two tensors may be None, lead through the trees.
    A request is dead, and not checked, if its accept_token_num is negative or its whole row of accept_index is -1."""
    if not check.DEBUG:
        return
    num_drafts, path = args.values["accept_token_num"], args.values["accept_index"]
    width = num_nodes if path is None else path.shape[1]
    if num_drafts is not None:
        args.debug("accept_token_num", f"be below the {width} entries of a path", lambda: num_drafts < width)
    if path is None:
        return

    def holds() -> torch.Tensor:
        node = path - torch.arange(len(path), device=path.device)[:, None] * num_nodes
        if num_drafts is None:
            is_unused = path == -1
        else:
            is_unused = torch.arange(width, device=path.device) > num_drafts[:, None]
        return is_unused | ((node >= 0) & (node < num_nodes)) | (path == -1).all(1, keepdim=True)

    args.debug("accept_index", f"name one of the {num_nodes} nodes of the request's tree where it is read", holds)
