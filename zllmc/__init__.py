"""zllmc: a compiler for large language models.

    import zllmc

    zllmc.compile("model.gguf", "model.zllm")
    with zllmc.load("model.zllm") as engine:  # or the .gguf itself: compiled once into a cache
        for chunk in engine.generate([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=200):
            print(chunk.text, end="", flush=True)

Everything is imported when first used, so that `import zllmc` takes no time and running an artifact never
loads the compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zllmc.cache import load as load
    from zllmc.compiler import compile_model as compile
    from zllmc.runtime.engine import Engine as Engine
    from zllmc.runtime.sampling import SamplingParams as SamplingParams
    from zllmc.zllm_ir.errors import ZllmcError as ZllmcError

__all__ = ["Engine", "SamplingParams", "ZllmcError", "compile", "load"]

_PLACES = {
    "Engine": "zllmc.runtime.engine:Engine",
    "SamplingParams": "zllmc.runtime.sampling:SamplingParams",
    "ZllmcError": "zllmc.zllm_ir.errors:ZllmcError",
    "compile": "zllmc.compiler:compile_model",
    "load": "zllmc.cache:load",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("zllmc")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
