"""The native executor: replays a whole recording on all threads in one call.

It is LLVM IR text that TVM's LLVM turns into an object: no C compiler is needed and one text serves every
Linux CPU. (`pragma_import_llvm` would not do: it only keeps functions that inline into a TIR function.)
The runtime (`runtime/cpu.py`) lays out the two structures below in its own memory and enters `executor_run`,
`executor_worker` and `executor_stop`. `executor_layout` returns LAYOUT, for the runtime to compare.

Pool (one per device). All of a barrier lies in one cache line: the last thread to arrive owns it already when
it lets the others go. What is written at other times lies at least a line pair away.

    0    i32 epoch          one step per pass; workers wait for it to change
    4    i32 stop           workers leave at the next epoch
    8    ptr recording      what the current epoch runs
    16   i32 threads        including the calling thread, which is thread 0
    20   i32 idle spins     rounds a worker waits actively for the next pass before it sleeps
    24   i32 barrier spins  the same between launches
    128  i32 generation     one step per barrier
    132  i32 arrived        threads at the current barrier
    136  i32 sleepers       threads asleep on generation
    256  i32 failed         number of the launch that failed, or -1
    264  ptr error          the raised TVM FFI error of that launch, or null
    272  i32 idle sleepers  threads asleep on epoch

Recording:

    0   i64 launches
    8   ptr launch table    32 bytes each: ptr function object, i32 first argument, i32 arguments,
                            i32 barrier after it, i32 pieces, i32 pieces taken, i32 unused
    16  ptr arguments       TVMFFIAny (16 bytes) each, one row per thread because the thread's number is in it
    24  i64 row bytes
    32  ptr timestamps      null, or launches + 1 nanosecond stamps that thread 0 writes around each launch

A launch without pieces is called once by each thread, with its number. One that has pieces is called once for
each of them: a thread takes the next one that is left, so that a slow or interrupted thread takes fewer.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tvm
from tvm.target import Target

LAYOUT = 2

# Waiting is one routine: spin on a word until it changes, then sleep on it (futex). A waiter counts itself as
# a sleeper before it looks at the word for the last time, and whoever changes the word looks at the count
# afterwards (both sequentially consistent), so either one sees the other and no wake-up is lost.
#
# The barrier counts arrivals; the last thread resets the count and steps the generation. A pass always ends
# with a barrier after which a worker touches nothing of that pass: the next one may have begun by then. For
# the same reason a failure is acted on only behind a barrier, where all threads agree on `failed <= launch`:
# a thread that fails skips to its next barrier, and all leave together through the last one.
_IR = """
!llvm.module.flags = !{{!0}}
!0 = !{{i32 2, !"tvm_target", !"{target}"}}

declare void @{pause}({pause_type})
declare i64 @syscall(i64, ...)
declare i32 @clock_gettime(i32, ptr)
declare void @TVMFFIErrorMoveFromRaised(ptr)
declare void @TVMFFIErrorSetRaised(ptr)
declare i32 @TVMFFIObjectDecRef(ptr)

define i32 @__tvm_ffi_executor_layout(ptr %self, ptr %given, i32 %count, ptr %result) {{
  store i64 1, ptr %result
  %value = getelementptr i8, ptr %result, i64 8
  store i64 {layout}, ptr %value
  ret i32 0
}}

define internal void @wait_for_change(ptr %word, i32 %old, i32 %spins, ptr %sleepers) {{
entry:
  br label %spin
spin:
  %round = phi i32 [ 0, %entry ], [ %next, %unchanged ]
  %value = load atomic i32, ptr %word acquire, align 4
  %changed = icmp ne i32 %value, %old
  br i1 %changed, label %done, label %unchanged
unchanged:
  call void @{pause}({pause_argument})
  %next = add i32 %round, 1
  %tired = icmp uge i32 %next, %spins
  br i1 %tired, label %sleep, label %spin
sleep:
  %0 = atomicrmw add ptr %sleepers, i32 1 seq_cst
  br label %look
look:
  %last = load atomic i32, ptr %word seq_cst, align 4
  %woken = icmp ne i32 %last, %old
  br i1 %woken, label %wake, label %block
block:
  %old.wide = sext i32 %old to i64
  %1 = call i64 (i64, ...) @syscall(i64 {futex}, ptr %word, i64 128, i64 %old.wide, ptr null)
  br label %look
wake:
  %2 = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %done
done:
  ret void
}}

define internal void @change(ptr %word, i32 %value, ptr %sleepers) {{
  store atomic i32 %value, ptr %word seq_cst, align 4
  %asleep = load atomic i32, ptr %sleepers seq_cst, align 4
  %nobody = icmp eq i32 %asleep, 0
  br i1 %nobody, label %done, label %wake
wake:
  %1 = call i64 (i64, ...) @syscall(i64 {futex}, ptr %word, i64 129, i64 2147483647)
  br label %done
done:
  ret void
}}

define internal void @barrier(ptr %pool, i32 %threads) {{
  %alone = icmp eq i32 %threads, 1
  br i1 %alone, label %done, label %meet
meet:
  %generation = getelementptr i8, ptr %pool, i64 128
  %arrived = getelementptr i8, ptr %pool, i64 132
  %sleepers = getelementptr i8, ptr %pool, i64 136
  %now = load atomic i32, ptr %generation monotonic, align 4
  %before = atomicrmw add ptr %arrived, i32 1 acq_rel
  %count = add i32 %before, 1
  %last = icmp eq i32 %count, %threads
  br i1 %last, label %open, label %wait
open:
  store atomic i32 0, ptr %arrived monotonic, align 4
  %next = add i32 %now, 1
  call void @change(ptr %generation, i32 %next, ptr %sleepers)
  br label %done
wait:
  %spins.at = getelementptr i8, ptr %pool, i64 24
  %spins = load i32, ptr %spins.at
  call void @wait_for_change(ptr %generation, i32 %now, i32 %spins, ptr %sleepers)
  br label %done
done:
  ret void
}}

define internal void @stamp(ptr %stamps, i64 %index) {{
  %time = alloca [2 x i64]
  %skip = icmp eq ptr %stamps, null
  br i1 %skip, label %done, label %read
read:
  %1 = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at
  %whole = mul i64 %seconds, 1000000000
  %nanoseconds = add i64 %whole, %rest
  %slot = getelementptr i64, ptr %stamps, i64 %index
  store i64 %nanoseconds, ptr %slot
  br label %done
done:
  ret void
}}

define internal void @fail(ptr %pool, i32 %launch) {{
  %failed = getelementptr i8, ptr %pool, i64 256
  %pair = cmpxchg ptr %failed, i32 -1, i32 %launch acq_rel monotonic
  %first = extractvalue {{ i32, i1 }} %pair, 1
  br i1 %first, label %keep, label %done
keep:
  %error = getelementptr i8, ptr %pool, i64 264
  call void @TVMFFIErrorMoveFromRaised(ptr %error)
  br label %done
done:
  ret void
}}

; All pieces of all launches are there to be taken again. No worker is in a pass.
define internal void @give_back(ptr %recording) {{
entry:
  %launches = load i64, ptr %recording
  %table.at = getelementptr i8, ptr %recording, i64 8
  %table = load ptr, ptr %table.at
  br label %head
head:
  %launch = phi i64 [ 0, %entry ], [ %next, %body ]
  %end = icmp uge i64 %launch, %launches
  br i1 %end, label %done, label %body
body:
  %record = getelementptr [32 x i8], ptr %table, i64 %launch
  %taken.at = getelementptr i8, ptr %record, i64 24
  store i32 0, ptr %taken.at
  %next = add i64 %launch, 1
  br label %head
done:
  ret void
}}

define internal void @share(ptr %pool, ptr %recording, i32 %thread, i32 %threads) {{
entry:
  %result = alloca [2 x i64]
  %failed.at = getelementptr i8, ptr %pool, i64 256
  %launches = load i64, ptr %recording
  %table.at = getelementptr i8, ptr %recording, i64 8
  %table = load ptr, ptr %table.at
  %arguments.at = getelementptr i8, ptr %recording, i64 16
  %arguments = load ptr, ptr %arguments.at
  %row.bytes.at = getelementptr i8, ptr %recording, i64 24
  %row.bytes = load i64, ptr %row.bytes.at
  %thread.wide = zext i32 %thread to i64
  %row.offset = mul i64 %row.bytes, %thread.wide
  %row = getelementptr i8, ptr %arguments, i64 %row.offset
  %stamps.at = getelementptr i8, ptr %recording, i64 32
  %stamps.given = load ptr, ptr %stamps.at
  %main = icmp eq i32 %thread, 0
  %stamps = select i1 %main, ptr %stamps.given, ptr null
  call void @stamp(ptr %stamps, i64 0)
  br label %head
head:
  %launch = phi i64 [ 0, %entry ], [ %next, %after ]
  %healthy = phi i1 [ true, %entry ], [ %still.healthy, %after ]
  %end = icmp uge i64 %launch, %launches
  br i1 %end, label %finish, label %body
body:
  %record = getelementptr [32 x i8], ptr %table, i64 %launch
  br i1 %healthy, label %run, label %ran
run:
  %function = load ptr, ptr %record
  %first.at = getelementptr i8, ptr %record, i64 8
  %first = load i32, ptr %first.at
  %count.at = getelementptr i8, ptr %record, i64 12
  %count = load i32, ptr %count.at
  %first.wide = zext i32 %first to i64
  %given = getelementptr [16 x i8], ptr %row, i64 %first.wide
  %pieces.at = getelementptr i8, ptr %record, i64 20
  %pieces = load i32, ptr %pieces.at
  %whole = icmp eq i32 %pieces, 0
  br i1 %whole, label %call, label %take
take:
  %taken.at = getelementptr i8, ptr %record, i64 24
  %taken = atomicrmw add ptr %taken.at, i32 1 monotonic
  %more = icmp ult i32 %taken, %pieces
  br i1 %more, label %number, label %ran
number:
  ; The row is this thread's own, so it may write there what the kernel takes for its number.
  %number.at = getelementptr i8, ptr %given, i64 8
  %taken.wide = zext i32 %taken to i64
  store i64 %taken.wide, ptr %number.at
  br label %call
call:
  store [2 x i64] zeroinitializer, ptr %result
  ; A TVM FFI function object is a 24-byte header, then its safe call.
  %safe.call.at = getelementptr i8, ptr %function, i64 24
  %safe.call = load ptr, ptr %safe.call.at
  %code = call i32 %safe.call(ptr %function, ptr %given, i32 %count, ptr %result)
  %good = icmp eq i32 %code, 0
  br i1 %good, label %called, label %bad
called:
  br i1 %whole, label %ran, label %take
bad:
  %launch.word = trunc i64 %launch to i32
  call void @fail(ptr %pool, i32 %launch.word)
  br label %ran
ran:
  %still.healthy = phi i1 [ false, %body ], [ true, %take ], [ true, %called ], [ false, %bad ]
  %next = add i64 %launch, 1
  %last = icmp uge i64 %next, %launches
  br i1 %last, label %finish, label %between
between:
  %barrier.at = getelementptr i8, ptr %record, i64 16
  %barrier = load i32, ptr %barrier.at
  %free = icmp eq i32 %barrier, 0
  br i1 %free, label %after, label %meet
meet:
  call void @barrier(ptr %pool, i32 %threads)
  %failed = load atomic i32, ptr %failed.at monotonic, align 4
  %failed.wide = zext i32 %failed to i64
  %give.up = icmp ule i64 %failed.wide, %launch
  br i1 %give.up, label %finish, label %after
after:
  call void @stamp(ptr %stamps, i64 %next)
  br label %head
finish:
  call void @barrier(ptr %pool, i32 %threads)
  call void @stamp(ptr %stamps, i64 %launches)
  ret void
}}

; executor_run(pool, recording): the number of the failed launch, or -1. Raises that launch's error.
define i32 @__tvm_ffi_executor_run(ptr %self, ptr %given, i32 %count, ptr %result) {{
  %pool.at = getelementptr i8, ptr %given, i64 8
  %pool = load ptr, ptr %pool.at
  %recording.at = getelementptr i8, ptr %given, i64 24
  %recording = load ptr, ptr %recording.at
  %threads.at = getelementptr i8, ptr %pool, i64 16
  %threads = load i32, ptr %threads.at
  %failed.at = getelementptr i8, ptr %pool, i64 256
  store atomic i32 -1, ptr %failed.at monotonic, align 4
  %error.at = getelementptr i8, ptr %pool, i64 264
  store ptr null, ptr %error.at
  call void @give_back(ptr %recording)
  %alone = icmp eq i32 %threads, 1
  br i1 %alone, label %start, label %publish
publish:
  %published.at = getelementptr i8, ptr %pool, i64 8
  store ptr %recording, ptr %published.at
  %idle = getelementptr i8, ptr %pool, i64 272
  %epoch = load atomic i32, ptr %pool monotonic, align 4
  %next = add i32 %epoch, 1
  call void @change(ptr %pool, i32 %next, ptr %idle)
  br label %start
start:
  call void @share(ptr %pool, ptr %recording, i32 0, i32 %threads)
  %failed = load atomic i32, ptr %failed.at monotonic, align 4
  %failed.wide = sext i32 %failed to i64
  store i64 1, ptr %result
  %value = getelementptr i8, ptr %result, i64 8
  store i64 %failed.wide, ptr %value
  %error = load ptr, ptr %error.at
  %quiet = icmp eq ptr %error, null
  br i1 %quiet, label %return, label %raise
raise:
  call void @TVMFFIErrorSetRaised(ptr %error)
  %1 = call i32 @TVMFFIObjectDecRef(ptr %error)
  br label %return
return:
  %code = select i1 %quiet, i32 0, i32 -1
  ret i32 %code
}}

; executor_worker(pool, thread): runs this thread's share of every pass until executor_stop.
define i32 @__tvm_ffi_executor_worker(ptr %self, ptr %given, i32 %count, ptr %result) {{
entry:
  %pool.at = getelementptr i8, ptr %given, i64 8
  %pool = load ptr, ptr %pool.at
  %thread.at = getelementptr i8, ptr %given, i64 24
  %thread = load i32, ptr %thread.at
  %stop.at = getelementptr i8, ptr %pool, i64 4
  %recording.at = getelementptr i8, ptr %pool, i64 8
  %threads.at = getelementptr i8, ptr %pool, i64 16
  %threads = load i32, ptr %threads.at
  %spins.at = getelementptr i8, ptr %pool, i64 20
  %spins = load i32, ptr %spins.at
  %idle = getelementptr i8, ptr %pool, i64 272
  br label %wait
wait:
  %seen = phi i32 [ 0, %entry ], [ %epoch, %run ]
  call void @wait_for_change(ptr %pool, i32 %seen, i32 %spins, ptr %idle)
  %epoch = load atomic i32, ptr %pool acquire, align 4
  %stop = load i32, ptr %stop.at
  %stay = icmp eq i32 %stop, 0
  br i1 %stay, label %run, label %leave
run:
  %recording = load ptr, ptr %recording.at
  call void @share(ptr %pool, ptr %recording, i32 %thread, i32 %threads)
  br label %wait
leave:
  ret i32 0
}}

; executor_stop(pool): no pass may be running.
define i32 @__tvm_ffi_executor_stop(ptr %self, ptr %given, i32 %count, ptr %result) {{
  %pool.at = getelementptr i8, ptr %given, i64 8
  %pool = load ptr, ptr %pool.at
  %stop = getelementptr i8, ptr %pool, i64 4
  store i32 1, ptr %stop
  %idle = getelementptr i8, ptr %pool, i64 272
  %epoch = load atomic i32, ptr %pool monotonic, align 4
  %next = add i32 %epoch, 1
  call void @change(ptr %pool, i32 %next, ptr %idle)
  ret i32 0
}}
"""

# How to wait politely, and the futex system call's number. On aarch64 `yield` is a no-op on most cores; `isb`
# drains the pipeline, which is a pause of the right length.
_ARCHITECTURES = {
    "x86_64": {"pause": "llvm.x86.sse2.pause", "pause_type": "", "pause_argument": "", "futex": 202},
    "aarch64": {"pause": "llvm.aarch64.isb", "pause_type": "i32", "pause_argument": "i32 15", "futex": 98},
}


def executor_object(target: Target) -> bytes:
    """The executor as a relocatable object for `target`, an LLVM target of x86-64 or aarch64 Linux.

    Raises ValueError for any other machine or system.
    """
    triple = str(target.attrs["mtriple"])
    machine = triple.split("-", maxsplit=1)[0]
    if machine not in _ARCHITECTURES or "linux" not in triple:
        raise ValueError(f"the CPU executor knows x86_64 and aarch64 Linux, not {triple}")
    flag = json.dumps({"kind": "llvm", "mtriple": triple}, separators=(",", ":")).replace('"', r"\22")
    with tempfile.TemporaryDirectory(prefix="zllmc-") as folder:
        source, code = Path(folder, "executor.ll"), Path(folder, "executor.o")
        source.write_text(_IR.format(layout=LAYOUT, target=flag, **_ARCHITECTURES[machine]))
        tvm.runtime.load_module(str(source)).write_to_file(str(code), "o")
        return code.read_bytes()
