"""Let a model only choose between given words, and compare how likely it finds each.

    python examples/classify.py model.gguf "The film was a waste of time." good bad

The choice comes from the logits: no text is generated, so the answer is always one of the words.
"""

import sys

import numpy as np

import zllmc

if len(sys.argv) < 4:
    sys.exit(__doc__)
model, text, *labels = sys.argv[1:]
with zllmc.load(model) as engine:
    prompt = engine.tokenizer.encode(f"Review: {text}\nVerdict, in one word:")
    scores = []
    for label in labels:
        ids = engine.tokenizer.encode(f" {label}", add_special=False)
        logits = engine.logits([*prompt, *ids])[len(prompt) - 1 : -1].astype(np.float64)
        log_probabilities = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        scores.append(log_probabilities[np.arange(len(ids)), ids].sum())
    weights = np.exp(np.array(scores) - max(scores))
    for label, probability in zip(labels, weights / weights.sum(), strict=True):
        print(f"{label:12} {probability:6.1%}")
