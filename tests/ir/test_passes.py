"""Each pass by a pair of texts, before and after."""

from textwrap import dedent

import pytest

from graph_texts import HEADER, expect, graph_of, unchanged
from zllmc.passes.fold_scales import fold_scales
from zllmc.passes.fuse_attention import fuse_attention, split_count
from zllmc.passes.fuse_norm_add import fuse_norm_add
from zllmc.passes.fuse_quantize import fuse_quantize
from zllmc.passes.fuse_residual import fuse_residual
from zllmc.passes.fuse_rope_append import fuse_rope_append
from zllmc.passes.join_linears import join_linears
from zllmc.passes.quantize_activations import quantize_activations
from zllmc.passes.rewrite import eliminate_dead
from zllmc.passes.specialise import specialise
from zllmc.zllm_ir.text import print_graph
from zllmc.zllm_ir.verify import verify

# --- golden pairs ----------------------------------------------------------------------------------------


def test_specialise_for_one_token_wants_its_row() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = embedding(@tokens, @table) {'scale': 1.0}
        %1: f32[R, 64] = select_rows(%0, @first_row)
        %2: f32[R, 64] = softcap(%1) {'cap': 30.0}
        return %2
        """)
    result = specialise(graph, 1)
    verify(result)
    assert print_graph(result) == HEADER.replace("[T", "[1") + dedent("""\
        %0: f32[1, 64] = embedding(@tokens, @table) {'scale': 1.0}
        %2: f32[1, 64] = softcap(%0) {'cap': 30.0}
        return %2
        """)
    assert specialise(graph, None) == graph


def test_fold_scales_into_the_linear_before() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 2.0}
        %1: f32[T, 64] = scale(%0) {'value': 0.5}
        %2: f32[T, 64] = scale(%1) {'value': 3.0}
        return %2
        """)
    expect(
        fold_scales(graph),
        """\
        %2: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 3.0}
        return %2
        """,
    )


def test_fold_scales_into_the_embedding_before_and_the_attention_after() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = embedding(@tokens, @table) {'scale': 2.0}
        %1: f32[T, 64] = scale(%0) {'value': 4.0}
        %2: f32[T, 4, 16] = split_heads(%1) {'heads': 4}
        %3: f32[T, 4, 16] = scale(%2) {'value': 0.5}
        %4: f32[T, 4, 16] = attention(%3, @kv) {'scale': 0.25, 'window': 0, 'softcap': 0.0}
        return %4
        """)
    expect(
        fold_scales(graph),
        """\
        %1: f32[T, 64] = embedding(@tokens, @table) {'scale': 8.0}
        %2: f32[T, 4, 16] = split_heads(%1) {'heads': 4}
        %4: f32[T, 4, 16] = attention(%2, @kv) {'scale': 0.125, 'window': 0, 'softcap': 0.0}
        return %4
        """,
    )


@pytest.mark.parametrize(
    "lines",
    [
        # A bias isn't multiplied by alpha.
        """\
        %0: f32[T, 64] = linear(@x, @half, @bias, -) {'alpha': 1.0}
        %1: f32[T, 64] = scale(%0) {'value': 0.5}
        return %1
        """,
        # The unscaled value has another use.
        """\
        %0: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 1.0}
        %1: f32[T, 64] = scale(%0) {'value': 0.5}
        return %1, %0
        """,
    ],
)
def test_fold_scales_only_where_it_is_exact(lines: str) -> None:
    unchanged(fold_scales, lines)


@pytest.mark.parametrize("operands", ["@y, %0", "%0, @y"])
def test_fuse_residual(operands: str) -> None:
    graph = graph_of(f"""\
        %0: f32[T, 64] = linear(@x, @half, @bias, -) {{'alpha': 1.0}}
        %1: f32[T, 64] = add({operands})
        return %1
        """)
    expect(
        fuse_residual(graph),
        """\
        %1: f32[T, 64] = linear(@x, @half, @bias, @y) {'alpha': 1.0}
        return %1
        """,
    )


def test_fuse_residual_not_where_the_projection_has_another_use() -> None:
    unchanged(
        fuse_residual,
        """\
        %0: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 1.0}
        %1: f32[T, 64] = add(%0, %0)
        return %1
        """,
    )


@pytest.mark.parametrize("operands", ["@y, %0", "%0, @y"])
def test_fuse_norm_add(operands: str) -> None:
    graph = graph_of(f"""\
        %0: f32[T, 64] = rms_norm(@x, @gain) {{'eps': 1e-06}}
        %1: f32[T, 64] = add({operands})
        return %1
        """)
    expect(
        fuse_norm_add(graph),
        """\
        %1: f32[T, 64] = norm_add(@x, @y, @gain) {'eps': 1e-06}
        return %1
        """,
    )


ATTENTION = "{'scale': 0.25, 'window': 0, 'softcap': 0.0}"


def test_fuse_rope_append_with_norms_and_rotation() -> None:
    graph = graph_of(f"""\
        %0: f32[T, 4, 16] = split_heads(@x) {{'heads': 4}}
        %1: f32[T, 2, 16] = split_heads(@k) {{'heads': 2}}
        %2: f32[T, 2, 16] = split_heads(@v) {{'heads': 2}}
        %3: f32[T, 4, 16] = rms_norm(%0, @head_gain) {{'eps': 1e-06}}
        %4: f32[T, 2, 16] = rms_norm(%1, @head_gain) {{'eps': 1e-06}}
        %5: f32[T, 4, 16] = rope(%3, @cos, @sin) {{'style': 'neox'}}
        %6: f32[T, 2, 16] = rope(%4, @cos, @sin) {{'style': 'neox'}}
        %7: kv.f16[2, 16] = kv_append(@kv, %6, %2)
        %8: f32[T, 4, 16] = attention(%5, %7) {ATTENTION}
        return %8, %7
        """)
    expect(
        fuse_rope_append(graph),
        f"""\
        %7.q: f32[T, 4, 16], %7: kv.f16[2, 16] = rope_append(@x, @k, @v, @kv, @cos, @sin, @head_gain, \
@head_gain) {{'heads': 4, 'style': 'neox', 'eps': 1e-06}}
        %8: f32[T, 4, 16] = attention(%7.q, %7) {ATTENTION}
        return %8, %7
        """,
    )


def test_fuse_rope_append_without_norms_and_rotation() -> None:
    graph = graph_of(f"""\
        %0: f32[T, 4, 16] = split_heads(@x) {{'heads': 4}}
        %1: f32[T, 2, 16] = split_heads(@k) {{'heads': 2}}
        %2: kv.f16[2, 16] = kv_append(@kv, %1, %1)
        %3: f32[T, 4, 16] = attention(%0, %2) {ATTENTION}
        return %3, %2
        """)
    expect(
        fuse_rope_append(graph),
        f"""\
        %2.q: f32[T, 4, 16], %2: kv.f16[2, 16] = rope_append(@x, @k, @k, @kv, -, -, -, -) \
{{'heads': 4, 'style': 'norm', 'eps': 0.0}}
        %3: f32[T, 4, 16] = attention(%2.q, %2) {ATTENTION}
        return %3, %2
        """,
    )


def test_fuse_rope_append_leaves_what_q_and_k_do_differently() -> None:
    graph = graph_of(f"""\
        %0: f32[T, 4, 16] = split_heads(@x) {{'heads': 4}}
        %1: f32[T, 2, 16] = split_heads(@k) {{'heads': 2}}
        %2: f32[T, 4, 16] = rope(%0, @cos, @sin) {{'style': 'neox'}}
        %3: kv.f16[2, 16] = kv_append(@kv, %1, %1)
        %4: f32[T, 4, 16] = attention(%2, %3) {ATTENTION}
        return %4, %3
        """)
    expect(
        fuse_rope_append(graph),
        f"""\
        %0: f32[T, 4, 16] = split_heads(@x) {{'heads': 4}}
        %2: f32[T, 4, 16] = rope(%0, @cos, @sin) {{'style': 'neox'}}
        %3.q_rows: f32[T, 64] = merge_heads(%2)
        %3.q: f32[T, 4, 16], %3: kv.f16[2, 16] = rope_append(%3.q_rows, @k, @k, @kv, -, -, -, -) \
{{'heads': 4, 'style': 'norm', 'eps': 0.0}}
        %4: f32[T, 4, 16] = attention(%3.q, %3) {ATTENTION}
        return %4, %3
        """,
    )


MERGED_ATTENTION = f"""\
%0: f32[T, 4, 16] = split_heads(@x) {{'heads': 4}}
%1: f32[T, 4, 16] = attention(%0, @kv) {ATTENTION}
%2: f32[T, 64] = merge_heads(%1)
return %2
"""


def test_fuse_attention_of_many_rows() -> None:
    expect(
        fuse_attention(graph_of(MERGED_ATTENTION), context=256),
        f"""\
        %0: f32[T, 4, 16] = split_heads(@x) {{'heads': 4}}
        %2: f32[T, 64] = attention_rows(%0, @kv) {ATTENTION}
        return %2
        """,
    )


def test_fuse_attention_of_one_row_splits_the_cache() -> None:
    result = fuse_attention(specialise(graph_of(MERGED_ATTENTION), 1), context=256)
    verify(result)
    assert print_graph(result).partition("state kv: kv.f16[2, 16]\n")[2] == dedent("""\
        %0: f32[1, 4, 16] = split_heads(@x) {'heads': 4}
        %2.parts: f32[4, 72] = attention_partial(%0, @kv) \
{'scale': 0.25, 'splits': 4, 'window': 0, 'softcap': 0.0}
        %2: f32[1, 64] = attention_merge(%2.parts) {'splits': 4}
        return %2
        """)


def test_split_count_follows_the_heads_and_the_keys() -> None:
    assert split_count(kv_heads=8, keys=32768) == 4
    assert split_count(kv_heads=64, keys=32768) == 1
    assert split_count(kv_heads=1, keys=100) == 1


def test_join_linears_of_one_activation() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = linear(@x, @packed, @bias, -) {'alpha': 1.0}
        %1: f32[T, 64] = linear(@x, @half, @gain, -) {'alpha': 1.0}
        %2: f32[T, 32] = linear(@x, @packed2, @bias2, -) {'alpha': 1.0}
        return %0, %1, %2
        """)
    expect(
        join_linears(graph),
        """\
        %0.weight: Q8_0[96, 64] = concat_rows(@packed, @packed2, -)
        %0.bias: F32[96] = concat_rows(@bias, @bias2, -)
        %0.rows: f32[T, 96] = linear(@x, %0.weight, %0.bias, -) {'alpha': 1.0}
        %0: f32[T, 64], %2: f32[T, 32] = split(%0.rows) {'sizes': (64, 32)}
        %1: f32[T, 64] = linear(@x, @half, @gain, -) {'alpha': 1.0}
        return %0, %1, %2
        """,
    )


@pytest.mark.parametrize(
    "second",
    [
        "f32[T, 32] = linear(@y, @packed2, @bias2, -) {'alpha': 1.0}",
        "f32[T, 32] = linear(@x, @packed2, -, -) {'alpha': 1.0}",
        "f32[T, 32] = linear(@x, @packed2, @bias2, @k) {'alpha': 1.0}",
        "f32[T, 32] = linear(@x, @packed2, @bias2, -) {'alpha': 0.5}",
        "f32[T, 64] = linear(@x, @packed, @gain, -) {'alpha': 1.0}",  # a weight can't lie in two places
    ],
)
def test_join_linears_only_where_one_kernel_would_do(second: str) -> None:
    unchanged(
        join_linears,
        f"""\
        %0: f32[T, 64] = linear(@x, @packed, @bias, -) {{'alpha': 1.0}}
        %1: {second}
        return %0, %1
        """,
    )


def test_quantize_activations_once_for_all_that_share_them() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = linear(@x, @packed, -, @y) {'alpha': 1.0}
        %1: f32[T, 64] = linear(@x, @packed, @bias, -) {'alpha': 1.0}
        %2: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 1.0}
        return %0, %1, %2
        """)
    expect(
        quantize_activations(graph),
        """\
        %x.a8: a8[T, 64] = quantize(@x)
        %0: f32[T, 64] = linear(%x.a8, @packed, -, @y) {'alpha': 1.0}
        %1: f32[T, 64] = linear(%x.a8, @packed, @bias, -) {'alpha': 1.0}
        %2: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 1.0}
        return %0, %1, %2
        """,
    )


def test_activations_are_limited_where_a_wide_weight_takes_them() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = linear(@x, @narrow, -, @y) {'alpha': 1.0}
        %1: f32[T, 64] = linear(%0, @packed, -, -) {'alpha': 1.0}
        %2: f32[T, 64] = linear(%0, @narrow, -, -) {'alpha': 1.0}
        return %1, %2
        """)
    expect(
        quantize_activations(graph, limit=True),
        """\
        %x.a8: a8[T, 64] = quantize(@x)
        %0: f32[T, 64] = linear(%x.a8, @narrow, -, @y) {'alpha': 1.0}
        %0.a8: a8_limited[T, 64] = quantize(%0) {'limited': True}
        %1: f32[T, 64] = linear(%0.a8, @packed, -, -) {'alpha': 1.0}
        %2: f32[T, 64] = linear(%0.a8, @narrow, -, -) {'alpha': 1.0}
        return %1, %2
        """,
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rms_norm(@x, @gain) {'eps': 1e-06}", "rms_norm_quantize(@x, @gain) {'eps': 1e-06}"),
        ("glu(@x, @y) {'act': 'silu'}", "glu_quantize(@x, @y) {'act': 'silu'}"),
    ],
)
def test_fuse_quantize(before: str, after: str) -> None:
    graph = graph_of(f"""\
        %0: f32[T, 64] = {before}
        %0.a8: a8[T, 64] = quantize(%0)
        %1: f32[T, 64] = linear(%0.a8, @packed, -, -) {{'alpha': 1.0}}
        return %1
        """)
    expect(
        fuse_quantize(graph),
        f"""\
        %0.a8: a8[T, 64] = {after}
        %1: f32[T, 64] = linear(%0.a8, @packed, -, -) {{'alpha': 1.0}}
        return %1
        """,
    )


def test_fuse_quantize_keeps_a_norm_with_other_uses() -> None:
    unchanged(
        fuse_quantize,
        """\
        %0: f32[T, 64] = rms_norm(@x, @gain) {'eps': 1e-06}
        %0.a8: a8[T, 64] = quantize(%0)
        %1: f32[T, 64] = linear(%0.a8, @packed, -, %0) {'alpha': 1.0}
        return %1
        """,
    )


def test_eliminate_dead() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = scale(@x) {'value': 2.0}
        %1: f32[T, 64] = scale(%0) {'value': 2.0}
        %2: f32[T, 64] = scale(@x) {'value': 2.0}
        return %2
        """)
    expect(
        eliminate_dead(graph),
        """\
        %2: f32[T, 64] = scale(@x) {'value': 2.0}
        return %2
        """,
    )


# --- the numbers -----------------------------------------------------------------------------------------
