"""The examples run as their first lines say."""

import pathlib
import subprocess
import sys

import pytest

pytest_plugins = ("cli_fixtures",)

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = {
    "ask": ["Why is the sky blue?"],
    "batch": ["The sky is", "The sea is", "A river is"],
    "conversation": ["Name a river.", "Which country is it in?"],
    "classify": ["A waste of time.", "good", "bad"],
    "constrain": ["How many legs does a spider have?"],
}


def test_every_example_is_tested() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts - {"fetch_model"} == set(EXAMPLES)  # that one needs a network


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_without_arguments_says_how_to_call_it(name: str) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "model.gguf"], capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 1 and f"python examples/{name}.py model.gguf " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, artifact: pathlib.Path) -> None:
    script = FOLDER / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script, artifact, *EXAMPLES[name]], capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    if name == "batch":
        assert "The sea is" in done.stdout
    if name == "constrain":
        assert done.stdout.strip().isdigit()
    if name == "classify":
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["good", "bad"]
    if name == "conversation":
        assert "> Which country is it in?" in done.stdout and "(0 of" in done.stderr
