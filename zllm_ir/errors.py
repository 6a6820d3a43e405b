"""The one error that users are meant to read."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ZllmcError(Exception):
    """Something outside zllmc's control is wrong: a file, a flag, a machine.

    The message is one paragraph: what was wrong, where, and what to do. The command line prints it
    without a traceback and leaves with `exit_code`.
    """

    exit_code = 2


@contextmanager
def room_to_write(path: Path) -> Iterator[None]:
    """Inside, the errors of a full disk, which name no file, become a ZllmcError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ZllmcError(
            f"{path} cannot be written: {error.strerror}. Free some space, or choose another place: with -o "
            "of `zllmc compile`, and with $ZLLMC_CACHE for the models and kernels that are kept."
        ) from error


class IRError(ZllmcError):
    """A graph, type or text form that breaks a rule of the IR."""
