"""How the command line writes numbers, tables, and text that comes from files or models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zllmc.runtime.artifact import Manifest

# Control characters but tab and newline: a terminal would obey them.
_CONTROL = {code: "�" for code in (*range(9), *range(11, 32), *range(127, 160))}


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def count(number: int) -> str:
    """135M, 1.5B: as models are named."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return (
                f"{number / unit:.1f}".removesuffix(".0") + name
                if number < 10 * unit
                else f"{number / unit:.0f}{name}"
            )
    return str(number)


def headline(manifest: Manifest) -> str:
    """What is about to run and what it takes: `llama 135M Q4_1 | weights 0.09 GiB | KV 22,500 B/token`."""
    main_format = max(manifest.formats, key=lambda name: manifest.formats[name])
    return " | ".join(
        [
            f"{manifest.architecture} {count(manifest.parameters)} {main_format}",
            f"weights {gib(manifest.weights_bytes)}",
            f"KV {manifest.kv_bytes_per_token:,} B/token",
            f"context {manifest.context:,}",
        ]
    )


def harmless(text: str) -> str:
    """Text from a file or a model, with nothing in it that a terminal would obey."""
    return text.translate(_CONTROL)


def one_line(text: str, width: int = 80) -> str:
    """The beginning of a text from a file, on one line."""
    line = harmless(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def table(rows: Sequence[Sequence[str]], *, indent: str = "") -> str:
    """Columns aligned: numbers to the right, the rest to the left. The first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(_is_number(cell) for cell in column[1:]) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        for row in rows
    ]
    return "\n".join((indent + line).rstrip() for line in lines)


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-–" or cell == "n/a"
