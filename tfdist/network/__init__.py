"""Connections between the workers of a job: admission, a shared secret and TLS. Loads no TensorFlow."""
