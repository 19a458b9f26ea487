"""Which noise a run looks at, and whether it looks at any twice: for runs on the references, on the CPU.

A key (seed, position, stream, draw) names a block of noise, of which every token id has its share. A run makes more
noise than it looks at: drafts that no walk reaches, the target's tokens at nodes off the path. Inspected is a key when
something that was made of it takes part in deciding what a step emits:

    a coin, and a token that is drawn from a residual    when it is drawn, which the references do when they need it
    the target's own token at a node                     when the walk asks for it
    a draft                                              when verification reads its token, whatever it does with it
    a coin of simulated acceptance                       when the walk asks whether to accept at its depth

The children that are drawn for one node are one drawing, and may be read again and again. A text has the target's law
only if no second drawing uses a key that was inspected: what comes of it would not be random any more. A key that was
used and not inspected may come again. So the shape of a tree must not depend on drafts that were drawn: to see it would
be to inspect them all.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import eagle_kernels
from eagle_kernels import ops
from eagle_kernels.engine.step import verification
from eagle_kernels.reference import accept_policy, random
from eagle_kernels.reference.ops.rejection import verify_chain, verify_tree_rejection, verify_tree_traversal
from eagle_kernels.reference.ops.sampling import verify_tree_sampled
from eagle_kernels.reference.ops.verify import verify_tree_topp, verify_tree_typical

STREAMS = {getattr(random, name): name.removeprefix("STREAM_") for name in dir(random) if name.startswith("STREAM_")}
# all ops that make noise
_OPS = (
    "sample_children", "sample_from_logits", "verify_chain", "verify_tree_greedy", "verify_tree_rejection",
    "verify_tree_sampled", "verify_tree_traversal", "verify_tree_typical",
)  # fmt: skip


class Key(NamedTuple):
    seed: int
    position: int
    stream: int
    draw: int


class _Draft(NamedTuple):
    key: Key
    drawing: object
    token: int


class NoiseKeys:
    """Records the keys that are inspected while the monkeypatch lasts; every seed must be one request's alone.

    inspected  the drawing that each key was inspected for
    drawings   of the keys of all drafts of live requests, inspected or not
    faults     lines that tell of keys inspected for two drawings, and of trees that changed their shape
    """

    def __init__(self, monkeypatch):
        self.inspected: dict[Key, object] = {}
        self.drawings: dict[Key, set] = defaultdict(set)
        self.faults: list[str] = []
        self._op: str | None = None
        self._blocks: list[list[Key]] = []  # of the running op: keys of all rows, for each time that noise was made
        self._drafts: list[list[list[_Draft]]] = []  # of this step: the children of all rows, for each sample_children
        self._is_live: list[int] | None = None
        self._request = -1
        self._shapes: dict[object, tuple] = {}

        def wrap(owner, name, wrapper):
            monkeypatch.setattr(owner, name, wrapper(getattr(owner, name)))

        wrap(random, "philox", self._noise)
        wrap(accept_policy, "simulated_acceptance", self._simulated)
        wrap(verify_tree_sampled, "planted", self._walked)
        for module in (verify_tree_topp, verify_tree_typical):
            wrap(module, "write_paths", self._written)
        for module in (verify_chain, verify_tree_rejection, verify_tree_traversal):
            wrap(module, "verify_request", self._verified)
        for name in _OPS:
            wrapped = self._named(name, getattr(ops, name))
            # in this order: a package that looks the name up while ops is patched would keep the patch
            for module in (eagle_kernels, ops):
                monkeypatch.setattr(module, name, wrapped)
        wrap(verification.Verifier, "verify", self._stepped)

    @property
    def streams(self) -> set[str]:
        """Names of the streams of which something was inspected."""
        return {STREAMS[key.stream] for key in self.inspected}

    def _look(self, key: Key, drawing: object = None) -> None:
        if self._is_live is not None and not self._is_live[self._request]:
            return
        drawing = object() if drawing is None else drawing
        if self.inspected.setdefault(key, drawing) != drawing:
            self.faults.append(f"{STREAMS[key.stream]}: {key} is inspected for a second drawing")

    def _noise(self, philox):
        def made(seed, counter):
            if isinstance(seed, int):
                low, high, stream, draw = counter
                self._look(Key(seed, low | high << 32, stream, draw))
            else:
                if self._op is None:
                    self.faults.append("noise was made outside of the ops that are known to make it")
                low, high, stream, draw = (word.expand_as(seed).tolist() for word in counter)
                positions = [each | other << 32 for each, other in zip(low, high)]
                self._blocks.append([Key(*fields) for fields in zip(seed.tolist(), positions, stream, draw)])
            return philox(seed, counter)

        return made

    def _named(self, name, op):
        def called(*arguments, **keywords):
            self._op, self._blocks, self._request = name, [], -1
            output = op(*arguments, **keywords)
            if name == "sample_children":
                self._drafts.append([self._children(row, tokens) for row, tokens in enumerate(output.tokens.tolist())])
            elif name != "sample_from_logits":
                self._drafts = []
            self._op = None
            return output

        return called

    def _children(self, row: int, tokens: list[int]) -> list[_Draft]:
        """With replacement each of a row's children has a key of its own."""
        blocks = self._blocks if len(self._blocks) > 1 else self._blocks * len(tokens)
        drawing = object()
        return [_Draft(block[row], drawing, token) for block, token in zip(blocks, tokens, strict=True)]

    def _simulated(self, simulated_acceptance):
        def coins(*arguments):
            first, requests = len(self._blocks), simulated_acceptance(*arguments).tolist()
            blocks = self._blocks[first:]

            def look(request, depth):
                self._request = request
                self._look(blocks[depth][request])

            rows = enumerate(requests)
            return _Listed([_Watched(row, functools.partial(look, request)) for request, row in rows])

        return coins

    def _walked(self, planted):
        """Of a walk by the target's own tokens: drawn for all rows before it, or for a row when it comes there."""

        def watched(token_at, candidates, *arguments, **keywords):
            all_rows = self._blocks[-1] if self._blocks else None

            def look(request, node):
                num_blocks = len(self._blocks)
                token = token_at(request, node)
                is_own = len(self._blocks) > num_blocks
                self._request = request
                self._look(self._blocks[-1][0] if is_own else all_rows[request * candidates.shape[1] + node])
                return token

            return planted(look, candidates, *arguments, **keywords)

        return watched

    def _written(self, write_paths):
        def watched(candidates, *arguments, bonus_at):
            rows = self._blocks[-1]

            def look(request, node):
                self._request = request
                self._look(rows[request * candidates.shape[1] + node])
                return bonus_at(request, node)

            return write_paths(candidates, *arguments, bonus_at=look)

        return watched

    def _verified(self, verify_request):
        def watched(tokens, *arguments, **keywords):
            self._request += 1
            return verify_request(self._watch_drafts(tokens), *arguments, **keywords)

        return watched

    def _watch_drafts(self, tokens: list[int]) -> Sequence[int]:
        """The tokens of a tree, whose nodes are the drafts of its request in the order in which they were drawn."""
        if not self._drafts:  # chosen, not drawn
            return tokens
        batch_size, drafts = len(self._drafts[0]), []
        for rows in self._drafts:
            per_request = len(rows) // batch_size
            drafts += sum(rows[self._request * per_request : (self._request + 1) * per_request], [])
        if self._is_live is not None and not self._is_live[self._request]:
            return tokens
        drafts = drafts[: len(tokens) - 1]
        if [draft.token for draft in drafts] != tokens[1:]:
            self.faults.append("the nodes of a tree are not the drafts in the order in which they were drawn")
            return tokens
        for draft in drafts:
            self.drawings[draft.key].add(draft.drawing)

        def look(node):
            if node > 0:
                self._look(drafts[node - 1].key, drafts[node - 1].drawing)

        return _Watched(tokens, look)

    def _stepped(self, verify):
        def watched(strategy, batch, proposal, logits, features):
            self._is_live = batch.is_live.tolist()
            if proposal.draft_logits is not None:
                links = zip(proposal.tree.retrieve_next_token.tolist(), proposal.tree.retrieve_next_sibling.tolist())
                for is_live, shape in zip(self._is_live, links):
                    if is_live and self._shapes.setdefault(strategy, shape) != shape:
                        self.faults.append("a tree of drafts that were drawn has another shape than the one before it")
            committed = verify(strategy, batch, proposal, logits, features)
            self._is_live = None
            return committed

        return watched


class _Watched(list):
    """A list that tells which of its items is read."""

    def __init__(self, items: list, look):
        super().__init__(items)
        self._look = look

    def __getitem__(self, index):
        for place in range(*index.indices(len(self))) if isinstance(index, slice) else (index,):
            self._look(place)
        return super().__getitem__(index)


class _Listed(list):
    """Lists in the place of a tensor that is only asked for them."""

    def tolist(self) -> list:
        return self
