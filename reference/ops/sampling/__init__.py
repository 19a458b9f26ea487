"""Verifying the tree: which drafts the target accepts, and the token that follows them."""
