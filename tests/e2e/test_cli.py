"""The command line as a user meets it: compile, run, and the cache between them."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

import zllmc
from processes import COMMAND, Run, cached, process
from tiny import tiny_model

pytest_plugins = ("cli_fixtures",)

COMPILER = ("tvm", "zllmc.frontends", "zllmc.passes", "zllmc.codegen", "zllmc.compiler")


def test_compile_writes_an_artifact_that_runs_without_the_model(
    run: Run, gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = shutil.copy(gguf, tmp_path)
    output = tmp_path / "out.zllm"
    done = run("compile", model, "-o", output, "--context", "512")
    assert done.code == 0 and str(output) in done.out
    os.remove(model)
    assert run("run", output, "hi", "--max-tokens", "3").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.zllm"]


def test_compile_dumps_the_graph_after_every_pass(
    run: Run, gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    options = ["--dump-ir", tmp_path / "ir", "--verify", "--max-batch", "3"]
    assert run("compile", gguf, "-o", tmp_path / "a.zllm", *options).code == 0
    for entry in ("decode", "prefill"):
        *graphs, kernels = sorted((tmp_path / "ir" / entry).glob("*.txt"))
        assert len(graphs) > 8 and all(path.read_text().startswith("graph llama") for path in graphs)
        assert "linear" in kernels.read_text()
        pictures = sorted((tmp_path / "ir" / entry).glob("*.svg"))
        assert [p.stem for p in pictures] == [p.stem for p in (*graphs, kernels)]
    assert (tmp_path / "ir/batch/99-kernels.txt").read_text().startswith("kernels batch: 3 tokens")


def test_only_the_answer_goes_to_stdout(run: Run, artifact: pathlib.Path) -> None:
    done = run("run", artifact, "hi", "--max-tokens", "5", "--temperature", "0")
    engine = zllmc.load(artifact)
    messages = [{"role": "user", "content": "hi"}]
    greedy = zllmc.SamplingParams(temperature=0)
    answer = "".join(c.text for c in engine.generate(messages, max_tokens=5, sampling=greedy))
    assert done.code == 0 and done.out == answer + "\n"
    assert done.err.startswith("llama 64k F32 | weights 0.00 GiB | KV 128 B/token | context 512\n")
    assert "answer 5 tokens" in done.err


def test_quiet_prints_nothing_else(run: Run, artifact: pathlib.Path) -> None:
    done = run("run", artifact, "hi", "-q", "--max-tokens", "5")
    assert done.out and not done.err


def test_the_same_seed_gives_the_same_answer(run: Run, artifact: pathlib.Path) -> None:
    def answer(seed: int) -> str:
        return run("run", artifact, "hi", "--max-tokens", "20", "--seed", seed, "--temperature", "2").out

    assert answer(1) == answer(1) != answer(2)


def test_a_stop_string_ends_the_answer(run: Run, artifact: pathlib.Path) -> None:
    options = ("run", artifact, "hi", "--temperature", "0", "--max-tokens")
    stop = next(c for c in run(*options, "200").out[5:] if c.isascii() and c.isprintable())
    done = run(*options, "200", "--stop", stop)
    assert stop not in done.out and "cut:" not in done.err


def test_a_prompt_comes_from_stdin(run: Run, artifact: pathlib.Path) -> None:
    options = ("--max-tokens", "5", "--temperature", "0", "-q")
    piped = run("run", artifact, "-", *options, stdin="a long\nprompt")
    assert piped.out == run("run", artifact, "a long\nprompt", *options).out


def test_raw_continues_the_text_without_a_template(run: Run, artifact: pathlib.Path) -> None:
    done = run("run", artifact, "abc", "--raw", "--max-tokens", "2")
    assert "prompt 4 tokens" in done.err  # BOS and three bytes


def test_a_model_without_a_template_continues_the_text_and_says_so(run: Run, tmp_path: pathlib.Path) -> None:
    done = run("run", tiny_model(tmp_path / "plain.gguf", template=None), "abc", "--max-tokens", "2")
    assert done.code == 0 and "no chat template" in done.err and "prompt 4 tokens" in done.err


def test_options_of_compiling_are_refused_for_an_artifact(run: Run, artifact: pathlib.Path) -> None:
    done = run("run", artifact, "hi", "--context", "64")
    assert done.code == 2 and "--context" in done.err


def test_a_model_is_compiled_once_for_each_set_of_options(
    run: Run, gguf: pathlib.Path, cache: pathlib.Path
) -> None:
    # The cache is shared with other tests: 90 is the context of this one alone.
    def entries(*options: str) -> set[pathlib.Path]:
        before = cached(cache)
        assert run("run", gguf, "hi", "--max-tokens", "2", *options).code == 0
        return cached(cache) - before

    assert len(entries("--context", "90")) == 1
    assert not entries("--context", "90")
    assert len(entries("--context", "90", "--kv", "q8")) == 1
    os.utime(gguf, (1, 1))
    assert len(entries("--context", "90")) == 1


def test_two_processes_that_want_the_same_model_compile_it_once(
    gguf: pathlib.Path, cache: pathlib.Path
) -> None:
    before = cached(cache)
    os.utime(gguf, (2, 2))
    command = [*COMMAND, "run", str(gguf), "hi", "--max-tokens", "2", "--context", "100"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(p.communicate(timeout=120), p.returncode)[1] for p in both] == [0, 0]
    assert len(cached(cache) - before) == 1


def test_a_damaged_cache_entry_is_compiled_again(run: Run, gguf: pathlib.Path, cache: pathlib.Path) -> None:
    before = cached(cache)
    os.utime(gguf, (3, 3))
    assert run("run", gguf, "hi", "--max-tokens", "2", "--context", "100").code == 0
    (entry,) = cached(cache) - before
    os.truncate(entry / "weights.bin", 100)
    left = entry.with_name(f".{entry.name}-killed")
    left.mkdir()
    assert run("run", gguf, "hi", "--max-tokens", "2", "--context", "100").code == 0
    assert not left.exists()


def test_running_a_cached_model_imports_no_compiler(gguf: pathlib.Path) -> None:
    arguments = ["run", str(gguf), "hi", "--max-tokens", "2", "--context", "100"]
    process(*arguments)
    code = f"""
import atexit, sys
loaded = lambda: [m for m in sys.modules if any(m == c or m.startswith(c + ".") for c in {COMPILER})]
atexit.register(lambda: print("LOADED", loaded(), file=sys.stderr))
from zllmc.cli import main
main({arguments})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and done.stderr.endswith("LOADED []\n"), done.stderr


def test_importing_zllmc_imports_nothing_and_takes_no_time() -> None:
    code = """
import sys, time
before, begin = set(sys.modules), time.process_time()
import zllmc
print(time.process_time() - begin, "numpy" in set(sys.modules) - before, zllmc.__version__)
"""
    seconds, numpy, _ = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert float(seconds) < 0.2 and numpy == "False"


def test_the_api_has_what_it_says() -> None:
    assert all(callable(getattr(zllmc, name)) for name in zllmc.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        zllmc.nothing  # noqa: B018


def test_a_real_model_answers_as_llama_cpp_does(
    run: Run, models: Callable[[str], pathlib.Path], conformance: pathlib.Path
) -> None:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    reference = json.loads((conformance / "real" / "greedy.json").read_text())["models"][name]["raw-en"]
    done = run("run", models(name), reference["text"], "--raw", "--temperature", "0", "-q")
    assert done.out == reference["gen_text"] + "\n"
