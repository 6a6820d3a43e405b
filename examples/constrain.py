"""Allow only some tokens at each step: here, an answer made of digits.

    python examples/constrain.py model.gguf "How many legs does a spider have?"

A fence gets the ids generated so far and says which tokens may come next; nothing else is ever sampled.
"""

import sys

import numpy as np

import zllmc

if len(sys.argv) != 3:
    sys.exit(__doc__)
model, question = sys.argv[1:3]
with zllmc.load(model) as engine:
    vocab = range(engine.manifest.vocab)
    is_digits = np.array([engine.tokenizer.token_bytes(id).isdigit() for id in vocab])
    ends = np.isin(vocab, list(engine.tokenizer.eog_ids))

    def fence(generated: list[int]) -> np.ndarray:
        return is_digits | ends if generated else is_digits

    prompt = f"Question: {question}\nAnswer, as a number: "
    chunks = engine.generate(prompt, max_tokens=5, fence=fence, sampling=zllmc.SamplingParams(temperature=0))
    print("".join(chunk.text for chunk in chunks))
