"""Argument types of the command line: numbers, sizes and names, with errors that argparse prints."""

import argparse
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

BINARY = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_COUNTS = {"k": 10**3, "M": 10**6, "B": 10**9}
_BIT_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class CommandParser(argparse.ArgumentParser):
    """The argument parser of the `tfdist` commands. Its errors suggest a similar option for each unknown option."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses like the base class, and stores the arguments so that `error` can suggest options."""
        self._given = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends this process with exit code 2 and a message that suggests an option for each unknown option."""
        doubtful: Sequence[str] = ()
        if message.startswith("unrecognized arguments: "):
            doubtful = message.split()
        elif message.startswith("the following arguments are required: "):
            doubtful = self._given  # Argparse may have used the value of a misspelt option as the script.
        super().error(message + self._suggestions(doubtful))

    def options(self) -> list[str]:
        """Returns all options of the command, such as "--workers" and "-n"."""
        columns = re.findall(r"^  -.*?(?=  |$)", self.format_help(), re.MULTILINE)
        return re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(columns))

    def _suggestions(self, arguments: Sequence[str]) -> str:
        """Returns a text that suggests the most similar option for each unknown option in `arguments`."""
        known = self.options()
        named = [each.partition("=")[0] for each in arguments if each.startswith("-")]
        unknown = [
            name for name in dict.fromkeys(named) if re.fullmatch(r"--?[a-z][a-z-]*", name) and name not in known
        ]
        near = [(name, difflib.get_close_matches(name, known, 1)) for name in unknown]
        return "".join(f"; did you mean {found[0]} instead of {name}?" for name, found in near if found)


def stray_option(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """Returns the first of the options `names` in `arguments`, with its value, to report it as misplaced; or None."""
    for place, each in enumerate(arguments):
        if each.partition("=")[0] in names:
            following = arguments[place + 1 : place + 2]
            return " ".join([each, *(value for value in following if "=" not in each and not value.startswith("-"))])
    return None


def _whole_number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, got {text}")
    return value


count = functools.partial(_whole_number, least=0)
positive_int = functools.partial(_whole_number, least=1)


def _time(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a number of {unit} of at least 0, got {text}")
    return value


seconds = functools.partial(_time, unit="seconds")
milliseconds = functools.partial(_time, unit="milliseconds")


def _quantity(text: str, units: Mapping[str, int]) -> int:
    """Parses a command line value that is a whole number with an optional unit: "64KiB", "2.5M", "1000"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match and match[2] in ("", *units):
        value = float(match[1]) * units.get(match[2], 1)
        if value >= 1 and value.is_integer():
            return int(value)
    raise argparse.ArgumentTypeError(f"needs a whole number, with or without a unit ({', '.join(units)}), got {text!r}")


byte_size = functools.partial(_quantity, units=BINARY | DECIMAL)  # An amount of memory: "16GB", "512 MiB".
parameters = functools.partial(_quantity, units=_COUNTS)  # The number of parameters of a model: "25M".


def sizes(text: str) -> tuple[int, ...]:
    """Parses the option for sizes of float32 tensors, in bytes: "1KiB,4MB"."""
    found = sorted({_quantity(part, BINARY | DECIMAL) for part in text.split(",")})
    odd = [size for size in found if size % 4]
    if odd:
        raise argparse.ArgumentTypeError(f"needs multiples of 4 bytes, the size of a float32, got {odd[0]} B")
    return tuple(found)


def names(text: str) -> tuple[str, ...]:
    """Parses an option with names of codecs and drops duplicates: "none,int8"."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def bit_rate(text: str) -> float:
    """Parses the option for a network's bits per second: "100mbit", "2.5 Gbit/s"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]?bit)(?:/s|ps)?", text.strip().lower())
    value = float(match[1]) * _BIT_RATES[match[2]] if match else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"needs a rate such as 100mbit or 10gbit, got {text}")
    return value
