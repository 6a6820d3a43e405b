"""Attention as the kernels compute it."""

from __future__ import annotations

from collections.abc import Sequence

from zllmc.passes.rewrite import Only, fuse
from zllmc.targets import Target
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.attention_ops import SPLIT_KEYS
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.types import KVType

PARTS = 32  # of one decode attention: as many threads of a CPU as can share it
_BLOCKS = 2  # of a GPU's multiprocessor that share it: one loads while the other computes


def attention_parts(target: Target) -> int:
    """Into how many parts a decode attention is cut for a target, all kv heads together."""
    return _BLOCKS * target.product.multiprocessors if isinstance(target, GpuTarget) else PARTS


def fuse_attention(graph: Graph, context: int, parts: int = PARTS) -> Graph:
    """Attention whose heads are only merged gives them merged.

    before:  %2 = attention(%1, %kv)    after:  %3 = attention_rows(%1, %kv)
             %3 = merge_heads(%2)

    For one query the cached tokens (`context` at most) are divided into parts, for threads to share; with
    those of all kv heads, there are about `parts` of them:

             after:  %3.parts = attention_partial(%1, %kv) {…, 'splits': 4}
                     %3 = attention_merge(%3.parts) {'splits': 4}
    """

    def rule(node: Node, only: Only) -> Sequence[Node] | None:
        attention = only(node.inputs[0], "attention") if node.op == "merge_heads" else None
        if attention is None:
            return None
        query, state = graph.operands(attention)
        if query.shape[0] != 1:
            return [Node("attention_rows", attention.inputs, attention.attrs, node.outputs)]
        if not isinstance(state.type, KVType):
            raise IRError(f"attention over {state.name}: {state.type} is no state")
        window = attention.attributes["window"]
        splits = split_count(state.type.kv_heads, min(context, window) if window else context, parts)
        op = OPS["attention_partial"]
        attrs = op.bind_attrs({**attention.attributes, "splits": splits})
        (type,) = op.infer_types([query.type, state.type], attrs)
        partial = Value(f"{node.output.name}.parts", type)
        return [
            Node("attention_partial", attention.inputs, tuple(attrs.items()), (partial,)),
            Node("attention_merge", (partial,), (("splits", splits),), node.outputs),
        ]

    return fuse(graph, rule)


def split_count(kv_heads: int, keys: int, parts: int = PARTS) -> int:
    """Parts of one head's keys: enough work for many threads, but none with less than SPLIT_KEYS keys."""
    return max(1, min(-(-parts // kv_heads), keys // SPLIT_KEYS))
