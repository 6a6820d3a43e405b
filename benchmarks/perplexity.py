"""Perplexity of an artifact on a text, by the protocol of llama.cpp's `llama-perplexity`.

    python benchmarks/perplexity.py MODEL.zllm TEXT [--context 512] [--chunks N]

The text's tokens are cut into chunks of `context`; a rest at the end is left out. In each chunk the first
half is only context, and every token after the first of the second half is scored. Where the tokenizer adds
BOS, each chunk begins with it, in place of its first token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zllmc.runtime.engine import Engine


def losses(engine: Engine, ids: list[int], context: int) -> Iterator[NDArray[np.float64]]:
    """Of every chunk: −log p (context − context/2 − 1,) of the scored tokens, in nats."""
    facts = engine.tokenizer.facts
    first = context // 2
    for start in range(0, len(ids) - context + 1, context):
        chunk = ids[start : start + context]
        if facts["add_bos"]:
            chunk[0] = facts["bos_id"]
        rows = engine.logits(chunk)[first:-1]
        targets = np.array(chunk[first + 1 :])
        highest = rows.max(-1)
        total = [np.exp((row - top).astype(np.float64)).sum() for row, top in zip(rows, highest, strict=True)]
        yield np.log(total) + highest - rows[np.arange(len(rows)), targets]


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of an artifact on a text.")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, help="stop after so many")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    with Engine.open(given.artifact, threads=given.threads) as engine:
        ids = engine.tokenizer.encode(given.text.read_text(encoding="utf-8"))
        if given.chunks is not None:
            ids = ids[: given.chunks * given.context]
        if len(ids) < given.context:
            parser.error(f"the text has {len(ids)} tokens, less than one chunk of {given.context}")
        scored: list[NDArray[np.float64]] = []
        for part in losses(engine, ids, given.context):
            scored.append(part)
            print(f"[{len(scored)}] {math.exp(np.concatenate(scored).mean()):.4f}", flush=True)
    every = np.concatenate(scored)
    perplexity = math.exp(every.mean())
    error = perplexity * every.std(ddof=1) / math.sqrt(len(every))
    print(f"perplexity {perplexity:.4f} ± {error:.4f} over {len(every):,} tokens")


if __name__ == "__main__":
    main()
