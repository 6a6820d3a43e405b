"""The execution plan: what an artifact holds beside kernels and weights, and what the runtime replays.

Plain data (msgspec), no compiler types: importing this module costs the runtime nothing. Offsets and sizes
are bytes. Every launch names its kernel by symbol and its arguments by buffer, so a driver can resolve the
whole plan to addresses once and replay it with no work per launch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

CONTROL_TOKENS, CONTROL_CACHED, CONTROL_FIRST_ROW, CONTROL_BEST = range(4)
# i32 words of a control block: tokens T, cached length S, first row with logits; not 0 where of the largest
# logits only the first is wanted.
CONTROL_WORDS = 16
CHOSEN = 64  # tokens chosen on the device that it keeps: each at its round's S modulo this


class Buffer(msgspec.Struct, frozen=True):
    """A region of memory with an owner and a lifetime.

    `weights`: the mapped weight file. `arena`: scratch of one pass, planned by offset. `state`: one layer's
    KV cache, owned by a session. `io`: what the host reads and writes: `tokens`, `positions`, `logits`, and
    `control`, the control block of the pass and then one for each slot of a batch. Where decode rounds choose
    tokens, also `candidates` and `candidate_ids`, the largest logits, and `chosen`. Such a round ends by
    writing what the next one reads: its token, and the cached length S, which is its position.
    """

    name: str
    kind: Literal["weights", "arena", "state", "io"]
    bytes: int


class Pointer(msgspec.Struct, frozen=True, array_like=True):
    """An argument: address `offset` bytes into buffer number `buffer`."""

    buffer: int
    offset: int


class Launch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kernel call on every thread: kernel(thread, threads, *args). Integers are passed as they are.

    `barrier`: all threads must have finished this launch before any starts the next. `slot`: of a batch, the
    sequence whose state buffers this launch is given. `pieces`: into so many calls the work may be cut with
    little lost, kernel(piece, pieces, *args), which threads take one after another; 0 is unknown.

    On a GPU: kernel<<<grid, threads>>>(*args), where all arguments are pointers; `grid` is blocks in x and y,
    `threads` those of a block. With `rows`, a block takes that many of the pass's T tokens, and the grid has
    ceil(T / rows) blocks in y; `grid` is then the largest.
    """

    kernel: str
    args: tuple[Pointer | int, ...]
    barrier: bool = True
    slot: int | None = None
    pieces: int = 0
    grid: tuple[int, int] = (1, 1)
    threads: int = 0
    rows: int = 0


class EntryPoint(msgspec.Struct, frozen=True):
    """A whole model pass over 1 … max_tokens tokens: of one sequence, or one of each slot of a batch."""

    name: str  # "decode" | "prefill" | "batch"
    max_tokens: int
    max_rows: int  # rows of logits that fit
    launches: tuple[Launch, ...]


class Plan(msgspec.Struct, frozen=True):
    """All buffers and entry points of an artifact."""

    buffers: tuple[Buffer, ...]
    entries: tuple[EntryPoint, ...]

    @property
    def max_batch(self) -> int:
        """Sequences of which one pass can decode a token each."""
        return max((entry.max_tokens for entry in self.entries if entry.name == "batch"), default=1)
