"""Errors that a user sees."""


class ZllmcError(Exception):
    """An error for the user: one paragraph that says what was wrong, where, and what to do."""

    exit_code = 2


class IRError(ZllmcError):
    """A graph, type or text form that breaks a rule of the IR."""
