"""The paged KV cache: index lists for drafting, writing new keys and values, moving the accepted path."""
