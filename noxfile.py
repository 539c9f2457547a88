"""Runs tests with every supported combination of Python, TensorFlow and Keras.

    make matrix                            # all combinations, then the table in docs/versions.md
    nox -s matrix -k py3.13                # the combinations with Python 3.13
    nox -s table                           # only the table, of the results that are there
    nox -s overlay                         # the oldest and the newest Keras, on the packages of this environment

Each combination has an environment of its own in `.nox/`, made by uv, which shares equal files between them. nox keeps
the environments for the next run. A combination without an interpreter or without packages is skipped, and the table
has the reason. uv takes interpreters from the PATH; `uv python install 3.12` adds one.
"""

import itertools
import json
import pathlib
import shutil
import sys
import textwrap
import xml.etree.ElementTree
from datetime import date

import nox
from nox.command import CommandFailed

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TENSORFLOWS = ("2.20", "2.21")
KERAS = {
    "3.12": "keras==3.12.*",  # The last one for Python 3.10.
    "3.13": "keras==3.13.*",
    "3.14": "keras==3.14.*",
    "3.15": "keras==3.15.*",
    "3.16 nightly": "keras-nightly==3.16.0.dev2026102704",
}
# The same bounds as in setup.cfg; tests/test_private_names.py compares them.
OLDEST, *_, NEWEST = KERAS

OF_USERS = ("iterators_of_a_user", "a_plain_iterator")
# The columns of the table, and their tests: those of all combinations.
TESTS = {
    "unit": ["-m", "unit"],
    "features, 2 workers": [
        f"tests/test_keras_features.py::test_two_workers_equal_one_device[{row}]"
        for row in (
            *("fit_numpy", "on_batch", "save_and_load", "dropout", "logs_other_than_metrics"),
            *("callbacks_that_decide", "input_unequal_rows_per_worker", "predict_words_and_other_types"),
        )
    ],
    "exchanges": ["tests/test_exchange_counts.py"],
    "compression": [
        "tests/test_compressed_training.py::test_every_keras_feature_under_int8[input_last_batch_of_one_row]",
        "tests/test_compressed_training.py::test_replicas_agree_after_50_steps_and_have_learnt[2x1-others]",
    ],
    "balanced sharding": [
        "tests/test_balanced.py::test_unequal_shares_equal_one_device[2x1-steps_per_execution]",
        "tests/test_balanced.py::test_unequal_shares_equal_one_device[2x1-masks]",
        "tests/test_balanced.py::test_only_training_moves_the_position[2x1]",
        "tests/test_balanced.py::test_a_wrapped_train_function_is_traced_once_for_all_numbers_of_rows",
        *(f"tests/test_balanced.py::test_a_train_function_trains_on_{each}" for each in OF_USERS),
    ],
    "backup": [
        "tests/test_backup_and_restore.py::test_killed_workers_resume_with_equal_results[two workers]",
        "tests/test_backup_and_restore.py::test_a_fit_interrupted_and_resumed_on_two_devices_equals_one_fit[balanced]",
    ],
    "custom loops": [
        "tests/test_keras_features.py::test_two_workers_equal_one_device[custom_loop_with_a_traced_step]",
        "tests/test_strategies.py::test_custom_loops_and_fit_may_alternate[1x2-2]",
    ],
}
# The tests that run on the packages of this environment, with only Keras exchanged.
OVERLAY_TESTS = [
    *(
        f"tests/test_exchange_counts.py::test_fit_takes_no_more_exchanges[{case}]"
        for case in ("fit", "BalancedSharding", "int8")
    ),
    "tests/test_balanced.py::test_a_wrapped_train_function_is_traced_once_for_all_numbers_of_rows",
    *(f"tests/test_balanced.py::test_a_train_function_trains_on_{each}" for each in OF_USERS),
    "tests/test_backup_and_restore.py::test_a_finished_fit_is_skipped_with_the_state_of_its_end[last]",
    "tests/test_keras_features.py::test_two_devices_equal_one_device[add_loss_and_regularizers]",
    "tests/test_model_sharding.py::test_sharded_state_gives_the_same_bits[1x2-adam]",
    "tests/test_memory_estimate.py::test_the_estimate_equals_the_memory_of_a_job[muon]",
    "tests/test_parameter_sharding.py::test_divided_weights_give_the_same_bits[1x2-mlp]",
    "tests/test_sharded_embedding.py::test_training_equals_one_device[1x2-adam]",
]
ON_TWO_CORES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
RESULTS = pathlib.Path(".nox/results")
PAGE, BEGIN, END = pathlib.Path("docs/versions.md"), "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"

nox.needs_version = ">=2025.5"
nox.options.sessions = ["matrix", "table"]
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False


def combinations() -> list[tuple[str, str, str]]:
    """Returns all combinations, those with the oldest and the newest versions first."""
    every = itertools.product(PYTHONS, TENSORFLOWS, KERAS)
    each = [(python, *others) for python, *others in every if python != "3.10" or others[-1] == "3.12"]
    ends = [(choice[0], choice[-1]) for choice in (PYTHONS, TENSORFLOWS, tuple(KERAS))]
    return sorted(each, key=lambda cell: min(sum(map(str.__ne__, cell, end)) for end in zip(*ends, strict=True)))


def name_of(cell: tuple[str, str, str]) -> str:
    """The name of a combination, for the command line and for files."""
    return "py{}-tf{}-keras{}".format(*cell).replace(" ", "-")


@nox.session
@nox.parametrize("python,tensorflow,keras", combinations(), ids=list(map(name_of, combinations())))
def matrix(session: nox.Session, tensorflow: str, keras: str) -> None:
    """Runs the tests of `TESTS` with one combination."""
    cell = name_of((session.python, tensorflow, keras))
    results = RESULTS / cell
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    about = {"date": date.today().isoformat(), "commit": commit(session)}
    try:
        install(session, tensorflow, keras)
    except CommandFailed:
        (results / "about.json").write_text(
            json.dumps(about | {"skipped": "skipped: its packages could not be installed"})
        )
        session.skip(f"The packages of {cell} could not be installed; the lines above have the reason.")
    (results / "about.json").write_text(json.dumps(about))
    unit, *others = TESTS.values()
    several = [test for tests in others for test in tests]
    # Both are run, also after a failure: the table has the numbers of each.
    failed = run_tests(session, results / "unit.xml", [*ON_TWO_CORES, *unit])
    if run_tests(session, results / "workers.xml", several) or failed:  # One process shares the pools of workers.
        session.error(f"Tests failed with {cell}.")


def commit(session: nox.Session) -> str:
    """The commit that is tested; with a `+` if files differ from it."""
    said = session.run("git", "describe", "--always", "--exclude=*", "--dirty=+", external=True, silent=True)
    return str(said).strip()


def install(session: nox.Session, tensorflow: str, keras: str) -> None:
    """Installs tfdist and its test dependencies with these versions into the environment of the session."""
    wanted = [f"tensorflow=={tensorflow}.*"]
    if "nightly" not in KERAS[keras]:
        session.install("-e", ".[test]", *wanted, KERAS[keras])
        return
    session.install("-e", ".[test]", *wanted)
    # It has another name, and brings the same files as the package that TensorFlow asks for.
    session.run("uv", "pip", "uninstall", "keras", silent=True)
    session.install("--no-deps", "--reinstall", KERAS[keras])


def run_tests(session: nox.Session, report: pathlib.Path, tests: list[str], python: str = "python", **env: str) -> int:
    """Runs pytest of `python`, with a report in JUnit's format. Returns 1 if it failed, else 0."""
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", **env}
    try:
        session.run(
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-m", "", *tests),
            env=environment,
            external=True,
        )
    except CommandFailed:
        return 1
    return 0


@nox.session(python=False)
@nox.parametrize("keras", [OLDEST, NEWEST], ids=["oldest", "newest"])
def overlay(session: nox.Session, keras: str) -> None:
    """Runs the tests of `OVERLAY_TESTS` on the packages of this environment, with another Keras before them."""
    results = RESULTS / f"overlay-{keras}".replace(" ", "-")
    shutil.rmtree(results, ignore_errors=True)
    folder = (results / "packages").resolve()
    try:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), KERAS[keras])
        session.run(*pip, external=True)
    except CommandFailed:
        if not reaches_package_index(session):
            session.skip(f"{KERAS[keras]} could not be installed, since pip reaches no package index.")
        session.error(f"{KERAS[keras]} could not be installed; the lines above have the reason.")
    if run_tests(session, results / "overlay.xml", OVERLAY_TESTS, sys.executable, PYTHONPATH=str(folder)):
        session.error(f"Tests failed with {KERAS[keras]}.")


def reaches_package_index(session: nox.Session) -> bool:
    """Whether pip gets an answer about Keras from the package index."""
    try:
        session.run(sys.executable, "-m", "pip", "index", "versions", "keras", silent=True, external=True)
    except CommandFailed:
        return False
    return True


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """Writes the table of all results into docs/versions.md, and prints it."""
    lines = [["Python", "TensorFlow", "Keras", *TESTS]]
    lines.append(["---"] * len(lines[0]))
    made: set[str] = set()
    missing: dict[str, list[str]] = {}
    for cell in sorted(combinations()):
        results = RESULTS / name_of(cell)
        if not (results / "about.json").exists():
            missing.setdefault(why_not_run(session, cell[0]), []).append(name_of(cell))
            continue
        about = json.loads((results / "about.json").read_text())
        made.add(f"{about['commit']} on {about['date']}")
        reason = about.get("skipped")
        lines.append([*cell, *([reason, *[""] * (len(TESTS) - 1)] if reason else counts(results))])
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    notes = [f"Tested commits: {', '.join(sorted(made))}."] if made else []
    notes += [f"{reason}: {', '.join(cells)}." for reason, cells in missing.items()]
    text = "\n\n".join([table.strip(), *(textwrap.fill(note, 120, break_on_hyphens=False) for note in notes)])
    print(text)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}")


def why_not_run(session: nox.Session, python: str) -> str:
    """The reason why a combination with this Python has no results."""
    found = session.run("uv", "python", "find", python, silent=True, external=True, success_codes=range(256))
    return "Not run yet" if str(found).strip().startswith("/") else f"No Python {python} on this machine"


def counts(results: pathlib.Path) -> list[str]:
    """The numbers of passed, failed and skipped tests of each column, as "12 passed, 1 failed"."""
    numbers = {column: dict.fromkeys(("passed", "failed", "skipped"), 0) for column in TESTS}
    for report in results.glob("*.xml"):
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            is_unit = report.stem == "unit"
            columns = [name for name in TESTS if test.startswith(tuple(TESTS[name]))]
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            # A file that fails at import is a case without a test. It may lack tests of each column.
            for column in ["unit"] if is_unit else columns or [name for name in TESTS if name != "unit"]:
                numbers[column][outcome] += 1
    return [
        ", ".join(f"{count} {outcome}" for outcome, count in each.items() if count) or "ended early"
        for each in numbers.values()
    ]
