"""Commits of a training run: what is in one, how it is written whole, which one counts."""
