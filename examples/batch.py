"""Continue several texts at once: a pass that decodes a token of each reads the weights only once.

python examples/batch.py model.gguf "The sky is" "The sea is" "A river is"
"""

import sys

import zllmc

if len(sys.argv) < 3:
    sys.exit(__doc__)
model, *texts = sys.argv[1:]
with zllmc.load(model) as engine:
    sequences = [engine.tokenizer.encode(text) for text in texts]
    sessions = [engine.session() for _ in texts]
    for session, ids in zip(sessions, sequences, strict=True):
        ids.append(int(session.prefill(ids).argmax()))
    for _ in range(30):
        logits = engine.decode_batch(sessions, [ids[-1] for ids in sequences])
        for ids, row in zip(sequences, logits, strict=True):
            ids.append(int(row.argmax()))
    for ids in sequences:
        print(engine.tokenizer.decode(ids))
