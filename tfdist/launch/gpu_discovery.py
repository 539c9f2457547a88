"""Finds the GPUs of this machine that its workers may use, without loading TensorFlow."""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping

from tfdist.errors import ClusterError
from tfdist.readable_numbers import counted_or_no

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
HIDDEN = "-1"  # No GPU has this number, so CUDA shows none.
_DEVICE_FOLDER = pathlib.Path("/dev")
_DEADLINE_SECONDS = 60.0  # Without the driver's persistence mode, `nvidia-smi` wakes one GPU after the other.
_IS_DEVICE = re.compile(r"[0-9]+|GPU-.+|MIG-.+")
_ENDS_LIST = ("-1", "NoDevFiles")  # Slurm writes the latter for a task without GPUs.
_GPU_LINE = re.compile(r"GPU [0-9]+: .*\(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@dataclasses.dataclass(frozen=True)
class FoundGpus:
    """The GPUs that the workers of this machine may use together.

    Attributes:
      devices: Names of the GPUs in the form of CUDA_VISIBLE_DEVICES, in the order in which to share them out.
      source: Where the GPUs were found, for messages: "CUDA_VISIBLE_DEVICES=2,3 names 2 GPUs".
      is_by_user: Whether CUDA_VISIBLE_DEVICES names them.
    """

    devices: tuple[str, ...]
    source: str
    is_by_user: bool = False


def find_gpus(environ: Mapping[str, str], *, device_folder: pathlib.Path | None = None) -> FoundGpus:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES; if it is not set, those that `nvidia-smi --list-gpus` prints.

    The device files in `/dev` are counted where `nvidia-smi` is missing, as in containers without it. They come
    second, because they also show GPUs that a control group forbids.

    Args:
      environ: Environment of this process.
      device_folder: Folder of the device files.

    Raises:
      ClusterError: If CUDA_VISIBLE_DEVICES has an entry that CUDA does not take, or `nvidia-smi` does not answer.
    """
    if VISIBLE_DEVICES in environ:
        return _named_in(environ[VISIBLE_DEVICES])
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program:
        return _listed_by(program, _DEADLINE_SECONDS)
    number = count_device_files(device_folder)
    return FoundGpus(
        _numbered(number), f"there is no nvidia-smi, and /dev has {counted_or_no(number, 'GPU')} for this user"
    )


def count_device_files(device_folder: pathlib.Path | None = None) -> int:
    """Returns the number of device files of NVIDIA GPUs that this process may open. Takes no time."""
    names = re.compile(r"nvidia[0-9]+")
    with contextlib.suppress(OSError), os.scandir(device_folder or _DEVICE_FOLDER) as entries:
        return sum(bool(names.fullmatch(each.name)) and os.access(each.path, os.R_OK | os.W_OK) for each in entries)
    return 0


def _named_in(value: str) -> FoundGpus:
    devices: list[str] = []
    for entry in filter(None, map(str.strip, value.split(","))):
        if entry in _ENDS_LIST:  # CUDA ignores all later entries.
            break
        if not _IS_DEVICE.fullmatch(entry):
            raise ClusterError(
                f"CUDA_VISIBLE_DEVICES needs numbers of GPUs, or names that begin with GPU- or MIG-, got {entry!r} in "
                f"{value!r}. CUDA would hide this GPU and all after it. `nvidia-smi --list-gpus` prints the names."
            )
        if entry in devices:
            raise ClusterError(
                f"CUDA_VISIBLE_DEVICES may name each GPU once, got {entry} twice in {value!r}. Name each GPU once."
            )
        devices.append(entry)
    return FoundGpus(tuple(devices), f"{VISIBLE_DEVICES}={value} names {counted_or_no(len(devices), 'GPU')}", True)


def _listed_by(program: str, seconds: float) -> FoundGpus:
    try:
        process = subprocess.Popen(
            [program, "--list-gpus"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ClusterError(f"{program} could not be started: {error}. {_INSTEAD}") from error
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        process.kill()  # Does not wait: the kernel may hold the process in the driver.
        raise ClusterError(
            f"`{program} --list-gpus` must answer within {seconds:g} s, and it did not, so the driver or a GPU hangs. "
            f"Look at `dmesg` for lines with NVRM. {_INSTEAD}"
        ) from error
    devices = parse_list(printed)
    source = f"`nvidia-smi --list-gpus` lists {counted_or_no(len(devices), 'GPU')}"
    if process.returncode and not devices:
        source += f", and failed with exit code {process.returncode}: {' '.join(printed.split())}"
    return FoundGpus(devices, source)


def parse_list(printed: str) -> tuple[str, ...]:
    """Returns the GPUs in the output of `nvidia-smi --list-gpus`: numbers, or UUIDs if a GPU has MIG devices.

    CUDA has no numbers for MIG devices. A GPU that is split into MIG devices is not a device itself.
    """
    devices: list[str] = []
    is_split = False
    for line in printed.splitlines():
        if found := _GPU_LINE.match(line):
            devices.append(found[1])
        elif (found := _MIG_LINE.match(line)) and devices:
            is_split = True
            if devices[-1].startswith("GPU-"):
                devices.pop()
            devices.append(found[1])
    return tuple(devices) if is_split else _numbered(len(devices))


def _numbered(number: int) -> tuple[str, ...]:
    return tuple(map(str, range(number)))


_INSTEAD = f"Or set {VISIBLE_DEVICES} to the GPUs to use, such as 0,1,2,3; then tfdist does not ask."
