"""Chat with a model: one question, or a conversation at the terminal or from a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Literal

from zllmc.runtime.engine import Engine, Session
from zllmc.runtime.generation import Chunk, Prompt, Stats, generate
from zllmc.runtime.sampling import SamplingParams
from zllmc.terminal import interruptible, note, say
from zllmc.zllm_ir.errors import ZllmcError

HELP = """\
/help         this list
/stats        tokens, speed, and how full the context is
/reset        forget the conversation
/system TEXT  set the system message; without TEXT, remove it
/save FILE    write the conversation as JSON
/exit         leave (so does Ctrl-D)
Ctrl-C stops an answer. Lines that start with anything else go to the model."""


@dataclass
class Conversation:
    """The messages so far and the session that has computed them.

    With `raw`, the model just continues each text: no template, and no memory from one to the next.
    """

    engine: Engine
    sampling: SamplingParams
    system: str | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    raw: bool = False
    speculate: Literal["ngram"] | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    session: Session = field(init=False)
    last: Stats | None = None

    def __post_init__(self) -> None:
        self.session = self.engine.session()

    def reset(self) -> None:
        self.messages.clear()
        self.last = None

    def ask(self, text: str, cancel: Event | None = None) -> Iterator[Chunk]:
        """Streams the answer to `text`. Question and answer join the conversation if anything was said, even
        if the stream is closed before its end."""
        question = {"role": "user", "content": text}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt: Prompt = text if self.raw else [*system, *self.messages, question]
        answer = ""
        stream = generate(
            self.engine,
            prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            seed=self.seed,
            session=self.session,
            cancel=cancel,
            speculate=self.speculate,
        )
        try:
            for chunk in stream:
                answer += chunk.text
                self.last = chunk.stats
                yield chunk
        finally:
            if answer and not self.raw:
                self.messages += [question, {"role": "assistant", "content": answer}]

    def stats(self) -> str:
        used, size = len(self.session.tokens), self.engine.manifest.context
        room = f"context {used:,} of {size:,} tokens"
        return room if self.last is None else f"{speeds(self.last)} | {room}"

    def save(self, path: Path) -> None:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = json.dumps([*system, *self.messages], ensure_ascii=False, indent=2) + "\n"
        path.write_text(text, encoding="utf-8", errors="replace")


def speeds(stats: Stats) -> str:
    """`prompt 31 tokens, 410.2 tokens/s | answer 57 tokens, 48.1 tokens/s`"""
    reused = f" ({stats.reused_tokens:,} reused)" if stats.reused_tokens else ""
    prompt = f"prompt {stats.prompt_tokens:,} tokens{reused}"
    if stats.tokens:  # else it was stopped before
        prompt += f", {stats.prefill_rate:.1f} tokens/s"
    answer = f"answer {stats.tokens:,} token{'' if stats.tokens == 1 else 's'}"
    if stats.tokens > 1:
        answer += f", {stats.decode_rate:.1f} tokens/s"
    if stats.drafted:
        answer += f", {stats.accepted:,} of {stats.drafted:,} guessed tokens right"
    return f"{prompt} | {answer}"


def answer_once(conversation: Conversation, prompt: str, *, quiet: bool = False) -> bool:
    """Prints the answer to one prompt; False if Ctrl-C cut it short."""
    return _print_answer(conversation, prompt, quiet=quiet) != "cancelled"


def converse(conversation: Conversation) -> None:
    """Reads questions and commands from stdin, line by line, until its end or /exit."""
    if conversation.raw:
        note("each line is a text for the model to continue; /help lists commands")
    elif sys.stdin.isatty():
        note("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves")
    for line in _lines():
        if line.startswith("/"):
            if not _command(conversation, line):
                return
        elif line:
            try:
                _print_answer(conversation, line)
            except ZllmcError as error:  # of this question; the conversation goes on
                note(f"{error} (/reset starts again)")


def _print_answer(conversation: Conversation, text: str, *, quiet: bool = False) -> str | None:
    finish = None
    with interruptible() as cancel:
        for chunk in conversation.ask(text, cancel):
            say(chunk.text)
            finish = chunk.finish
    say("\n")
    if quiet:
        return finish
    if finish == "cancelled":
        note("(stopped)")
    elif finish == "length":
        note("(cut: the token limit or the end of the context is reached)")
    elif finish == "repetition":
        note("(stopped: the model only repeats itself; a --repeat-penalty of 1.1 may help)")
    return finish


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    import readline  # noqa: F401  (gives `input` editing and history)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\n(/exit or Ctrl-D leaves)")


def _command(conversation: Conversation, line: str) -> bool:
    """Runs a slash command; False to leave."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    match name:
        case "/exit" | "/quit":
            return False
        case "/help":
            note(HELP)
        case "/stats":
            note(conversation.stats())
        case "/reset":
            conversation.reset()
            note("the conversation is forgotten")
        case "/system":
            conversation.system = argument or None
            note("the system message is set" if argument else "there is no system message now")
        case "/save" if argument:
            try:
                conversation.save(Path(argument).expanduser())
                note(f"saved {len(conversation.messages)} messages to {argument}")
            except OSError as error:
                note(f"{argument} can't be written: {error.strerror}")
        case "/save":
            note("/save needs the name of a file")
        case _:
            note(f"there is no command {name}; /help lists them")
    return True
