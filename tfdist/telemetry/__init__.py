"""Figures of each worker of a running `fit`: rows, time by phase, traffic, backups, memory; where they are written."""
