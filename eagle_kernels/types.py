"""The types that public functions return: streams, events, results, statistics, outputs of ops.

Each is imported from its own module on first use; type checkers read `types.pyi`.
"""

from .runtime.lazy import lazily

_HOMES = {
    # the engine
    "BenchmarkResult": ".engine.benchmark:BenchmarkResult",
    "Candidate": ".engine.step.plan:Candidate",
    "Detokenizer": ".engine.models.tokenizer:Detokenizer",
    "DraftHead": ".engine.models.draft_head:DraftHead",
    "EngineLock": ".engine.serve.lock:EngineLock",
    "GenerationOutput": ".engine.serve.output:GenerationOutput",
    "GenerationStats": ".engine.serve.output:GenerationStats",
    "Matcher": ".ops.token_bitmask:Matcher",
    "MedusaHeads": ".engine.models.medusa:MedusaHeads",
    "Request": ".engine.requests.request:Request",
    "RunStats": ".engine.benchmark:RunStats",
    "SamplingFields": ".engine.requests.sampling_params:SamplingFields",
    "TextPiece": ".engine.serve.stream:TextPiece",
    "TextStream": ".engine.serve.stream:TextStream",
    "TokenEvent": ".engine.requests.request:TokenEvent",
    "TokenStream": ".engine.serve.stream:TokenStream",
    "Tokenizer": ".engine.models.tokenizer:Tokenizer",
    "Verified": ".engine.step.stepper:Verified",
    # the ops
    "Operator": ".runtime.library:Operator",
    "AcceptedCacheLocsOutput": ".ops.kv.accepted_cache_locs:Output",
    "AppendOutput": ".ops.verify.append_output:Output",
    "AttentionOutput": ".ops.attention.gqa_decode:Output",
    "BuildTreeFromBlocksOutput": ".ops.tree.build_tree_from_blocks:Output",
    "BuildTreeFromScoresOutput": ".ops.tree.build_tree_from_scores:Output",
    "BuildTreeOutput": ".ops.tree.build_tree:Output",
    "ChainKVIndicesOutput": ".ops.kv.chain_kv_indices:Output",
    "CommitOutput": ".ops.verify.verify_commit:Output",
    "DraftCacheLocsOutput": ".ops.kv.draft_cache_locs:Output",
    "DraftKVIndicesOutput": ".ops.kv.draft_kv_indices:Output",
    "ExtendCacheLocsOutput": ".ops.kv.extend_cache_locs:Output",
    "FindSlotsOutput": ".ops.kv.find_slots:Output",
    "KVIndicesOutput": ".ops.kv.kv_indices:Output",
    "MergeDraftsOutput": ".ops.draft.merge_drafts:Output",
    "NgramMatchOutput": ".ops.draft.ngram_match:Output",
    "OrganizeDraftResultsOutput": ".ops.tree.organize_draft_results:Output",
    "PackVerifyRowsOutput": ".ops.verify.pack_verify_rows:Output",
    "PruneTreesOutput": ".ops.tree.prune_trees:Output",
    "RerootDraftsOutput": ".ops.draft.reroot_drafts:Output",
    "RMSNormOutput": ".ops.nn.rms_norm:Output",
    "RouteExpertsOutput": ".ops.experts.route_experts:Output",
    "RopeOutput": ".ops.nn.rope:Output",
    "SampleChildrenOutput": ".ops.rejection.sample_children:Output",
    "SampledVerifyOutput": ".ops.sampling.verify_tree_sampled:Output",
    "SelectTopKTokensOutput": ".ops.tree.select_top_k_tokens:Output",
    "ShareDraftsOutput": ".ops.draft.share_drafts:Output",
    "TreeFromMaskOutput": ".ops.tree.tree_from_mask:Output",
    "TreeStatisticsOutput": ".ops.tree.compute_tree_statistics:Output",
    "VerifyOutput": ".ops.verify.verify_tree_greedy:Output",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
