"""Connections between the workers of a job: who may make one, and how it is protected. Loads no TensorFlow."""
