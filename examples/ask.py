"""Ask a model one question and stream the answer.

    python examples/ask.py model.gguf "Why is the sky blue?"

A GGUF file is compiled on first use and kept in a cache; an artifact (`zllmc compile`) loads at once.
"""

import sys

import zllmc

if len(sys.argv) != 3:
    sys.exit(__doc__)
model, question = sys.argv[1:3]
with zllmc.load(model) as engine:
    messages = [{"role": "user", "content": question}]
    for chunk in engine.generate(messages, max_tokens=200, sampling=zllmc.SamplingParams(temperature=0)):
        print(chunk.text, end="", flush=True)
    print(f"\n({chunk.finish}; {chunk.stats.decode_rate:.1f} tokens/s)", file=sys.stderr)
