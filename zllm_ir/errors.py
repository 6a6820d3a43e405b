"""The one error that users are meant to read."""


class ZllmcError(Exception):
    """Something outside zllmc's control is wrong: a file, a flag, a machine.

    The message is one paragraph: what was wrong, where, and what to do. The command line prints it
    without a traceback and leaves with `exit_code`.
    """

    exit_code = 2


class IRError(ZllmcError):
    """A graph, type or text form that breaks a rule of the IR."""
