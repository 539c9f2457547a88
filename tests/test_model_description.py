"""Workers notice different models before the first exchange; properties that may differ between workers are ignored."""

import keras
import pytest
from keras import layers

import row_checks as checks
from conftest import QuickPool
from tfdist.faults.creation_watch import unlike
from tfdist.strategies.model_description import described_compile, described_layers


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("activation", ("activation=relu", "activation=tanh")),
        ("rate", ("rate=0.1", "rate=0.2")),
        ("optimizer", ("the optimizer Adam", "the optimizer SGD")),
        ("learning rate", ("learning_rate=0.1", "learning_rate=0.2")),
        pytest.param("momentum", ("momentum=0.1", "momentum=0.2"), marks=pytest.mark.exhaustive),
        ("loss", ("loss=mse", "loss=mae")),
        ("metrics", ("metrics", "mse")),
        ("steps per execution", ("steps_per_execution=1", "steps_per_execution=2")),
    ],
)
def test_different_models_are_named_on_all_workers_before_use(case, words, pools):
    for method in ("fit", "evaluate", "predict", "train_on_batch") if case == "activation" else ("fit",):
        for kind, message in pools("2x1").run(checks.outcome_of_model, case, method):
            assert kind == "ClusterError" and "the same model" in message, message
            assert all(word in message for word in words), message


@pytest.fixture
def own_pool():
    """A pool for one test, after which collectives of its processes may fail."""
    pool = QuickPool("2x1")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("case", "words"),
    [pytest.param("width", ("[4, 3]", "[5, 3]"), marks=pytest.mark.exhaustive), ("one layer more", ("Dense", "Batch"))],
)
def test_different_variables_are_named_on_all_workers_in_seconds(case, words, own_pool):
    for kind, message in own_pool.run(checks.outcome_of_variables, case):
        assert kind == "ClusterError" and "the same variables" in message, message
        assert all(word in message for word in words), message


def test_a_description_holds_no_counters_and_no_random_numbers():
    def described():
        model = keras.Sequential(
            [
                layers.Input((4,)),
                layers.Dense(3, kernel_initializer=keras.initializers.RandomNormal()),
                layers.Lambda(lambda x: x + 1),
                layers.Dropout(0.1),
                layers.LayerNormalization(),
            ]
        )
        model.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), "mse", ["mae"])
        return described_layers(model), described_compile(model)

    assert described() == described()


def test_a_dtype_policy_is_part_of_a_description():
    one, other = (
        described_layers(keras.Sequential([layers.Dense(1, dtype=dtype)])) for dtype in ("float32", "float16")
    )
    assert one != other


def test_settings_that_cannot_be_described_are_left_out():
    class Own(keras.layers.Layer):
        def __init__(self, given):
            super().__init__()
            self.given = given

    model = keras.Sequential([Own(object())])
    model.compile("sgd", lambda y_true, y_pred: y_pred)
    assert described_layers(model)[0] == "Own as layer 0" and described_compile(model)[0] == "the optimizer SGD"


def test_variables_are_compared_without_the_numbered_names_of_keras():
    kernel, other = "float32[4, 3], made by Dense", "float32[5, 3], made by Dense"
    assert unlike(3, {0: [kernel, f"'kernel', {kernel}"], 1: [kernel, f"'kernel', {kernel}"]}, "here") is None
    counted = {0: [kernel, f"'dense_kernel_momentum', {kernel}"], 1: [kernel, f"'dense_3_kernel_momentum', {kernel}"]}
    assert unlike(3, counted, "here") is None
    message = unlike(3, {**counted, 2: [other, f"'dense_kernel_momentum', {other}"]}, "here")
    said = (
        f"number 3 differs: worker 0 makes 'dense_kernel_momentum', {kernel}, "
        f"worker 2 makes 'dense_kernel_momentum', {other}"
    )
    assert said in message
