"""Formats bytes of memory as a table: a line for each kind of memory, a column for each way to train."""

from collections.abc import Mapping

from tfdist.readable_numbers import size


def memory_table(columns: Mapping[str, Mapping[str, int]]) -> str:
    """Returns a table of bytes, with a last line of totals. Kinds of memory that no column has are left out.

    Args:
      columns: The bytes of each kind of memory, by the name of the column. All columns have the same kinds.
    """
    rows = {kind: [column[kind] for column in columns.values()] for kind in next(iter(columns.values()))}
    shown = {kind.replace("_", " "): values for kind, values in rows.items() if any(values)}
    shown["total"] = [sum(column.values()) for column in columns.values()]
    lines = [f"{'on each replica':24}" + "".join(f"{name:>14}" for name in columns)]
    lines += [f"{kind:24}" + "".join(f"{size(value):>14}" for value in values) for kind, values in shown.items()]
    return "\n".join(lines)
