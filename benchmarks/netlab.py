"""Several hosts on one machine, joined by links of a known rate.

    python -m benchmarks.netlab up --hosts 2 --rate 1gbit
    python -m benchmarks.netlab exec tfd0-host0 -- ip address
    python -m benchmarks.netlab down

Each host is a network namespace, and so is the switch between them:

    tfd0-host0  eth0 ────── port0 ┐
                                  ├ bridge, in tfd0-switch
    tfd0-host1  eth0 ────── port1 ┘

A token bucket (`tc ... tbf`) at both ends of a link shapes it both ways. No link, address, route or firewall rule of
the machine itself is used or changed, so the lab's subnet may exist outside too; nor can the hosts reach anything
outside. Needs Linux, root and iproute2. Delay and loss are not emulated.

What is counted: the kernel hands TCP segments over in packets of up to 64 KB, which an interface counts with one header
of 66 bytes each (Ethernet 14, IP 20, TCP 32), so that `Host.counters` reads within 1 % of the payload of a busy link.
The token bucket charges each of the 1514 byte frames that such a packet stands for, as a cable would (but for preambles
and gaps): a full link carries 1448/1514 = 95.6 % payload.
"""

import argparse
import atexit
import concurrent.futures
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
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Sequence

__all__ = ["Counters", "Host", "Netlab", "NetlabError", "Speed", "why_not"]

TOLERANCE = 0.05

_OURS = re.compile(r"tfd(\d+)(-switch|-host\d+|\.lock)")  # namespaces, and locks in /run
_LOCKS = pathlib.Path("/run")
_STANDING = b"standing"
_SLOTS = 100
_MAX_HOSTS = 200
_COMMAND_SECONDS = 10.0
_ORPHAN_SECONDS = 2.0  # for an `ip` whose parent was killed to end
_ATTEMPTS = 5
_PORT = 5201
_FRAME_BYTES = 1514
# Smaller, and the bucket would cut the kernel's large packets into frames, at the cost of processor time.
_MIN_BURST_BYTES = 70_000
_BURST_SECONDS = 0.004  # how late a busy machine may be without losing rate; so much passes unshaped after a rest


class NetlabError(RuntimeError):
    """The lab cannot be put up, or a link does not have the rate that was asked for."""


class BusyError(NetlabError):
    """A link carries less than was asked for, as it does when other programs take the processor."""


@dataclasses.dataclass(frozen=True)
class Counters:
    """Bytes that passed an interface since it was made, Ethernet headers included."""

    sent_bytes: int
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a TCP stream reached, in bit/s: its payload, and all frames that the token bucket let through.

    `wire` is 0 on an unshaped link, where nobody counts frames.
    """

    goodput: float
    wire: float


@dataclasses.dataclass(frozen=True)
class Host:
    """One host: a network namespace with the loopback and one interface."""

    name: str
    address: str
    interface: str = "eth0"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def counters(self) -> Counters:
        """Reads the interface. Costs a process, some 5 ms.

        Raises:
          NetlabError: If the host is gone.
        """
        (link,) = json.loads(_run("ip", "-n", self.name, "-s", "-j", "link", "show", "dev", self.interface))
        return Counters(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])


class Netlab:
    """Hosts that stand inside a `with` block, at its end removed with all processes that still run on them.

    Several labs can stand at once. What a killed process left behind is removed when the next lab is put up. A lab that
    the command line left standing stays until its `down` or next `up`.

    Entering takes about 0.2 s and, for each host, 0.7 s in which a stream from each host to the next measures all links
    in both directions, one after the other. The streams run before all other load of the machine, so it is the link
    that is measured: programs on a busy machine may reach less.

    Args:
      hosts: How many, from 2.
      rate: Of each link in each direction, headers included: a number with `kbit`, `mbit` or `gbit`; `None` for
        unshaped.

    Attributes:
      hosts: The hosts, in order.
      bits_per_second: Payload a second of a TCP stream over the slowest link.
      wire_bits_per_second: The same in frames, which is what `rate` means; `None` if unshaped.
      machine_limit: Payload a second that the machine reached unshaped, if that is why `rate` was missed, else `None`.

    Raises:
      ValueError: If `hosts` or `rate` is none of these.
      NetlabError: On entering, if the lab cannot be put up, or a link is off by more than 5 % though the machine could
        do better.
    """

    def __init__(self, hosts: int = 2, rate: str | None = "1gbit"):
        if not 2 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"A lab has 2 to {_MAX_HOSTS} hosts, got {hosts}.")
        _parse_rate(rate)
        self.hosts: list[Host] = []
        self.rate = rate
        self.bits_per_second: float | None = None
        self.wire_bits_per_second: float | None = None
        self.machine_limit: float | None = None
        self._count = hosts
        self._shaped = False
        self._slot: _Slot | None = None

    def __enter__(self) -> "Netlab":
        if self._slot is not None:
            raise NetlabError("This lab is up already. Make another Netlab.")
        _check_tools()
        _sweep()
        atexit.register(self.close)
        try:
            self._slot = _Slot.claim_free()
            self.hosts = self._slot.build(self._count)
            self.shape(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Removes the lab, and kills what still runs on its hosts. A second call does nothing."""
        atexit.unregister(self.close)
        slot, self._slot = self._slot, None
        if slot is not None:
            with contextlib.closing(slot):
                slot.clear()

    def leave_standing(self) -> None:
        """Lets the lab outlive this process, until the command line's `down` or next `up`."""
        slot = self._owned()
        self._slot = None
        atexit.unregister(self.close)
        slot.close(standing=True)

    def shape(self, rate: str | None) -> None:
        """Changes the rate of all links, and measures them; see the class.

        Raises:
          ValueError: If `rate` is not a rate.
          NetlabError: If a link is off by more than 5 % though the machine could do better.
        """
        self._set_rate(rate)
        self.rate = rate
        self.check()

    def check(self) -> None:
        """Measures all links again; see the class.

        Raises:
          NetlabError: If a link is off by more than 5 % though the machine could do better.
        """
        asked, self.machine_limit = _parse_rate(self.rate), None
        links = list(zip(range(self._count), [*range(1, self._count), 0], strict=True))
        speeds = [self._best(asked, *link) for link in links]
        slowest = min(speeds, key=lambda speed: speed.goodput)
        self.bits_per_second, self.wire_bits_per_second = slowest.goodput, slowest.wire or None
        if asked:
            link, speed = max(zip(links, speeds, strict=True), key=lambda pair: _error(pair[1], asked))
            if _error(speed, asked) > TOLERANCE:
                self._explain(asked, link, speed)

    def _explain(self, asked: float, link: tuple[int, int], speed: Speed) -> None:
        """Warns if the machine itself is too slow, and raises if not."""
        names = " to ".join(self.hosts[end].name for end in link)
        what = f"{names} was to carry {_megabits(asked)} and carried {_megabits(speed.wire)}"
        self._set_rate(None)
        limit = self._measure(None, *link).goodput
        self._set_rate(self.rate)
        # Twice, since the token buckets need some of the processor time that an unshaped stream has for itself.
        if speed.wire > asked or limit > 2 * asked:
            raise (NetlabError if speed.wire > asked else BusyError)(
                f"{what}, off by more than {TOLERANCE:.0%}, though unshaped it carries {_megabits(limit)}. If other "
                f"programs are using the machine, try again when they are done."
            )
        self.machine_limit = limit
        warnings.warn(
            f"{what}: this machine's limit, as unshaped it carries {_megabits(limit)} at most. Take what was measured, "
            f"not what was asked.",
            RuntimeWarning,
            stacklevel=4,
        )

    def _set_rate(self, rate: str | None) -> None:
        asked, slot = _parse_rate(rate), self._owned()
        if asked is None and not self._shaped:
            return
        action, bucket = ("del", []) if asked is None else ("replace", _bucket(asked))
        for index, host in enumerate(self.hosts):
            for namespace, device in ((host.name, host.interface), (slot.switch, f"port{index}")):
                slot.run("tc", "-n", namespace, "qdisc", action, "dev", device, "root", *bucket)
        self._shaped = asked is not None

    def _best(self, asked: float | None, sender: int, receiver: int) -> Speed:
        """The measurement nearest to what was asked, of up to 5: a busy machine disturbs some."""
        speeds: list[Speed] = []
        while not speeds or (asked and len(speeds) < _ATTEMPTS and _error(speeds[-1], asked) > TOLERANCE):
            speeds.append(self._measure(asked, sender, receiver))
        return min(speeds, key=lambda speed: _error(speed, asked) if asked else 0.0)

    def _measure(self, asked: float | None, sender: int, receiver: int) -> Speed:
        slot, to = self._owned(), self.hosts[receiver]
        settle, window = _durations(asked)
        ours = [sys.executable, "-I", "-S", __file__]
        source = subprocess.Popen(self.hosts[sender].command([*ours, "source", to.address]), stderr=subprocess.DEVNULL)
        try:
            sink = ["sink", to.address, slot.switch, f"port{receiver}", str(settle), str(window)]
            answer = _run(*to.command([*ours, *sink]), seconds=_COMMAND_SECONDS + settle + window)
        finally:
            source.kill()
            source.wait()
        return Speed(**json.loads(answer))

    def _owned(self) -> "_Slot":
        if self._slot is None:
            raise NetlabError("This lab is not up. Use it inside `with Netlab(...) as lab:`.")
        return self._slot


def why_not() -> str | None:
    """Says why no lab can be put up here, and the way to get one; `None` if it can be.

    Tries it, which takes about 0.2 s: makes the namespaces, links, bridge and token bucket of a lab and removes them.
    """
    try:
        _check_tools()
        with contextlib.closing(_Slot.claim_free()) as slot:
            try:
                (host,) = slot.build(1)
                slot.run("tc", "-n", host.name, "qdisc", "replace", "dev", host.interface, "root", *_bucket(1e8))
            finally:
                slot.clear()
    except NetlabError as error:
        return str(error)
    return None


class _Slot:
    """A lab's number, owned by whoever holds the lock on its file: nobody else touches the namespaces of that number.

    The kernel gives the lock back when its holder dies, however that happens.
    """

    def __init__(self, number: int, lock: int, path: pathlib.Path):
        self.number, self._lock, self._path = number, lock, path
        self.switch = f"tfd{number}-switch"

    @classmethod
    def claim(cls, number: int) -> "_Slot | None":
        """Takes the number, unless it has an owner."""
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
                if _owner_of(number) is not None or time.monotonic() > deadline:
                    return None
                time.sleep(0.01)
                continue
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return cls(number, lock, path)
            os.close(lock)  # its owner removed the file in between

    @classmethod
    def claim_free(cls) -> "_Slot":
        """Takes the first number under which no lab stands."""
        taken = _numbers(_namespaces())
        for number in range(_SLOTS):
            slot = None if number in taken else cls.claim(number)
            if slot is not None:
                return slot
        raise NetlabError(f"At most {_SLOTS} labs can stand at once. Remove one.")

    def close(self, standing: bool = False) -> None:
        """Gives the number back, or leaves a mark that its lab has no owner but is to stand."""
        if standing:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, _STANDING, 0)
        else:
            self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def run(self, *command: str) -> str:
        """Runs a command that holds the lock too, so that it is not overtaken if this process is killed meanwhile."""
        return _run(*command, pass_fds=[self._lock])

    def build(self, count: int) -> list[Host]:
        """Makes the switch and the hosts, with links between them, unshaped."""
        hosts = [Host(f"tfd{self.number}-host{index}", f"10.77.{self.number}.{index + 1}") for index in range(count)]
        self._add_namespace(self.switch)
        self.run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        self.run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for index, host in enumerate(hosts):
            self._add_namespace(host.name)
            in_host, in_switch, port = ("ip", "-n", host.name), ("ip", "-n", self.switch), f"port{index}"
            peer = ("peer", "name", port, "netns", self.switch)  # made over there: the machine itself never sees it
            self.run(*in_host, "link", "add", host.interface, "type", "veth", *peer)
            self.run(*in_switch, "link", "set", port, "master", "bridge", "up")
            self.run(*in_host, "address", "add", f"{host.address}/24", "dev", host.interface)
            self.run(*in_host, "link", "set", host.interface, "up")
        return hosts

    def _add_namespace(self, name: str) -> None:
        self.run("ip", "netns", "add", name)
        self.run("ip", "-n", name, "link", "set", "lo", "up")

    def clear(self) -> None:
        """Removes the namespaces of this number, and with them their links; kills what runs in them.

        Raises:
          NetlabError: If a process does not die.
        """
        mine = [name for name in _namespaces() if name.startswith(f"tfd{self.number}-")]
        for name in mine:
            deadline = time.monotonic() + _COMMAND_SECONDS
            while pids := self.run("ip", "netns", "pids", name).split():
                if time.monotonic() > deadline:
                    raise NetlabError(f"Processes in {name} do not end when killed: {', '.join(pids)}.")
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.01)
            self.run("ip", "netns", "delete", name)


def _lock_path(number: int) -> pathlib.Path:
    return _LOCKS / f"tfd{number}.lock"


def _is_standing(number: int) -> bool:
    try:
        return _lock_path(number).read_bytes() == _STANDING
    except FileNotFoundError:
        return False


def _owner_of(number: int) -> int | None:
    """The living process that wrote itself down as the owner of a lab."""
    try:
        pid = int(_lock_path(number).read_text())
    except (OSError, ValueError):
        return None
    return pid if pathlib.Path(f"/proc/{pid}").exists() else None


def _namespaces() -> list[str]:
    """The namespaces of all labs."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.strip() and _OURS.fullmatch(line.split()[0])]


def _numbers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_OURS.fullmatch, names) if match}


def _sweep(standing: bool = False) -> list[int]:
    """Removes the labs without an owner, on demand also those that are to stand; returns the numbers of the others."""
    kept = []
    for number in sorted(_numbers([*_namespaces(), *os.listdir(_LOCKS)])):
        slot = _Slot.claim(number) if standing or not _is_standing(number) else None
        if slot is None:
            kept.append(number)
            continue
        with contextlib.closing(slot):
            slot.clear()
    return kept


def _check_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise NetlabError(f"A lab is made of Linux network namespaces, but this is {sys.platform}. Use Linux.")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetlabError(f"A lab needs the command {' and '.join(missing)}: apt-get install iproute2.")
    if os.geteuid() != 0:
        raise NetlabError("Only root may make network namespaces. Run as root (sudo).")


def _run(*command: str, seconds: float = _COMMAND_SECONDS, pass_fds: Iterable[int] = ()) -> str:
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


def _parse_rate(rate: str | None) -> float | None:
    if rate is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if not match or float(match[1]) == 0:
        raise ValueError(f"A rate is a positive number with kbit, mbit or gbit, such as 100mbit; got {rate!r}.")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def _burst_bytes(asked: float) -> int:
    return max(_MIN_BURST_BYTES, int(asked / 8 * _BURST_SECONDS))


def _bucket(asked: float) -> list[str]:
    return ["tbf", "rate", f"{int(asked)}bit", "burst", str(_burst_bytes(asked)), "latency", "100ms"]


def _durations(asked: float | None) -> tuple[float, float]:
    """Seconds until the bucket is empty and TCP at full speed, and seconds to measure."""
    if asked is None:
        return 0.1, 0.4
    return max(0.1, 2 * _burst_bytes(asked) * 8 / asked), max(0.4, 400 * _FRAME_BYTES * 8 / asked)


def _error(speed: Speed, asked: float) -> float:
    return abs(speed.wire / asked - 1)


def _megabits(bits_per_second: float | None) -> str:
    return "unknown" if bits_per_second is None else f"{bits_per_second / 1e6:.1f} Mbit/s"


# From here: run on the hosts.


def _go_first() -> None:
    """Runs this process before all that is not real-time, since the link is to be measured and not the other load."""
    with contextlib.suppress(PermissionError):  # a container may lack CAP_SYS_NICE
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def send_forever(address: str) -> None:
    """Sends to the sink, once it is there, until it has enough."""
    _go_first()
    deadline = time.monotonic() + _COMMAND_SECONDS
    while True:
        try:
            connection = socket.create_connection((address, _PORT), timeout=_COMMAND_SECONDS)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    with connection, contextlib.suppress(OSError):
        while True:
            connection.sendall(bytes(1 << 18))


def receive(address: str, switch: str, port: str, settle: float, window: float) -> None:
    """Prints the speed of a stream, leaving out its first seconds."""
    _go_first()
    buffer = bytearray(1 << 20)
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(_COMMAND_SECONDS)
        connection, _ = server.accept()

    def drain(seconds: float) -> float:
        """Payload a second."""
        received, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            received += connection.recv_into(buffer)
        return received * 8 / (time.perf_counter() - start)

    # A thread asks for the frames, since the stream would stop if nobody read it meanwhile.
    with connection, concurrent.futures.ThreadPoolExecutor() as threads:
        connection.settimeout(_COMMAND_SECONDS)
        drain(settle)
        first = threads.submit(count_frames, switch, port)
        goodput = drain(window)
        last = threads.submit(count_frames, switch, port)
        while not last.done():
            drain(0.001)
    (start, before), (end, after) = first.result(), last.result()
    print(json.dumps({"goodput": goodput, "wire": (after - before) * 8 / (end - start)}))


def count_frames(switch: str, port: str) -> tuple[float, int]:
    """When, and how many bytes the bucket of a port had let through; 0 if it has none."""
    start = time.perf_counter()
    (bucket,) = json.loads(_run("tc", "-n", switch, "-s", "-j", "qdisc", "show", "dev", port))
    return (start + time.perf_counter()) / 2, bucket["bytes"]


# From here: the command line.


def up(hosts: int, rate: str | None) -> None:
    lab = Netlab(hosts, rate)
    _check_tools()
    _sweep(standing=True)
    with lab:
        for host in lab.hosts:
            print(host.name, host.address)
        asked = "unshaped" if rate is None else f"asked for {rate}"
        print(f"{asked}: {_megabits(lab.wire_bits_per_second)} in frames, {_megabits(lab.bits_per_second)} of payload")
        lab.leave_standing()


def down() -> None:
    _check_tools()
    for number in _sweep(standing=True):
        print(f"Left tfd{number}: process {_owner_of(number)} is using it, and removes it when it ends.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="netlab", description="Several hosts on one machine, see the module.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|down|exec")
    parse_up = commands.add_parser("up", help="put up a lab and leave it standing; replaces the one before")
    parse_up.add_argument("--hosts", type=int, default=2)
    parse_up.add_argument("--rate", default="1gbit", help="such as 100mbit, or none")
    commands.add_parser("down", help="remove all labs that no process is using")
    parse_exec = commands.add_parser("exec", help="run a command on a host")
    parse_exec.add_argument("host")
    parse_exec.add_argument("arguments", nargs=argparse.REMAINDER)
    parse_source = commands.add_parser("source")
    parse_source.add_argument("address")
    parse_sink = commands.add_parser("sink")
    for name, kind in (("address", str), ("switch", str), ("port", str), ("settle", float), ("window", float)):
        parse_sink.add_argument(name, type=kind)
    options = vars(parser.parse_args())
    command = options.pop("command")
    try:
        if command == "up":
            up(options["hosts"], None if options["rate"] == "none" else options["rate"])
        elif command == "down":
            down()
        elif command == "exec":
            arguments = options["arguments"][options["arguments"][:1] == ["--"] :]
            argv = Host(options["host"], "").command(arguments)
            os.execvp(argv[0], argv)
        elif command == "source":
            send_forever(**options)
        else:
            receive(**options)
    except (NetlabError, ValueError) as error:
        sys.exit(f"netlab: {error}")


if __name__ == "__main__":
    main()
