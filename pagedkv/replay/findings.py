"""Findings: how much was verified, and what did not match."""

from typing import Any

import numpy as np

from pagedkv.constants import NULL_BLOCK_ID

__all__ = ["Findings"]

_MAX_EXAMPLES = 10


class Findings:
    """Counts of verified tokens and mismatches, and the first mismatches in words.

    Attributes
    ----------
    num_verified : int
        Positions that were read back and compared.
    num_mismatches : int
        Wrong tags, tokens without exactly their owners, and wrong table entries or step values.
    examples : list of str
        The first mismatches.
    step : int
        Step that is being verified; the engine sets it.
    """

    def __init__(self) -> None:
        self.num_verified = 0
        self.num_mismatches = 0
        self.examples: list[str] = []
        self.step = 0

    def add(self, count: int, example: str) -> None:
        """Count mismatches; keep the example if it is one of the first."""
        self.num_mismatches += count
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(f"step {self.step}, {example}")

    def compare(self, name: str, expected: Any, actual: Any) -> None:
        """Compare one of the step's arrays with what the engine knows."""
        if not np.array_equal(expected, actual):
            same_shape = expected.shape == actual.shape
            count = int((expected != actual).sum()) if same_shape else expected.size
            self.add(count, f"{name}: {count} of {expected.size} values differ from the engine's")

    def expect_null(self, columns: Any, group: int, rank: int, row: int) -> None:
        """Count columns that are not NULL where all should be."""
        count = int(np.count_nonzero(columns != NULL_BLOCK_ID))
        if count:
            self.add(
                count, f"row {row}, group {group}, rank {rank}: {count} columns past the count are not NULL"
            )

    def count_views(self, count: int, group: int, view: int) -> None:
        """Count kernel-view entries that do not follow from the table."""
        if count:
            self.add(
                count, f"group {group}, kernel view {view}: {count} entries do not expand the block table"
            )
