"""Tally: what happened to the requests over a run."""

from dataclasses import dataclass

__all__ = ["Tally"]


@dataclass
class Tally:
    """Counts over a run; tokens where nothing else is said.

    Attributes
    ----------
    num_rejected, num_completed : int
        Requests that could never fit, and those that ran to their end.
    num_scheduled_tokens : int
        Tokens computed, recomputed ones counted again.
    """

    num_rejected: int = 0
    num_completed: int = 0
    num_scheduled_tokens: int = 0
