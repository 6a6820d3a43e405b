"""Options that several commands of `zllmc.cli` take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

model_argument = click.argument("model", type=click.Path(path_type=Path))
threads_option = click.option(
    "--threads", type=click.IntRange(1), help="Threads to compute with.  [default: one per physical core]"
)
speculate_option = click.option(
    "--speculate",
    type=click.Choice(["ngram"]),
    help="Guess repetitions of earlier text and check several tokens at once.  [default: off]",
)
device_option = click.option(
    "--device",
    type=click.Choice(["emulate", "eager"]),
    help="For a GPU's artifact: emulate it on the CPU, or launch kernel by kernel.  [default: replay on it]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def compile_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that decide what a model is compiled to."""
    for option in (
        click.option(
            "--kv",
            type=click.Choice(["f16", "q8"]),
            help="How to keep keys and values; q8 takes half the memory, for long contexts.  [default: f16]",
        ),
        click.option(
            "--context",
            type=click.IntRange(1),
            metavar="N",
            help="Tokens that a sequence may reach.  [default: 8192, or the model's if smaller]",
        ),
        click.option(
            "--target",
            metavar="TARGET",
            help="What to compile for; see `zllmc targets`.  [default: this machine]",
        ),
    ):
        command = option(command)
    return command


def integers(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Parses a list like 1,2,4."""
    try:
        return tuple(map(int, value.split(","))) if value is not None else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers like 1,2,4") from None
