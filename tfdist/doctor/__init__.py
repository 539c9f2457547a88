"""The command `tfdist doctor`: checks before a job whether workers can start, connect and compute. No TensorFlow."""
