"""Functions that the tests of libraries on top of Keras run in worker processes."""

import keras
import numpy as np
from keras import layers

from keras_features import Place, outcome, start_anew, strategy_of

ROWS, BATCH = 36, 8  # The last batch is short.


def _trained(place, make, x, y):
    with place.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return outcome(model, history, predicted=model.predict(x, batch_size=BATCH, verbose=0))


def keras_hub_classifier(placement, folder):
    """A classifier of texts on a small BERT, which splits texts into words before each step."""
    del folder
    import keras_hub

    words = [f"word{i}" for i in range(20)]
    hub = keras_hub.models

    def make():
        tokenizer = hub.BertTokenizer(vocabulary=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
        backbone = hub.BertBackbone(
            vocabulary_size=25,
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
            max_sequence_length=8,
            dropout=0,
        )
        preprocessor = hub.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
        return hub.BertTextClassifier(backbone=backbone, num_classes=3, preprocessor=preprocessor, dropout=0)

    start_anew()
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 20, (ROWS, 7))
    texts = [" ".join(words[i] for i in row[: rng.integers(2, 7)]) for row in numbers]
    return _trained(Place(strategy_of(placement), "", placement), make, np.array(texts), numbers[:, 0] % 3)


def image_backbone(placement, folder):
    """A classifier of images like those of KerasCV: augmentation, depthwise convolutions and BatchNormalization.

    Each augmentation has a range of one value, so that all replicas and one device change the images alike.
    """
    del folder

    def block(x, filters, strides):
        shortcut = layers.Conv2D(filters, 1, strides=strides, use_bias=False)(x)
        x = layers.DepthwiseConv2D(3, strides=strides, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(synchronized=True)(x)
        x = layers.ReLU(6.0)(x)
        x = layers.Conv2D(filters, 1, use_bias=False)(x)
        x = layers.BatchNormalization(synchronized=True)(x)
        return layers.Add()([shortcut, x])

    def make():
        images = layers.Input((12, 12, 3))
        x = layers.RandomRotation((0.25, 0.25))(images)
        x = layers.RandomZoom((0.1, 0.1))(x)
        x = layers.Rescaling(1 / 255)(x)
        x = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
        x = block(x, 6, 2)
        return keras.Model(images, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)), name="small_mobilenet")

    start_anew()
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 255, (ROWS, 12, 12, 3)).astype("float32")
    return _trained(Place(strategy_of(placement), "", placement), make, x, rng.integers(0, 3, ROWS))


def keras_tuner_search(placement, folder):
    """Searches the width of a layer. Each worker runs the whole search; the chief alone writes weights."""
    import keras_tuner

    start_anew()
    strategy = strategy_of(placement)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 6)).astype("float32"), rng.integers(0, 3, ROWS)

    def build(choices):
        keras.utils.set_random_seed(1)
        width = choices.Choice("width", [2, 8])
        model = keras.Sequential([layers.Input((6,)), layers.Dense(width, activation="tanh"), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
        return model

    tuner = keras_tuner.GridSearch(
        *(build, "loss"),
        distribution_strategy=strategy,
        directory=folder,
        project_name="search",
    )
    tuner.search(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    trials = tuner.oracle.get_best_trials(2)
    scores = {f"width {trial.hyperparameters.get('width')}": trial.score for trial in trials}
    return outcome(tuner.get_best_models()[0], best=tuner.get_best_hyperparameters()[0].get("width"), **scores)
