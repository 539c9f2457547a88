"""Policy of adaptive training: the gradient noise scale, the time of a step, the batch size, the learning rate."""
