"""One file per model family.

A family is added by one file in this folder: every module with an `ARCHITECTURES` dictionary, from
`general.architecture` to `Architecture`, is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from zllmc.frontends.architectures.dense import Architecture


def architectures() -> dict[str, Architecture]:
    """All known architectures by their GGUF name."""
    known: dict[str, Architecture] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for name, architecture in getattr(module, "ARCHITECTURES", {}).items():
            if name in known:
                raise ValueError(f"two files of {__name__} define {name}: {info.name} is the second")
            known[name] = architecture
    return known
