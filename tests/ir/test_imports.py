"""The import rules of pyproject.toml refuse every import that the design does, and little is loaded early."""

import itertools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from places import REPOSITORY

FOLDERS = ["frontends", "passes", "codegen", "runtime", "targets", "zllm_ir"]
RULES = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
ABOVE = re.findall(r"\w+", RULES[0]["layers"][0])  # the modules of the API and the command line
MODULES = [*ABOVE, *FOLDERS]
ALLOWED = {
    *((source, target) for source in ABOVE for target in MODULES if source != target),
    *itertools.product(["passes", "codegen"], ["targets", "zllm_ir"]),
    *itertools.product(["frontends", "runtime", "targets"], ["zllm_ir"]),
}


def lint(folder: pathlib.Path, imports: set[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    """Checks the rules on a package that has nothing in it but these imports."""
    for name in {*MODULES, *(source for source, _ in imports)}:
        lines = [f"import {target}\n" for source, target in imports if source == name]
        (folder / "zllmc" / name).mkdir(parents=True)
        (folder / "zllmc" / name / "__init__.py").write_text("".join(lines))
    (folder / "zllmc" / "__init__.py").touch()
    program = pathlib.Path(sys.executable).with_name("lint-imports")
    command = [program, "--no-cache", "--no-logo", REPOSITORY / "pyproject.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_imports_of_the_design_are_allowed(tmp_path):
    ours = {(source, f"zllmc.{target}") for source, target in ALLOWED}
    theirs = {("codegen", "tvm"), ("runtime", "tvm_ffi"), ("runtime", "tvm_ffi_orcjit"), ("zllm_ir", "numpy")}
    result = lint(tmp_path, ours | theirs | {("cli", "zllmc")})
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("source", FOLDERS)
def test_every_other_import_is_refused(tmp_path, source):
    targets = {f"zllmc.{name}" for name in MODULES if name != source and (source, name) not in ALLOWED}
    targets |= {"zllmc"} if source == "codegen" else {"zllmc", "tvm"}
    result = lint(tmp_path, {(source, target) for target in targets})
    assert result.returncode == 1
    for target in targets:
        assert f"zllmc.{source} -> {target} (l." in result.stdout


def test_a_module_without_a_place_in_the_rules_is_refused(tmp_path):
    result = lint(tmp_path, {("novelty", "numpy")})
    assert result.returncode == 1
    assert "zllmc.novelty" in result.stdout


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh Python has loaded after this code."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return set(listing.stdout.split())


def test_the_whole_runtime_loads_no_part_of_the_compiler():
    loaded = loaded_by(
        "import importlib, pkgutil, zllmc.runtime\n"
        "for module in pkgutil.walk_packages(zllmc.runtime.__path__, 'zllmc.runtime.'):\n"
        "    importlib.import_module(module.name)\n"
    )
    assert "zllmc.runtime.cpu" in loaded
    compiler = {f"zllmc.{name}" for name in ["compiler", "frontends", "passes", "codegen", "targets"]}
    assert not loaded & (compiler | {"tvm"})


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"numpy", "tokenizers", "jinja2", "rich", "tvm", "tvm_ffi"}
    assert not heavy & loaded_by("import zllmc")
