"""embedding against its reference, from the packed layout that the head shares."""

from __future__ import annotations

import numpy as np
import pytest

from blocks import random_rows
from harness import RUNNABLE, control, run
from zllmc.codegen.embedding import embedding
from zllmc.codegen.packing import layout_of, pack_rows
from zllmc.zllm_ir.formats import FORMATS, decode
from zllmc.zllm_ir.kernel_graph import KernelCall, Operand
from zllmc.zllm_ir.types import T, TensorType


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_equal_the_decoder(format, tokens):
    rng = np.random.default_rng(tokens)
    rows, columns, target = 37, 512, RUNNABLE[-1]
    raw = random_rows(FORMATS[format], rows, columns, rng)
    packed = pack_rows(layout_of(format, (rows, columns), target.lanes), raw)
    first = 1 if tokens == 1 else T
    call = KernelCall(
        "embedding",
        (("scale", 0.5),),
        (Operand(TensorType("i32", (first,)), 1), Operand(TensorType(format, (rows, columns)))),
        (Operand(TensorType("f32", (first, columns)), columns),),
    )
    ids = rng.integers(0, rows, tokens, dtype=np.int32)
    ids[-1] = rows - 1
    y = np.zeros((tokens, columns), np.float32)
    run(embedding, call, control(tokens), ids, packed, y, threads=3)
    expected = decode(FORMATS[format], raw)[ids] * np.float32(0.5)
    # One fused multiply-add may round once where the decoder rounds twice.
    np.testing.assert_allclose(y, expected, rtol=3e-7, atol=1e-7 * np.abs(expected).max())
