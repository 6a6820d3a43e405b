"""The graph, its text form, its verifier, and the interpreter's contract."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.graph import Builder, Graph, Node, Value
from zllmc.zllm_ir.interpreter import Interpreter
from zllmc.zllm_ir.text import parse, print_graph
from zllmc.zllm_ir.types import SYMBOLS, Dim, KVType, R, S, T, TensorType, fixed, parse_type
from zllmc.zllm_ir.verify import verify

F32 = "f32"


def tiny_graph() -> Graph:
    """embedding → one attention layer without projections → head. Width 8, 2 heads of 4, vocabulary 10."""
    g = Builder("tiny")
    tokens = g.input("tokens", TensorType("i32", (T,)))
    positions = g.input("positions", TensorType("i32", (T,)))
    first = g.input("first_row", TensorType("i32", ()))
    table = g.weight("token_embd.weight", TensorType("F32", (10, 8)))
    state = g.state("kv.0", KVType(2, 4, "f32"))
    x = g.embedding(tokens, table)
    cos, sin = g.rope_table(positions, dims=4, base=10000.0)
    heads = g.rope(g.split_heads(x, heads=2), cos, sin, style="neox")
    after = g.kv_append(state, heads, heads)
    y = g.merge_heads(g.attention(heads, after, scale=0.5))
    x = g.rms_norm(g.select_rows(g.add(x, y), first), None, eps=1e-5)
    return g.finish(g.linear(x, table), after)


def table_bytes() -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).normal(size=(10, 8)).astype("<f4")
    return {"token_embd.weight": values.view(np.uint8).reshape(-1)}


# --- text form -----------------------------------------------------------------------------------------


def test_text_form_of_a_graph() -> None:
    g = Builder("norm")
    x = g.input("x", TensorType(F32, (T, 8)))
    a, b = g.split(x, sizes=(4, 4))
    y = g.linear(g.glu(a, b, act="silu"), g.weight("w", TensorType("Q4_K", (256, 4))))
    assert print_graph(g.finish(y)) == (
        "graph norm\n"
        "input x: f32[T, 8]\n"
        "weight w: Q4_K[256, 4]\n"
        "%0: f32[T, 4], %1: f32[T, 4] = split(@x) {'sizes': (4, 4)}\n"
        "%2: f32[T, 4] = glu(%0, %1) {'act': 'silu'}\n"
        "%3: f32[T, 256] = linear(%2, @w, -, -) {'alpha': 1.0}\n"
        "return %3\n"
    )


def test_text_form_parses_back() -> None:
    graph = tiny_graph()
    assert parse(print_graph(graph)) == graph


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs over (T, width) values: unary, binary and splitting ops, weights, and a state."""
    g = Builder(draw(st.sampled_from(["g", "a-b.c_1"])))
    values = [g.input(f"in.{i}", TensorType(F32, (T, 8))) for i in range(draw(st.integers(1, 3)))]
    states = [g.state(f"kv.{i}", KVType(2, 4, draw(st.sampled_from(["f16", "q8"])))) for i in range(2)]
    for _ in range(draw(st.integers(0, 12))):
        x = draw(st.sampled_from(values))
        number = draw(st.floats(min_value=-1e6, max_value=1e6))
        match draw(st.sampled_from(["scale", "add", "norm", "linear", "split", "kv"])):
            case "scale":
                values.append(g.scale(x, value=number))
            case "add":
                values.append(g.add(x, draw(st.sampled_from(values))))
            case "norm":
                gain = g.weight(f"gain.{draw(st.integers(0, 2))}", TensorType("F32", (8,)))
                values.append(g.rms_norm(x, draw(st.sampled_from([None, gain])), eps=abs(number)))
            case "linear":
                w = g.weight(f"w.{draw(st.integers(0, 2))}", TensorType("Q8_0", (8, 8)))
                values.append(
                    g.linear(x, w, draw(st.sampled_from([None, g.weight("b", TensorType("F32", (8,)))])))
                )
            case "split":
                a, b = g.split(x, sizes=(4, 4))
                values.append(
                    g.merge_heads(
                        g.split_heads(g.linear(a, g.weight("up", TensorType("F16", (8, 4)))), heads=2)
                    )
                )
                values.append(g.linear(b, g.weight("up", TensorType("F16", (8, 4)))))
            case "kv":
                i = draw(st.integers(0, 1))
                heads = g.split_heads(x, heads=2)
                states[i] = g.kv_append(states[i], heads, heads)
                values.append(
                    g.merge_heads(g.attention(heads, states[i], scale=0.5, window=draw(st.integers(0, 9))))
                )
    return g.finish(draw(st.sampled_from(values)), *states)


@settings(max_examples=60)
@given(graphs())
def test_every_graph_verifies_and_its_text_parses_back(graph: Graph) -> None:
    verify(graph)
    assert parse(print_graph(graph)) == graph


@settings(max_examples=150)
@given(st.data())
def test_damaged_text_is_an_error_that_names_a_line_or_another_graph(data: st.DataObject) -> None:
    text = print_graph(tiny_graph())
    i = data.draw(st.integers(0, len(text) - 1))
    damaged = (
        text[:i]
        + data.draw(st.text("%@[](){},:=TS09 \n\"'", max_size=4))
        + text[i + data.draw(st.integers(0, 6)) :]
    )
    try:
        parse(damaged)
    except IRError as error:
        assert str(error).startswith("line ")


@pytest.mark.parametrize(
    "line",
    ["%0: f32[T] = scale(%9) {'value': 1.0}", "return %9", "%0: f32[quit()] = argmax(-)", "what is this"],
)
def test_text_errors_name_the_line(line: str) -> None:
    with pytest.raises(IRError, match="line 2"):
        parse(f"graph g\n{line}\n")


# --- types ---------------------------------------------------------------------------------------------

dims = st.one_of(
    st.integers(0, 1 << 40),
    st.builds(
        lambda s, a, b: a * s + b,
        st.sampled_from([*SYMBOLS.values(), S + T]),
        st.integers(1, 9),
        st.integers(-9, 9),
    ),
)


@given(st.lists(dims, max_size=4), st.sampled_from(["f32", "Q4_K", "i32"]))
def test_types_parse_back(shape: list[object], dtype: str) -> None:
    type = TensorType(dtype, tuple(shape))
    assert parse_type(str(type)) == type


def test_state_types_parse_back() -> None:
    assert parse_type("kv.q8[8, 128]") == KVType(8, 128, "q8")
    assert parse_type("i32[]") == TensorType("i32", ())


@pytest.mark.parametrize(
    "text",
    [
        "f32",
        "f32[",
        "f32[x]",
        "f32[T+]",
        "f32[open]",
        "f32[T.free_symbols]",
        "f32[1.5]",
        "f32[True]",
        "kv.f16[T, 4]",
        "kv.f16[1]",
    ],
)
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(IRError, match="not a"):
        parse_type(text)


numbers = st.integers(-9, 9)


@given(numbers, numbers, numbers, st.integers(1, 99), st.integers(0, 99))
def test_dimensions_compute_as_their_numbers_do(a: int, b: int, c: int, tokens: int, cached: int) -> None:
    def of(t: Dim, s: Dim) -> Dim:
        return (a * t - b) * (s + c * t) - (3 - t)

    assert fixed(of(T, S), {T: tokens, S: cached}) == of(tokens, cached)
    assert fixed(fixed(of(T, S), {S: cached}), {T: tokens}) == of(tokens, cached)


def test_equal_dimensions_are_equal() -> None:
    assert (T + S) * (T - S) == T * T - S * S and hash(S + T) == hash(T + S)
    assert T - T == 0 and type(2 * T - T - T + 4) is int
    assert str((T + S) * 2 - T * S - 1) == "2*S - S*T + 2*T - 1"
    with pytest.raises(IRError, match="T is no number"):
        int(T)


def test_kv_bytes_per_token() -> None:
    assert KVType(2, 64, "f32").bytes_per_token == 2 * 2 * 64 * 4
    assert KVType(2, 64, "f16").bytes_per_token == 2 * 2 * 64 * 2
    assert KVType(2, 96, "q8").bytes_per_token == 2 * 2 * (96 + 2 * 2)  # two groups, one of them part full
    with pytest.raises(IRError, match="unknown KV storage"):
        _ = KVType(1, 1, "f8").bytes_per_token


# --- verifier ------------------------------------------------------------------------------------------


def change_node(op: str, /, **changes: object) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        i = next(i for i, n in enumerate(graph.nodes) if n.op == op)
        return replace(
            graph, nodes=(*graph.nodes[:i], replace(graph.nodes[i], **changes), *graph.nodes[i + 1 :])
        )

    return change


def append(
    op: str, inputs: tuple[str, ...], type: TensorType | KVType, /, **attrs: object
) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        values = {
            v.name: v for v in (*graph.inputs, *graph.states, *(v for n in graph.nodes for v in n.outputs))
        }
        node = Node(op, tuple(values[n] for n in inputs), tuple(attrs.items()), (Value("new", type),))
        return replace(graph, nodes=(*graph.nodes, node))

    return change


RULES = {
    "an operand is used before it is defined": (
        lambda g: replace(g, nodes=(g.nodes[1], *g.nodes[2:], g.nodes[0])),
        "before it is defined",
    ),
    "an operand has another type than where it was defined": (
        change_node("add", inputs=(Value("0", TensorType(F32, (T, 9))), Value("0", TensorType(F32, (T, 9))))),
        "before it is defined",
    ),
    "an input is declared twice": (
        lambda g: replace(g, inputs=(*g.inputs, g.inputs[0])),
        "tokens is defined twice",
    ),
    "two declarations share a name": (
        lambda g: replace(g, weights=(*g.weights, Value("tokens", TensorType("F32", (4,))))),
        "tokens is defined twice",
    ),
    "a node redefines a value": (
        change_node("merge_heads", outputs=(Value("0", TensorType(F32, (T, 8))),)),
        "0 is defined twice",
    ),
    "a node takes a declared name": (
        change_node("rms_norm", outputs=(Value("tokens", TensorType(F32, (R, 8))),)),
        "tokens is defined twice",
    ),
    "a name has spaces": (
        lambda g: replace(g, inputs=(*g.inputs, Value("a b", g.inputs[0].type))),
        "is no name",
    ),
    "a weight is no tensor": (
        lambda g: replace(g, weights=(*g.weights, Value("w", KVType(1, 1)))),
        "w is declared as kv",
    ),
    "a state is a tensor": (
        lambda g: replace(g, states=(*g.states, Value("s", TensorType(F32, (1,))))),
        "s is declared as f32",
    ),
    "an op is unknown": (change_node("add", op="plus"), r"plus → .*unknown op"),
    "an attribute is unknown": (change_node("add", attrs=(("speed", 1),)), "add has no attribute speed"),
    "an attribute is missing": (change_node("rms_norm", attrs=()), "rms_norm needs attribute eps"),
    "an operand is missing": (change_node("add", inputs=()), "add needs operand 'a'"),
    "an operand is one too many": (
        append("softcap", ("0", "0"), TensorType(F32, (T, 8)), cap=1.0),
        "takes 1 operands",
    ),
    "the type isn't what the op gives": (
        change_node("merge_heads", outputs=(Value("m", TensorType(F32, (T, 9))),)),
        r"merge_heads → %m: has type f32\[T, 9\], its operands give f32\[T, 8\]",
    ),
    "operand shapes don't fit": (
        append("add", ("0", "1"), TensorType(F32, (T, 8))),
        "add → %new: operands differ",
    ),
    "a tensor is used as a state": (
        append("kv_append", ("0", "3", "3"), TensorType(F32, (T, 8))),
        "kv_append doesn't fit its operands",
    ),
    "a state is read after it was overwritten": (
        append("attention", ("4", "kv.0"), TensorType(F32, (T, 2, 4)), scale=1.0),
        "state kv.0 was overwritten by kv_append",
    ),
    "a state is written twice": (
        append("kv_append", ("kv.0", "4", "4"), KVType(2, 4, "f32")),
        "state kv.0 was overwritten by kv_append",
    ),
    "the graph returns what isn't defined": (
        lambda g: replace(g, outputs=(Value("99", TensorType(F32, (R, 10))),)),
        "returns 99",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_verifier_finds(rule: str) -> None:
    breaks, message = RULES[rule]
    graph = tiny_graph()
    verify(graph)
    with pytest.raises(IRError, match=message):
        verify(breaks(graph))


# --- builder and graph ---------------------------------------------------------------------------------


def test_a_weight_is_one_value_however_often_it_is_asked_for() -> None:
    g = Builder("g")
    first = g.weight("w", TensorType("F16", (4, 8)))
    assert g.weight("w", TensorType("F16", (4, 8))) is first
    with pytest.raises(IRError, match="weight w is"):
        g.weight("w", TensorType("F16", (8, 4)))


def test_the_builder_knows_registered_ops_only() -> None:
    with pytest.raises(AttributeError, match="no op 'convolve'"):
        _ = Builder("g").convolve


def test_producers_and_consumers() -> None:
    graph = tiny_graph()
    add = next(n for n in graph.nodes if n.op == "add")
    assert graph.producers()[add.output] is add
    assert add in graph.consumers()[graph.nodes[0].output]


# --- interpreter ---------------------------------------------------------------------------------------


def test_one_pass_chunks_and_single_tokens_agree() -> None:
    tokens = np.array([3, 1, 4, 1, 5, 9, 2])
    whole = Interpreter(tiny_graph(), table_bytes()).run(tokens)[0]
    for sizes in ([1] * 7, [4, 3], [2, 2, 3]):
        chunked = Interpreter(tiny_graph(), table_bytes())
        parts = [chunked.run(part)[0] for part in np.split(tokens, np.cumsum(sizes)[:-1])]
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-6)
        assert chunked.position == len(tokens)


def test_only_the_wanted_rows_get_logits() -> None:
    tokens = np.array([3, 1, 4])
    every = Interpreter(tiny_graph(), table_bytes()).run(tokens)[0]
    last = Interpreter(tiny_graph(), table_bytes()).run(tokens, all_rows=False)[0]
    assert last.shape == (1, 10)
    np.testing.assert_allclose(last[0], every[-1], rtol=0, atol=1e-6)


def test_reset_forgets_the_cache() -> None:
    interpreter = Interpreter(tiny_graph(), table_bytes())
    first = interpreter.run([5, 6])[0]
    second = interpreter.run([5, 6])[0]
    interpreter.reset()
    assert interpreter.position == 0
    np.testing.assert_array_equal(interpreter.run([5, 6])[0], first)
    assert not np.allclose(first, second)


@pytest.mark.parametrize(
    "weights, message",
    [
        ({}, "no bytes given for the weights token_embd"),
        ({"token_embd.weight": np.zeros(316, np.uint8)}, "320 bytes, not 316"),
    ],
)
def test_wrong_weights_are_refused(weights: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(IRError, match=message):
        Interpreter(tiny_graph(), weights)


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [10], [-1]])
def test_wrong_tokens_are_refused(tokens: list[object]) -> None:
    with pytest.raises(IRError):
        Interpreter(tiny_graph(), table_bytes()).run(tokens)
