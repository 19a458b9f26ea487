"""Models the engine can run: the contract (`protocol`), a Llama target, an EAGLE-3 head, and how they are loaded."""
