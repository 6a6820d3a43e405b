"""The command line as processes, and on a terminal."""

import os
import pathlib
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-m", "zllmc.cli"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def process(*arguments: Any, stdin: str = "") -> Result:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, encoding="utf-8", timeout=120
    )
    return Result(done.returncode, done.stdout, done.stderr)


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: Any) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execv(COMMAND[0], [*COMMAND, *map(str, arguments)])
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.file], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen[-500:]!r}"
            self.seen += os.read(self.file, 4096).decode(errors="replace")
        self.seen = self.seen[self.seen.index(text) + len(text) :]

    def type(self, keys: str) -> None:
        os.write(self.file, keys.encode())

    def finish(self) -> int:
        with suppress(OSError):  # the terminal is gone
            while data := os.read(self.file, 4096):
                self.seen += data.decode(errors="replace")
        os.close(self.file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def cached(cache: pathlib.Path) -> set[pathlib.Path]:
    """The artifacts in the cache folder."""
    return set((cache / "models").glob("*.zllm"))
