"""The errors of the replay's input: each names the place, what was expected and what came."""

from pagedkv.errors import PagedKVError

__all__ = ["ReplayInputError", "TraceLineError"]


class ReplayInputError(PagedKVError, ValueError):
    """A trace, an option or an output file cannot be used; the command ends with status 2."""


class TraceLineError(PagedKVError, ValueError):
    """One line of a trace is no request; whoever knows file and line number adds them.

    Parameters
    ----------
    expected : str
        What the line should have held.
    got : object
        What it held; long values are cut.
    """

    def __init__(self, expected: str, got: object) -> None:
        text = got if isinstance(got, str) else repr(got)
        super().__init__(f"expected {expected}, got {text if len(text) <= 80 else text[:77] + '...'}")
