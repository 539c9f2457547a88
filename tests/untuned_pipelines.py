"""Makes the pipelines of a process without the threads that tune them, and again as users have them."""

import contextlib


def untune_pipelines():
    """Makes each `tf.data` pipeline of this process without the thread that tunes it.

    TensorFlow may wait for the end of such a thread as long as its pipeline has lived, up to a minute. In a process
    that lives for many tests, any test may free the pipelines of those before it, and wait for several such threads.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import dataset_ops

    def untuned(dataset):
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)

    kind = dataset_ops.DatasetV2
    if not hasattr(kind, "_options_of_tensorflow"):
        kind._options_of_tensorflow = kind._apply_debug_options
    # Every new iterator calls it; no public option covers the pipelines that Keras makes.
    kind._apply_debug_options = untuned


@contextlib.contextmanager
def tuned_pipelines():
    """Makes pipelines as users have them, within the block."""
    from tensorflow.python.data.ops import dataset_ops

    kind = dataset_ops.DatasetV2
    untuned = kind._apply_debug_options
    kind._apply_debug_options = getattr(kind, "_options_of_tensorflow", untuned)
    try:
        yield
    finally:
        kind._apply_debug_options = untuned
