"""A step takes a fixed number of exchanges, so that no version of Keras or TensorFlow makes training slower unnoticed.

Each exchange takes a round trip between all workers. A number that grows here is a slow-down, although all results stay
right: most often Keras has begun to ask all workers for something in each step, or tfdist no longer knows Keras' call.
"""

import pytest

import exchange_checks as checks
from exchange_checks import STEPS_PER_EXECUTION

SEVERAL = {"steps_per_execution": STEPS_PER_EXECUTION}


# A step exchanges numbers of rows, two buckets of gradients, and its logs, statistics and report together. All workers
# know the rows of a BalancedSharding beforehand, if each call runs one step. The sums of the metrics follow an epoch.
@pytest.mark.parametrize(
    ("data", "options", "of_a_step", "between_epochs"),
    [
        pytest.param("arrays", {}, 4, 8, id="fit"),
        pytest.param(*("pipeline", {}, 4, 9), marks=pytest.mark.exhaustive, id="fit on a pipeline of unknown length"),
        pytest.param("balanced", {}, 3, 8, id="BalancedSharding"),
        pytest.param("arrays", SEVERAL, 4, 8, id="steps_per_execution"),
        pytest.param(
            *("balanced", SEVERAL, 4, 8),
            marks=pytest.mark.exhaustive,
            id="BalancedSharding and steps_per_execution",
        ),
        pytest.param("arrays", {"codec": "int8"}, 5, 8, id="int8"),
    ],
)
def test_fit_takes_no_more_exchanges(data, options, of_a_step, between_epochs, pools):
    of_a_call = of_a_step * options.get("steps_per_execution", 1)
    for counts in pools("2x1").run(checks.of_fit, "2x1", data, **options):
        assert counts == {"first": [of_a_call], "later": [of_a_call], "between": [between_epochs]}


def test_evaluate_and_predict_take_no_more_exchanges(pools):
    for evaluated, predicted in pools("2x1").run(checks.of_evaluate_and_predict, "2x1"):
        assert (evaluated["first"], evaluated["later"]) == ([6], [2])
        assert (predicted["first"], predicted["later"]) == ([5], [5])


def test_a_custom_loop_takes_no_more_exchanges(pools):
    for counts in pools("2x1").run(checks.of_custom_loop, "2x1"):
        assert counts == {"first": [3], "later": [3], "between": [1]}
