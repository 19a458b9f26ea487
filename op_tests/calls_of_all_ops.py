"""A call of every public op with an argument of every kind, for type checkers (`test_types.py`); nobody runs it."""

from __future__ import annotations

import torch

import eagle_kernels as ek


def gqa_decode_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.gqa_decode(
        t,
        t,
        t,
        block_table=t,
        seq_lens=t,
        kv_indptr=t,
        kv_indices=t,
        last_page_len=t,
        sinks=t,
        k_scale=t,
        v_scale=t,
        sm_scale=0.5,
        soft_cap=0.5,
        window=4,
        deterministic=True,
        plan=t,
    )
    return [result.output, result.lse]


def plan_attention_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.plan_attention(t, num_drafts=4, window=4)]


def prefill_attention_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.prefill_attention(
        t,
        t,
        key=t,
        value=t,
        key_indptr=t,
        k_cache=t,
        v_cache=t,
        block_table=t,
        seq_lens=t,
        kv_indptr=t,
        kv_indices=t,
        last_page_len=t,
        sinks=t,
        k_scale=t,
        v_scale=t,
        max_query=4,
        is_causal=True,
        sm_scale=0.5,
        soft_cap=0.5,
        window=4,
    )
    return [result.output, result.lse]


def tree_attention_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.tree_attention(
        t,
        t,
        t,
        tree_mask=t,
        num_draft_keys=4,
        draft_key=t,
        draft_value=t,
        qo_indptr=t,
        positions=t,
        key_positions=t,
        block_table=t,
        seq_lens=t,
        kv_indptr=t,
        kv_indices=t,
        last_page_len=t,
        sinks=t,
        k_scale=t,
        v_scale=t,
        is_causal=True,
        max_query=4,
        sm_scale=0.5,
        soft_cap=0.5,
        window=4,
        deterministic=True,
        plan=t,
    )
    return [result.output, result.lse]


def merge_drafts_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.merge_drafts(t, t, t, t, t, num_speculative_tokens=4)
    return [result.tokens, result.parents, result.num_drafts]


def ngram_match_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.ngram_match(
        t,
        t,
        draft_tokens=t,
        max_drafts=t,
        num_speculative_tokens=4,
        spec_steps=4,
        max_ngram_size=4,
        min_ngram_size=4,
        max_matches=4,
        prefer="text",
        token_budget=4,
    )
    return [result.tokens, result.parents, result.num_drafts, result.match_len]


def reroot_drafts_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.reroot_drafts(t, t, t, num_speculative_tokens=4, spec_steps=4)
    return [result.tokens, result.parents, result.num_drafts]


def accepted_cache_locs_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.accepted_cache_locs(
        t,
        accept_token_num=t,
        accept_index=t,
        seq_lens=t,
        free_token_num=t,
        num_verify_tokens=4,
        page_size=4,
        capacity=4,
        free_capacity=4,
        keep_unused=True,
    )
    return [
        result.path_indptr,
        result.source_locs,
        result.target_locs,
        result.free_indptr,
        result.free_locs,
        result.overflow,
    ]


def align_evict_mask_to_page_size_(t: torch.Tensor) -> None:
    ek.align_evict_mask_to_page_size(t, t, page_size=4)


def assign_req_to_token_(t: torch.Tensor) -> None:
    ek.assign_req_to_token(t, t, t, t, t)


def chain_kv_indices_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.chain_kv_indices(t, t, t, num_verify_tokens=4, capacity=4, keep_unused=True)
    return [result.kv_indptr, result.kv_indices, result.overflow]


def draft_cache_locs_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.draft_cache_locs(t, t, t, topk=4, num_steps=4, page_size=4, capacity=4, is_step_major=True)
    return [
        result.cache_locs,
        result.positions,
        result.copy_indptr,
        result.source_locs,
        result.target_locs,
        result.overflow,
    ]


def draft_kv_indices_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.draft_kv_indices(
        t,
        t,
        t,
        topk=4,
        num_steps=4,
        capacity=4,
        page_size=4,
        window_size=4,
        sink_size=4,
        window_counts_drafts=True,
        keep_unused=True,
    )
    return [result.kv_indptr, result.kv_indices, result.overflow]


def extend_cache_locs_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.extend_cache_locs(t, t, t, ends=t, num_tokens=4, capacity=4, keep_unused=True)
    return [result.indptr, result.cache_locs, result.positions, result.overflow]


def find_slots_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.find_slots(t, t, count=4, page_size=4, max_length=4)
    return [result.slots, result.positions]


def kv_indices_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.kv_indices(t, t, t, starts=t, capacity=4, page_size=4, keep_unused=True)
    return [result.kv_indptr, result.kv_indices, result.last_page_len, result.overflow]


def move_accepted_kv_(t: torch.Tensor) -> None:
    ek.move_accepted_kv(t, t, t, t, t, t, num_verify_tokens=4)


def write_kv_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.write_kv(t, t, t, t, t, query=t, positions=t, cos=t, sin=t, is_interleaved=True, k_scale=t, v_scale=t)]


def linear_decode_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.linear_decode(t, t, bias=t, prefetch_weight=True)]


def rms_norm_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.rms_norm(t, t, residual=t, eps=0.5, weight_offset=0.5, round_sum=True, round_normalized=True)
    return [result.output, result.residual]


def rope_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.rope(t, t, t, t, t, is_interleaved=True)
    return [result.query, result.key]


def silu_and_mul_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.silu_and_mul(t, up=t, round_activation=True)]


def build_tree_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.build_tree(
        t,
        t,
        t,
        t,
        t,
        seq_lens_sum=4,
        topk=4,
        spec_steps=4,
        num_verify_tokens=4,
        tree_mask_mode="text",
        prefix_is_set=True,
        any_order=True,
    )
    return [
        result.tree_mask,
        result.positions,
        result.retrieve_index,
        result.retrieve_next_token,
        result.retrieve_next_sibling,
        result.draft_tokens,
    ]


def build_tree_from_scores_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.build_tree_from_scores(
        t,
        t,
        t,
        t,
        t,
        seq_lens_sum=4,
        topk=4,
        spec_steps=4,
        num_verify_tokens=4,
        tree_mask_mode="text",
        prefix_is_set=True,
    )
    return [
        result.tree_mask,
        result.positions,
        result.retrieve_index,
        result.retrieve_next_token,
        result.retrieve_next_sibling,
        result.draft_tokens,
        result.top_scores_index,
    ]


def compute_tree_statistics_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.compute_tree_statistics(t, t, spec_steps=4)
    return [result.depths, result.num_linked, result.num_leaves, result.max_branching, result.nodes_per_depth]


def organize_draft_results_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.organize_draft_results(t, t, num_verify_tokens=4)
    return [result.top_scores_index, result.draft_tokens]


def pack_tree_mask_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.pack_tree_mask(t, seq_lens=t, num_verify_tokens=4, tree_mask_mode="text")]


def prune_trees_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.prune_trees(t, t, t, t, max_rows=4)
    return [result.draft_tokens, result.tree_mask, result.num_nodes]


def select_top_k_tokens_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.select_top_k_tokens(t, scores=t, ancestors=t, draft_to_target=t, topk=4, level=4)
    return [
        result.scores,
        result.tokens,
        result.parents,
        result.hidden_rows,
        result.parent_slots,
        result.candidate_scores,
        result.candidate_tokens,
        result.ancestors,
    ]


def tree_from_mask_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.tree_from_mask(t, t, num_verify_tokens=4, tree_mask_mode="text")
    return [result.positions, result.retrieve_index, result.retrieve_next_token, result.retrieve_next_sibling]


def tree_from_parents_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.tree_from_parents(
        t, t, t, t, seq_lens_sum=4, num_verify_tokens=4, tree_mask_mode="text", prefix_is_set=True
    )
    return [
        result.tree_mask,
        result.positions,
        result.retrieve_index,
        result.retrieve_next_token,
        result.retrieve_next_sibling,
        result.draft_tokens,
    ]


def unpack_tree_mask_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.unpack_tree_mask(t, seq_lens=t, seq_lens_sum=4, num_verify_tokens=4, tree_mask_mode="text")]


def append_output_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.append_output(
        t, t, t, t, max_tokens=t, end_token_ids=t, stop_sequences=t, min_tokens=t, is_live=t, rows=t
    )
    return [result.new_num_tokens, result.tokens, result.num_kept, result.finish_reason]


def min_p_renorm_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.min_p_renorm(t, t)]


def pack_verify_rows_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.pack_verify_rows(t, t, positions=t, seq_lens=t, max_rows=4)
    return [
        result.input_ids,
        result.positions,
        result.row_to_batch,
        result.row_to_node,
        result.cu_seqlens,
        result.num_rows,
        result.overflow,
    ]


def penalize_logits_(t: torch.Tensor) -> list[torch.Tensor]:
    return [
        ek.penalize_logits(
            t,
            t,
            t,
            t,
            t,
            repetition_penalty=t,
            frequency_penalty=t,
            presence_penalty=t,
            prompt_mask=t,
            output_counts=t,
            logit_bias=t,
            token_bitmask=t,
            min_tokens=t,
            num_output_tokens=t,
            end_token_ids=t,
            bad_token_ids=t,
        )
    ]


def sample_children_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.sample_children(t, t, t, t, nodes=t, d2t=t, num_children=4, replacement=True)
    return [result.tokens, result.logprobs]


def sample_from_logits_(t: torch.Tensor) -> list[torch.Tensor]:
    return [
        ek.sample_from_logits(
            t,
            t,
            t,
            t,
            top_k=t,
            top_p=t,
            min_p=t,
            repetition_penalty=t,
            frequency_penalty=t,
            presence_penalty=t,
            prompt_mask=t,
            output_counts=t,
            logit_bias=t,
            token_bitmask=t,
            filter_order="text",
        )
    ]


def top_k_renorm_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.top_k_renorm(t, t)]


def top_p_renorm_(t: torch.Tensor) -> list[torch.Tensor]:
    return [ek.top_p_renorm(t, t)]


def verify_chain_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_chain(t, t, t, t, t, t, draft_temperature=t, target_probs=t, draft_probs=t, d2t=t, method="text")
    return [result.predicts, result.accept_index, result.accept_token_num]


def verify_commit_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_commit(t, t, t, t, is_live=t)
    return [
        result.new_seq_lens,
        result.bonus_tokens,
        result.accept_lengths,
        result.tokens,
        result.hidden_rows,
        result.last_row,
    ]


def verify_tree_coins_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree_coins(
        t, t, t, t, t, t, t, spec_steps=4, threshold_single=0.5, threshold_acc=0.5, keep_unvisited=True, any_order=True
    )
    return [result.predicts, result.accept_index, result.accept_token_num]


def verify_tree_greedy_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree_greedy(
        t,
        t,
        t,
        t,
        target_predict=t,
        target_logits=t,
        spec_steps=4,
        accept_policy="text",
        simulated_rates=t,
        seeds=t,
        positions=t,
        keep_unvisited=True,
        any_order=True,
    )
    return [result.predicts, result.accept_index, result.accept_token_num]


def verify_tree_rejection_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree_rejection(
        t,
        t,
        t,
        t,
        t,
        t,
        t,
        t,
        t,
        draft_temperature=t,
        target_probs=t,
        draft_probs=t,
        d2t=t,
        spec_steps=4,
        replacement=True,
    )
    return [result.predicts, result.accept_index, result.accept_token_num]


def verify_tree_sampled_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree_sampled(
        t,
        t,
        t,
        t,
        t,
        t,
        t,
        t,
        top_k=t,
        top_p=t,
        min_p=t,
        repetition_penalty=t,
        frequency_penalty=t,
        presence_penalty=t,
        prompt_mask=t,
        output_counts=t,
        logit_bias=t,
        token_bitmask=t,
        seq_lens=t,
        is_live=t,
        simulated_rates=t,
        spec_steps=4,
        filter_order="text",
        return_logprobs=True,
        accept_policy="text",
    )
    return [
        result.predicts,
        result.accept_index,
        result.accept_token_num,
        result.logprobs,
        result.raw_logprobs,
        result.new_seq_lens,
        result.bonus_tokens,
        result.accept_lengths,
        result.tokens,
        result.hidden_rows,
        result.last_row,
    ]


def verify_tree_topp_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree_topp(t, t, t, t, t, t, t, spec_steps=4, verify_window=4)
    return [result.predicts, result.accept_index, result.accept_token_num]


def verify_tree_traversal_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree_traversal(
        t, t, t, t, t, t, t, t, t, draft_temperature=t, target_probs=t, draft_probs=t, d2t=t, spec_steps=4
    )
    return [result.predicts, result.accept_index, result.accept_token_num]


def verify_tree_typical_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree_typical(t, t, t, t, t, t, t, t, t, t, spec_steps=4)
    return [result.predicts, result.accept_index, result.accept_token_num]


def verify_tree_(t: torch.Tensor) -> list[torch.Tensor]:
    result = ek.verify_tree(
        t,
        t,
        t,
        t,
        target_logits=t,
        target_predict=t,
        positions=t,
        seeds=t,
        temperature=t,
        top_k=t,
        top_p=t,
        min_p=t,
        accept_policy="text",
        simulated_rates=t,
        spec_steps=4,
    )
    return [result.predicts, result.accept_index, result.accept_token_num]
