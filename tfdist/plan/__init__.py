"""Predicts the time of a training step with any number of workers, as `tfdist plan` prints it."""
