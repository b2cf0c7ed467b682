"""How the rows of a packed step are shown to the consumer; plain ints, for compiled code."""

from typing import Final

__all__ = ["BATCH_ORDER", "STABLE", "WRITES_ONLY"]

BATCH_ORDER: Final = 0
"""Row i of the table is request i of the batch."""

STABLE: Final = 1
"""Requests keep their rows; the step places them at batch positions."""

WRITES_ONLY: Final = 2
"""Stable rows without a step: the stored table alone is brought up to date."""
