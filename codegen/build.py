"""Builds the kernels of a compilation: from the cache where they are there, else on all processors.

TVM holds the interpreter's lock while it compiles, so kernels are built in parallel by processes
(`codegen/worker.py`). Each imports TVM for itself, which takes as long as some eight kernels. This process
builds kernels only where it has TVM and they are few, or where no process can be started: it can be
interrupted at any time, but not in the middle of a kernel.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from queue import SimpleQueue
from typing import IO, Any

from zllmc.codegen.kernel_cache import KernelCache
from zllmc.targets.cpu import CpuTarget
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.kernel_graph import KernelCall

Job = tuple[KernelCall, CpuTarget | GpuTarget]

_JOBS_PER_WORKER = 4  # at least, or it is not worth its start


def build_kernels(
    jobs: Sequence[Job],
    cache: KernelCache,
    progress: Callable[[int, int], None],
    *,
    processes: int = 1,
    before_building: Callable[[], object] = lambda: None,
) -> dict[Job, bytes]:
    """The objects of these kernels, built by so many processes at most. `progress` is told how many there
    are, of how many; `before_building` is called if the cache lacks any.

    Raises the ZllmcError of a kernel that can't be built.
    """
    objects: dict[Job, bytes] = {}

    def add(job: Job, code: bytes) -> None:
        objects[job] = code
        progress(len(objects), len(all_jobs))

    all_jobs = list(dict.fromkeys(jobs))
    progress(0, len(all_jobs))
    for job in all_jobs:
        if (code := cache.get(*job)) is not None:
            add(job, code)
    if missing := [job for job in all_jobs if job not in objects]:
        before_building()
        cache.sweep()
        with closing(_build(missing, processes)) as built:  # ends the workers before an exception goes on
            for job, code in built:
                cache.put(*job, code)
                add(job, code)
    return objects


def _build(jobs: Sequence[Job], processes: int) -> Generator[tuple[Job, bytes]]:
    """The jobs with their objects, as they are done."""
    with _started(_worker_count(len(jobs), processes)) as workers:
        if workers:
            yield from _build_with(workers, jobs)
            return
    for call, target in jobs:
        with _uninterrupted():  # an exception of Python's within TVM ends the process
            from zllmc.codegen.build_kernel import build_kernel

            code = build_kernel(call, target)
        yield (call, target), code


def _worker_count(jobs: int, processes: int) -> int:
    """How many processes build so many kernels; with 0, this one does."""
    count = min(processes, jobs // _JOBS_PER_WORKER)
    if count < 2:
        return 0 if "tvm" in sys.modules else 1
    return count


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C is put off until the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def _build_with(
    workers: Sequence[subprocess.Popen[bytes]], jobs: Sequence[Job]
) -> Iterator[tuple[Job, bytes]]:
    idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def build(job: Job) -> bytes:
        worker = idle.get()
        try:
            return _ask(worker, job)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(len(workers))
    try:
        running = {pool.submit(build, job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(worker: subprocess.Popen[bytes], job: Job) -> bytes:
    requests, answers = _pipes(worker)
    try:
        pickle.dump(job, requests)
        requests.flush()
        answer = pickle.load(answers)
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        code = worker.wait()
        raise ZllmcError(
            f"a process that builds kernels ended with code {code}: is there enough memory?"
        ) from error
    if isinstance(answer, Exception):
        raise answer
    return bytes(answer)


def _pipes(worker: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if worker.stdin is None or worker.stdout is None:
        raise RuntimeError("a worker without pipes")
    return worker.stdin, worker.stdout


@contextmanager
def _started(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many worker processes, or none where the system refuses them. They are gone afterwards; if this
    process is killed, they end by themselves as soon as they look for the next request."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(OSError):
            while len(workers) < count:
                with _uninterrupted():
                    workers.append(_start())
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
            for pipe in _pipes(worker):
                with suppress(OSError):
                    pipe.close()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "zllmc.codegen.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # what this process imports
        process_group=0,  # Ctrl-C is for this process, which then ends them
    )
