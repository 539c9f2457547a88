"""Connections between the workers of a job, protected by a shared secret and TLS. Loads no TensorFlow."""
