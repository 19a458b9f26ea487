"""Drafts without a model: what the text itself says comes next."""
