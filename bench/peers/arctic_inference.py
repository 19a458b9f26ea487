"""Arctic Inference's suffix decoding, in C++, which ships as source: `pip install arctic-inference` builds it."""

from collections.abc import Hashable, Sequence

from eagle_kernels.engine.drafters.suffix_drafts import SuffixDraft

from ..harness.declaration import Unavailable


class SuffixCache:
    """Called as ours is. It keeps the context, the last tokens of each text, which Arctic wants to be given."""

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1):
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise Unavailable(f"arctic_inference is not installed ({error})") from None
        self._cache = SuffixDecodingCache(max_tree_depth, max_cached_requests)
        self._depth = max_tree_depth
        self._contexts: dict[Hashable, list[int]] = {}

    def start(self, request: Hashable, prompt: Sequence[int]) -> None:
        self._cache.start_request(request, prompt)
        self._contexts[request] = list(prompt[-self._depth :])

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self._cache.add_active_response(request, tokens)
        self._contexts[request] = (self._contexts[request] + tokens)[-self._depth :]

    def stop(self, request: Hashable) -> None:
        self._cache.stop_request(request)
        del self._contexts[request]

    def speculate(self, request: Hashable, *, max_spec_tokens: int, use_tree: bool = False) -> SuffixDraft:
        found = self._cache.speculate(request, self._contexts[request], max_spec_tokens, use_tree_spec=use_tree)
        return SuffixDraft(found.token_ids, found.parents, found.probs, found.score, found.match_len)
