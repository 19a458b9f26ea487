"""What `ngram_match` is made of: the search for earlier occurrences, and the budget of verified tokens."""
