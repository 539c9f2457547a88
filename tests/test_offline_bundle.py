"""`deploy/offline_bundle.py` carries wheels in pieces to a machine without a network. The wheels are made up."""

import base64
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import tfdist

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "deploy/offline_bundle.py"
DEADLINE_SECONDS = 240
spec = importlib.util.spec_from_file_location("offline_bundle", SCRIPT)
offline_bundle = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(offline_bundle)
BundleError, Manifest, Target = offline_bundle.BundleError, offline_bundle.Manifest, offline_bundle.Target
HERE = Target.running()


def write_wheel(folder, name, version="1.0", tag="py3-none-any", requires=(), extras=()):
    """Writes the wheel of a package that has one small module."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Provides-Extra: {each}" for each in extras] + [f"Requires-Dist: {each}" for each in requires]
    files = {
        f"{module}.py": f"name = {name!r}\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items())
    path = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(each, text)
    return path


def digest(text):
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture
def bundle(tmp_path):
    """Returns a bundle of two wheels in pieces of 100 bytes."""
    write_wheel(tmp_path / "wheels", "tiny-one", requires=["tiny-two"])
    write_wheel(tmp_path / "wheels", "tiny-two")
    (tmp_path / "bundle").mkdir()
    offline_bundle.pack(tmp_path / "wheels", tmp_path / "bundle", HERE, ["tiny-one"], 100)
    return tmp_path / "bundle"


def run(*arguments, script=SCRIPT, env=()):
    command = [sys.executable, str(script), *map(str, arguments)]
    environ = {**os.environ, "PIP_NO_INDEX": "1", **dict(env)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    return done.returncode, done.stdout, done.stderr


def with_target(bundle, **changes):
    manifest = Manifest.read(bundle)
    changed = dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, **changes))
    (bundle / "manifest.json").write_text(changed.to_json())


# Packing and joining.


@pytest.mark.parametrize("piece_bytes", [7, 1000, 10**6])
def test_wheels_come_back_from_pieces_of_any_size(piece_bytes, tmp_path):
    paths = [write_wheel(tmp_path / "wheels", f"tiny-{number}") for number in range(3)]
    before = {path.name: path.read_bytes() for path in paths}
    for name in ("bundle", "joined"):
        (tmp_path / name).mkdir()
    packed = offline_bundle.pack(tmp_path / "wheels", tmp_path / "bundle", HERE, ["tiny-0"], piece_bytes)
    total = sum(map(len, before.values()))
    assert len(packed.pieces) == -(-total // piece_bytes) and list((tmp_path / "wheels").iterdir()) == []
    assert all(piece.size == piece_bytes for piece in packed.pieces[:-1])
    manifest = Manifest.read(tmp_path / "bundle")
    assert manifest == packed
    offline_bundle.verify(tmp_path / "bundle", manifest)
    offline_bundle.join(tmp_path / "bundle", manifest, tmp_path / "joined")
    assert {path.name: path.read_bytes() for path in (tmp_path / "joined").iterdir()} == before


def test_only_wheels_are_packed(tmp_path):
    (tmp_path / "bundle").mkdir()
    write_wheel(tmp_path / "wheels", "tiny")
    (tmp_path / "wheels/tiny-1.0.tar.gz").touch()
    with pytest.raises(BundleError, match=r"needs wheels, got tiny-1.0.tar.gz"):
        offline_bundle.pack(tmp_path / "wheels", tmp_path / "bundle", HERE, ["tiny"], 100)


def test_a_bundle_is_written_completely_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), offline_bundle.whole_folder(tmp_path / "new") as (folder, _):
        (folder / "piece-0001").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()
    with offline_bundle.whole_folder(tmp_path / "new") as (folder, work):
        (folder / "piece-0001").touch()
        (work / "other").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "piece-0001"]


@pytest.mark.parametrize(("name", "words"), [("full", "has files in it"), ("file", "is a file")])
def test_a_second_bundle_in_one_folder_is_refused(name, words, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/piece-0001").touch()
    (tmp_path / "file").touch()
    code, out, err = run("prepare", tmp_path / name)
    assert code == 1 and out == "" and "Traceback" not in err
    assert f"but {tmp_path / name} {words}." in err


# The machine.


def test_platform_tags_cover_older_versions_of_glibc():
    target = Target.of("3.12", "manylinux_2_17_aarch64")
    assert target == Target("3.12", "aarch64", 17) == Target.of("3.12", "manylinux2014_aarch64")
    tags = target.tags()
    assert tags[:3] == ["manylinux_2_17_aarch64", "manylinux2014_aarch64", "manylinux_2_16_aarch64"]
    assert tags[-3:] == ["manylinux_2_5_aarch64", "manylinux1_aarch64", "linux_aarch64"] and len(tags) == 17
    with pytest.raises(BundleError, match="got 'win_amd64'"):
        Target.of("3.12", "win_amd64")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.1"}, f"is for Python 3.1, but this is {HERE.python}"),
        ({"machine": "vax"}, f"is for vax, but this machine is {HERE.machine}"),
        ({"glibc": 999}, f"may need glibc 2.999, but this machine has 2.{HERE.glibc}"),
    ],
)
def test_another_machine_is_refused_with_the_remedy(changes, words, bundle):
    assert HERE.refusal(HERE) is None and dataclasses.replace(HERE, glibc=5).refusal(HERE) is None
    with_target(bundle, **changes)
    code, _, err = run("install", bundle)
    wanted = f"--python {HERE.python} --platform manylinux_2_{HERE.glibc}_{HERE.machine}"
    assert code == 1 and words in err and wanted in err and "Traceback" not in err


# Faults of a bundle.


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda bundle: (bundle / "piece-0002").unlink(), ["piece-0002 is missing", "Copy the named pieces again"]),
        (lambda bundle: (bundle / "piece-0003").write_bytes(b"x" * 100), ["piece-0003 has another SHA-256"]),
        (lambda bundle: (bundle / "piece-0003").write_bytes(b"x"), ["piece-0003 has 1 bytes instead of 100"]),
        (lambda bundle: (bundle / "other").touch(), ["other not in manifest.json", "Move files"]),
        (lambda bundle: (bundle / "manifest.json").unlink(), ["a folder with manifest.json"]),
        (lambda bundle: (bundle / "manifest.json").write_text("{"), ["must be JSON", "Copy it again"]),
        (lambda bundle: (bundle / "manifest.json").write_text('{"format": 0}'), ["must have format 1"]),
        (lambda bundle: (bundle / "manifest.json").write_text('{"format": 1}'), ["missing or wrong field: 'target'"]),
    ],
)
def test_a_faulty_bundle_is_refused(fault, words, bundle):
    fault(bundle)
    code, out, err = run("install", bundle)
    assert code == 1 and out == "" and [word for word in words if word not in err] == [], err
    assert "Traceback" not in err


def test_all_faults_are_named_at_once(bundle):
    (bundle / "piece-0001").unlink()
    (bundle / "piece-0004").write_bytes(b"")
    (bundle / "a").touch()
    (bundle / "b").mkdir()
    with pytest.raises(BundleError) as raised:
        offline_bundle.verify(bundle, Manifest.read(bundle))
    assert "piece-0001 is missing; piece-0004 has 0 bytes instead of 100; a, b not in" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields["wheels"][0].update(name="../a.whl"), "one folder only, got '../a.whl'"),
        (lambda fields: fields["wheels"][0].update(size=1), "differ in their number of bytes"),
        (lambda fields: fields["wheels"][0].update(size="1"), "missing or wrong field"),
        (lambda fields: fields["pieces"][0].pop("sha256"), "missing or wrong field"),
    ],
)
def test_a_changed_manifest_is_refused(change, words, bundle):
    fields = json.loads((bundle / "manifest.json").read_text())
    change(fields)
    (bundle / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(BundleError, match=words):
        Manifest.read(bundle)


def test_a_wheel_with_another_checksum_is_refused(bundle, tmp_path):
    manifest = Manifest.read(bundle)
    wrong = dataclasses.replace(manifest.wheels[1], sha256="0" * 64)
    (tmp_path / "joined").mkdir()
    with pytest.raises(BundleError, match=r"tiny_two.*has another SHA-256"):
        offline_bundle.join(
            bundle, dataclasses.replace(manifest, wheels=(manifest.wheels[0], wrong)), tmp_path / "joined"
        )


def test_too_little_room_is_named(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(BundleError, match="Set TMPDIR to a folder with more room"):
        offline_bundle.join(bundle, Manifest.read(bundle), tmp_path)


# With pip.


@pytest.mark.slow
def test_the_copy_of_the_script_installs_the_bundle(bundle, tmp_path):
    code, out, err = run("install", bundle, "--target", tmp_path / "site", script=bundle / SCRIPT.name)
    assert code == 0 and out.endswith("Installed tiny-one\n"), err
    assert (tmp_path / "site/tiny_one.py").exists() and (tmp_path / "site/tiny_two.py").exists()


@pytest.mark.slow
def test_an_error_of_pip_ends_the_installation(bundle, tmp_path):
    manifest = Manifest.read(bundle)
    (bundle / "manifest.json").write_text(dataclasses.replace(manifest, requirements=("absent",)).to_json())
    code, _, err = run("install", bundle, "--target", tmp_path / "site")
    assert code == 1 and "offline_bundle: `pip install` failed with exit code 1; its message is above." in err


def dependencies(folder):
    """Writes wheels that stand for the dependencies of tfdist: their names and versions, without their contents."""
    for name, version in {
        **{"absl-py": "2.1", "importlib_resources": "6.0", "keras": "3.15.0", "numpy": "2.0.0", "rich": "13.0"},
        **{"tensorflow-datasets": "4.9.9", "promise": "2.3", "etils": "1.13"},
    }.items():
        write_wheel(folder, name, version, requires=["promise"] if name == "tensorflow-datasets" else [])
    cuda = ["nvidia-tiny; extra == 'and-cuda'"]
    tag = f"cp312-cp312-manylinux_2_20_{HERE.machine}"
    write_wheel(folder, "tensorflow", "2.21.0", tag, cuda, ["and-cuda"])
    write_wheel(folder, "tensorflow", "2.21.1", tag.replace("_2_20_", "_2_29_"), cuda, ["and-cuda"])
    write_wheel(folder, "nvidia-tiny", "1.0", f"py3-none-manylinux_2_17_{HERE.machine}")


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [False, True])
def test_a_bundle_for_another_python_has_tfdist_and_its_dependencies(cpu, tmp_path):
    """pip builds the wheel of tfdist with the installed setuptools, so that no network is needed."""
    dependencies(tmp_path / "index")
    write_wheel(tmp_path / "index", "mine", "1.5")
    env = {"PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_NO_BUILD_ISOLATION": "0"}
    there = ["--python", "3.12", "--platform", f"manylinux_2_28_{HERE.machine}", "--piece-mb", "0.001"]
    options = [*there, "--add", "mine", *(["--cpu"] if cpu else [])]
    code, out, err = run("prepare", tmp_path / "bundle", *options, env=env)
    assert code == 0 and f"for Python 3.12 on manylinux_2_28_{HERE.machine}" in out, out + err
    assert ("conditions such as" in err) == (HERE.python != "3.12")
    manifest = Manifest.read(tmp_path / "bundle")
    offline_bundle.verify(tmp_path / "bundle", manifest)
    assert manifest.target == Target("3.12", HERE.machine, 28)
    assert manifest.requirements == (f"tfdist{'' if cpu else '[gpu]'}=={tfdist.__version__}", "mine")
    names = [wheel.name.split("-")[0] for wheel in manifest.wheels]
    own = ["etils"] if sys.version_info < (3, 11) else []  # pip's own Python decides, as it warns.
    expected = ["absl_py", *own, "importlib_resources", "keras", "mine", "numpy", "nvidia_tiny", "promise", "rich"]
    expected += ["tensorflow", "tensorflow_datasets", "tfdist"]
    assert names == [name for name in expected if not (cpu and name == "nvidia_tiny")]
    assert f"tensorflow-2.21.0-cp312-cp312-manylinux_2_20_{HERE.machine}.whl" in {w.name for w in manifest.wheels}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "index"]


@pytest.mark.slow
def test_a_failed_download_leaves_no_bundle(tmp_path):
    dependencies(tmp_path / "index")
    next((tmp_path / "index").glob("keras-*")).unlink()
    env = {"PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_NO_BUILD_ISOLATION": "0"}
    code, _, err = run("prepare", tmp_path / "bundle", env=env)
    assert code == 1 and "`pip download` failed" in err and [path.name for path in tmp_path.iterdir()] == ["index"]
