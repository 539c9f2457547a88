"""A version of TensorFlow or Keras without a private name that tfdist uses is refused before it trains."""

import ast
import configparser
import importlib.util
import inspect
import pathlib
import re
import sys
import types

import pytest
from absl import logging

from tfdist._compat import library_versions, private_names
from tfdist.errors import VersionError

ROOT = pathlib.Path(__file__).resolve().parents[1]
OF_PYTHON = {"_asdict", "_exit", "_fields", "_replace", "_run_module_as_main", "_getframe", "_current_frames"}


def resolved(owner, path):
    for names in path:
        owner = next(getattr(owner, name) for name in names if hasattr(owner, name))
    return owner


def functions_of(kind):
    """Returns the Python functions of a class and of its parents."""
    members = [member for each in kind.__mro__ for member in vars(each).values()]
    members = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members]
    functions = [inspect.unwrap(member) if callable(member) else member for member in members]
    return {id(each): each for each in functions if isinstance(each, types.FunctionType)}.values()


def renamed(names, *gone):
    return tuple("renamed" if isinstance(each, str) and each in gone else each for each in names)


KINDS_OF_NAMES = ("co_varnames", "co_cellvars", "co_freevars", "co_names", "co_consts")


def without(code, *gone):
    """Returns code that uses other names; "inner.name" is renamed in the code of the function `inner` only."""
    own = {each for each in gone if "." not in each}
    changed = {kind: renamed(getattr(code, kind), *own) for kind in KINDS_OF_NAMES}
    of_inner = {}
    for inner, _, name in (each.partition(".") for each in set(gone) - own):
        of_inner.setdefault(inner, []).append(name)
    changed["co_consts"] = tuple(
        without(each, *of_inner[each.co_name]) if getattr(each, "co_name", None) in of_inner else each
        for each in changed["co_consts"]
    )
    return code.replace(**changed)


def remove(name, monkeypatch):
    """Removes a private name from the libraries, with all of its alternatives."""
    module = importlib.import_module(name.module)
    if name.variables:
        function = inspect.unwrap(resolved(module, name.path))
        monkeypatch.setattr(function, "__code__", without(function.__code__, *name.variables))
        return
    owner = resolved(module, name.path[:-1])
    for last in name.path[-1]:
        if inspect.ismodule(owner):
            monkeypatch.delattr(owner, last, raising=False)
            monkeypatch.setitem(sys.modules, f"{name.module}.{last}", None)
            continue
        for each in owner.__mro__:
            if last in vars(each):
                monkeypatch.delattr(each, last)
        for function in functions_of(owner):
            code = function.__code__
            monkeypatch.setattr(function, "__code__", code.replace(co_names=renamed(code.co_names, last)))


@pytest.mark.parametrize("name", private_names.PRIVATE_NAMES, ids=str)
def test_a_version_without_a_private_name_is_refused(name, monkeypatch):
    if name.is_optional and importlib.util.find_spec(name.module) is None:
        pytest.skip(f"this version of {name.library} has no such feature")
    private_names.check_private_names()
    with monkeypatch.context() as patched:
        remove(name, patched)
        with pytest.raises(VersionError) as raised:
            private_names.check_private_names()
    private_names.check_private_names()

    message = str(raised.value)
    told = next(each for each in private_names.PRIVATE_NAMES if f"`{each}`" in message)
    assert (told.path[-1], told.variables) == (name.path[-1], name.variables)  # A class shares names with its parents.
    version = sys.modules[told.library].__version__
    assert [word for word in (told.feature, version, "pip install", "a newer tfdist") if word not in message] == []


def test_a_keras_whose_train_function_is_in_another_module_is_refused(monkeypatch):
    """tfdist knows Keras' calls by their module. In another one they would look like calls of a user."""
    name = next(each for each in private_names.PRIVATE_NAMES if "function.self" in each.variables)
    owner = resolved(importlib.import_module(name.module), name.path[:-1])
    own = inspect.unwrap(owner._make_function)
    elsewhere = types.FunctionType(own.__code__, {**own.__globals__, "__name__": "keras.src.elsewhere"})
    monkeypatch.setattr(owner, "_make_function", elsewhere)
    with pytest.raises(VersionError, match=r"_make_function\(one_step_on_data.self\)"):
        private_names.check_private_names()


def test_a_library_that_fails_to_load_raises_its_own_error(monkeypatch, tmp_path):
    """Its names are not missing, and another version would not help."""
    (tmp_path / "broken_library.py").write_text("import a_missing_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    names = [private_names._parsed(f"{place}:any", "a feature") for place in ("broken_library", "no_library.at_all")]
    with pytest.raises(ModuleNotFoundError, match="a_missing_dependency"):
        names[0].is_present()
    assert not names[1].is_present()


def sources(folder):
    return {path: ast.parse(path.read_text()) for path in (ROOT / folder).rglob("*.py")}


def is_private(name):
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def defined_in(modules):
    """Returns the names that these modules define themselves, without attributes that they set on other objects."""
    nodes = [node for module in modules for node in ast.walk(module)]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    names |= {node.attr for node in own if getattr(node.value, "id", None) in ("self", "cls")}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def used_by(modules):
    """Returns the private names that these modules use as attributes, or as strings for `getattr` and the like."""
    nodes = [node for module in modules for node in ast.walk(module)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return set(filter(is_private, names))


# Attributes that a backup leaves out if callbacks have them; an attribute of graphs, which TensorFlow reads in C++.
HARMLESS = {"_is_tracing", "_writers", "_noinline"}
OF_TFDIST = {"_slowdown"}  # set on an object of tfdist from outside
LISTED = {part for name in private_names.PRIVATE_NAMES for names in name.path for part in names}


def test_the_list_has_all_private_attributes_that_tfdist_uses():
    modules = [module for folder in ("tfdist", "strategies", "data") for module in sources(folder).values()]
    assert used_by(modules) - defined_in(modules) - LISTED - OF_PYTHON - OF_TFDIST - HARMLESS == set()


def test_the_list_has_all_private_attributes_of_the_compatibility_modules():
    modules = sources("tfdist/_compat").values()
    assert used_by(modules) - defined_in(modules) - LISTED - OF_PYTHON - HARMLESS == set()


def test_the_list_has_all_private_modules_and_imports():
    places = {(name.module, part) for name in private_names.PRIVATE_NAMES for part in name.path[0]}
    modules = {name.module for name in private_names.PRIVATE_NAMES}
    imports = {
        (node.module, alias.name)
        for module in sources("tfdist/_compat").values()
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and re.match(r"tensorflow\.(python|compiler|core)|keras\.src", node.module)
        for alias in node.names
    }
    assert {each for each in imports if each not in places and ".".join(each) not in modules} == set()


def test_the_list_has_all_variables_that_are_read_from_frames():
    module = ast.parse((ROOT / "tfdist/_compat/keras_stack.py").read_text())
    read = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Subscript) and is_of_frame(node.value) and isinstance(node.slice, ast.Constant):
            read.add(node.slice.value)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "get" and is_of_frame(node.func.value):
            read |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()

    assert len(read) > 5
    assert read - {each for name in private_names.PRIVATE_NAMES for each in name.variables} == set()


def is_of_frame(node):
    return getattr(node, "attr", None) == "f_locals" or getattr(node, "id", None) == "given"


@pytest.fixture
def warned(monkeypatch):
    """Returns the warnings of the package."""
    messages = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: messages.append(text % values))
    return messages


@pytest.mark.parametrize(
    ("library", "version", "warns"),
    [
        *[("keras", f"3.{minor}.1", False) for minor in (12, 13, 14, 15)],
        *[("keras", version, True) for version in ("3.11.3", "3.17.0", "4.0.0")],
        ("keras", "3.16.0.dev2026102704", False),
        *[("tensorflow", version, False) for version in ("2.20.0", "2.21.1")],
        *[("tensorflow", version, True) for version in ("2.19.1", "2.22.0-rc1")],
    ],
)
def test_an_untested_version_gets_one_warning(library, version, warns, warned, monkeypatch):
    install(monkeypatch, {library: version})
    library_versions.refuse_failing_versions()
    library_versions.warn_of_untested_versions()

    assert len(warned) == warns
    assert [word for text in warned for word in (f"{library} {version}", "pip install") if word not in text] == []


@pytest.mark.parametrize(("library", "version"), [("keras", "3.6.0"), ("keras", "2.15.0"), ("tensorflow", "2.15.1")])
def test_a_version_that_is_known_to_fail_is_refused(library, version, monkeypatch):
    install(monkeypatch, {library: version})
    with pytest.raises(VersionError, match=rf"{library} [\d.]+ or newer, but {version} is installed\. .*pip install"):
        library_versions.refuse_failing_versions()


def install(monkeypatch, versions):
    """Makes the package see other versions of the libraries."""
    versions = {"keras": "3.15.1", "tensorflow": "2.21.0"} | versions
    monkeypatch.setattr(library_versions, "installed_version", versions.__getitem__)


def test_pip_allows_the_tested_versions_only():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = config["options"]["install_requires"].split()
    told = re.findall(r"'([a-z]+[^']*)'", library_versions.remedy())
    assert len(told) == 2 and set(told) <= set(required)


def test_the_matrix_has_the_tested_versions():
    """It runs without the packages of tfdist, so it has the bounds once more."""
    values = {
        node.targets[0].id: node.value
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    pythons, tensorflows, keras = (ast.literal_eval(values[name]) for name in ("PYTHONS", "TENSORFLOWS", "KERAS"))
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")

    for library, versions in (("tensorflow", tensorflows), ("keras", list(keras))):
        minors = [tuple(map(int, version.split()[0].split("."))) for version in versions]
        tested = library_versions._TESTED[library]
        assert minors == [(tested.first[0], minor) for minor in range(tested.first[1], tested.last[1] + 1)]
    named = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert list(pythons) == named
    assert config["options"]["python_requires"] == f">={named[0]}"
