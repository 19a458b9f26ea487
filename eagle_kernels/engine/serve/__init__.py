"""Serving of requests over time: the session that owns the batch, the scheduler, streams, warm-up and results."""
