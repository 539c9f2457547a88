"""Several logical devices in one process, to test replicas without a GPU."""

from tfdist.errors import ClusterError
from tfdist.readable_numbers import counted


def virtual_devices(n: int) -> list[str]:
    """Splits this process's CPU into logical devices.

    Call this function before TensorFlow runs its first operation, which fixes the devices. Later calls with the same
    number are allowed.

    Args:
      n: Number of logical devices.

    Returns:
      Names of the devices, "CPU:0" to "CPU:<n - 1>".

    Raises:
      ValueError: If `n` is not positive.
      ClusterError: If TensorFlow has already started with another number of devices.
    """
    if n < 1:
        raise ValueError(f"virtual_devices needs n >= 1, got {n}.")
    import tensorflow as tf  # Imported late, so that the parent of a worker pool does not load it.

    (cpu,) = tf.config.list_physical_devices("CPU")
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n)
    except RuntimeError as error:
        # Listing the devices would start TensorFlow, but TensorFlow has already started.
        existing = len(tf.config.list_logical_devices("CPU"))
        if existing != n:
            raise ClusterError(
                f"{counted(n, 'virtual device')} must be made before TensorFlow runs its first operation, but it "
                f"already runs with {counted(existing, 'CPU device')}. Call virtual_devices({n}) at the beginning of "
                "the program, or in a new process."
            ) from error
    return [f"CPU:{index}" for index in range(n)]
