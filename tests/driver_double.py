"""Doubles of the libraries of CUDA's and HIP's drivers, and what tests ask of them."""

import ctypes
from pathlib import Path

from zllmc.runtime import driver_api
from zllmc.runtime.gpu import GpuDevice
from zllmc.runtime.host_compiler import compile_library

ARCHITECTURE = {"cuda": "sm_90", "rocm": "gfx1100"}
PARAMETERS = {"accumulate": 2, "add": 3, "copy": 3}
FUNCTIONS = {name: {"cuda": cuda, "rocm": hip} for name, (cuda, hip, _) in driver_api._FUNCTIONS.items()}
# name, blocks in x, y and z, threads, and arguments; the result is an error's number, or 0
KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_void_p
)


def compile_double(kind: str, cache: Path) -> Path:
    """The library that stands for that of `kind`."""
    source = Path(__file__).with_suffix(".cpp")
    flags = [f"-I{source.parent}", *(["-DHIP"] if kind == "rocm" else [])]
    return compile_library([source.read_text()], flags, [source.with_suffix(".h")], cache)


class Double:
    """A driver's library that notes what it is asked, and the devices that a test opens with it."""

    def __init__(self, vendor, path):
        self.vendor, self.kind, self.path = vendor, vendor.kind, path
        self.library = ctypes.CDLL(str(path))
        self.devices = []
        self.library.double_reset()
        self.set()

    def set(self, devices=1, architecture=None, capability=(9, 0), subgroup=32, memory=64 << 20):
        name = (architecture or ARCHITECTURE[self.kind]).encode()
        self.library.double_device(devices, name, *capability, subgroup, ctypes.c_size_t(memory))

    def fail(self, name, calls_before=0, code=1):
        symbol = FUNCTIONS[name][self.kind] if name in FUNCTIONS else name
        self.library.double_fail(symbol.encode(), calls_before, code)

    def calls(self, name):
        return self.library.double_calls(FUNCTIONS[name][self.kind].encode())

    def misuses(self):
        return self._text("double_misuses")

    def launches(self):
        """The names of the kernels that ran since the last call, a line each."""
        return self._text("double_launches")

    def left(self):
        """What is still allocated, a line for each sort."""
        return self._text("double_left")

    def _text(self, name):
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        return function().decode()

    def run_kernels(self, run):
        """Has kernels run by `run`(name, grid, threads, address of the arguments), not by the double."""
        self._run = KERNEL(run)
        self.library.double_kernels(self._run)

    def open(self, architecture=None, subgroup=32, parameters=PARAMETERS, **options):
        compiled_for = architecture or ARCHITECTURE[self.kind]
        kernels = {name: f"{compiled_for} {name} {count}".encode() for name, count in parameters.items()}
        device = GpuDevice(self.vendor, kernels, compiled_for, subgroup, library=str(self.path), **options)
        self.devices.append(device)
        return device
