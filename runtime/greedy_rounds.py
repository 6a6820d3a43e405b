"""Greedy decoding in rounds that a device runs by itself, with the host behind.

A decode pass on a GPU ends with the choice of its token, and leaves in the device's memory what the next pass
reads. So the host begins several rounds at once, and reads their tokens while the device goes on, which never
waits for the host. What it computed after the token that ends an answer is forgotten: the session's tokens
are those that were asked for, and the state of others is overwritten later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zllmc.runtime.sampling import SamplingError
from zllmc.zllm_ir.plan import CHOSEN

if TYPE_CHECKING:
    from zllmc.runtime.engine import Engine, Session

CHUNKS = 2  # begun when the host waits for the first of them: the device has work until it comes again
LONGEST = 8  # rounds of a chunk
# Seconds that a chunk takes the host, which begins it and waits for the one before. To read after each round
# would slow down a fast device, and a user would see a slow one stutter: short chunks grow, long ones shrink.
SHORT, LONG = 0.005, 0.02


class GreedyRounds:
    """Stands for a session in a loop of `decode`, with the tokens in place of the logits.

    No round begins where the session has `end` tokens or more, except one that was asked for. After each
    `step` the session holds exactly the tokens given. Where these are others than `step` gave, or the session
    was used in between, the device begins anew.
    """

    def __init__(self, engine: Engine, session: Session, end: int) -> None:
        self._engine = engine
        self._session = session
        self._end = end
        self._expected = (-1, -1)  # changes of the session, and the token that it gets
        self._next = 0  # position of the next round
        self._size = 1  # rounds of the next chunk
        # The positions of the rounds in flight, and what gives their tokens.
        self._chunks: deque[tuple[range, Callable[[], NDArray[np.int32]]]] = deque()
        self._tokens: deque[int] = deque()  # that were read and not given

    def step(self, id: int) -> int:
        """Append one token; the likeliest after it. Raises ContextFull, and SamplingError where logits aren't
        finite."""
        session = self._session
        if (session.changes, id) != self._expected:
            self._chunks.clear()
            self._tokens.clear()
        if not self._tokens:
            self._read_next(id)
        session.tokens.append(id)
        token = self._tokens.popleft()
        self._expected = session.changes, token
        if token < 0:
            raise SamplingError("there is no next token: the logits aren't finite numbers")
        return token

    def settle(self) -> None:
        """Read what was begun, before another pass. Called by Engine."""
        while self._chunks:
            self._read_chunk()

    def _read_next(self, id: int) -> None:
        """Read the tokens of the next chunk, with another one begun behind it."""
        begin = perf_counter()
        if not self._chunks:
            self._engine.start_rounds(self, self._session, id)
            self._next = len(self._session.tokens)
            self._begin_chunk()
        while self._engine.goes_on(self) and len(self._chunks) < CHUNKS and self._next < self._end:
            self._begin_chunk()
        self._read_chunk()
        seconds = perf_counter() - begin
        if seconds < SHORT:
            self._size = min(2 * self._size, LONGEST)
        elif seconds > LONG:
            self._size = max(self._size // 2, 1)

    def _begin_chunk(self) -> None:
        count = max(min(self._size, self._end - self._next), 1)
        self._chunks.append((range(self._next, self._next + count), self._engine.go_on(count)))
        self._next += count

    def _read_chunk(self) -> None:
        positions, read = self._chunks.popleft()
        chosen = read()
        self._tokens.extend(int(chosen[position % CHOSEN]) for position in positions)
