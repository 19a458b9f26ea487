"""Bugs of a kernel alone, which kernel = reference sees."""

from __future__ import annotations

from .mutant import ATTENTION, NN, PRIMITIVES, REJECTION, RUNTIME, SAMPLING, VERIFY, Mutant, of

KV = "eagle_kernels/ops/kv/"
TREE = "eagle_kernels/ops/tree/"
_DRAWN = "op_tests/test_random_calls.py::test_whatever_is_drawn_kernel_and_reference_agree"
_TAKEN = "op_tests/test_takes.py::test_ops_take_what_the_table_says"
_REFUSED = "op_tests/test_debug_law.py::test_refused_is_what_depends_on_what_is_not_there"
_ENTRIES = "op_tests/test_debug_law.py::test_entries_that_are_refused_are_those_that_are_read"
_HOSTILE = "op_tests/test_hostile_calls.py::"
_RANDOM = "op_tests/test_random_verification.py::test_random_calls"
_LAYOUTS = "op_tests/test_pool_layouts.py::"
_LIMITS = "op_tests/test_debug_mode.py::test_limits_pass_and_one_step_further_fails"

MUTANTS = [
    Mutant(
        "a tile's last lane is not masked",
        [(VERIFY + "verify_tree_coins.py", "(rejected < start + BLOCK)", "(rejected < start + BLOCK - 1)")],
        ["op_tests/test_tile_edges.py::test_coins"],
    ),
    Mutant(
        "a path's keys in another order",
        [(ATTENTION + "shared/attention.py", "place = start + lane",
          "place = start + SHAPE.BLOCK_KEY - 1 - lane")],
        ["op_tests/ops/attention/test_tree_attention.py::test_deterministic_nodes_are_plain_decoding"],
    ),
    Mutant(
        "heads that lie outside of slots are read as dense",
        [(ATTENTION + "shared/share.py", "first_row=kv_head.to(tl.uint32) * SHAPE.STRIDE_HEAD",
          "first_row=kv_head.to(tl.uint32)")],
        [_LAYOUTS + "test_every_layout_gives_the_same_bits[attention.gqa_decode]"],
    ),
    Mutant(
        "slots of a path are read as dense",
        [(ATTENTION + "shared/attention.py", "page.to(tl.int64), slot % SHAPE.PAGE_SIZE\n",
          "page.to(tl.int64), slot % SHAPE.PAGE_SIZE * SHAPE.NUM_KV_HEADS // SHAPE.STRIDE_TOKEN\n")],
        [_LAYOUTS + "test_every_layout_gives_the_same_bits[attention.tree_attention]"],
    ),
    Mutant(
        "rows of a page in int32",
        [(ATTENTION + "shared/attention.py", "row = slot_of_page.to(tl.uint32) *",
          "row = slot_of_page.to(tl.int32) *"),
         (ATTENTION + "shared/share.py", "first_row=kv_head.to(tl.uint32) *", "first_row=kv_head *")],
        [_LAYOUTS + "test_rows_of_a_page_past_int32[attention.tree_attention-tokens]"],
    ),
    Mutant(
        "heads that lie together are moved as one whatever lies between slots",
        [(KV + "move_accepted_kv.py", " for stride in (*strides, stride_token * head_dim))",
          " for stride in strides)")],
        [_LAYOUTS + "test_some_of_the_heads_move_in_place"],
    ),
    Mutant(
        "a head written next to the one before",
        [(KV + "write_kv.py", "page * stride_v_page + row_in_page + head * SHAPE.STRIDE_HEAD",
          "page * stride_v_page + row_in_page + head")],
        ["op_tests/test_strides.py::test_strides_of_pools_do_not_matter[kv.write_kv]"],
    ),
    Mutant(
        "slots that overlap are taken",
        [(PRIMITIVES + "paging.py", "extent += max(size - 1, 0) * stride", "extent += 0 * stride")],
        [_LAYOUTS + "test_what_is_no_layout_is_refused"],
    ),
    Mutant(
        "caches of two layouts are taken",
        [(PRIMITIVES + "paging.py", "if slot_strides(v_cache) != slot_strides(k_cache):", "if False:")],
        [_LAYOUTS + "test_what_is_no_layout_is_refused"],
    ),
    Mutant(
        "caches of one look never overlap",
        [(RUNTIME + "calls.py", "_lie_apart(buffer, (abs(begin - other_begin), 2))", "_lie_apart(buffer)")],
        [_HOSTILE + "test_overlaps_are_those_of_the_addresses"],
    ),
    Mutant(
        "a block planned twice",
        [(ATTENTION + "shared/chunks.py", "cut_slot(first, stop, block - first_block, SHAPE.BLOCK_KEY), stop",
          "cut_slot(first, stop, block - first_block - 2, SHAPE.BLOCK_KEY), stop")],
        ["op_tests/ops/attention/test_gqa_decode.py::test_chunks"],
    ),
    Mutant(
        "the keys past a plan are lost",
        [(ATTENTION + "shared/chunks.py", "            if not is_last:\n", "            if True:\n")],
        ["op_tests/ops/attention/test_plan_attention.py::test_no_key_is_lost_by_a_plan_of_other_lengths"],
    ),
    Mutant(
        "shares merged from a window's first on",
        [(ATTENTION + "shared/merge_shares.py", "begin = -(first_share % BLOCK_PART)", "begin = -(first_share % 1)")],
        ["op_tests/ops/attention/test_tree_attention.py::test_deterministic_windows_begin_in_any_share"],
    ),
    Mutant(
        "a node taken without its parent",
        [("eagle_kernels/ops/tree/prune_trees.py", "is_best & sees_root & (num_lost == 0)", "is_best & sees_root")],
        ["op_tests/ops/tree/test_prune_trees.py::test_matches_reference"],
    ),
    Mutant(
        "the last tile of a request is lost",
        [(ATTENTION + "prefill_attention.py", "return request, stop - 1 - number",
          "return request, tl.maximum(stop - 2 - number, 0)")],
        ["op_tests/ops/attention/test_prefill_attention.py::test_matches_reference"],
    ),
    Mutant(
        "parts that go by the number of rows",
        [("eagle_kernels/ops/nn/linear_decode.py", "parts > 1 and (is_best or deterministic)",
          "parts > 1 and is_best")],
        ["op_tests/ops/nn/test_linear_decode.py::test_deterministic_rows_have_the_same_parts_whatever_their_number"],
    ),
    Mutant(
        "columns that no part has",
        [(NN + "shared/many_rows.py", "(part + 1) * NUM_SECTIONS // NUM_PARTS",
          "(part + 1) * (NUM_SECTIONS // NUM_PARTS)")],
        ["op_tests/ops/nn/test_linear_decode.py::test_parts"],
    ),
    Mutant(
        "a token kept that top-p does not keep",
        [(SAMPLING + "shared/edge_search.py", "is_open = (filters.top_p < 1.0) & (rank >= edge)",
          "is_open = (edge > above)")],
        of("sample_from_logits", "test_filters_of_long_rows"),
    ),
    Mutant(
        "a nucleus gathered but for a hundredth",
        [(SAMPLING + "shared/filters.py", "(tl.sum(weight) >= filters.top_p * mass)",
          "(tl.sum(weight) >= 0.99 * filters.top_p * mass)")],
        of("sample_from_logits", "test_the_tail_of_a_nucleus_is_drawn"),
    ),
    Mutant(
        "a level on the edge of top-p stays",
        [(SAMPLING + "shared/filters.py", "mass_above < filters.top_p * mass", "mass_above <= filters.top_p * mass")],
        of("sample_from_logits", "test_levels_on_the_edge_stay_or_go_as_a_whole"),
    ),
    Mutant(
        "bounds of flat rows with the maxima of other groups",
        [(SAMPLING + "shared/edge_search.py", "group // (LANES // GROUP)", "group // LANES")],
        of("sample_from_logits", "test_flat_rows_of_a_large_vocabulary"),
    ),
    Mutant(
        "weighing that ends as if all of it lay below",
        [(SAMPLING + "shared/edge_search.py", "(read - above <= spare)", "(read <= spare)")],
        of("sample_from_logits", "test_flat_rows_of_a_large_vocabulary"),
    ),
    Mutant(
        "mass carried to the next level",
        [(VERIFY + "verify_tree_coins.py", "mass = tl.where(is_accepted, 0.0, mass)", "mass += 0.0")],
        of("verify_tree_coins", "test_matches_reference"),
    ),
    # rare states of rows in slices
    Mutant(
        "the scale of a rejection that is redone",
        [(REJECTION + "shared/rejection_steps.py", "scale = tl.where(is_small, state.scale, after.scale)",
          "scale = after.scale")],
        of("verify_tree_rejection", "test_what_several_slices_leave"),
    ),
    Mutant(
        "drafts of temperature 0 are not scanned, level by level",
        [(REJECTION + "shared/rejection_rounds.py", "        if not KEEPS_DRAFT:\n            is_read",
          "        if True:\n            is_read")],
        of("verify_tree_rejection", "test_what_several_slices_leave[logits-with-level by level]"),
    ),
    Mutant(
        "drafts of temperature 0 are not scanned",
        [(REJECTION + "verify_tree_rejection.py", "retrieve_next_token, not replacement)",
          "retrieve_next_token, True)")],
        of("verify_tree_rejection", "test_what_several_slices_leave[logits-with-all nodes at once]"),
    ),
    Mutant(
        "a deletion that leaves nothing has drawn",
        [(REJECTION + "shared/traversal_steps.py", "(to.current == at.current) & (target_mass > 0.0)",
          "(to.current == at.current)")],
        of("verify_tree_traversal", "test_special_probabilities_in_slices[probs-24]"),
    ),
    Mutant(
        "the found of later levels is what memory held",
        [(SAMPLING + "shared/sampled_levels.py", "tl.store(levels.found + place + batch_size, LOWEST_KEY)",
          "tl.store(levels.found + place + batch_size, LOWEST_KEY, mask=level == 0)")],
        of("verify_tree_sampled", "test_matches_reference"),
    ),
    # of sizes, flags and requests that no other test has together
    Mutant(
        "drafts of the first request count in all requests",
        [(SAMPLING + "shared/sampled_levels.py", "Drafts(levels.drawn + request, level", "Drafts(levels.drawn, level")],
        [f"{_RANDOM}[sampling.verify_tree_sampled]"],
    ),
    Mutant(
        "min-p of weights that are not relative",
        [(SAMPLING + "shared/edge_search.py", "tl.exp(value - largest) >= min_weight", "tl.exp(value) >= min_weight")],
        [f"{_RANDOM}[sampling.sample_from_logits]"],
    ),
    Mutant(
        "logits of a draft beside probabilities of a target are not scanned",
        [(REJECTION + "shared/rejection_rounds.py",
          'shared["target"].scans is not None or shared["draft"].scans is not None',
          'shared["target"].scans is not None')],
        [f"{_RANDOM}[rejection.verify_tree_rejection]"],
    ),
    Mutant(
        "a node that is done is verified again in the third round",
        [(REJECTION + "shared/rejection_rounds.py", "is_open & (state.phase != DONE) & ", "is_open & ")],
        [f"{_RANDOM}[rejection.verify_tree_rejection]"],
    ),
    Mutant(
        "the latest of matches where the earliest are preferred",
        [("eagle_kernels/ops/draft/shared/ngram.py",
          "    if IS_LATEST:\n        first =", "    if True:\n        first =")],
        [f"{_RANDOM}[draft.ngram_match]"],
    ),
    Mutant(
        "a window that ends a node early",
        [(VERIFY + "verify_tree_topp.py", "in_window -= 1", "in_window -= 2")],
        [f"{_RANDOM}[verify.verify_tree_topp]"],
    ),
    Mutant(
        "an id past the vocabulary ends the siblings",
        [(REJECTION + "shared/rejection_steps.py", "(token < rows.num_ids)", "(token <= rows.num_ids)")],
        ["op_tests/test_no_tokens.py::test_a_child_without_a_token_is_passed_over"],
    ),
    Mutant(
        "the alignment of a strided out",
        [(SAMPLING + "penalize_logits.py", "math.gcd(target_logits.stride(0), out.stride(0), 16)",
          "math.gcd(target_logits.stride(0), 16)")],
        ["op_tests/test_strides.py::test_strides_do_not_matter[sampling.penalize_logits]"],
    ),
    Mutant(
        "drafts need a page more than they do",
        [(KV + "shared/rows.py", "+ (topk - 1) * room() + num_steps", "+ topk * room()")],
        [_LIMITS],
    ),
    Mutant(
        "rows that just fit are refused",
        [(VERIFY + "pack_verify_rows.py", "num_tokens.cumsum(0) <= max_rows", "num_tokens.cumsum(0) < max_rows")],
        [_LIMITS],
    ),
    Mutant(
        "the third word of a mask",
        [(TREE + "select_top_k_tokens.py", "tl.load(beam_words_ptr + word + 1,", "tl.load(beam_words_ptr + word + 2,")],
        [f"{_DRAWN}[tree.select_top_k_tokens]"],
    ),
    Mutant(
        "too few words of ancestors are taken",
        [(TREE + "select_top_k_tokens.py", "if not -(-level * topk // 64) <=", "if not -(-level // 64) <=")],
        [f"{_TAKEN}[tree.select_top_k_tokens]"],
    ),
    Mutant(
        "a window that counts drafts reads one slot more",
        [(KV + "draft_kv_indices.py", 'seq_lens - window_size + int(values["window_counts_drafts"])',
          "seq_lens - window_size")],
        [f"{_ENTRIES}[kv.draft_kv_indices]"],
    ),
    Mutant(
        "a request of one token may have any row",
        [(KV + "shared/rows.py", "(rows < num_rows) | (stop() <= 0)", "(rows < num_rows) | (stop() <= 1)")],
        [f"{_REFUSED}[kv.chain_kv_indices]", f"{_REFUSED}[kv.kv_indices]", f"{_REFUSED}[kv.extend_cache_locs]"],
    ),
    Mutant(
        "the fifth request of a chunk is left out",
        [(ATTENTION + "shared/chunks.py", "request += 1", "request += 1 + (request == 3).to(tl.int32)")],
        ["op_tests/test_random_calls.py::test_attention_to_whatever_is_drawn[attention.gqa_decode]"],
    ),
    Mutant(
        "rows that lie on each other are the place of an output",
        [(RUNTIME + "calls.py", "one.dtype == other.dtype and strides[0] == strides[1]", "one.dtype == other.dtype")],
        [_HOSTILE + "test_an_output_takes_the_place_of_an_input_element_by_element"],
    ),
    Mutant(
        "references need their outputs once",
        [(RUNTIME + "check.py", "sum(size * times[name] for name, size in sizes.items())", "sum(sizes.values())")],
        [_HOSTILE + "test_the_room_that_references_need"],
    ),
    Mutant(
        "int32 is to hold slots where pages are listed",
        [(KV + "shared/rows.py", "table // unit <= check.MAX_INT32", "table <= check.MAX_INT32")],
        [f"{_HOSTILE}test_the_last_slot_that_int32_holds[kv_indices-16-16]"],
    ),
    Mutant(
        "drafts past max_query are seen",
        [(ATTENTION + "shared/batch.py", "stop = tl.minimum(prefix + num_drafts, filled)", "stop = filled")],
        ["op_tests/test_random_calls.py::test_ragged_trees_of_any_bits[csr-in pool]"],
    ),
    Mutant(
        "grammars on links that point backward",
        [("eagle_kernels/ops/token_bitmask.py", "if node < link < len", "if 0 < link < len")],
        ["op_tests/ops/test_token_bitmask.py::test_rows_of_malformed_links_are_those_of_the_definition"],
    ),
    Mutant(
        "a node that two parents list goes to the last one",
        [(VERIFY + "verify_tree_typical.py", " & (weight > 0.0) & (depth < 0)", " & (weight > 0.0)")],
        ["op_tests/test_random_verification.py::test_random_calls[verify.verify_tree_typical]"],
    ),
    Mutant(
        "children after one with a row of another request",
        [(PRIMITIVES + "tree_walk.py", "child = tl.where(is_sound, sibling, -1)", "child = sibling")],
        ["op_tests/test_random_verification.py::test_random_calls[sampling.verify_tree_sampled]"],
    ),
]  # fmt: skip
