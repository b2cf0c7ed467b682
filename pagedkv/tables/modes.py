"""How the rows of a packed step are shown to the consumer; plain ints, for compiled code."""

from typing import Final

__all__ = ["BATCH_ORDER", "BATCH_ORDER_WRITES", "STABLE", "STABLE_WRITES"]

BATCH_ORDER: Final = 0
"""Row i of the table is request i of the batch."""

STABLE: Final = 1
"""Requests keep their rows; the step places them at batch positions."""

STABLE_WRITES: Final = 2
"""Stable rows without a step: the stored table alone is brought up to date."""

BATCH_ORDER_WRITES: Final = 3
"""Rows in batch order without a step: what the last step padded is left for the next to know."""
