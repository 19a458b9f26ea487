"""What only the ops of this family share."""
