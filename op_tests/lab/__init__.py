"""The laboratory: what it measures with, on which models and prompts."""
