"""A grammar in the form of vLLM's backends, whose state depends on all tokens before, and what serves it in vLLM."""

import torch

STATES = 5


class Grammar:
    """Each token leads on to one of five states, which forbid a third of all tokens each; it may end at a length."""

    def __init__(self, size: int, last: int | None = None):
        self.size, self.last, self.tokens = size, last, []

    def allowed(self) -> list[int]:
        state = sum(self.tokens) % STATES
        return [token for token in range(self.size) if (7 * token + state) % 3]

    def is_terminated(self) -> bool:
        return self.last is not None and len(self.tokens) >= self.last

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        before, found = list(self.tokens), []
        for token in tokens:
            if self.is_terminated() or token not in self.allowed():
                break
            found.append(token)
            self.tokens.append(token)
        self.tokens = before
        return found

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        assert self.validate_tokens(tokens) == tokens, "vLLM would log an error"
        self.tokens += tokens
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        assert not self.is_terminated()
        bitmask[row] = 0
        for token in self.allowed():
            bitmask[row, token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)

    def reset(self) -> None:
        self.tokens = []


class Backend:
    """Makes masks."""

    def __init__(self, size: int):
        self.size = size

    def allocate_token_bitmask(self, rows: int) -> torch.Tensor:
        return torch.full((rows, -(-self.size // 32)), -1, dtype=torch.int32, device="cpu")

    def destroy(self) -> None:
        pass


def serve(manager_kind: type, parameters_kind: type, grammar_kind: type) -> None:
    """Lets vLLM's manager of structured outputs give all requests that ask for any this grammar, without tokenizers."""
    kind = type("TheirGrammar", (Grammar, grammar_kind), {})

    def grammar_init(manager, request) -> None:
        if request.structured_output_request is not None:
            size = manager.vllm_config.model_config.get_vocab_size()
            manager.backend = manager.backend or Backend(size)
            request.structured_output_request.grammar = kind(size)

    manager_kind.grammar_init, parameters_kind._validate_structured_outputs = grammar_init, lambda *given: None
