"""Backups of `fit`, as commits (complete, verified checkpoints): content, atomic writing, choice and restoring."""
