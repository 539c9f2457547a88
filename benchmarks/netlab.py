"""A lab of several hosts on one machine, joined by links of a known rate.

    python -m benchmarks.netlab up --hosts 2 --rate 1gbit
    python -m benchmarks.netlab exec tfd0-host0 -- ip address
    python -m benchmarks.netlab down

Each host is a network namespace, and so is the switch between them:

    tfd0-host0  eth0 ────── port0 ┐
                                  ├ bridge, in tfd0-switch
    tfd0-host1  eth0 ────── port1 ┘

A token bucket (`tc ... tbf`) at each end of a link limits both directions. The lab does not use or change any link,
address, route or firewall rule of the machine. Its subnet may therefore also exist outside, and its hosts cannot reach
anything outside. Needs Linux, root and iproute2. `Netlab.delayed` adds a delay. Loss is not emulated.

The kernel passes TCP segments on in packets of up to 64 KB. An interface counts one header of 66 bytes for each packet
(Ethernet 14, IP 20, TCP 32), so `Host.counters` is within 1 % of the payload of a busy link. The token bucket charges
each 1514-byte frame of a packet, like a cable (without preambles and gaps), so a full link carries 1448/1514 = 95.6 %
payload.
"""

import argparse
import atexit
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

if not __package__:  # `python benchmarks/netlab.py` works too
    sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks.netlab_slots import (
    COMMAND_SECONDS,
    Counters,
    Host,
    NetlabError,
    Slot,
    check_tools,
    owner_of,
    run_command,
    sweep,
    undisturbed,
)

__all__ = ["Counters", "Host", "Netlab", "NetlabError", "Speed", "end_on_signals", "parse_rate", "why_not"]

TOLERANCE = 0.05

MAX_HOSTS = 200
_RATES = (100e3, 100e9)  # Slower links take minutes to measure, and `tc` refuses faster ones.
_ATTEMPTS = 5
_FRAME_BYTES = 1514
# A smaller bucket would cut the kernel's large packets into frames, which costs processor time.
_MIN_BURST_BYTES = 70_000
_QUEUE_SECONDS = 0.1  # A link drops what would wait longer.
_BURST_SECONDS = 0.004  # A busy machine may be this late without losing rate. After a pause, this much is not limited.
_BEGINS_ANEW = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"  # Whether TCP begins connections anew after a pause.
_STREAM = pathlib.Path(__file__).with_name("netlab_stream.py")
_DELAY = pathlib.Path(__file__).with_name("netlab_delay.py")


class BusyError(NetlabError):
    """A link is slower than requested, as it is when other programs use the processor."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed of a TCP stream in bit/s: of its payload, and of all frames that passed the token bucket.

    `wire` is 0 on an unshaped link, which has no token bucket to count frames.
    """

    goodput: float
    wire: float


class Netlab:
    """Hosts that exist inside a `with` block. Its end removes them, with all processes that still run on them.

    Several labs can exist at once. The next lab removes the remains of processes that were killed, for example by
    SIGTERM without `end_on_signals`. A lab made by the command line stays until its `down` or next `up`.

    Entering takes about 0.2 s, plus 0.7 s per host to measure all links in both directions, one after the other. The
    measuring streams have priority over all other load of the machine, so on a busy machine programs may be slower.

    Args:
      hosts: Number of hosts, at least 2.
      rate: Rate of each link in each direction, headers included: a number with `kbit`, `mbit` or `gbit`, from 100kbit
        (which takes minutes to measure) to 100gbit. None, "none" or "unshaped" do not limit the rate.

    Attributes:
      hosts: The hosts, in order.
      bits_per_second: Payload of a TCP stream over the slowest link, in bit/s.
      wire_bits_per_second: All frames of that stream, in bit/s, comparable with `rate`; None if unshaped.
      machine_limit: Payload in bit/s of an unshaped link, if the machine is too slow for `rate`; else None.

    Raises:
      ValueError: If `hosts` or `rate` is out of range.
      NetlabError: On entering, if the lab cannot be created, or the rate of a link is off by more than 5 % although the
        machine could do better.
    """

    def __init__(self, hosts: int = 2, rate: str | None = "1gbit"):
        if not 2 <= hosts <= MAX_HOSTS:
            raise ValueError(f"A lab has 2 to {MAX_HOSTS} hosts, got {hosts}.")
        parse_rate(rate)
        self.hosts: list[Host] = []
        self.rate = rate
        self.bits_per_second: float | None = None
        self.wire_bits_per_second: float | None = None
        self.machine_limit: float | None = None
        self._count = hosts
        self._shaped = self._keeps_window = False
        self._dilation = 1.0
        self._slot: Slot | None = None

    def __enter__(self) -> "Netlab":
        if self._slot is not None:
            raise NetlabError("This lab is up already. Make another Netlab.")
        check_tools()
        sweep()
        atexit.register(self.close)
        try:
            with undisturbed():
                self._slot = Slot.claim_free()
            self.hosts = self._slot.build(self._count)
            self.shape(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Removes the lab, and kills all processes that still run on its hosts. A second call does nothing."""
        atexit.unregister(self.close)
        with undisturbed():
            slot, self._slot = self._slot, None
            if slot is not None:
                with contextlib.closing(slot):
                    slot.clear()

    def leave_standing(self) -> None:
        """Keeps the lab after this process ends, until the command line's `down` or next `up`."""
        slot = self._owned()
        with undisturbed():
            self._slot = None
            atexit.unregister(self.close)
            slot.close(standing=True)

    def shape(self, rate: str | None, dilation: float = 1.0) -> None:
        """Changes the rate of all links, and measures them; see the class.

        Where programs dilate time by K, the rate is a Kth of the rate that it stands for. The links' queues and TCP
        then have to behave as they would without dilation. So queues hold K times as many seconds of traffic. TCP
        keeps its window in pauses, since the pause after which it begins anew, at least 200 ms, cannot be dilated.

        Args:
          rate: The new rate.
          dilation: The factor K.

        Raises:
          ValueError: If `rate` is not a rate.
          NetlabError: If the rate of a link is off by more than 5 % although the machine could do better.
        """
        self._dilation = dilation
        self._set_rate(rate)
        self._keep_window(dilation > 1)
        self.rate = rate
        self.check()

    def check(self) -> None:
        """Measures all links again; see the class.

        Raises:
          NetlabError: If the rate of a link is off by more than 5 % although the machine could do better.
        """
        asked, self.machine_limit = parse_rate(self.rate), None
        links = list(zip(range(self._count), [*range(1, self._count), 0], strict=True))
        speeds = [self._best(asked, *link) for link in links]
        slowest = min(speeds, key=lambda speed: speed.goodput)
        self.bits_per_second, self.wire_bits_per_second = slowest.goodput, slowest.wire or None
        if asked:
            link, speed = max(zip(links, speeds, strict=True), key=lambda pair: _error(pair[1], asked))
            if _error(speed, asked) > TOLERANCE:
                self._explain(asked, link, speed)

    @contextlib.contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        """Passes each frame on after some seconds, in a block. Rates stay; they are measured without the delay.

        A program in the place of the switch passes frames on, so a round trip takes 0.1 to 1 ms more than the delays.
        """
        slot, ports = self._owned(), [f"port{index}" for index in range(self._count)]
        command = [sys.executable, "-I", "-S", str(_DELAY), str(seconds), *ports]
        for port in ports:
            slot.run("ip", "-n", slot.switch, "link", "set", port, "nomaster")
        switch = subprocess.Popen(["ip", "netns", "exec", slot.switch, *command], stdout=subprocess.PIPE)
        try:
            assert switch.stdout is not None
            if not switch.stdout.readline():
                raise NetlabError("The switch that delays frames has ended. Its error is above.")
            yield
            time.sleep(seconds)  # Frames on their way arrive.
        finally:
            switch.kill()
            switch.communicate()
            for port in ports:
                slot.run("ip", "-n", slot.switch, "link", "set", port, "master", "bridge")

    def _explain(self, asked: float, link: tuple[int, int], speed: Speed) -> None:
        """Warns if the machine itself is too slow for the rate, else raises."""
        names = " to ".join(self.hosts[end].name for end in link)
        what = f"{names} was to carry {_megabits(asked)} and carried {_megabits(speed.wire)}"
        self._set_rate(None)
        limit = self._measure(None, *link).goodput
        self._set_rate(self.rate)
        # A factor of 2, since token buckets take processor time that an unshaped stream does not need.
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
        asked, slot = parse_rate(rate), self._owned()
        if asked is None and not self._shaped:
            return
        action, bucket = ("del", []) if asked is None else ("replace", _bucket(asked, self._dilation * _QUEUE_SECONDS))
        for index, host in enumerate(self.hosts):
            for namespace, device in ((host.name, host.interface), (slot.switch, f"port{index}")):
                slot.run("tc", "-n", namespace, "qdisc", action, "dev", device, "root", *bucket)
        self._shaped = asked is not None

    def _keep_window(self, is_kept: bool) -> None:
        """Sets whether TCP keeps its congestion window when a connection pauses."""
        if is_kept == self._keeps_window:
            return
        for host in self.hosts:
            self._owned().run(*host.command(["sh", "-c", f"echo {int(not is_kept)} > {_BEGINS_ANEW}"]))
        self._keeps_window = is_kept

    def _best(self, asked: float | None, sender: int, receiver: int) -> Speed:
        """The measurement nearest to the requested rate of up to 5, since a busy machine disturbs some."""
        speeds: list[Speed] = []
        while not speeds or (asked and len(speeds) < _ATTEMPTS and _error(speeds[-1], asked) > TOLERANCE):
            speeds.append(self._measure(asked, sender, receiver))
        return min(speeds, key=lambda speed: _error(speed, asked) if asked else 0.0)

    def _measure(self, asked: float | None, sender: int, receiver: int) -> Speed:
        slot, to = self._owned(), self.hosts[receiver]
        settle, window = _durations(asked)
        ours = [sys.executable, "-I", "-S", str(_STREAM)]
        source = subprocess.Popen(self.hosts[sender].command([*ours, "source", to.address]), stderr=subprocess.DEVNULL)
        try:
            sink = ["sink", to.address, slot.switch, f"port{receiver}", str(settle), str(window)]
            answer = run_command(*to.command([*ours, *sink]), seconds=COMMAND_SECONDS + settle + window)
        finally:
            source.kill()
            source.wait()
        return Speed(**json.loads(answer))

    def _owned(self) -> Slot:
        if self._slot is None:
            raise NetlabError("This lab is not up. Use it inside `with Netlab(...) as lab:`.")
        return self._slot


def why_not() -> str | None:
    """The reason why no lab can be created here, with a remedy; None if it can.

    Tries it, which takes about 0.2 s: creates the namespaces, links, bridge and token bucket of a lab and removes them.
    """
    try:
        check_tools()
        with contextlib.closing(Slot.claim_free()) as slot:
            try:
                (host,) = slot.build(1)
                slot.run("tc", "-n", host.name, "qdisc", "replace", "dev", host.interface, "root", *_bucket(1e8))
            finally:
                slot.clear()
    except NetlabError as error:
        return str(error)
    return None


def parse_rate(rate: str | None) -> float | None:
    """A rate in bit/s, or None for unshaped. Case does not matter.

    Raises:
      ValueError: If it is not a rate.
    """
    if rate is None or rate.lower() in ("none", "unshaped"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate.lower())
    if not match:
        raise ValueError(f"A rate is a number with kbit, mbit or gbit, such as 100mbit, or none; got {rate!r}.")
    asked = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
    if not _RATES[0] <= asked <= _RATES[1]:
        raise ValueError(f"A link has a rate from 100kbit to 100gbit, got {rate!r}.")
    return asked


def end_on_signals() -> None:
    """Makes SIGTERM and SIGINT end this program like `sys.exit`, so that its labs are removed.

    Further signals are ignored during the clean-up, also by its child processes.
    """
    both = (signal.SIGTERM, signal.SIGINT)

    def end(signum: int, _: object) -> None:
        # Python would report a signal that arrives while its handler is replaced.
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for each in both:
            signal.signal(each, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        sys.exit(128 + signum)

    for each in both:
        signal.signal(each, end)


def _burst_bytes(asked: float) -> int:
    return max(_MIN_BURST_BYTES, int(asked / 8 * _BURST_SECONDS))


def _bucket(asked: float, queue_seconds: float = _QUEUE_SECONDS) -> list[str]:
    latency = f"{round(1e3 * queue_seconds)}ms"
    return ["tbf", "rate", f"{int(asked)}bit", "burst", str(_burst_bytes(asked)), "latency", latency]


def _durations(asked: float | None) -> tuple[float, float]:
    """Seconds until the token bucket is empty and TCP has its full speed, and seconds to measure after that."""
    if asked is None:
        return 0.1, 0.4
    return max(0.1, 2 * _burst_bytes(asked) * 8 / asked), max(0.4, 400 * _FRAME_BYTES * 8 / asked)


def _error(speed: Speed, asked: float) -> float:
    return abs(speed.wire / asked - 1)


def _megabits(bits_per_second: float | None) -> str:
    return "unknown" if bits_per_second is None else f"{bits_per_second / 1e6:.1f} Mbit/s"


def up(hosts: int, rate: str | None) -> None:
    lab = Netlab(hosts, rate)
    check_tools()
    sweep(standing=True)
    with lab:
        for host in lab.hosts:
            print(host.name, host.address)
        asked = "unshaped" if parse_rate(rate) is None else f"asked for {rate}"
        print(f"{asked}: {_megabits(lab.wire_bits_per_second)} in frames, {_megabits(lab.bits_per_second)} of payload")
        lab.leave_standing()


def down() -> None:
    check_tools()
    for number in sweep(standing=True):
        owner = owner_of(number)
        who = "another process" if owner is None else f"process {owner}"
        print(f"Left tfd{number}: {who} is using it, and removes it when it ends.")


def execute(host: str, command: list[str]) -> None:
    check_tools()
    if not command:
        raise NetlabError(f"A command to run on {host} is missing: exec {host} -- ip address")
    argv = Host(host, "").command(command)
    os.execvp(argv[0], argv)


def main() -> None:
    parser = argparse.ArgumentParser(prog="netlab", description="Several hosts on one machine, see the module.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|down|exec")
    parse_up = commands.add_parser("up", help="put up a lab and leave it standing; replaces the one before")
    parse_up.add_argument("--hosts", type=int, default=2)
    parse_up.add_argument("--rate", default="1gbit", help="such as 100mbit, from 100kbit to 100gbit; or none")
    commands.add_parser("down", help="remove all labs that no process is using")
    parse_exec = commands.add_parser("exec", help="run a command on a host")
    parse_exec.add_argument("host")
    parse_exec.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        if options.command == "exec":
            execute(options.host, options.arguments[options.arguments[:1] == ["--"] :])
        end_on_signals()
        if options.command == "up":
            up(options.hosts, options.rate)
        else:
            down()
    except (NetlabError, ValueError) as error:
        sys.exit(f"netlab: {error}")


if __name__ == "__main__":
    main()
