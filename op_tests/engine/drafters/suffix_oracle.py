"""Suffix decoding by its definition: occurrences are counted in lists, every match is drafted, the best one wins."""

from eagle_kernels.engine.drafters.suffix_drafts import SuffixDraft


class Texts:
    """Token by token as they came: (number of the text, token). Removed texts count no more, but were."""

    def __init__(self, depth):
        self.depth, self.tokens, self.num_added, self.removed = depth, {}, 0, set()

    def add(self, text, tokens):
        for token in tokens:
            self.num_added += 1
            self.tokens.setdefault(text, []).append((token, self.num_added))

    def occurrences(self, string):
        """When each ended: those that count, and all."""
        counted, ever = [], []
        for text, tokens in self.tokens.items():
            for start in range(len(tokens) - len(string) + 1):
                end = start + len(string)
                if [token for token, _ in tokens[start:end]] == string:
                    ever.append(tokens[end - 1][1])
                    if text not in self.removed:
                        counted.append(tokens[end - 1][1])
        return counted, ever

    def followers(self, string):
        """(token, share of occurrences that it follows), by count, of equals what was added last first."""
        if len(string) >= self.depth:
            return []
        total = len(self.occurrences(string)[0])
        known = sorted({token for tokens in self.tokens.values() for token, _ in tokens})
        found = []
        for token in known:
            counted, ever = self.occurrences([*string, token])
            if counted:
                found.append((len(counted), max(ever), token))
        return [(token, count / total) for count, _, token in sorted(found, reverse=True)]


def path(texts, match, limit, min_prob):
    tokens, probs, prob = [], [], 1.0
    while len(tokens) < limit:
        followers = texts.followers([*match, *tokens])
        if not followers:
            break
        token, share = followers[0]
        prob *= share
        if prob < min_prob:
            break
        tokens.append(token)
        probs.append(prob)
    return tokens, list(range(-1, len(tokens) - 1)), probs


def tree(texts, match, limit, min_prob):
    tokens, parents, probs = [], [], []
    waiting = []  # in the order in which they were found

    def find(index, above, prob):
        for token, share in texts.followers([*match, *above]):
            if prob * share >= min_prob:
                waiting.append((prob * share, index, [*above, token]))

    find(-1, [], 1.0)
    while waiting and len(tokens) < limit:
        chosen = max(waiting, key=lambda item: item[0])  # the first of equals
        waiting.remove(chosen)
        prob, parent, branch = chosen
        tokens.append(branch[-1])
        parents.append(parent)
        probs.append(prob)
        find(len(tokens) - 1, branch, prob)
    return tokens, parents, probs


def best(texts, context, draft, max_spec_tokens, factor, offset, min_prob):
    found = SuffixDraft([], [], [], 0.0, 0)
    for length in range(1, min(len(context), texts.depth - 1) + 1):
        match = context[-length:]
        if not texts.occurrences(match)[0]:
            break
        limit = max(0, min(max_spec_tokens, int(length * factor + offset + 1e-6)))
        tokens, parents, probs = draft(texts, match, limit, min_prob)
        score = 0.0
        for prob in probs:
            score += prob
        if score >= found.score:
            found = SuffixDraft(tokens, parents, probs, score, length)
    return found


def longest_match(texts, context):
    sizes = range(min(len(context), texts.depth - 1), 0, -1)
    return next((size for size in sizes if texts.followers(context[-size:])), 0)


class OracleCache:
    """SuffixCache with these."""

    def __init__(self, max_tree_depth, max_cached_requests):
        self.depth, self.most = max_tree_depth, max_cached_requests
        self.texts, self.num_started = Texts(max_tree_depth), 0
        self.own, self.numbers, self.cached = {}, {}, []

    def start(self, request, prompt):
        self.own[request] = Texts(self.depth)
        self.own[request].add(0, prompt)
        self.num_started += 1
        self.numbers[request] = self.num_started
        if self.most:
            self.cached.append(self.num_started)
            if 0 < self.most < len(self.cached):
                self.texts.removed.add(self.cached.pop(0))

    def extend(self, request, tokens):
        self.own[request].add(0, tokens)
        if self.numbers[request] in self.cached:
            self.texts.add(self.numbers[request], tokens)

    def stop(self, request):
        del self.own[request]

    def context(self, request):
        return [token for token, _ in self.own[request].tokens.get(0, [])]

    def longest_match(self, request):
        return max(longest_match(texts, self.context(request)) for texts in (self.own[request], self.texts))

    def speculate(
        self, request, *, max_spec_tokens, max_spec_factor=1.0, max_spec_offset=0.0, min_token_prob=0.1, use_tree=False
    ):
        context = self.context(request)
        arguments = (context, tree if use_tree else path, max_spec_tokens, max_spec_factor, max_spec_offset)
        local = best(self.own[request], *arguments, min_token_prob)
        shared = best(self.texts, *arguments, min_token_prob)
        return local if local.score >= shared.score else shared


def num_states(cache):
    """Sizes of all local automata of a `SuffixCache` together, and of the global one."""
    return sum(request.counts.num_states for request in cache._requests.values()), cache._counts.num_states
