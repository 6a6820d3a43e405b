"""An engine on the drivers of GPUs: doubles of their libraries, whose kernels the emulated device runs."""

import sys
from threading import Event

import numpy as np
import pytest

import metal_double
from driver_double import Double, compile_double
from tiny import tiny_model
from zllmc.compiler import compile_model
from zllmc.runtime.artifact import open_artifact
from zllmc.runtime.devices import open_device
from zllmc.runtime.driver_api import CUDA, HIP
from zllmc.runtime.emulator import _FAILURE, _LAUNCH
from zllmc.runtime.engine import Engine
from zllmc.runtime.greedy_rounds import GreedyRounds
from zllmc.runtime.sampling import GREEDY, SamplingParams
from zllmc.zllm_ir.plan import Launch, Pointer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drivers")


@pytest.fixture(scope="module")
def path(folder):
    """A tiny model for the target that needs no compiler; its kernels do what those of the others do."""
    model = tiny_model(folder / "tiny.gguf")
    return compile_model(
        model, folder / "tiny.zllm", target="metal:apple9", context=128, kernel_cache=folder / "kernels"
    )


@pytest.fixture(scope="module")
def emulated(path, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZLLMC_CACHE", str(folder))
        return open_device(open_artifact(path), 1, "emulate")


def run_on(emulated, kernel, grid, threads, arguments):
    """Runs one kernel with an array of addresses. The result is an error's number, or 0."""
    pointers = (Pointer(0, 0),) * emulated._kernels[kernel].pointers
    table, failure = np.zeros(1, _LAUNCH), np.zeros(1, _FAILURE)
    address = emulated._kernel(Launch(kernel, pointers, threads=threads))
    table[0] = (address, arguments, grid[0], grid[1], 0, threads)
    return 0 if emulated._run(table, 1, failure) else 700


def talk(path, device, monkeypatch):
    """Three sessions take turns and share passes, over more than three blocks of keys each; all logits."""
    monkeypatch.setattr("zllmc.runtime.engine.open_device", lambda *_: device)
    engine = Engine.open(path)
    sessions = [engine.session() for _ in range(3)]
    ids = [3, 50, 120]
    logits = [session.prefill(range(id, id + 9)).copy() for session, id in zip(sessions, ids, strict=True)]
    for turn in range(48):
        for session, id in zip(sessions[: turn % 3 + 1], ids, strict=False):
            logits.append(session.decode(id).copy())
        ids = [int(np.argmax(row)) for row in logits[-3:]]
        if turn % 5 == 0:
            count = 2 + turn % 2
            logits.extend(engine.decode_batch(sessions[:count], ids[:count]).copy())
    logits.extend(engine.logits(range(40)))
    assert engine.device is device
    return np.stack(logits)


@pytest.fixture(scope="module")
def expected(path, emulated):
    with pytest.MonkeyPatch.context() as patch:
        return talk(path, emulated, patch)


def answers(path, device, monkeypatch, candidates=None):
    """Streams that end in every way, some side by side, with what their sessions hold and compute afterwards.
    With 0 `candidates`, the host chooses from all logits."""
    monkeypatch.setattr("zllmc.runtime.engine.open_device", lambda *_: device)
    engine = Engine.open(path)
    engine.candidates = engine.candidates if candidates is None else candidates
    session, other = engine.session(), engine.session()
    seen = []

    def see(chunks, session=session):
        for chunk in chunks:
            seen.append((chunk.text, chunk.ids, chunk.finish, list(session.tokens)))
            yield chunk

    def ask(prompt, **options):
        options = {"sampling": GREEDY, "session": session} | options
        chunks = list(see(engine.generate(prompt, **options), options["session"]))
        session.truncate(len(session.tokens) - 1)  # there may be no room
        seen.append(session.decode(65).tolist())
        return chunks

    chunks = ask("hello", max_tokens=50)  # the cache grows over three blocks of 16 keys
    ask("hello", stop=["".join(chunk.text for chunk in chunks)[10:13]])
    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "eog_ids", {chunks[11].ids[0]})
        ask("hello")
    ask("long " * 22)  # up to the end of the context
    for sampling in SamplingParams(), SamplingParams(top_k=0, top_p=1.0, min_p=0.3), SamplingParams(top_k=0):
        ask("hello", sampling=sampling, seed=5, max_tokens=6)

    streams = [engine.generate("hello", sampling=GREEDY, session=it, max_tokens=8) for it in (session, other)]
    for pair in zip(*map(see, streams, (session, other)), strict=True):
        assert pair[0].ids == pair[1].ids
    cancel = Event()
    stream = see(engine.generate("hello", sampling=GREEDY, session=session, cancel=cancel))
    for number, _ in enumerate(stream):
        if number == 2:
            seen.append(other.decode(66).tolist())
        if number == 5:  # whoever does that goes on from there
            session.truncate(3)
            seen.append(session.decode(67).tolist())
        if number == 7:
            cancel.set()
    ask("hello", max_tokens=2)
    return seen


@pytest.fixture(scope="module")
def expected_answers(path, emulated):
    with pytest.MonkeyPatch.context() as patch:
        return answers(path, emulated, patch, candidates=0)


def test_a_device_that_chooses_its_tokens_gives_the_answers_of_a_host_that_does(
    path, emulated, expected_answers, monkeypatch
):
    assert answers(path, emulated, monkeypatch) == expected_answers


def test_the_host_waits_for_chunks_of_rounds_and_not_for_rounds(path, emulated, folder, monkeypatch):
    double = Double(CUDA, compile_double("cuda", folder))
    double.run_kernels(lambda name, *given: run_on(emulated, name.decode(), *given))
    device = double.open(parameters={name: kernel.pointers for name, kernel in emulated._kernels.items()})
    monkeypatch.setattr("zllmc.runtime.engine.open_device", lambda *_: device)
    monkeypatch.setattr("zllmc.runtime.greedy_rounds.SHORT", np.inf)  # as on a fast device
    engine = Engine.open(path)
    session = engine.session()
    session.prefill([1, 2, 3])
    rounds = GreedyRounds(engine, session, 40)
    ids = [rounds.step(7)]
    before = {name: double.calls(name) for name in ("synchronize", "write", "read", "launch_graph")}
    for _ in range(29):
        ids.append(rounds.step(ids[-1]))
    calls = {name: double.calls(name) - count for name, count in before.items()}
    assert calls["launch_graph"] >= 28 and calls["read"] <= 7
    assert calls["synchronize"] == calls["write"] == 0
    assert session.tokens == [1, 2, 3, 7, *ids[:-1]]
    after = rounds.step(50)  # another than was chosen
    session.truncate(3)
    session.prefill([7, *ids[:-1]])
    assert int(session.decode(50).argmax()) == after
    device.close()
    assert double.misuses() == "" and double.left() == ""


@pytest.mark.parametrize("options", [{}, {"graphs": False}], ids=["graphs", "eager"])
@pytest.mark.parametrize("vendor", [CUDA, HIP], ids=lambda vendor: vendor.kind)
def test_replay_on_cuda_and_hip_computes_what_single_launches_do(
    vendor, options, path, emulated, expected, expected_answers, folder, monkeypatch
):
    double = Double(vendor, compile_double(vendor.kind, folder))
    double.run_kernels(lambda name, *given: run_on(emulated, name.decode(), *given))
    parameters = {name: kernel.pointers for name, kernel in emulated._kernels.items()}
    device = double.open(parameters=parameters, **options)
    np.testing.assert_array_equal(talk(path, device, monkeypatch), expected)
    replays = double.calls("launch_graph")
    assert replays > 90 if not options else replays == 0
    if (vendor is CUDA) is (not options):
        assert answers(path, device, monkeypatch) == expected_answers
    device.close()
    assert double.misuses() == "" and double.left() == ""


def test_replay_on_metal_computes_what_single_launches_do(
    path, emulated, expected, expected_answers, monkeypatch
):
    def kernel(name):
        def run(arguments, grid, threads):
            addresses = np.array([argument.ctypes.data for argument in arguments], np.int64)
            assert run_on(emulated, name, grid, threads, addresses.ctypes.data) == 0

        return run

    gpu = metal_double.Gpu(memory=64 << 20, kernel=kernel)
    for name, module in metal_double.modules(gpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    device = open_device(open_artifact(path), None, None)
    np.testing.assert_array_equal(talk(path, device, monkeypatch), expected)
    assert answers(path, device, monkeypatch) == expected_answers
    device.close()
