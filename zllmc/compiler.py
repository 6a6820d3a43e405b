"""From a model file to an artifact: read, lower, generate kernels, pack weights, write the folder."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Event

import msgspec

from zllmc import targets
from zllmc.codegen.build import Job, build_kernels
from zllmc.codegen.gpu_toolchain import prelude
from zllmc.codegen.kernel_cache import EXECUTOR, KernelCache
from zllmc.frontends.chat_template import chat_templates_from_gguf, chat_templates_from_hf
from zllmc.frontends.model import Model, load_model
from zllmc.frontends.tokenizer import (
    NoTokenizerError,
    TokenizerBundle,
    tokenizer_from_gguf,
    tokenizer_from_hf,
)
from zllmc.passes.pipeline import MAX_BATCH, lower_entries
from zllmc.passes.plan import kernel_calls, make_plan, stored_weights
from zllmc.runtime.artifact import FORMAT_VERSION, GPU_SUFFIXES, Gpu, Manifest, Source, digests
from zllmc.runtime.processors import physical_cores
from zllmc.targets import Target
from zllmc.targets.cpu import CpuTarget
from zllmc.targets.gpu import GpuTarget
from zllmc.weights import Progress, load_packers, pack_jobs, place_weights, write_weights
from zllmc.zllm_ir.errors import ZllmcError, room_to_write
from zllmc.zllm_ir.gpu_kernel import GpuKernel
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK
from zllmc.zllm_ir.plan import Launch, Plan
from zllmc.zllm_ir.types import KVType, TensorType

DEFAULT_CONTEXT = 8192
MOST_BATCH = 256  # a pass has launches of its own for each sequence: planning so many takes half a minute


def compile_model(
    model: Path | str,
    output: Path | str,
    *,
    target: str = "cpu",
    context: int | None = None,
    kv: str = "f16",
    max_batch: int = MAX_BATCH,
    dump_ir: Path | None = None,
    verify: bool = False,
    kernel_cache: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Path:
    """Compile a GGUF file, a split one, or a Hugging Face folder into the artifact folder `output`.

    `context` is how many tokens a sequence may reach (default: 8192, or the model's own where that is less).
    `kv` is f16 or q8. One pass can decode a token of each of `max_batch` sequences. The folder appears whole
    or not at all. Raises ZllmcError that names the tensor, op or field that cannot be compiled.
    """
    if not 1 <= max_batch <= MOST_BATCH:
        raise ZllmcError(f"max_batch is {max_batch}; it must be from 1 to {MOST_BATCH}")
    device = targets.parse(target)
    with _describing(Path(model)) as described, _thread() as other:
        source = load_model(model, context=DEFAULT_CONTEXT if context is None else context, kv=kv)
        if context is None and source.facts.trained_context < DEFAULT_CONTEXT:
            context = source.facts.trained_context
            source = load_model(model, context=context, kv=kv)
        capacity = -(-(context or DEFAULT_CONTEXT) // KEY_BLOCK) * KEY_BLOCK
        with room_to_write(dump_ir or Path(output)):
            graphs = lower_entries(
                source.graph,
                device,
                context=capacity,
                max_batch=max_batch,
                dump=dump_ir,
                check=verify,
            )
        calls = kernel_calls(graphs.values())
        stored = stored_weights(graphs.values())
        offsets, weights_bytes = place_weights(source, stored, device)

        kernels: dict[str, Job] = {symbol: (call, device) for symbol, call in calls.items()}
        if isinstance(device, CpuTarget):
            kernels["executor"] = (EXECUTOR, device)
        packing = pack_jobs(stored, device)

        with _atomic_folder(Path(output)) as folder:
            # While this thread waits for others that pack.
            texts = other.submit(_texts, source)
            planned = other.submit(make_plan, graphs, offsets)
            objects = build_kernels(
                [*packing.values(), *kernels.values()],
                KernelCache(kernel_cache),
                partial(progress, "kernels"),
                processes=physical_cores(),
                before_building=texts.result,  # a model without a usable tokenizer is refused at once
            )
            built = {name: objects[job] for name, job in kernels.items()}
            (folder / "kernels").mkdir()
            if isinstance(device, CpuTarget):
                for name, code in built.items():
                    (folder / "kernels" / f"{name}.o").write_bytes(code)
            packers = load_packers(packing, objects)
            checksums = write_weights(
                folder / "weights.bin", source, stored, offsets, weights_bytes, device, packers, progress
            )
            (folder / "checksums.json").write_bytes(msgspec.json.encode(checksums))
            plan = planned.result()
            if isinstance(device, GpuTarget):
                plan = _write_gpu_kernels(folder / "kernels", built, plan, device)
            (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
            tokenizer, template = texts.result()
            if tokenizer is not None:
                (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
                (folder / "tokenizer_facts.json").write_bytes(msgspec.json.encode(tokenizer.facts))
            if template is not None:
                (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
            progress("checksum", 0, 1)
            origin = described.result()
            progress("checksum", 1, 1)
            manifest = _manifest(source, origin, device, capacity, kv, weights_bytes, digests(folder))
            (folder / "manifest.json").write_bytes(
                msgspec.json.format(msgspec.json.encode(manifest), indent=2)
            )
    return Path(output)


@contextmanager
def _thread() -> Iterator[ThreadPoolExecutor]:
    """For work beside this thread's. Whoever leaves early waits for no more than what is being done."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _texts(model: Model) -> tuple[TokenizerBundle | None, str | None]:
    """The tokenizer, and the chat template where there is one. A file that declares to have no tokenizer
    gives an artifact that takes and gives token ids only."""
    if model.container == "gguf":
        try:
            tokenizer = tokenizer_from_gguf(model.metadata)
            return tokenizer, chat_templates_from_gguf(model.metadata).get("default")
        except NoTokenizerError:
            return None, None
        except ZllmcError as error:  # which knows the field, but not the file
            raise ZllmcError(f"{model.path}: {error}") from error
    return tokenizer_from_hf(model.path), chat_templates_from_hf(model.path).get("default")


def _write_gpu_kernels(folder: Path, built: Mapping[str, bytes], plan: Plan, device: GpuTarget) -> Plan:
    """Write sources and binaries; the plan with the shapes of the kernels' launches."""
    suffix, loaded = GPU_SUFFIXES[device.dialect]
    kernels = {name: msgspec.msgpack.decode(code, type=GpuKernel) for name, code in built.items()}
    (folder / "prelude.h").write_text(prelude(device.dialect), encoding="utf-8")
    for name, kernel in kernels.items():
        (folder / f"{name}.{suffix}").write_text(kernel.text, encoding="utf-8")
        if loaded != suffix:
            (folder / f"{name}.{loaded}").write_bytes(kernel.code)

    def shaped(launch: Launch) -> Launch:
        kernel = kernels[launch.kernel]
        return msgspec.structs.replace(launch, grid=(kernel.blocks, 1), threads=kernel.threads)

    entries = [msgspec.structs.replace(e, launches=tuple(map(shaped, e.launches))) for e in plan.entries]
    return msgspec.structs.replace(plan, entries=tuple(entries))


# -- the folder ----------------------------------------------------------------------------------------------


@contextmanager
def _atomic_folder(output: Path) -> Iterator[Path]:
    """A temporary sibling of `output` that takes its name when all went well, and vanishes otherwise.

    It stays locked as long as this process lives: siblings without a lock are what killed compilations left,
    and are removed.
    """
    _check_replaceable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as lock:
        with _locked(output.parent):  # else another compilation could find the new folder before it is locked
            for left in output.parent.glob(f".{glob.escape(output.name)}-*{_PARTIAL}"):
                with suppress(OSError), _locked(left, wait=False):
                    shutil.rmtree(left)
            folder = _temporary(output)
            lock.enter_context(_locked(folder))
        try:
            folder.chmod(0o755)
            with room_to_write(output):
                yield folder
            _rename(folder, output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _rename(folder: Path, output: Path) -> None:
    """Give `folder` the name `output`. An artifact that has it is moved away first, and removed."""
    while True:
        try:
            os.replace(folder, output)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _check_replaceable(output)
        old = _temporary(output)
        with suppress(FileNotFoundError):  # another compilation has moved it
            os.replace(output, old / "old")
        shutil.rmtree(old, ignore_errors=True)


_PARTIAL = ".partial"  # ends the names of temporary folders


def _temporary(output: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{output.name}-", suffix=_PARTIAL, dir=output.parent))


def _check_replaceable(output: Path) -> None:
    if output.exists() and not (output / "manifest.json").is_file():
        raise ZllmcError(f"{output} exists and is no artifact: choose another name with -o.")


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds an advisory lock on a folder; the system releases it however the process ends.

    Raises BlockingIOError instead of waiting for another process that holds it, unless `wait`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _manifest(
    model: Model,
    source: Source,
    device: Target,
    context: int,
    kv: str,
    weights_bytes: int,
    files: dict[str, str],
) -> Manifest:
    formats: dict[str, int] = {}
    for value in model.graph.weights:
        if isinstance(value.type, TensorType):
            format = value.type.dtype
            formats[format] = formats.get(format, 0) + model.weights[value.name].nbytes
    states = [s.type for s in model.graph.states if isinstance(s.type, KVType)]
    return Manifest(
        format_version=FORMAT_VERSION,
        compiler=version("zllmc"),
        tvm=version("apache-tvm"),
        name=model.name,
        architecture=model.architecture,
        parameters=model.parameters,
        formats=dict(sorted(formats.items())),
        source=source,
        target=str(device),
        triple=device.triple if isinstance(device, CpuTarget) else "",
        requires=tuple(sorted(device.requires)) if isinstance(device, CpuTarget) else (),
        gpu=None if isinstance(device, CpuTarget) else Gpu(device.dialect, device.subgroup, device.matrix),
        layers=len(states),
        vocab=model.facts.vocab,
        context=context,
        kv=kv,
        kv_bytes_per_token=sum(s.bytes_per_token for s in states),
        weights_bytes=weights_bytes,
        source_weights_bytes=model.weight_bytes,
        files=files,
    )


@contextmanager
def _describing(path: Path) -> Iterator[Future[Source]]:
    """Digests the model's files in the background. Whoever leaves early does not wait for it."""
    left = Event()
    with _thread() as thread:
        try:
            yield thread.submit(_source, path, left)
        finally:
            left.set()


def _source(path: Path, left: Event) -> Source:
    """Name, size and digest of the model's file, or of all files of a folder in order."""
    found = path.iterdir() if path.is_dir() else [path]
    files = sorted(file for file in found if file.is_file())  # to open a pipe would wait for its writer
    digest = hashlib.sha256()
    # Large blocks: between them, this thread needs the interpreter, where others are busy.
    block = memoryview(bytearray(1 << 25))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while not left.is_set() and (count := stream.readinto(block)):
                digest.update(block[:count])
    return Source(path.name, sum(f.stat().st_size for f in files), digest.hexdigest())
