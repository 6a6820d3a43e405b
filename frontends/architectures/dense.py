"""What dense decoder-only families share: their facts, and the blocks that they are made of.

A family's file states how one layer transforms the hidden states, and what differs from the defaults here:

    def block(layer: Layer, x: Value) -> Value:
        x = layer.add(x, layer.attention(layer.norm(x, "attn_norm")))
        return layer.add(x, layer.ffn(layer.norm(x, "ffn_norm")))

    ARCHITECTURES = {"llama": Architecture(block, rope_style="norm")}

Shapes in comments: T tokens, D model width, H query heads, K kv heads, E head width, F feed-forward width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from zllmc.frontends.architectures.fields import Fields, ModelError
from zllmc.frontends.architectures.rope import Rope, read_rope
from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.graph import Builder, Graph, Value
from zllmc.zllm_ir.types import KVType, T, TensorType

MAX_LAYERS = 1000
MAX_HEAD_DIM = 4096


class Tensor(Protocol):
    """What a graph needs to know of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type_name(self) -> str: ...


@dataclass(frozen=True)
class Facts:
    """The constants of a dense model, checked. Scales of 1 and soft caps of 0 have no effect."""

    architecture: str
    layers: int
    width: int
    ffn_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  # tokens, cached ones included, that a sequence may have
    trained_context: int
    norm_eps: float
    activation: str
    attention_scale: float
    ropes: tuple[Rope | None, ...]  # of each layer; None: without positions
    windows: tuple[int, ...]  # tokens that each layer's attention sees; 0: all
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0

    @property
    def rope(self) -> Rope:
        """The main rotary configuration, before a family changes that of some layers."""
        if (rope := self.ropes[0]) is None:
            raise ValueError("the first layer has no rope")
        return rope


def _no_changes(fields: Fields, facts: Facts) -> Facts:
    return facts


@dataclass(frozen=True)
class Architecture:
    """A family of models: how one layer works, and what its files mean."""

    block: Callable[[Layer, Value], Value]
    rope_style: str = "neox"  # of GGUF files: norm | neox; Hugging Face's weights are always neox
    activation: str = "silu"
    adjust: Callable[[Fields, Facts], Facts] = _no_changes  # reads what only this family has
    hf_classes: tuple[str, ...] = ()  # names in config.json's `architectures`
    hf_names: Mapping[str, str] = field(default_factory=dict)  # tensor names that differ from hf.py's
    hf_norm_offset: float = 0.0  # Hugging Face stores gain − offset for every norm


def read_facts(
    name: str, family: Architecture, f: Fields, tensors: Mapping[str, Tensor], context: int
) -> Facts:
    """The facts of a file of the architecture `name`, for sequences of up to `context` tokens.

    Raises a ModelError that names the field that is missing or wrong.
    """
    layers = f.integer("block_count")
    present = {int(m[1]) for name in tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))}
    if layers > MAX_LAYERS:
        f.fail("block_count", f"is {layers}; {MAX_LAYERS} is the most")
    if present != set(range(layers)):
        f.fail("block_count", f"is {layers}, but the file has tensors of {len(present)} layers")
    if f.values.get("expert_count"):
        f.fail("expert_count", "isn't 0: mixtures of experts aren't supported yet")

    width, heads = f.integer("embedding_length"), f.integer("attention.head_count")
    kv_heads = f.integer("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        f.fail("attention.head_count", f"is {heads}, not a multiple of the {kv_heads} kv heads")
    head_dim = read_head_dim(f)
    if f.integer("attention.value_length", default=head_dim) != head_dim:
        f.fail("attention.value_length", f"differs from the key length {head_dim}, which isn't supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{f.origin}: tensor token_embd.weight is missing or isn't a matrix.")
    tokens = f.values.get("tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise ModelError(
            f"{f.origin}: the vocabulary has {len(tokens)} tokens, "
            f"token_embd.weight only {embedding.shape[0]} rows."
        )
    rope = read_rope(f, tensors, head_dim, family.rope_style, context)
    facts = Facts(
        name,
        layers,
        width,
        f.integer("feed_forward_length"),
        heads,
        kv_heads,
        head_dim,
        embedding.shape[0],
        context,
        f.integer("context_length", default=context),
        f.number("attention.layer_norm_rms_epsilon"),
        family.activation,
        f.number("attention.scale", default=head_dim**-0.5),
        ropes=(rope,) * layers,
        windows=(0,) * layers,
    )
    return family.adjust(f, facts)


def read_head_dim(f: Fields) -> int:
    """Width of a head: what the file says, or the model width divided among the heads."""
    width, heads = f.integer("embedding_length"), f.integer("attention.head_count")
    head_dim = f.integer("attention.key_length", default=max(1, width // heads))
    if not f.values.get("attention.key_length") and width % heads:
        f.fail("attention.head_count", f"is {heads}, which doesn't divide the width {width}")
    if head_dim > MAX_HEAD_DIM:
        f.fail("attention.key_length", f"gives heads of {head_dim}; {MAX_HEAD_DIM} is the most")
    return head_dim


def local_layers(
    f: Fields, facts: Facts, period: int, window: int | None = None
) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Which layers have local attention, and every layer's window; none if the file has no window.

    `period` and `window` stand in for what the file doesn't say.
    """
    size = f.integer("attention.sliding_window", default=window or 0)
    local = f.layer_flags("attention.sliding_window_pattern", facts.layers, period)
    local = local if size else (False,) * facts.layers
    return local, tuple(size if is_local else 0 for is_local in local)


def build_dense(
    family: Architecture, facts: Facts, tensors: Mapping[str, Tensor], kv: str, origin: str
) -> Graph:
    """The model graph: tokens, positions, first_row → logits (R, vocab) and every layer's new state."""
    g = Builder(facts.architecture)
    tokens = g.input("tokens", TensorType("i32", (T,)))
    positions = g.input("positions", TensorType("i32", (T,)))
    first_row = g.input("first_row", TensorType("i32", ()))
    weights = Weights(g, tensors, origin)
    tables: dict[Rope, tuple[Value, Value]] = {}
    states: list[Value] = []

    table = weights.matrix("token_embd.weight", facts.vocab, facts.width)
    x = g.embedding(tokens, table, scale=facts.embedding_scale)  # (T, D)
    for i in range(facts.layers):
        state = g.state(f"kv.{i}", KVType(facts.kv_heads, facts.head_dim, kv))
        layer = Layer(g, facts, weights, f"blk.{i}.", i, positions, tables, state)
        x = family.block(layer, x)
        states.append(layer.state)
    x = g.select_rows(x, first_row)  # (R, D): the head runs over the wanted rows only
    x = g.rms_norm(x, weights.vector("output_norm.weight", facts.width), eps=facts.norm_eps)
    head = weights.matrix("output.weight", facts.vocab, facts.width) if "output.weight" in tensors else table
    x = g.linear(x, head, weights.optional("output.bias", facts.vocab))
    if facts.logit_scale != 1:
        x = g.scale(x, value=facts.logit_scale)
    if facts.logit_softcap:
        x = g.softcap(x, cap=facts.logit_softcap)
    weights.check_all_used()
    return g.finish(x, *states)


# Tensors that carry nothing this graph needs: a classifier's norm, tables that rope_table computes, and the
# set of longrope factors that wasn't chosen.
IGNORED = re.compile(
    r"cls\.output\.weight|blk\.\d+\.attn_rot_embd(\.weight)?|rope_freqs\.weight|rope_factors_(long|short)\.weight"
)


@dataclass
class Weights:
    """Declares a file's tensors as graph weights, checking name, shape and format of each."""

    g: Builder
    tensors: Mapping[str, Tensor]
    origin: str

    def matrix(self, name: str, rows: int, columns: int) -> Value:
        return self._declare(name, (rows, columns))

    def vector(self, name: str, size: int) -> Value:
        return self._declare(name, (size,))

    def optional(self, name: str, size: int) -> Value | None:
        return self._declare(name, (size,)) if name in self.tensors else None

    def _declare(self, name: str, shape: tuple[int, ...]) -> Value:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.origin}: tensor {name} is missing; it should have the shape {shape}.")
        if tensor.shape != shape:
            raise ModelError(
                f"{self.origin}: tensor {name} has the shape {tensor.shape}, the facts give {shape}."
            )
        if tensor.type_name not in FORMATS:
            raise ModelError(
                f"{self.origin}: tensor {name} has type {tensor.type_name}, which can't be computed. "
                f"Take a file with these types: {', '.join(FORMATS)}."
            )
        return self.g.weight(name, TensorType(tensor.type_name, shape))

    def check_all_used(self) -> None:
        """A tensor that the graph ignores would mean a wrong model."""
        unused = [n for n in self.tensors if n not in self.g.weights and not IGNORED.fullmatch(n)]
        if unused:
            listed = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            raise ModelError(f"{self.origin}: tensors that {self.g.name} doesn't have: {listed}.")


@dataclass
class Layer:
    """One decoder layer under construction: the building blocks, named as in GGUF."""

    g: Builder
    facts: Facts
    weights: Weights
    prefix: str
    index: int
    positions: Value
    tables: dict[Rope, tuple[Value, Value]]
    state: Value

    def norm(self, x: Value, name: str) -> Value:
        """RMS norm over the last axis: of the model, of a whole projection, or of each head."""
        weight = self.weights.vector(f"{self.prefix}{name}.weight", x.shape[-1])
        return self._value(self.g.rms_norm(x, weight, eps=self.facts.norm_eps))

    def linear(self, x: Value, name: str, rows: int) -> Value:
        """x · weightᵀ, plus the bias if the file has one."""
        weight = self.weights.matrix(f"{self.prefix}{name}.weight", rows, x.shape[-1])
        return self._value(self.g.linear(x, weight, self.weights.optional(f"{self.prefix}{name}.bias", rows)))

    def qkv(self, x: Value) -> tuple[Value, Value, Value]:
        """q (T, H, E), k and v (T, K, E) from separate projections or a fused one."""
        q, k, v = self.flat_qkv(x)
        return self.heads(q), self.heads(k), self.heads(v)

    def flat_qkv(self, x: Value) -> tuple[Value, Value, Value]:
        """The same before the split into heads: q (T, H·E), k and v (T, K·E)."""
        q_size, kv_size = (n * self.facts.head_dim for n in (self.facts.heads, self.facts.kv_heads))
        if f"{self.prefix}attn_qkv.weight" in self.weights.tensors:
            fused = self.linear(x, "attn_qkv", q_size + 2 * kv_size)
            q, k, v = self.g.split(fused, sizes=(q_size, kv_size, kv_size))
            return q, k, v
        return (
            self.linear(x, "attn_q", q_size),
            self.linear(x, "attn_k", kv_size),
            self.linear(x, "attn_v", kv_size),
        )

    def heads(self, x: Value) -> Value:
        """(T, n·E) → (T, n, E)."""
        return self._value(self.g.split_heads(x, heads=x.shape[-1] // self.facts.head_dim))

    def attend(self, q: Value, k: Value, v: Value) -> Value:
        """Rotate q and k, cache k and v, attend, project: q (T, H, E), k and v (T, K, E) → (T, D)."""
        facts = self.facts
        if rope := facts.ropes[self.index]:
            cos, sin = self._rope_table(rope)
            q, k = (self.g.rope(part, cos, sin, style=rope.style) for part in (q, k))
        self.state = self.g.kv_append(self.state, k, v)
        y = self.g.attention(
            q,
            self.state,
            scale=facts.attention_scale,
            window=facts.windows[self.index],
            softcap=facts.attention_softcap,
        )
        return self.linear(self.g.merge_heads(y), "attn_output", facts.width)

    def attention(self, x: Value) -> Value:
        """Attention without anything in between: (T, D) → (T, D)."""
        return self.attend(*self.qkv(x))

    def ffn(self, x: Value) -> Value:
        """down(act(gate(x)) · up(x)): (T, D) → (T, D)."""
        size = self.facts.ffn_width
        return self._down(self.linear(x, "ffn_gate", size), self.linear(x, "ffn_up", size))

    def fused_ffn(self, x: Value) -> Value:
        """The same with gate and up as the halves of one projection (2·F, D)."""
        size = self.facts.ffn_width
        gate, up = self.g.split(self.linear(x, "ffn_up", 2 * size), sizes=(size, size))
        return self._down(gate, up)

    def add(self, x: Value, y: Value) -> Value:
        """x + y · residual scale: the residual stream."""
        if self.facts.residual_scale != 1:
            y = self.g.scale(y, value=self.facts.residual_scale)
        return self._value(self.g.add(x, y))

    def _down(self, gate: Value, up: Value) -> Value:
        return self.linear(self.g.glu(gate, up, act=self.facts.activation), "ffn_down", self.facts.width)

    def _rope_table(self, rope: Rope) -> tuple[Value, Value]:
        if rope not in self.tables:
            factors = self.weights.vector(rope.factors, rope.dims // 2) if rope.factors else None
            self.tables[rope] = self.g.rope_table(
                self.positions,
                factors,
                dims=rope.dims,
                base=rope.base,
                freq_scale=rope.freq_scale,
                ext_factor=rope.ext_factor,
                attn_factor=rope.attn_factor,
                beta_fast=rope.beta_fast,
                beta_slow=rope.beta_slow,
                original_context=rope.original_context,
            )
        return self.tables[rope]

    def _value(self, value: Any) -> Value:
        """Ops come from `Builder.__getattr__`, which has no static types."""
        if not isinstance(value, Value):
            raise TypeError(f"expected one value, got {value!r}")
        return value
