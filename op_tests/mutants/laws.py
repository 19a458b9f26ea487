"""Bugs that only a law sees: those that kernel and reference share, of what the engine makes of ops, and of laws."""

from . import mutant
from .mutant import ATTENTION, ENGINE, ENUMERATION, LAWS, PRIMITIVES, REJECTION, SAMPLING, VERIFY, both, bug, of, rounds


def _one_stream(name: str) -> list[tuple[str, str, str]]:
    streams = {"DRAFT": 1, "ACCEPT": 2, "RESIDUAL": 3}
    return [(name, f"\nSTREAM_{stream} = {number}\n", f"\nSTREAM_{stream} = 0\n") for stream, number in streams.items()]


_COINS, _CHAIN, _SAMPLED = "verify_tree_coins", "verify_chain", "verify_tree_sampled"
_REJECTION, _TRAVERSAL, _CHILDREN = "verify_tree_rejection", "verify_tree_traversal", "sample_children"
_COINS_LAW = of(_COINS, "test_the_law_is_the_target_s") + rounds("coins")
_CHAIN_LAW = of(_CHAIN, "test_the_law_is_exactly_the_targets") + rounds("standard", "block")
_REJECTION_LAW = of(_REJECTION, "test_the_law_is_the_targets") + rounds("rejection, without", "rejection, with")
_TRAVERSAL_LAW = of(_TRAVERSAL, "test_the_law_is_exactly_the_targets") + rounds("traversal")
_NOISE = [
    f"op_tests/test_random.py::{name}"
    for name in ("test_philox_known_answers", "test_neighbouring_keys_are_independent[upper halves of seeds]")
]
_GOLDEN = [
    f"op_tests/test_golden.py::test_tokens_of_ops[{case}]" for case in ("sample_from_logits", "verify_chain, block")
]
_NOISE_LAW = [f"{LAWS}test_a_residual_has_noise_of_its_own"]
_PARAMETERS_LAW = [f"{LAWS}test_every_parameter"]
_MIN_P_OF_ONE = "(weight == 1.0) | (weight / weight.sum(1, keepdim=True) >= min_p[:, None])"
_OWN_DRAFT_TEMPERATURE = "draft_temperature = temperature if draft_temperature is None else draft_temperature"

_ORDER = "test_no_two_steps_can_be_exchanged"
_EDGES = "op_tests/test_edges.py::test_edges"
_KERNELS = "op_tests/test_sampling_law.py::test_no_two_steps_of_a_kernel_can_be_exchanged"
_ATTENTION_LAW = ["op_tests/test_attention_law.py::test_all_ops_attend_as_pytorch_does"]
_EXACT = "op_tests/engine/test_exact_laws.py::"
_BIAS = """    if processors.logit_bias is not None:
        bias_ptr = processors.logit_bias + row.request * row.VOCAB_SIZE
        logit += tl.load(bias_ptr + ids, mask=mask, other=0.0).to(tl.float32)
"""
_REFERENCE_BIAS = """    if processors.logit_bias is not None:
        logits = logits + processors.logit_bias
"""

MUTANTS = [
    # `<=` for `<` has no width: what sees it is a coin on the edge
    both("<= for <, coins", _COINS, of(_COINS, "test_comparisons_are_strict"),
        [("is_covered = coin < tl", "is_covered = coin <= tl")], [("coin < mass / acc", "coin <= mass / acc")]),
    both("<= for <, chain", _CHAIN, of(_CHAIN, "test_coins_at_the_ends"),
        [("(coin * draft_prob < target", "(coin * draft_prob <= target"), ("(coin < chance)", "(coin <= chance)")],
        [("accepted) < ratios", "accepted) <= ratios"), ("index - 1) < chance", "index - 1) <= chance")]),
    both("<= for <, rejection", _REJECTION, of(_REJECTION, "test_the_coin_is_compared_strictly"),
        [(REJECTION + "shared/rejection_steps.py",
          "(coin * draft_prob < target_prob)", "(coin * draft_prob <= target_prob)")],
        [("child) < target[token]", "child) <= target[token]")]),
    both("<= for <, traversal", _TRAVERSAL, of(_TRAVERSAL, "test_coins_at_the_ends"),
        [(REJECTION + "shared/traversal_steps.py", "(coin >= acceptance)", "(coin > acceptance)")],
        [("node) < acceptance[node]", "node) <= acceptance[node]")]),
    both("a coin for all levels, coins", _COINS, _COINS_LAW,
        [("coin = tl.where(is_accepted, child_coin, coin)", "coin = tl.where(is_accepted, coin, coin)")],
        [("coin_at(path[-1])", "coin_at(0)")]),
    both("a coin for all levels, chain", _CHAIN, _CHAIN_LAW,
        [("request * NUM_TOKENS + 1 + draft, mask=is_draft", "request * NUM_TOKENS + 1 + 0 * draft, mask=is_draft"),
         ("tl.int64), position, draft)", "tl.int64), position, 0 * draft)")],
        [("(positions[accepted + 1], accepted)", "(positions[1])"),
         ("(positions[index], index - 1)", "(positions[1])")]),
    both("a coin found again in the next round, chain", _CHAIN,
        of(_CHAIN, "test_the_law_of_two_rounds_is_exactly_the_targets"),
        [("tl.int64), position, draft)", "tl.int64), position, 0 * draft)")],
        [("(positions[accepted + 1], accepted)", "(positions[accepted + 1])"),
         ("(positions[index], index - 1)", "(positions[index])")]),
    both("a coin found again in the next round, traversal", _TRAVERSAL,
        of(_TRAVERSAL, "test_the_law_of_two_rounds_is_exactly_the_targets"),
        [(REJECTION + "shared/traversal_steps.py", "accepted * _NODES + current)", "current)")],
        [("(len(path) - 1) * 65536 + node)", "node)")]),
    both("a coin for all children, rejection", _REJECTION, _REJECTION_LAW,
        [(REJECTION + "shared/rejection_steps.py", "accept_coin(node.seed, tl.load(node.positions + child), child)",
          "accept_coin(node.seed, tl.load(node.positions), 0)")],
        [("draws.uniform(positions[child], child)", "draws.uniform(positions[0], 0)")]),
    both("residual not subtracted, coins", _COINS, _COINS_LAW,
        [(VERIFY + "verify_tree_coins.py", "tl.where(index == token, 0.0, probs)", "tl.where(index < 0, 0.0, probs)")],
        [("left[[token for token in rejected if 0 <= token < len(probs)]] = 0", "left[:0] = 0")]),
    both("residual not subtracted, chain", _CHAIN, _CHAIN_LAW,
        [("tl.maximum(share * target_prob - draft_prob, 0.0)", "share * target_prob")],
        [("weights, _ = subtract(weights, draft_probs[accepted], share)", "weights = share * weights")]),
    both("residual not subtracted, rejection", _REJECTION, _REJECTION_LAW,
        [(REJECTION + "shared/rejection.py",
          "tl.maximum(target - state.scale * draft, 0.0)", "tl.maximum(target, 0.0)"),
         (REJECTION + "shared/rejection.py", "tl.where(is_gone, 0.0, target)", "tl.where(is_gone, target, target)")],
        [("left = (target - draft).clamp(min=0)", "left = target")]),
    both("no renormalisation, rejection", _REJECTION, _REJECTION_LAW,
        [(REJECTION + "shared/rejection.py", "has_left, new_mass, state.mass", "has_left, 1.0, state.mass")],
        [("target = left / left.sum()", "target = left")]),
    both("q not renormalised, traversal", _TRAVERSAL, _TRAVERSAL_LAW,
        [(REJECTION + "shared/deletions.py", "(ids == token, 0.0, draft * scale)", "(ids == token, 0.0, draft)")],
        [("reference/residual.py", "left * (1.0 / mass) if mass > 0 else torch.zeros_like(left)", "left")]),
    both("a duplicate counts twice, coins", _COINS, of(_COINS, "test_the_law_is_the_target_s"),
        [("tl.where(is_repeated, 0.0, _pick_float(probs, is_child))", "_pick_float(probs, is_child)")],
        [("0 <= token < len(probs) and token not in rejected", "0 <= token < len(probs)")]),
    # the draft's temperature is ignored where children are drawn, or where they are verified
    both("draft before warping, sampler", _CHILDREN, of(_CHILDREN, "test_law_of_ordered_pairs"),
        [("scale, is_sampled = read_temperature(temperature)", "scale, is_sampled = 1.0, temperature >= 1e-5"),
         ("scale, _ = read_temperature(tl.load(temperature_ptr + row))", "scale = 1.0")],
        [("scaled_logits(draft_logits, temperature)", "scaled_logits(draft_logits, torch.ones_like(temperature))")]),
    both("draft before warping, rejection", _REJECTION, _REJECTION_LAW,
        [(REJECTION + "shared/prepare_pair.py",
          'values["temperature"] if draft_temperature is None else draft_temperature',
          'values["temperature"]')],
        [(_OWN_DRAFT_TEMPERATURE, "draft_temperature = temperature")]),
    both("draft before warping, chain", _CHAIN, _CHAIN_LAW,
        [(REJECTION + "shared/prepare_pair.py",
          'values["temperature"] if draft_temperature is None else draft_temperature',
          'values["temperature"]')],
        [(_OWN_DRAFT_TEMPERATURE, "draft_temperature = temperature")]),
    # (a coin and a residual draw of one key have nothing to do with each other: a hash lies between)
    both("one stream for all noise", _REJECTION, _NOISE_LAW,
        _one_stream(PRIMITIVES + "random.py"), _one_stream("reference/random.py")),
    both("draft and residual share a stream", _CHAIN, _NOISE_LAW,
        [(PRIMITIVES + "random.py", "\nSTREAM_RESIDUAL = 3\n", "\nSTREAM_RESIDUAL = 1\n")],
        [("reference/random.py", "\nSTREAM_RESIDUAL = 3\n", "\nSTREAM_RESIDUAL = 1\n")]),
    both("position not + 1", _SAMPLED, of(_SAMPLED, "test_joint_law_of_the_emitted_tokens"),
        [(SAMPLING + "shared/sampled_levels.py", "tl.load(coins.positions + node).to(tl.int64) + 1",
          "tl.load(coins.positions + node).to(tl.int64)"),
         ('"position_offset": 1', '"position_offset": 0')],
        [("positions + 1", "positions"), ("positions[row] + 1", "positions[row]")]),
    both("min-p relative to 1", _SAMPLED, _PARAMETERS_LAW,
        [(SAMPLING + "shared/filters.py", "keep &= weight >= tl.minimum(filters.min_p, 1.0)",
          "keep &= (weight == 1.0) | (weight / tl.sum(weight) >= tl.minimum(filters.min_p, 1.0))"),
         (SAMPLING + "shared/edge_search.py", "tl.where(filters.min_p > 0.0, tl.minimum(filters.min_p, 1.0), 0.0)",
          "tl.minimum(filters.min_p * row_mass(summary.chunk_max, summary.chunk_sum, largest, VOCAB_SIZE), 1.0)")],
        [("reference/sampling.py", "(weight >= min_p.clamp(max=1.0)[:, None])", _MIN_P_OF_ONE)]),
    both("penalties forget the drafts before", _SAMPLED, _PARAMETERS_LAW,
        [(SAMPLING + "shared/logits.py", "count += (ids == ", "count += 0 * (ids == ")],
        [("own_counts[0, token] += 1", "own_counts[0, token] += 0")]),
    both("a node's first draw for another's second", _CHILDREN,
        of(_CHILDREN, "test_nodes_of_one_request_draw_independently"),
        [("node + child * _NODES", "node + child")],
        [("nodes.to(torch.int64) + child * 65536", "nodes.to(torch.int64) + child")]),
    both("greedy below 1e-3", _SAMPLED, ["op_tests/test_temperatures.py::test_where_greedy_begins"],
        [(PRIMITIVES + "rows.py", "GREEDY_TEMPERATURE = 1e-5", "GREEDY_TEMPERATURE = 1e-3")],
        [("reference/sampling.py", "BELOW = 1e-5", "BELOW = 1e-3")]),
    both("the upper half of seeds is ignored", _CHILDREN, _NOISE + _GOLDEN,
        [(PRIMITIVES + "random.py", "seed.to(tl.int64).to(tl.uint64)", "seed.to(tl.uint32).to(tl.uint64)")],
        [("reference/random.py", "(seed >> 32) & _MASK", "seed & 0")]),
    both("Philox of six rounds", _CHILDREN, _NOISE + _GOLDEN,
        [(PRIMITIVES + "random.py", "(position * 0 + draw).to(tl.uint32),", "(position * 0 + draw).to(tl.uint32), 6,")],
        [("reference/random.py", "range(10)", "range(6)")]),
    # the order of penalties, temperature and filters: in the engine's own composition, and in ops
    mutant.Mutant(
        "min-p before top-p, rejection",
        [(ENGINE + "step/verification.py",
          "ops.min_p_renorm(ops.top_p_renorm(ops.top_k_renorm(probs, top_k), top_p), min_p)",
          "ops.top_p_renorm(ops.min_p_renorm(ops.top_k_renorm(probs, top_k), min_p), top_p)")],
        [f"{_EXACT}test_lossless_strategies_have_exactly_the_law", f"{_EXACT}test_lossy_strategies_go_by_the_same_law"],
    ),
    both("the bias before the penalties", "sample_from_logits", [LAWS + _ORDER, _KERNELS],
        [(SAMPLING + "shared/logits.py", "    if row.HAS_PENALTIES:\n        logit = _penalise",
          _BIAS + "    if row.HAS_PENALTIES:\n        logit = _penalise"),
         (SAMPLING + "shared/logits.py", _BIAS + "    if processors.token", "    if processors.token")],
        [("reference/sampling.py", "    if processors.has_penalties:\n        zeros",
          _REFERENCE_BIAS + "    if processors.has_penalties:\n        zeros"),
         ("reference/sampling.py", _REFERENCE_BIAS + "    if processors.token", "    if processors.token")]),
    both("top-p of all tokens, also after top-k", "sample_from_logits", [LAWS + _ORDER, _KERNELS],
        [(SAMPLING + "shared/filters.py", "is_on, (top_k == 0) | IS_JOINT)", "is_on, (top_k == 0) | (top_k > 0))")],
        [("reference/sampling.py", 'filter_order == "top_k_first" else weight',
          'filter_order == "never" else weight')]),
    both("of equal scores the last stay", "prune_trees",
        ["op_tests/test_ties.py::test_pruning_keeps_the_first_requests_and_nodes"],
        [("is_equal = is_equal & (earlier < num_equal)",
          "every = tl.num_programs(0) * (NUM_NODES - 1)\n"
          "        equal = _count_keys(scores_ptr, every, cut, BLOCK_SCORE)\n"
          "        equal -= _count_keys(scores_ptr, every, cut + 1, BLOCK_SCORE)\n"
          "        is_equal = is_equal & (earlier >= equal - num_equal)")],
        [("    drafts.sort(key", "    drafts.reverse()\n    drafts.sort(key")]),
    both("ties to the later beam", "select_top_k_tokens",
        ["op_tests/test_ties.py::test_drafting_keeps_the_lowest_ids_and_beams"],
        [("eagle_kernels/ops/tree/shared/levels.py", "ordered_key(score, flat)",
          "ordered_key(score, (NUM_BEAMS - 1 - beam) * TOPK + rank)")],
        [("    order = torch.sort(candidate_scores, dim",
          "    turned = candidate_scores.view(batch_size, num_beams, topk).flip(1).flatten(1)\n"
          "    order = torch.sort(turned, dim"),
         ("    kept = order[:, :topk]\n",
          "    order = (num_beams - 1 - order // topk) * topk + order % topk\n    kept = order[:, :topk]\n")]),
    both("ties to the highest candidate", "organize_draft_results",
        ["op_tests/test_ties.py::test_trees_keep_the_lowest_candidates"],
        [("eagle_kernels/primitives/ordering.py", "(tl.cumsum(is_at_edge.to(tl.int32), 0) <= places_left)",
          "(tl.sum(is_at_edge.to(tl.int32)) - tl.cumsum(is_at_edge.to(tl.int32), 0) < places_left)")],
        [("    order = torch.sort(scores, dim", "    order = scores.shape[1] - 1 - torch.sort(scores.flip(1), dim")]),
    both("a share of the mass rounded down", "top_p_renorm",
        of("top_p_renorm", "test_a_sum_that_lacks_the_least_is_not_enough"),
        [(SAMPLING + "shared/threshold.py", "tl.ceil(total.to(tl.float64)", "tl.floor(total.to(tl.float64)")],
        [(".ceil()", ".floor()")]),
    both("the threshold of a token on the sum", _COINS, of(_COINS, "test_thresholds_of_the_documented_example"),
        [("(is_covered | (prob >= threshold_single))", "(is_covered | (mass >= threshold_single))")],
        [("prob >= single", "mass >= single")]),
    # attention: what a comparison with a reference of the same mistake does not see
    both("scales of keys and values exchanged", "gqa_decode", of("gqa_decode", "test_float8_cache"),
        [(ATTENTION + "shared/share.py", "k_scale_ptr, v_scale_ptr = inputs.k_scale, inputs.v_scale",
          "k_scale_ptr, v_scale_ptr = inputs.v_scale, inputs.k_scale")],
        [("reference/paged_attention.py", "value, k_scale, v_scale, dtype):", "value, v_scale, k_scale, dtype):")]),
    both("scales of written keys and values exchanged", "write_kv", of("write_kv", "test_scales"),
        [("(inputs.k_scale, head, is_head, stride_k", "(inputs.v_scale, head, is_head, 1 * stride_v"),
         ("(inputs.v_scale, head, is_head, stride_v", "(inputs.k_scale, head, is_head, stride_k")],
        [("(k_cache, key, k_scale), (v_cache, value, v_scale)", "(k_cache, key, v_scale), (v_cache, value, k_scale)")]),
    both("a window one wider", "gqa_decode", _ATTENTION_LAW,
        [(ATTENTION + "shared/split_attention.py", 'tree_mask, window = values.get("tree_mask"), values["window"]',
          'tree_mask, window = values.get("tree_mask"), values["window"] and values["window"] + 1')],
        [("length - window", "length - window - 1")]),
    both("scores over the size of a head", "gqa_decode", _ATTENTION_LAW,
        [(ATTENTION + "shared/split_attention.py", "(query.shape[-1] ** -0.5", "(query.shape[-1] ** -1.0")],
        [("reference/paged_attention.py", "query.shape[-1] ** -0.5", "query.shape[-1] ** -1.0")]),
    both("min-p alone is no sampling", _SAMPLED, of(_SAMPLED, "test_every_sampling_parameter_alone_asks_for_sampling"),
        [("eagle_kernels/ops/front_door.py", "(temperature, *filters.values())", "(temperature, top_k, top_p)")],
        [("reference/ops/verify_tree.py", "in (temperature, top_k, top_p, min_p))",
          "in (temperature, top_k, top_p))")]),
    # edges: what the docstrings say, by numbers written by hand
    both("a number past int32 is a token", "append_output", [f"{_EDGES}[append_output-0-triton]"],
        [("is_token = (token >= 0) & (token < 2147483648)", "is_token = token >= 0")],
        [("return 0 <= token < 2**31", "return 0 <= token")]),
    both("a dead request frees its slots", "accepted_cache_locs", [f"{_EDGES}[accepted_cache_locs-0-triton]"],
        [("return tl.where(root >= 0, count, 0).to(tl.int32)",
          "return tl.where((root >= 0) | (inputs.free_token_num is not None), count, 0).to(tl.int32)")],
        [("freed.append([] if is_dead else", "freed.append([] if is_dead and free_token_num is None else")]),
    both("rows past max_query are of the prefix", "tree_attention", [f"{_EDGES}[tree_attention-1-triton]"],
        [(ATTENTION + "shared/batch.py", "prefix = tl.maximum(filled - num_counted, 0)",
          "prefix = tl.maximum(filled - num_drafts, 0)")],
        [("counted = bounds[request][1] - bounds[request][0] if is_ragged else num_keys", "counted = num_keys")]),
    bug("dead rows have a part of the budget", ENGINE + "step/packed_rows.py",
        "batch.is_live.sum(0, keepdim=True)", "torch.ones_like(batch.is_live).sum(0, keepdim=True)",
        "op_tests/engine/test_ragged_trees.py::test_dead_rows_have_no_part_of_the_budget"),
    bug("distances are 0", ENUMERATION,
        "return 0.5 * sum", "return 0.0 * sum",
        f"{LAWS}test_wrong_schemes_are_seen", *of(_COINS, "test_wrong_schemes_are_seen")),
    bug("a wrong scheme is enumerated", "op_tests/test_laws.py",
        "max(control(None))", 'max(control("bonus from p"))',
        f"{LAWS}test_the_controls_are_right_without_their_fault"),
    bug("a wrong scheme is mended", f"op_tests/ops/rejection/test_{_REJECTION}.py",
        'if fault == "bonus from p" or target', "if target",
        *of(_REJECTION, "test_wrong_schemes_show")),
]  # fmt: skip
