"""Training with local steps: each replica updates its own weights, and all replicas synchronize every few steps."""
