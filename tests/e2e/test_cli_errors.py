"""What goes wrong: files, options, readers that leave, interrupts."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from gguf_writer import STRING, key, model, string
from processes import COMMAND, Run, cached
from zllmc.compiler import compile_model
from zllmc.zllm_ir.errors import ZllmcError

pytest_plugins = ("cli_fixtures",)


def bad_files(folder: pathlib.Path, good: bytes) -> dict[str, pathlib.Path]:
    unsupported = model([key("general.architecture", STRING, string("martian"))])
    contents = {
        "empty": b"",
        "text": b"just text",
        "cut header": good[:200],
        "cut data": good[:-2000],
        "unsupported": unsupported,
        "hostile": b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16 + bytes(64),
        "control": model([key("general.architecture", STRING, string("a\x1b[2J\nb"))]),
    }
    for name, data in contents.items():
        (folder / f"{name}.gguf").write_bytes(data)
    paths = {name: folder / f"{name}.gguf" for name in contents}
    return paths | {"missing": folder / "missing.gguf", "folder": folder / "nothing-in-here"}


@pytest.mark.parametrize("command", ["compile", "run", "info", "verify", "bench"])
@pytest.mark.parametrize(
    "name",
    ["empty", "text", "cut header", "cut data", "unsupported", "hostile", "control", "missing", "folder"],
)
def test_a_file_that_cannot_be_used_is_one_paragraph_and_exit_code_2(
    run: Run, gguf: pathlib.Path, tmp_path: pathlib.Path, command: str, name: str, cache: pathlib.Path
) -> None:
    before = cached(cache)
    (tmp_path / "nothing-in-here").mkdir()
    path = bad_files(tmp_path, gguf.read_bytes())[name]
    output = ["-o", tmp_path / "out.zllm"] if command == "compile" else []
    done = run(command, path, *output)
    assert done.code == 2
    assert done.err.startswith("zllmc: ") and done.err.count("\n") == 1 and "\x1b" not in done.err
    assert not (tmp_path / "out.zllm").exists() and cached(cache) == before


def test_a_cache_that_cannot_be_made_is_named_with_a_way_out(
    run: Run, gguf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZLLMC_CACHE", str(tmp_path / "file"))
    done = run("run", gguf, "hi", "--max-tokens", "1")
    assert done.code == 2 and done.err.count("\n") == 1
    assert f"{tmp_path}/file/models" in done.err and "ZLLMC_CACHE" in done.err and "-o" in done.err


@pytest.mark.parametrize("options", [["-o", "out.zllm"], ["-o", "out.zllm", "--dump-ir", "dump"]])
def test_a_file_that_does_not_fit_on_the_disk_is_named_with_a_way_out(
    gguf: pathlib.Path, artifact: pathlib.Path, tmp_path: pathlib.Path, options: list[str]
) -> None:
    """With a limit to the size of files, for a disk that is full: the same errors, that name no file."""
    size = (artifact / "weights.bin").stat().st_size if options[-1] == "out.zllm" else 1024
    limited = ["sh", "-c", f'ulimit -f {size // 1024} && exec "$@"', "sh"]
    command = [*limited, *COMMAND, "compile", str(gguf), "--context", "512", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"zllmc: {options[-1]} cannot be written: ") and "-o" in done.stderr
    assert not list(tmp_path.glob("*out.zllm*"))


def test_a_bad_file_is_refused_before_the_compiler_is_loaded(tmp_path: pathlib.Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    code = f"""
import atexit, sys
atexit.register(lambda: print("tvm" in sys.modules))
from zllmc.cli import main
main(["compile", {str(tmp_path / "bad.gguf")!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (2, "False\n")


@pytest.mark.parametrize("wrong", ["weights.bin", "plan.json", "manifest.json", "tokenizer.json"])
def test_a_damaged_artifact_is_refused(
    run: Run, artifact: pathlib.Path, tmp_path: pathlib.Path, wrong: str
) -> None:
    broken = shutil.copytree(artifact, tmp_path / "broken.zllm")
    os.truncate(broken / wrong, (broken / wrong).stat().st_size // 2)
    done = run("run", broken, "hi")
    assert done.code == 2 and done.err.startswith("zllmc: ") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--stop", ""], "stop string"),
        (["--threads", "0"], "threads"),
        (["--top-k", "-1"], "top_k is -1; it must be a whole number, 0 or more"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_options_are_named(run: Run, artifact: pathlib.Path, options: list[str], name: str) -> None:
    done = run("run", artifact, "hi", *options)
    assert done.code == 2 and name in done.err


def test_what_is_no_model_to_compile_is_said(
    run: Run, artifact: pathlib.Path, gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for arguments, message in (
        ((artifact,), "is compiled already"),
        ((tmp_path / "pipe.gguf",), "no regular file"),
        ((gguf, "--max-batch", "100000"), "max_batch is 100000; it must be from 1 to 256"),
    ):
        done = run("compile", *arguments)
        assert done.code == 2 and message in done.err
    assert "no regular file" in run("run", tmp_path / "pipe.gguf", "hi").err
    with pytest.raises(ZllmcError, match="a context of 0 tokens"):
        compile_model(gguf, tmp_path / "x.zllm", context=0)


def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        [*COMMAND, "targets"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout and child.stderr
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 1


@contextmanager
def cold_compile(gguf: pathlib.Path, folder: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """A compilation of kernels, which takes seconds, into `folder`/out.zllm."""
    environment = {**os.environ, "ZLLMC_CACHE": str(folder / "cold")}
    command = [*COMMAND, "compile", str(gguf), "-o", str(folder / "out.zllm")]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: child.poll() is None and list(folder.glob(".out.zllm-*")))
    yield child
    assert not (folder / "out.zllm").exists()


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def test_ctrl_c_ends_a_compile_at_once_and_leaves_nothing(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with cold_compile(gguf, tmp_path) as child:
        wait_for(lambda: children(child.pid))
        for worker in (workers := children(child.pid)):
            os.kill(worker, signal.SIGSTOP)  # it will never answer
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err.strip()) == (130, b"zllmc: interrupted")
    assert not any(pathlib.Path("/proc", str(worker)).exists() for worker in workers)
    assert os.listdir(tmp_path) in ([], ["cold"])
    assert not list(tmp_path.glob("cold/kernels/tmp*"))


def test_a_killed_compile_leaves_nothing_that_loads(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with cold_compile(gguf, tmp_path) as child:
        child.kill()
        _, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL and b"Traceback" not in err
