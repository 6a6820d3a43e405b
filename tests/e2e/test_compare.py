"""benchmarks/compare.py, with and without another engine. What it measures isn't judged here."""

import importlib
import json
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest

from places import REPOSITORY
from processes import Result

pytest_plugins = ("cli_fixtures",)

SIZES = ("--threads", "1", "--repeat", "1", "--prompt", "16", "--tokens", "4")
LLAMA_BENCH = f"""#!{sys.executable}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["-r"] == "1" and options["-t"] == "1" and options["-m"].endswith(".gguf")
assert options.get("-d") == (None if options["-n"] == "0" else "16")
print(json.dumps([{{"build_commit": "abc", "avg_ts": 2.0 if options["-n"] == "0" else 0.5}}]))
"""


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.setenv("PATH", "")  # where a llama-bench may lie
    module = importlib.import_module("compare")
    monkeypatch.setattr(module, "find_spec", lambda name: None)  # a llama-cpp-python may be installed
    return module


def run(compare: ModuleType, capfd: pytest.CaptureFixture[str], *arguments: Any) -> Result:
    compare.main([str(argument) for argument in arguments])
    return Result(0, *capfd.readouterr())


def test_alone_it_compares_with_the_machine(
    compare: ModuleType, capfd: pytest.CaptureFixture[str], gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done = run(compare, capfd, gguf, *SIZES, "--json", tmp_path / "all.json")
    assert "no llama.cpp found" in done.err
    (result,) = json.loads((tmp_path / "all.json").read_text())
    assert list(result["engines"]) == ["zllmc"] and result["same_tokens"] is None
    ours = result["engines"]["zllmc"]
    assert ours["decode"]["tokens_per_s"] == pytest.approx(4 / ours["decode"]["s"][0])
    # F32: the layer's matrices and norms, and the head with the last norm's weights left out.
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    read = 4 * (matrices + 2 * 64 + 260 * 64)
    assert ours["decode"]["of_bandwidth"] == pytest.approx(
        ours["decode"]["tokens_per_s"] * read / result["read_bytes_per_s"]
    )
    assert ours["prefill"]["of_peak"] == pytest.approx(
        ours["prefill"]["tokens_per_s"] * 2 * matrices / result["int8_operations_per_s"]
    )
    assert "tiny" in done.out and "geometric mean" not in done.out


def test_beside_a_llama_bench(
    compare: ModuleType, capfd: pytest.CaptureFixture[str], gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    options = ("--llama-bench", program, "--json", tmp_path / "all.json")
    done = run(compare, capfd, gguf, *SIZES, *options)
    (result,) = json.loads((tmp_path / "all.json").read_text())
    ours, other = result["engines"]["zllmc"], result["engines"]["llama-bench"]
    assert other["version"] == "llama.cpp abc"
    assert (other["prefill"]["tokens_per_s"], other["decode"]["tokens_per_s"]) == (2.0, 0.5)
    mean = next(line for line in done.out.splitlines() if line.startswith("geometric mean"))
    assert f"{ours['decode']['tokens_per_s'] / 0.5:.2f}" in mean


def test_draws_a_chart(compare: ModuleType, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    speed = {"prefill": {"tokens_per_s": 9.0}, "decode": {"tokens_per_s": 3.0}}
    results = [{"model": "m", "threads": t, "engines": {"zllmc": speed, "llama.cpp": speed}} for t in (1, 2)]
    compare.draw(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_engines_that_compute_different_things_are_no_comparison(compare: ModuleType) -> None:
    class Engine:
        def __init__(self, name: str, prompt: list[int]) -> None:
            self.name, self.prompt = name, prompt

    def runs(first: int) -> list[dict[str, Any]]:
        return [{"ids": [first, 5, 6], "likeliest": [[id, -1.0] for id in (first, 8, 7, 6, 5)]}]

    a, b = Engine("a", [1, 2]), Engine("b", [1, 2])
    assert compare.agreement([a, b], {"a": runs(3), "b": runs(3)}) == 3
    assert compare.agreement([a, b], {"a": runs(7), "b": runs(8)}) == 0  # a near-tie
    with pytest.raises(SystemExit, match="a disagrees about the first token"):
        compare.agreement([a, b], {"a": runs(3), "b": runs(4)})
    with pytest.raises(SystemExit, match="b and a make different token ids"):
        compare.agreement([a, Engine("b", [1])], {"a": runs(3), "b": runs(3)})


def test_a_worker_that_fails_ends_the_program(
    compare: ModuleType, gguf: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"llama\.cpp ended with exit code 1"):
        compare.main([str(gguf), *SIZES, "--llama-python", sys.executable])
