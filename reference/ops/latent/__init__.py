"""Attention over latents (MLA): keys that are values too, one for all heads, for tokens, trees and prompts."""
