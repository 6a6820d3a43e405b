"""Which ops compute only the rows whose logits are wanted."""

from graph_texts import expect, graph_of, unchanged
from zllmc.passes.select_early import select_early


def test_rows_are_selected_before_ops_that_only_these_rows_need() -> None:
    graph = graph_of("""\
        %0: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 1.0}
        %1: f32[T, 4, 16] = split_heads(%0) {'heads': 4}
        %2: f32[T, 4, 16] = attention(%1, @kv) {'scale': 0.25, 'window': 0, 'softcap': 0.0}
        %3: f32[T, 64] = merge_heads(%2)
        %4: f32[T, 64] = linear(%3, @half, -, -) {'alpha': 1.0}
        %5: f32[T, 64] = add(@y, %4)
        %6: f32[T, 64] = rms_norm(%5, @gain) {'eps': 1e-05}
        %7: f32[T, 64] = linear(%6, @half, -, -) {'alpha': 1.0}
        %8: f32[T, 32], %9: f32[T, 32] = split(%7) {'sizes': (32, 32)}
        %10: f32[T, 32] = glu(%8, %9) {'act': 'silu'}
        %11: f32[R, 32] = select_rows(%10, @first_row)
        return %11
        """)
    expect(
        select_early(graph),
        """\
        %y.wanted: f32[R, 64] = select_rows(@y, @first_row)
        %0: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 1.0}
        %1: f32[T, 4, 16] = split_heads(%0) {'heads': 4}
        %2: f32[T, 4, 16] = attention(%1, @kv) {'scale': 0.25, 'window': 0, 'softcap': 0.0}
        %3: f32[T, 64] = merge_heads(%2)
        %3.wanted: f32[R, 64] = select_rows(%3, @first_row)
        %4.wanted: f32[R, 64] = linear(%3.wanted, @half, -, -) {'alpha': 1.0}
        %5.wanted: f32[R, 64] = add(%y.wanted, %4.wanted)
        %6.wanted: f32[R, 64] = rms_norm(%5.wanted, @gain) {'eps': 1e-05}
        %7.wanted: f32[R, 64] = linear(%6.wanted, @half, -, -) {'alpha': 1.0}
        %8.wanted: f32[R, 32], %9.wanted: f32[R, 32] = split(%7.wanted) {'sizes': (32, 32)}
        %11: f32[R, 32] = glu(%8.wanted, %9.wanted) {'act': 'silu'}
        return %11
        """,
    )


def test_rows_are_selected_after_what_others_need_too() -> None:
    unchanged(
        select_early,
        """\
        %0: f32[T, 64] = linear(@x, @half, -, -) {'alpha': 1.0}
        %1: f32[R, 64] = select_rows(%0, @first_row)
        %2: f32[T, 64] = softcap(%0) {'cap': 30.0}
        return %1, %2
        """,
    )
