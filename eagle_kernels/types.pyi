# Written by `python -m bench.api`; do not edit.
from .engine.benchmark import BenchmarkResult as BenchmarkResult
from .engine.benchmark import RunStats as RunStats
from .engine.models.draft_head import DraftHead as DraftHead
from .engine.models.medusa import MedusaHeads as MedusaHeads
from .engine.models.tokenizer import Detokenizer as Detokenizer
from .engine.models.tokenizer import Tokenizer as Tokenizer
from .engine.requests.request import Request as Request
from .engine.requests.request import TokenEvent as TokenEvent
from .engine.requests.sampling_params import SamplingFields as SamplingFields
from .engine.serve.lock import EngineLock as EngineLock
from .engine.serve.output import GenerationOutput as GenerationOutput
from .engine.serve.output import GenerationStats as GenerationStats
from .engine.serve.stream import TextPiece as TextPiece
from .engine.serve.stream import TextStream as TextStream
from .engine.serve.stream import TokenStream as TokenStream
from .engine.step.plan import Candidate as Candidate
from .engine.step.stepper import Verified as Verified
from .ops.attention.shared.attention import Output as AttentionOutput
from .ops.draft.merge_drafts import Output as MergeDraftsOutput
from .ops.draft.ngram_match import Output as NgramMatchOutput
from .ops.draft.reroot_drafts import Output as RerootDraftsOutput
from .ops.draft.share_drafts import Output as ShareDraftsOutput
from .ops.experts.route_experts import Output as RouteExpertsOutput
from .ops.kv.accepted_cache_locs import Output as AcceptedCacheLocsOutput
from .ops.kv.chain_kv_indices import Output as ChainKVIndicesOutput
from .ops.kv.draft_cache_locs import Output as DraftCacheLocsOutput
from .ops.kv.draft_kv_indices import Output as DraftKVIndicesOutput
from .ops.kv.extend_cache_locs import Output as ExtendCacheLocsOutput
from .ops.kv.find_slots import Output as FindSlotsOutput
from .ops.kv.kv_indices import Output as KVIndicesOutput
from .ops.nn.rms_norm import Output as RMSNormOutput
from .ops.nn.rope import Output as RopeOutput
from .ops.rejection.sample_children import Output as SampleChildrenOutput
from .ops.sampling.shared.sampled_levels import Output as SampledVerifyOutput
from .ops.token_bitmask import Matcher as Matcher
from .ops.tree.build_tree_from_blocks import Output as BuildTreeFromBlocksOutput
from .ops.tree.build_tree_from_scores import Output as BuildTreeFromScoresOutput
from .ops.tree.compute_tree_statistics import Output as TreeStatisticsOutput
from .ops.tree.organize_draft_results import Output as OrganizeDraftResultsOutput
from .ops.tree.prune_trees import Output as PruneTreesOutput
from .ops.tree.shared.levels import Output as SelectTopKTokensOutput
from .ops.tree.shared.tree_contract import Output as BuildTreeOutput
from .ops.tree.tree_from_mask import Output as TreeFromMaskOutput
from .ops.verify.append_output import Output as AppendOutput
from .ops.verify.pack_verify_rows import Output as PackVerifyRowsOutput
from .ops.verify.verify_commit import Output as CommitOutput
from .primitives.tree_walk import Output as VerifyOutput
from .runtime.library import Operator as Operator

__all__ = [
    "AcceptedCacheLocsOutput",
    "AppendOutput",
    "AttentionOutput",
    "BenchmarkResult",
    "BuildTreeFromBlocksOutput",
    "BuildTreeFromScoresOutput",
    "BuildTreeOutput",
    "Candidate",
    "ChainKVIndicesOutput",
    "CommitOutput",
    "Detokenizer",
    "DraftCacheLocsOutput",
    "DraftHead",
    "DraftKVIndicesOutput",
    "EngineLock",
    "ExtendCacheLocsOutput",
    "FindSlotsOutput",
    "GenerationOutput",
    "GenerationStats",
    "KVIndicesOutput",
    "Matcher",
    "MedusaHeads",
    "MergeDraftsOutput",
    "NgramMatchOutput",
    "Operator",
    "OrganizeDraftResultsOutput",
    "PackVerifyRowsOutput",
    "PruneTreesOutput",
    "RMSNormOutput",
    "Request",
    "RerootDraftsOutput",
    "RopeOutput",
    "RouteExpertsOutput",
    "RunStats",
    "SampleChildrenOutput",
    "SampledVerifyOutput",
    "SamplingFields",
    "SelectTopKTokensOutput",
    "ShareDraftsOutput",
    "TextPiece",
    "TextStream",
    "TokenEvent",
    "TokenStream",
    "Tokenizer",
    "TreeFromMaskOutput",
    "TreeStatisticsOutput",
    "Verified",
    "VerifyOutput",
]
