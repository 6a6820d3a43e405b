"""Several questions in one session: each turn computes only what is new.

python examples/conversation.py model.gguf "Name a river." "Which country is it in?"
"""

import sys

import zllmc

if len(sys.argv) < 3:
    sys.exit(__doc__)
model, *questions = sys.argv[1:]
with zllmc.load(model) as engine:
    session = engine.session()
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        chunks = list(engine.generate(messages, max_tokens=100, session=session, seed=0))
        answer = "".join(chunk.text for chunk in chunks)
        messages.append({"role": "assistant", "content": answer})
        stats = chunks[-1].stats
        print(f"> {question}\n{answer}")
        print(f"({stats.reused_tokens} of {stats.prompt_tokens} prompt tokens reused)", file=sys.stderr)
