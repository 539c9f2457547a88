"""Code blocks of several sections run as they are, on workers that live for all of them.

A block of kind `diff` shows the changes of a script. Its new version runs: the lines that are not removed.
"""

import contextlib
import io
import pathlib
import runpy

import pytest

from code_blocks import BLOCKS, ROOT, code
from tfdist.cluster import ClusterSpec
from tfdist.errors import TFConfigError

SECTIONS = ("docs/get_started/", "docs/migrate/", "docs/concepts/")
CHANGED = ("from_tf_distribute", "from_horovod", "from_ray_train")
HOW_TO = ("auto", "tfrecord", "custom_step", "custom_loop", "export", "callbacks", "bottleneck")
SCRIPTS = [
    block
    for block in BLOCKS
    if (
        block.kind == "run"
        and block.place.startswith(SECTIONS)
        and (block.language == "python" or block.name in CHANGED)
        and block.name != "main"
    )
    or block.name in HOW_TO
]
# Other blocks and tests run the same code of tfdist by default. `bottleneck` takes a minute on a slow machine.
ALIKE = ("for_users_of_ddp", "from_ray_train", "custom_loop_that_clips", "bottleneck")


def run_script(text, folder, environ=(), alone=False):
    """Runs a script in a folder, from a file, since `tf.function` reads sources. Returns what it prints.

    Later scripts of the process find the environment and the policy of Keras as they were. If `alone`, the script finds
    no TF_CONFIG. With it, a strategy of several workers would have to be the first in the process.
    """
    import os

    import keras
    import tensorflow as tf

    tf.random.set_seed(None)  # As in a new process. Otherwise workers go on with states that an earlier script left.
    before, policy, printed = dict(os.environ), keras.mixed_precision.dtype_policy(), io.StringIO()
    os.environ.update(environ)
    if alone:
        os.environ.pop("TF_CONFIG", None)
    os.chdir(folder)
    path = pathlib.Path(f"worker-{os.environ.get('TFDIST_SLOT', '')}-{os.getpid()}.py").absolute()
    path.write_text(text)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue()


def new_version(diff):
    return "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-"))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.name, marks=[pytest.mark.exhaustive] if block.name in ALIKE else [])
        for block in SCRIPTS
    ],
)
def test_a_block_runs(block, pools, tmp_path):
    text = new_version(block.code) if block.language == "diff" else block.code

    pool = pools("1x2" if block.workers == 1 else "2x1")
    pool.run(run_script, text, str(tmp_path), alone=block.workers == 1)


def test_the_first_run_is_that_of_the_readme():
    (command,) = [block.code for block in BLOCKS if block.kind == "command" and block.said == "run"]
    assert " && ".join(code("first_run").splitlines()) == command.strip()


def test_the_error_of_parameter_servers_is_as_shown():
    cluster = (
        '{"cluster": {"ps": ["10.0.0.9:2222"], "worker": ["10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}'
    )

    with pytest.raises(TFConfigError) as raised:
        ClusterSpec.from_json(cluster)

    assert f"tfdist.errors.TFConfigError: {raised.value}" == " ".join(code("parameter_servers_error").split())


def test_each_page_of_a_section_has_an_entry_in_its_index():
    for section in SECTIONS:
        index = (ROOT / section / "index.md").read_text()
        pages = {path.name for path in (ROOT / section).glob("*.md")} - {"index.md"}
        assert {page for page in pages if f"]({page})" not in index} == set()
