"""Kernel graphs: operands, strides and views, and what a plan makes of them."""

import pathlib
from textwrap import dedent

import pytest

from zllmc.frontends.model import load_model
from zllmc.passes.lower import lower
from zllmc.passes.pipeline import run_passes
from zllmc.passes.plan import kernel_calls, make_plan, stored_weights
from zllmc.passes.specialise import specialise
from zllmc.passes.traffic import Traffic, bytes_moved
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import (
    KernelCall,
    KernelGraph,
    KVOperand,
    Operand,
    kv_layout,
    print_kernels,
    symbol,
    value_bytes,
)
from zllmc.zllm_ir.plan import CONTROL_FIRST_ROW, CONTROL_WORDS, Pointer
from zllmc.zllm_ir.text import parse
from zllmc.zllm_ir.types import KVType, R, T, TensorType

HEADER = """\
graph g
input tokens: i32[T]
input positions: i32[T]
input first_row: i32[]
weight table: Q8_0[50, 64]
weight qkv: Q8_0[128, 64]
weight gain: F16[64]
state kv.0: kv.f16[2, 16]
"""
ATTENTION = """\
%0: f32[T, 64] = embedding(@tokens, @table) {'scale': 1.0}
%1: a8[T, 64] = rms_norm_quantize(%0, @gain) {'eps': 1e-06}
%2: f32[T, 128] = linear(%1, @qkv, -, -) {'alpha': 1.0}
%3: f32[T, 64], %4: f32[T, 32], %5: f32[T, 32] = split(%2) {'sizes': (64, 32, 32)}
%6: f32[T, 4, 16], %7: kv.f16[2, 16] = rope_append(%3, %4, %5, @kv.0, -, -, -, -) \
{'heads': 4, 'style': 'norm', 'eps': 0.0}
%8: f32[T, 64] = attention_rows(%6, %7) {'scale': 0.25, 'window': 0, 'softcap': 0.0}
%9: f32[R, 64] = select_rows(%8, @first_row)
%10: a8[R, 64] = quantize(%9)
%11: f32[R, 50] = linear(%10, @table, -, -) {'alpha': 1.0}
return %11, %7
"""


def kernels(lines: str = ATTENTION, tokens: int | None = None) -> KernelGraph:
    graph = specialise(parse(HEADER + dedent(lines)), tokens)
    name, sizes = ("decode", (1, 1)) if tokens else ("prefill", (8, 2))
    return lower(graph, name=name, context=100, max_tokens=sizes[0], max_rows=sizes[1])


def call(graph: KernelGraph, op: str, index: int = 0) -> KernelCall:
    return [node.call for node in graph.nodes if node.call.op == op][index]


# --- lowering --------------------------------------------------------------------------------------------


def test_views_are_offsets_into_their_producer() -> None:
    text = print_kernels(kernels())
    hashes = {symbol(node.call): node.call.op for node in kernels().nodes}
    for name, op in hashes.items():
        text = text.replace(name, op)
    assert text == dedent("""\
        kernels prefill: 8 tokens, 2 rows
        %0: f32[T, 64] / 64 = embedding(@tokens, @table) {'scale': 1.0}
        %1: a8[T, 64] / 64 = rms_norm_quantize(%0, @gain) {'eps': 1e-06}
        %2: f32[T, 128] / 128 = linear(%1, @qkv, -, -) {'alpha': 1.0}
        %6: f32[T, 4, 16] / 64 = rope_append(%2, %2+64, %2+96, @kv.0, -, -, -, -) \
{'heads': 4, 'style': 'norm', 'eps': 0.0}
        %8: f32[T, 64] / 64 = attention_rows(%6, @kv.0) {'scale': 0.25, 'window': 0, 'softcap': 0.0}
        %9: f32[R, 64] / 64 = select_rows(%8, @first_row)
        %10: a8[R, 64] / 64 = quantize(%9)
        %11: f32[R, 50] / 64 = linear(%10, @table, -, -) {'alpha': 1.0}
        return %11
        """)


def test_a_view_has_the_stride_of_its_producer() -> None:
    q, k, v, state, *absent = call(kernels(), "rope_append").operands
    assert q == Operand(TensorType("f32", (T, 64)), 128)
    assert k == v == Operand(TensorType("f32", (T, 32)), 128)
    assert state == KVOperand(KVType(2, 16, "f16"), 112)  # 100 tokens, rounded up to whole key blocks
    assert absent == [None] * 4


def test_the_stride_of_a_single_row_is_its_width() -> None:
    """Else a fused projection would need other kernels than separate ones, for no reason."""
    q, k, *_ = call(kernels(tokens=1), "rope_append").operands
    assert q == Operand(TensorType("f32", (1, 64)), 64)
    assert k == Operand(TensorType("f32", (1, 32)), 32)


def test_views_of_views_and_merged_heads() -> None:
    graph = kernels("""\
        %0: f32[T, 64] = embedding(@tokens, @table) {'scale': 1.0}
        %1: f32[T, 16], %2: f32[T, 48] = split(%0) {'sizes': (16, 48)}
        %3: f32[T, 3, 16] = split_heads(%2) {'heads': 3}
        %4: f32[T, 48] = merge_heads(%3)
        %5: f32[T, 32], %6: f32[T, 16] = split(%4) {'sizes': (32, 16)}
        %7: f32[T, 16] = add(%1, %6)
        return %7
        """)
    value = graph.nodes[-1].inputs[1]
    assert value is not None
    place = graph.place(value)
    assert (place.base.name, place.offset) == ("0", 48)
    assert call(graph, "add").operands[1] == Operand(TensorType("f32", (T, 16)), 64)


def test_matrices_keep_their_format_and_other_weights_are_f32() -> None:
    assert call(kernels(), "rms_norm_quantize").operands[1] == Operand(TensorType("f32", (64,)))
    assert call(kernels(), "linear").operands[1] == Operand(TensorType("Q8_0", (128, 64)))
    assert stored_weights([kernels(), kernels(tokens=1)]) == {
        "table": TensorType("Q8_0", (50, 64)),
        "gain": TensorType("f32", (64,)),
        "qkv": TensorType("Q8_0", (128, 64)),
    }


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            """\
            %0: f32[T, 64] = embedding(@tokens, @table) {'scale': 1.0}
            %1: f32[T, 8], %2: f32[T, 56] = split(%0) {'sizes': (8, 56)}
            return %2
            """,
            "no multiple of 16",
        ),
        (
            """\
            %0: f32[T, 64] = embedding(@tokens, @table) {'scale': 1.0}
            %1: f32[T, 4, 16] = split_heads(%0) {'heads': 4}
            return %1
            """,
            "result of no kernel",
        ),
    ],
)
def test_what_cannot_be_lowered_is_an_error(lines: str, message: str) -> None:
    with pytest.raises(IRError, match=message):
        kernels(lines)


def test_equal_calls_have_one_symbol_that_is_stable() -> None:
    graph = kernels()
    assert symbol(call(graph, "linear")) == symbol(call(kernels(), "linear"))
    assert symbol(call(graph, "linear")) != symbol(call(graph, "linear", 1))
    assert symbol(KernelCall("add", (), (None,), ())) == "add_2d1e117d1a02"
    assert all(name.isidentifier() for name in kernel_calls([graph]))


def test_value_bytes_count_padding() -> None:
    assert value_bytes(Operand(TensorType("f32", (R, 50)), 64), tokens=8, rows=2) == 2 * 4 * 64
    assert value_bytes(Operand(TensorType("a8", (T, 64)), 64), tokens=8, rows=2) == 8 * 128
    assert value_bytes(Operand(TensorType("f32", (4, 66)), 80), tokens=8, rows=2) == 4 * 4 * 80


# --- the plan --------------------------------------------------------------------------------------------

WEIGHTS = {"table": (0, 4096), "qkv": (4096, 8192), "gain": (12288, 256)}


def test_plan_buffers_serve_all_entry_points() -> None:
    plan = make_plan({"decode": kernels(tokens=1), "prefill": kernels()}, WEIGHTS)
    assert [(b.name, b.kind, b.bytes) for b in plan.buffers if b.kind != "arena"] == [
        ("weights", "weights", 12288 + 256),
        ("kv.0", "state", kv_layout(KVType(2, 16, "f16"), 112).bytes),
        ("tokens", "io", 4 * 8),
        ("positions", "io", 4 * 8),
        ("control", "io", 4 * CONTROL_WORDS),
        ("logits", "io", 4 * 64 * 2),
    ]
    assert [(e.name, e.max_tokens, e.max_rows) for e in plan.entries] == [("decode", 1, 1), ("prefill", 8, 2)]


def test_launches_point_to_control_operands_and_results() -> None:
    graph = kernels()
    plan = make_plan({"prefill": graph}, WEIGHTS)
    number = {buffer.name: i for i, buffer in enumerate(plan.buffers)}
    launches = {n.call.op: launch for n, launch in zip(graph.nodes, plan.entries[0].launches, strict=True)}
    control = Pointer(number["control"], 0)

    embedding = launches["embedding"].args
    assert embedding[:3] == (control, Pointer(number["tokens"], 0), Pointer(number["weights"], 0))
    assert launches["rms_norm_quantize"].args[:3] == (
        control,
        embedding[3],
        Pointer(number["weights"], 12288),
    )

    _, q, k, v, state, result = launches["rope_append"].args
    assert isinstance(q, Pointer)
    assert (k, v) == (Pointer(q.buffer, q.offset + 4 * 64), Pointer(q.buffer, q.offset + 4 * 96))
    assert state == Pointer(number["kv.0"], 0)
    assert launches["attention_rows"].args[:3] == (control, result, state)

    assert launches["select_rows"].args[2] == Pointer(number["control"], 4 * CONTROL_FIRST_ROW)
    assert launches["linear"].args[-1] == Pointer(number["logits"], 0)
    assert [launch.kernel for launch in plan.entries[0].launches] == [symbol(n.call) for n in graph.nodes]


JOINED = """\
%0: f32[T, 64] = embedding(@tokens, @table) {'scale': 1.0}
%1: a8[T, 64] = quantize(%0)
%2: Q8_0[64, 64] = concat_rows(@gate, @up, -)
%3: f32[T, 64] = linear(%1, %2, -, -) {'alpha': 1.0}
return %3
"""


def joined_kernels() -> KernelGraph:
    header = HEADER + "weight gate: Q8_0[32, 64]\nweight up: Q8_0[32, 64]\n"
    return lower(parse(header + JOINED), name="prefill", context=100, max_tokens=8, max_rows=2)


def test_a_joined_weight_is_its_parts_one_after_the_other() -> None:
    graph = joined_kernels()
    names = list(stored_weights([graph]))
    assert names[names.index("gate") + 1] == "up"
    assert stored_weights([graph])["up"] == TensorType("Q8_0", (32, 64))
    assert call(graph, "linear").operands[1] == Operand(TensorType("Q8_0", (64, 64)))
    assert "(%1, @gate|@up, -, -)" in print_kernels(graph)
    plan = make_plan({"prefill": graph}, {"table": (0, 4096), "gate": (4096, 2304), "up": (6400, 2304)})
    assert plan.entries[0].launches[-1].args[2] == Pointer(0, 4096)


def test_parts_of_a_joined_weight_that_lie_apart_are_an_error() -> None:
    with pytest.raises(IRError, match="one after the other"):
        make_plan(
            {"prefill": joined_kernels()}, {"table": (0, 4096), "gate": (4096, 2304), "up": (8192, 2304)}
        )


# --- traffic ---------------------------------------------------------------------------------------------


def test_bytes_moved_by_hand() -> None:
    per_token = 2 * 2 * 16 * 2  # keys and values, 2 heads of 16, f16
    a8 = 128  # bytes of a quantized row of 64
    assert bytes_moved(kernels(), tokens=3, rows=1, cached=10) == [
        Traffic("embedding", 3 * 68, 3 * 256, 0),
        Traffic("rms_norm_quantize", 256, 3 * (256 + a8), 0),
        Traffic("linear", 128 * 68, 3 * (a8 + 512), 0),
        Traffic("rope_append", 0, 3 * (512 + 256), 3 * per_token),
        Traffic("attention_rows", 0, 3 * (256 + 256), 13 * per_token),
        Traffic("select_rows", 0, 256 + 256, 0),
        Traffic("quantize", 0, 256 + a8, 0),
        Traffic("linear", 50 * 68, a8 + 200, 0),
    ]


def test_decode_reads_every_packed_weight_once(conformance: pathlib.Path) -> None:
    model = load_model(conformance / "quants/llama-dense-Q8_0.gguf", context=128)
    graph = lower(
        run_passes(model.graph, tokens=1, context=128), name="decode", context=128, max_tokens=1, max_rows=1
    )
    table = model.weights["token_embd.weight"].nbytes
    row = table // model.facts.vocab
    assert sum(t.weights for t in bytes_moved(graph)) == model.weight_bytes - table + row
