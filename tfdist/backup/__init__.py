"""Commits of a training run: their content, their atomic writing, and the choice of the commit to restore."""
