"""The HIP prelude's arithmetic, run on the CPU with stand-ins for the GPU's own instructions."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from zllmc.codegen.gpu_toolchain import prelude

STAND_INS = """
#define __builtin_amdgcn_rsqf(x) (1.0f / __builtin_sqrtf(x))
#define __builtin_amdgcn_exp2f(x) __builtin_exp2f(x)
#define __builtin_amdgcn_sdot4(...) 0
#define __builtin_amdgcn_fence(...)
#define __builtin_amdgcn_s_barrier()
#define __builtin_amdgcn_ds_bpermute(...) 0
#define __builtin_amdgcn_wave_barrier()
#define __builtin_amdgcn_mov_dpp(...) 0
#define __builtin_amdgcn_permlanex16(...) 0
#define __builtin_amdgcn_mbcnt_lo(...) 0u
#define __builtin_amdgcn_mbcnt_hi(...) 0u
static unsigned perm(unsigned high, unsigned low, unsigned places) {  // v_perm_b32, of places below 8
    unsigned result = 0;
    for (int i = 0; i < 32; i += 8) {
        const unsigned place = places >> i & 0xff;
        result |= ((place < 4 ? low : high) >> 8 * (place & 3) & 0xff) << i;
    }
    return result;
}
#define __builtin_amdgcn_perm perm
"""
CALL = """
extern "C" void {name}(long n, const float* x, const float* y, float* r) {{
    for (long i = 0; i < n; i++) r[i] = {expression};
}}
"""
LOOKUP = "as_float(lookup16(as_uint(x[i]), 0x81c0a190u, 0xe1f1b1d1u, 0x3cb7e6fdu, 0x34719cb6u))"
UNARY = ("fsin", "fcos", "ftanh", "frsqrt")

Function = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Function]:
    if not os.environ.get("CI"):
        pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("math")
    calls = [CALL.format(name=f"call_{name}", expression=f"{name}(x[i])") for name in UNARY]
    calls.append(CALL.format(name="call_fpow", expression="fpow(x[i], y[i])"))
    calls.append(CALL.format(name="call_lookup16", expression=LOOKUP))
    (folder / "math.cpp").write_text(STAND_INS + prelude("hip") + "".join(calls))
    command = [sys.executable, "-m", "ziglang", "c++", "-O2", "-w", "-shared", "-fPIC", "-nostdlib"]
    subprocess.run([*command, "-o", "math.so", "math.cpp"], cwd=folder, check=True, timeout=300)
    library = ctypes.CDLL(str(folder / "math.so"))

    def function(name: str) -> Function:
        def call(x: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
            result = np.empty_like(x)
            pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, x if y is None else y, result))
            getattr(library, f"call_{name}")(ctypes.c_long(x.size), *pointers)
            return result

        return call

    return {name: function(name) for name in (*UNARY, "fpow", "lookup16")}


def error_in_ulp(value: np.ndarray, exact: np.ndarray) -> float:
    """The greatest distance, in units of the last place of the exact value rounded to float32."""
    unit = np.maximum(np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64), 2.0**-149)
    return float(np.max(np.abs(value.astype(np.float64) - exact) / unit))


def randoms(seed: int, low: float, high: float, count: int = 200_000) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, count).astype(np.float32)


def test_sine_and_cosine_hold_their_precision_up_to_a_million(functions: dict[str, Function]) -> None:
    multiples = np.random.default_rng(0).integers(0, 636_619, 200_000) * (np.pi / 2)
    x = np.concatenate([randoms(1, -1e6, 1e6), randoms(2, -8, 8), multiples]).astype(np.float32)
    assert error_in_ulp(functions["fsin"](x), np.sin(x.astype(np.float64))) < 2
    assert error_in_ulp(functions["fcos"](x), np.cos(x.astype(np.float64))) < 2
    special = np.float32([np.inf, -np.inf, np.nan])
    assert np.isnan(functions["fsin"](special)).all() and np.isnan(functions["fcos"](special)).all()
    assert functions["fsin"](np.float32([0, 1e-40])).tolist() == pytest.approx([0, 1e-40], rel=1e-4)


def test_the_hyperbolic_tangent_is_precise_and_saturates(functions: dict[str, Function]) -> None:
    x = np.concatenate([randoms(1, -12, 12), np.exp(randoms(2, -80, 3))])
    assert error_in_ulp(functions["ftanh"](x), np.tanh(x.astype(np.float64))) < 2
    special = functions["ftanh"](np.float32([np.inf, -np.inf, 100, 0, np.nan]))
    assert special[:4].tolist() == [1, -1, 1, 0] and np.isnan(special[4])


def test_the_reciprocal_root_takes_subnormals(functions: dict[str, Function]) -> None:
    x = np.exp(randoms(1, -103, 88))
    assert error_in_ulp(functions["frsqrt"](x), 1 / np.sqrt(x.astype(np.float64))) < 2
    assert functions["frsqrt"](np.float32([0, np.inf])).tolist() == [np.inf, 0]


def test_powers_are_precise_and_follow_the_c_standard(functions: dict[str, Function]) -> None:
    x = np.concatenate([np.exp(randoms(1, -100, 88)), randoms(2, 0.9, 1.1), np.exp(randoms(3, -103, -88))])
    y = np.concatenate([randoms(4, -4, 4), randoms(5, -800, 800), randoms(6, -1, 1)])
    exact = np.power(x.astype(np.float64), y.astype(np.float64))
    normal = (exact < 3.4e38) & (exact > 2e-45)
    assert error_in_ulp(functions["fpow"](x, y)[normal], exact[normal]) < 2

    values = np.float32([-np.inf, -3, -2.5, -2, -1, -0.5, -0.0, 0, 0.5, 1, 2, 3, np.inf, np.nan, 1e38, 1e-40])
    x, y = (axis.ravel() for axis in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(functions["fpow"](x, y), exact, rtol=1e-6)
    zeros = exact == 0
    assert (np.signbit(functions["fpow"](x, y)) == np.signbit(exact))[zeros].all()


def test_table_look_ups_pick_bytes_by_their_low_four_bits(functions):
    table = np.array([0x81C0A190, 0xE1F1B1D1, 0x3CB7E6FD, 0x34719CB6], np.uint32).view(np.uint8)
    index = np.arange(256, dtype=np.uint8).repeat(4)
    index[1::2] = index[::-2]
    found = functions["lookup16"](index.view(np.float32)).view(np.uint8)
    np.testing.assert_array_equal(found, table[index & 15])
