"""Models the engine can run: the contract (`protocol`), a decoder, an EAGLE-3 head, and how they are loaded."""
