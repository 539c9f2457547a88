"""Tests the kind of a failure and the line with its cause, taken from names and texts of exceptions."""

import errno

import keras
import pytest
import tensorflow as tf

from tfdist import errors
from tfdist.failure_kinds import (
    FailureKind,
    causes_of,
    exception_in_log,
    is_refusal,
    kind_of_exception,
    tell_kind,
    telling_line,
    told_kind,
    user_line,
)
from tfdist.launch.restart_policy import Chance, chance_of


def op_error(name, text="said by TensorFlow"):
    return getattr(tf.errors, name)(None, None, text)


def raised_from(error, cause):
    error.__cause__ = cause
    return error


PYTHON_IN_MAP = (
    "Graph execution error:\n\nDetected at node PyFunc defined at (most recent call last):\n"
    "<stack traces unavailable>\n"
    '{}\nTraceback (most recent call last):\n\n  File "train.py", line 3, in read\n    open(path)\n\n{}\n\n\n'
    "\t [[{{{{node PyFunc}}}}]]\n\t [[IteratorGetNext]] [Op:__inference_multi_step_on_iterator_991]"
)


def in_map(text):
    return PYTHON_IN_MAP.format(text, text)


UNLIKE_ROWS = "All workers must read the same rows in the same order, but worker 0 has 'No such file or directory'."
# How TensorFlow quotes an error from a custom loop, a step of `fit`, or several steps at a time.
QUOTED = [
    lambda text: (
        f"{{{{function_node __wrapped__IteratorGetNext}}}} {text}\nTraceback (most recent call last):\n\n"
        f'  File "train.py", line 3, in record\n\n{text}\n\n\n\t [[{{{{node PyFunc}}}}]] [Op:IteratorGetNext] name: '
    ),
    in_map,
    lambda text: (
        "{{function_node __wrapped__IteratorGetNext}} Error in user-defined function passed to MapDataset:4 "
        f"transformation with iterator: Iterator::Root::Prefetch::Shard::Rebatch::Map: {text} [Op:IteratorGetNext]"
    ),
    lambda text: (
        "Graph execution error:\n\n2 root error(s) found.\n  (0) CANCELLED:  Function was cancelled\n"
        f"  (1) UNKNOWN:  {text}\n0 successful operations."
    ),
]

KINDS = {
    FailureKind.CONFIGURATION: [
        errors.TFConfigError("TF_CONFIG names no cluster"),
        errors.ClusterError("A strategy of many workers must be made before TensorFlow's runtime starts"),
        errors.ScopeError(""),
        errors.CompiledCollectivesError(""),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "a.npy"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.ENAMETOOLONG, "File name too long"),
        op_error("NotFoundError", "/data/b.tfrecord; No such file or directory"),
        op_error("UnknownError", in_map("FileNotFoundError: [Errno 2] No such file or directory: 'a'")),
        op_error("PermissionDeniedError"),
        raised_from(ValueError("no data"), FileNotFoundError(errno.ENOENT, "No such file")),
        errors.BackupError("worker 1: [Errno 13] Permission denied: '/backup'"),
        *(op_error("UnknownError", quoted(f"ClusterError: {UNLIKE_ROWS}")) for quoted in QUOTED),
        *(op_error("InvalidArgumentError", quoted("LossReductionError: Sums ...")) for quoted in QUOTED),
    ],
    FailureKind.PROGRAM: [
        ImportError("no module"),
        ModuleNotFoundError("no module"),
        AttributeError("no attribute"),
        ValueError('compression="int9"'),
        KeyError("column"),
        AssertionError(),
        ZeroDivisionError(),
        SyntaxError("invalid syntax"),
        NotImplementedError(),
        RecursionError(),
        raised_from(ImportError(), KeyError()),
        raised_from(RuntimeError("in a wrapper"), TypeError()),
        op_error("UnimplementedError"),
    ],
    FailureKind.DATA: [
        op_error("InvalidArgumentError", "Received a label value of 7 which is outside the valid range of [0, 3)."),
        op_error("InvalidArgumentError", "indices[0,0] = 99 is not in [0, 10)"),
        op_error("UnknownError", in_map("KeyError: 'column'")),
        op_error("DataLossError", "corrupted record at 0"),
        errors.SourceError("record 7 is broken"),
        RuntimeError("NaN or Inf loss encountered at batch 0. Loss value: nan. Terminating training immediately."),
        FloatingPointError(),
    ],
    FailureKind.ENVIRONMENT: [
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.ENOSPC, "No space left on device"),
        ConnectionResetError(),
        TimeoutError(),
        BlockingIOError(),
        raised_from(ValueError(), OSError(errno.EIO, "Input/output error")),
        raised_from(errors.TFConfigError("port 2222 is taken"), OSError(errno.EADDRINUSE, "Address already in use")),
        errors.BackupError("worker 1: [Errno 116] Stale file handle: '/backup'"),
        op_error("UnknownError", "/data/a.tfrecord; Input/output error"),
        op_error("UnknownError", in_map("OSError: [Errno 5] Input/output error")),
        op_error("ResourceExhaustedError", "/data/a; No space left on device"),
    ],
    FailureKind.MACHINE: [
        op_error("UnavailableError"),
        op_error("AbortedError"),
        op_error("DeadlineExceededError"),
        op_error("InternalError"),
        op_error("InvalidArgumentError", "Coordination service agent is in error state"),
        errors.WorkerLostError("All workers must join within 300 s"),
        *(op_error("UnknownError", quoted("WorkerLostError: All workers must join")) for quoted in QUOTED),
    ],
    FailureKind.UNKNOWN: [
        RuntimeError("of a kind that nobody knows"),
        Exception(),
        MemoryError(),
        op_error("ResourceExhaustedError", "OOM when allocating tensor with shape[1048576,16777216]"),
        errors.BackupError("not what was written"),
        raised_from(errors.ClusterError("worker 1 has ended"), op_error("UnavailableError")),
    ],
}


@pytest.mark.parametrize(("kind", "error"), [(kind, error) for kind, all_of in KINDS.items() for error in all_of])
def test_each_exception_has_its_failure_kind(kind, error):
    assert kind_of_exception(causes_of(error)) == kind, error


def test_peers_read_the_failure_kind_from_the_message():
    words = tell_kind("worker 1 ended by KeyError: 'x'", KeyError("x"))
    assert told_kind(f"Collective ops is aborted by: {words}. More") == FailureKind.PROGRAM
    # If a worker fails because of a peer's failure, it reports the peer's kind.
    error = op_error("UnavailableError", words)
    assert told_kind(tell_kind("worker 0 ended by UnavailableError: ", error)) == FailureKind.PROGRAM
    assert told_kind("worker 1 at 10.0.0.1:2222 is gone") is None


@pytest.mark.parametrize(
    ("kind", "is_exception", "has_commit", "chance"),
    [
        (FailureKind.CONFIGURATION, True, True, Chance.NEVER),
        (FailureKind.PROGRAM, True, True, Chance.NEVER),
        (FailureKind.DATA, True, False, Chance.NEVER),
        (FailureKind.DATA, True, True, Chance.ELSEWHERE),
        (FailureKind.UNKNOWN, True, False, Chance.ELSEWHERE),
        (FailureKind.UNKNOWN, False, False, Chance.OFTEN),
        (FailureKind.ENVIRONMENT, True, False, Chance.OFTEN),
        (FailureKind.MACHINE, False, True, Chance.OFTEN),
    ],
)
def test_the_failure_kind_decides_how_often_to_restart(kind, is_exception, has_commit, chance):
    assert chance_of(kind, is_exception=is_exception, has_commit=has_commit) == chance


def small_model(layer):
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(3)])
    model.compile(loss="sparse_categorical_crossentropy")
    return model


def fit_with_wrong_labels():
    small_model(keras.layers.Dense(2)).fit(tf.ones((4, 4)), tf.fill((4,), 7), verbose=0)


def fit_with_wrong_ids():
    small_model(keras.layers.Embedding(10, 4)).fit(tf.fill((4, 4), 99), tf.zeros((4, 4)), verbose=0)


def fit_on(function):
    data = tf.data.Dataset.range(4).map(lambda row: (tf.ones(4), tf.ensure_shape(function(row), ()))).batch(2)
    small_model(keras.layers.Dense(2)).fit(data, verbose=0)


def raise_in_python(row):
    raise KeyError("column")


def fit_with_wrong_width():
    small_model(keras.layers.Dense(2)).fit(tf.ones((4, 5)), tf.zeros(4), verbose=0)


def call_wrong_layer():
    class Mine(keras.layers.Layer):
        def call(self, inputs):
            raise AttributeError("no such thing")

    keras.Sequential([keras.Input((4,)), Mine()])


TOLD = [
    (fit_with_wrong_labels, "Received a label value of 7 which is outside the valid range of [0, 3)."),
    (fit_with_wrong_ids, "indices[0,0] = 99 is not in [0, 10)"),
    (lambda: fit_on(lambda row: tf.strings.to_number("abc")), "StringToNumberOp could not correctly convert"),
    (lambda: fit_on(lambda row: tf.numpy_function(raise_in_python, [row], tf.float32)), "KeyError: 'column'"),
    (lambda: fit_on(lambda row: row.nothing), "'SymbolicTensor' object has no attribute 'nothing'"),
    (fit_with_wrong_width, "Input 0 "),
    (call_wrong_layer, "no such thing"),
]


@pytest.mark.parametrize(("fails", "line"), TOLD)
def test_the_cause_is_found_in_messages_of_keras(fails, line):
    with pytest.raises(Exception) as caught:
        fails()
    assert line in telling_line(str(caught.value))
    assert "\x1b" not in telling_line(str(caught.value))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("[Errno 2] No such file", "[Errno 2] No such file"),
        ("one\ntwo", "one"),
        ("2 root error(s) found.\n  (0) INVALID_ARGUMENT:  bad row\n\t [[{{node A}}]]", "bad row"),
        ("{{function_node __wrapped__Fill_device_}} OOM [Op:Fill] name: ", "OOM"),
        ("in user code:", "in user code:"),
    ],
)
def test_the_cause_is_found_in_other_messages(text, line):
    assert telling_line(text) == line


TRACEBACK = """\
Epoch 1/2
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in load
    open(path)
  File "{library}/pathlib.py", line 5, in open
    ~~~~^
{error}
tfdist: said while Python ends
"""


@pytest.mark.parametrize(
    ("error", "name", "kind"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a'", "FileNotFoundError", FailureKind.CONFIGURATION),
        ("ModuleNotFoundError: No module named 'mine'", "ModuleNotFoundError", FailureKind.PROGRAM),
        ("AssertionError", "AssertionError", FailureKind.PROGRAM),
        ("tfdist.errors.ClusterError: All workers must", "ClusterError", FailureKind.CONFIGURATION),
        (
            "tensorflow.python.framework.errors_impl.NotFoundError: /a; No such file or directory",
            "NotFoundError",
            FailureKind.CONFIGURATION,
        ),
        ("mine.OddError: 'x'", "OddError", FailureKind.UNKNOWN),
    ],
)
def test_an_exception_before_the_import_of_tfdist_is_found_in_the_log(error, name, kind):
    cause, stack = exception_in_log(TRACEBACK.format(error=error, library=tf.__path__[0] + "/site-packages"))
    assert cause.names[0] == name and kind_of_exception([cause]) == kind
    assert user_line(stack) == "train.py:12 in load"


def test_a_syntax_error_is_found_in_a_log_and_exceptions_of_threads_are_ignored():
    cause, _ = exception_in_log(
        '  File "/home/me/train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
    )
    assert cause.names[0] == "SyntaxError" and cause.text == "invalid syntax"
    assert (
        exception_in_log("Exception in thread Thread-1 (f):\nTraceback (most recent call last):\nValueError\n") is None
    )
    assert exception_in_log("Epoch 1/2\nAll is well\n") is None


@pytest.mark.parametrize("after", ["Epoch 1/2\n", "tfdist: All 2 workers have joined\nTimeout (0:01:00)!\n"])
def test_a_handled_exception_is_not_the_cause_of_the_exit(after):
    assert (
        exception_in_log(TRACEBACK.format(error="ImportError: no wandb", library="/lib/site-packages") + after) is None
    )


def test_a_message_of_a_peer_with_unknown_kind_is_ignored():
    assert told_kind("worker 3 ended by ValueError: x [data error]") == FailureKind.DATA
    assert told_kind("worker 3 ended by ValueError: x [timeout error]") is None


@pytest.mark.parametrize(
    ("log", "refused"),
    [
        ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --steps 3\n", True),
        ("/usr/bin/python3: No module named mine.train\n", True),
        ("python: can't open file '/a/train.py': [Errno 2] No such file or directory\n", True),
        ("error: a step failed\nand more\n", False),
        ("", False),
    ],
)
def test_a_command_line_error_is_found_in_the_log(log, refused):
    assert is_refusal(log) == refused
