"""The paged KV cache: lists of slots for drafting, for attention and after verification; moving the accepted path."""
