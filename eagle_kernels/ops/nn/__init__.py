"""The small kernels that a decode step needs between its matrix products: norm, rotary embedding, activation."""
