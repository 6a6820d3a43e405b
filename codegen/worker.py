"""A process that builds kernels: pickled jobs on stdin, pickled objects or exceptions on stdout.

`codegen/build.py` starts it and ends it. It ends by itself where stdin does.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback

from zllmc.zllm_ir.errors import ZllmcError


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that is printed may get among the answers

    from zllmc.codegen.build_kernel import build_kernel

    while True:
        try:
            call, target = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: bytes | Exception = build_kernel(call, target)
        except ZllmcError as error:
            answer = error
        except Exception as error:  # TVM's own can't all be pickled
            answer = RuntimeError("".join(traceback.format_exception(error)))
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # nobody waits for it any more
            os._exit(1)


if __name__ == "__main__":
    main()
