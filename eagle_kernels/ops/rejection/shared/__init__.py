"""What ops of this family share: rows of target and draft, and what rejected or deleted drafts leave of them."""
