"""Speculation from the command line."""

import itertools
import json
import pathlib

import pytest

from processes import Run
from zllmc.runtime import speculation

pytest_plugins = ("cli_fixtures",)


@pytest.fixture(autouse=True)
def every_guess_is_worth_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(speculation, "UNMEASURED", 0)


@pytest.mark.parametrize("temperature", ["0", "0.5"])
def test_speculation_changes_no_answer_and_reports_its_guesses(
    run: Run, artifact: pathlib.Path, temperature: str
) -> None:
    command = ("run", artifact, "abcabcabc", "--temperature", temperature, "--seed", 5, "--max-tokens", 300)
    plain, found = run(*command), run(*command, "--speculate", "ngram")
    assert found.out == plain.out and found.code == 0
    assert "guessed tokens right" in found.err and "guessed" not in plain.err


def test_bench_reports_guesses(run: Run, artifact: pathlib.Path) -> None:
    sizes = ("--prompt", "20", "--tokens", "490", "--repeat", "1")
    result = json.loads(run("bench", artifact, *sizes, "--speculate", "ngram", "--json").out)
    assert 0 < result["speculation"]["accepted"] <= result["speculation"]["drafted"]
    assert "guesses accepted" in run("bench", artifact, *sizes, "--speculate", "ngram").out
    short = ("--prompt", "20", "--tokens", "8", "--repeat", "1")
    assert "speculation" not in json.loads(run("bench", artifact, *short, "--json").out)


def test_an_unknown_kind_of_speculation_is_refused(run: Run, artifact: pathlib.Path) -> None:
    done = run("run", artifact, "hi", "--speculate", "magic")
    assert done.code == 2 and "ngram" in done.err
