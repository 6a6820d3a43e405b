"""The command line on GPU targets, with the emulated device in the GPU's place."""

import json
import pathlib
from typing import Any

import pytest

from processes import Run

pytest_plugins = ("cli_fixtures",)

CONTEXT = ("--context", 128)


@pytest.mark.parametrize("target", ["metal:apple9", "cuda:sm_90"])
def test_run_generates_the_same_text_on_a_gpu_as_on_the_cpu(
    run: Run, gguf: pathlib.Path, target: str
) -> None:
    question = ("run", gguf, "--temperature", 0, "--max-tokens", 12, *CONTEXT, "hello")
    on_cpu = run(*question)
    on_gpu = run(*question, "--target", target, "--device", "emulate")
    assert (on_gpu.code, on_cpu.code) == (0, 0)
    assert on_gpu.out == on_cpu.out and on_cpu.out.strip()


def test_verify_compares_every_kernel_of_a_gpu_with_its_reference(run: Run, gguf: pathlib.Path) -> None:
    done = run("verify", gguf, *CONTEXT, "--target", "metal:apple9", "--device", "emulate", "--json")
    result = json.loads(done.out)
    assert done.code == 0 and result["passed"]
    ops = {kernel["name"].split("_")[0] for kernel in result["kernels"]}
    assert ops >= {"linear", "attention", "rope", "embedding", "rms", "glu"}


def test_an_artifact_has_readable_sources_and_what_the_driver_loads(
    run: Run, gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    run("compile", gguf, "-o", tmp_path / "x.zllm", *CONTEXT, "--target", "rocm:gfx1100")
    kernels = tmp_path / "x.zllm" / "kernels"
    sources = sorted(path.stem for path in kernels.glob("*.hip"))
    assert sources and sources == sorted(path.stem for path in kernels.glob("*.hsaco"))
    assert all('#include "prelude.h"' in path.read_text() for path in kernels.glob("*.hip"))
    assert "__global__" in (kernels / "prelude.h").read_text()
    assert "rocm:gfx1100\n" in run("info", tmp_path / "x.zllm").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "emulate"], "is for GPUs"),
        (["--target", "cuda:sm_1"], "unknown cuda target"),
        (["--target", "metal:apple9"], "metal|Metal|macOS"),  # without an emulator, here is no such device
    ],
)
def test_errors_say_what_is_wrong_and_what_there_is(
    run: Run, gguf: pathlib.Path, arguments: list[Any], message: str
) -> None:
    done = run("run", gguf, *CONTEXT, "--max-tokens", 1, *arguments, "hello")
    assert done.code == 2
    assert any(word in done.err for word in message.split("|")) and "Traceback" not in done.err


def test_bench_reckons_a_plan_on_the_peaks_of_a_gpu(run: Run, gguf: pathlib.Path) -> None:
    result = json.loads(run("bench", gguf, "--model-only", "--target", "cuda:sm_90", "--json").out)
    decode, prefill = result["entries"]["decode"], result["entries"]["prefill"]
    assert result["target"] == "cuda:sm_90"
    assert decode["launches"] == sum(op["launches"] for op in decode["ops"]) > 10
    # A decode round reads all weights but the embedding's other rows; the model has 64,192, in f32.
    assert 4 * 40_000 < decode["bytes"] < 4 * 64_192 + 100_000
    assert prefill["operations"] > 100 * decode["operations"]
    assert "tokens/s" in run("bench", gguf, "--model-only", "--target", "rocm:gfx942").out
    assert run("bench", gguf, "--model-only").code == 2
    assert "measure it" in run("bench", gguf, "--model-only", "--target", "cpu:avx2").err.lower()
