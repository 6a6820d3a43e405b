"""What goes wrong around a model: no compiler on PATH, kills, races, damaged artifacts, hostile files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import zllmc.codegen.cpu
import zllmc.compiler
from models import DENSE
from zllmc.zllm_ir.errors import ZllmcError

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

NAME = "archs/llama-dense"


def python(code: str, *arguments: object, **environment: str) -> str:
    """What a fresh interpreter prints for `code`. It knows none of this one's environment."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {"PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- what must not be needed -----------------------------------------------------------------------------

GREEDY = """
from zllmc.runtime.engine import Engine
tokens = json.loads(sys.argv[1])
with Engine.open(sys.argv[2], threads=2) as engine:
    session = engine.session()
    found = [int(session.prefill(tokens).argmax())]
    while len(found) < 32:
        found.append(int(session.decode(found[-1]).argmax()))
print(found)
"""
NO_PROGRAMS = """
import json, sys
def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork"):
        raise FileNotFoundError(f"{event}: {arguments}")
sys.addaudithook(refuse)
from zllmc.compiler import compile_model
compile_model(sys.argv[3], sys.argv[2], context=64)
"""
NO_COMPILER = """
import json, sys
BANNED = {"tvm"}
BANNED |= {f"zllmc.{name}" for name in ("compiler", "frontends", "passes", "codegen", "targets")}
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name in BANNED:
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Ban())
"""


@pytest.fixture(scope="module")
def prompt(conformance: Path) -> str:
    return json.dumps(np.load(conformance / f"{NAME}.npz")["tokens"][:16].tolist())


@pytest.fixture(scope="module")
def greedy(conformance: Path) -> str:
    return f"{np.load(conformance / f'{NAME}.npz')['greedy'].tolist()}\n"


def test_neither_compiling_nor_running_needs_a_system_compiler_and_bytes_are_always_the_same(
    conformance: Path, compiled: Callable[..., Path], prompt: str, greedy: str, tmp_path: Path
) -> None:
    """Compiled once with an empty PATH, where any attempt to start a program fails, in a process with other
    hashes and without the cache of kernels; and once in this process."""
    source, artifact = conformance / f"{NAME}.gguf", tmp_path / "x.zllm"
    code = NO_PROGRAMS + GREEDY
    assert python(code, prompt, artifact, source, PATH=str(tmp_path), PYTHONHASHSEED="1") == greedy
    assert content(artifact) == content(compiled(NAME))


def test_running_needs_nothing_of_the_compiler(
    compiled: Callable[..., Path], prompt: str, greedy: str
) -> None:
    code = NO_COMPILER + GREEDY
    assert python(code, prompt, compiled(NAME), PATH="") == greedy
    with pytest.raises(AssertionError, match="tvm is not here"):
        python(NO_COMPILER + "import tvm")


# --- kills and races -------------------------------------------------------------------------------------

# One process imports the compiler, which takes longest, and its children compile.
CHILDREN = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import zllmc.codegen.cpu
from zllmc.compiler import compile_model
source, output, cache, count = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
def start(kill_at=-1):
    # kill_at: it kills itself at that report of progress
    child = os.fork()
    if child:
        return child
    reports = iter(range(1 << 30))
    def progress(*_):
        if next(reports) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        compile_model(source, output, context=64, kernel_cache=cache, progress=progress)
        os._exit(0)
    finally:
        os._exit(1)
def end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
KILLS = """
from zllmc.runtime.artifact import open_artifact
assert end(start()) == 0  # with this, all kernels are in the cache
begin = time.monotonic()
assert end(start()) == 0
duration = time.monotonic() - begin
random = random.Random(0)
for number in range(count):
    if number % 2:
        shutil.rmtree(output, ignore_errors=True)
    if number < count // 2:
        child = start(kill_at=number)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    else:
        child = start()
        time.sleep(random.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
    left = len(list(output.parent.glob(".*.partial")))
    print(end(child), left, "complete" if output.exists() and open_artifact(output) else "none")
assert end(start()) == 0
"""
RACES = """
assert end(start()) == 0
for number in range(count):
    print(*map(end, [start() for _ in range(4)]))
"""


def test_a_killed_compilation_leaves_a_whole_artifact_or_none(
    conformance: Path, compiled: Callable[..., Path], kernel_cache: Path, tmp_path: Path
) -> None:
    expected = content(compiled(NAME))
    output = tmp_path / "x.zllm"
    printed = python(CHILDREN + KILLS, conformance / f"{NAME}.gguf", output, kernel_cache, 24)
    kills = [line.split() for line in printed.splitlines()]
    assert len(kills) == 24
    # Half of the kills are certain to come in the middle; the next compilation clears their folders away.
    assert all((code, left) == ("-9", "1") for code, left, _ in kills[:12])
    assert {state for _, _, state in kills[:12]} == {"complete", "none"}
    assert all(int(left) <= 2 for _, left, _ in kills)
    assert content(output) == expected
    assert os.listdir(tmp_path) == ["x.zllm"]


def test_compilations_to_the_same_place_at_once_all_succeed(
    conformance: Path, compiled: Callable[..., Path], kernel_cache: Path, tmp_path: Path
) -> None:
    output = tmp_path / "x.zllm"
    printed = python(CHILDREN + RACES, conformance / f"{NAME}.gguf", output, kernel_cache, 4)
    assert printed == "0 0 0 0\n" * 4
    assert content(output) == content(compiled(NAME))
    assert os.listdir(tmp_path) == ["x.zllm"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_artifact_is_not_replaced(conformance: Path, tmp_path: Path, kind: str) -> None:
    output, other = tmp_path / "x.zllm", tmp_path / "precious"
    other.mkdir()
    (other / "letter").write_text("dear")
    match kind:
        case "file":
            output.write_text("dear")
        case "folder":
            shutil.copytree(other, output)
        case "link":
            output.symlink_to(other)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ZllmcError, match=r"x\.zllm exists and is no artifact"):
        zllmc.compiler.compile_model(conformance / f"{NAME}.gguf", output, context=64)
    assert sorted(tmp_path.rglob("*")) == before
