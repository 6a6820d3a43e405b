"""Generates text: a prompt in, a stream of chunks out, which the caller may stop at any of them.

Every step is one pass over the model followed by one choice of a token, which the device makes where it can,
some passes ahead of the stream. The session always holds exactly the tokens in `session.tokens`, so that a
stopped stream leaves it ready for the next prompt, of which only what differs from those tokens is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from zllmc.runtime.greedy_rounds import GreedyRounds
from zllmc.runtime.sampling import Sampler, SamplingParams
from zllmc.runtime.speculation import Speculation
from zllmc.runtime.text import StopMatcher
from zllmc.zllm_ir.errors import ZllmcError

if TYPE_CHECKING:
    from zllmc.runtime.engine import Engine, Logits, Session

LOOP_TOKENS = 512  # an answer whose last so many tokens only repeat a cycle will never end
LOOP_PERIOD = 64  # the longest cycle that is looked for
PREFILL_STEP = 512  # tokens of a prompt between two looks at `cancel`

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
Fence = Callable[[Sequence[int]], NDArray[np.bool_] | None]
Finish = Literal["stop", "length", "repetition", "cancelled"]


class PromptError(ZllmcError):
    """A prompt that is empty, too long, or in a form that the model has no template for."""


@dataclass(frozen=True)
class Stats:
    """What a stream has done so far. Seconds are wall time in the model and the sampler."""

    prompt_tokens: int
    reused_tokens: int = 0  # of the prompt, found in the session
    tokens: int = 0  # generated, with the one that ended the answer
    prefill_seconds: float = 0.0  # until the first token was chosen
    decode_seconds: float = 0.0  # for all tokens after the first
    drafted: int = 0  # tokens that speculation guessed
    accepted: int = 0  # of these, the right ones: each saved a pass

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed in a second; 0 before the first token."""
        computed = self.prompt_tokens - self.reused_tokens if self.tokens else 0
        return computed / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Tokens generated in a second, the first not counted."""
        return max(self.tokens - 1, 0) / max(self.decode_seconds, 1e-9)


@dataclass(frozen=True)
class Chunk:
    """What one step adds: the chosen token, and the text that is certain now, which may be empty.

    `finish` is set in the last chunk only: "stop" after a token that ends an answer (it is in `ids`, and has
    no text) or before a stop string; "length" at `max_tokens` or when the context is full; "repetition" when
    the last LOOP_TOKENS tokens only repeat a cycle; "cancelled".
    """

    text: str
    ids: tuple[int, ...]
    stats: Stats
    finish: Finish | None = None


def generate(
    engine: Engine,
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    session: Session | None = None,
    fence: Fence | None = None,
    cancel: Event | None = None,
    speculate: Literal["ngram"] | None = None,
) -> Iterator[Chunk]:
    """Streams the model's continuation of `prompt`, up to `max_tokens` or the end of the context.

    `prompt` is text to continue, chat messages for the model's template, or token ids as they are. A
    `session` keeps its tokens from one call to the next: the longest common beginning isn't computed again.
    A `stop` string, or the first of several, ends the answer before itself.
    `fence` gets the generated ids and gives the tokens (vocab,) that may come next, or None for any. Closing
    the iterator or setting `cancel` (from any thread) ends the stream after at most one more pass, or the few
    that a device has begun.
    `speculate` "ngram" guesses repetitions and checks them several tokens at a time (see
    `zllmc.runtime.speculation`): the same tokens, but for rounding, in fewer passes.

    Raises PromptError, TextError and SamplingError for arguments that can't be used, before any pass.
    """
    ids, is_chat = prompt_ids(engine, prompt)
    context = engine.manifest.context
    if not ids:
        raise PromptError("the prompt is empty: there is nothing to continue")
    if len(ids) > context:
        raise PromptError(f"the prompt has {len(ids):,} tokens, but the context holds {context:,}")
    vocab = engine.manifest.vocab
    if not 0 <= min(ids) <= max(ids) < vocab:
        wrong = next(id for id in ids if not 0 <= id < vocab)
        raise PromptError(f"the prompt has the token id {wrong}, but the vocabulary has {vocab:,} tokens")
    for name, number, least in (("max_tokens", max_tokens, 1), ("seed", seed, 0)):
        if number is not None and (not isinstance(number, Integral) or number < least):
            raise PromptError(f"{name} is {number!r}; it must be a whole number, {least} or more")
    if speculate not in (None, "ngram"):
        raise PromptError(f"speculate is {speculate!r}; it must be 'ngram' or None")
    return _steps(
        engine,
        ids,
        min(max_tokens or context, context - len(ids) + 1),  # the last token needs no place in the cache
        Sampler(sampling or SamplingParams(), seed),
        _Text(engine, StopMatcher([stop] if isinstance(stop, str) else stop), continues=not is_chat),
        engine.session() if session is None else session,
        fence,
        cancel or Event(),
        speculate is not None,
    )


def prompt_ids(engine: Engine, prompt: Prompt) -> tuple[list[int], bool]:
    """The prompt's token ids, with BOS once where the model wants it, and whether it was a conversation."""
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt), False
    ids: list[int] = []
    messages: list[Mapping[str, Any]] = []
    for item in prompt:
        if isinstance(item, Mapping):
            messages.append(item)
        else:
            ids.append(int(item))
    if not messages:
        return ids, False
    if ids:
        raise PromptError("the prompt mixes messages and token ids")
    if engine.chat_template is None:
        raise PromptError("the model has no chat template: give the prompt as text, not as messages")
    return engine.tokenizer.encode_prompt(engine.chat_template.render(messages)), True


def _steps(
    engine: Engine,
    prompt: list[int],
    limit: int,
    sampler: Sampler,
    text: _Text,
    session: Session,
    fence: Fence | None,
    cancel: Event,
    speculate: bool,
) -> Iterator[Chunk]:
    begin = time.perf_counter()
    # One token at least is left to compute, because its logits are needed.
    reused = min(common_length(session.tokens, prompt), len(prompt) - 1)
    session.truncate(reused)
    stats = Stats(len(prompt), reused)
    history, generated = [*prompt], list[int]()
    logits = None
    for at in range(reused, len(prompt), PREFILL_STEP):
        if cancel.is_set():
            break
        logits = session.prefill(prompt[at : at + PREFILL_STEP])

    speculation = Speculation(session, prompt, limit) if speculate else None

    def sample(logits: Logits) -> int:
        return sampler.sample(logits, history, fence(generated) if fence else None)

    if speculation is not None:
        step = _sampling(speculation.decode, sample)
    elif fence is not None or not engine.candidates:
        step = _sampling(session.decode, sample)
    else:
        step = _step_on_device(engine, session, sampler, sample, len(prompt) + limit - 1)

    id = None if logits is None or cancel.is_set() else sample(logits)
    while id is not None and not cancel.is_set():
        history.append(id)
        generated.append(id)
        seconds = time.perf_counter() - begin
        begin += seconds
        if len(generated) == 1:
            stats = replace(stats, tokens=1, prefill_seconds=seconds)
        else:
            stats = replace(stats, tokens=len(generated), decode_seconds=stats.decode_seconds + seconds)
        if speculation is not None:
            stats = replace(stats, drafted=speculation.drafted, accepted=speculation.accepted)

        if id in engine.tokenizer.eog_ids:
            yield Chunk(text.finish(), (id,), stats, "stop")
            return
        piece, stopped = text.push(id)
        if stopped:
            yield Chunk(piece, (id,), stats, "stop")
            return
        if len(generated) == limit:
            yield Chunk(piece + text.finish(), (id,), stats, "length")
            return
        if len(generated) % LOOP_PERIOD == 0 and is_loop(generated):
            yield Chunk(piece + text.finish(), (id,), stats, "repetition")
            return
        yield Chunk(piece, (id,), stats)
        begin = time.perf_counter()  # the caller's time isn't the model's
        if cancel.is_set():
            break
        id = step(id)
    yield Chunk(text.finish(), (), stats, "cancelled")


def _sampling(decode: Callable[[int], Logits], sample: Callable[[Logits], int]) -> Callable[[int], int]:
    """Appends a token, and gives the next from all logits."""
    return lambda id: sample(decode(id))


def _step_on_device(
    engine: Engine, session: Session, sampler: Sampler, sample: Callable[[Logits], int], end: int
) -> Callable[[int], int]:
    """Appends a token, and gives the next from as few logits as decide it: what `sample` gives from all. The
    session gets `end` tokens at most."""
    if sampler.params.is_greedy:
        return GreedyRounds(engine, session, end).step
    if not sampler.params.may_need_only(engine.candidates):
        return _sampling(session.decode, sample)

    def step(id: int) -> int:
        token = sampler.sample_largest(*session.decode_largest(id))
        return sample(session.last_logits()) if token is None else token

    return step


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the last LOOP_TOKENS ids repeat a cycle of at most LOOP_PERIOD."""
    if len(ids) < LOOP_TOKENS:
        return False
    last = np.array(ids[-LOOP_TOKENS:])
    return any(np.array_equal(last[period:], last[:-period]) for period in range(1, LOOP_PERIOD + 1))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


class _Text:
    """Turns tokens into text that is complete and holds no beginning of a stop string."""

    def __init__(self, engine: Engine, stops: StopMatcher, *, continues: bool) -> None:
        self._decoder = engine.tokenizer.stream(continues=continues)
        self._stops = stops

    def push(self, id: int) -> tuple[str, bool]:
        return self._stops.push(self._decoder.push(id))

    def finish(self) -> str:
        """The text held back; at the end of a stream."""
        piece, stopped = self._stops.push(self._decoder.flush())
        return piece if stopped else piece + self._stops.flush()
