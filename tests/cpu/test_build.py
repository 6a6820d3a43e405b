"""Kernels from the cache, and built by several processes."""

import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest

from harness import NATIVE
from zllmc.codegen import build
from zllmc.codegen.kernel_cache import EXECUTOR, KernelCache
from zllmc.codegen.packing import pack_call
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.kernel_graph import KernelCall

TARGET = NATIVE[0]
JOBS = [(EXECUTOR, TARGET), *((pack_call(format, 8), TARGET) for format in ("F32", "F16", "Q4_0"))]


build_kernels = partial(build.build_kernels, processes=2)
worker_count = build._worker_count  # before the tests' own takes its place


def silent(done: int, total: int) -> None:
    pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The workers that a test has started; there are two for two jobs or more."""
    workers: list[subprocess.Popen[bytes]] = []
    start = build._start
    monkeypatch.setattr(build, "_worker_count", worker_count)
    monkeypatch.setattr(build, "_JOBS_PER_WORKER", 1)
    monkeypatch.setattr(build, "_start", lambda: workers.append(start()) or workers[-1])
    return workers


def worker_that_runs(code: str) -> Any:
    command = [sys.executable, "-c", f"import os, pickle, sys\n{code}"]
    return lambda *_, **options: start_process(command, **options)


start_process = subprocess.Popen
ANSWERS = """
while True:
    pickle.load(sys.stdin.buffer)
    pickle.dump(b"object", sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


# --- the cache -------------------------------------------------------------------------------------------

LOOK_UP = """
import pathlib, sys
from zllmc.codegen.build import build_kernels
from zllmc.codegen.kernel_cache import EXECUTOR, KernelCache
from zllmc.targets.cpu import TARGETS
job = EXECUTOR, TARGETS[sys.argv[2]]
print(build_kernels([job], KernelCache(pathlib.Path(sys.argv[1])), print)[job], "tvm" in sys.modules)
"""


def test_another_process_finds_a_kernel_without_importing_tvm(tmp_path: pathlib.Path) -> None:
    KernelCache(tmp_path).put(EXECUTOR, TARGET, b"object")
    command = [sys.executable, "-c", LOOK_UP, tmp_path, TARGET.name]
    for seed in "12":  # of the order of sets
        environment = os.environ | {"PYTHONHASHSEED": seed}
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert printed.stdout == "0 1\n1 1\nb'object' False\n", printed.stderr


def test_calls_and_targets_that_differ_have_entries_of_their_own(tmp_path: pathlib.Path) -> None:
    cache = KernelCache(tmp_path)
    cache.put(*JOBS[0], b"one")
    cache.put(*JOBS[1], b"two")
    assert [cache.get(*job) for job in JOBS[:3]] == [b"one", b"two", None]


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 100])
def test_a_damaged_entry_is_a_miss(tmp_path: pathlib.Path, damage: bytes) -> None:
    cache = KernelCache(tmp_path)
    cache.put(*JOBS[0], b"object" * 20)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage)
    assert cache.get(*JOBS[0]) is None
    cache.put(*JOBS[0], b"object")
    assert cache.get(*JOBS[0]) == b"object"


def test_a_full_disk_is_named_and_nothing_is_left_on_it(tmp_path: pathlib.Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # gives the errors of a full disk
    try:
        with pytest.raises(ZllmcError, match=re.escape(f"{tmp_path} cannot be written: ") + ".*ZLLMC_CACHE"):
            KernelCache(tmp_path).put(*JOBS[0], bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(
    tmp_path: pathlib.Path,
) -> None:
    for name in ("tmp-old", "tmp-new"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "tmp-old", (0, time.time() - 7200))
    KernelCache(tmp_path).sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["tmp-new"]


def test_what_comes_before_building_comes_if_anything_is_built(tmp_path: pathlib.Path) -> None:
    def refuse() -> None:
        raise ZllmcError("not worth it")

    KernelCache(tmp_path).put(*JOBS[0], b"object")
    build_kernels(JOBS[:1], KernelCache(tmp_path), silent, before_building=refuse)
    with pytest.raises(ZllmcError, match="not worth it"):
        build_kernels(JOBS[:2], KernelCache(tmp_path), silent, before_building=refuse)


def test_without_a_folder_nothing_is_kept() -> None:
    cache = KernelCache(None)
    cache.put(*JOBS[0], b"object")
    cache.sweep()
    assert cache.get(*JOBS[0]) is None


# --- workers ---------------------------------------------------------------------------------------------


def test_workers_build_the_same_bytes_as_this_process_and_return_its_errors(
    started: list[subprocess.Popen[bytes]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    jobs = [*JOBS, JOBS[0]]
    by_workers = build_kernels(jobs, KernelCache(tmp_path), lambda *state: seen.append(state))
    assert len(started) == 2
    assert seen == [(done, 4) for done in range(5)]
    with pytest.raises(ZllmcError, match="no CPU kernel for op 'novel'"):
        build_kernels([(KernelCall("novel", (), (), ()), TARGET)] * 2 + jobs, KernelCache(None), silent)
    assert build_kernels(jobs, KernelCache(tmp_path), silent) == by_workers
    assert len(started) == 4
    assert all(worker.returncode is not None for worker in started)
    monkeypatch.setattr(build, "_JOBS_PER_WORKER", 100)
    assert build_kernels(jobs, KernelCache(None), silent) == by_workers
    assert len(started) == 4


def test_where_processes_are_refused_this_one_builds(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert build_kernels(JOBS[:2], KernelCache(None), silent).keys() == set(JOBS[:2])


def test_a_worker_that_dies_is_an_error(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", worker_that_runs("os.kill(os.getpid(), 9)"))
    with pytest.raises(ZllmcError, match="ended with code -9: is there enough memory"):
        build_kernels(JOBS, KernelCache(None), silent)
    assert all(worker.returncode == -9 for worker in started)


def test_an_interruption_ends_the_workers(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", worker_that_runs(ANSWERS))
    with pytest.raises(KeyboardInterrupt):
        build_kernels(JOBS, KernelCache(None), interrupt)
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started)


def test_a_process_without_tvm_leaves_even_one_kernel_to_a_worker(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tvm", raising=False)
    monkeypatch.setattr(subprocess, "Popen", worker_that_runs(ANSWERS))
    assert build_kernels(JOBS[:1], KernelCache(None), silent) == {JOBS[0]: b"object"}
    assert len(started) == 1


def test_ctrl_c_waits_for_the_kernel_that_this_process_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    built: list[str] = []

    def build_one(call: KernelCall, target: Any) -> bytes:
        signal.raise_signal(signal.SIGINT)
        built.append(call.op)
        return b"object"

    monkeypatch.setattr("zllmc.codegen.build_kernel.build_kernel", build_one)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build_kernels(JOBS, KernelCache(tmp_path), silent)
    assert built == ["executor"]
    assert signal.getsignal(signal.SIGINT) is handler


KILLED = """
import os, signal
from zllmc.codegen import build
from zllmc.codegen.kernel_cache import EXECUTOR, KernelCache
from zllmc.codegen.packing import pack_call
from zllmc.targets.cpu import detect
workers, start = [], build._start
build._start = lambda: workers.append(start()) or workers[-1]
build._JOBS_PER_WORKER = 1
def kill(done, total):
    if done:
        print(*(worker.pid for worker in workers), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
jobs = [(call, detect()) for call in (EXECUTOR, *(pack_call(f, 8) for f in ("F32", "F16", "Q4_0", "Q8_0")))]
build.build_kernels(jobs, KernelCache(None), kill, processes=2)
"""


def test_workers_end_when_their_parent_is_killed() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    workers = [pathlib.Path("/proc", pid, "stat") for pid in killed.stdout.split()]
    assert len(workers) == 2
    end = time.monotonic() + 30
    while any(map(alive, workers)):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert killed.stderr == ""


def alive(stat: pathlib.Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
