"""The paged KV cache: index lists for drafting, and moving the accepted path."""
