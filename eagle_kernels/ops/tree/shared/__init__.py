"""What ops of this family share: building trees, masks of every layout, and the selection of candidates."""
