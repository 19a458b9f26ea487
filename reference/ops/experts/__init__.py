"""Mixtures of experts: which experts a row goes to, and what they compute, for the rows of a step and of a prompt."""
