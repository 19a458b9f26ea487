"""What ops of this family share: links, masks of every layout, and the best candidates."""
