"""Attention over the paged KV cache, for one query per request and for trees of queries."""
