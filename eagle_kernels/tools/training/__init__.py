"""Training the demo pair: a byte-level Llama and its EAGLE-3 head, from Python's own standard library."""
