"""Speculation over models that are tables: the same stream as without it, in fewer passes, at little risk."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from table_model import BOS, EOS, VOCAB, tokenizer
from zllmc.runtime import speculation
from zllmc.runtime.generation import PromptError, generate
from zllmc.runtime.sampling import GREEDY, SamplingParams
from zllmc.runtime.speculation import DRAFTS, NGRAMS, NgramIndex, Speculation

LETTERS = b"abcd "
TOKENIZER = tokenizer()
UNMEASURED = speculation.UNMEASURED


@dataclass
class LettersSession:
    """Says letters; which one, depends on the two tokens before. Checks how sessions may be used."""

    engine: "LettersEngine"
    tokens: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    passes: int = 0

    def prefill(self, ids):
        return self._pass(ids)[-1]

    def decode(self, id):
        return self._pass([id])[-1]

    def verify(self, ids):
        assert len(ids) > 1
        rows = self._pass(ids)
        kept = len(self.tokens) - len(ids) + 1
        self.tokens, self.ahead = self.tokens[:kept], self.tokens[kept:]
        return rows

    def accept(self):
        self.tokens.append(self.ahead.pop(0))

    def truncate(self, length):
        assert 0 <= length <= len(self.tokens)
        self.tokens, self.ahead = self.tokens[:length], []

    def _pass(self, ids):
        assert len(self.tokens) + len(ids) <= self.engine.manifest.context
        self.ahead = []
        self.passes += 1
        rows = self.engine.logits[: len(ids)]  # overwritten by the next pass, as the real ones
        for row, id in zip(rows, ids, strict=True):
            before = self.tokens[-1] if self.tokens else BOS
            self.tokens.append(int(id))
            row[:] = self.engine.rows[before % 8, id % 8]
        return rows


class LettersEngine:
    """`end` is how likely an answer is to end at each token."""

    def __init__(self, seed: int = 0, context: int = 400, end: float = -3.0) -> None:
        self.manifest = SimpleNamespace(context=context, vocab=VOCAB)
        self.candidates = 0
        self.tokenizer = TOKENIZER
        self.logits = np.zeros((context, VOCAB), np.float32)
        random = np.random.default_rng(seed)
        self.rows = np.full((8, 8, VOCAB), -50, np.float32)
        self.rows[:, :, list(LETTERS)] = 3 * random.standard_normal((8, 8, len(LETTERS)))
        self.rows[:, :, EOS] = end

    def session(self) -> LettersSession:
        return LettersSession(self)


@pytest.fixture(autouse=True, scope="module")
def every_guess_is_worth_a_try() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "perf_counter", itertools.count().__next__)
        patch.setattr(speculation, "UNMEASURED", 0)
        yield


def stream(engine, prompt, *, close_at=None, cancel_at=None, disturb=False, **options):
    """All that can be seen of a stream: text, ids, finish and the session's tokens after each step."""
    session, other, cancel = engine.session(), engine.session(), Event()
    chunks = generate(engine, prompt, session=session, cancel=cancel, **options)
    seen = []
    for number, chunk in enumerate(chunks):
        seen.append((chunk.text, chunk.ids, chunk.finish, list(session.tokens)))
        if number == close_at:
            chunks.close()
            break
        if number == cancel_at:
            cancel.set()
        if disturb:
            other.truncate(0)
            other.prefill([1, 2, 3])
    return [*seen, list(session.tokens)], chunk.stats, session


def no_double_letters(generated):
    """A fence: depends on what was generated."""
    mask = np.ones(VOCAB, bool)
    mask[generated[-1:]] = False
    return mask


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 3]),
    repeat_penalty=st.sampled_from([1.0, 1.2]),
)


@given(
    seed=st.integers(0, 1 << 20),
    prompt=st.text("abcd ", min_size=1, max_size=60),
    sampling=SAMPLING,
    end=st.sampled_from([-50.0, -2.0]),
    context=st.integers(70, 200),
    max_tokens=st.none() | st.integers(1, 90),
    stop=st.lists(st.text("abcd ", min_size=1, max_size=4), max_size=2),
    fence=st.sampled_from([None, no_double_letters]),
    close_at=st.none() | st.integers(0, 60),
    cancel_at=st.none() | st.integers(0, 60),
    disturb=st.booleans(),
)
def test_a_stream_is_the_same_with_speculation(seed, prompt, end, context, **options):
    engine = LettersEngine(seed, context, end)
    expected, _, plain = stream(engine, prompt, seed=seed, **options)
    found, stats, session = stream(engine, prompt, seed=seed, speculate="ngram", **options)
    assert found == expected
    assert session.passes == plain.passes - stats.accepted
    assert 0 <= stats.accepted <= stats.drafted


def test_a_repetition_takes_few_passes():
    engine = LettersEngine(end=-50)
    _, stats, session = stream(engine, "ab", sampling=GREEDY, max_tokens=300, speculate="ngram")
    assert stats.tokens == 300 and session.passes < 60
    assert stats.accepted > 0.9 * stats.drafted


def test_nothing_is_guessed_unless_asked():
    _, stats, _ = stream(LettersEngine(end=-50), "abab", sampling=GREEDY, max_tokens=50)
    assert stats.drafted == stats.accepted == 0


def test_an_unknown_kind_of_speculation_is_an_error_at_once():
    with pytest.raises(PromptError, match="speculate is 'magic'"):
        generate(LettersEngine(), "ab", speculate="magic")


# --- the index -------------------------------------------------------------------------------------------


def draft_by_search(ids, count):
    """What NgramIndex.draft says, found by looking through the whole text."""
    for n in NGRAMS:
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[len(ids) - n :]:
                earlier = ids[end : end + count]
                return (earlier * count)[:count]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_a_guess_is_what_followed_the_longest_latest_match(ids, count):
    index = NgramIndex()
    for id in ids:
        index.push(id)
    assert index.draft(count) == draft_by_search(ids, count)


# --- time ------------------------------------------------------------------------------------------------


@dataclass
class TimedSession:
    """Passes that take a second for one token, and `cost` seconds for guesses of so many tokens."""

    cost: dict[int, float]
    now: float = 0.0

    def decode(self, id):
        self.now += 1.0
        return np.zeros(1, np.float32)

    def verify(self, ids):
        self.now += self.cost[len(ids) - 1]
        return np.zeros((len(ids), 1), np.float32)

    def accept(self):
        pass


def time_of(monkeypatch, cost, choose, tokens):
    """Seconds for `tokens` tokens, each chosen by the guess that plain lookup would make of it."""
    session = TimedSession(dict(zip(DRAFTS, cost, strict=True)))
    monkeypatch.setattr(speculation, "perf_counter", lambda: session.now)
    monkeypatch.setattr(speculation, "UNMEASURED", UNMEASURED)
    guide = NgramIndex()
    decoder = Speculation(session, [], tokens + 1)
    for number in range(tokens):
        id = choose(number, guide.draft(1))
        guide.push(id)
        decoder.decode(id)
    return session.now, decoder


COSTS = [(1.0, 1.0), (1.5, 2.0), (2.0, 4.0), (3.0, 5.0), (4.0, 8.0)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("tokens", [200, 2000])
def test_guesses_that_always_fail_cost_less_than_3_percent(monkeypatch, cost, tokens):
    seconds, decoder = time_of(monkeypatch, cost, lambda _, guess: 1 - guess[0] if guess else 0, tokens)
    assert decoder.accepted == 0
    assert seconds <= 1.03 * tokens


@pytest.mark.parametrize("cost", COSTS)
def test_guesses_that_turn_wrong_after_a_good_stretch_cost_little(monkeypatch, cost):
    def choose(number, guess):
        right = guess[0] if guess else number % 2
        return right if number < 500 else 1 - right

    seconds, _ = time_of(monkeypatch, cost, choose, 500)
    total, _ = time_of(monkeypatch, cost, choose, 1500)
    assert total - seconds <= 1.03 * 1000
    assert total <= 1.03 * 1500


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("every", range(2, 20))
def test_text_that_keeps_deceiving_costs_little(monkeypatch, cost, every):
    """Right long enough that guesses look worthwhile, then wrong."""

    def choose(number, guess):
        right = guess[0] if guess else number % 7
        return 1 - right if number % every == 0 else right

    seconds, _ = time_of(monkeypatch, cost, choose, 300)
    assert seconds <= 1.03 * 300


@pytest.mark.parametrize("cost", COSTS[:-1])
def test_good_guesses_pay(monkeypatch, cost):
    seconds, _ = time_of(monkeypatch, cost, lambda number, _: number % 20, 500)
    assert seconds < 0.9 * cost[1] / (1 + DRAFTS[1]) * 500 + 100


def test_one_slow_pass_does_not_end_speculation(monkeypatch):
    session = TimedSession(dict(zip(DRAFTS, (1.5, 2.0), strict=True)))
    monkeypatch.setattr(speculation, "perf_counter", lambda: session.now)
    monkeypatch.setattr(speculation, "UNMEASURED", UNMEASURED)
    decoder = Speculation(session, [], 1000)
    for number in range(200):
        decoder.decode(number % 5)
    session.cost = dict.fromkeys(DRAFTS, 100.0)
    before = decoder.drafted
    while decoder.drafted == before:
        decoder.decode(number := (number + 1) % 5)
    session.cost = dict(zip(DRAFTS, (1.5, 2.0), strict=True))
    before = decoder.drafted
    for _ in range(100):
        decoder.decode(number := (number + 1) % 5)
    assert decoder.drafted - before > 80
