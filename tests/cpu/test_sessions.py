"""Sessions: many over one engine, appended to, cut short, filled to the end, beyond windows and passes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from models import DENSE, logits, nmse, open_file
from zllmc.passes.pipeline import MAX_TOKENS
from zllmc.runtime.engine import ContextFull, Engine, Session
from zllmc.zllm_ir.errors import ZllmcError

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

NAME = "archs/llama-dense"
CONTEXT = 3 * MAX_TOKENS + 64
# Plain weights with an f16 cache, here and in the interpreter: what is left is the order of sums, and keys
# and values between two f16 numbers that then round the other way.
LIMIT = 1e-6


@pytest.fixture(scope="module")
def engine(compiled: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.open(compiled(NAME), threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def long_engine(compiled: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.open(compiled(NAME, context=CONTEXT), threads=2) as engine:
        yield engine


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 128, count).tolist()
    return found


def greedy(session: Session, prompt: list[int]) -> Iterator[int]:
    """Greedy tokens without end."""
    row = session.prefill(prompt)
    while True:
        yield (token := int(row.argmax()))
        row = session.decode(token)


def take(count: int, tokens: Iterator[int]) -> list[int]:
    return [next(tokens) for _ in range(count)]


# --- one session after another ---------------------------------------------------------------------------


def test_interleaved_sessions_give_the_tokens_of_each_alone(engine: Engine) -> None:
    prompts = [ids(7, seed=1), ids(20, seed=2), ids(1, seed=3)]
    alone = [take(24, greedy(engine.session(), prompt)) for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == 3
    streams = [greedy(engine.session(), prompt) for prompt in prompts]
    turns = [[next(stream) for stream in streams] for _ in range(24)]
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == alone


def test_a_session_is_untouched_by_logits_of_other_tokens(engine: Engine) -> None:
    prompt = ids(9)
    expected = take(12, greedy(engine.session(), prompt))
    stream = greedy(engine.session(), prompt)
    found = take(6, stream)
    engine.logits(ids(50, seed=4))
    assert found + take(6, stream) == expected


def test_a_new_session_knows_nothing_of_those_before(engine: Engine) -> None:
    first = engine.session().prefill([5]).copy()
    engine.session().prefill(ids(60, seed=5))
    np.testing.assert_array_equal(engine.session().prefill([5]), first)


# --- truncate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 7, 11, 15, 16, 17, 40])
def test_truncated_and_appended_equals_fresh(engine: Engine, keep: int) -> None:
    old, new = ids(40, seed=6), ids(8, seed=7)
    session = engine.session()
    session.prefill(old)
    session.truncate(keep)
    assert session.tokens == old[:keep]
    found = session.prefill(new).copy()
    assert session.tokens == old[:keep] + new
    fresh = engine.session()
    if keep:
        fresh.prefill(old[:keep])
    np.testing.assert_array_equal(found, fresh.prefill(new))


@pytest.mark.parametrize("length", [-1, 4, 1 << 40])
def test_truncating_to_what_is_not_there_is_refused(engine: Engine, length: int) -> None:
    session = engine.session()
    session.prefill([1, 2, 3])
    with pytest.raises(ValueError, match=f"truncate 3 tokens to {length}"):
        session.truncate(length)
    assert session.tokens == [1, 2, 3]


# --- what is refused leaves the session as it was ----------------------------------------------------------


def test_a_full_context_is_an_error_and_the_session_goes_on(engine: Engine) -> None:
    prompt = ids(engine.context)
    session = engine.session()
    session.prefill(prompt[:-2])
    with pytest.raises(ContextFull, match="62 tokens are cached and 3 more do not fit the context of 64"):
        session.prefill([1, 2, 3])
    assert session.tokens == prompt[:-2]
    session.prefill(prompt[-2:-1])
    last = session.decode(prompt[-1]).copy()
    assert nmse(engine.logits(prompt)[-1:], last[None]) < LIMIT
    with pytest.raises(ContextFull):
        session.decode(1)
    session.truncate(10)
    np.testing.assert_array_equal(session.prefill(prompt[10:]), engine.session().prefill(prompt))


def test_more_tokens_than_the_context_are_refused_before_any_pass(engine: Engine) -> None:
    session = engine.session()
    with pytest.raises(ContextFull):
        session.prefill(ids(engine.context + 1))
    assert session.tokens == []
    with pytest.raises(ContextFull):
        engine.logits(ids(engine.context + 1))


@pytest.mark.parametrize("wrong", [-1, 128, 1 << 31, -(1 << 31), 1 << 62, 1 << 64])
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, wrong: int) -> None:
    session = engine.session()
    session.prefill([1, 2])
    with pytest.raises(ZllmcError, match=f"token id {wrong} is outside the vocabulary of 128"):
        session.decode(wrong)
    with pytest.raises(ZllmcError, match=f"token id {wrong} is outside the vocabulary of 128"):
        session.prefill([3, wrong, 4])
    assert session.tokens == [1, 2]
    np.testing.assert_array_equal(session.prefill([3]), engine.session().prefill([1, 2, 3]))


def test_an_unknown_id_late_in_a_long_prompt_is_refused_before_any_pass(long_engine: Engine) -> None:
    session = long_engine.session()
    with pytest.raises(ZllmcError, match="vocabulary"):
        session.prefill([*ids(MAX_TOKENS), 128])
    assert session.tokens == []


def test_nothing_to_append_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        engine.session().prefill([])
    assert engine.logits([]).shape == (0, 128)


def test_a_closed_engine_refuses_to_run(compiled: Callable[..., Path]) -> None:
    engine = Engine.open(compiled(NAME), threads=2)
    session = engine.session()
    session.prefill([1])
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.decode(2)


# --- lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [31, 32, 33, 96])
@pytest.mark.parametrize("name", ["archs/gemma3-dense", "archs/gemma2-dense"])
def test_around_a_window_of_32(
    conformance: Path, compiled: Callable[..., Path], name: str, length: int
) -> None:
    tokens = ids(length + 2, seed=8)
    file = open_file(conformance, name)
    expected = logits(file.model(context=112, kv="f16"), tokens)
    unlimited = logits(file.set(attention__sliding_window=0).model(context=112, kv="f16"), tokens)
    if length > 32:  # else the window would not matter to this test
        assert nmse(unlimited[length:], expected[length:]) > 1e-3
    with Engine.open(compiled(name, context=112), threads=2) as engine:
        assert nmse(expected, engine.logits(tokens)) < LIMIT
        session = engine.session()
        found = [session.prefill(tokens[:length]).copy()]
        found += [session.decode(id).copy() for id in tokens[length:]]
        assert nmse(expected[length - 1 :], np.array(found)) < LIMIT
        session.truncate(0)
        found = [session.decode(id).copy() for id in tokens]
        assert nmse(expected, np.array(found)) < LIMIT


@pytest.fixture(scope="module")
def long_reference(conformance: Path) -> tuple[list[int], np.ndarray]:
    tokens = ids(CONTEXT, seed=9)
    return tokens, logits(open_file(conformance, NAME).model(context=CONTEXT, kv="f16"), tokens)


@pytest.mark.parametrize("prefix", [0, 1, 37, MAX_TOKENS])
@pytest.mark.parametrize("length", [MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1, 2 * MAX_TOKENS + 1])
def test_prompts_longer_than_a_pass(
    long_engine: Engine, long_reference: tuple[list[int], np.ndarray], prefix: int, length: int
) -> None:
    """Also with one token left over, which goes through the decode entry."""
    tokens, expected = long_reference
    session = long_engine.session()
    if prefix:
        session.prefill(tokens[:prefix])
    end = prefix + length
    found = [session.prefill(tokens[prefix:end]).copy(), session.decode(tokens[end]).copy()]
    assert session.tokens == tokens[: end + 1]
    assert nmse(expected[end - 1 : end + 1], np.array(found)) < LIMIT


def test_a_sequence_grows_to_three_passes_token_by_token(
    long_engine: Engine, long_reference: tuple[list[int], np.ndarray]
) -> None:
    """The cache is written past every 512 tokens, by replays that were recorded when it was empty."""
    tokens, expected = long_reference
    session, other = long_engine.session(), long_engine.session()
    found = []
    for position, id in enumerate(tokens):
        found.append(session.decode(id).copy())
        if position % 256 == 255:  # switch away from this memory and back
            other.decode(position % 128)
    assert nmse(expected, np.array(found)) < LIMIT
    with pytest.raises(ContextFull):
        session.decode(0)
