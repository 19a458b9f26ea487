"""What ops of this family share: the search for earlier occurrences."""
