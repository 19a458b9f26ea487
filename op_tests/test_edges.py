"""What docstrings say of edges, as numbers written by hand: dead rows, ids out of range, clamps, padding, NaN.

What kernel and reference get wrong alike no comparison of them shows.
"""

import math

import pytest
import torch

import eagle_kernels
from eagle_kernels.ops.linear.shared.repack import pack_columns
from eagle_kernels.ops.registry import OPS

from .harness import to_device
from .harness.trees import LINKS

T = torch.tensor
INF, NAN = math.inf, math.nan
BIG, FAR, LARGEST = 2**31, 2**40, torch.finfo(torch.float32).max
TABLE = {"req_pool_indices": T([1, 2, -1]), "req_to_token": T([[90, 91, 92, 93], [5, -7, 6, 8]])}


def tree(tokens: list, child: list, sibling: list, index: list | None = None) -> dict:
    """Links of trees; a request of its own for each row."""
    rows = torch.arange(T(tokens).numel()).view(len(tokens), -1) if index is None else T(index)
    return dict(zip(LINKS, (T(tokens), rows, T(child), T(sibling))))


# a chain of two drafts; one of a root of another request, which is dead; one whose links lead back and away
CHAINS = tree(
    [[9, 1, 2], [9, 1, 2], [9, 1, 2]], [[1, 2, -1], [1, 2, -1], [1, 0, 7]], [[-1, -1, -1], [-1, -1, -1], [-1, 5, 1]],
    [[0, 1, 2], [2, 4, 5], [6, 7, 8]],
)  # fmt: skip
PATHS_OF_CHAINS = {"accept_index": [[0, 1, 2], [-1, -1, -1], [6, 7, -1]], "accept_token_num": [2, 0, 1]}
ONE = tree([[9, 1]], [[1, -1]], [[-1, -1]])
# a node that is its own child and sibling, of a token that the target wants again; and one past the end
SELF = tree([[9, 1], [9, 1]], [[1, 1], [1, 2]], [[-1, 1], [-1, 2]])
PATHS_OF_SELF = {"accept_index": [[0, 1, -1], [2, 3, -1]], "accept_token_num": [1, 1], "predicts": [1, 1, 1, 1]}
SAMPLED = {"positions": T([5, 6]), "seeds": T([3]), "temperature": T([1.0])}


def rows(*numbers: list) -> torch.Tensor:
    return T([*numbers], dtype=torch.float32)


def certain(*tokens: int, size: int = 4) -> torch.Tensor:
    """Logits of rows that are sure of these tokens."""
    return torch.where(torch.arange(size) == T(tokens)[:, None], 0.0, -INF)


# op: [(arguments, what comes of each named output or of an argument in place)]; nothing but these numbers decides
EDGES: dict[str, list[tuple[dict, dict]]] = {
    "append_output": [
        # no id ends the step: past int32, below 0; the largest one is an id
        ({"token_ids": T([[7, 0, 0, 0, 0]] * 3), "num_tokens": T([1, 1, 1]), "num_prompt_tokens": T([1, 1, 1]),
          "tokens": T([[5, BIG, 6], [BIG - 1, -9, 6], [FAR, 5, 6]])},
         {"tokens": [[5, -1, -1], [BIG - 1, -1, -1], [-1, -1, -1]], "num_kept": [1, 1, 0], "new_num_tokens": [2, 2, 1],
          "finish_reason": [0, 0, 0], "token_ids": [[7, 5, 0, 0, 0], [7, BIG - 1, 0, 0, 0], [7, 0, 0, 0, 0]]}),
        # lengths are clamped to 0..L, a row that is full ends; rows that do not exist and requests not live do nothing
        ({"token_ids": T([[7, 7, 7]] * 5), "num_tokens": T([-4, 9, 3, 1, 2]), "num_prompt_tokens": T([0] * 5),
          "tokens": T([[5, 6]] * 5), "rows": T([4, 0, 1, 5, 2]), "is_live": T([1, 1, 1, 1, 0])},
         {"tokens": [[5, 6], [-1, -1], [-1, -1], [-1, -1], [-1, -1]], "num_kept": [2, 0, 0, 0, 0],
          "new_num_tokens": [2, 3, 3, 1, 2], "finish_reason": [0, 3, 3, 0, 0],
          "token_ids": [[7, 7, 7]] * 4 + [[5, 6, 7]]}),
        # end tokens and stop sequences past int32 are none; a sequence does not begin in the prompt
        ({"token_ids": T([[7, 0, 0, 0]] * 2), "num_tokens": T([1, 1]), "num_prompt_tokens": T([1, -3]),
          "tokens": T([[5, 6]] * 2), "end_token_ids": T([[-1, FAR + 5]] * 2), "stop_sequences": T([[[7, 5]]] * 2),
          "max_tokens": T([FAR, FAR])},
         {"tokens": [[5, 6], [5, -1]], "finish_reason": [0, 2]}),
        # 0 is a token, and what fills the room ends
        ({"token_ids": T([[7, 0, 0]]), "num_tokens": T([1]), "num_prompt_tokens": T([1]), "tokens": T([[0, 0, 5]])},
         {"tokens": [[0, 0, -1]], "finish_reason": [3], "new_num_tokens": [3]}),
    ],
    "pack_verify_rows": [
        ({"draft_tokens": T([[5, -6, 7], [1, 2, 3], [4, 4, 4]]), "num_tokens": T([4, -2, 1]), "max_rows": 5,
          "positions": T([[8, -9, 3], [0, 0, 0], [-1, 0, 0]])},
         {"input_ids": [5, 0, 7, 4, 0], "positions": [8, 0, 3, 0, 0], "row_to_batch": [0, 0, 0, 2, -1],
          "row_to_node": [0, 1, 2, 0, -1], "cu_seqlens": [0, 3, 3, 4], "num_rows": [4], "overflow": [0]}),
        ({"draft_tokens": T([[5, 6], [7, 8]]), "num_tokens": T([2, 2]), "max_rows": 3, "seq_lens": T([4, -1])},
         {"input_ids": [5, 6, 7], "positions": [4, 5, 0], "cu_seqlens": [0, 2, 3], "num_rows": [3], "overflow": [4]}),
        ({"draft_tokens": T([[0, 6]]), "num_tokens": T([2]), "max_rows": 2, "seq_lens": T([0])},
         {"input_ids": [0, 6], "positions": [0, 1], "num_rows": [2], "overflow": [0]}),
    ],
    "verify_commit": [
        # accept_token_num is clamped to 0..S; dead by -1, and by is_live; an entry of another request is the root's
        ({"predicts": T([10, 11, 12, 13, 14, 15, 16, 17, 18, 19]), "seq_lens": T([5, 5, 5, 5, 5]),
          "accept_index": T([[0, 1], [2, 3], [-1, -1], [6, 7], [8, 1]]), "accept_token_num": T([9, -2, 1, 1, 1]),
          "is_live": T([1, 1, 1, 0, 1])},
         {"new_seq_lens": [7, 6, 5, 5, 7], "bonus_tokens": [11, 12, -1, -1, -1], "accept_lengths": [2, 1, 0, 0, 2],
          "tokens": [[10, 11], [12, -1], [-1, -1], [-1, -1], [18, -1]],
          "hidden_rows": [[0, 1], [2, 2], [4, 4], [6, 6], [8, 8]], "last_row": [1, 2, 4, 6, 9]}),
        # the first node of the next request is none of this one's
        ({"predicts": T([10, 11, 12, 13]), "seq_lens": T([5, 5]), "accept_index": T([[0, 2], [3, 4]]),
          "accept_token_num": T([1, 1])},
         {"tokens": [[10, -1], [13, -1]], "hidden_rows": [[0, 0], [3, 2]], "bonus_tokens": [-1, -1]}),
    ],
    "verify_tree_greedy": [
        (CHAINS | {"target_predict": T([[1, 2, 3]] * 3), "spec_steps": 2},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 2, -1]}),
        (CHAINS | {"target_predict": T([[1, 2, 3]] * 3), "spec_steps": 0},
         {"accept_index": [[0], [-1], [6]], "accept_token_num": [0] * 3, "predicts": [1, *[-1] * 5, 1, -1, -1]}),
        # ids outside int32 are -1, which no draft carries
        (tree([[9, -1], [9, -1], [9, 5]], [[1, -1]] * 3, [[-1, -1]] * 3)
         | {"target_predict": T([[-1, 3], [BIG, 3], [FAR + 5, 3]]), "spec_steps": 1},
         {"accept_token_num": [0, 0, 0], "predicts": [-1, -1, -1, -1, -1, -1]}),
        # NaN is -inf, the lowest of equal ids, token 0 of nothing
        (ONE | {"target_logits": rows([NAN, 2, 2], [NAN, NAN, NAN]), "spec_steps": 1},
         {"accept_token_num": [1], "predicts": [1, 0]}),
        (ONE | {"target_logits": rows([NAN, -INF, 0], [-INF, INF, INF]), "spec_steps": 1},
         {"accept_token_num": [0], "predicts": [2, -1]}),
        # policies: no draft, always the first child, as often as the rates say
        (CHAINS | {"target_predict": T([[1, 2, 3]] * 3), "spec_steps": 2, "accept_policy": "reject_all"},
         {"accept_token_num": [0, 0, 0], "predicts": [1, *[-1] * 5, 1, -1, -1]}),
        (CHAINS | {"target_predict": T([[3, 3, 3]] * 3), "spec_steps": 2, "accept_policy": "accept_all"},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 3, -1]}),
        *((tree([[9, 1, 0]] * 2, [[1, 2, -1]] * 2, [[-1] * 3] * 2)
           | {"target_predict": T([[1, 0, 3], [5, 5, 3]]), "spec_steps": 2, "accept_policy": "simulate",
              "simulated_rates": T(rates), "seeds": T([1, 2]), "positions": torch.arange(6)},
           {"accept_token_num": [accepted] * 2})
          for rates, accepted in (([0.0, 0.0], 0), ([1.0, 0.0], 1), ([1.0, 1.0], 2))),
        (SELF | {"target_predict": torch.ones(2, 2, dtype=torch.int64), "spec_steps": 2}, PATHS_OF_SELF),
    ],
    "verify_tree_coins": [
        # NaN, infinite and negative probabilities are 0; a token outside V as well; the second sibling of a token, too
        (tree([[9, 0, 1], [9, 4, 3], [9, 2, 2]], [[1, -1, -1]] * 3, [[-1, 2, -1]] * 3)
         | {"target_probs": rows([NAN, INF, -1, 0.5], [0, 0, 0, 1], [0, 0, 0, 1],
                                 [0.5, 0, 0, 0.5], [0, 1, 0, 0], [0, 1, 0, 0],
                                 [0.5, 0, 0.5, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
            "uniform_samples": T([[0.0, 0, 0], [0.25, 0, 0], [0.75, 0, 0]]), "spec_steps": 1,
            "uniform_samples_for_final_sampling": T([0.0, 0.0, 0.75])},
         {"accept_token_num": [0, 1, 0], "predicts": [3, -1, -1, 3, -1, 1, 0, -1, -1]}),
        # a row without mass gives V - 1
        (ONE | {"target_probs": torch.zeros(2, 4), "uniform_samples": torch.zeros(1, 2), "spec_steps": 1,
                "uniform_samples_for_final_sampling": torch.zeros(1)},
         {"accept_token_num": [0], "predicts": [3, -1]}),
        (CHAINS | {"target_probs": torch.eye(4)[[1, 2, 3] * 3], "uniform_samples": torch.zeros(3, 3), "spec_steps": 2,
                   "uniform_samples_for_final_sampling": torch.zeros(3)},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 2, -1]}),
        (SELF | {"target_probs": torch.eye(4)[[1] * 4], "uniform_samples": torch.zeros(2, 2), "spec_steps": 2,
                 "uniform_samples_for_final_sampling": torch.zeros(2)}, PATHS_OF_SELF),
        # token 0 is one
        (tree([[9, 0]], [[1, -1]], [[-1, -1]])
         | {"target_probs": torch.eye(4)[[0, 2]], "uniform_samples": T([[0.5, 0.5]]), "spec_steps": 1,
            "uniform_samples_for_final_sampling": T([0.5])}, {"accept_token_num": [1], "predicts": [0, 2]}),
    ],
    "verify_tree_topp": [
        (CHAINS | {"candidate_ids": T([[1, 8], [2, 8], [3, 8]] * 3), "candidate_lens": T([1, 9, 1] * 3),
                   "target_predict": T([[1, 2, 3]] * 3), "spec_steps": 2, "verify_window": 0},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 2, -1]}),
        # -1 is no draft, nor what lies outside int32; the second candidate takes a window that fits
        (tree([[9, -1, 5], [9, 6, 2], [9, 6, 2]], [[1, 2, -1]] * 3, [[-1] * 3] * 3)
         | {"candidate_ids": T([[-1, FAR - 1], [7, 7], [7, 7], [7, 6], [2, 7], [7, 7], [7, 6], [3, 2], [7, 7]]),
            "candidate_lens": T([2, 1, 1, 1, 1, 1, 1, 1, 1]), "target_predict": T([[4, 4, 4]] * 3), "spec_steps": 2,
            "verify_window": 1},
         {"accept_token_num": [0, 2, 0], "predicts": [4, -1, -1, 6, 2, 4, 4, -1, -1]}),
        (tree([[9, 6, 2]], [[1, 2, -1]], [[-1] * 3])
         | {"candidate_ids": T([[7, 6], [2, 7], [7, 7]]), "candidate_lens": T([1, 1, 1]),
            "target_predict": T([[4, 4, 4]]), "spec_steps": 1, "verify_window": 1},
         {"accept_token_num": [0], "predicts": [4, -1, -1]}),
        (SELF | {"candidate_ids": torch.ones(4, 1, dtype=torch.int64), "candidate_lens": T([1] * 4), "spec_steps": 2,
                 "target_predict": torch.ones(2, 2, dtype=torch.int64), "verify_window": 0}, PATHS_OF_SELF),
    ],
    "verify_tree_typical": [
        (CHAINS | {"target_logits": certain(*[1, 2, 3] * 3), "positions": torch.arange(9), "seeds": T([1, 2, 3]),
                   "temperature": T([1.0, 1.0, 0.0]), "epsilon": T([0.1] * 3), "delta": T([0.3] * 3), "spec_steps": 2},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 2, -1]}),
        # a row of nothing but -inf; the threshold 0 does not take a token of probability 0; NaN is -inf
        (tree([[9, 0], [9, 0], [9, 1]], [[1, -1]] * 3, [[-1, -1]] * 3)
         | {"target_logits": rows([-INF, -INF], [0, 0], [-INF, 0], [0, 0], [NAN, 0], [0, -INF]),
            "positions": torch.arange(6), "seeds": T([1, 2, 3]), "temperature": torch.ones(3),
            "epsilon": torch.zeros(3), "delta": torch.zeros(3), "spec_steps": 1},
         {"accept_token_num": [0, 0, 1], "predicts": [0, -1, 1, -1, 1, 0]}),
        # of equally deep ends the lowest index
        (tree([[9, 0, 1]], [[1, -1, -1]], [[-1, 2, -1]])
         | {"target_logits": rows([0, 0, -INF], [-INF, -INF, 0], [0, -INF, -INF]), "positions": torch.arange(3),
            "seeds": T([1]), "temperature": T([1.0]), "epsilon": T([0.09]), "delta": T([0.3]), "spec_steps": 1},
         {"accept_index": [[0, 1]], "predicts": [0, 2, -1]}),
        (SELF | {"target_logits": certain(1, 1, 1, 1), "positions": torch.arange(4), "seeds": T([1, 2]),
                 "spec_steps": 2,
                 "temperature": T([1.0, 0.0]), "epsilon": T([0.1] * 2), "delta": T([0.3] * 2)}, PATHS_OF_SELF),
        # as likely as epsilon is not enough
        (ONE | SAMPLED | {"target_logits": rows([0, 0], [-INF, 0]), "epsilon": T([0.5]), "delta": T([9.0]),
                          "spec_steps": 1}, {"accept_token_num": [0]}),
    ],
    "verify_tree_sampled": [
        (CHAINS | {"target_logits": certain(*[1, 2, 3] * 3), "positions": torch.arange(9), "seeds": T([1, 2, 3]),
                   "temperature": T([1.0, 1.0, 0.0]), "spec_steps": 2, "seq_lens": T([7, 7, 7]),
                   "return_logprobs": True},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 2, -1], "new_seq_lens": [10, 7, 9],
                            "bonus_tokens": [3, -1, 2], "accept_lengths": [3, 0, 2], "last_row": [2, 3, 7],
                            "tokens": [[1, 2, 3], [-1, -1, -1], [1, 2, -1]],
                            "hidden_rows": [[0, 1, 2], [3, 3, 3], [6, 7, 6]],
                            "logprobs": [[0, 0, 0], [-INF] * 3, [0, 0, -INF]],
                            "raw_logprobs": [[0, 0, 0], [-INF] * 3, [0, 0, -INF]]}),
        # NaN is -inf, a row of nothing else gives 0; is_live is for the commit alone
        (ONE | SAMPLED | {"target_logits": rows([NAN, 0, -INF], [NAN, NAN, -INF]), "spec_steps": 1,
                          "seq_lens": T([4]), "is_live": T([0])},
         {"accept_token_num": [1], "predicts": [1, 0], "new_seq_lens": [4], "bonus_tokens": [-1],
          "tokens": [[-1, -1]], "hidden_rows": [[0, 0]], "last_row": [0], "accept_lengths": [0]}),
        (SELF | {"target_logits": certain(1, 1, 1, 1), "positions": torch.arange(4), "seeds": T([1, 2]),
                 "spec_steps": 2,
                 "temperature": T([1.0, 0.0]), "return_logprobs": True}, PATHS_OF_SELF),
    ],
    "sample_from_logits": [
        # greedy below 1e-5: the lowest of equal ids; NaN is -inf; token 0 of nothing
        ({"logits": rows([0, 2, 2], [NAN, NAN, -INF], [NAN, -INF, 1], [-INF, NAN, -INF], [-INF, -3, -INF]),
          "positions": T([1] * 5), "seeds": T([1] * 5), "temperature": T([0.0, 1.0, 1.0, 9e-6, 1.0])},
         {"": [1, 0, 2, 0, 1]}),
        # top_p of 0 keeps the most likely token; a filter that is off keeps the only possible one
        ({"logits": rows([0, 5, 4], [0, 5, 4], [-INF, -INF, 4]), "positions": T([1] * 3), "seeds": T([1, 2, 3]),
          "temperature": T([1.0] * 3), "top_p": T([0.0, -1.0, 2.0]), "top_k": T([0, -5, 9]),
          "min_p": T([0.0, -1.0, -2.0])},
         {"": [1, 1, 2]}),
    ],
    "penalize_logits": [
        # ids that are none count nowhere; -inf beats NaN, which else stays; a dead request keeps its logits
        (tree([[9, -1], [9, 2], [1, 1]], [[1, -1]] * 3, [[-1, -1]] * 3, [[0, 1], [2, 3], [0, 5]])
         | {"target_logits": rows([1, NAN, -2, 4], [1, NAN, -2, 4], [1, 1, 1, 1], [1, 1, 2, 1], [5, 5, 5, 5],
                                  [6, 6, 6, 6]),
            "frequency_penalty": T([0.5, 0.5, 0.5]), "presence_penalty": T([0.25, 0.25, 0.25]),
            "bad_token_ids": T([1, -1, 4, FAR]), "min_tokens": T([3, 3, 3]), "num_output_tokens": T([2, 3, 0]),
            "end_token_ids": T([3, -1, FAR])},
         {"": [[1, -INF, -2, -INF], [1, -INF, -2, 4], [1, -INF, 1, 1], [1, -INF, 1.25, 1], [5, 5, 5, 5],
               [6, 6, 6, 6]]}),
        # token 0 counts, V does not; what the grammar forbids is -inf
        (tree([[9, 0], [9, 4]], [[1, -1]] * 2, [[-1, -1]] * 2)
         | {"target_logits": torch.ones(4, 4), "frequency_penalty": T([0.5, 0.5]), "bad_token_ids": T([[0], [4]]),
            "token_bitmask": T([[15], [15], [7], [15]], dtype=torch.int32)},
         {"": [[-INF, 1, 1, 1], [-INF, 1, 1, 1], [1, 1, 1, -INF], [1, 1, 1, 1]]}),
        (tree([[9, 0]], [[1, -1]], [[-1, -1]])
         | {"target_logits": torch.ones(2, 4), "repetition_penalty": T([2.0]),
          "prompt_mask": T([[8]], dtype=torch.int32)},
         {"": [[1, 1, 1, 0.5], [0.5, 1, 1, 0.5]]}),
        (SELF | {"target_logits": torch.ones(4, 2), "frequency_penalty": T([0.5, 0.5])}, {"": [[1, 1], [1, 0.5]] * 2}),
    ],
    "top_k_renorm": [
        ({"probs": rows([1, 2, 2, NAN], [1, 3, -4, INF], [NAN, -1, INF, 0], [1, 2, 1, 4]), "top_k": T([1, 0, 2, 5])},
         {"": [[0, 0.5, 0.5, 0], [0.25, 0.75, 0, 0], [0] * 4, [0.125, 0.25, 0.125, 0.5]]}),
        ({"probs": rows([1, 2, 1, 4]), "top_k": T([-3])}, {"": [[0.125, 0.25, 0.125, 0.5]]}),
    ],
    "top_p_renorm": [
        ({"probs": rows([1, 2, 1, NAN], [2, 2, 4, -1], [1, 3, INF, 0], [0] * 4, [1, 3, 0, 0], [3, 3, 1, 1]),
          "top_p": T([0.0, 0.5, NAN, 0.5, 1.0, 0.25])},
         {"": [[0, 1, 0, 0], [0, 0, 1, 0], [0.25, 0.75, 0, 0], [0] * 4, [0.25, 0.75, 0, 0], [0.5, 0.5, 0, 0]]}),
        ({"probs": rows([1, 2, 1], [1, 3, 0]), "top_p": T([-1.0, 7.0])}, {"": [[0, 1, 0], [0.25, 0.75, 0]]}),
    ],
    "min_p_renorm": [
        ({"probs": rows([1, 2, 1, NAN], [1, 3, -1, INF], [1, 1, 3, 3], [NAN, 0, -1, 0], [4, 3, 2, 1]),
          "min_p": T([-1.0, NAN, 7.0, 0.5, 0.5])},
         {"": [[0.25, 0.5, 0.25, 0], [0.25, 0.75, 0, 0], [0, 0, 0.5, 0.5], [0] * 4, [4 / 9, 3 / 9, 2 / 9, 0]]}),
        ({"probs": rows([1, 3]), "min_p": T([0.0])}, {"": [[0.25, 0.75]]}),
    ],
    "sample_children": [
        # nothing left: -1; NaN is never drawn; greedy takes the lowest of equal ids, at temperature 1 in its logprobs
        ({"draft_logits": rows([NAN, 0, -INF], [0, 0, 0], [-INF, NAN, -INF]), "positions": T([1] * 3),
          "seeds": T([1] * 3), "temperature": T([1.0, 0.0, 1.0]), "num_children": 4, "d2t": T([10, 20, 30])},
         {"tokens": [[21, -1, -1, -1], [10, 21, 32, -1], [-1] * 4],
          "logprobs": [[0, -INF, -INF, -INF], [-math.log(3)] * 3 + [-INF], [-INF] * 4]}),
        ({"draft_logits": rows([0, 2, 2], [NAN, 0, NAN]), "positions": T([1, 1]), "seeds": T([1, 1]),
          "temperature": T([0.0, 1.0]), "num_children": 2, "replacement": True},
         {"tokens": [[1, 1], [1, 1]]}),
    ],
    "verify_chain": [
        # dead by its root; ended by -1, by a token that the draft cannot draw, by probabilities that are none
        ({"candidates": T([[9, 1, 2], [-1, 1, 2], [9, -1, 2], [9, 2, 2], [9, 1, 7]]), "target_logits": None,
          "draft_logits": None, "positions": torch.arange(15), "seeds": torch.arange(5), "temperature": None,
          "target_probs": torch.eye(4)[[1, 2, 3] * 5],
          "draft_probs": torch.eye(4)[[1, 2, 1, 2, 1, 2, 1, 2, 1, 2]]},
         {"accept_token_num": [2, 0, 0, 0, 1], "predicts": [1, 2, 3, -1, -1, -1, 1, -1, -1, 1, -1, -1, 1, 2, -1],
          "accept_index": [[0, 1, 2], [-1] * 3, [6, -1, -1], [9, -1, -1], [12, 13, -1]]}),
        ({"candidates": T([[9, 1]] * 4), "target_logits": None, "draft_logits": None, "positions": torch.arange(8),
          "seeds": torch.arange(4), "temperature": None, "target_probs": torch.eye(4)[[1, 3] * 4],
          "draft_probs": rows([0, NAN, 1, 0], [0, -1, 1, 0], [0, 1.5, 1, 0], [0, 0.5, 0.5, 0])},
         {"accept_token_num": [0, 0, 0, 1], "predicts": [1, -1, 1, -1, 1, -1, 1, 3]}),
        ({"candidates": T([[9]]), "target_logits": rows([-INF, NAN, -INF]), "draft_logits": torch.zeros(0, 3),
          "positions": T([1]), "seeds": T([1]), "temperature": T([1.0])}, {"predicts": [0]}),
        # 0 is a token, 2^31 is none
        ({"candidates": T([[0, 0], [BIG, 0]]), "target_logits": None, "draft_logits": None,
          "positions": torch.arange(4),
          "seeds": torch.arange(2), "temperature": None, "target_probs": torch.eye(4)[[0, 3] * 2],
          "draft_probs": torch.eye(4)[[0, 0]]},
         {"accept_token_num": [1, 0], "predicts": [0, 3, -1, -1], "accept_index": [[0, 1], [-1, -1]]}),
    ],
    "verify_tree_rejection": [
        (CHAINS | {"target_logits": None, "draft_logits": None, "positions": torch.arange(9), "seeds": T([1, 2, 3]),
                   "temperature": T([1.0] * 3), "target_probs": torch.eye(4)[[1, 2, 3] * 3],
                   "draft_probs": torch.eye(4)[[1, 2, 3] * 3], "spec_steps": 2},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 2, -1]}),
        (SELF | {"target_logits": None, "draft_logits": None, "positions": torch.arange(4), "seeds": T([1, 2]),
                 "temperature": T([1.0] * 2), "target_probs": torch.eye(4)[[1] * 4],
                 "draft_probs": torch.eye(4)[[1] * 4],
                 "spec_steps": 2}, PATHS_OF_SELF),
    ],
    "verify_tree_traversal": [
        (CHAINS | {"target_logits": None, "draft_logits": None, "positions": torch.arange(9), "seeds": T([1, 2, 3]),
                   "temperature": None, "target_probs": torch.eye(4)[[1, 2, 3] * 3],
                   "draft_probs": torch.eye(4)[[1, 2, 3] * 3], "spec_steps": 2},
         PATHS_OF_CHAINS | {"predicts": [1, 2, 3, -1, -1, -1, 1, 2, -1]}),
        (SELF | {"target_logits": None, "draft_logits": None, "positions": torch.arange(4), "seeds": T([1, 2]),
                 "temperature": None, "target_probs": torch.eye(4)[[1] * 4], "draft_probs": torch.eye(4)[[1] * 4],
                 "spec_steps": 2}, PATHS_OF_SELF),
    ],
    "merge_drafts": [
        # attached to no node, to one that was not kept, to the last that is; negative tokens and late parents
        ({"tokens": T([[1, -2, 3, 4]] * 5), "parents": T([[0, 0, 2, 4]] * 5), "other_tokens": T([[1, 8]] * 5),
          "other_parents": T([[0, 0]] * 5), "attach": T([-1, 5, 3, 1, 0]), "num_speculative_tokens": 4},
         {"tokens": [[1, -1, -1, -1]] * 3 + [[1, 1, 8, -1], [1, 8, -1, -1]],
          "parents": [[0, -1, -1, -1]] * 3 + [[0, 1, 1, -1], [0, 0, -1, -1]], "num_drafts": [1, 1, 1, 3, 2]}),
        # 0 is a token; the first K stay
        ({"tokens": T([[0, 1]]), "parents": T([[0, 1]]), "other_tokens": T([[0, 2]]), "other_parents": T([[0, 1]]),
          "attach": T([0]), "num_speculative_tokens": 2}, {"tokens": [[0, 1]], "parents": [[0, 1]], "num_drafts": [2]}),
        ({"tokens": T([[0, 1]]), "parents": T([[0, 1]]), "other_tokens": T([[0, 2]]), "other_parents": T([[0, 1]]),
          "attach": T([0]), "num_speculative_tokens": 3},
         {"tokens": [[0, 1, 2]], "parents": [[0, 1, 1]], "num_drafts": [3]}),
    ],
    "reroot_drafts": [
        # the path leaves the trie; none; the first child of a token; too deep; late parents and negative tokens
        ({"tokens": T([[1, 1, 2, 3, 4]] * 4), "parents": T([[0, 0, 1, 2, 3]] * 4),
          "path": T([[9, -1], [-1, -1], [1, -1], [1, 2]]), "num_speculative_tokens": 3, "spec_steps": 1},
         {"tokens": [[-1] * 3, [1, 1, -1], [2, -1, -1], [4, -1, -1]],
          "parents": [[-1] * 3, [0, 0, -1], [0, -1, -1], [0, -1, -1]], "num_drafts": [0, 2, 1, 1]}),
        ({"tokens": T([[1, 2, -3, 4]]), "parents": T([[0, 2, 0, 3]]), "path": T([[-1]]), "num_speculative_tokens": 4,
          "spec_steps": 9},
         {"tokens": [[1, -1, -1, -1]], "parents": [[0, -1, -1, -1]], "num_drafts": [1]}),
        ({"tokens": T([[0, 0, 3, 4]]), "parents": T([[0, 1, 2, 2]]), "path": T([[0, -1, 0]]),
          "num_speculative_tokens": 2,
          "spec_steps": 9}, {"tokens": [[0, 3]], "parents": [[0, 1]], "num_drafts": [2]}),
    ],
    "share_drafts": [
        # negative tokens, parents that are late, their own or not kept; 0 is a token; probabilities that are none
        ({"tokens": T([[[0, -2, 3, 4, 5]]]), "parents": T([[[0, 0, 2, 5, 5]]]), "probs": torch.ones(1, 1, 5),
          "num_speculative_tokens": 2},
         {"tokens": [[0, -1]], "parents": [[0, -1]], "scores": [[1.0, 0.0]], "probs": [[[1.0, 0.0]]],
          "num_drafts": [1]}),
        ({"tokens": T([[[1, 2], [3, 4]]]), "parents": T([[[0, 1], [0, 1]]]), "probs": T([[[NAN, 1.0], [9.0, INF]]]),
          "factors": T([[1.0], [0.5]]), "num_speculative_tokens": 3},
         {"tokens": [[3, 4, -1]], "parents": [[0, 1, -1]], "scores": [[0.5, 0.25, 0.0]],
          "probs": [[[0.0] * 3, [1.0, 1.0, 0.0]]], "num_drafts": [2]}),
        # the last factor is that of all greater depths
        ({"tokens": T([[[1, 2, 3]]]), "parents": T([[[0, 1, 2]]]), "probs": torch.ones(1, 1, 3),
          "factors": T([[1.0, 0.5]]), "num_speculative_tokens": 3}, {"scores": [[1.0, 0.5, 0.25]]}),
    ],
    "ngram_match": [
        # dead rows; lengths past the row; a negative token matches nothing; no drafts wanted
        ({"token_ids": T([[5, 6, 7, 5]] * 5), "seq_lens": T([0, -3, 9, 4, 4]), "num_speculative_tokens": 2,
          "max_drafts": T([2, 2, 2, 0, -1]), "max_ngram_size": 2, "min_ngram_size": 1, "max_matches": 1},
         {"tokens": [[-1, -1], [-1, -1], [6, 7], [-1, -1], [-1, -1]], "num_drafts": [0, 0, 2, 0, 0],
          "parents": [[-1, -1], [-1, -1], [0, 1], [-1, -1], [-1, -1]], "match_len": [0, 0, 1, 1, 1]}),
        ({"token_ids": T([[-5, 6, 7, -5]]), "seq_lens": T([4]), "num_speculative_tokens": 2, "max_matches": 1,
          "max_ngram_size": 1, "min_ngram_size": 1},
         {"tokens": [[-1, -1]], "num_drafts": [0], "match_len": [0]}),
        # 0 is a token; drafts are history up to the first -1, but not of a dead row; its root takes none of the budget
        ({"token_ids": T([[0, 6, 7, 0], [0, 6, 9, 9], [5, 6, 7, 8]]), "seq_lens": T([4, 3, 0]),
          "draft_tokens": T([[-1, 5, 5], [0, -1, 9], [5, 6, 7]]), "num_speculative_tokens": 2, "max_matches": 1,
          "max_ngram_size": 2, "min_ngram_size": 1},
         {"tokens": [[6, 7], [6, 9], [-1, -1]], "match_len": [1, 1, 0], "num_drafts": [2, 2, 0]}),
        ({"token_ids": T([[1, 2, 3, 1, 2], [1, 2, 3, 1, 2], [1, 2, 3, 1, 2]]), "seq_lens": T([5, 0, 5]),
          "num_speculative_tokens": 2, "max_matches": 1, "max_ngram_size": 2, "min_ngram_size": 1, "token_budget": 5},
         {"tokens": [[3, 1], [-1, -1], [3, -1]], "match_len": [2, 0, 2], "num_drafts": [2, 0, 1]}),
    ],
    "accepted_cache_locs": [
        # dead, by its entries and by its number: frees nothing, whatever it would; counts are clamped to 0..N
        ({"cache_locs": T([10, 11, 12, 13, 14, 15, 16, 17]), "accept_token_num": T([-1, 0, 1, 0]),
          "accept_index": T([[0, -1], [-1, -1], [4, 5], [6, -1]]), "free_token_num": T([2, 1, -3, 9]),
          "num_verify_tokens": 2},
         {"path_indptr": [0, 0, 0, 2, 3], "source_locs": [14, 15, 16, *[-1] * 5],
          "target_locs": [14, 15, 16, *[-1] * 5], "free_indptr": [0, 0, 0, 0, 2], "free_locs": [16, 17, *[-1] * 6],
          "overflow": [0, 0]}),
        # an entry of another request is left out, with it all that is free where it is the first; one slot of -1
        ({"cache_locs": T([10, 11, -5, 13, 14, 15]), "accept_token_num": T([1, 1]), "num_verify_tokens": 3,
          "accept_index": T([[5, 1], [3, 0]]), "free_token_num": T([2, 1])},
         {"path_indptr": [0, 1, 2], "source_locs": [11, 13, -1, -1], "target_locs": [10, 13, -1, -1],
          "free_indptr": [0, 0, 1], "free_locs": [15, *[-1] * 5]}),
        ({"cache_locs": T([-9, 11, 12]), "accept_token_num": T([1]), "num_verify_tokens": 3, "capacity": 1,
          "accept_index": T([[0, 2]]), "free_token_num": T([3]), "free_capacity": 2},
         {"path_indptr": [0, 1], "source_locs": [-1], "target_locs": [-1], "free_indptr": [0, 2],
          "free_locs": [-1, 11], "overflow": [2, 3]}),
        # what is free begins on the page after that of the last accepted token
        ({"cache_locs": T([10, 11, 12, 13, 20, 21, 22, 23]), "accept_token_num": T([0, 1]), "num_verify_tokens": 4,
          "seq_lens": T([3, 3]), "page_size": 4},
         {"source_locs": [10, 20, 21, *[-1] * 5], "free_indptr": [0, 3, 3], "free_locs": [11, 12, 13, *[-1] * 5]}),
        # without numbers the path has the entries that are nodes, of which N is none
        ({"cache_locs": T([0, 11, 12, 13]), "accept_index": T([[0, 2], [2, 3]]), "num_verify_tokens": 2},
         {"path_indptr": [0, 1, 3], "source_locs": [0, 12, 13, -1], "target_locs": [0, 12, 13, -1],
          "free_indptr": [0] * 3,
          "free_locs": []}),
    ],
    "align_evict_mask_to_page_size": [
        # page of 4: token 2 is the last one accepted, so its page, slots 0..3, stays; below 0 is 0; nothing to keep
        ({"seq_lens": T([2, -7, 0, -1]), "page_size": 4,
          "evict_mask": T([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)},
         {"evict_mask": [[0, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]]}),
    ],
    "assign_req_to_token": [
        # past C; below 0; an empty range; rows that are none take their slots all the same; too few slots
        ({"req_pool_indices": T([0, 1, 2, -1, 2]), "req_to_token": torch.zeros(3, 3, dtype=torch.int64),
          "starts": T([2, -5, 2, 0, 0]), "ends": T([4, 1, 1, 1, 3]), "cache_locs": T([1, 2, 3, 4, 5])},
         {"req_to_token": [[0, 0, 1], [3, 0, 0], [5, 0, 0]]}),
        ({"req_pool_indices": T([2, 1]), "req_to_token": torch.zeros(2, 2, dtype=torch.int64), "starts": T([0, 1]),
          "ends": T([1, 2]), "cache_locs": T([1, 2])}, {"req_to_token": [[0, 0], [0, 2]]}),
    ],
    "chain_kv_indices": [
        (TABLE | {"kv_lens": T([3, 2, -4]), "num_verify_tokens": 2, "capacity": 9},
         {"kv_indptr": [0, 2, 5, 6, 8, 8, 8], "kv_indices": [5, -1, 5, -1, 6, -1, -1, -1, -1], "overflow": [0]}),
        (TABLE | {"kv_lens": T([1, 9, 0]), "num_verify_tokens": 3, "capacity": 3},
         {"kv_indptr": [0, 0, 0, 1, 3, 3, 3, 3, 3, 3], "kv_indices": [5, -1, -1], "overflow": [25]}),
    ],
    "draft_cache_locs": [
        (TABLE | {"seq_lens": T([2, 1, -6]), "topk": 2, "num_steps": 2},
         {"cache_locs": [[6, 8], [-1, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]], "positions": [2, 2, 1, 1, 0, 0],
          "copy_indptr": [0, 0, 0, 0], "overflow": [0]}),
        # pages of 2: the second branch copies column 0, into column 2; a pair with a -1 is none
        ({"req_pool_indices": T([0, 1]), "req_to_token": T([[4, 5, 6, 7], [-4, 5, 6, 7]]), "seq_lens": T([1, 1]),
          "topk": 2, "num_steps": 1, "page_size": 2, "capacity": 3},
         {"cache_locs": [[5], [7], [5], [7]], "copy_indptr": [0, 1, 2], "source_locs": [4, -1, -1],
          "target_locs": [6, -1, -1]}),
        # room for the most copies that there can be; slot 0 is one
        ({"req_pool_indices": T([0]), "req_to_token": torch.arange(8)[None], "seq_lens": T([2]), "topk": 2,
          "num_steps": 1,
          "page_size": 4},
         {"cache_locs": [[2], [6]], "source_locs": [0, 1, -1], "target_locs": [4, 5, -1], "copy_indptr": [0, 2]}),
    ],
    "draft_kv_indices": [
        (TABLE | {"seq_lens": T([2, 1, -6]), "topk": 1, "num_steps": 2, "capacity": 8},
         {"kv_indptr": [[0, 3, 5, 6], [0, 4, 7, 9 - 1]],
          "kv_indices": [[5, -1, 6, -1, -1, -1, -1, -1], [5, -1, 6, 8, -1, -1, -1, -1]], "overflow": [9]}),
        ({"req_pool_indices": T([0]), "req_to_token": T([[10, 11, 12, 13, 14, 15]]), "seq_lens": T([4]), "topk": 1,
          "num_steps": 2, "capacity": 5, "window_size": 2, "sink_size": 1},
         {"kv_indptr": [[0, 4], [0, 5]], "kv_indices": [[10, 12, 13, 14, -1], [10, 12, 13, 14, 15]]}),
        ({"req_pool_indices": T([0]), "req_to_token": T([[10, 11, 12, 13, 14, 15]]), "seq_lens": T([4]), "topk": 1,
          "num_steps": 2, "capacity": 5, "window_size": 2, "sink_size": 9, "window_counts_drafts": True},
         {"kv_indptr": [[0, 5], [0, 5]], "overflow": [6]}),
        ({"req_pool_indices": T([0]), "req_to_token": T([[10, 11, 12, 13, 14, 15]]), "seq_lens": T([4]), "topk": 1,
          "num_steps": 2, "capacity": 3, "window_size": 2, "window_counts_drafts": True},
         {"kv_indptr": [[0, 2], [0, 2]], "kv_indices": [[13, 14, -1], [14, 15, -1]], "overflow": [0]}),
    ],
    "extend_cache_locs": [
        (TABLE | {"starts": T([2, 0, -2]), "ends": T([6, -1, 2]), "capacity": 7},
         {"indptr": [0, 4, 4, 6], "cache_locs": [6, 8, -1, -1, -1, -1, -1], "positions": [2, 3, 4, 5, 0, 1, 0],
          "overflow": [0]}),
        (TABLE | {"starts": T([3, 1, 0]), "ends": T([1, 3, 2]), "capacity": 3},
         {"indptr": [0, 0, 2, 3], "cache_locs": [-1, -1, -1], "positions": [1, 2, 0], "overflow": [4]}),
        (TABLE | {"starts": T([-9, 0, 0]), "num_tokens": 1}, {"cache_locs": [5, -1, -1], "positions": [0, 0, 0]}),
    ],
    "find_slots": [
        ({"block_table": T([[3, -2, 1]]), "first": T([-1]), "count": 8, "page_size": 2, "max_length": 6},
         {"slots": [[-1, 6, 7, -1, -1, 2, 3, -1]], "positions": [[-1, 0, 1, 2, 3, 4, 5, 5]]}),
        ({"block_table": T([[0]]), "first": T([0]), "count": 2, "page_size": 1}, {"slots": [[0, -1]],
          "positions": [[0, 1]]}),
    ],
    "kv_indices": [
        (TABLE | {"seq_lens": T([3, 2, -1]), "starts": T([2, 0, 5]), "capacity": 6},
         {"kv_indptr": [0, 3, 5, 5], "kv_indices": [6, 8, -1, -1, -1, -1], "last_page_len": [1, 1, 0],
          "overflow": [0]}),
        # pages of 2: from that of the first token on; whole
        ({"req_pool_indices": T([0, 0, 0]), "req_to_token": T([[8, 9, 4, 5, -6, 7]]), "seq_lens": T([2, 0, 4]),
          "starts": T([1, 3, -8]), "capacity": 3, "page_size": 2},
         {"kv_indptr": [0, 2, 2, 3], "kv_indices": [4, 2, 4], "last_page_len": [1, 0, 2], "overflow": [4]}),
    ],
    "move_accepted_kv": [
        # dead; an entry of another request; past the block table; a page outside the pool
        ({name: (torch.arange(6.0).view(1, 6, 1, 1, 1) + offset).expand(1, 6, 1, 1, 16).clone()
          for name, offset in (("k_cache", 10), ("v_cache", 20))}
         | {"block_table": T([[0, 1], [2, 3], [4, 9]]), "seq_lens": T([0, 0, 0]),
            "accept_index": T([[1, -1], [0, 3], [5, 8]]), "accept_token_num": T([-1, 1, 1]), "num_verify_tokens": 2},
         {"k_cache": torch.tensor([10.0, 11, 12, 13, 14, 15]).view(1, 6, 1, 1, 1).repeat(1, 1, 1, 1, 16).tolist()}),
        ({name: torch.arange(4.0).view(1, 4, 1, 1, 1).repeat(1, 1, 1, 1, 16) for name in ("k_cache", "v_cache")}
         | {"block_table": T([[3, 0, 2]]), "seq_lens": T([1]), "accept_index": T([[1, 9, 2]]),
            "accept_token_num": T([1]), "num_verify_tokens": 3},
         {"v_cache": torch.tensor([2.0, 1, 2, 3]).view(1, 4, 1, 1, 1).repeat(1, 1, 1, 1, 16).tolist()}),
        # node N is none
        ({name: torch.arange(4.0).view(1, 4, 1, 1, 1).repeat(1, 1, 1, 1, 16) for name in ("k_cache", "v_cache")}
         | {"block_table": T([[0, 1, 2, 3]]), "seq_lens": T([0]), "accept_index": T([[3, 0]]),
            "accept_token_num": T([1]), "num_verify_tokens": 3},
         {"k_cache": torch.tensor([0.0, 0, 2, 3]).view(1, 4, 1, 1, 1).repeat(1, 1, 1, 1, 16).tolist()}),
        # addresses below 1 are no caches, and what shows the layout is none of them
        ({name: torch.arange(4.0).view(1, 4, 1, 1, 1).repeat(1, 1, 1, 1, 16) for name in ("k_cache", "v_cache")}
         | {"block_table": T([[0, 1, 2, 3]]), "seq_lens": T([0]), "accept_index": T([[0, 2]]),
            "accept_token_num": T([1]), "num_verify_tokens": 3, "cache_addresses": T([[0, -16], [-(2**63), 0]])},
         {"k_cache": torch.arange(4.0).view(1, 4, 1, 1, 1).repeat(1, 1, 1, 1, 16).tolist()}),
    ],
    "write_kv": [
        # slots outside the pool; positions outside the tables; NaN as it is
        ({"key": T([1.0, 2, NAN, 4]).view(4, 1, 1).repeat(1, 1, 2), "value": torch.ones(4, 1, 2),
          "k_cache": torch.zeros(1, 2, 1, 2), "v_cache": torch.zeros(1, 2, 1, 2), "slots": T([-1, 2, 0, 1]),
          "query": torch.ones(4, 1, 2), "positions": T([0, -1, 1, 2]), "cos": rows([0.0], [2.0]),
          "sin": rows([1.0], [0.0])},
         {"k_cache": [[[[NAN, NAN]], [[4, 4]]]], "v_cache": [[[[1, 1]], [[1, 1]]]],
          "": [[[-1, 1]], [[1, 1]], [[2, 2]], [[1, 1]]]}),
    ],
    "write_latent_kv": [
        # slots outside the pool; positions outside the tables; NaN as it is; latents do not turn
        ({"latent": T([1.0, 2, NAN, 4]).view(4, 1), "rope_key": torch.ones(4, 2), "latent_cache": torch.zeros(1, 2, 3),
          "slots": T([-1, 2, 0, 1]), "query": torch.ones(4, 1, 2), "positions": T([0, -1, 0, 2]),
          "cos": rows([0.0], [2.0]), "sin": rows([1.0], [0.0])},
         {"latent_cache": [[[NAN, -1, 1], [4, 1, 1]]], "": [[[-1, 1]], [[1, 1]], [[-1, 1]], [[1, 1]]]}),
    ],
    "rope": [
        ({"query": torch.ones(4, 1, 3), "key": torch.ones(4, 1, 3), "positions": T([0, 2, -1, FAR]),
          "cos": rows([0.0], [0.0]), "sin": rows([1.0], [1.0])},
         {"query": [[[-1, 1, 1]], [[1, 1, 1]], [[1, 1, 1]], [[1, 1, 1]]],
          "key": [[[-1, 1, 1]], [[1, 1, 1]], [[1, 1, 1]], [[1, 1, 1]]]}),
    ],
    "rms_norm": [
        ({"x": rows([3, 3], [NAN, 1], [0, 0]), "weight": T([1.0, 2.0]), "eps": 0.0 + 2**-40},
         {"output": [[1, 2], [NAN, NAN], [0, 0]], "residual": torch.zeros(0, 2).tolist()}),
    ],
    "silu_and_mul": [
        ({"gate": rows([-INF, INF, 0, NAN]), "up": rows([1, 2, 5, 1])}, {"": [[NAN, INF, 0, NAN]]}),
        ({"gate": rows([0, INF, 2, 3], [0, 0, 7, 7])}, {"": [[0, INF], [0, 0]]}),
    ],
    "route_experts": [
        # NaN comes last, ties in order; the weights of nothing but zeros are zeros; a shared expert weighs 1
        ({"logits": rows([NAN, 0, 0], [-INF, -INF, NAN]), "top_k": 2, "scoring": "sigmoid", "num_shared": 1,
          "scale": 4.0},
         {"experts": [[1, 2, 3], [0, 1, 3]], "weights": [[2, 2, 1], [0, 0, 1]]}),
        # a group is as good as its best expert, or as the sum of its best two
        *(({"logits": rows([0, -INF, -INF, -INF]), "bias": T([0.0, 0.25, 0.5, 0.5]), "top_k": 2, "scoring": "sigmoid",
            "num_groups": 2, "top_groups": 1, "group_scoring": scoring, "renormalize": False},
           {"experts": experts, "weights": weights})
          for scoring, experts, weights in (("max", [[0, 1]], [[0.5, 0]]), ("top2", [[2, 3]], [[0, 0]]))),
    ],
    "fused_experts": [
        # an expert that is not in the table counts for nothing, nor does what it is multiplied by
        ({"x": rows([100], [100]), "experts": T([[0, 2], [-1, FAR]]), "weights": rows([0.5, NAN], [NAN, INF]),
          "gate_up": T([[[1.0], [1.0]], [[NAN], [NAN]]]), "down": T([[[1.0]], [[NAN]]])},
         {"": [[5000], [0]]}),
        # floats of 4 bits: 2 to the power of no scale, and of one; a column past the last one is none
        ({"x": torch.eye(16).half()[:2] * 4, "experts": T([[0], [0]]), "weights": rows([1], [1]),
          "weight_format": "mxfp4", "gate_up": pack_columns(torch.full((16, 16), 7, dtype=torch.uint8), 4)[None],
          "gate_up_scales": torch.ones(2, 1, 16, 2).bfloat16(),
          "down": pack_columns(torch.full((16, 8), 9, dtype=torch.uint8), 4)[None],
          "down_scales": torch.full((2, 1, 16, 2), 2.0**-6).bfloat16()},
         {"": [[-36.0] * 16] * 2}),
        # gates are clamped from above alone; up on both sides, and one is added
        ({"x": rows([8], [-8]), "experts": T([[0], [0]]), "weights": rows([1], [1]), "alpha": 10.0, "limit": 3.0,
          "gate_up": T([[[1.0], [1.0]]]), "down": T([[[1.0]]]), "activation": "swigluoai"},
         {"": [[12], [0]]}),
    ],
    "linear_decode": [
        ({"x": rows([NAN, 1], [1, 2]), "weight": rows([1, 1], [0, 3]), "bias": T([0.5, 0.0])},
         {"": [[NAN, NAN], [3.5, 6]]}),
        ({"x": torch.zeros(0, 2), "weight": torch.ones(3, 2)}, {"": torch.zeros(0, 3).tolist()}),
    ],
    **{
        f"linear_{kind}": [
            # NaN stays in its row
            ({"x": rows([NAN, 1], [1, 2]).half(), "weight": pack_columns(weight, bits), "scales": T([1.0, 0.5])},
             {"": [[NAN, NAN], [1, 6.5]]}),
            ({"x": torch.zeros(0, 2).half(), "weight": pack_columns(weight, bits), "scales": T([1.0, 0.5])}, {"": []}),
        ]
        for kind, bits, weight in (
            ("w4a16", 4, T([[9, 8], [7, 15]], dtype=torch.uint8)), ("w8a16", 8, T([[1, 0], [-1, 7]], dtype=torch.int8)),
            ("fp8", 8, T([[1.0, 0.0], [-1.0, 7.0]]).to(torch.float8_e4m3fn).view(torch.uint8)),
        )
    },
    "build_tree": [
        # node 2 names a parent that was not kept, node 3 an id that is none, node 4 a later one
        ({"verified_id": T([9]), "parent_list": T([[-1, 0, 1]]), "top_scores_index": T([[0, 4, FAR]]),
          "draft_tokens": T([[5, 6, 7]]), "seq_lens": T([3]), "topk": 2, "spec_steps": 2, "num_verify_tokens": 4,
          "tree_mask_mode": "qlen_only"},
         {"tree_mask": [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]], "positions": [3, 4, 3, 3],
          "retrieve_next_token": [[1, -1, -1, -1]], "retrieve_next_sibling": [[-1] * 4], "draft_tokens": [9, 5, 6, 7]}),
    ],
    "build_tree_from_scores": [
        # NaN is -inf, and of equal scores the lower id stays
        ({"verified_id": T([9]), "candidate_scores": rows([NAN, 1, 1, 1, NAN, NAN]),
          "candidate_tokens": T([[1, 2, 3, 4, 5, 6]]), "parent_list": T([[-1, 1, 0]]), "seq_lens": T([3]), "topk": 2,
          "spec_steps": 2, "num_verify_tokens": 3, "tree_mask_mode": "qlen_only"},
         {"top_scores_index": [[1, 2]], "draft_tokens": [9, 2, 3], "retrieve_next_token": [[1, 2, -1]],
          "positions": [3, 4, 5], "tree_mask": [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]}),
    ],
    "build_tree_from_blocks": [
        # NaN is -inf, what is above 0 is 0, and of equal paths the less deep one is first; a path of -inf is no node
        ({"verified_id": T([9]), "logits": None, "seq_lens": T([3]), "candidate_tokens": T([[[5, 6], [7, 8]]]),
          "candidate_scores": T([[[NAN, 2.0], [-1.0, -INF]]]), "topk": 2, "num_verify_tokens": 4,
          "tree_mask_mode": "qlen_only"},
         {"draft_tokens": [9, 6, 7, 9], "scores": [[0, -1, -INF]], "positions": [3, 4, 5, 3],
          "retrieve_next_token": [[1, 2, -1, -1]], "retrieve_next_sibling": [[-1] * 4],
          "tree_mask": [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]]}),
        # a budget of nothing leaves the root, and one past the tree is the tree
        ({"verified_id": T([9, 8]), "logits": torch.zeros(2, 1, 3), "seq_lens": T([3, 0]), "num_nodes": T([-5, FAR]),
          "topk": 2, "num_verify_tokens": 3},
         {"draft_tokens": [9, 9, 9, 8, 0, 1], "positions": [3, 3, 3, 0, 1, 1],
          "retrieve_next_token": [[-1] * 3, [1, -1, -1]], "retrieve_next_sibling": [[-1] * 3, [-1, 2, -1]]}),
    ],
    "organize_draft_results": [
        ({"candidate_scores": rows([NAN, -INF, -0.0, 0.0], [NAN, NAN, NAN, NAN]),
          "candidate_tokens": T([[1, 2, 3, 4]] * 2), "num_verify_tokens": 3},
         {"top_scores_index": [[2, 3], [0, 1]], "draft_tokens": [[3, 4], [1, 2]]}),
        ({"candidate_scores": rows([NAN, -INF, -0.0, 0.0]), "candidate_tokens": T([[1, 2, 3, 4]]),
          "num_verify_tokens": 2}, {"top_scores_index": [[2]], "draft_tokens": [[3]]}),
    ],
    "select_top_k_tokens": [
        # NaN is -inf; ties to the lower id; a row of nothing proposes 0..K - 1
        ({"logits": rows([NAN, 0, 0], [NAN, -INF, NAN], [INF, 0, 0]), "topk": 2, "level": 0,
          "draft_to_target": T([5, 6, 7])},
         {"tokens": [[7, 9], [5, 7], [5, 7]], "scores": [[-math.log(2)] * 2, [-INF] * 2, [0, -LARGEST]],
          "parents": [[0, 0]] * 3, "hidden_rows": [[0, 0], [1, 1], [2, 2]], "parent_slots": [[0, 1]] * 3,
          "ancestors": [[[1], [2]]] * 3}),
    ],
    "select_from_head": [
        # likewise; of logits that are equal once they are rounded the lower id comes first
        ({"hidden": rows([1, 1]).half(), "weight": rows([NAN, 1], [2048, 0], [2048, 1], [0, 0]).half(), "topk": 3,
          "level": 0, "draft_to_target": T([5, 6, 7, 8])},
         {"tokens": [[7, 9, 11]], "scores": [[-math.log(2), -math.log(2), -math.log(2) - 2048]], "parents": [[0] * 3],
          "hidden_rows": [[0] * 3], "parent_slots": [[0, 1, 2]], "ancestors": [[[1], [2], [4]]]}),
    ],
    "prune_trees": [
        # NaN and -inf never stay, nor what does not see its root; below 0 is 0, and too many are max_rows - B
        ({"draft_tokens": T([[9, 1, 2, 3]]), "tree_mask": T([[[1], [3], [5], [8]]]), "scores": rows([NAN, 1, 9]),
          "max_drafts": T([FAR]), "max_rows": 4},
         {"draft_tokens": [[9, 2, -1, -1]], "tree_mask": [[[1], [3], [0], [0]]], "num_nodes": [2]}),
        ({"draft_tokens": T([[9, 1, 2, 3]]), "tree_mask": T([[[1], [3], [5], [9]]]), "scores": rows([1, -INF, 2]),
          "max_drafts": T([-5]), "max_rows": 4},
         {"draft_tokens": [[9, -1, -1, -1]], "tree_mask": [[[1], [0], [0], [0]]], "num_nodes": [1]}),
        ({"draft_tokens": T([[9, 1, 2, 3]]), "tree_mask": T([[[1], [3], [7], [9]]]), "scores": rows([1, 3, 2]),
          "max_rows": 3},
         {"draft_tokens": [[9, 3, -1, -1]], "num_nodes": [2]}),
        ({"draft_tokens": T([[9, 1, 2, 3]]), "tree_mask": T([[[1], [3], [5], [9]]]), "scores": rows([1, -INF, 2]),
          "max_rows": 4}, {"draft_tokens": [[9, 1, 3, -1]], "tree_mask": [[[1], [3], [5], [0]]], "num_nodes": [3]}),
    ],
    "tree_from_mask": [
        # what a node sees of itself and of later ones is ignored; one without ancestors has no siblings
        ({"tree_mask": T([[[7], [1], [0], [3 + 4]]]), "seq_lens": T([5]), "num_verify_tokens": 4,
          "tree_mask_mode": "packed"},
         {"positions": [5, 6, 5, 8], "retrieve_next_token": [[1, 3, 3, -1]], "retrieve_next_sibling": [[-1] * 4],
          "retrieve_index": [[0, 1, 2, 3]]}),
        # cells past the end of a mask that is too short are not set
        ({"tree_mask": T([1, 1, 0, 1, 1], dtype=torch.bool), "seq_lens": T([1]), "num_verify_tokens": 3,
          "tree_mask_mode": "full_mask"},
         {"positions": [1, 1, 1], "retrieve_next_token": [[-1] * 3], "retrieve_next_sibling": [[-1] * 3]}),
    ],
    "tree_from_parents": [
        # padding, a late parent, and a node below a negative token: the root's token and position, no links
        ({"verified_id": T([9]), "draft_tokens": T([[5, -6, 7, 8, 5]]), "parents": T([[0, 0, 2, 4, 0]]),
          "seq_lens": T([3]), "num_verify_tokens": 6, "tree_mask_mode": "packed"},
         {"tree_mask": [[[1], [3], [4], [8], [16], [33]]], "positions": [3, 4, 3, 3, 3, 4],
          "retrieve_next_token": [[1, -1, -1, -1, -1, -1]], "retrieve_next_sibling": [[-1, 5, -1, -1, -1, -1]],
          "draft_tokens": [9, 5, 9, 9, 9, 5]}),
        ({"verified_id": T([9]), "draft_tokens": T([[5, 7]]), "parents": T([[-1, 3]]), "seq_lens": T([3]),
          "num_verify_tokens": 3, "tree_mask_mode": "qlen_only"},
         {"tree_mask": [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]], "positions": [3, 3, 3], "draft_tokens": [9, 9, 9]}),
    ],
    "pack_tree_mask": [
        # a mask that is too short; any byte but 0; bits from Nk on
        ({"tree_mask": T([1, 1, 0, 1, 1], dtype=torch.bool), "seq_lens": T([1]), "num_verify_tokens": 2,
          "tree_mask_mode": "full_mask"}, {"": [[[1], [1]]]}),
        ({"tree_mask": T([[[0, 7], [255, 0]]], dtype=torch.uint8), "tree_mask_mode": "qlen_only"}, {"": [[[2], [1]]]}),
        ({"tree_mask": T([[[-1], [6]]]), "num_verify_tokens": 2, "tree_mask_mode": "packed"}, {"": [[[3], [2]]]}),
    ],
    "unpack_tree_mask": [
        ({"tree_mask": T([[[-1], [6]]]), "tree_mask_mode": "qlen_only"}, {"": [[[1, 1], [0, 1]]]}),
        ({"tree_mask": T([[[-1], [6]]]), "num_verify_tokens": 3, "tree_mask_mode": "packed"}, {"": [[[7], [6]]]}),
        ({"tree_mask": T([[[1], [3]]]), "seq_lens": T([1]), "seq_lens_sum": 1, "tree_mask_mode": "full_mask"},
         {"": [1, 1, 0, 1, 1, 1]}),
    ],
    "compute_tree_statistics": [
        # a lone root; links back, away and to oneself count as none; the root has no sibling
        ({"retrieve_next_token": T([[-1, -1, -1], [1, 0, -1], [1, 9, 2]]),
          "retrieve_next_sibling": T([[-1, -1, -1], [2, -1, -1], [-1, 2, 1]]), "spec_steps": 1},
         {"depths": [0, 1, 1], "num_linked": [1, 2, 3], "num_leaves": [1, 1, 2],
          "max_branching": [0, 1, 2], "nodes_per_depth": [[1, 0], [1, 1], [1, 2]]}),
        ({"retrieve_next_token": T([[1, 3, 2], [3, -1, -1], [1, 2, -1]]),
          "retrieve_next_sibling": T([[-1, 1, 3], [1, -1, -1], [-1, 2, -1]]), "spec_steps": 2},
         {"depths": [1, 0, 2], "num_linked": [2, 1, 3], "num_leaves": [1, 1, 1], "max_branching": [1, 0, 1],
          "nodes_per_depth": [[1, 1, 0], [1, 0, 0], [1, 1, 1]]}),
    ],
    "gqa_decode": [
        # no keys: 0 and -inf, or the sink; a sink takes probability and has no value
        ({"query": torch.zeros(2, 1, 16), "k_cache": torch.zeros(1, 1, 1, 16), "v_cache": torch.ones(1, 1, 1, 16),
          "block_table": T([[-1], [0]]), "seq_lens": T([0, 1])},
         {"output": [[[0] * 16], [[1] * 16]], "lse": [[-INF], [0]]}),
        ({"query": torch.zeros(2, 1, 16), "k_cache": torch.zeros(1, 1, 1, 16), "v_cache": torch.ones(1, 1, 1, 16),
          "block_table": T([[-1], [0]]), "seq_lens": T([0, 1]), "sinks": T([0.0])},
         {"output": [[[0] * 16], [[0.5] * 16]], "lse": [[0], [math.log(2)]]}),
    ],
    "mla_decode": [
        # no keys: 0 and -inf; what is beside a latent is no value
        ({"query": torch.zeros(2, 1, 6), "latent_cache": torch.tensor([[[1.0] * 4 + [9.0] * 2]]), "latent_dim": 4,
          "sm_scale": 2.0, "block_table": T([[-1], [0]]), "seq_lens": T([0, 1])},
         {"output": [[[0] * 4], [[1] * 4]], "lse": [[-INF], [0]]}),
        # it counts for the logits: ln 3 against 0
        ({"query": torch.tensor([[[0.0] * 4 + [math.log(3) / 4] * 2]]), "latent_dim": 4, "sm_scale": 2.0,
          "latent_cache": torch.tensor([[[8.0] * 4 + [1.0] * 2, [0.0] * 6]]), "block_table": T([[0]]),
          "seq_lens": T([2])},
         {"output": [[[6] * 4]], "lse": [[math.log(4)]]}),
    ],
    "mla_prefill": [
        # a row before the first key; a request without queries
        ({"query": torch.zeros(3, 1, 6), "qo_indptr": T([0, 3, 3]), "latent_dim": 4, "sm_scale": 1.0, "max_query": 3,
          "latent_cache": torch.stack([torch.zeros(1, 6), torch.ones(1, 6)]), "block_table": T([[0, 1], [-1, -1]]),
          "seq_lens": T([2, 0])},
         {"output": [[[0] * 4], [[0] * 4], [[0.5] * 4]], "lse": [[-INF], [0], [math.log(2)]]}),
    ],
    "mla_tree_attention": [
        # a row that sees nothing; bits from Nk on
        ({"query": torch.zeros(1, 2, 1, 6), "latent_cache": torch.ones(1, 4, 6), "latent_dim": 4, "sm_scale": 1.0,
          "block_table": T([[0]]), "seq_lens": T([0]), "tree_mask": T([[[0], [-1]]])},
         {"output": [[[[0] * 4], [[1] * 4]]], "lse": [[[-INF], [math.log(2)]]]}),
        # of five rows, the last five of what is filled, the first three are attended
        ({"query": torch.zeros(5, 1, 6), "latent_cache": torch.arange(8.0).view(1, 8, 1).repeat(1, 1, 6),
          "latent_dim": 4, "sm_scale": 1.0, "max_query": 3, "is_causal": True, "qo_indptr": T([0, 5]),
          "kv_indptr": T([0, 1]), "kv_indices": T([0]), "last_page_len": T([8])},
         {"lse": [[math.log(4)], [math.log(5)], [math.log(6)], [None], [None]],
          "output": [[[mean] * 4] for mean in (1.5, 2.0, 2.5, None, None)]}),
    ],
    "plan_attention": [
        ({"seq_lens": T([-50, 0, 33])}, {"": [0, 1, 2, 4]}),
        ({"seq_lens": T([-50, 31, 32]), "num_drafts": 64}, {"": [0, 2, 5, 8]}),
        # of a window the blocks from that of its first slot on
        ({"seq_lens": T([100, 100]), "window": 37}, {"": [0, 3, 6]}),
        ({"seq_lens": T([100, 100]), "window": 36}, {"": [0, 2, 4]}),
    ],
    "prefill_attention": [
        # a row before the first key; a request without queries
        ({"query": torch.zeros(3, 1, 16), "qo_indptr": T([0, 3, 3]), "key": torch.zeros(2, 1, 16),
          "value": torch.stack([torch.zeros(1, 16), torch.ones(1, 16)]), "key_indptr": T([0, 2, 2]), "max_query": 3},
         {"output": [[[0] * 16], [[0] * 16], [[0.5] * 16]], "lse": [[-INF], [0], [math.log(2)]]}),
    ],
    "tree_attention": [
        # a row that sees nothing; bits from Nk on
        ({"query": torch.zeros(1, 2, 1, 16), "k_cache": torch.zeros(1, 4, 1, 16), "v_cache": torch.ones(1, 4, 1, 16),
          "block_table": T([[0]]), "seq_lens": T([0]), "tree_mask": T([[[0], [-1]]]),
          "draft_key": torch.zeros(1, 2, 1, 16), "draft_value": torch.ones(1, 2, 1, 16)},
         {"output": [[[[0] * 16], [[1] * 16]]], "lse": [[[-INF], [math.log(2)]]]}),
        # of five rows, the last five of what is filled, the first three are attended
        ({"query": torch.zeros(5, 1, 16), "k_cache": torch.zeros(1, 8, 1, 16), "max_query": 3, "is_causal": True,
          "v_cache": torch.arange(8.0).view(1, 8, 1, 1).repeat(1, 1, 1, 16), "qo_indptr": T([0, 5]),
          "kv_indptr": T([0, 1]), "kv_indices": T([0]), "last_page_len": T([8])},
         {"lse": [[math.log(4)], [math.log(5)], [math.log(6)], [None], [None]],
          "output": [[[mean] * 16] for mean in (1.5, 2.0, 2.5, None, None)]}),
    ],
}  # fmt: skip


def as_named(result, given: dict) -> dict:
    if result is None or isinstance(result, torch.Tensor):
        return given | {"": result}
    return given | result._asdict()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("op", "number"), [(op, number) for op, cases in EDGES.items() for number in range(len(cases))]
)
def test_edges(op, number, backend, device):
    arguments, expected = EDGES[op][number]
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    given = to_device(copies, device)
    function = getattr(eagle_kernels.raw, op) if backend == "triton" else getattr(eagle_kernels, op).reference
    found = as_named(function(**given), given)
    for name, wanted in expected.items():
        tensor = found[name].cpu()
        for place, (one, other) in enumerate(zip(flat(tensor.tolist()), flat(wanted), strict=True)):
            assert other is None or one == pytest.approx(other, rel=1e-6, nan_ok=True), f"{name} at {place}: {tensor}"


def flat(numbers) -> list:
    return [each for number in numbers for each in flat(number)] if isinstance(numbers, list) else [numbers]


def test_every_op_has_edges():
    assert EDGES.keys() == OPS.keys()
