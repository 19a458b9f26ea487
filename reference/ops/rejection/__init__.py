"""Drafts that were drawn from a draft model: drawing them, and verifying them along a chain or a tree."""
