"""zllmc beside llama.cpp: the same GGUF files, tokens and threads, in alternating order.

    python benchmarks/compare.py MODEL.gguf … --threads 1,2 --llama-python llama/bin/python --chart speed.png

llama.cpp is taken wherever it is found: the package llama-cpp-python in this Python or in that of
--llama-python, and the program llama-bench on the PATH. Every engine loads a model once in a process of its
own (llama-bench once for each run), computes a prompt of real text, and decodes greedily after it.
The read bandwidth and the int8 peak are measured between the runs, on as many threads: decode is shown as the
part of the bandwidth that reading the file's weights once for each token takes, prefill as the part of the
peak that the products of weights and activations take.

Engines must agree about the text's token ids, and each must have every other's first choice among its five
likeliest tokens; the program ends with an error if they don't.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from machine import Machine

from zllmc.cache import artifact_of
from zllmc.frontends.gguf import read_gguf
from zllmc.wording import table

HERE = Path(__file__).resolve().parent
Result = dict[str, Any]


class Worker:
    """An engine in worker.py."""

    def __init__(
        self, name: str, python: str, model: Path, text: Path, given: argparse.Namespace, threads: int
    ) -> None:
        self.name = name
        numbers = (str(threads), str(given.prompt), str(given.tokens))
        self._process = subprocess.Popen(
            [python, str(HERE / "worker.py"), name, str(model), str(text), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        hello = self._read()
        self.version: str = hello["version"]
        self.prompt: list[int] | None = hello["prompt"]

    def run(self) -> Result:
        print(file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> Result:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")
        answer: Result = json.loads(line)
        return answer


class LlamaBench:
    """The program llama-bench, which takes random tokens and doesn't say what it chose."""

    name = "llama-bench"
    prompt = None

    def __init__(self, program: str, model: Path, given: argparse.Namespace, threads: int) -> None:
        self._command = [program, "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]
        self._prompt, self._tokens = given.prompt, given.tokens
        self.version = program

    def run(self) -> Result:
        prefill = self._bench("-p", str(self._prompt), "-n", "0")
        decode = self._bench("-p", "0", "-n", str(self._tokens), "-d", str(self._prompt))
        self.version = f"llama.cpp {prefill.get('build_commit', '')}"
        return {
            "prefill_s": self._prompt / prefill["avg_ts"],
            "decode_s": self._tokens / decode["avg_ts"],
        }

    def close(self) -> None:
        pass

    def _bench(self, *options: str) -> Result:
        done = subprocess.run([*self._command, *options], capture_output=True, encoding="utf-8")
        if done.returncode != 0:
            raise SystemExit(f"{self._command[0]}: {done.stderr.strip()}")
        result: Result = json.loads(done.stdout)[-1]
        return result


def compare(model: Path, text: Path, machine: Machine, threads: int, given: argparse.Namespace) -> Result:
    """Runs all engines on one model; rates are medians of `given.repeat` rounds."""
    engines: list[Worker | LlamaBench] = []
    try:
        engines.append(Worker("zllmc", sys.executable, artifact_of(model), text, given, threads))
        if given.llama_python is not None:
            engines.append(Worker("llama.cpp", given.llama_python, model, text, given, threads))
        if given.llama_bench is not None:
            engines.append(LlamaBench(given.llama_bench, model, given, threads))
        for engine in engines:
            engine.run()  # touches the memory
        bandwidths, peaks = [], []
        runs: dict[str, list[Result]] = {engine.name: [] for engine in engines}
        for number in range(given.repeat):
            bandwidths.append(machine.read_bandwidth())
            peaks.append(machine.dot_peak())
            for engine in engines if number % 2 == 0 else reversed(engines):
                runs[engine.name].append(engine.run())
    finally:
        for engine in engines:
            engine.close()

    bandwidth, peak = median(bandwidths), median(peaks)
    read, operations = work(model)
    result: Result = {
        "model": model.stem,
        "threads": threads,
        "prompt": given.prompt,
        "tokens": given.tokens,
        "read_bytes_per_s": bandwidth,
        "int8_operations_per_s": peak,
        "engines": {},
        "same_tokens": agreement(engines, runs),
    }
    for engine in engines:
        prefill, decode = ([r[key] for r in runs[engine.name]] for key in ("prefill_s", "decode_s"))
        rates = given.prompt / median(prefill), given.tokens / median(decode)
        result["engines"][engine.name] = {
            "version": engine.version,
            "prefill": {"tokens_per_s": rates[0], "of_peak": rates[0] * operations / peak, "s": prefill},
            "decode": {"tokens_per_s": rates[1], "of_bandwidth": rates[1] * read / bandwidth, "s": decode},
        }
    return result


def work(model: Path) -> tuple[int, int]:
    """Bytes of weights that decoding a token reads, as the file packs them, and the operations of a prompt's
    token in matrices. Prompts need the head for their last token only; attention isn't counted."""
    tensors = read_gguf(model).tensors
    layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.")]
    head = tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"]
    read = sum(tensor.data.nbytes for tensor in [*layers, head])
    return read, sum(2 * prod(tensor.shape) for tensor in layers if len(tensor.shape) == 2)


def agreement(engines: list[Worker | LlamaBench], runs: dict[str, list[Result]]) -> int | None:
    """How many greedy tokens all engines have in common; None if only one says its tokens.

    Ends the program if they can't have computed the same thing.
    """
    speaking = [engine for engine in engines if engine.prompt is not None]
    last = [runs[engine.name][-1] for engine in speaking]
    if len(speaking) < 2:
        return None
    for engine, run in zip(speaking, last, strict=True):
        if engine.prompt != speaking[0].prompt:
            raise SystemExit(f"{engine.name} and {speaking[0].name} make different token ids of the text")
        likeliest = [id for id, _ in run["likeliest"]]
        if any(other["ids"][0] not in likeliest for other in last):
            raise SystemExit(f"{engine.name} disagrees about the first token; its likeliest are {likeliest}")
    steps = zip(*(run["ids"] for run in last), strict=True)
    same = [len(set(step)) == 1 for step in steps]
    return same.index(False) if False in same else len(same)


def show(results: list[Result]) -> None:
    """Prints all cases, a row for each engine, and the geometric means of the ratios."""
    head = ["model", "threads", "engine", "prefill", "of peak", "×", "decode", "of bandwidth", "×"]
    rows = [head]
    ratios: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        ours = result["engines"]["zllmc"]
        for name, engine in result["engines"].items():
            prefill, decode = engine["prefill"], engine["decode"]
            times = ["", ""]
            if engine is not ours:
                pair = tuple(
                    ours[k]["tokens_per_s"] / engine[k]["tokens_per_s"] for k in ("prefill", "decode")
                )
                ratios.setdefault(name, []).append(pair)
                times = [f"{ratio:.2f}" for ratio in pair]
            speeds = [
                [f"{prefill['tokens_per_s']:,.1f}", f"{100 * prefill['of_peak']:.1f} %"],
                [f"{decode['tokens_per_s']:,.1f}", f"{100 * decode['of_bandwidth']:.1f} %"],
            ]
            case = [result["model"], str(result["threads"]), name]
            rows.append([*case, *speeds[0], times[0], *speeds[1], times[1]])
    for name, pairs in ratios.items():
        means = [f"{geometric_mean(ratio):.2f}" for ratio in zip(*pairs, strict=True)]
        rows.append(["geometric mean", "", name, "", "", means[0], "", "", means[1]])
    print(table(rows))
    print(
        "tokens/s for a prompt of {prompt} tokens and {tokens} after it; ×: zllmc over that engine".format(
            **results[0]
        )
    )
    for result in results:
        same = "" if result["same_tokens"] is None else f"; first {result['same_tokens']} tokens the same"
        print(
            f"{result['model']}, {result['threads']} threads: {result['read_bytes_per_s'] / 1e9:.1f} GB/s, "
            f"{result['int8_operations_per_s'] / 1e9:.0f} GOPS{same}"
        )


def draw(results: list[Result], path: Path) -> None:
    """Bars of both speeds, a group for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [f"{result['model']}\n{result['threads']} threads" for result in results]
    names = list(results[0]["engines"])
    width = 0.8 / len(names)
    figure, plots = pyplot.subplots(2, 1, figsize=(max(6, 1.6 * len(cases)), 8), layout="constrained")
    for plot, kind in zip(plots, ("prefill", "decode"), strict=True):
        for number, name in enumerate(names):
            heights = [result["engines"][name][kind]["tokens_per_s"] for result in results]
            places = [case + (number - (len(names) - 1) / 2) * width for case in range(len(cases))]
            plot.bar_label(plot.bar(places, heights, width, label=name), fmt="%.0f", fontsize=7)
        plot.set_xticks(range(len(cases)), cases, fontsize=7)
        plot.set_ylabel(f"{kind}, tokens/s")
        plot.legend()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="zllmc beside llama.cpp, on the same files and threads.")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas  [1,2]")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt  [512]")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to decode  [128]")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; medians are shown  [5]")
    parser.add_argument("--text", type=Path, default=HERE.parent / "README.md", help="the prompt's text")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--llama-bench", default=shutil.which("llama-bench"), help="the program llama-bench")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the speeds; needs matplotlib")
    given = parser.parse_args(arguments)
    if given.chart and find_spec("matplotlib") is None:
        parser.error("--chart needs matplotlib: pip install matplotlib")
    if given.llama_python is None and find_spec("llama_cpp") is not None:
        given.llama_python = sys.executable
    if given.llama_python is None and given.llama_bench is None:
        print("no llama.cpp found (see --llama-python): measuring zllmc alone", file=sys.stderr)

    results = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        once = given.text.read_text(encoding="utf-8")
        text.write_text(once * (16 * given.prompt // len(once) + 1), encoding="utf-8")
        for threads in map(int, given.threads.split(",")):
            machine = Machine(threads)
            for model in given.models:
                results.append(compare(model, text, machine, threads, given))
            machine.close()
    show(results)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if given.chart:
        draw(results, given.chart)


if __name__ == "__main__":
    main()
