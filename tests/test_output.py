"""The terminal shows a worker's output without the lines of libraries, for input in pieces of any size.

A command whose output nobody reads any more ends without an error.
"""

import os
import random
import re
import subprocess
import sys

import pytest

from launched import DEADLINE_SECONDS
from tfdist.launch.closed_pipe import run_while_read
from tfdist.launch.first_failure import last_lines
from tfdist.launch.line_splitter import LineSplitter
from tfdist.launch.terminal_filter import TerminalFilter, is_library_line

# An example for each pattern of the filter, and more.
OF_LIBRARIES = [
    "E0000 00:00:1795638386.023032    7025 cuda_platform.cc:52] failed call to cuInit: UNKNOWN ERROR (303)",
    "2026-11-25 20:26:27.022455: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is",
    "\t [[{{node MultiDeviceIteratorGetNextFromShard}}]]",
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate",
    "/job:worker/replica:0/task:1",
    "The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption, eviction)",
    "The error could be from a previous operation. Restart your program to reset.",
    "\t [[{{node cond/CollectiveReduceV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']",
    "Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling",
    ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"failed to connect to all addresses"}',
    "INFO:tensorflow:Using MirroredStrategy with devices ('/job:worker/task:0/device:CPU:0',)",
    "I1125 20:26:27.022455 139651931122560 collective_all_reduce_strategy.py:603] Enabled multi-worker collective",
    "I1125 20:26:32.067678 139651931122560 dataset_info.py:711] Load dataset info from /root/tensorflow_datasets/d",
    "/lib/keras/src/trainers/epoch_iterator.py:74: UserWarning: `shuffle=True` was passed, but will be ignored",
    "  self.data_adapter = data_adapters.get_data_adapter(",
    "ERROR:absl:worker 1 at 127.0.0.1:61882 is gone: its process ended. See its log for the reason.",
    "I0000 00:00:1795638386.883499    8822 coordination_service.h:529] /job:worker/replica:0/task:1 has connected",
    "W0000 00:00:1795638626.048188   16903 queue_base.cc:286] 1908: Skipping cancelled dequeue",
    "E0000 00:00:1795638626.047282   16924 base_collective_executor.cc:252] BaseCollectiveExecutor::StartAbort",
    "2026-11-25 20:26:27.022455: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:467] Unable",
    "I1125 20:26:32.084901 139651931122560 reader.py:262] Creating a tf.data.Dataset reading 1 files",
    "I1125 20:26:27.282360 139651931122560 mirrored_strategy.py:423] Using MirroredStrategy",
]
# Lines that scripts, Python, absl and tfdist print on standard error.
OF_USERS = [
    "epoch 1: loss 0.5",
    "",
    "   indented",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{FULL BLOCK}",
    "I1125 20:26:32.084901 139651931122560 train.py:33] epoch 1",
    "I1125 20:26:32.084901 139651931122560 reader.py:33] read 3 files",
    "W1125 20:26:32.084901 139651931122560 mirrored_strategy.py:33] a warning",
    "2026-11-25 20:26:27,022 INFO train: epoch 1",
    "2026-11-25 20:26:27.022455: epoch 1",
    "INFO:root:epoch 1",
    "INFO:tensorflow_datasets.mine:epoch 1",
    "WARNING:tensorflow:5 out of the last 5 calls to <function> triggered tf.function retracing.",
    "WARNING:absl:Restored backup/step-8: continues with epoch 2.",
    "ERROR:absl:All workers must make the same variables in the same order",
    "F0000 00:00:1795638386.023032    7025 tensor.cc:52] Check failed: dtype() == expected_dtype (3 vs. 1)",
    "train.py:3: UserWarning: the learning rate is high",
    "  warnings.warn('the learning rate is high')",
    "/lib/keras/src/trainers/epoch_iterator.py:99: UserWarning: Your input ran out of data; interrupting training.",
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in load',
    "ValueError: caught and printed by the script",
    "Thread 0x00007f (most recent call first):",
    '  File "train.py", line 3 in load',
    "Timeout (0:00:10)!",
    "/job:worker/replica:0/task:1 is mine",
    "see E0000 in the table",
]


def shown(pieces, **arguments):
    """Returns the output of a filter for these pieces. None stands for a pause in the output."""
    screen = TerminalFilter(**arguments)
    return b"".join(screen.flush() if piece is None else screen.feed(piece) for piece in pieces) + screen.end()


def cut(data, random_numbers):
    """Returns the same bytes in short pieces, with pauses in between."""
    places = sorted(random_numbers.sample(range(len(data)), 40))
    pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    return [each for piece in pieces for each in ([piece, None] if random_numbers.random() < 0.2 else [piece])]


@pytest.mark.parametrize("line", OF_LIBRARIES)
def test_a_library_line_is_only_in_the_log(line):
    assert is_library_line(line)
    assert shown([f"before\n{line}\nafter\n".encode()]) == b"before\nafter\n"


@pytest.mark.parametrize("line", OF_USERS)
def test_every_other_line_is_on_the_terminal(line):
    assert not is_library_line(line)
    for end in ("\n", "\r", ""):
        assert shown([(line + end).encode()]) == (line + end).encode()


@pytest.mark.parametrize("seed", range(20))
def test_output_may_arrive_in_any_pieces(seed):
    numbers = random.Random(seed)
    mixed = [(line, True) for line in OF_USERS] + [(line, False) for line in OF_LIBRARIES]
    numbers.shuffle(mixed)
    data = "".join(line + "\n" for line, _ in mixed).encode()
    expected = "".join(line + "\n" for line, is_user in mixed if is_user).encode()
    pieces = [piece for piece in cut(data, numbers) if piece is not None]
    assert shown(pieces) == expected


@pytest.mark.parametrize("seed", range(5))
def test_pauses_lose_only_library_lines(seed):
    data = "".join(line + end for line in OF_USERS for end in "\n\r").encode()
    assert shown(cut(data, random.Random(seed))) == data


def test_an_unfinished_line_is_shown_after_a_pause_unless_it_is_a_library_line():
    screen = TerminalFilter()
    assert screen.feed(b"\r 10 %|#") == b"\r" and screen.has_rest
    assert screen.flush() == b" 10 %|#" and not screen.has_rest
    line = OF_LIBRARIES[2].encode()
    assert screen.feed(line) == b"" and screen.flush() == b"" and screen.has_rest
    assert screen.feed(b"\n\r 20 %|##\n") == b"\r 20 %|##\n"


def test_a_library_line_within_a_progress_bar_keeps_the_bar():
    library = OF_LIBRARIES[0].encode()
    assert shown([b"\r 50 %|##  |" + library + b"\n\r100 %|####|\n"]) == b"\r 50 %|##  |\r100 %|####|\n"


def test_a_long_line_without_end_is_shown():
    screen = TerminalFilter()
    assert screen.feed(b"x" * 200_000) == b"x" * 200_000


FAILING = {
    "exception": "def load():\n    raise ValueError('two\\n\\nlines')\nload()",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "syntax": "compile('a b', 'train.py', 'exec')",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
}


@pytest.mark.parametrize("name", FAILING)
def test_a_reported_traceback_is_only_in_the_log(name):
    hook = (
        "import sys, traceback\n"
        "def hook(*error):\n"
        "    sys.stdout.write(''.join(traceback.format_exception(*error)))\n"
        "    sys.__excepthook__(*error)\n"
        "sys.excepthook = hook\n"
    )
    done = subprocess.run([sys.executable, "-c", hook + FAILING[name]], capture_output=True, timeout=180)
    stack = done.stdout.decode()
    printed = b"before\n" + done.stderr + b"after\n\n"
    assert shown([printed], reported_stack=lambda: stack) == b"before\nafter\n\n"
    colored = re.sub(rb"(Error|line \d+)", b"\x1b[35m\\1\x1b[0m", printed)
    assert shown([colored], reported_stack=lambda: stack) == b"before\nafter\n\n"
    other = re.sub(rb"line \d+, in .*", b"line 99, in another", printed)  # as in threads that run on
    assert shown([other], reported_stack=lambda: stack) == b"before\nafter\n\n"
    assert shown([printed]) == printed  # Nothing was reported: the script has caught and printed the error.


def test_a_crash_dump_is_only_in_the_log():
    crash = "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()"
    done = subprocess.run([sys.executable, "-c", crash], stderr=subprocess.PIPE, timeout=180)
    assert done.stderr.startswith(b"Fatal Python error: Segmentation fault")
    assert shown([b"before\n", done.stderr, b"after\n\n"]) == b"before\nafter\n\n"


# Chunks of the stream, and the resulting lines.
PIECES = {
    "lines": (["a\n\nb\n", "c"], ["a", "", "b", "c"]),
    "a line in parts": (["a", "b", "c\nd"], ["abc", "d"]),
    "other ends": (["a\r\nb\r\n\r\nc\r", "\nd\n"], ["a", "b", "", "c", "d"]),
    "a bar": (["\r1 %", "\r2 %\r", "\r3 %\n"], ["3 %"]),
    "a bar without an end": (["1 %\r", "2 %\r"], ["2 %"]),
    "a bar of backspaces": (["1/2 loss 5\b\b\b\b", "\b" * 9 + "\r2/2 loss 4\n", "done\n"], ["2/2 loss 4", "done"]),
    "a spinner": (["work /\b", "-\b|\b", "\n"], ["work |"]),
    "letters of several bytes": (["\u2501\u2501\b\b", "\u2578\u2578\n"], ["\u2578\u2578"]),
    "no end at all": (["x" * 40_000] * 4, ["x" * 65_536] * 2 + ["x" * 28_928]),
}


@pytest.mark.parametrize("name", PIECES)
def test_output_is_split_into_lines(name):
    chunks, expected = PIECES[name]
    lines = LineSplitter()
    found = [line for chunk in chunks for line in lines.split(chunk.encode())] + lines.rest()
    assert [line.decode() for line in found] == expected


def test_a_slow_progress_bar_is_shown_in_its_current_state():
    now = 0.0
    lines = LineSplitter(lambda: now)
    found = []
    for now in range(100):
        found += lines.split(f"{now} %\r".encode())
    assert [line.decode() for line in found + lines.rest()] == ["30 %", "60 %", "90 %", "99 %"]


def test_the_last_lines_of_a_worker_have_the_last_state_of_a_progress_bar():
    bar = "".join(f"\b\b\b\r\x1b[1m{step}/9\x1b[0m" for step in range(10))
    library = OF_LIBRARIES[0]
    output = f"before\n{library}\n{bar}{library}\n{bar}\nafter\n"
    assert last_lines(output) == ["before", "9/9", "9/9", "after"]


def without_reader(*command):
    """Runs a Python program whose standard output nobody reads. Returns its exit code and its standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return printing_to(writer, *command)
    finally:
        os.close(writer)


def printing_to(output, *command):
    """Runs a Python program with a buffered standard output. Returns its exit code and its standard error."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"stderr": subprocess.PIPE, "env": buffered, "text": True, "timeout": DEADLINE_SECONDS}
    done = subprocess.run([sys.executable, *command], stdout=output, **options)
    return done.returncode, done.stderr


def test_a_command_whose_output_nobody_reads_ends_calmly(tmp_path):
    for number in range(2000):  # More text than a buffer holds.
        (tmp_path / f"attempt-{number}").mkdir()
    assert without_reader("-m", "tfdist", "report", "--no-html", str(tmp_path)) == (1, "")
    assert without_reader("-m", "tfdist", "plan", "--help") == (0, "")


# Commands, and their exit codes.
UNREAD = {
    "a short text": ("print('text') or 3", 3),
    "a text that fills the buffer": ("[print('x' * 99) for _ in range(999)] and 3", 1),
    "a table": ("rich.console.Console().print('text') or 3", 1),
}


@pytest.mark.parametrize("name", UNREAD)
def test_output_that_nobody_reads_is_dropped(name):
    command, code = UNREAD[name]
    imports = "import sys, rich.console; from tfdist.launch.closed_pipe import run_while_read"
    assert without_reader("-c", f"{imports}; sys.exit(run_while_read(lambda: {command}))") == (code, "")


# Endings of a program, with its exit code and its standard error, if standard output is on a full disk.
ON_A_FULL_DISK = {
    "a text": ("print('text') or 3", 120, ["returned 3", "OSError: [Errno 28]"]),
    "no text": ("3", 3, ["returned 3"]),
    "closed": ("sys.stdout.close() or 3", 3, ["returned 3"]),
    "none": ("setattr(sys, 'stdout', None) or 3", 3, ["returned 3"]),
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("name", ON_A_FULL_DISK)
def test_output_that_cannot_be_written_does_not_replace_the_result(name):
    command, code, words = ON_A_FULL_DISK[name]
    imports = "import sys; from tfdist.launch.closed_pipe import run_while_read"
    ending = "print('returned', code, file=sys.stderr); sys.exit(code)"
    with open("/dev/full", "w") as full:
        ended, err = printing_to(full, "-c", f"{imports}; code = run_while_read(lambda: {command}); {ending}")
    assert ended == code and all(word in err for word in words) and "Traceback" not in err


def test_a_closed_pipe_beside_standard_output_is_an_error():
    ends = os.pipe()
    os.close(ends[0])
    try:
        with pytest.raises(BrokenPipeError):
            run_while_read(lambda: os.write(ends[1], b"x"))
    finally:
        os.close(ends[1])
