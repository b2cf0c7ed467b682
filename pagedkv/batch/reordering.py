"""Orders of a batch: which permutation sorts it by kind and moves only the misplaced, and its swaps."""

from typing import Any

import numpy as np

from pagedkv.batch.advance import class_of
from pagedkv.batch.states import Int64Array
from pagedkv.checks import IntArray
from pagedkv.compiled import compiled

__all__ = ["classes_of", "order_by_class", "swaps_of"]

Array = Any


@compiled
def classes_of(computed: Array, scheduled: Array, decode: int, short_extend: int) -> Array:
    """Class of each request, int64 [n]: see `class_of`."""
    classes = np.empty(computed.size, np.int64)
    for i in range(computed.size):
        classes[i] = class_of(computed[i], scheduled[i], decode, short_extend)
    return classes


def order_by_class(classes: Int64Array) -> Int64Array:
    """Return ``order`` with ``classes[order]`` sorted; who stands in its class's region already stays.

    The others take the places that are left in their regions, in the order in which they stood.
    """
    order = np.arange(classes.size)
    misplaced = np.flatnonzero(classes != np.sort(classes))
    order[misplaced] = misplaced[np.argsort(classes[misplaced], kind="stable")]
    return order


@compiled
def _swaps(order: Array) -> Array:
    n = order.size
    pairs = np.empty((2, n), np.int32)
    holds = np.arange(n)  # who stands at each place now
    place = np.arange(n)  # where each of them stands
    num = 0
    for i in range(n):
        at = place[order[i]]
        if at == i:
            continue
        pairs[0, num], pairs[1, num] = i, at
        other = holds[i]
        holds[i], holds[at] = order[i], other
        place[order[i]], place[other] = i, at
        num += 1
    return pairs[:, :num].copy()


def swaps_of(order: Int64Array) -> tuple[IntArray, IntArray]:
    """Return the fewest swaps of positions, pair by pair, after which place i holds who stood at order[i]."""
    pairs = _swaps(order)
    return pairs[0], pairs[1]
