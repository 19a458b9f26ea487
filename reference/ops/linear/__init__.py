"""Linear layers for the rows of a decoding step, in 16 bit and with quantised weights."""
