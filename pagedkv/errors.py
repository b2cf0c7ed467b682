"""The errors that pagedkv raises, each also the builtin that a caller would expect.

A message says what was broken, the limit, what came, and what to do; when one is raised, nothing
has been changed.
"""

__all__ = [
    "BackendUnavailableError",
    "CapacityError",
    "DoubleFreeError",
    "InvalidBlockError",
    "OutOfBlocksError",
    "PagedKVError",
    "StaleSequenceError",
]


class PagedKVError(Exception):
    """Base of every error that pagedkv defines itself."""


class CapacityError(PagedKVError, ValueError):
    """A row, batch or buffer would exceed a limit that was fixed at construction."""


class BackendUnavailableError(PagedKVError, LookupError):
    """A backend was asked for that cannot run here; the message says what is missing."""


class OutOfBlocksError(PagedKVError, RuntimeError):
    """The pool has fewer free blocks than one call needs; a normal result under load.

    Parameters
    ----------
    needed : int
        Blocks that the call needs.
    free : int
        Blocks that are free.
    index : int, optional
        Place in the batch of the first sequence that does not fit; `needed` is for all up to it.
    total : int, optional
        Blocks that the pool has for use, free or not.
    num_copies : int
        Block copies that are not done: both blocks of each stay until they are.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        index: int | None = None,
        total: int | None = None,
        num_copies: int = 0,
    ) -> None:
        at = "" if index is None else f" at sequence {index} of the batch"
        others = " up to and including it" if index else ""
        remedy = "free or preempt a sequence, or enlarge the pool"
        if total is not None and needed > total:
            remedy = f"the pool has {total} in all: enlarge it" + (", or split the batch" if index else "")
        if num_copies:
            remedy += f"; pairs of take_block_copies that pin blocks until copies_done: {num_copies}"
        super().__init__(f"out of blocks{at}: needed {needed}{others}, got {free} free ({remedy})")
        self.needed = needed
        self.free = free
        self.index = index


class InvalidBlockError(PagedKVError, ValueError):
    """A block id is not one that this pool hands out."""


class DoubleFreeError(PagedKVError, ValueError):
    """A block or logical block is freed more often than it is held."""


class StaleSequenceError(PagedKVError, ValueError):
    """A handle names a sequence that was freed."""
