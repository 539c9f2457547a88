"""Properties of all codecs, in all modes of execution: eager, graph and compiled."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.auto_compression import Auto
from tfdist.strategies.compression import (
    NAMES,
    BFloat16,
    Codec,
    Float16,
    Int4,
    Int8,
    PowerSGD,
    Sign,
    TopK,
    WordCodec,
    from_name,
)
from tfdist.strategies.compression.power_sgd import as_matrix
from tfdist.strategies.compression_policy import policy_of
from tfdist.strategies.compression_state import sum_of


@dataclasses.dataclass(frozen=True)
class Row:
    """A codec, its compression ratio relative to float32, and its error relative to the largest value of a block."""

    codec: WordCodec
    saves: float
    error: float
    keeps_zeros: bool = True


TABLE = {
    "float16": Row(Float16(error_feedback=True), 1.98, 2**-11),
    "float16 small blocks": Row(Float16(block_size=8, error_feedback=True), 1.6, 2**-11),
    "bfloat16": Row(BFloat16(error_feedback=True), 2, 2**-8),
    "int8": Row(Int8(), 3.85, 0.5 / 127),
    "int8 small blocks": Row(Int8(block_size=4), 2, 0.5 / 127),
    "int8 odd blocks": Row(Int8(block_size=100), 3.8, 0.5 / 127),
    "int4": Row(Int4(), 7.3, 0.5 / 7),
    "int4 small blocks": Row(Int4(block_size=8), 4, 0.5 / 7),
    "sign": Row(Sign(), 25, 1, keeps_zeros=False),
    "sign small blocks": Row(Sign(block_size=32), 16, 1, keeps_zeros=False),
    "sign odd blocks": Row(Sign(block_size=96), 24, 1, keeps_zeros=False),
    "topk": Row(TopK(), 75, 1),
    "topk of two": Row(TopK(0.5), 1, 1),
    "topk of three": Row(TopK(0.3), 2, 1),
    "topk of 256": Row(TopK(1 / 256), 200, 1),
    "topk of 257": Row(TopK(1 / 257), 150, 1),
    "topk with momentum": Row(TopK(0.01, momentum=0.9), 75, 1),
}
MODES = {
    "eager": lambda fn: fn,
    "graph": lambda fn: tf.function(fn, autograph=False),
    "compiled": lambda fn: tf.function(fn, autograph=False, jit_compile=True),
}
BLOCKS = [1, 4]  # The positions of `TopK` fill a part of a word, or one word.
# Small tensors, for thousands of steps.
LIGHT = [*(name for name in TABLE if name.endswith("small blocks")), "bfloat16", "topk", "topk with momentum"]
FINITE = ["zeros", "ordinary", "again", "sparse", "one block", "huge", "tiny", "tiniest"]
BAD = {"inf": np.inf, "minus inf": -np.inf, "nan": np.nan, "minus nan": -np.nan}
POWERS = {"huge": 2.0**99, "tiny": 2.0**-40, "tiniest": 2.0**-98}  # 6e29, 9e-13, 3e-30


# Codecs of the same class as another row. XLA takes a second for each shape.
VARIANTS = [name for name in TABLE if " " in name and name != "topk with momentum"]


def marked(is_exhaustive):
    """Returns the marks of a case, which is left out by default if `is_exhaustive`."""
    return pytest.mark.exhaustive if is_exhaustive else ()


@pytest.fixture(params=TABLE)
def row(request):
    return TABLE[request.param]


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def make_cases(elements: int, granule: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(elements)
    ordinary = rng.standard_normal(elements).astype(np.float32)
    cases = {name: ordinary.copy() for name in [*FINITE, *BAD]}
    cases["zeros"][:] = 0
    cases["sparse"][rng.random(elements) < 0.9] = 0
    cases["one block"][granule:] = 0
    for name, power in POWERS.items():
        cases[name] *= np.float32(power)
    for name, bad in BAD.items():
        cases[name][rng.integers(elements)] = bad
    return cases


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Inputs and results of a codec, by case."""

    values: dict[str, np.ndarray]
    words: np.ndarray
    decoded: dict[str, np.ndarray]
    states: list[dict[str, np.ndarray]]


@functools.cache
def run(codec: WordCodec, mode: str, elements: int) -> Outcome:
    """Runs a codec on one tensor with all cases as rows."""
    cases = make_cases(elements, codec.granule)
    values = tf.constant(np.stack(list(cases.values())))

    def round_trip(values, *state):
        words, new_state = codec.compress(values, state)
        return words, codec.decode(words, elements), codec.decode(codec.encode(values), elements), *new_state

    words, decoded, encoded_alone, *states = MODES[mode](round_trip)(values, *[tf.zeros_like(values)] * codec.states)
    np.testing.assert_array_equal(decoded.numpy(), encoded_alone.numpy())
    assert words.dtype == tf.int32
    by_case = [dict(zip(cases, tensor.numpy(), strict=True)) for tensor in (decoded, *states)]
    return Outcome(cases, words.numpy(), by_case[0], by_case[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "blocks"),
    [
        pytest.param(
            *(name, mode, blocks),
            marks=marked((mode != "eager" and blocks == 1) or (mode == "compiled" and name in VARIANTS)),
        )
        for name in TABLE
        for mode in MODES
        for blocks in BLOCKS
    ],
)
def test_conformance(name, mode, blocks):
    row = TABLE[name]
    codec, elements = row.codec, row.codec.granule * blocks
    outcome = run(codec, mode, elements)
    assert outcome.words.shape == (len(outcome.values), codec.words(elements))
    assert len(outcome.states) == codec.states
    for name in FINITE:
        values, decoded, residual = outcome.values[name], outcome.decoded[name], outcome.states[-1][name]
        absmax = np.abs(values).reshape(blocks, -1).max(axis=1, keepdims=True)
        # The residual holds the whole error of encoding.
        error = np.abs((decoded + residual).astype(np.float64) - values).reshape(blocks, -1)
        assert np.all(error <= 2e-7 * absmax), name
        lost = np.abs(decoded - values).reshape(blocks, -1)
        assert np.all(lost <= row.error * 1.001 * absmax), name
        # A block of zeros is sent as zeros; so is every zero if the codec can represent 0.
        zeros = np.broadcast_to(absmax == 0, lost.shape).ravel()
        if row.keeps_zeros:
            zeros = values == 0
        assert not np.any(decoded[zeros]), name
    for name in BAD:
        assert not np.all(np.isfinite(outcome.decoded[name])), name
    # Rows do not influence each other.
    np.testing.assert_array_equal(outcome.decoded["ordinary"], outcome.decoded["again"])
    for name, power in POWERS.items():
        np.testing.assert_array_equal(outcome.decoded[name], outcome.decoded["ordinary"] * np.float32(power), name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name in VARIANTS)) for name in TABLE])
def test_all_modes_agree(name):
    row = TABLE[name]
    outcomes = [run(row.codec, mode, row.codec.granule * BLOCKS[-1]) for mode in MODES]
    for name in FINITE:
        for other in outcomes[1:]:
            np.testing.assert_allclose(other.decoded[name], outcomes[0].decoded[name], rtol=1e-6)


def test_compression_ratio(row):
    elements = row.codec.granule * 1000
    assert elements / row.codec.words(elements) >= row.saves


def test_without_error_feedback_there_is_no_state(row):
    options = {"momentum": 0.0} if isinstance(row.codec, TopK) else {}
    codec = dataclasses.replace(row.codec, error_feedback=False, **options)
    values = tf.random.stateless_normal([2, codec.granule * 2], [1, 2])
    words, state = codec.compress(values, ())
    assert codec.states == 0 and state == ()
    np.testing.assert_array_equal(words, codec.encode(values))


@pytest.mark.parametrize("codec", [Float16(), BFloat16(), Int8(), Int4(), TopK()], ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    ("mode", "largest"),
    [
        pytest.param(mode, largest, marks=marked(mode == "compiled" and largest < np.finfo(np.float32).max))
        for mode in MODES
        for largest in (np.float32(3.38e38), np.finfo(np.float32).max)
    ],
)
def test_the_largest_numbers_stay_finite(codec, mode, largest):
    values = tf.constant(np.resize([largest, -largest, 0.0], codec.granule)[np.newaxis].astype(np.float32))
    decoded = MODES[mode](lambda values: codec.decode(codec.encode(values), codec.granule))(values).numpy()
    assert np.all(np.isfinite(decoded))
    assert np.abs(decoded).max() == pytest.approx(largest, rel=2**-8)


BOUNDED = [name for name in TABLE if name.split()[0] in ("float16", "int8", "int4", "sign")]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("name", BOUNDED)
def test_no_decoded_value_exceeds_the_bound(name, scale):
    codec = TABLE[name].codec
    elements = 4 * codec.granule
    values = tf.constant(scale * np.random.default_rng(0).normal(size=(3, elements)), tf.float32)
    words = codec.encode(values)
    bound = codec.bound(words, elements)

    decoded = tf.reshape(tf.abs(codec.decode(words, elements)), [*bound.shape, -1])
    assert np.all(np.isfinite(bound)) and np.all(decoded <= (1 + 1e-6) * bound[..., tf.newaxis])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", BOUNDED)
def test_the_bound_shows_values_that_are_not_finite(name, bad):
    codec = TABLE[name].codec
    elements = 4 * codec.granule
    values = np.ones((2, elements), np.float32)
    values[1, 3] = bad
    bound = codec.bound(codec.encode(tf.constant(values)), elements)

    assert not np.all(np.isfinite(bound))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marked(name.startswith(("float16", "int4")))) for name in LIGHT]
)
def test_residuals_do_not_drift(name):
    codec, steps = TABLE[name].codec, 1000
    shape = [1, codec.granule * max(2, 256 // codec.granule)]

    @tf.function(jit_compile=True)
    def train():
        state = (tf.zeros(shape),) * codec.states
        given, sent, norms = tf.zeros(shape), tf.zeros(shape), tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            gradient = tf.random.stateless_normal(shape, [0, step])
            words, state = codec.compress(gradient, state)
            given, sent = given + gradient, sent + codec.decode(words, shape[1])
            norms = norms.write(step, tf.norm(state[-1]))
        return given, sent, state[-1], norms.stack()

    given, sent, residual, norms = (tensor.numpy() for tensor in train())
    early, late = norms[steps // 2 : steps * 3 // 4], norms[steps * 3 // 4 :]
    assert late.mean() < 1.1 * early.mean() and late.max() < 1.25 * early.max()
    if name != "topk with momentum":  # Momentum sends each gradient more than once.
        np.testing.assert_allclose(sent + residual, given, atol=0.05)


@pytest.mark.parametrize(
    ("mode", "ratio"),
    [
        pytest.param(mode, ratio, marks=marked(mode == "compiled" and ratio in (0.5, 0.01)))
        for mode in MODES
        for ratio in (0.5, 0.3, 0.01, 1 / 300)
    ],
)
def test_top_k_sends_the_first_of_the_largest(mode, ratio):
    codec = TopK(ratio)
    # Few distinct magnitudes, so that most blocks have ties.
    values = np.random.default_rng(0).integers(-3, 4, [2, codec.granule * 50]).astype(np.float32)
    words, (residual,) = MODES[mode](codec.compress)(tf.constant(values), (tf.zeros(values.shape),))
    blocks = values.reshape(-1, codec.granule)
    places = np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)
    expected = np.zeros_like(blocks)
    expected[places] = blocks[places]
    np.testing.assert_array_equal(codec.decode(words, values.shape[1]), expected.reshape(values.shape))
    np.testing.assert_array_equal(residual, (blocks - expected).reshape(values.shape))


def test_top_k_with_momentum_is_deep_gradient_compression(mode):
    codec, rng = TopK(0.1, momentum=0.5), np.random.default_rng(0)
    shape = [2, codec.granule * 4]
    compress = MODES[mode](codec.compress)
    state = (tf.zeros(shape),) * 2
    u, v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for _ in range(20):
        gradient = rng.standard_normal(shape).astype(np.float32)
        words, state = compress(tf.constant(gradient), state)
        u = np.float32(0.5) * u + gradient
        v = v + u
        sent = np.abs(v).reshape(-1, codec.granule)
        sent = (sent == sent.max(axis=1, keepdims=True)).reshape(shape)
        np.testing.assert_allclose(codec.decode(words, shape[1]), np.where(sent, v, 0), rtol=1e-5)
        u[sent] = v[sent] = 0
        np.testing.assert_allclose(state[0], u, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state[1], v, rtol=1e-4, atol=1e-6)


def test_top_k_clears_sent_values_that_are_not_finite(mode):
    codec = TopK(0.5)
    values = tf.constant([[1.0, np.inf, np.nan, 2.0]])
    words, (residual,) = MODES[mode](codec.compress)(values, (tf.zeros([1, 4]),))
    np.testing.assert_array_equal(codec.decode(words, 4), [[0, np.inf, np.nan, 0]])
    np.testing.assert_array_equal(residual, [[1, 0, 0, 2]])


# PowerSGD.


def low_rank(rows, columns, rank, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal([rows, rank]) @ rng.standard_normal([rank, columns])
    return tf.constant(matrix * scale, tf.float32)


@functools.cache
def power_step(codec, mode):
    @MODES[mode]
    def step(matrix, q):
        p = codec.orthonormalise(codec.project(matrix, q))
        q = codec.back_project(matrix, p)
        return p, q, codec.decode(p, q)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e30])
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_power_sgd_is_exact_up_to_its_rank(mode, scale, rank):
    codec = PowerSGD(4)
    matrix = low_rank(60, 40, rank, scale, seed=rank)
    step, q = power_step(codec, mode), codec.start(40, 0)
    for _ in range(3):  # Each step starts from the last Q, which is as large as the gradient.
        p, q, decoded = step(matrix, q)
        assert p.shape == (60, 4) and q.shape == (40, 4)
        np.testing.assert_allclose(decoded / scale, matrix / scale, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((5, 7), (5, 7)),
        ((384, 6, 64), (384, 384)),
        ((6, 64, 384), (384, 384)),
        ((3, 3, 64, 128), (576, 128)),
        ((4, 4, 4), (16, 4)),
    ],
)
def test_power_sgd_takes_the_matrix_with_the_smallest_factors(shape, matrix):
    assert as_matrix(shape) == matrix


def test_power_sgd_orthonormalises_several_matrices_at_once(mode):
    matrices = [low_rank(50, 5, 5, seed=seed) for seed in range(3)]
    orthonormalise = MODES[mode](PowerSGD(5).orthonormalise)

    for apart, together in zip(map(orthonormalise, matrices), orthonormalise(tf.stack(matrices)), strict=True):
        np.testing.assert_allclose(together, apart, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=marked(mode == "compiled")) for mode in MODES])
def test_power_sgd_orthonormalises(mode):
    orthonormalise = MODES[mode](PowerSGD(5).orthonormalise)
    for seed, rank in itertools.product(range(10), [1, 2, 5]):
        columns = orthonormalise(low_rank(50, 5, rank, seed=seed)).numpy().astype(np.float64)
        gram = columns.T @ columns
        lengths = np.diag(gram)
        assert np.all((np.abs(lengths - 1) < 1e-5) | (lengths == 0)) and np.sum(lengths > 0) >= rank
        np.testing.assert_allclose(gram, np.diag(lengths), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=marked(mode == "compiled")) for mode in MODES])
def test_power_sgd_improves_from_step_to_step(mode):
    codec = PowerSGD(2)
    matrix = tf.constant(np.random.default_rng(0).standard_normal([50, 30]) @ np.diag(0.8 ** np.arange(30)), tf.float32)
    step, q = power_step(codec, mode), codec.start(30, 0)
    errors = []
    for _ in range(20):
        _, q, decoded = step(matrix, q)
        errors.append(np.linalg.norm(decoded - matrix))
    best = np.linalg.norm(np.linalg.svd(matrix.numpy(), compute_uv=False)[2:])
    assert errors[-1] == pytest.approx(best, rel=1e-3) and errors[0] > 1.02 * best


def test_power_sgd_goes_on_after_a_gradient_of_zeros(mode):
    codec = PowerSGD(4)
    step = power_step(codec, mode)
    p, q, decoded = step(tf.zeros([60, 40]), codec.start(40, 0))
    assert not np.any(p) and not np.any(q) and not np.any(decoded)
    matrix = low_rank(60, 40, 4)
    np.testing.assert_allclose(step(matrix, q)[2], matrix, atol=1e-4)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_power_sgd_shows_values_that_are_not_finite(mode, bad):
    codec = PowerSGD(4)
    matrix = low_rank(60, 40, 4).numpy()
    matrix[11, 7] = bad
    decoded = power_step(codec, mode)(tf.constant(matrix), codec.start(40, 0))[2]
    assert not np.all(np.isfinite(decoded))


@pytest.mark.slow
def test_power_sgd_sums_the_largest_numbers_of_several_replicas(mode):
    codec, rng = PowerSGD(2), np.random.default_rng(0)
    signs = [np.sign(rng.standard_normal([size, 1])) for size in (200, 300)]
    matrix = tf.constant(signs[0] @ signs[1].T * 8e37, tf.float32)  # lengths of columns exceed float32

    @MODES[mode]
    def sum_of_four():
        p = codec.orthonormalise(tf.add_n([codec.project(matrix, codec.start(300, 0))] * 4))
        q = codec.back_project(matrix, p)
        return codec.decode(p, tf.add_n([q] * 4)), codec.rest(matrix, p, q)

    total, rest = sum_of_four()
    np.testing.assert_allclose(total, 4 * matrix, rtol=1e-5)
    assert np.all(np.abs(rest) < 1e-5 * 8e37)


@pytest.mark.slow
# XLA ignores numeric checks.
@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.exhaustive)])
def test_a_gradient_of_zeros_divides_by_nothing(mode):
    words = [row.codec for row in TABLE.values()]
    sizes = [[2, codec.granule * 2] for codec in words]
    inputs = [tf.zeros(size) for size in sizes]
    low_rank, q = PowerSGD(2), tf.zeros([6, 2])
    tf.debugging.enable_check_numerics()
    try:
        for codec, values in zip(words, inputs, strict=True):
            MODES[mode](codec.compress)(values, (values,) * codec.states)
        power_step.__wrapped__(low_rank, mode)(tf.zeros([8, 6]), q)
    finally:
        tf.debugging.disable_check_numerics()


# Codecs without a strategy.

ALONE = {**{name: row.codec for name, row in TABLE.items()}, "powersgd": PowerSGD(2), "float16 alone": Float16()}
SIZES = {
    "1": lambda block: 1,
    "3": lambda block: 3,
    "block - 1": lambda block: block - 1,
    "block": lambda block: block,
    "block + 1": lambda block: block + 1,
    "many": lambda block: 1_000_000,
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=marked(name in VARIANTS and size in ("3", "block", "many")))
        for name in ALONE
        for size in SIZES
    ],
)
def test_round_trip_of_any_size(name, size):
    codec = ALONE[name]
    elements = SIZES[size](getattr(codec, "granule", 64))
    values = np.random.default_rng(elements).standard_normal(elements).astype(np.float32)
    values[::3] = 0
    shaped = values.reshape([1, elements, 1] if elements % 2 else [2, elements // 2])

    received, rest = codec.round_trip(tf.constant(shaped))
    assert received.shape == rest.shape == shaped.shape and received.dtype == rest.dtype == tf.float32
    np.testing.assert_allclose(received + rest, shaped, atol=2e-6 * np.abs(values).max())
    zeros = codec.round_trip(tf.zeros(shaped.shape))
    assert not np.any(zeros)
    if getattr(codec, "keeps_zeros", False):
        assert not np.any(received.numpy()[shaped == 0])


def test_round_trip_supports_all_types_of_gradients():
    for dtype in (tf.float16, tf.bfloat16):
        received, _ = Int8().round_trip(tf.ones([3, 5], dtype))
        np.testing.assert_allclose(received, np.ones([3, 5]), rtol=1e-6)
    assert Int8().round_trip(tf.zeros([0, 5]))[0].shape == (0, 5)


BLOCK = np.ones([1, 256], np.float32)
MISUSES = [
    (lambda: Int8().encode(tf.ones([256])), "a multiple of 256, got float32 [256]"),
    (lambda: Int8().encode(tf.ones([1, 255])), "got float32 [1, 255]"),
    (lambda: Int4().compress(tf.ones([1, 256], tf.float64), (BLOCK,)), "got float64 [1, 256]"),
    (lambda: Sign().encode(tf.ones([1, 1024], tf.complex64)), "got complex64"),
    (lambda: TopK().encode(tf.ones([2, 2, 100])), "got float32 [2, 2, 100]"),
    (lambda: BFloat16().encode(tf.ones([1, 2], tf.float16)), "got float16 [1, 2]"),
    (lambda: Int8().compress(BLOCK, ()), "keeps 1 state tensors"),
    (lambda: Int8().decode(tf.ones([1, 65], tf.int32), 255), "for 255 elements"),
    (lambda: Float16().decode(tf.ones([1, 7], tf.int32), 4096), "got int32 [1, 7]"),
    (lambda: PowerSGD().project(tf.ones([9]), tf.ones([9, 4])), "[rows, columns], got float32 [9]"),
    (lambda: PowerSGD().round_trip(tf.ones([9])), "at least two axes"),
    (lambda: Int8().round_trip(tf.ones([9], tf.float64)), "float16, bfloat16, float32"),
]


@pytest.mark.parametrize(("misuse", "words"), MISUSES, ids=[words for _, words in MISUSES])
def test_unsupported_values_raise(misuse, words):
    with pytest.raises(ValueError) as refusal:
        misuse()
    assert words in str(refusal.value)


class Rounded(WordCodec):
    """A user-defined codec with one word per value."""

    granule = 3

    def words(self, elements):
        return elements

    def encode(self, values):
        return tf.cast(tf.round(values), tf.int32)

    def decode(self, words, elements):
        return tf.cast(words, tf.float32)


def test_a_user_defined_codec_needs_four_members():
    codec = Rounded()
    received, rest = codec.round_trip(tf.constant([0.25, 2.75, -1.5, 4.0]))
    np.testing.assert_array_equal(received, [0, 3, -2, 4])
    np.testing.assert_array_equal(rest, [0.25, -0.25, 0.5, 0])
    assert from_name(codec) is codec and codec.for_rows().states == 0
    assert codec.name == "rounded" and codec in Auto(["int8", codec]).allow


def test_power_sgd_starts_equal_on_workers_and_different_for_matrices(mode):
    codec = PowerSGD(4)
    first = codec.start(40, 3).numpy()
    np.testing.assert_array_equal(MODES[mode](lambda: codec.start(40, 3))(), first)
    assert np.any(codec.start(40, 4).numpy() != first)
    assert np.any(PowerSGD(4, seed=1).start(40, 3).numpy() != first)
    assert np.linalg.matrix_rank(first) == 4


@pytest.mark.slow
def test_power_sgd_residuals_of_two_workers_do_not_drift():
    codec, shape, steps = PowerSGD(2), [24, 16], 600

    @tf.function(jit_compile=True)
    def train():
        residuals, q = tf.zeros([2, *shape]), codec.start(shape[1], 0)
        norms = tf.TensorArray(tf.float32, steps)
        for step in tf.range(steps):
            matrices = tf.unstack(tf.random.stateless_normal([2, *shape], [0, step]) + residuals)
            p = codec.orthonormalise(tf.add_n([codec.project(matrix, q) for matrix in matrices]))
            own = [codec.back_project(matrix, p) for matrix in matrices]
            q = tf.add_n(own) / 2
            residuals = tf.stack([matrix - codec.decode(p, part) for matrix, part in zip(matrices, own, strict=True)])
            norms = norms.write(step, tf.norm(residuals))
        return norms.stack()

    norms = train().numpy()
    assert norms[450:].mean() < 1.1 * norms[150:300].mean()


def test_power_sgd_knows_when_it_saves():
    codec = PowerSGD(4)
    assert codec.saves(5120, 5120) and codec.saves(17, 1000)
    assert not codec.saves(8, 1_000_000) and not codec.saves(16, 16)


# Options and names.


@pytest.mark.parametrize("name", NAMES)
def test_codec_names_are_resolved(name):
    codec = from_name(name)
    assert isinstance(codec, NAMES[name]) and codec.name == name
    assert from_name(codec) is codec and from_name(None) is None
    assert codec.min_elements * 4 == 64 * 1024 and codec.start_step == 0
    assert codec.error_feedback == (name not in ("float16", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "codec"), [("powersgd(16)", PowerSGD(16)), ("topk(0.001)", TopK(0.001)), ("topk(.5)", TopK(0.5))]
)
def test_codec_names_with_a_number_are_resolved(name, codec):
    assert from_name(name) == codec


@pytest.mark.parametrize(
    ("compression", "words"),
    [
        (Int8, "Int8()"),
        (Codec(), "WordCodec"),
        ("powersgd(0)", "`rank` of PowerSGD"),
        ("int8(4)", "'powersgd(4)'"),
        ("topk(1e-3)", "powersgd also with a number"),
        (lambda shape: None, "(shape, dtype, path)"),
        (lambda shape, dtype, path, more: None, "(shape, dtype, path)"),
    ],
)
def test_a_wrong_compression_argument_raises_with_a_remedy(compression, words):
    with pytest.raises((ValueError, TypeError)) as refusal:
        policy_of(compression)
    assert words in str(refusal.value)


def test_policies_with_optional_arguments():
    for policy in (lambda *gradient: None, lambda shape, dtype, path="": None, functools.partial(max, key=str)):
        assert policy_of(policy) is policy


def test_states_of_different_runs_raise():
    one = {"a/0": np.ones(2), "b/0": np.ones(3)}
    np.testing.assert_array_equal(sum_of([one, one])["b/0"], [2, 2, 2])
    with pytest.raises(ValueError, match="at least"):
        sum_of([])
    for states in ([one, {"a/0": np.ones(2)}], [{"a/0": np.ones(2)}, one]):
        with pytest.raises(ValueError, match="lacks b/0"):
            sum_of(states)


@pytest.mark.parametrize("wrong", ["int9", "", 8, Int8, True])
def test_an_unknown_name_raises_with_all_known_names(wrong):
    with pytest.raises(ValueError) as refusal:
        from_name(wrong)
    assert all(repr(name) in str(refusal.value) for name in NAMES) and repr(wrong) in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_rows_travel_without_state(name):
    codec = NAMES[name](min_elements=3, start_step=7).for_rows()
    assert isinstance(codec, WordCodec) and codec.states == 0 and codec.two_shot
    assert (codec.min_elements, codec.start_step) == (3, 7)
    assert isinstance(codec, Float16 if name in ("sign", "topk", "powersgd") else NAMES[name])


WRONG = [
    *((codec, "min_elements", value, "of at least 0") for codec in NAMES.values() for value in (-1, 1.0, "many", True)),
    *((codec, "start_step", value, "of at least 0") for codec in NAMES.values() for value in (-1, None)),
    *((codec, "error_feedback", value, "True or False") for codec in NAMES.values() for value in (1, "yes", None)),
    *((Float16, "block_size", value, "a multiple of 8 of at least 8") for value in (0, -8, 4, 12, 8.0)),
    *((Int8, "block_size", value, "a multiple of 4 of at least 4") for value in (0, -4, 6, "256")),
    *((Int4, "block_size", value, "a multiple of 8 of at least 8") for value in (0, -8, 4, None)),
    *((Sign, "block_size", value, "a multiple of 32 of at least 32") for value in (0, -32, 16, 48)),
    *((TopK, "ratio", value, "from 1/65536 to 0.5") for value in (0, 0.0, -0.1, 0.51, 1e-6, float("nan"), "1%", True)),
    *((TopK, "momentum", value, "at least 0 and less than 1") for value in (-0.1, 1, float("nan"), None)),
    *((PowerSGD, "rank", value, "of at least 1") for value in (0, -1, 2.0, True)),
    *((PowerSGD, "seed", value, "from 0 to") for value in (-1, 2**31, 0.5)),
]


@pytest.mark.parametrize(("codec", "option", "value", "allowed"), WRONG)
def test_a_wrong_option_raises_with_the_allowed_values(codec, option, value, allowed):
    with pytest.raises(ValueError) as refusal:
        codec(**{option: value})
    for words in (f"`{option}` of {codec.__name__}", allowed, f"got {value!r}"):
        assert words in str(refusal.value)


def test_momentum_needs_error_feedback():
    with pytest.raises(ValueError, match="error feedback"):
        TopK(momentum=0.9, error_feedback=False)


def test_options_are_frozen_and_compared_by_value():
    assert Int8() == Int8(block_size=256) != Int8(block_size=512)
    assert issubclass(PowerSGD, Codec) and not issubclass(PowerSGD, WordCodec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Int8().block_size = 8
