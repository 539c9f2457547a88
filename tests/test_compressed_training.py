"""Training with compression: replicas agree to the bit, nothing is lost, and only gradients are compressed."""

import functools

import keras
import numpy as np
import pytest

import compressed_checks as checks
import tfdist
from compressed_checks import CODECS, MIXTURES
from keras_features import ROWS, run_row
from tfdist import compression

INT8 = compression.Int8(min_elements=1, block_size=16)
BIASED = [name for name, codec in CODECS.items() if codec.error_feedback]


def assert_agree(workers):
    assert all(result["replicas_agree"] for result in workers), "devices of a worker differ"
    assert len({result["digest"] for result in workers}) == 1, "workers differ"
    for weight in workers[0]["weights"]:
        assert np.all(np.isfinite(weight))


# Rows that use the exchange in a special way. All other rows are marked `exhaustive`.
REPRESENTATIVE = (
    "gradients_accumulated_eagerly",
    "input_last_batch_of_one_row",
)


@pytest.mark.parametrize(
    "name", [name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.exhaustive) for name in ROWS]
)
def test_every_keras_feature_under_int8(name, pools, tmp_path):
    assert_agree(pools("2x1").run(run_row, name, "2x1", str(tmp_path), INT8))


def assert_learns(workers):
    assert workers[0]["sent_bytes"] < workers[0]["raw_bytes"]
    losses = workers[0]["history"]["loss"]
    assert min(losses) < 0.8 * losses[0]  # The last loss may be larger: the rate is so high that losses rise later.


@pytest.mark.exhaustive  # Mixtures of all codecs are tested below.
@pytest.mark.parametrize("codec", ["float16", "sign", "topk_momentum", "powersgd"])
def test_compressed_training_learns(codec, pools):
    workers = pools("1x2").run(checks.train, "1x2", codec)

    assert_agree(workers)
    assert_learns(workers)


@pytest.fixture(scope="session")
def trained(pools):
    """Returns a function: `trained(placement, mixture)` has the results of each worker after 50 steps. Trains once."""
    return functools.cache(lambda placement, mixture: pools(placement).run(checks.train, placement, mixture))


@pytest.mark.parametrize(
    ("placement", "mixture"),
    [
        ("2x1", "others"),
        *(
            pytest.param(placement, "words", marks=pytest.mark.exhaustive)
            for placement in ("1x2", "2x1", "1x3", "3x1", "2x2")
        ),
        *(
            pytest.param(placement, "others", marks=pytest.mark.exhaustive)
            for placement in ("1x2", "1x3", "2x2", "3x1")
        ),
        *(pytest.param("1x4", mixture, marks=pytest.mark.exhaustive) for mixture in MIXTURES),
    ],
)
def test_replicas_agree_after_50_steps_and_have_learnt(placement, mixture, trained):
    assert_agree(trained(placement, mixture))
    assert_learns(trained(placement, mixture))


@pytest.mark.parametrize(
    ("workers", "devices", "mixture"),
    [
        ("2x1", "1x2", "others"),
        pytest.param("2x1", "1x2", "words", marks=pytest.mark.exhaustive),
        *(pytest.param("3x1", "1x3", mixture, marks=pytest.mark.exhaustive) for mixture in MIXTURES),
    ],
)
def test_virtual_devices_give_the_results_of_workers(workers, devices, mixture, trained):
    for one, other in zip(
        trained(workers, mixture)[0]["weights"], trained(devices, mixture)[0]["weights"], strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("placement", "codec", "mode"),
    [
        ("1x2", "others", "steps_per_execution"),
        ("1x2", "int8", "accumulation"),
        # Variants of modes that are tested above.
        *(
            pytest.param("1x2", "others", mode, marks=pytest.mark.exhaustive)
            for mode in ("eager", "functions_eagerly", "mixed_bfloat16")
        ),
        *(
            pytest.param("1x2", "int8", mode, marks=pytest.mark.exhaustive)
            for mode in ("mixed_float16", "functions_eagerly")
        ),
        *(
            pytest.param("2x2", "int8", mode, marks=pytest.mark.exhaustive)
            for mode in ("accumulation", "mixed_float16")
        ),
    ],
)
def test_compression_works_in_all_modes_of_keras(placement, codec, mode, pools):
    workers = pools(placement).run(checks.train, placement, codec, mode, 2)

    assert_agree(workers)
    assert workers[0]["history"]["loss"][-1] < workers[0]["history"]["loss"][0]


@pytest.mark.parametrize(
    ("placement", "mixture"),
    [
        ("1x2", "others"),  # has all kinds of states
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("1x2", "words"), ("2x2", "late"))),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_in_all_bits(placement, mixture, pools, tmp_path):
    for unbroken, resumed in pools(placement).run(checks.unbroken_and_resumed, placement, mixture, str(tmp_path)):
        for one, other in zip(unbroken, resumed, strict=True):
            np.testing.assert_array_equal(one, other)


def test_states_can_be_redistributed_to_any_number_of_replicas(pools):
    (states,) = pools("1x3").run(checks.handed_on, "int4")

    first = states[0]
    assert first and any(np.any(array) for array in first.values())
    for later in states[1:]:
        assert later.keys() == first.keys()
        for name, array in first.items():
            np.testing.assert_allclose(later[name], array, rtol=1e-5, atol=1e-6)


def test_residuals_are_restored_to_the_right_optimizer(pools, tmp_path):
    ((through, resumed),) = pools("1x2").run(checks.residuals_of_a_later_phase, str(tmp_path))

    assert through == resumed and through[0] > 0


MORE_ROWS = (("1x2", "int8"), ("1x2", "sign"), ("2x2", "bfloat16"))


@pytest.mark.parametrize(
    ("placement", "codec"),
    [("2x1", "int4"), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_ROWS)],
)
def test_embeddings_of_replicas_agree(placement, codec, pools):
    workers = pools(placement).run(checks.sparse, placement, codec)

    assert_agree(workers)
    assert workers[0]["sent_bytes"] < 0.8 * workers[0]["raw_bytes"]
    assert workers[0]["history"]["loss"][-1] < workers[0]["history"]["loss"][0]


def gradients(replicas=3, scale=1.0):
    rng = np.random.default_rng(0)
    return [
        [rng.normal(size=shape).astype("float32") * scale for shape in ((7, 30), (5,), (40, 3))]
        for _ in range(replicas)
    ]


# Factors of the gradients in each step: zeros, gradients, a NaN, gradients.
ZEROS, NAN, STEPS = (0, 1), 3, 60
LIFE = [0.0, 0.0, 1.0, float("nan"), *[1.0] * (STEPS - 4)]


@pytest.fixture(scope="session")
def lived(pools):
    """Returns a function: `lived(placement, codec, scale)` has sums and states in each step of `LIFE`. Runs once."""

    @functools.cache
    def live(placement, codec, scale, **options):
        given = gradients({"1x3": 3, "2x2": 4}[placement], np.float32(scale))
        return pools(placement).run(checks.exchanged, placement, codec, given, LIFE, **options)

    return live


def test_the_last_elements_of_a_tensor_are_not_delayed_by_its_padding(pools):
    ones = [np.ones([33], np.float32)]  # a block of 32 and one more element
    moved, _ = pools("1x2").run(checks.exchanged, "1x2", "sign", [ones] * 2, [1.0] * 20)[0]

    np.testing.assert_allclose(np.sum([step[0][0] for step in moved], axis=0), 2 * 20, rtol=1e-3)


# Codecs that share all code with another one but for numbers: with "int8" and with "float16".
ALIKE = ("int4", "bfloat16")


def by_default(codecs):
    return [pytest.param(name, marks=pytest.mark.exhaustive) if name in ALIKE else name for name in codecs]


MORE_SCALES = (("int8", 1e-12), ("int8", 1e12), ("powersgd", 1e-12), ("powersgd", 1e12))


@pytest.mark.parametrize(
    ("codec", "scale"),
    [
        *(
            pytest.param(name, 1.0, marks=pytest.mark.exhaustive if name in ALIKE else ())
            for name in BIASED
            if name != "topk_momentum"
        ),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_SCALES),
    ],
)
def test_residuals_delay_gradients_without_loss(codec, scale, lived):
    moved, _ = lived("1x3", codec, scale)[0]
    given = [step for step in range(STEPS) if step not in (*ZEROS, NAN)]

    for position, same in enumerate(zip(*gradients(scale=np.float32(scale)), strict=True)):
        total = np.sum([moved[step][position][0] for step in given], axis=0, dtype=np.float64)
        wanted = len(given) * np.sum(same, axis=0, dtype=np.float64)
        # The residual stays bounded for any number of steps.
        assert np.linalg.norm(total - wanted) < 0.2 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("placement", "codec"),
    [
        *(pytest.param("1x3", name, marks=pytest.mark.exhaustive if name in ALIKE else ()) for name in CODECS),
        ("2x2", "int8"),
        pytest.param("2x2", "powersgd", marks=pytest.mark.exhaustive),
    ],
)
def test_a_nan_on_one_replica_reaches_all_and_leaves_residuals_as_they_were(placement, codec, lived):
    for moved, kept in lived(placement, codec, 1.0):
        for replica in range(len(moved[NAN][0])):
            assert not all(np.all(np.isfinite(copies[replica])) for copies in moved[NAN]), "a replica did not see it"
        for before, after in zip(kept[NAN - 1], kept[NAN], strict=True):
            np.testing.assert_array_equal(before, after)
        assert all(np.all(np.isfinite(copy)) for copies in moved[NAN + 1] for copy in copies), "the next is poisoned"


@pytest.mark.parametrize(
    ("placement", "codec"),
    [
        pytest.param(*case, marks=() if case == ("1x3", "int8") else pytest.mark.exhaustive)
        for case in [*(("1x3", name) for name in CODECS if name != "topk_momentum"), ("2x2", "int8"), ("2x2", "sign")]
    ],
)
def test_encoded_parts_of_sums_delay_gradients_and_keep_residuals_from_a_nan(placement, codec, lived):
    replicas = {"1x3": 3, "2x2": 4}[placement]
    given = [step for step in range(STEPS) if step not in (*ZEROS, NAN)]
    for moved, kept in lived(placement, codec, 1.0, model_sharding="optimizer"):
        for before, after in zip(kept[NAN - 1], kept[NAN], strict=True):
            np.testing.assert_array_equal(before, after)
        assert all(np.all(np.isfinite(copy)) for copies in moved[NAN + 1] for copy in copies), "the next is poisoned"
        for position, same in enumerate(zip(*gradients(replicas), strict=True)):
            total = np.sum([moved[step][position][0] for step in given], axis=0, dtype=np.float64)
            wanted = len(given) * np.sum(same, axis=0, dtype=np.float64)
            assert np.linalg.norm(total - wanted) < 0.2 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("placement", "mode"),
    [
        pytest.param(*case, marks=() if case == ("1x2", "plain") else pytest.mark.exhaustive)
        for case in [
            *(("1x2", mode) for mode in ("plain", "eager", "accumulation", "mixed_float16")),
            *(("2x1", "steps_per_execution"), ("2x1", "plain"), ("2x2", "plain")),
        ]
    ],
)
def test_sharded_state_with_encoded_gradients_trains_as_without(placement, mode, pools):
    whole = pools(placement).run(checks.train, placement, "int8", mode)
    sharded = pools(placement).run(checks.train, placement, "int8", mode, model_sharding="optimizer")
    assert len({result["digest"] for result in sharded}) == 1 and all(result["replicas_agree"] for result in sharded)
    assert sharded[0]["sent_bytes"] < sharded[0]["raw_bytes"]
    last = [result[0]["history"]["loss"][-1] for result in (whole, sharded)]
    np.testing.assert_allclose(*last, rtol=0.05)


@pytest.mark.parametrize("codec", by_default(CODECS))
def test_zeros_stay_zeros(codec, lived):
    moved, _ = lived("1x3", codec, 1.0)[0]

    for step in ZEROS:
        for copies in moved[step]:
            np.testing.assert_array_equal(copies, np.zeros_like(copies))


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
WITH_MOMENTUM = functools.partial(SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("codec", "optimizer", "kind", "warns"),
    [
        (CODECS["sign"], ADAM, "dense", "keras.optimizers.SGD, choose 'int8', or set a start_step"),
        (CODECS["sign"], ADAM, "rows", None),
        (CODECS["sign"], SGD, "dense", None),
        pytest.param(CODECS["int8"], ADAM, "dense", None, marks=pytest.mark.exhaustive),
        (CODECS["topk_momentum"], WITH_MOMENTUM, "dense", "Set one of them to 0"),
        pytest.param(CODECS["topk"], WITH_MOMENTUM, "dense", None, marks=pytest.mark.exhaustive),
        ("int8", SGD, "dense", "whose largest gradient is of shape (9, 33), float32: min_elements"),
        (CODECS["int8"], SGD, "double", "float64: only gradients of float16, bfloat16, float32 can be compressed"),
        (compression.PowerSGD(5, min_elements=1), SGD, "dense", "factors of rank 5"),
    ],
)
def test_useless_or_unsuitable_codecs_warn(codec, optimizer, kind, warns, pools):
    for messages in pools("1x2").run(checks.warnings_of, codec, optimizer, kind):
        assert any(warns in message for message in messages) if warns else not messages, messages


def test_each_fragment_without_a_compressed_gradient_is_named(pools):
    in_turn = tfdist.DiLoCo(every=2, fragments=2)
    for messages in pools("1x2").run(checks.warnings_of, "int8", SGD, "dense", in_turn):
        first, second = messages
        assert "for fragment 1 of 2 (1 weight, 1.19 kB) of DiLoCo, whose largest gradient is of shape (9, 33)" in first
        assert "for fragment 2 of 2 (1 weight, 132 B) of DiLoCo, whose largest gradient is of shape (33,)" in second
        assert all(message.endswith("give fewer `fragments`.") for message in messages)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_replicas_may_pass_the_same_object(placement, compressed, pools):
    for moved, total, replicas, of_workers, workers in pools(placement).run(checks.alike_on_all, placement, compressed):
        assert moved == pytest.approx([replicas] * len(moved)) and total == 3 * replicas
        assert of_workers == 3 * workers


def test_an_opt_out_without_effect_raises(pools):
    for said, without_strategy in pools("1x2").run(checks.opt_outs_that_would_do_nothing):
        assert len(said) == 4 and all(words.startswith("RuntimeError") for words in said)
        assert without_strategy is None


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("truths", "ValueError: Gradients must have a numeric type, so that replicas can sum them, but gradient 0"),
        ("kind", "TypeError: A `compression` function must return"),
        ("name", "ValueError: `compression` must be"),
        ("auto", "ValueError: A `compression` function must return"),
    ],
)
def test_mistakes_found_in_the_first_step_raise(mistake, words, pools):
    for said in pools("1x2").run(checks.mistakes_of_a_first_step, mistake):
        assert words in said


def test_policies_may_return_names(pools):
    assert min(pools("1x2").run(checks.sent_under_named_codecs)) > 2


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_a_policy_gets_the_paths_of_variables(placement, pools):
    for in_fit, in_a_loop, of_a_variable in pools(placement).run(checks.paths_given_to_a_policy, placement):
        assert in_fit == ["sequential/dense/bias", "sequential/dense/kernel", "sequential/words/embeddings"]
        assert in_a_loop == [
            "sequential_1/dense_1/bias",
            "sequential_1/dense_1/kernel",
            "sequential_1/words/embeddings",
        ]
        assert of_a_variable == ["weight:0"]


def test_policies_that_choose_other_codecs_on_another_worker_raise(pools):
    for said in pools("2x1").run(checks.refusal_of_unlike_choices):
        assert "worker 0 has None as the codec of trainable variable 0, worker 1 has 'int8' as the codec" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("collected", [False, True])
def test_residuals_are_restored_to_the_right_one_of_equal_models(collected, pools, tmp_path):
    for left, resumed, of_first in pools("1x2").run(
        checks.residuals_of_the_second_of_two_models, str(tmp_path), collected
    ):
        assert left.keys() == resumed.keys() == of_first.keys()
        for name, array in left.items():
            np.testing.assert_array_equal(resumed[name], array)
        assert any(np.any(left[name] != of_first[name]) for name in left)


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("topk", "powersgd"))]
)
def test_a_checkpoint_of_other_replicas_or_codecs_is_refused(codec, pools, tmp_path):
    for said in pools("1x3").run(checks.restored_on_other_replicas, codec, str(tmp_path)):
        rules = ["3 replicas"] * 3 + ["other gradients or codecs"] * 2
        for words, rule in zip(said, rules, strict=True):
            assert words.startswith("ValueError") and rule in words and "communication.redistribute" in words


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_states_are_freed_with_their_model(placement, pools):
    for (one, two, without_first), steps in pools(placement).run(checks.memory_of_two_models, placement):
        assert two == 2 * one and without_first == one
        assert steps == 30, "what was sent stays counted"


@pytest.mark.parametrize(
    ("placement", "codec", "kind"),
    [
        ("2x1", "int8", "rows"),
        pytest.param("2x1", "powersgd", "matrices", marks=pytest.mark.exhaustive),
        pytest.param("2x2", "int8", "matrices", marks=pytest.mark.exhaustive),
    ],
)
def test_waiting_for_gradients_counts_as_exchange_not_as_coding(placement, codec, kind, pools):
    results = pools(placement).run(checks.traffic_with_a_late_replica, placement, codec, kind, 0.5)
    (early, delay), *_ = results

    assert early.steps == 3
    assert early.exchange_seconds > delay / 2  # On a busy machine, the early replica is also late at times.
    for traffic, _ in results:
        assert 0 < traffic.encode_seconds < early.exchange_seconds
        assert traffic.exchange_seconds > 0


@pytest.mark.parametrize("placement", ["1x2", "2x1", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_only_gradients_are_compressed(placement, pools):
    for compressed, plain, own, opt_out_is_exact, reduction_is_exact in pools(placement).run(
        checks.what_is_compressed, placement
    ):
        assert compressed > 0
        assert (plain, own) == (0, 0), "what is not compressed does not count as compressed traffic"
        assert opt_out_is_exact
        assert reduction_is_exact


def test_gradient_lists_of_equal_shapes_keep_separate_residuals(pools):
    for moved, still in pools("1x2").run(checks.updates_of_unlike_lists, "1x2"):
        assert moved > 0 and still == 0


def test_rows_that_a_codec_would_lengthen_stay_uncompressed(pools):
    for sent, raw in pools("1x2").run(checks.bytes_of_narrow_rows, "1x2"):
        assert 0 < sent <= raw


@pytest.mark.parametrize("placement", ["1x3", pytest.param("3x1", marks=pytest.mark.exhaustive)])
def test_bytes_of_small_tensors_are_counted(pools, placement):
    others, replicas = (2, 3) if placement == "1x3" else (2, 1)  # replicas per worker
    small, large = pools(placement).run(checks.bytes_of_small_tensors, placement, [1000, 120_000])[0]
    assert small == replicas * others * 4000
    assert large == replicas * 2 * others / (others + 1) * 480_000
