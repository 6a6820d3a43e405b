"""What the commands share at the terminal: progress on stderr, Ctrl-C that stops an answer, safe output."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

from zllmc.wording import harmless

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress callback for compiling: a bar for each stage, on stderr if that is a terminal.

    The first Ctrl-C raises KeyboardInterrupt, others are ignored: they would interrupt what clears away.
    """

    def on_interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, on_interrupt))
        yield _bars(stack) if sys.stderr.isatty() else lambda stage, done, total: None


def _bars(stack: ExitStack) -> Callable[[str, int, int], None]:
    """Shows the bars from the first report on; until then the terminal isn't touched."""
    bars: Progress | None = None
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int) -> None:
        nonlocal bars
        if bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description:10}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            bars = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    return show


@contextmanager
def interruptible() -> Iterator[Event]:
    """Inside, the first Ctrl-C sets the event instead of raising, so that a pass is never torn apart in the
    middle; the second raises KeyboardInterrupt."""
    stop = Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    """Writes a piece of an answer to stdout, at once."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Writes a line that isn't part of an answer, to stderr."""
    print(harmless(text), file=sys.stderr, flush=True)
