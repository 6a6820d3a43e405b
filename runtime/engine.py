"""Runs an artifact: whole model passes over sessions. Imports neither the compiler nor TVM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zllmc.runtime.artifact import Manifest, open_artifact
from zllmc.runtime.devices import Mode, open_device
from zllmc.runtime.text import Tokenizer
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.plan import (
    CHOSEN,
    CONTROL_BEST,
    CONTROL_CACHED,
    CONTROL_FIRST_ROW,
    CONTROL_TOKENS,
    CONTROL_WORDS,
    Buffer,
    EntryPoint,
)

if TYPE_CHECKING:
    from zllmc.runtime.chat_template import ChatTemplate
    from zllmc.runtime.greedy_rounds import GreedyRounds

Logits = NDArray[np.float32]


class ContextFull(ZllmcError):
    """More tokens than the artifact's context holds."""


class Session:
    """One sequence: its tokens and their keys and values. Made by `Engine.session`."""

    def __init__(self, engine: Engine, states: dict[int, Any]) -> None:
        self._engine = engine
        self.states = states  # plan buffer number → KV memory
        self.tokens: list[int] = []  # those whose state is cached
        self.ahead: list[int] = []  # tokens after these whose state is cached too, should they be accepted
        self.changes = 0  # passes and truncations so far

    def prefill(self, ids: Sequence[int]) -> Logits:
        """Append tokens in as few passes as fit; the last logits (vocab,), valid until the next pass."""
        if not ids:
            raise ValueError("prefill needs at least one token")
        return self._engine.advance(self, ids)

    def decode(self, id: int) -> Logits:
        """Append one token; its logits (vocab,), valid until the next pass."""
        return self._engine.advance(self, (id,))

    def decode_largest(self, id: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Append one token; the ids of the engine's `candidates` largest logits, and these, in falling order,
        of equal ones the lowest id first. `last_logits` gives the others."""
        return self._engine.advance_largest(self, id)

    def last_logits(self) -> Logits:
        """Logits (vocab,) after the last token of the engine's latest pass, valid until the next."""
        return self._engine.last_logits()

    def verify(self, ids: Sequence[int]) -> Logits:
        """Append ids[0] and compute the others ahead, in one pass: logits after each (len(ids), vocab), valid
        until the next pass. `accept` appends the others one by one as long as they turn out right.

        ValueError for more than the prefill entry's `max_rows` ids, or none.
        """
        logits = self._engine.look_ahead(self, ids)
        kept = len(self.tokens) - len(ids) + 1
        self.ahead = self.tokens[kept:]
        del self.tokens[kept:]
        return logits

    def accept(self) -> None:
        """Append the next token that `verify` computed ahead. ValueError if none is left, or if another pass
        or `truncate` came between."""
        if not self.ahead:
            raise ValueError("no token was computed ahead")
        self.tokens.append(self.ahead.pop(0))

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on. Their state is simply overwritten later."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot truncate {len(self.tokens)} tokens to {length}")
        del self.tokens[length:]
        self.forget_ahead()

    def forget_ahead(self) -> None:
        """Note that what was computed ahead does not hold any more. Called at each change of the session."""
        self.ahead.clear()
        self.changes += 1


class Engine:
    """An artifact loaded on a device.

        with Engine.open("model.zllm") as engine:
            for chunk in engine.generate("The capital of France is", max_tokens=16):
                print(chunk.text, end="")

    One pass runs at a time; sessions take turns, or share a pass of `decode_batch`.
    """

    def __init__(self, path: Path | str, *, threads: int | None = None, device: Mode | None = None) -> None:
        artifact = open_artifact(Path(path))
        self.manifest: Manifest = artifact.manifest
        self.context = artifact.manifest.context
        self.device = open_device(artifact, threads, device)
        reader = ThreadPoolExecutor(1)
        weights = reader.submit(self.device.load, artifact.weights)  # while this thread reads the texts
        reader.shutdown(wait=False)
        self._tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        if artifact.tokenizer is not None:
            json, facts = artifact.tokenizer
            if artifact.chat_template is not None:
                # First: importing leaves the interpreter to the reader, the tokenizer's library keeps it.
                from zllmc.runtime.chat_template import ChatTemplate

                bos, eos = facts["bos_token"], facts["eos_token"]
                self.chat_template = ChatTemplate(artifact.chat_template, bos, eos)
            self._tokenizer = Tokenizer.from_json(json, facts)

        plan = artifact.plan
        self._entries = {entry.name: entry for entry in plan.entries}
        self._plan = plan
        self._numbers = {buffer.name: i for i, buffer in enumerate(plan.buffers)}
        self._state_numbers = [i for i, b in enumerate(plan.buffers) if b.kind == "state"]
        states = self._new_states()

        def memory_of(number: int, buffer: Buffer) -> Any:
            if buffer.kind == "state":
                return states[number]
            if buffer.kind == "weights":
                return weights.result()
            return self.device.allocate(max(buffer.bytes, 1))

        self._buffers = [memory_of(number, buffer) for number, buffer in enumerate(plan.buffers)]
        size = plan.buffers[self._numbers["control"]].bytes
        self._control: NDArray[np.int32] = np.zeros((size // 4 // CONTROL_WORDS, CONTROL_WORDS), np.int32)
        rows = max(entry.max_rows for entry in plan.entries)
        self._logits_stride = plan.buffers[self._numbers["logits"]].bytes // 4 // rows
        # How many of the largest logits a decode pass finds on the device. With any, it chooses a token too.
        self.candidates = 0
        if "chosen" in self._numbers:
            room = plan.buffers[self._numbers["candidates"]].bytes // 4
            self.candidates = min(room, self.manifest.vocab)
        self._rounds: GreedyRounds | None = None  # whose rounds the device goes on with
        self.recordings: dict[str, Any] = {
            name: self.device.record(entry, self._buffers) for name, entry in self._entries.items()
        }
        self._bound = Session(self, states)  # whose state the recordings point to, but for that of batches
        self._spare: Session | None = self._bound
        self.max_batch = plan.max_batch
        slots = self.max_batch if "batch" in self.recordings else 0
        self._slots: list[Session | None] = [self._bound] * slots  # whose state a batch's point to
        self._bind_slots(())

    @classmethod
    def open(cls, path: Path | str, *, threads: int | None = None, device: Mode | None = None) -> Engine:
        """Load the artifact at `path` on the device that it was compiled for.

        `threads` are those of the CPU (default: one per physical core). With device="emulate", the CPU runs a
        GPU's kernels, which shows whether they are right and not how fast; with "eager", the GPU launches
        kernel by kernel instead of replaying a graph.
        """
        return cls(path, threads=threads, device=device)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads. Sessions cannot be used afterwards."""
        self.device.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; a ZllmcError where the model has none and takes token ids only."""
        if self._tokenizer is None:
            raise ZllmcError(f"{self.manifest.name} has no tokenizer: give token ids instead of text.")
        return self._tokenizer

    def session(self) -> Session:
        """A new empty session with its own KV memory, taken from the system as it fills."""
        if self._spare is not None:
            session, self._spare = self._spare, None
            return session
        return Session(self, self._new_states())

    def generate(self, prompt: Any, **options: Any) -> Iterator[Any]:
        """Generated chunks for a prompt string, messages, or token ids; see `zllmc.runtime.generation`."""
        from zllmc.runtime.generation import generate

        return generate(self, prompt, **options)

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits after every token of `ids` (n, vocab), from an empty session."""
        session = self.session()
        self._check(session, ids)
        step = min(self._entries["prefill"].max_rows, self._entries["prefill"].max_tokens)
        parts = []
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            self._run(session, self._entries["prefill"], part, first_row=0)
            parts.append(self._logits(len(part)).copy())
        return np.concatenate(parts) if parts else np.zeros((0, self.manifest.vocab), np.float32)

    def advance(self, session: Session, ids: Sequence[int]) -> Logits:
        """Append `ids` to the session's state; the last one's logits. Called by Session."""
        self._check(session, ids)
        prefill = self._entries["prefill"]
        for start in range(0, len(ids), prefill.max_tokens):
            part = ids[start : start + prefill.max_tokens]
            entry = self._entries["decode"] if len(part) == 1 else prefill
            self._run(session, entry, part, first_row=len(part) - 1)
        return self.last_logits()

    def last_logits(self) -> Logits:
        """The first row of logits (vocab,) of the last pass. Called by Session."""
        logits: Logits = self._logits(1)[0]
        return logits

    def advance_largest(self, session: Session, id: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Append one token; ids and values of the largest logits. Called by Session."""
        self._check(session, (id,))
        self._run(session, self._entries["decode"], (id,), first_row=0, largest=True)
        read, shape = self._read, (self.candidates,)
        return read("candidate_ids", np.int32, shape), read("candidates", np.float32, shape)

    def start_rounds(self, rounds: GreedyRounds, session: Session, id: int) -> None:
        """Have rounds begin with `id` after the session's tokens, which stay as they are. `go_on` runs them,
        until another pass settles the `rounds`. Called by GreedyRounds."""
        self._check(session, (id,))
        self._prepare(session, (id,), first_row=0)
        session.forget_ahead()
        self._rounds = rounds

    def goes_on(self, rounds: GreedyRounds) -> bool:
        """Whether the next round would be one of these."""
        return self._rounds is rounds

    def go_on(self, count: int) -> Callable[[], NDArray[np.int32]]:
        """Begin `count` rounds; what waits for them and gives the tokens chosen (CHOSEN,), each at its
        round's position modulo CHOSEN. So many may be begun and not read. Called by GreedyRounds."""
        for _ in range(count):
            self.recordings["decode"].replay()
        buffer = self._buffers[self._numbers["chosen"]]
        tokens: Callable[[], NDArray[np.int32]] = self.device.read_later(buffer, np.int32, (CHOSEN,))
        return tokens

    def look_ahead(self, session: Session, ids: Sequence[int]) -> Logits:
        """Append `ids` in one pass; the logits after each (len(ids), vocab). Called by Session."""
        prefill = self._entries["prefill"]
        if not 0 < len(ids) <= prefill.max_rows:
            raise ValueError(f"{len(ids)} tokens to verify; one pass takes 1 to {prefill.max_rows}")
        self._check(session, ids)
        self._run(session, prefill, ids, first_row=0)
        return self._logits(len(ids))

    def decode_batch(self, sessions: Sequence[Session], ids: Sequence[int]) -> Logits:
        """Append ids[i] to sessions[i], for all in one pass; their logits (len(ids), vocab), valid until the
        next pass. The pass reads the weights once, however many sequences take part. Each has the logits that
        it has alone: to the bit where the matrices are quantized, else but for rounding.

        ValueError for more than `max_batch` sessions, none, one of another engine or the same one twice. When
        anything is refused, nothing was appended.
        """
        count = len(sessions)
        if not 1 <= count <= self.max_batch:
            raise ValueError(f"{count} sessions in a batch; this artifact takes 1 to {self.max_batch}")
        if len(ids) != count:
            raise ValueError(f"{len(ids)} tokens for {count} sessions")
        if len({id(session) for session in sessions}) != count:
            raise ValueError("a session is in the batch twice")
        if any(session._engine is not self for session in sessions):
            raise ValueError("a session in the batch belongs to another engine")
        for session, token in zip(sessions, ids, strict=True):
            self._check(session, (token,))
        if count == 1:
            self._bind_slots(())
            self._run(sessions[0], self._entries["decode"], ids, first_row=0)
            return self._logits(1)

        self._bind_slots(sessions)
        cached = [len(session.tokens) for session in sessions]
        self._set_control(0, count, 0, 0)
        for slot, length in enumerate(cached):
            self._set_control(1 + slot, 1, length, 0)
        self.recordings["batch"].limit(count)
        self._write(ids, cached)
        self.recordings["batch"].replay(count)
        for session, token in zip(sessions, ids, strict=True):
            session.tokens.append(int(token))
            session.forget_ahead()
        return self._logits(count)

    def _check(self, session: Session, ids: Sequence[int]) -> None:
        """Refuse ids that cannot all be appended, before a pass appends the first of them."""
        if len(session.tokens) + len(ids) > self.context:
            raise ContextFull(
                f"{len(session.tokens)} tokens are cached and {len(ids)} more do not fit the context of "
                f"{self.context}: shorten the conversation, or compile with a larger --context."
            )
        vocab = self.manifest.vocab
        for id in ids:
            if not 0 <= id < vocab:
                raise ZllmcError(f"token id {id} is outside the vocabulary of {vocab}.")

    def _run(
        self,
        session: Session,
        entry: EntryPoint,
        ids: Sequence[int],
        *,
        first_row: int,
        largest: bool = False,
    ) -> None:
        self._prepare(session, ids, first_row=first_row, largest=largest)
        self.recordings[entry.name].replay(len(ids))
        session.tokens.extend(int(i) for i in ids)
        session.forget_ahead()

    def _prepare(
        self, session: Session, ids: Sequence[int], *, first_row: int, largest: bool = False
    ) -> None:
        """Write what a pass over `ids` after the session's tokens reads."""
        count, cached = len(ids), len(session.tokens)
        if session is not self._bound:
            for recording in self.recordings.values():
                for number, memory in session.states.items():
                    recording.rebind(number, memory)
            self._bound = session
        self._set_control(0, count, cached, first_row, largest)
        self._write(ids, range(cached, cached + count))

    def _bind_slots(self, sessions: Sequence[Session]) -> None:
        """Point each slot to its session's state. One without a session lets go of the last one's memory."""
        for slot, bound in enumerate(self._slots):
            session = sessions[slot] if slot < len(sessions) else None
            if session is not bound:
                for number in self._state_numbers:
                    memory = session.states[number] if session else None
                    self.recordings["batch"].rebind(number, memory, slot)
                self._slots[slot] = session

    def _set_control(
        self, block: int, tokens: int, cached: int, first_row: int, largest: bool = False
    ) -> None:
        words = CONTROL_TOKENS, CONTROL_CACHED, CONTROL_FIRST_ROW, CONTROL_BEST
        self._control[block, words] = tokens, cached, first_row, not largest

    def _write(self, ids: Sequence[int], positions: Sequence[int]) -> None:
        """Write tokens, positions and control for the next pass. Rounds that the device goes on with end."""
        if self._rounds is not None:
            rounds, self._rounds = self._rounds, None
            rounds.settle()
        for name, words in (("tokens", ids), ("positions", positions), ("control", self._control)):
            self.device.write(self._buffers[self._numbers[name]], np.asarray(words, np.int32))

    def _logits(self, rows: int) -> Logits:
        """The first rows of logits (rows, vocab) of the last pass."""
        padded: Logits = self._read("logits", np.float32, (rows, self._logits_stride))
        return padded[:, : self.manifest.vocab]

    def _read(self, buffer: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        values: NDArray[Any] = self.device.read(self._buffers[self._numbers[buffer]], dtype, shape)
        return values

    def _new_states(self) -> dict[int, Any]:
        return {i: self.device.allocate(self._plan.buffers[i].bytes) for i in self._state_numbers}
