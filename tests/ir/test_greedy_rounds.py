"""Greedy rounds on a device that is a formula: the tokens of single rounds, however streams are disturbed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllmc.runtime import greedy_rounds
from zllmc.runtime.greedy_rounds import CHUNKS, LONGEST, GreedyRounds
from zllmc.runtime.sampling import SamplingError
from zllmc.zllm_ir.plan import CHOSEN


def successor(id: int, position: int) -> int:
    return (7 * id + position) % 97


@dataclass
class FormulaSession:
    tokens: list[int] = field(default_factory=list)
    changes: int = 0


class FormulaEngine:
    """Chooses tokens as a device does: as late as it may, and in memory that later rounds write again."""

    def __init__(self) -> None:
        self.chosen = np.full(CHOSEN, -7, np.int32)
        self.begun = self.done = 0  # rounds, the latter read or forgotten
        self._rounds: GreedyRounds | None = None

    def start_rounds(self, rounds: GreedyRounds, session: FormulaSession, id: int) -> None:
        self.settle()
        self.done = self.begun
        session.changes += 1
        self._rounds, self._id, self._position = rounds, id, len(session.tokens)

    def settle(self) -> None:
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.settle()

    def goes_on(self, rounds: GreedyRounds) -> bool:
        return self._rounds is rounds

    def go_on(self, count: int) -> Callable[[], np.ndarray]:
        for _ in range(count):
            self._id, place = successor(self._id, self._position), self._position % CHOSEN
            self.chosen[place] = self._id
            self._position += 1
        self.begun += count
        assert self.begun - self.done <= CHUNKS * LONGEST <= CHOSEN
        until = self.begun

        def read() -> np.ndarray:
            self.done = max(self.done, until)
            return self.chosen

        return read


@given(
    st.lists(
        st.sampled_from(["step"] * 20 + ["other", "pass", "own pass", "truncate", "token"]),
        min_size=1,
        max_size=150,
    ),
    st.integers(1, 120),
    st.integers(0, 1 << 20),
)
def test_tokens_are_those_of_single_rounds(actions: list[str], end: int, seed: int) -> None:
    clock, now = random.Random(seed), 0.0

    def perf_counter() -> float:
        nonlocal now
        now += clock.choice([0.001, 0.004, 0.03])
        return now

    engine, session, other = FormulaEngine(), FormulaSession([1, 2, 3]), FormulaSession([4])
    rounds, of_other = (GreedyRounds(engine, it, end) for it in (session, other))  # type: ignore[arg-type]
    ids = {id(session): 5, id(other): 6}

    def step(rounds: GreedyRounds, session: FormulaSession) -> None:
        before, given = list(session.tokens), ids[id(session)]
        ids[id(session)] = rounds.step(given)
        assert ids[id(session)] == successor(given, len(before))
        assert session.tokens == [*before, given]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy_rounds, "perf_counter", perf_counter)
        for action in actions:
            match action:
                case "step":
                    step(rounds, session)
                case "other":
                    step(of_other, other)
                case "pass":  # of another session
                    engine.settle()
                case "own pass":
                    engine.settle()
                    session.tokens[-1] = 8
                    session.changes += 1
                case "truncate":
                    del session.tokens[2:]
                    session.changes += 1
                case "token":
                    ids[id(session)] = 9


def test_no_round_begins_past_the_end() -> None:
    engine, session = FormulaEngine(), FormulaSession([1, 2, 3])
    rounds = GreedyRounds(engine, session, 40)  # type: ignore[arg-type]
    id = 5
    while len(session.tokens) < 40:
        id = rounds.step(id)
    assert engine.begun == 37


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, LONGEST), (0.01, 1), (1.0, 1)])
def test_chunks_are_as_long_as_the_device_is_fast(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def perf_counter() -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(greedy_rounds, "perf_counter", perf_counter)
    engine, session = FormulaEngine(), FormulaSession([1])
    greedy, id = GreedyRounds(engine, session, 1000), 5  # type: ignore[arg-type]
    for count in range(1, 60):
        id = greedy.step(id)
        ahead = engine.begun - count
        assert ahead < CHUNKS * rounds
    assert ahead >= rounds


def test_logits_without_a_largest_end_the_rounds() -> None:
    engine, session = FormulaEngine(), FormulaSession([1])
    rounds = GreedyRounds(engine, session, 100)  # type: ignore[arg-type]
    engine.go_on = lambda count: lambda: np.full(CHOSEN, -1, np.int32)  # type: ignore[method-assign]
    with pytest.raises(SamplingError, match="the logits aren't finite numbers"):
        rounds.step(5)
    assert session.tokens == [1, 5]
