"""The paged KV cache: lists of slots for drafting, for attention, after verification; writing and moving."""
