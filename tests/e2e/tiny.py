"""A llama of one layer with random weights and a byte tokenizer: real enough for every command."""

from __future__ import annotations

import pathlib

import numpy as np

from gguf_writer import ARRAY, BOOL, F32, I32, STRING, U32, array, key, model_of, scalar, string, u32
from zllmc.runtime.text import _gpt2_bytes

WIDTH, HEADS, KV_HEADS, FFN, CONTEXT = 64, 4, 2, 96, 65536
SPECIAL = ["<s>", "</s>", "<user>", "<bot>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}<user>{{ m.content }}<bot>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def tiny_model(path: pathlib.Path, *, seed: int = 0, template: str | None = TEMPLATE) -> pathlib.Path:
    """Writes the model as GGUF. It never ends an answer by itself: the head's row of </s> is zero."""
    random = np.random.default_rng(seed)
    tokens = [*_gpt2_bytes(), *SPECIAL]
    vocab, kv = len(tokens), WIDTH // HEADS * KV_HEADS
    shapes = {
        "token_embd": (vocab, WIDTH),
        "output": (vocab, WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (kv, WIDTH),
        "blk.0.attn_v": (kv, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (FFN, WIDTH),
        "blk.0.ffn_up": (FFN, WIDTH),
        "blk.0.ffn_down": (WIDTH, FFN),
    }
    tensors = []
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32) * (0.3 if len(shape) == 2 else 1)
        if name == "output":
            values[tokens.index("</s>")] = 0
        tensors.append((f"{name}.weight", shape[::-1], 0, values.astype("<f4").tobytes()))

    def text(name: str, value: str) -> bytes:
        return key(name, STRING, string(value))

    def number(name: str, value: int) -> bytes:
        return key(name, U32, u32(value))

    keys = [
        text("general.architecture", "llama"),
        text("general.name", "tiny"),
        number("llama.block_count", 1),
        number("llama.context_length", CONTEXT),
        number("llama.embedding_length", WIDTH),
        number("llama.feed_forward_length", FFN),
        number("llama.attention.head_count", HEADS),
        number("llama.attention.head_count_kv", KV_HEADS),
        key("llama.attention.layer_norm_rms_epsilon", F32, scalar(F32, 1e-5)),
        text("tokenizer.ggml.model", "gpt2"),
        text("tokenizer.ggml.pre", "gpt-2"),
        key("tokenizer.ggml.tokens", ARRAY, array(STRING, tokens)),
        key("tokenizer.ggml.token_type", ARRAY, array(I32, [1] * 256 + [3] * len(SPECIAL))),
        key("tokenizer.ggml.merges", ARRAY, array(STRING, [])),
        number("tokenizer.ggml.bos_token_id", tokens.index("<s>")),
        number("tokenizer.ggml.eos_token_id", tokens.index("</s>")),
        key("tokenizer.ggml.add_bos_token", BOOL, scalar(BOOL, True)),
    ]
    if template is not None:
        keys.append(text("tokenizer.chat_template", template))
    path.write_bytes(model_of(tensors, keys))
    return path
