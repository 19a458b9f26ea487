"""What ops of this family share: the walk, noise, filters, probabilities of target and draft."""
