"""What ops of this family share: the argmax of a long row, and draws by inverse CDF."""
