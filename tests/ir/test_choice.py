"""The choice of a token: the op's reference in stages, and the decode graph that ends with it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllmc.passes.choose_token import CANDIDATES, choose_token
from zllmc.passes.lower import lower
from zllmc.passes.plan import make_plan
from zllmc.zllm_ir.choice_ops import PART, choose, top_k, top_k_partial
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.plan import CHOSEN, CONTROL_CACHED
from zllmc.zllm_ir.text import parse, print_graph
from zllmc.zllm_ir.types import TensorType
from zllmc.zllm_ir.verify import verify

DECODE = """\
graph g
input tokens: i32[1]
input positions: i32[1]
input first_row: i32[]
weight table: F32[50, 64]
%0: f32[1, 64] = embedding(@tokens, @table) {'scale': 1.0}
%1: f32[1, 50] = linear(%0, @table, -, -) {'alpha': 1.0}
return %1
"""


def test_the_largest_come_first_and_of_equals_the_lowest() -> None:
    values, ids = top_k(np.array([[1, 3, np.nan, 3, -np.inf], [0.0, -0.0, -1, -1, 0]], np.float32), k=4)
    assert values.tolist() == [[np.inf, 3, 3, 1], [0, 0, 0, -1]]
    assert ids.tolist() == [[2, 1, 3, 0], [0, 1, 4, 2]]


LOGITS = st.lists(
    st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 1.0, 7.0, np.inf, np.nan]), min_size=1, max_size=2 * PART + 9
)


@given(LOGITS, st.integers(1, CANDIDATES), st.integers(0, 1 << 20))
def test_the_stages_together_choose_from_all_logits(logits: list[float], k: int, position: int) -> None:
    row = np.array([logits], np.float32)
    k = min(k, len(logits))
    before = np.arange(CHOSEN, dtype=np.int32)[None]
    found = choose(*top_k_partial(row, k=k), np.array([position], np.int32), before)
    values, ids, token, following, chosen = found
    for part, whole in zip((values, ids), top_k(row, k=k), strict=True):
        np.testing.assert_array_equal(part, whole)
    assert (token[0], following[0]) == (ids[0, 0], position + 1)
    assert chosen[0, position % CHOSEN] == (token[0] if np.isfinite(values[0, 0]) else -1)
    assert (np.delete(chosen - before, position % CHOSEN) == 0).all()


def test_type_rules_give_the_references_types_and_refuse_what_does_not_fit() -> None:
    row, one = TensorType("f32", (1, 1300)), TensorType("i32", (1,))
    parts = OPS["top_k_partial"].infer_types([row], {"k": 8})
    assert parts == (TensorType("f32", (3, 8)), TensorType("i32", (3, 8)))
    chosen = TensorType("i32", (1, CHOSEN))
    results = OPS["choose"].infer_types([*parts, one, chosen], {})
    assert results == (TensorType("f32", (1, 8)), TensorType("i32", (1, 8)), one, one, chosen)
    assert OPS["top_k"].infer_types([TensorType("f32", (5, 9))], {"k": 9})[1] == TensorType("i32", (5, 9))
    for op, operands, attrs in (
        ("top_k", [row], {"k": 1301}),
        ("top_k_partial", [TensorType("f32", (2, 1300))], {"k": 8}),
        ("top_k_partial", [row], {"k": PART + 1}),
        ("choose", [parts[0], parts[0], one, chosen], {}),
        ("choose", [*parts, chosen, chosen], {}),
    ):
        with pytest.raises(IRError, match=op):
            OPS[op].infer_types(operands, attrs)


def test_a_decode_ends_with_what_the_next_round_reads() -> None:
    graph = choose_token(parse(DECODE))
    verify(graph)
    assert parse(print_graph(graph)) == graph
    kernels = lower(graph, name="decode", context=64, max_tokens=1, max_rows=1)
    plan = make_plan({"decode": kernels}, {"table": (0, 12800)})
    number = {buffer.name: i for i, buffer in enumerate(plan.buffers)}
    sizes = {buffer.name: buffer.bytes for buffer in plan.buffers}
    assert (sizes["candidates"], sizes["candidate_ids"], sizes["chosen"]) == (256, 256, 4 * CHOSEN)
    *_, choice = plan.entries[0].launches
    places = [(pointer.buffer, pointer.offset) for pointer in choice.args]
    position, chosen = (number["control"], 4 * CONTROL_CACHED), (number["chosen"], 0)
    assert places[3:5] == [position, chosen]
    assert places[5:7] == [(number["candidates"], 0), (number["candidate_ids"], 0)]
    assert places[7:] == [(number["tokens"], 0), position, chosen]
    assert plan.entries[0].launches[0].args[1] == choice.args[7]  # the embedding reads the token
