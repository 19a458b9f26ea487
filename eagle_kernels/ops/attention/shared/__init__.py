"""What ops of this family share: the online softmax, and how keys are split among programs."""
