"""The models of the benchmarks, and their batches, equal for every framework.

Each model is written twice from the same sizes: for Keras (3, or Keras 2 as `tf_keras`) and for PyTorch. A framework is
only imported by the functions that need it.
"""

import dataclasses
import time
import types
from typing import Any

import numpy as np

CLASSES = 10
IMAGE, CNN_WIDTHS, CNN_BLOCKS = 32, (16, 32, 64), 5
FEATURES, HIDDEN = 256, (1792, 1792, 1792, 1792)
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 1536, 64, 384, 6, 5
ITEMS, ITEM_WIDTH, ITEMS_PER_ROW = 150_000, 64, 64
EMULATED_LAYERS, EMULATED_WIDTH, EMULATED_SECONDS = 10, 1000, 0.1


@dataclasses.dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
      parameters: Number of trainable parameters; both frameworks have this number within 1 %.
      batch_size: Rows per worker.
      about: The property for which the model was chosen.
    """

    parameters: int
    batch_size: int
    about: str


MODELS = {
    "mlp": Model(10_117_642, 64, "few large matrices"),
    "transformer": Model(10_078_848, 4, "language model of 64 tokens a row; its token embedding is sparse in Keras"),
    "cnn": Model(466_906, 8, "residual network with batch normalization: many small tensors"),
    "embedding": Model(9_604_810, 64, "one large embedding, of which a batch touches little: sparse gradients"),
    "emulated": Model(10_000_000, 4, "an accelerator: gradients appear layer by layer in 100 ms without a processor"),
}


def make_batch(name: str, worker: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and labels of a worker's batch, equal in every step. Images are [B, height, width, 3]."""
    rng = np.random.default_rng(worker)
    rows = MODELS[name].batch_size
    labels = rng.integers(CLASSES, size=rows)
    if name == "mlp":
        return rng.standard_normal((rows, FEATURES), dtype=np.float32), labels
    if name == "emulated":
        return rng.standard_normal((rows, CLASSES), dtype=np.float32), labels
    if name == "cnn":
        return rng.standard_normal((rows, IMAGE, IMAGE, 3), dtype=np.float32), labels
    if name == "embedding":
        return rng.integers(ITEMS, size=(rows, ITEMS_PER_ROW)), labels
    tokens = rng.integers(VOCABULARY, size=(rows, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def keras_model(name: str, keras: types.ModuleType) -> Any:
    """A model that returns logits, made with the module `keras` or `tf_keras`."""
    make = {
        "mlp": _keras_mlp,
        "transformer": _keras_transformer,
        "cnn": _keras_cnn,
        "embedding": _keras_embedding,
        "emulated": _keras_emulated,
    }
    return make[name](keras)


def _keras_mlp(keras):
    hidden = [keras.layers.Dense(size, activation="relu") for size in HIDDEN]
    return keras.Sequential([keras.layers.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])


def _keras_embedding(keras):
    layers = keras.layers
    embedding = layers.Embedding(ITEMS, ITEM_WIDTH)
    inputs = layers.Input((ITEMS_PER_ROW,), dtype="int64")
    hidden = layers.Dense(ITEM_WIDTH, activation="relu")(layers.GlobalAveragePooling1D()(embedding(inputs)))
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden))


def _keras_cnn(keras):
    layers = keras.layers

    def conv(x, width, size=3, strides=1):
        return layers.Conv2D(width, size, strides=strides, padding="same", use_bias=False)(x)

    def normalized(x):
        return layers.BatchNormalization()(x)

    inputs = layers.Input((IMAGE, IMAGE, 3))
    x = layers.ReLU()(normalized(conv(inputs, CNN_WIDTHS[0])))
    for width in CNN_WIDTHS:
        for _ in range(CNN_BLOCKS):
            strides = 1 if width == x.shape[-1] else 2
            shortcut = x if strides == 1 else normalized(conv(x, width, 1, strides))
            x = layers.ReLU()(normalized(conv(x, width, strides=strides)))
            x = layers.ReLU()(layers.Add()([normalized(conv(x, width)), shortcut]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def _keras_transformer(keras):
    layers = keras.layers

    class Positions(layers.Layer):
        """Adds a learned vector to each position."""

        def build(self, input_shape):
            self.table = self.add_weight(shape=(1, LENGTH, WIDTH), initializer="zeros", name="table")

        def call(self, x):
            return x + self.table

    inputs = layers.Input((LENGTH,), dtype="int64")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH)(inputs))
    for _ in range(LAYERS):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = layers.Add()([x, attention(normal, normal, use_causal_mask=True)])
        hidden = layers.Dense(4 * WIDTH, activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(hidden)])
    return keras.Model(inputs, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


class _Accelerator:
    """The times at which an accelerator has computed the gradients of the layers of a model, the last layer first.

    A real accelerator has the work of all layers in its queue. So a late processor does not make it later either.
    See `set_dilation`.
    """

    dilation = 1.0

    def __init__(self):
        self._begun = 0.0

    def finish(self, layer: int) -> None:
        """Sleeps until the gradient of a layer is there. The last layer begins the backward pass."""
        if layer == EMULATED_LAYERS - 1:
            self._begun = time.monotonic()
        end = self._begun + self.dilation * EMULATED_SECONDS * (EMULATED_LAYERS - layer) / EMULATED_LAYERS
        time.sleep(max(0.0, end - time.monotonic()))


def set_dilation(factor: float) -> None:
    """Makes emulated accelerators of this process need `factor` times `EMULATED_SECONDS` for a step."""
    _Accelerator.dilation = factor


def _keras_emulated(keras):
    import tensorflow as tf

    accelerator = _Accelerator()

    def passed_on(layer):
        def finish(upstream):
            accelerator.finish(layer)
            return upstream

        @tf.custom_gradient
        def function(x, weight):
            def backward(upstream):
                done = tf.numpy_function(finish, [upstream], upstream.dtype)  # Stateful, else TensorFlow would drop it.
                with tf.control_dependencies([done]):
                    return tf.ensure_shape(done, upstream.shape), tf.identity(weight)

            return tf.identity(x), backward

        return function

    class Emulated(keras.layers.Layer):
        """Returns its input. The backward pass waits for the accelerator, and returns the weight as its gradient."""

        def __init__(self, layer):
            super().__init__()
            self._passed_on = passed_on(layer)

        def build(self, input_shape):
            self.weight = self.add_weight(shape=(EMULATED_WIDTH, EMULATED_WIDTH), name="weight")

        def call(self, x):
            return self._passed_on(x, tf.convert_to_tensor(self.weight))

    return keras.Sequential([keras.layers.Input((CLASSES,)), *map(Emulated, range(EMULATED_LAYERS))])


def torch_model(name: str) -> Any:
    """The same model as a `torch.nn.Module`; images are [B, 3, height, width]."""
    make = {
        "mlp": _torch_mlp,
        "transformer": _torch_transformer,
        "cnn": _torch_cnn,
        "embedding": _torch_embedding,
        "emulated": _torch_emulated,
    }
    return make[name]()


def _torch_mlp():
    from torch import nn

    sizes = zip((FEATURES, *HIDDEN), HIDDEN, strict=False)
    layers = [layer for inputs, size in sizes for layer in (nn.Linear(inputs, size), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], CLASSES))


def _torch_embedding():
    from torch import nn

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    embedding = nn.Embedding(ITEMS, ITEM_WIDTH, sparse=True)
    hidden = [nn.Linear(ITEM_WIDTH, ITEM_WIDTH), nn.ReLU()]
    return nn.Sequential(embedding, Mean(), *hidden, nn.Linear(ITEM_WIDTH, CLASSES))


def _torch_cnn():
    from torch import nn

    def normalized(inputs, width, size=3, stride=1):
        conv = nn.Conv2d(inputs, width, size, stride=stride, padding=size // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(width))

    class Block(nn.Module):
        def __init__(self, inputs, width):
            super().__init__()
            stride = 1 if inputs == width else 2
            self.shortcut = nn.Identity() if inputs == width else normalized(inputs, width, 1, stride)
            self.body = nn.Sequential(normalized(inputs, width, 3, stride), nn.ReLU(), normalized(width, width))

        def forward(self, x):
            return nn.functional.relu(self.body(x) + self.shortcut(x))

    widths = [width for width in CNN_WIDTHS for _ in range(CNN_BLOCKS)]
    blocks = [Block(*sizes) for sizes in zip((CNN_WIDTHS[0], *widths), widths, strict=False)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(normalized(3, CNN_WIDTHS[0]), nn.ReLU(), *blocks, *pool, nn.Linear(CNN_WIDTHS[-1], CLASSES))


def _torch_transformer():
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.positions = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

        def forward(self, tokens):
            x = self.tokens(tokens) + self.positions
            return self.head(self.body(x, mask=self.mask, is_causal=True))

    return Transformer()


def _torch_emulated():
    import torch

    accelerator = _Accelerator()

    class PassedOn(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight, layer):
            context.save_for_backward(weight)
            context.layer = layer
            return x.clone()

        @staticmethod
        def backward(context, upstream):
            accelerator.finish(context.layer)
            return upstream, context.saved_tensors[0].detach(), None

    class Emulated(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self._layer = layer
            self.weight = torch.nn.Parameter(torch.randn(EMULATED_WIDTH, EMULATED_WIDTH) / EMULATED_WIDTH)

        def forward(self, x):
            return PassedOn.apply(x, self.weight, self._layer)

    class First(torch.nn.Module):
        def forward(self, x):
            return x.requires_grad_()  # Else autograd would not call the backward pass of the first layer in order.

    return torch.nn.Sequential(First(), *map(Emulated, range(EMULATED_LAYERS)))
