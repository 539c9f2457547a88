"""Carries tfdist with all its packages to a machine without a network, as a folder of small files.

    python deploy/offline_bundle.py prepare bundle      with a network: tfdist[gpu] of this checkout, in pieces
    python bundle/offline_bundle.py install bundle      without one: verifies, joins and installs them

The bundle has all wheels, one after the other, in pieces of at most 60 MB. `manifest.json` has the names, sizes and
SHA-256 of wheels and pieces. This script needs nothing but Python and pip; the bundle has a copy of it.

`prepare` calls `pip download`, so the settings of pip hold, such as PIP_INDEX_URL and PIP_FIND_LINKS.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

FORMAT = 1
MANIFEST = "manifest.json"
PIECE_MB = 60.0
CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
# Files of the checkout that a wheel is built from. The build leaves files beside them, so they are copied first.
SOURCES = ("tfdist", "strategies", "data", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
# Dependencies that the index has as sources only, in pure Python. `pip download` for another machine builds nothing.
ONLY_AS_SOURCES = ("promise",)
OLDEST_GLIBC = 5
_LEGACY_TAGS = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_CHUNK = 1 << 20


class BundleError(Exception):
    """A bundle cannot be made or installed. The message says the rule, the finding and the remedy."""


@dataclasses.dataclass(frozen=True)
class File:
    """A wheel or a piece: its name, number of bytes and SHA-256."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Target:
    """The interpreter for which the wheels of a bundle were made.

    Attributes:
      python: Version of CPython, such as "3.12".
      machine: Machine, such as "x86_64".
      glibc: Minor version of the oldest glibc 2 on which the wheels run, such as 28.
    """

    python: str
    machine: str
    glibc: int

    @classmethod
    def running(cls) -> "Target":
        """Returns the target that is this interpreter.

        Raises:
          BundleError: If this is not CPython on Linux with glibc.
        """
        name, version = platform.libc_ver()
        if sys.platform != "linux" or sys.implementation.name != "cpython" or name != "glibc":
            raise BundleError(
                f"A bundle needs CPython on Linux with glibc, this is {sys.implementation.name} on {sys.platform} with "
                f"{name or 'another C library'}. To prepare one for such a machine, give --python and --platform."
            )
        glibc = int(version.split(".")[1])
        return cls(f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine(), glibc)

    @classmethod
    def of(cls, python: str, tag: str) -> "Target":
        """Returns the target of a version and of a platform tag, such as "3.12" and "manylinux_2_28_x86_64"."""
        modern = re.fullmatch(r"manylinux_2_([0-9]+)_(\w+)", tag)
        legacy = re.fullmatch(r"(manylinux2014|manylinux2010|manylinux1)_(\w+)", tag)
        if modern:
            return cls(python, modern[2], int(modern[1]))
        if legacy:
            return cls(python, legacy[2], {name: minor for minor, name in _LEGACY_TAGS.items()}[legacy[1]])
        raise BundleError(f"--platform needs a tag such as manylinux_2_28_x86_64 or manylinux2014_x86_64, got {tag!r}.")

    def tags(self) -> list[str]:
        """Returns the platform tags of wheels that run there: pip takes a tag without those of an older glibc."""
        tags = []
        for minor in range(self.glibc, OLDEST_GLIBC - 1, -1):
            tags.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _LEGACY_TAGS:
                tags.append(f"{_LEGACY_TAGS[minor]}_{self.machine}")
        return [*tags, f"linux_{self.machine}"]

    def refusal(self, here: "Target") -> str | None:
        """Returns why the interpreter `here` cannot use wheels for this target, with the remedy, or None."""
        wanted = f"--python {here.python} --platform manylinux_2_{here.glibc}_{here.machine}"
        if self.python != here.python:
            return (
                f"The bundle is for Python {self.python}, but this is {here.python} ({sys.executable}). Install it "
                f"with python{self.python}, or prepare one with {wanted}."
            )
        if self.machine != here.machine:
            return f"The bundle is for {self.machine}, but this machine is {here.machine}. Prepare one with {wanted}."
        if self.glibc > here.glibc:
            return (
                f"The wheels of the bundle may need glibc 2.{self.glibc}, but this machine has 2.{here.glibc}. Prepare "
                f"one with {wanted}."
            )
        return None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a bundle: its wheels, one after the other, are the bytes of its pieces.

    Attributes:
      target: The interpreter for which it is.
      requirements: Packages that `install` tells pip to install.
      wheels: The wheels in their order.
      pieces: The pieces in their order.
    """

    target: Target
    requirements: tuple[str, ...]
    wheels: tuple[File, ...]
    pieces: tuple[File, ...]

    def to_json(self) -> str:
        """Returns the text of `manifest.json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, bundle: pathlib.Path) -> "Manifest":
        """Reads the manifest of a bundle.

        Raises:
          BundleError: If it is missing, damaged, or of another version of this script.
        """
        path = bundle / MANIFEST
        try:
            fields = json.loads(path.read_bytes())
        except OSError as error:
            raise BundleError(f"A bundle is a folder with {MANIFEST}, and {path} cannot be read: {error}.") from error
        except ValueError as error:
            raise BundleError(f"{path} must be JSON, but it is damaged: {error}. Copy it again.") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise BundleError(f"{path} must have format {FORMAT}. Use the script that is in the bundle.")
        try:
            manifest = cls(
                Target(**fields.pop("target")),
                tuple(fields.pop("requirements")),
                tuple(File(**each) for each in fields.pop("wheels")),
                tuple(File(**each) for each in fields.pop("pieces")),
            )
            manifest._check(path)
        except (KeyError, TypeError) as error:
            raise BundleError(f"{path} has a missing or wrong field: {error}. Copy it again.") from error
        return manifest

    def _check(self, path: pathlib.Path) -> None:
        for file in (*self.wheels, *self.pieces):
            if pathlib.PurePath(file.name).name != file.name:
                raise BundleError(f"{path} may name files of one folder only, got {file.name!r}. Copy it again.")
        if sum(file.size for file in self.wheels) != sum(file.size for file in self.pieces):
            raise BundleError(f"The wheels and the pieces in {path} differ in their number of bytes. Copy it again.")


class Pieces:
    """Writes a stream of bytes as files of at most `piece_bytes` bytes each."""

    def __init__(self, folder: pathlib.Path, piece_bytes: int):
        self._folder, self._piece_bytes = folder, piece_bytes
        self._file: BinaryIO | None = None
        self._room, self._digest = 0, hashlib.sha256()
        self.written: list[File] = []

    def write(self, data: bytes) -> None:
        """Appends `data` to the stream."""
        view = memoryview(data)
        while view:
            if not self._room:
                self.close()
                self._file = (self._folder / f"piece-{len(self.written) + 1:04d}").open("xb")
                self._room, self._digest = self._piece_bytes, hashlib.sha256()
            part, view = view[: self._room], view[self._room :]
            assert self._file is not None
            self._file.write(part)
            self._digest.update(part)
            self._room -= len(part)

    def close(self) -> None:
        """Ends the current piece. Without it, the last piece is not in `written`."""
        if self._file is None:
            return
        name, size = pathlib.Path(self._file.name).name, self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.written.append(File(name, size, self._digest.hexdigest()))


def chunks(path: pathlib.Path) -> Iterator[bytes]:
    """Yields the bytes of a file in chunks."""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def pip(*arguments: object) -> None:
    """Runs pip of this interpreter.

    Raises:
      BundleError: If there is no pip, or it fails. Its own message is on the terminal by then.
    """
    if importlib.util.find_spec("pip") is None:
        raise BundleError(f"{sys.executable} needs pip. Run `{sys.executable} -m ensurepip`, or install it.")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise BundleError(f"`pip {arguments[0]}` failed with exit code {code}; its message is above.")


def download(wheels: pathlib.Path, work: pathlib.Path, target: Target, extra: str, added: Sequence[str]) -> list[str]:
    """Writes the wheels of tfdist and all it needs to the folder `wheels`, and returns what to install.

    Args:
      wheels: New folder for the wheels.
      work: Folder for other files.
      target: The interpreter for which to download.
      extra: Extra of tfdist, such as "gpu", or an empty string.
      added: Further requirements.
    """
    source, built = work / "source", work / "built"
    source.mkdir()
    for name in SOURCES:
        path = CHECKOUT / name
        if not path.exists():
            raise BundleError(f"`prepare` needs a checkout of tfdist, but there is no {path}. Run it in a checkout.")
        if path.is_dir():  # Programs that import tfdist meanwhile write and rename files in `__pycache__`.
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", built, source)
    (own,) = built.iterdir()
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", built, *ONLY_AS_SOURCES)
    own_requirement = f"tfdist{f'[{extra}]' if extra else ''}"
    pip(
        *("download", "--dest", wheels, "--only-binary=:all:", "--find-links", built),
        *("--implementation", "cp", "--python-version", target.python),
        *(part for tag in target.tags() for part in ("--platform", tag)),
        *(f"{own}{own_requirement.removeprefix('tfdist')}", *added),
    )
    return [f"{own_requirement}=={own.name.split('-')[1]}", *added]


def pack(
    wheels: pathlib.Path, bundle: pathlib.Path, target: Target, requirements: Iterable[str], piece_bytes: int
) -> Manifest:
    """Writes a bundle of the wheels in a folder, and removes each wheel once it is written.

    Args:
      wheels: Folder of the wheels.
      bundle: Empty folder for the bundle.
      target: The interpreter for which the wheels are.
      requirements: Packages to install of them.
      piece_bytes: Number of bytes of a piece, at most.

    Raises:
      BundleError: If the folder has a file that is no wheel, or none.
    """
    paths = sorted(wheels.iterdir())
    if not paths or (others := [path.name for path in paths if path.suffix != ".whl"]):
        raise BundleError(f"A bundle needs wheels, got {', '.join(others) if paths else 'no files'}.")
    pieces, files = Pieces(bundle, piece_bytes), []
    for path in paths:
        digest = hashlib.sha256()
        for chunk in chunks(path):
            pieces.write(chunk)
            digest.update(chunk)
        files.append(File(path.name, path.stat().st_size, digest.hexdigest()))
        path.unlink()
    pieces.close()
    manifest = Manifest(target, tuple(requirements), tuple(files), tuple(pieces.written))
    shutil.copy(__file__, bundle / pathlib.Path(__file__).name)
    with (bundle / MANIFEST).open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    return manifest


@contextlib.contextmanager
def whole_folder(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Yields a folder that becomes `path` if the block succeeds, and a folder for other files. Otherwise leaves none.

    Raises:
      BundleError: If `path` is a file, or a folder with files.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "has files in it" if path.is_dir() else "is a file"
        raise BundleError(f"`prepare` needs a new or empty folder, but {path} {what}. Give another, or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as work:
        folder = pathlib.Path(work) / "bundle"
        folder.mkdir()
        yield folder, pathlib.Path(work)
        folder.rename(path)  # Replaces an empty folder.


def verify(bundle: pathlib.Path, manifest: Manifest) -> None:
    """Checks that the bundle has each piece, unchanged, and no other file.

    Raises:
      BundleError: If not. It names all pieces with faults.
    """
    expected = {MANIFEST, pathlib.Path(__file__).name, *(piece.name for piece in manifest.pieces)}
    present = {path.name for path in bundle.iterdir()}
    faults = [f"{piece.name} is missing" for piece in manifest.pieces if piece.name not in present]
    for piece in manifest.pieces:
        if piece.name in present and (fault := _fault(bundle / piece.name, piece)):
            faults.append(f"{piece.name} {fault}")
    superfluous = sorted(present - expected)
    if not faults and not superfluous:
        return
    advice = ["Copy the named pieces again."] if faults else []
    if superfluous:
        faults.append(f"{', '.join(superfluous)} not in {MANIFEST}")
        advice.append("Move files that are not of the bundle elsewhere.")
    raise BundleError(
        f"{bundle} must have the {len(manifest.pieces)} pieces of {MANIFEST}, unchanged, and no other file: "
        f"{'; '.join(faults)}. {' '.join(advice)}"
    )


def _fault(path: pathlib.Path, piece: File) -> str | None:
    if not path.is_file():
        return "is no file"
    if path.stat().st_size != piece.size:
        return f"has {path.stat().st_size} bytes instead of {piece.size}"
    digest = hashlib.sha256()
    for chunk in chunks(path):
        digest.update(chunk)
    return None if digest.hexdigest() == piece.sha256 else "has another SHA-256"


def join(bundle: pathlib.Path, manifest: Manifest, wheels: pathlib.Path) -> None:
    """Writes the wheels of a verified bundle to a folder.

    Raises:
      BundleError: If the folder has no room for them, or a wheel has another SHA-256 than in the manifest.
    """
    needed, free = sum(wheel.size for wheel in manifest.wheels), shutil.disk_usage(wheels).free
    if needed > free:
        raise BundleError(
            f"The wheels need {_mb(needed)} in {wheels}, which has {_mb(free)}. Set TMPDIR to a folder with more room; "
            "pip needs about three times as much where it installs."
        )
    stream = (chunk for piece in manifest.pieces for chunk in chunks(bundle / piece.name))
    rest = memoryview(b"")
    for wheel in manifest.wheels:
        digest, left = hashlib.sha256(), wheel.size
        with (wheels / wheel.name).open("xb") as file:
            while left:
                rest = rest or memoryview(next(stream))
                part, rest = rest[:left], rest[left:]
                file.write(part)
                digest.update(part)
                left -= len(part)
        if digest.hexdigest() != wheel.sha256:
            raise BundleError(f"{wheel.name} has another SHA-256 than {MANIFEST} says. Copy the whole bundle again.")


def prepare(args: argparse.Namespace) -> None:
    """Downloads wheels, and writes a bundle of them: completely or not at all."""
    if args.python and args.platform:
        target = Target.of(args.python, args.platform)
    else:
        here = Target.running()
        target = Target.of(args.python or here.python, args.platform or here.tags()[0])
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if target.python != running:
        print(
            f"Warning: pip evaluates conditions such as `python_version < '3.12'` for its own Python, {running}. "
            f"Packages that only Python {target.python} needs may be missing; `install` would name them.",
            file=sys.stderr,
        )
    with whole_folder(args.bundle.absolute()) as (bundle, work):
        requirements = download(work / "wheels", work, target, "" if args.cpu else "gpu", args.add)
        manifest = pack(work / "wheels", bundle, target, requirements, int(args.piece_mb * 1e6))
    size = _mb(sum(wheel.size for wheel in manifest.wheels))
    what = f"{len(manifest.wheels)} wheels, {size}, in {len(manifest.pieces)} pieces"
    print(f"{args.bundle}: {what}, for Python {target.python} on {target.tags()[0]}")
    script = f"{args.bundle.name}/{pathlib.Path(__file__).name}"
    print(f"Copy the folder to the machine, and run there: python{target.python} {script} install {args.bundle.name}")


def install(args: argparse.Namespace) -> None:
    """Verifies a bundle, joins its pieces, and installs the wheels."""
    manifest = Manifest.read(args.bundle)
    if why := manifest.target.refusal(Target.running()):
        raise BundleError(why)
    verify(args.bundle, manifest)
    print(f"{len(manifest.pieces)} pieces verified; joining them to {len(manifest.wheels)} wheels")
    with tempfile.TemporaryDirectory(prefix="tfdist-wheels-") as folder:
        join(args.bundle, manifest, pathlib.Path(folder))
        where = ["--target", args.target] if args.target else []
        pip("install", "--no-index", "--find-links", folder, *where, *manifest.requirements)
    print(f"Installed {', '.join(manifest.requirements)}")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _piece_mb(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= float(text) * 1e6 < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"needs a number of MB above 0, got {text}")


def _version(text: str) -> str:
    if not re.fullmatch(r"3\.[0-9]+", text):
        raise argparse.ArgumentTypeError(f"needs a version such as 3.12, got {text}")
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("prepare", help="download wheels and write a bundle")
    command.add_argument("bundle", type=pathlib.Path, help="new or empty folder for the bundle")
    command.add_argument("--python", type=_version, help="version of Python there (default: this one's)")
    command.add_argument("--platform", help="such as manylinux_2_28_x86_64, glibc 2.28 (default: this machine's)")
    command.add_argument("--cpu", action="store_true", help="leave CUDA's libraries out")
    command.add_argument("--add", nargs="+", default=[], metavar="REQ", help="further packages, as pip names them")
    command.add_argument("--piece-mb", type=_piece_mb, default=PIECE_MB, help="largest size of a piece (default: 60)")
    command.set_defaults(run=prepare)
    command = commands.add_parser("install", help="verify a bundle, join and install it")
    command.add_argument("bundle", type=pathlib.Path, help="folder of the bundle")
    command.add_argument("--target", type=pathlib.Path, help="folder to install to (default: this Python's)")
    command.set_defaults(run=install)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit code: 0, or 1 after an error."""
    args: Any = parse(argv)
    try:
        args.run(args)
    except (BundleError, OSError) as error:
        print(f"offline_bundle: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Removes incomplete bundles.
    sys.exit(main())
