"""A GPU of this machine: are its kernels right, and how fast do models run on it?

    python benchmarks/device.py TARGET [MODEL ...] [--conformance FOLDER] [--json FILE]

TARGET is as for `zllmc compile` (`cuda`, `rocm:gfx1100`, …). Every small model of a conformance folder is
compiled; each of its kernels is compared with the op's numpy reference on the device itself, and the logits
with the file's. Then each MODEL is compiled and measured: prefill, decode as a replayed graph, kernel by
kernel, and in greedy rounds that the device runs by itself, which must choose the same tokens, and what part
of the memory's bandwidth those rounds take. It needs the packages of `pip install zllmc[gpu]`, the driver,
and no more than some minutes.

With --emulate, the same runs on the emulated device: a rehearsal, in which no time means anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from zllmc import targets
from zllmc.bench import traffic
from zllmc.cache import kernel_cache
from zllmc.compiler import compile_model
from zllmc.runtime.artifact import open_artifact
from zllmc.runtime.devices import Mode
from zllmc.runtime.engine import Engine
from zllmc.runtime.greedy_rounds import GreedyRounds
from zllmc.targets.gpu import GpuTarget
from zllmc.verify import verify_artifact
from zllmc.wording import table
from zllmc.zllm_ir.errors import ZllmcError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--conformance", type=Path, help="a folder with models and their logits as .npz")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="to decode")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    target = targets.parse(options.target)
    if not isinstance(target, GpuTarget):
        raise ZllmcError(f"{target} is no GPU: measure it with benchmarks/compare.py")
    mode: Mode | None = "emulate" if options.emulate else None
    print(f"{target}: {target.product.name}, {target.product.bandwidth:,.0f} GB/s")
    results: dict[str, Any] = {"target": str(target), "conformance": {}, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for model in sorted(options.conformance.rglob("*.gguf")) if options.conformance else ():
            results["conformance"][model.stem] = check(model, target, Path(folder) / "small.zllm", mode)
        for model in options.models:
            artifact = compile_model(
                model,
                Path(folder) / "model.zllm",
                target=str(target),
                context=options.prompt + options.tokens + 2,
                kernel_cache=kernel_cache(),
            )
            results["models"][model.stem] = measure(artifact, target, mode, options.prompt, options.tokens)
    _print(results["models"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    wrong = [name for name, right in results["conformance"].items() if right is False]
    wrong += [
        name
        for name, row in results["models"].items()
        if not (row["replay_equals_eager"] and row["rounds_equal_replay"])
    ]
    if wrong:
        sys.exit(f"WRONG: {', '.join(wrong)}")


def check(model: Path, target: GpuTarget, artifact: Path, mode: Mode | None) -> bool | str:
    """Whether all kernels and the logits are within tolerance; or why the model isn't compiled."""
    begin = time.perf_counter()
    against = model.with_suffix(".npz")
    try:
        compile_model(model, artifact, target=str(target), context=256, kernel_cache=kernel_cache())
    except ZllmcError as error:
        print(f"{model.stem}: skipped, {error}")
        return str(error)
    passed = verify_artifact(
        artifact, source=model, against=against if against.is_file() else None, device=mode
    )
    print(
        f"{model.stem}: {'right' if passed else 'WRONG'}, {time.perf_counter() - begin:.1f} s\n", flush=True
    )
    return passed


def measure(artifact: Path, target: GpuTarget, mode: Mode | None, prompt: int, tokens: int) -> dict[str, Any]:
    """Tokens/s of prefill and of decode replayed, eager and in rounds, and bytes/s of these over the peak."""
    begin = time.perf_counter()
    replayed, ids, chosen, moved = _run(artifact, mode, prompt, tokens)
    eager, eager_ids, *_ = _run(artifact, mode or "eager", prompt, tokens)
    rate = replayed["rounds"]
    return {
        "load_s": replayed["load"],
        "prefill_tokens_per_s": replayed["prefill"],
        "decode_tokens_per_s": replayed["decode"],
        "decode_eager_tokens_per_s": eager["decode"],
        "rounds_tokens_per_s": rate,
        "replay_equals_eager": ids == eager_ids,
        "rounds_equal_replay": chosen == ids,
        "bandwidth": moved * rate / (target.product.bandwidth * 1e9),
        "seconds": time.perf_counter() - begin,
    }


def _run(
    artifact: Path, mode: Mode | None, count: int, tokens: int
) -> tuple[dict[str, float], list[int], list[int], float]:
    """Seconds to load, tokens/s of prefill, decode and greedy rounds, the tokens that the host and the device
    chose, and weight bytes of a token."""
    begin = time.perf_counter()
    with Engine.open(artifact, device=mode) as engine:
        loaded = time.perf_counter() - begin
        session = engine.session()
        prompt = np.random.default_rng(0).integers(0, engine.manifest.vocab, count).tolist()
        session.prefill(prompt)  # the first pass loads kernels and touches memory
        session.truncate(0)
        begin = time.perf_counter()
        ids = [int(np.argmax(session.prefill(prompt)))]
        prefill = count / (time.perf_counter() - begin)
        ids.append(int(np.argmax(session.decode(ids[-1]))))  # records the graph
        begin = time.perf_counter()
        for _ in range(tokens):
            ids.append(int(np.argmax(session.decode(ids[-1]))))
        decode = tokens / (time.perf_counter() - begin)
        session.truncate(count)
        greedy = GreedyRounds(engine, session, count + tokens + 1)
        chosen = ids[:1]
        chosen.append(greedy.step(chosen[-1]))
        begin = time.perf_counter()
        for _ in range(tokens):
            chosen.append(greedy.step(chosen[-1]))
        rounds = tokens / (time.perf_counter() - begin)
        moved = traffic(engine, open_artifact(artifact).plan, 1.0)["weight_bytes_per_token"]
    rates = {"load": loaded, "prefill": prefill, "decode": decode, "rounds": rounds}
    return rates, ids, chosen, moved


def _print(models: dict[str, dict[str, Any]]) -> None:
    rates = {
        "prefill": "prefill tokens/s",
        "decode": "decode tokens/s",
        "decode_eager": "eager",
        "rounds": "rounds",
    }
    rows = [["model", "load s", *rates.values(), "same", "of bandwidth"]]
    for name, row in models.items():
        found = [f"{row[f'{what}_tokens_per_s']:,.1f}" for what in rates]
        same = "yes" if row["replay_equals_eager"] and row["rounds_equal_replay"] else "NO"
        rows.append([name, f"{row['load_s']:.2f}", *found, same, f"{row['bandwidth']:.0%}"])
    if models:
        print(table(rows))


if __name__ == "__main__":
    main()
