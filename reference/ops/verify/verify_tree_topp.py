"""Reference of verify_tree_topp: membership first, then the window, from the root down."""

import torch

from ...tree import Output, children, write_paths


def verify_tree_topp(
    candidates: torch.Tensor, retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, candidate_ids: torch.Tensor, candidate_lens: torch.Tensor,
    target_predict: torch.Tensor,
    *, spec_steps: int, verify_window: int = 2,
) -> Output:  # fmt: skip
    """See eagle_kernels/ops/verify/verify_tree_topp.py."""
    num_nodes = candidates.shape[1]
    children_of = children(retrieve_index, retrieve_next_token, retrieve_next_sibling)
    tokens, ids, lengths = candidates.tolist(), candidate_ids.tolist(), candidate_lens.tolist()
    target_predict = target_predict.to(torch.int64)
    predicted = torch.where((target_predict >= 0) & (target_predict < 2**31), target_predict, -1)

    def child_in(request: int, node: int, allowed: list[int]) -> list[int]:
        """Returns the first child whose token is allowed, as a list of at most one."""
        valid = {token for token in allowed if 0 <= token < 2**31}
        return [child for child in children_of(request, node) if tokens[request][child] in valid][:1]

    def verified(request: int) -> tuple[list[int], int]:
        path = [0]
        while len(path) <= spec_steps:
            row = request * num_nodes + path[-1]
            further = child_in(request, path[-1], ids[row][: max(lengths[row], 0)])
            if not further:
                further = child_in(request, path[-1], ids[row][1:2])
                while further and len(further) <= verify_window:
                    first = ids[request * num_nodes + further[-1]][:1]
                    below = child_in(request, further[-1], first)
                    further = further + below if below else []
                if not further or len(path) + len(further) > spec_steps + 1:
                    break
            path += further
        return path, int(predicted[request, path[-1]])

    return write_paths(candidates, retrieve_index, spec_steps, verified)
