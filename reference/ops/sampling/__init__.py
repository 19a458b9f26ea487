"""Drawing tokens from logits, filtering and penalising them, and verification by sample and match."""
