"""What happens to rows in a step, handed from the scheduler to memory and tables."""

from dataclasses import dataclass

from pagedkv.replay.requests import Int64Array

__all__ = ["NulledColumns", "SharedPrefix"]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Leading `tokens` that row `row` takes over from the sequence in `holder_row`; 0 tokens: none."""

    row: int
    holder_row: int
    tokens: int


@dataclass(frozen=True, slots=True)
class NulledColumns:
    """Columns [starts, ends) of `rows` that fell out of one group's window."""

    group: int
    rows: Int64Array
    starts: Int64Array
    ends: Int64Array
