"""One engine in a process of its own, for compare.py.

    python worker.py ENGINE MODEL TEXT THREADS PROMPT TOKENS

ENGINE is `zllmc` (MODEL is an artifact) or `llama.cpp` (MODEL is a GGUF file; needs llama-cpp-python, and
nothing of ours). It loads the model and prints a line of JSON with its version and the first PROMPT token ids
of the file TEXT. Then it answers every line that it reads with a run, as JSON: seconds for these ids, seconds
for TOKENS greedy decode rounds after them, the chosen ids, and the five likeliest first ones with their
log-probabilities.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class Zllmc:
    def __init__(self, model: str, threads: int, context: int) -> None:
        import zllmc

        self.version = zllmc.__version__
        self._engine = zllmc.load(model, threads=threads)
        self._session = self._engine.session()

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    def clear(self) -> None:
        self._session.truncate(0)

    def advance(self, ids: list[int]) -> Any:
        """Logits (vocab,) after `ids`."""
        return self._session.prefill(ids)


class LlamaCpp:
    """llama.cpp with its defaults, but for the context and threads, through its C interface."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]
        from llama_cpp import llama_cpp as library

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._library = library
        self._silent = library.llama_log_callback(lambda *message: None)  # kept: C calls it
        library.llama_log_set(self._silent, None)
        library.llama_backend_init()
        loaded = library.llama_model_load_from_file(model.encode(), library.llama_model_default_params())
        parameters = library.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = library.llama_init_from_model(loaded, parameters) if loaded else None
        if not self._context:
            raise SystemExit(f"llama.cpp can't load {model}")
        self._vocabulary = library.llama_model_get_vocab(loaded)
        self._vocab = library.llama_vocab_n_tokens(self._vocabulary)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids = (self._library.llama_token * (len(data) + 8))()
        count = self._library.llama_tokenize(self._vocabulary, data, len(data), ids, len(ids), True, False)
        return list(ids[:count])

    def clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def advance(self, ids: list[int]) -> Any:
        array = (self._library.llama_token * len(ids))(*ids)
        batch = self._library.llama_batch_get_one(array, len(ids))
        if self._library.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama.cpp can't compute these tokens")
        row = self._library.llama_get_logits_ith(self._context, -1)  # waits for the computation
        return np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (self._vocab,))


def run(engine: Zllmc | LlamaCpp, prompt: list[int], tokens: int) -> dict[str, Any]:
    engine.clear()
    begin = time.perf_counter()
    row = engine.advance(prompt)
    computed = time.perf_counter()
    best = np.argsort(row)[:-6:-1]
    total = np.log(np.exp(row.astype(np.float64) - row.max()).sum()) + row.max()
    likeliest = [(int(id), float(row[id] - total)) for id in best]
    ids = [int(best[0])]
    chosen = time.perf_counter()
    for _ in range(tokens):
        ids.append(int(np.argmax(engine.advance(ids[-1:]))))
    end = time.perf_counter()
    return {"prefill_s": computed - begin, "decode_s": end - chosen, "ids": ids, "likeliest": likeliest}


def main() -> None:
    name, model, text, *numbers = sys.argv[1:]
    threads, count, tokens = map(int, numbers)
    make = LlamaCpp if name == "llama.cpp" else Zllmc
    engine = make(model, threads, count + tokens + 8)
    prompt = engine.encode(Path(text).read_text(encoding="utf-8"))[:count]
    if len(prompt) < count:
        raise SystemExit(f"{text} has {len(prompt)} tokens, fewer than the prompt of {count}")
    print(json.dumps({"version": engine.version, "prompt": prompt}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run(engine, prompt, tokens)), flush=True)


if __name__ == "__main__":
    main()
