"""Models that the engine can run: their contract (`protocol`), a decoder, draft heads, and how they are loaded."""
