"""The network namespaces of labs: their owners, their creation, and their removal after the owner has died."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

COMMAND_SECONDS = 60.0  # A busy machine may stop a command for many seconds.

_OURS = re.compile(r"tfd(\d+)(-switch|-host\d+|\.lock)")  # namespaces, and locks in /run
_LOCKS = pathlib.Path("/run")
_STANDING = b"standing"
_SLOTS = 100
_ORPHAN_SECONDS = 30.0  # until an `ip` process of a killed parent has ended


class NetlabError(RuntimeError):
    """The lab cannot be created, or a link does not have the requested rate."""


@dataclasses.dataclass(frozen=True)
class Counters:
    """Bytes that passed an interface since it was created, Ethernet headers included."""

    sent_bytes: int
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class Host:
    """One host: a network namespace with the loopback and one interface."""

    name: str
    address: str
    interface: str = "eth0"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def counters(self) -> Counters:
        """Reads the counters of the interface. Starts a process, which takes some 5 ms.

        Raises:
          NetlabError: If the host does not exist any more.
        """
        (link,) = json.loads(run_command("ip", "-n", self.name, "-s", "-j", "link", "show", "dev", self.interface))
        return Counters(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])


class Slot:
    """The number of a lab. Only the process that holds the lock on its file may touch the namespaces of that number.

    The kernel releases the lock when its holder dies.
    """

    def __init__(self, number: int, lock: int, path: pathlib.Path):
        self.number, self._lock, self._path = number, lock, path
        self.switch = f"tfd{number}-switch"

    @classmethod
    def claim(cls, number: int, standing: bool = False) -> "Slot | None":
        """Takes the number, or returns None if it has an owner, or a lab left standing unless `standing`."""
        path = _lock_path(number)
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while True:
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise NetlabError(f"A lab keeps its lock in {path}, which cannot be opened: {error}.") from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                if owner_of(number) is not None or time.monotonic() > deadline:
                    return None
                time.sleep(0.01)
                continue
            if not _is_file_of(path, lock):  # its owner removed the file in between
                os.close(lock)
                continue
            if not standing and os.pread(lock, len(_STANDING), 0) == _STANDING:
                os.close(lock)
                return None
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            return cls(number, lock, path)

    @classmethod
    def claim_free(cls) -> "Slot":
        """Takes the first number without a lab."""
        taken = _numbers(_namespaces())
        for number in range(_SLOTS):
            slot = None if number in taken else cls.claim(number)
            if slot is not None:
                if number not in _numbers(_namespaces()):
                    return slot
                slot.abandon()  # Its owner has made a lab and died since the first look.
        raise NetlabError(f"At most {_SLOTS} labs can stand at once. Remove one.")

    def close(self, standing: bool = False) -> None:
        """Releases the number, or marks its lab as `standing`: without an owner, but not to be removed."""
        if standing:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, _STANDING, 0)
        else:
            self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def abandon(self) -> None:
        """Releases the number with its namespaces, as the death of this process does. The next `sweep` removes them."""
        os.close(self._lock)

    def run(self, *command: str) -> str:
        """Runs a command that holds the lock too, so that the lab stays locked until it ends if this process dies."""
        with undisturbed():
            return run_command(*command, pass_fds=[self._lock])

    def build(self, count: int) -> list[Host]:
        """Creates the switch and the hosts, with unshaped links between them."""
        hosts = [Host(f"tfd{self.number}-host{index}", f"10.77.{self.number}.{index + 1}") for index in range(count)]
        self._add_namespace(self.switch)
        self.run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        self.run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for index, host in enumerate(hosts):
            self._add_namespace(host.name)
            in_host, in_switch, port = ("ip", "-n", host.name), ("ip", "-n", self.switch), f"port{index}"
            peer = ("peer", "name", port, "netns", self.switch)  # created in the switch, never visible on the machine
            self.run(*in_host, "link", "add", host.interface, "type", "veth", *peer)
            self.run(*in_switch, "link", "set", port, "master", "bridge", "up")
            self.run(*in_host, "address", "add", f"{host.address}/24", "dev", host.interface)
            self.run(*in_host, "link", "set", host.interface, "up")
        return hosts

    def _add_namespace(self, name: str) -> None:
        self.run("ip", "netns", "add", name)
        self.run("ip", "-n", name, "link", "set", "lo", "up")

    def clear(self) -> None:
        """Removes the namespaces of this number with their links, and kills the processes that run in them.

        Raises:
          NetlabError: If a process does not die.
        """
        mine = [name for name in _namespaces() if name.startswith(f"tfd{self.number}-")]
        for name in mine:
            deadline = time.monotonic() + COMMAND_SECONDS
            while pids := self.run("ip", "netns", "pids", name).split():
                if time.monotonic() > deadline:
                    raise NetlabError(f"Processes in {name} do not end when killed: {', '.join(pids)}.")
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.01)
            self.run("ip", "netns", "delete", name)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delays signals to end this process: a command that just starts could recreate namespaces after their removal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _lock_path(number: int) -> pathlib.Path:
    return _LOCKS / f"tfd{number}.lock"


def _is_file_of(path: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def owner_of(number: int) -> int | None:
    """The process that owns a lab, by its lock file, or None if it is not alive."""
    try:
        pid = int(_lock_path(number).read_text())
    except (OSError, ValueError):
        return None
    return pid if pathlib.Path(f"/proc/{pid}").exists() else None


def _namespaces() -> list[str]:
    """The namespaces of all labs."""
    lines = run_command("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.strip() and _OURS.fullmatch(line.split()[0])]


def _numbers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_OURS.fullmatch, names) if match}


def sweep(standing: bool = False) -> list[int]:
    """Removes labs without an owner, with `standing` also labs left standing. Returns the numbers of remaining labs.

    Raises:
      NetlabError: If `standing`, and this process runs on a host of a lab.
    """
    here = run_command("ip", "netns", "identify").strip() if standing else ""
    if _OURS.fullmatch(here):
        raise NetlabError(f"This runs on {here}, which would be removed. Run it outside of the lab.")
    kept = []
    for number in sorted(_numbers([*_namespaces(), *os.listdir(_LOCKS)])):
        slot = Slot.claim(number, standing)
        if slot is None:
            kept.append(number)
            continue
        with contextlib.closing(slot):
            slot.clear()
    return kept


def check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise NetlabError(f"A lab is made of Linux network namespaces, but this is {sys.platform}. Use Linux.")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetlabError(f"A lab needs the command {' and '.join(missing)}: apt-get install iproute2.")
    if os.geteuid() != 0:
        raise NetlabError("Only root may make network namespaces. Run as root (sudo).")


def run_command(*command: str, seconds: float = COMMAND_SECONDS, pass_fds: Iterable[int] = ()) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, pass_fds=tuple(pass_fds)
        )
    except subprocess.TimeoutExpired as error:
        raise NetlabError(f"`{shlex.join(command)}` did not end in {seconds:g} s.") from error
    if done.returncode != 0:
        way_out = ""
        if "not permitted" in done.stderr or "denied" in done.stderr:
            way_out = " In a container, root needs CAP_SYS_ADMIN and CAP_NET_ADMIN: docker run --privileged."
        raise NetlabError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}.{way_out}")
    return done.stdout
