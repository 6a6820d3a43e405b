"""Passes over guesses, and speculation, on compiled models."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from models import DENSE, nmse
from zllmc.passes.pipeline import MAX_ROWS
from zllmc.runtime import speculation
from zllmc.runtime.engine import ContextFull, Engine
from zllmc.runtime.sampling import GREEDY, Sampler, SamplingParams
from zllmc.runtime.speculation import Speculation
from zllmc.zllm_ir.errors import ZllmcError

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

CONTEXT = 512
LIMIT = 1e-6  # as in test_sessions
MARGIN = 0.15  # of logits with a standard deviation of 3; measured: up to 0.05


@pytest.fixture(autouse=True)
def every_guess_is_worth_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(speculation, "UNMEASURED", 0)


@pytest.fixture(scope="module")
def engine(compiled: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.open(compiled("archs/llama-dense", context=CONTEXT), threads=2) as engine:
        yield engine


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 128, count).tolist()
    return found


@pytest.mark.parametrize("count", [1, 2, 8, MAX_ROWS])
@pytest.mark.parametrize("cached", [0, 1, 37])
def test_the_logits_after_every_token_are_those_of_single_steps(
    engine: Engine, cached: int, count: int
) -> None:
    tokens = ids(cached + count)
    session, plain = engine.session(), engine.session()
    if cached:
        session.prefill(tokens[:cached])
        plain.prefill(tokens[:cached])
    found = session.verify(tokens[cached:]).copy()
    expected = np.array([plain.decode(id).copy() for id in tokens[cached:]])
    assert nmse(expected, found) < LIMIT


@pytest.mark.parametrize("accepted", [0, 1, 7])
def test_what_was_not_accepted_is_forgotten(engine: Engine, accepted: int) -> None:
    tokens, others = ids(20), ids(6, seed=1)
    session, plain = engine.session(), engine.session()
    session.prefill(tokens[:12])
    session.verify(tokens[12:])
    assert session.tokens == tokens[:13]
    for _ in range(accepted):
        session.accept()
    assert session.tokens == tokens[: 13 + accepted]
    found = [session.decode(id).copy() for id in others]
    plain.prefill(tokens[: 13 + accepted])
    assert nmse(np.array([plain.decode(id).copy() for id in others]), np.array(found)) < LIMIT


def test_only_the_last_pass_can_be_accepted(engine: Engine) -> None:
    session = engine.session()
    with pytest.raises(ValueError, match="no token was computed ahead"):
        session.accept()
    for forget in (lambda: session.decode(9), lambda: session.truncate(1), lambda: session.prefill([8, 9])):
        session.verify([1, 2, 3])
        forget()
        with pytest.raises(ValueError, match="no token was computed ahead"):
            session.accept()


def test_what_cannot_be_verified_is_refused_and_changes_nothing(engine: Engine) -> None:
    session = engine.session()
    session.prefill(ids(CONTEXT - 3))
    with pytest.raises(ContextFull):
        session.verify([1, 2, 3, 4])
    with pytest.raises(ValueError, match=f"0 tokens to verify; one pass takes 1 to {MAX_ROWS}"):
        session.verify([])
    with pytest.raises(ZllmcError, match="token id 128"):
        session.verify([1, 128])
    assert session.tokens == ids(CONTEXT - 3)
    session.verify([1, 2, 3])
    session.truncate(0)
    with pytest.raises(ValueError, match=f"{MAX_ROWS + 1} tokens to verify"):
        session.verify(ids(MAX_ROWS + 1))


def decoded(
    engine: Engine, prompt: list[int], sampling: SamplingParams, *, speculate: bool
) -> tuple[list[int], int]:
    """Tokens to the end of the context, and how many of them needed no pass of their own."""
    limit = CONTEXT - len(prompt) + 1
    session, sampler = engine.session(), Sampler(sampling, seed=7)
    logits = session.prefill(prompt)
    decoder = Speculation(session, prompt, limit) if speculate else session
    tokens: list[int] = []
    while True:
        tokens.append(sampler.sample(logits, [*prompt, *tokens]))
        if len(tokens) == limit:
            return tokens, decoder.accepted if isinstance(decoder, Speculation) else 0
        logits = decoder.decode(tokens[-1])


@pytest.mark.parametrize("name", ["archs/llama-dense", "archs/gemma3-dense", "archs/qwen3-dense"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.3)], ids=["greedy", "sampled"])
def test_speculation_gives_the_same_tokens_to_the_end_of_the_context(
    compiled: Callable[..., Path], name: str, sampling: SamplingParams
) -> None:
    with Engine.open(compiled(name, context=CONTEXT), threads=2) as engine:
        for prompt in (ids(16), ids(5, seed=1) * 8):
            expected, _ = decoded(engine, prompt, sampling, speculate=False)
            found, accepted = decoded(engine, prompt, sampling, speculate=True)
            print(f"{name}: {accepted} of {len(found)} accepted")
            assert found == expected
            assert accepted > 0


@pytest.mark.parametrize(
    "name", ["quants/llama-dense-Q8_0", "quants/llama-dense-Q4_0", "quants/llama-dense-Q6_K"]
)
def test_greedy_choices_of_quantized_models_differ_only_between_near_ties(
    compiled: Callable[..., Path], name: str
) -> None:
    """Each step against plain decoding of the same tokens: activations near two int8 codes may round the
    other way, and keys and values near two f16 numbers."""
    prompt = ids(5, seed=2) * 4
    with Engine.open(compiled(name, context=CONTEXT), threads=2) as engine:
        tokens, accepted = decoded(engine, prompt, GREEDY, speculate=True)
        session = engine.session()
        row = session.prefill(prompt)
        margins = []
        for step, token in enumerate(tokens):
            if row.argmax() != token:
                margins.append((step, float(row.max() - row[token])))
            row = session.decode(token) if len(session.tokens) < CONTEXT else row
        print(f"{name}: {accepted} of {len(tokens)} accepted; choices that differ, with margins: {margins}")
        assert accepted > 0
        assert all(margin < MARGIN for _, margin in margins), margins
