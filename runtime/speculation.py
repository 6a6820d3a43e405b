"""Draft-free speculation: guesses the next tokens from the text so far and checks them in one pass.

Decoding reads all weights for one token; a pass over a few tokens reads them once as well. So where the text
repeats something (a quotation, code that is edited, a list), what followed there is a good guess, and costs
nothing to make: prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). A pass
over the guess gives the logits after each of its tokens. They are handed out one by one as long as the caller
chooses the guessed tokens, so the choice, its random numbers, masks and stops are those of plain decoding.

Passes over one and over several tokens round differently. So a choice between two tokens that are all but
equally good may fall otherwise than in plain decoding, and, as time decides when to guess, than in the run
before.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zllmc.runtime.engine import Logits, Session

NGRAMS = (3, 2)  # lengths of the ends that are looked up, best first
DRAFTS = (3, 7)  # tokens of a guess: kernels take rows by fours, and the first is the token before the guess
UNMEASURED = 2  # how many times as long as the next smaller pass one is taken to last until it is measured
ALLOWANCE = 0.02  # part of the time in passes that wrong guesses may cost
FIRST_CREDIT, LARGEST_CREDIT = 3, 8  # plain passes: at the beginning, and saved up for bad stretches


class NgramIndex:
    """Where the last few tokens of a growing text occurred before."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → index of what followed its last occurrence
        self._match: int | None = None  # index of what followed the end of the text when it was there before

    def push(self, id: int) -> None:
        """Append a token; takes the same time however long the text is."""
        self._ids.append(id)
        self._match = None
        for n in NGRAMS:
            if len(self._ids) >= n:
                ngram = tuple(self._ids[-n:])
                earlier = self._after.get(ngram)
                self._match = earlier if self._match is None else self._match
                self._after[ngram] = len(self._ids)

    def draft(self, count: int) -> list[int]:
        """`count` tokens that may come next, or none. Where the earlier place is so near that its
        continuation runs into the end of the text, the text is taken to go on repeating itself."""
        if self._match is None:
            return []
        earlier = self._ids[self._match : self._match + count]
        return [earlier[i % len(earlier)] for i in range(count)]


class Speculation:
    """Stands for a session in a loop of `decode`: the same logits, some of them from passes over guesses.

    `prompt` are the tokens before the first that `decode` gets, and `limit` is how many of the following may
    be chosen: nothing is computed beyond. After each `decode` the session holds exactly the tokens given.

    A guess is made where it promises to save time: how often the index is right is seen at every token, for
    nothing, and how long passes take is measured. Guesses are paid from a credit of seconds in case they go
    wrong all the same. An accepted token earns a plain pass, a guess costs what its pass takes longer than a
    plain one, and plain passes add ALLOWANCE of their time.
    """

    def __init__(self, session: Session, prompt: Iterable[int], limit: int) -> None:
        self.drafted = 0  # tokens guessed so far
        self.accepted = 0  # guessed tokens that were chosen, and saved a pass each
        self._session = session
        self._index = NgramIndex()
        for id in prompt:
            self._index.push(id)
        self._left = limit  # tokens to choose
        self._draft: list[int] = []  # what is left of the guess
        self._rows: list[Logits] = []  # logits after each of these
        self._chance = 0.5  # that the token which the index gives is chosen
        self._plain = 0.0  # seconds of a plain pass; 0 before the first
        self._seconds: dict[int, float] = {}  # of a pass over a guess of so many tokens
        self._credit = 0.0

    def decode(self, id: int) -> Logits:
        """Append one token; its logits (vocab,), valid until the next pass."""
        for expected in self._index.draft(1):
            self._chance += ((expected == id) - self._chance) / 8
        self._index.push(id)
        self._left -= 1
        if self._draft and self._draft.pop(0) == id:
            self.accepted += 1
            self._earn(self._plain)
            self._session.accept()
            return self._rows.pop(0)
        self._draft = self._index.draft(self._worthwhile())
        return self._check(id) if self._draft else self._decode(id)

    def _decode(self, id: int) -> Logits:
        begin = perf_counter()
        logits = self._session.decode(id)
        seconds = perf_counter() - begin
        if not self._plain:
            self._plain = seconds
            self._credit = FIRST_CREDIT * seconds
        self._plain += (_undisturbed(seconds, self._plain) - self._plain) / 4
        self._earn(ALLOWANCE * seconds)
        return logits

    def _check(self, id: int) -> Logits:
        """One pass over `id` and the guess."""
        count = len(self._draft)
        begin = perf_counter()
        # A copy: the caller may use other sessions before it has chosen all these tokens.
        self._rows = [*self._session.verify([id, *self._draft]).copy()]
        expected = self._expected(count)
        seconds = _undisturbed(perf_counter() - begin, expected)
        self._seconds[count] = (expected + seconds) / 2
        self._credit -= seconds - self._plain
        self.drafted += count
        return self._rows.pop(0)

    def _worthwhile(self) -> int:
        """How many tokens to guess now: the number that promises most, 0 if none promises to save time."""
        best, most = 0, 0.0
        for count in DRAFTS if self._plain else ():
            extra = self._expected(count) - self._plain
            accepted = sum(self._chance**number for number in range(1, count + 1))
            gain = accepted * self._plain - extra
            if count < self._left and extra <= self._credit and gain > most:
                best, most = count, gain
            if count not in self._seconds:
                break  # larger ones are judged by this one
        return best

    def _expected(self, count: int) -> float:
        """Seconds of a pass over a guess of `count` tokens, measured or by the next smaller guess."""
        if count in self._seconds:
            return self._seconds[count]
        at = DRAFTS.index(count)
        return UNMEASURED * (self._expected(DRAFTS[at - 1]) if at else self._plain)

    def _earn(self, seconds: float) -> None:
        self._credit = min(self._credit + seconds, LARGEST_CREDIT * self._plain)


def _undisturbed(seconds: float, average: float) -> float:
    """The time of a pass, without most of what another process took of it."""
    return min(seconds, 2 * average)
