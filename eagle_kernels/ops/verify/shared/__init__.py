"""What ops of this family share: the argmax of a long row."""
