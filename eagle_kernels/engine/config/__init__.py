"""What a caller chooses for a whole engine: tree, drafter, rule of acceptance, limits."""
