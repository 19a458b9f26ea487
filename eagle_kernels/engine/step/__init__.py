"""One speculative step: what it does, how it is planned, captured and chosen, and how drafts are verified."""
