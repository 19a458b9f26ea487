"""The rows that step together, on the device: their state, their pages of keys and values, the memory these take."""
