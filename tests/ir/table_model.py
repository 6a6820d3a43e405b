"""A model that is a table, in bytes of a real tokenizer: for tests of what surrounds a model."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from zllmc.runtime.chat_template import ChatTemplate
from zllmc.runtime.text import Tokenizer, _gpt2_bytes

VOCAB = 258
BOS, EOS = 256, 257


def tokenizer():
    """One token for each byte, <s> and </s>."""
    byte_of = _gpt2_bytes()
    vocab = {char: byte[0] for char, byte in byte_of.items()} | {"<s>": BOS, "</s>": EOS}
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    file = {
        "version": "1.0",
        "added_tokens": [{"id": vocab[t], "content": t, **special} for t in ("<s>", "</s>")],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    facts = {
        "kind": "bpe",
        "vocab_size": VOCAB,
        "bos_id": BOS,
        "eos_id": EOS,
        "add_bos": True,
        "add_eos": False,
        "add_space_prefix": False,
        "control_ids": [BOS, EOS],
        "unused_ids": [],
        "eog_ids": [EOS],
    }
    return Tokenizer.from_json(json.dumps(file), facts)


@dataclass
class TableSession:
    """Says `script` byte by byte after any prompt; `computed` are the ids it was given."""

    script: bytes
    tokens: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    said: int = 0

    def prefill(self, ids):
        self.said = 0
        return self._advance(ids)

    def decode(self, id):
        self.said += 1
        return self._advance([id])

    def truncate(self, length):
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]

    def _advance(self, ids):
        assert len(ids) > 0
        self.tokens += ids
        self.computed += ids
        logits = np.zeros(VOCAB, np.float32)
        logits[self.script[self.said] if self.said < len(self.script) else EOS] = 9
        return logits


def engine(script="", context=1000, template="{{ bos_token }}{{ messages[0].content }}>"):
    script = script if isinstance(script, bytes) else script.encode()
    return SimpleNamespace(
        manifest=SimpleNamespace(context=context, vocab=VOCAB),
        tokenizer=tokenizer(),
        candidates=0,
        chat_template=template and ChatTemplate(template, "<s>", "</s>"),
        session=lambda: TableSession(script),
    )
