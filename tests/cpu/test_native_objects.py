"""Objects that a machine links without a compiler: the executor's, and those of kernels."""

import pytest
from tvm.script import tirx as T

from zllmc.codegen.build_object import compile_object, llvm_target
from zllmc.codegen.cpu_executor import executor_object


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_executor_is_built_for_other_machines(machine):
    code = executor_object(llvm_target(f"{machine}-linux-gnu"))
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == {"x86_64": 62, "aarch64": 183}[machine]
    for name in (b"run", b"worker", b"stop", b"layout"):
        assert b"__tvm_ffi_executor_" + name in code


def test_executor_names_the_systems_it_knows():
    with pytest.raises(ValueError, match="riscv64"):
        executor_object(llvm_target("riscv64-linux-gnu"))


def test_code_that_needs_the_tvm_runtime_is_refused():
    @T.prim_func(s_tir=True)
    def parallel(x: T.handle("int32")):
        X = T.decl_buffer((8,), "int32", data=x)
        for i in T.parallel(8):
            X[i] = i

    with pytest.raises(ValueError, match="TVMBackendParallelLaunch"):
        compile_object({"parallel": parallel}, llvm_target("x86_64-linux-gnu"))
