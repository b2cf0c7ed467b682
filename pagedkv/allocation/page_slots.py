"""Slots for stacks that keep one slot per token and a list of free pages, as plain functions.

A page is a block. With c = ceil(prefix / page_size) pages held by a request and p a new position:

    p // page_size < c    last_loc + 1 + (p - prefix)                            in the page that is begun
    otherwise             free_pages[s + p // page_size - c] * page_size + p % page_size

where s counts the new pages of the requests before it. `alloc_decode` is the same for one token each.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.checks import as_ready, check_int, check_shape
from pagedkv.compiled import compiled
from pagedkv.errors import OutOfBlocksError

__all__ = ["alloc_decode", "alloc_extend"]

Int64Array = npt.NDArray[np.int64]


@compiled
def _extend(
    prefix_lens: Int64Array, seq_lens: Int64Array, last_loc: Int64Array, free_pages: Int64Array, size: int
) -> tuple[int, int, int, Int64Array]:
    """(request at fault or -1, pages needed, slots, slots by position); no slot is written on a fault."""
    pages = total = 0
    slots = np.empty(0, np.int64)
    for i in range(prefix_lens.size):
        first, end = prefix_lens[i], seq_lens[i]
        if first < 0 or end < first or (last_loc[i] + 1) % size != first % size:
            return i, -1, 0, slots
        pages += (end + size - 1) // size - (first + size - 1) // size
        total += end - first
        if pages > free_pages.size:
            return i, pages, 0, slots
    slots = np.empty(total, np.int64)
    used = page = 0
    for i in range(prefix_lens.size):
        first, end = prefix_lens[i], seq_lens[i]
        held = (first + size - 1) // size * size  # positions below it lie in pages that are held
        for p in range(first, min(end, held)):
            slots[used] = last_loc[i] + 1 + p - first
            used += 1
        for p in range(held, end):
            slots[used] = free_pages[page + (p - held) // size] * size + p % size
            used += 1
        page += max(end - held + size - 1, 0) // size
    return -1, pages, total, slots


def alloc_extend(
    prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int
) -> tuple[Int64Array, int]:
    """Give the tokens from `prefix_lens` to `seq_lens` of each request their slots.

    Parameters
    ----------
    prefix_lens : array_like of int, shape [B]
        Tokens of each request that have slots.
    seq_lens : array_like of int, shape [B]
        Tokens that shall have slots, at least as many.
    last_loc : array_like of int, shape [B]
        Slot of the last token that has one, -1 where none has.
    free_pages : array_like of int, shape [F]
        Free pages, taken from the front.
    page_size : int
        Tokens a page.

    Returns
    -------
    slots : ndarray of int64, shape [sum(seq_lens - prefix_lens)]
        Slots of the new tokens, request by request.
    num_pages : int
        Pages taken; the caller drops them from the front of its list.

    Raises
    ------
    OutOfBlocksError
        There are too few pages; `index` is the first request that does not fit.
    ValueError
        A length is below the one before, or `last_loc` does not lie where the prefix ends in its page.

    Examples
    --------
    >>> alloc_extend([0, 5, 8], [6, 7, 13], [-1, 36, 83], [3, 7, 2, 11, 1], page_size=4)
    (array([12, 13, 14, 15, 28, 29, 37, 38,  8,  9, 10, 11, 44]), 4)
    """
    size = check_int("page_size", page_size, low=1)
    prefixes, lengths = _int64("prefix_lens", prefix_lens), _int64("seq_lens", seq_lens)
    last, free = _int64("last_loc", last_loc), _int64("free_pages", free_pages)
    check_shape("seq_lens", lengths, prefixes.shape, "[len(prefix_lens)]")
    check_shape("last_loc", last, prefixes.shape, "[len(prefix_lens)]")
    fault, pages, _, slots = _extend(prefixes, lengths, last, free, size)
    if fault >= 0 and pages < 0:
        raise ValueError(
            f"request {fault} must have 0 <= prefix <= length and a last_loc at the prefix's end in its page "
            f"of {size}, got prefix {prefixes[fault]}, length {lengths[fault]}, last_loc {last[fault]}"
        )
    if fault >= 0:
        raise OutOfBlocksError(int(pages), int(free.size), int(fault))
    return slots, int(pages)


def alloc_decode(seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int) -> tuple[Int64Array, int]:
    """Give one more token of each request its slot; right for pages of one token too.

    Parameters
    ----------
    seq_lens : array_like of int, shape [B]
        Tokens of each request, the new one included.
    last_loc : array_like of int, shape [B]
        Slot of the token before, -1 where there is none.
    free_pages : array_like of int, shape [F]
        Free pages, taken from the front.
    page_size : int
        Tokens a page.

    Returns
    -------
    slots : ndarray of int64, shape [B]
    num_pages : int
        Pages taken.

    Raises
    ------
    OutOfBlocksError, ValueError
        As `alloc_extend`.

    Examples
    --------
    >>> alloc_decode([5, 8, 9], [15, 30, 43], [3, 7], page_size=4)
    (array([12, 31, 28]), 2)
    """
    lengths = _int64("seq_lens", seq_lens)
    return alloc_extend(lengths - 1, lengths, last_loc, free_pages, page_size)


def _int64(name: str, values: Any) -> Int64Array:
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(array.shape)}")
    return as_ready(np.ascontiguousarray(array, np.int64))
