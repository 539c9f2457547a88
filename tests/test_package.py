"""The package is complete, starts without TensorFlow, and has the public names that this test lists."""

import ast
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections import Counter

import pytest

from test_cluster import WRONG

DEADLINE_SECONDS = 300  # A busy machine takes a minute to import everything.
REFUSAL_SECONDS = 60  # Shorter than any wait for workers.

ROOT = pathlib.Path(__file__).parents[1]
HOUSE = {"tfdist": "tfdist", "strategies": "tfdist/strategies", "data": "tfdist/data"}  # in the tree: as installed

PUBLIC = {
    "tfdist": [
        "DiLoCo",
        "FaultTolerance",
        "LocalSGD",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "callbacks",
        "cluster",
        "compression",
        "data",
        "errors",
        "estimate_memory",
        "exit_codes",
        "layers",
        "step_losses_are",
        "testing",
    ],
    "tfdist.callbacks": [
        "AdaptiveBatch",
        "Audit",
        "BackupAndRestore",
        "Balance",
        "CSVLogger",
        "ChiefOnly",
        "ModelCheckpoint",
        "Telemetry",
        "TensorBoard",
        "Traffic",
    ],
    "tfdist.cluster": ["DEVICES_PER_WORKER_VARIABLE", "ClusterSpec", "check_bindable", "free_ports", "is_chief"],
    "tfdist.compression": [
        "Auto",
        "BFloat16",
        "Codec",
        "Float16",
        "Int4",
        "Int8",
        "PowerSGD",
        "Sign",
        "TopK",
        "WordCodec",
        "uncompressed",
    ],
    "tfdist.data": ["BalancedSharding", "Digits", "load", "sources"],
    "tfdist.errors": [
        "AuditError",
        "BackupError",
        "ClusterError",
        "CompiledCollectivesError",
        "LossReductionError",
        "LossScaleError",
        "PositionError",
        "ScopeError",
        "SourceError",
        "TFConfigError",
        "TfdistError",
        "VersionError",
        "WorkerError",
        "WorkerLostError",
        "WorkerTimeoutError",
    ],
    "tfdist.exit_codes": ["PREEMPTED", "STALLED"],
    "tfdist.layers": ["ShardedEmbedding"],
    "tfdist.strategies": [
        "DiLoCo",
        "LocalSGD",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "estimate_memory",
        "step_losses_are",
    ],
    "tfdist.testing": ["Fault", "WorkerPool", "faults", "run_workers", "virtual_devices"],
    "tfdist.testing.faults": ["Slowdown", "corrupt", "cut_network", "fill_disk", "freeze", "small_disk", "thaw"],
}

PRIVATE = ("tensorflow.python", "tensorflow.compiler", "tensorflow.core", "keras.src")
FRAMES = ("__internal__", "_getframe", "_current_frames", "currentframe", "f_locals", "walk_stack")


def run_python(code, *options, cwd, **environ):
    """Runs `code` in a new interpreter outside the tree."""
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ, **environ}
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_SECONDS)


def answer(code, *options, cwd, **environ):
    """Returns the last line that `code` prints, parsed as JSON."""
    done = run_python(code, *options, cwd=cwd, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Returns a copy of the tree, since a build leaves files in it."""
    copy = tmp_path_factory.mktemp("tree") / "tfdist"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(tree):
    """Returns a wheel, built with the installed setuptools, so that no network is needed."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tree / "dist", tree)
    (path,) = (tree / "dist").iterdir()
    return path


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def shipped(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_ships_every_module_and_nothing_beside_the_package(tree, wheel):
    expected = {
        f"{installed}/{path.relative_to(tree / folder).as_posix()}"
        for folder, installed in HOUSE.items()
        for path in (tree / folder).rglob("*.py")
    }
    assert shipped(wheel) == expected | {"tfdist/py.typed"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Imports the installed wheel. Returns its folder, the file of each module, and names of each public module.

    The names are those in `__all__`, with whether each exists and has a docstring.
    """
    folder = tmp_path_factory.mktemp("installed")
    site = folder / "site"
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", site, wheel)
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in shipped(wheel)]
    # Without `site`, Python reads no .pth file, and thus not the one of an editable install, which leads to the tree.
    path = [str(site), *(folder for folder in sys.path if folder.endswith("site-packages"))]
    found = answer(
        f"""
        import sys
        sys.path += {path}
        import importlib, json
        files = {{}}
        for name in {sorted(name for name in modules if not name.endswith("py.typed"))}:
            files[name] = importlib.import_module(name).__file__
        public = {{}}
        for name in {list(PUBLIC)}:
            module = importlib.import_module(name)
            objects = {{each: getattr(module, each, None) for each in module.__all__}}
            public[name] = {{each: bool(obj is not None and obj.__doc__) for each, obj in objects.items()}}
        print(json.dumps({{"files": files, "public": public}}))
        """,
        "-I",
        "-S",
        cwd=folder,
    )
    return site, found["files"], found["public"]


def test_every_module_of_the_wheel_imports_outside_the_tree(installed):
    site, files, _ = installed
    assert len(files) > 10
    assert {name: file for name, file in files.items() if not file.startswith(f"{site}{os.sep}")} == {}


def test_import_loads_no_large_library(tmp_path):
    code = """
        import json, sys
        import tfdist
        print(json.dumps([name for name in ("tensorflow", "keras", "numpy", "rich") if name in sys.modules]))
    """
    assert answer(code, cwd=tmp_path) == []


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["run", "--help"], ["report", "--help"]], ids=" ".join
)
def test_command_line_answers_without_loading_tensorflow(arguments, tmp_path):
    code = f"""
        import contextlib, importlib.metadata, io, json, sys
        (script,) = importlib.metadata.entry_points(group="console_scripts", name="tfdist")
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                script.load()({arguments})
        except SystemExit as ended:
            heavy = sorted({{"tensorflow", "keras", "numpy"}} & set(sys.modules))
            print(json.dumps([ended.code, printed.getvalue(), heavy]))
    """
    exit_code, printed, loaded = answer(code, cwd=tmp_path)
    assert (exit_code, loaded) == (0, [])
    assert "tfdist" in printed


@pytest.mark.parametrize(
    "module", ["tfdist.cluster", "tfdist.data", "tfdist.errors", "tfdist.launch", "tfdist.testing"]
)
def test_modules_that_start_workers_do_not_load_tensorflow(module, tmp_path):
    assert answer(f"import {module}, json, sys; print(json.dumps('tensorflow' in sys.modules))", cwd=tmp_path) is False


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_documented_and_listed(module, installed):
    _, _, found = installed
    assert sorted(found[module]) == sorted(PUBLIC[module])
    assert [name for name, documented in found[module].items() if not documented] == []


@pytest.mark.parametrize("module", ["tfdist", "tfdist.data"])
def test_an_unknown_name_is_refused_with_the_known_names(module, tmp_path):
    done = run_python(f"import {module}; {module}.ParameterServerStrategy", cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("AttributeError")
    assert [name for name in ["ParameterServerStrategy", *PUBLIC[module]] if name not in last] == []


def parse(folders):
    return {path: syntax_tree(path) for folder in folders for path in (ROOT / folder).rglob("*.py")}


@functools.cache
def syntax_tree(path):
    return ast.parse(path.read_text())


def imported(node):
    """Returns the full names that an import statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


COMPAT = ROOT / "tfdist/_compat"


def test_private_names_and_frames_are_used_only_in_compatibility_modules():
    private = set()
    for path, module in parse([*HOUSE, "examples", "benchmarks"]).items():
        for node in ast.walk(module):
            names = [name for name in imported(node) if name.startswith(PRIVATE)]
            if isinstance(node, ast.Attribute) and node.attr in FRAMES:
                names.append(node.attr)
            private |= {
                f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in names if COMPAT not in path.parents
            }
    assert private == set()


@pytest.mark.parametrize("file", sorted(path.stem for path in COMPAT.glob("[!_]*.py")))
def test_every_private_name_of_the_compatibility_modules_is_used(file):
    nodes = [node for module in parse(HOUSE).values() for node in ast.walk(module)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == file}
    here = ast.parse((COMPAT / f"{file}.py").read_text())
    lists = [node.value for node in here.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    exported = ast.literal_eval(lists[0])
    bound = {alias.asname or alias.name for node in here.body if imported(node) for alias in node.names}
    used_here = {node.id for node in ast.walk(here) if isinstance(node, ast.Name)}
    assert sorted(exported) == sorted(used), "`__all__` lists what the rest of the tree uses"
    assert bound - set(exported) <= used_here


@pytest.fixture(scope="module")
def architecture():
    return (ROOT / "docs/architecture.md").read_text()


@pytest.fixture(scope="module")
def modules():
    return {path.relative_to(ROOT).as_posix(): module for path, module in parse(HOUSE).items()}


def file_of(name, modules):
    """Returns the file of this tree that defines an imported name, or None."""
    path = name.replace(".", "/")
    for folder, installed in HOUSE.items():
        path = re.sub(f"^{installed}(?=/|$)", folder, path)
    while path:
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in modules:
                return file
        path = path.rpartition("/")[0]


def test_no_module_imports_from_a_higher_layer(architecture, modules):
    table = re.findall(r"^\| (\d) \| (.*?) \|", architecture, re.MULTILINE)
    floors = {room: int(floor) for floor, rooms in table for room in re.findall(r"`([\w./]+)`", rooms)}

    def floor_of(file):
        return floors[max((room for room in floors if file.startswith(room)), key=len)]

    imports = [
        (file, line, other)
        for file, module in modules.items()
        for node in ast.walk(module)
        for line in [getattr(node, "lineno", None)]
        for other in filter(None, (file_of(name, modules) for name in imported(node)))
    ]
    assert len(imports) > len(modules)
    assert [each for each in imports if floor_of(each[0]) < floor_of(each[2])] == []


def test_every_file_is_in_the_tree_of_the_documentation(architecture, modules):
    named, folders = set(), []
    for line in architecture.split("```")[1].strip().splitlines():
        depth, names = (len(line) - len(line.lstrip())) // 2, re.split(r"  +", line.strip())[0].split(", ")
        folders = folders[:depth]
        named |= {"".join([*folders, name]) for name in names}
        folders.append(names[0])
    told_whole = tuple(one for one in named if one.endswith("/") and sum(name.startswith(one) for name in named) == 1)

    assert {name for name in named if not (ROOT / name).exists()} == set()
    files = {file for file in modules if not file.endswith("/__init__.py") and not file.startswith(told_whole)}
    assert files - named == set()


def test_names_of_files_and_classes_occur_once(modules):
    files = [file.rpartition("/")[2] for file in modules if not file.endswith(("/__init__.py", "/__main__.py"))]
    classes = [node.name for module in modules.values() for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    public = [name for name in classes if not name.startswith("_")]

    assert [name for name, count in Counter([*files, *public]).items() if count > 1] == []


def test_wrong_tf_config_ends_the_program_before_tensorflow_is_loaded(tmp_path):
    text, words = WRONG["index out of range"]
    code = """
        import atexit, sys
        atexit.register(lambda: print("tensorflow" in sys.modules))
        import tfdist
        tfdist.MultiWorkerMirroredStrategy()
    """
    done = run_python(code, cwd=tmp_path, TF_CONFIG=text)
    assert done.stdout == "False\n"
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and error.startswith("tfdist.errors.TFConfigError: TF_CONFIG"), done.stderr
    assert [word for word in words if word not in error] == []


def test_every_wrong_tf_config_is_refused_by_the_strategy_at_once(tmp_path):
    code = f"""
        import json, os, time, tfdist
        make = tfdist.MultiWorkerMirroredStrategy  # imports TensorFlow, which is not what is timed
        refusals = {{}}
        for name, (text, _) in {WRONG}.items():
            os.environ["TF_CONFIG"] = text
            start = time.perf_counter()
            try:
                make()
            except tfdist.errors.TFConfigError as error:
                refusals[name] = str(error), time.perf_counter() - start
        print(json.dumps(refusals))
    """
    refusals = answer(code, cwd=tmp_path, TF_CONFIG="")
    assert refusals.keys() == WRONG.keys()
    unnamed = {name: text for name, (text, _) in refusals.items() if any(word not in text for word in WRONG[name][1])}
    assert unnamed == {}
    assert max(seconds for _, seconds in refusals.values()) < REFUSAL_SECONDS
