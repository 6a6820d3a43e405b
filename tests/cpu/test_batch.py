"""Batches: several sessions in one pass, each as if it were alone."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from models import DENSE, nmse
from zllmc.compiler import compile_model
from zllmc.passes.pipeline import MAX_BATCH
from zllmc.runtime.artifact import open_artifact
from zllmc.runtime.engine import ContextFull, Engine, Session
from zllmc.zllm_ir.errors import ZllmcError

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

NAME = "archs/llama-dense"
CONTEXT = 512
LIMIT = 1e-6  # as in test_sessions
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 200]  # around blocks of 16 keys and parts of 64


@pytest.fixture(scope="module")
def engine(compiled: Callable[..., Path]) -> Iterator[Engine]:
    with Engine.open(compiled(NAME, context=CONTEXT), threads=2) as engine:
        yield engine


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 128, count).tolist()
    return found


def sessions(engine: Engine, lengths: list[int] = LENGTHS) -> list[Session]:
    found = [engine.session() for _ in lengths]
    for seed, (session, length) in enumerate(zip(found, lengths, strict=True)):
        session.prefill(ids(length, seed))
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "kv"),
    [
        (NAME, "f16"),
        (NAME, "q8"),
        ("archs/gemma3-dense", "f16"),
        ("archs/phi3-dense", "f16"),
        ("archs/qwen3-dense", "f16"),
        ("archs/olmo2-dense", "f16"),
    ],
)
def test_each_sequence_has_the_logits_that_it_has_alone(
    compiled: Callable[..., Path], name: str, kv: str, threads: int
) -> None:
    """With lengths that grow past blocks of keys, windows and parts of the split attention."""
    with Engine.open(compiled(name, context=CONTEXT, kv=kv), threads=threads) as engine:
        together, alone = sessions(engine), sessions(engine)
        for step in range(4):
            tokens = ids(len(together), seed=step)
            found = engine.decode_batch(together, tokens).copy()
            expected = [session.decode(token).copy() for session, token in zip(alone, tokens, strict=True)]
            assert found.shape == (len(together), 128)
            # An 8-bit cache rounds at other places where sums are ordered otherwise.
            assert nmse(np.array(expected), found) < (LIMIT if kv == "f16" else 1e-4)
        assert [s.tokens for s in together] == [s.tokens for s in alone]


@pytest.mark.parametrize("name", [NAME, "quants/llama-dense-Q8_0", "quants/llama-dense-Q4_K_M"])
def test_a_row_does_not_depend_on_the_others(compiled: Callable[..., Path], name: str) -> None:
    with Engine.open(compiled(name, context=CONTEXT), threads=2) as engine:
        whole, parts = sessions(engine), sessions(engine)
        for step in range(3):
            tokens = ids(len(whole), seed=step)
            expected = engine.decode_batch(whole, tokens).copy()
            for part in (slice(0, 2), slice(7, 4, -1), slice(2, 5)):
                found = engine.decode_batch(parts[part], tokens[part])
                np.testing.assert_array_equal(found, expected[part])


@pytest.mark.parametrize(
    "name", ["quants/llama-dense-Q8_0", "quants/llama-dense-Q6_K", "quants/gemma3-dense-Q4_K_M"]
)
def test_quantized_models_give_the_bits_that_they_give_alone(
    compiled: Callable[..., Path], name: str
) -> None:
    with Engine.open(compiled(name, context=CONTEXT), threads=2) as engine:
        together, alone = sessions(engine), sessions(engine)
        tokens = ids(len(together))
        for _ in range(8):
            expected = [session.decode(token).copy() for session, token in zip(alone, tokens, strict=True)]
            found = engine.decode_batch(together, tokens)
            np.testing.assert_array_equal(found, expected)
            tokens = found.argmax(axis=1).tolist()


def test_sessions_join_and_leave(engine: Engine) -> None:
    """As a server would run them: greedy, each for as many tokens as it wants, at most three at once."""
    wanted = [5, 12, 3, 20, 1, 9, 14, 6]
    prompts = [ids(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = []
    for prompt, count in zip(prompts, wanted, strict=True):
        session = engine.session()
        tokens = [int(session.prefill(prompt).argmax())]
        while len(tokens) < count:
            tokens.append(int(session.decode(tokens[-1]).argmax()))
        alone.append(tokens)

    waiting = list(range(len(prompts)))
    running: dict[int, Session] = {}
    found: dict[int, list[int]] = {}
    sizes = set()
    while waiting or running:
        while waiting and len(running) < 3:
            number = waiting.pop(0)
            running[number] = engine.session()
            found[number] = [int(running[number].prefill(prompts[number]).argmax())]
        running = {number: s for number, s in running.items() if len(found[number]) < wanted[number]}
        if running:
            sizes.add(len(running))
            rows = engine.decode_batch(list(running.values()), [found[number][-1] for number in running])
            for number, row in zip(running, rows, strict=True):
                found[number].append(int(row.argmax()))
    assert sizes == {1, 2, 3}
    assert [found[number] for number in range(len(prompts))] == alone


def test_batches_among_passes_of_single_sessions(engine: Engine) -> None:
    """Whatever else is done to a session between two batches counts in the next one."""
    random = np.random.default_rng(1)
    together = sessions(engine)
    done = set()
    for _ in range(40):
        chosen = [together[i] for i in random.permutation(len(together))[: random.integers(1, 9)]]
        engine.decode_batch(chosen, ids(len(chosen), seed=int(random.integers(99))))
        session = together[random.integers(len(together))]
        action = str(random.choice(["prefill", "decode", "verify", "truncate"]))
        done.add(action)
        if action == "prefill":
            session.prefill(ids(int(random.integers(2, 9)), seed=2))
        elif action == "decode":
            session.decode(7)
        elif action == "verify":
            session.verify([3, 4, 5])
            session.accept()
        else:
            session.truncate(len(session.tokens) * 3 // 4)
    assert len(done) == 4
    found = engine.decode_batch(together, [9] * len(together)).copy()
    expected = [engine.session().prefill(session.tokens).copy() for session in together]
    assert nmse(np.array(expected), found) < LIMIT


@pytest.mark.parametrize("left", [1, 2])
def test_the_memory_of_a_session_that_is_gone_is_free_after_the_next_batch(engine: Engine, left: int) -> None:
    together = sessions(engine, [3, 4, 5])
    engine.decode_batch(together, [1, 2, 3])
    memory = weakref.ref(next(iter(together[0].states.values())))
    del together[0]
    engine.decode_batch(together[:left], [1, 2][:left])
    assert memory() is None


def test_a_batch_forgets_what_was_computed_ahead(engine: Engine) -> None:
    first, second = sessions(engine, [3, 4])
    first.verify([1, 2, 3])
    engine.decode_batch([first, second], [5, 6])
    with pytest.raises(ValueError, match="no token was computed ahead"):
        first.accept()


def test_an_artifact_for_single_sequences_has_no_entry_for_batches(
    conformance: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    model = conformance / f"{NAME}.gguf"
    artifacts = {
        n: compile_model(model, tmp_path / f"{n}.zllm", context=64, max_batch=n, kernel_cache=kernel_cache)
        for n in (1, 2)
    }
    assert [e.name for e in open_artifact(artifacts[1]).plan.entries] == ["decode", "prefill"]
    for most, artifact in artifacts.items():
        with Engine.open(artifact, threads=2) as engine:
            assert engine.max_batch == most
            found = engine.decode_batch(sessions(engine, [3] * most), [5] * most).copy()
            assert nmse(engine.logits([*ids(3), 5])[-1:], found[:1]) < LIMIT
            with pytest.raises(ValueError, match=f"takes 1 to {most}"):
                engine.decode_batch(sessions(engine, [3] * (most + 1)), [5] * (most + 1))
    with pytest.raises(ZllmcError, match="max_batch is 0"):
        compile_model(model, tmp_path / "0.zllm", max_batch=0)


def test_what_is_refused_changes_no_session(engine: Engine, compiled: Callable[..., Path]) -> None:
    lengths = [3, CONTEXT, *range(4, MAX_BATCH + 3)]
    some = sessions(engine, lengths)
    good, full, *others = some
    for batch, tokens, error, message in (
        ([], [], ValueError, f"0 sessions in a batch; this artifact takes 1 to {MAX_BATCH}"),
        (some, [1] * len(some), ValueError, f"{MAX_BATCH + 1} sessions"),
        ([good, others[0]], [1], ValueError, "1 tokens for 2 sessions"),
        ([good, others[0], good], [1, 2, 3], ValueError, "in the batch twice"),
        ([good, full], [1, 2], ContextFull, f"{CONTEXT} tokens are cached and 1 more"),
        ([good, others[0]], [1, 128], ZllmcError, "token id 128"),
        ([good, others[0]], [1, -1], ZllmcError, "token id -1"),
    ):
        with pytest.raises(error, match=message):
            engine.decode_batch(batch, tokens)
    other = Engine.open(compiled(NAME, context=CONTEXT), threads=1)
    with other, pytest.raises(ValueError, match="another engine"):
        engine.decode_batch([good, other.session()], [1, 2])
    assert [len(session.tokens) for session in some] == lengths
