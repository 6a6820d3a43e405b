"""Chat, over a pipe and on a terminal."""

import json
import os
import pathlib
import subprocess
import time

from processes import COMMAND, Run, Terminal, process

pytest_plugins = ("cli_fixtures",)


def test_a_chat_over_a_pipe(run: Run, artifact: pathlib.Path, tmp_path: pathlib.Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["first", "/stats", "second", "/stats", f"/save {saved}", "/nonsense", "/help", "/exit", "never"]
    done = run("run", artifact, "--max-tokens", "4", "--system", "be kind", stdin="\n".join(lines))
    assert done.code == 0
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["first", "second"]
    assert done.out == "".join(m["content"] + "\n" for m in messages if m["role"] == "assistant")
    assert "reused" in done.err and "no command /nonsense" in done.err and "/reset" in done.err


def test_reset_forgets_the_conversation(run: Run, artifact: pathlib.Path) -> None:
    options = ("run", artifact, "--max-tokens", "6", "--temperature", "0")
    done = run(*options, stdin="hello\nother\n/reset\nhello\n")
    first, _, again = done.out.split("\n")[:3]
    assert first == again


def test_a_line_that_is_no_text_is_no_error(artifact: pathlib.Path) -> None:
    command = [*COMMAND, "run", str(artifact), "--max-tokens", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, input=b"\xff\xfe\nhi\n", capture_output=True, env=environment)
    assert done.returncode == 0 and done.stdout.isascii() and done.stdout.count(b"\n") >= 2


def test_a_chat_that_fills_the_context_says_so_and_goes_on(run: Run, artifact: pathlib.Path) -> None:
    done = run("run", artifact, "--max-tokens", "3", stdin=f"{'x' * 600}\nhi\n")
    assert done.code == 0 and "the context holds 512" in done.err and done.out.count("\n") >= 1


def test_ctrl_c_stops_an_answer_and_not_the_chat(gguf: pathlib.Path) -> None:
    terminal = Terminal("run", gguf, "--context", "65536")
    terminal.wait_for("> ")
    time.sleep(0.3)  # until it waits for keys: before that, Python keeps the signal for the next key
    terminal.type("\x03")
    terminal.wait_for("/exit or Ctrl-D leaves")
    for _ in range(2):
        terminal.wait_for("> ")
        terminal.type("say much\n")
        terminal.wait_for("say much")
        time.sleep(0.3)
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
    terminal.type("/stats\n")
    terminal.wait_for("context")
    terminal.type("/exit\n")
    assert terminal.finish() == 0


def test_ctrl_d_leaves_a_chat(artifact: pathlib.Path) -> None:
    terminal = Terminal("run", artifact)
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.finish() == 0


def test_ctrl_c_ends_a_single_answer(gguf: pathlib.Path) -> None:
    terminal = Terminal("run", gguf, "say much", "--context", "65536")
    terminal.wait_for("context 65,536")
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    assert terminal.finish() == 130


def test_an_answer_cannot_control_the_terminal(gguf: pathlib.Path) -> None:
    arguments = ["run", gguf, "hi", "--seed", "1", "--temperature", "3", "--min-p", "0", "--context", "65536"]
    piped = process(*arguments, "--max-tokens", "400", "-q")
    assert "\x1b" in piped.out  # the model does say it
    terminal = Terminal(*arguments, "--max-tokens", "400", "-q")
    assert terminal.finish() == 0
    assert "�" in terminal.seen and "\x1b" not in terminal.seen
