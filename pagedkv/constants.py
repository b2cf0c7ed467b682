"""The sentinels and dtypes that every room of the library shares."""

from typing import Final

import numpy as np

__all__ = ["MAX_INT32", "NULL_BLOCK_ID", "PAD_SLOT_ID"]

PAD_SLOT_ID: Final = -1
"""Slot of a token that is not written: padding, a dummy row, or a position that this rank does not own."""

NULL_BLOCK_ID: Final = 0
"""Physical block that is never handed out; the content of every table column past a row's count."""

MAX_INT32: Final = int(np.iinfo(np.int32).max)
"""Largest block id, row index and prefix sum (all of them are int32)."""
