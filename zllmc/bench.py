"""`zllmc bench`: how fast an artifact runs, and how much memory it moves for it."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from zllmc.runtime.artifact import open_artifact
from zllmc.runtime.engine import Engine
from zllmc.runtime.speculation import Speculation
from zllmc.terminal import note
from zllmc.wording import headline, table
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import Launch, Plan, Pointer


def run_bench(
    artifact: Path,
    *,
    prompt: int,
    tokens: int,
    depth: int,
    repeat: int,
    batches: Sequence[int] = (),
    speculate: bool,
    profile: bool,
    as_json: bool,
    threads: int | None,
) -> None:
    """Measures and prints. Times are medians of `repeat` runs, after one that isn't counted."""
    begin = time.perf_counter()
    with Engine.open(artifact, threads=threads) as engine:
        load_seconds = time.perf_counter() - begin
        needed, context = depth + prompt + tokens, engine.manifest.context
        if needed > context:
            raise ZllmcError(
                f"--depth + --prompt + --tokens is {needed:,}, but the context holds {context:,} tokens"
            )
        if batches and not 1 <= min(batches) <= max(batches) <= engine.max_batch:
            given = ",".join(map(str, batches))
            raise ZllmcError(f"--batch is {given}, but this artifact takes 1 to {engine.max_batch} sequences")
        plan = open_artifact(artifact).plan
        result = measure(engine, prompt, tokens, depth, repeat, speculate=speculate)
        saved = result["speculation"]["accepted"] / tokens if speculate else 0.0
        passes = result["decode"]["tokens_per_s"] * (1 - saved)
        result |= {"load": {"s": load_seconds}, "traffic": traffic(engine, plan, passes)}
        if batches:
            result["batches"] = measure_batches(engine, batches, depth + prompt, tokens, repeat)
        if profile:
            longest = next(entry.max_tokens for entry in plan.entries if entry.name == "prefill")
            result["profile"] = {
                "decode": profile_pass(engine, "decode", 1, depth + prompt),
                "prefill": profile_pass(engine, "prefill", min(prompt, longest), depth),
            }
            if batches and (largest := max(batches)) > 1:
                result["profile"]["batch"] = profile_pass(engine, "batch", largest, depth + prompt)
        if as_json:
            print(json.dumps(result))
        else:
            note(headline(engine.manifest))
            _print(result)


def measure(
    engine: Engine, prompt: int, tokens: int, depth: int, repeat: int, *, speculate: bool = False
) -> dict[str, Any]:
    """Prefill of `prompt` random tokens after `depth` cached ones, then `tokens` greedy decode rounds.
    With `speculate`, decoding includes making the index of all tokens before, and the last run's counts of
    guessed and accepted tokens are given."""
    random = np.random.default_rng(0)
    vocab = engine.manifest.vocab
    ids = random.integers(0, vocab, depth + prompt).tolist()
    session = engine.session()
    prefill, decode, first = [], [], []
    for run in range(repeat + 1):
        session.truncate(min(depth, len(session.tokens)))
        if len(session.tokens) < depth:
            session.prefill(ids[:depth])
        begin = time.perf_counter()
        logits = session.prefill(ids[depth:])
        computed = time.perf_counter()
        id = int(np.argmax(logits))
        chosen = time.perf_counter()
        decoder = Speculation(session, ids, tokens + 1) if speculate else session
        for _ in range(tokens):
            id = int(np.argmax(decoder.decode(id)))
        end = time.perf_counter()
        if run > 0:  # the first touches the memory
            prefill.append(computed - begin)
            first.append(chosen - begin)
            decode.append(end - chosen)
    guesses = {}
    if isinstance(decoder, Speculation):
        guesses["speculation"] = {"drafted": decoder.drafted, "accepted": decoder.accepted}
    return {
        "model": engine.manifest.name,
        "target": engine.manifest.target,
        "threads": engine.device.threads,
        "prompt": prompt,
        "tokens": tokens,
        "depth": depth,
        "repeat": repeat,
        "prefill": {"tokens_per_s": prompt / median(prefill), "s": prefill},
        "decode": {"tokens_per_s": tokens / median(decode), "s": decode},
        "first_token": {"s": median(first)},
        "memory": {"peak_bytes": peak_memory()},
        **guesses,
    }


def measure_batches(
    engine: Engine, sizes: Sequence[int], depth: int, tokens: int, repeat: int
) -> list[dict[str, Any]]:
    """Of each size, `tokens` greedy rounds of so many sequences, each after `depth` random tokens."""
    random = np.random.default_rng(1)
    sessions = [engine.session() for _ in range(max(sizes))]
    for session in sessions:
        session.prefill(random.integers(0, engine.manifest.vocab, depth).tolist())
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for run in range(repeat + 1):
        for size, seconds in times.items():
            batch, ids = sessions[:size], [0] * size
            for session in batch:
                session.truncate(depth)
            begin = time.perf_counter()
            for _ in range(tokens):
                ids = [int(np.argmax(row)) for row in engine.decode_batch(batch, ids)]
            if run > 0:
                seconds.append(time.perf_counter() - begin)
    return [{"size": n, "tokens_per_s": n * tokens / median(s), "s": s} for n, s in times.items()]


def traffic(engine: Engine, plan: Plan, rate: float) -> dict[str, float]:
    """Bytes of weights that a decode round reads, over their size in the model file, and in `rate` rounds."""
    moved = weight_bytes_per_token(plan, engine.manifest.vocab)
    packed = engine.manifest.source_weights_bytes
    return {
        "weight_bytes_per_token": moved,
        "packed_bytes": packed,
        "moved_over_packed": moved / packed,
        "weight_bytes_per_s": moved * rate,
    }


def weight_bytes_per_token(plan: Plan, vocab: int) -> int:
    """From the launches of a decode round: each reads all of every weight that it points to, but for the
    embedding, of which it reads one row."""
    weights = {number for number, buffer in enumerate(plan.buffers) if buffer.kind == "weights"}
    end = sum(plan.buffers[number].bytes for number in weights)

    def offsets(launch: Launch) -> set[int]:
        return {a.offset for a in launch.args if isinstance(a, Pointer) and a.buffer in weights}

    starts = sorted({at for entry in plan.entries for launch in entry.launches for at in offsets(launch)})
    sizes = {start: stop - start for start, stop in zip(starts, [*starts[1:], end], strict=True)}
    total = 0
    for launch in next(entry for entry in plan.entries if entry.name == "decode").launches:
        size = sum(sizes[at] for at in offsets(launch))
        total += size // vocab if launch.kernel.startswith("embedding_") else size
    return total


def profile_pass(
    engine: Engine, entry: str, tokens: int, depth: int, repeat: int = 5
) -> list[dict[str, Any]]:
    """Microseconds of each kernel in one pass of `tokens` tokens after `depth` cached ones, in a batch of one
    token for each sequence: the median of `repeat` passes, summed over the kernel's launches; slowest first.
    """
    sessions = [engine.session() for _ in range(tokens if entry == "batch" else 1)]
    for session in sessions if depth else ():
        session.prefill([0] * depth)
    # Sets up the pass that is then repeated.
    if entry == "batch":
        engine.decode_batch(sessions, [0] * tokens)
    else:
        sessions[0].prefill([0] * tokens)
    recording = engine.recordings[entry]
    times = np.median([recording.profile() for _ in range(repeat)], axis=0)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for launch, nanoseconds in zip(recording.launches, times, strict=True):
        by_kernel[launch.kernel].append(nanoseconds / 1000)
    rows = [{"kernel": kernel, "launches": len(us), "us": sum(us)} for kernel, us in by_kernel.items()]
    return sorted(rows, key=lambda row: row["us"], reverse=True)


def peak_memory() -> int:
    """Bytes of the largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print(result: dict[str, Any]) -> None:
    moved = result["traffic"]
    after = f" after {result['depth']:,}" if result["depth"] else ""
    rows = [
        ["measure", "value", "unit"],
        ["load", f"{result['load']['s']:.3f}", "s"],
        [
            f"prefill {result['prompt']:,} tokens{after}",
            f"{result['prefill']['tokens_per_s']:,.1f}",
            "tokens/s",
        ],
        [f"decode {result['tokens']:,} tokens", f"{result['decode']['tokens_per_s']:,.1f}", "tokens/s"],
        ["time to first token", f"{result['first_token']['s'] * 1000:,.1f}", "ms"],
        ["peak memory", f"{result['memory']['peak_bytes'] / 2**20:,.0f}", "MiB"],
        ["weights read for a token", f"{moved['weight_bytes_per_token'] / 2**20:,.1f}", "MiB"],
        ["… over their packed size", f"{moved['moved_over_packed']:.3f}", ""],
        ["weights read in decode", f"{moved['weight_bytes_per_s'] / 1e9:,.2f}", "GB/s"],
    ]
    for batch in result.get("batches", ()):
        each = batch["tokens_per_s"] / batch["size"]
        name = f"decode {result['tokens']:,} tokens of {batch['size']} sequences"
        rows.append([name, f"{batch['tokens_per_s']:,.1f}", f"tokens/s, {each:,.1f} each"])
    if "speculation" in result:
        right = "{accepted} of {drafted}".format(**result["speculation"])
        rows.append(["guesses accepted", right, "tokens"])
    print(table(rows))
    print(f"{result['threads']} threads, target {result['target']}, median of {result['repeat']}")
    for name, kernels in result.get("profile", {}).items():
        total = sum(row["us"] for row in kernels)
        rows = [[name, "launches", "us", "%"]]
        rows += [
            [
                _short(row["kernel"]),
                str(row["launches"]),
                f"{row['us']:,.1f}",
                f"{100 * row['us'] / total:.1f}",
            ]
            for row in kernels
        ]
        rows.append(["total", str(sum(row["launches"] for row in kernels)), f"{total:,.1f}", "100.0"])
        print("\n" + table(rows))


def _short(kernel: str) -> str:
    """A kernel's symbol with a hash just long enough to tell it from others."""
    return re.sub(r"_([0-9a-f]{4})[0-9a-f]{8}$", r" \1", kernel)
