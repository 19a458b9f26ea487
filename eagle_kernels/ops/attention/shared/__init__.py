"""What ops of this family share: the online softmax, reading the paged cache, and how keys are split among programs."""
