"""Held-out evaluation: what a policy answers, how it scores, and against what."""
