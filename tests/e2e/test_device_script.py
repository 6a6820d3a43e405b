"""`benchmarks/device.py` on the emulated device: what it will do on a GPU, but for the times."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

pytest_plugins = ("cli_fixtures",)

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "device.py"


def test_the_device_script_checks_kernels_and_measures_models(
    gguf: pathlib.Path, cache: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    shutil.copy(gguf, small / "tiny.gguf")
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, "metal:apple9", gguf, "--conformance", small, "--emulate"),
            *("--prompt", "20", "--tokens", "4", "--json", tmp_path / "result.json"),
        ],
        env=os.environ | {"ZLLMC_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["conformance"] == {"tiny": True}
    model = result["models"]["tiny"]
    assert model["replay_equals_eager"] is True and model["decode_tokens_per_s"] > 0
    assert model["rounds_equal_replay"] is True and model["rounds_tokens_per_s"] > 0
    assert "attention_partial" in done.stdout and "passed" in done.stdout
