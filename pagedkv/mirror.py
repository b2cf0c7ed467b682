"""HostMirror: the block tables of all KV-cache groups on the host, and what changed in them.

The mirror is the source of truth. It has one writer (a user's row operations, or the KV-cache manager)
and any number of committing tables; each of these subscribes and finds in its own dirty ranges what it
has not sent yet.

For compiled code that writes the mirror itself, the state is five arrays (`HostMirror.state`):

    blocks  int32 [num_elements]             all groups' tables, flat
    layout  int64 [G, 3]                     first element, width and largest block id of each group
    counts  int32 [G, max_num_reqs]          live columns of each row; every column past it is NULL
    ranges  int32 [S, G * max_num_reqs, 4]   per subscriber and row two changed column ranges
                                             (start, end, start, end); end 0 = none
    dirty   int32 [S, 1 + G * max_num_reqs]  how many rows are dirty, then which (group * max_num_reqs + row)

After changing columns [start, end) of a row it calls `mark_dirty`. Two ranges a row are enough for what
tables do: the front (window blocks become NULL) and the tail (blocks are appended); further ones are
joined to the nearer, so a range may hold unchanged columns but never misses a changed one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv._rowops import (
    Fault,
    clear_rows,
    find_fault,
    mark_dirty,
    move_rows,
    null_columns,
    set_blocks,
    swap_rows,
    write_rows_at,
)
from pagedkv.addresses import address_table
from pagedkv.checks import IntArray, as_int32, check_int, check_shape
from pagedkv.compiled import seal
from pagedkv.constants import MAX_INT32
from pagedkv.errors import CapacityError

__all__ = ["HostMirror", "MirrorState", "mark_dirty"]

_NOTHING = np.empty(0, np.int32)
_INT32 = _NOTHING.dtype
_ALIGNMENT = 64  # elements; every group's table starts on 256 bytes, on the host as on the device


class MirrorState(NamedTuple):
    """The arrays that compiled code takes, in the order in which it takes them."""

    blocks: IntArray
    layout: npt.NDArray[np.int64]
    counts: IntArray
    ranges: IntArray
    dirty: IntArray


class HostMirror:
    """Block tables of all groups on the host, int32, with the changes that were not sent yet.

    Parameters
    ----------
    max_num_reqs : int
        Rows of each table.
    widths : sequence of int
        Columns of each group's table.
    max_block_ids : sequence of int, optional
        Largest block id that each group takes; int32's largest by default.
    """

    state: MirrorState
    """The arrays for compiled code; take them anew after a table has subscribed."""
    addresses: Any
    """The same as one argument, an address table; take it anew likewise."""

    def __init__(
        self, max_num_reqs: int, widths: Sequence[int], max_block_ids: Sequence[int] | None = None
    ) -> None:
        self.max_num_reqs = check_int("max_num_reqs", max_num_reqs, 1)
        self.widths = tuple(check_int("table width", width) for width in widths)
        limits = [MAX_INT32] * len(self.widths) if max_block_ids is None else list(max_block_ids)
        sizes = [-(-max_num_reqs * width // _ALIGNMENT) * _ALIGNMENT for width in self.widths]
        self.offsets = tuple(int(x) for x in np.cumsum([0, *sizes]))
        if len(self.widths) * max_num_reqs > MAX_INT32:
            raise CapacityError(
                f"groups x max_num_reqs must fit int32, got {len(self.widths)} x {max_num_reqs} "
                "(use fewer rows)"
            )
        self.blocks = _aligned_zeros(self.offsets[-1])
        if len(limits) != len(self.widths):
            raise ValueError(
                f"max_block_ids must hold one limit for each of {len(self.widths)} groups, got {len(limits)}"
            )
        self.layout = np.array(list(zip(self.offsets, self.widths, limits, strict=False)), np.int64).reshape(
            -1, 3
        )
        self.counts = np.zeros((len(self.widths), max_num_reqs), np.int32)
        self.owner: str | None = None
        self.batch: Any = None  # weak reference to the InputBatch of its tables: one at a time
        self.block_sizes: tuple[int, ...] | None = None
        self.largest_block_id = 0
        self._left: list[int] = []
        self._resize_subscribers(0)
        seal(write_rows_at, self.addresses, _NOTHING, _NOTHING.reshape(0, 0), _NOTHING, False)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: the addresses that compiled code works on would not be."""
        raise TypeError("HostMirror must not be copied or pickled (build a new one, and add its rows)")

    @property
    def num_groups(self) -> int:
        """Number of KV-cache groups."""
        return len(self.widths)

    def block_table(self, group: int = 0) -> IntArray:
        """Read-only view of one group's table, int32 [max_num_reqs, width]."""
        flat = self.blocks[self.offsets[group] : self.offsets[group] + self.max_num_reqs * self.widths[group]]
        return _read_only(flat.reshape(self.max_num_reqs, self.widths[group]))

    def num_blocks(self, group: int = 0) -> IntArray:
        """Read-only view of one group's row counts, int32 [max_num_reqs], in blocks."""
        return _read_only(self.counts[group])

    def claim(self, owner: str, block_sizes: Sequence[int], largest_block_id: int = 0) -> None:
        """Say who writes this mirror, in which block sizes and ids: tables then leave its rows alone."""
        self.owner, self.block_sizes = owner, tuple(block_sizes)
        self.largest_block_id = largest_block_id

    def limit_block_ids(self, limits: Sequence[int]) -> None:
        """Take no larger block ids from now on, group by group: a committing table cannot use them.

        Raises
        ------
        ValueError
            A group holds a larger id already, or its owner hands larger ones out; nothing was changed.
        """
        for group, limit in enumerate(limits):
            if limit < self.largest_block_id:
                raise ValueError(
                    f"block ids of group {group} must lie in [0, {limit}] for this table, "
                    f"got ids up to {self.largest_block_id} from {self.owner} (give it fewer blocks)"
                )
            if limit < self.layout[group, 2]:
                largest = int(self.block_table(group).max(initial=0))
                if largest > limit:
                    raise ValueError(
                        f"block ids of group {group} must lie in [0, {limit}] for this table, "
                        f"got {largest} in the mirror"
                    )
        self.layout[:, 2] = np.minimum(self.layout[:, 2], limits)

    def subscribe(self) -> int:
        """Add a committing table; returns its place in `ranges` and `dirty`. Live rows start dirty."""
        if self._left:  # places of tables that are gone
            subscriber = self._left.pop()
            self.state.ranges[subscriber], self.state.dirty[subscriber] = 0, 0
        else:
            subscriber = len(self.state.ranges)
            self._resize_subscribers(subscriber + 1)
        last = subscriber + 1
        ranges, dirty = self.state.ranges[subscriber:last], self.state.dirty[subscriber:last]
        for group, row in zip(*np.nonzero(self.counts), strict=True):
            target = int(group) * self.max_num_reqs + int(row)
            mark_dirty(ranges, dirty, target, 0, int(self.counts[group, row]))
        return subscriber

    def unsubscribe(self, subscriber: int) -> None:
        """Give a committing table's place to the next one that subscribes."""
        self._left.append(subscriber)

    def add_rows(self, rows: Any, counts: Any, block_ids: Any) -> None:
        """Replace rows. Arguments and errors as `append_rows`; a repeated row keeps its last content."""
        self._write(rows, counts, block_ids, True)

    def append_rows(self, rows: Any, counts: Any, block_ids: Any) -> None:
        """Append blocks to rows, all groups in one call.

        Parameters
        ----------
        rows : array_like of int32, shape [n]
            Rows, each in [0, max_num_reqs); repeats are taken in order.
        counts : array_like of int32, shape [G, n], or [n] for a single group
            Blocks for each row, in blocks; -1 leaves the group's row as it is.
        block_ids : array_like of int32, shape [sum of counts]
            Block ids, group by group, and row by row within a group.

        Raises
        ------
        CapacityError
            A row would exceed its width.
        ValueError, TypeError
            A row, count or id is out of range or of the wrong type, or their numbers do not match.
        """
        self._write(rows, counts, block_ids, False)

    def clear_rows(self, rows: Any, group: int | None = None) -> None:
        """Empty rows in all groups, or in one; every column becomes NULL."""
        clear_rows(*self.state, self._groups(group), self._rows("rows", rows), _NOTHING)

    def move_rows(self, srcs: Any, tgts: Any, group: int | None = None) -> None:
        """Move each row of `srcs` onto its row of `tgts`, pair by pair; the source becomes empty.

        A row moved onto itself stays as it is.
        """
        sources, targets = self._rows("srcs", srcs), self._rows("tgts", tgts)
        check_shape("tgts", targets, sources.shape, "[len(srcs)]")
        move_rows(*self.state, self._groups(group), sources, targets)

    def swap_rows(self, a_rows: Any, b_rows: Any, group: int | None = None) -> None:
        """Exchange rows pair by pair, in order, in all groups or in one."""
        first, second = self._rows("rows a", a_rows), self._rows("rows b", b_rows)
        check_shape("rows b", second, first.shape, "[len(rows a)]")
        swap_rows(*self.state, self._groups(group), first, second)

    def null_columns(self, rows: Any, starts: Any, ends: Any, group: int = 0) -> None:
        """Set columns [start, end) of rows to NULL; the counts stay (blocks fallen out of a window).

        Raises
        ------
        ValueError
            A range does not lie within its row's live columns.
        """
        group = check_int("group", group, 0, self.num_groups - 1)
        lines, low = self._rows("rows", rows), as_int32("starts", starts)
        high = as_int32("ends", ends)
        check_shape("starts", low, lines.shape, "[len(rows)]")
        check_shape("ends", high, lines.shape, "[len(rows)]")
        self._raise(null_columns(*self.state, group, lines, low, high), lines)

    def set_blocks(self, rows: Any, columns: Any, block_ids: Any, group: int = 0) -> None:
        """Replace single live entries: block_table[row, column] = block_id (copy-on-write).

        Raises
        ------
        ValueError
            A column is not live, or an id is out of range.
        """
        group = check_int("group", group, 0, self.num_groups - 1)
        lines, where = self._rows("rows", rows), as_int32("columns", columns)
        ids = as_int32("block_ids", block_ids, 0, int(self.layout[group, 2]))
        check_shape("columns", where, lines.shape, "[len(rows)]")
        check_shape("block_ids", ids, lines.shape, "[len(rows)]")
        self._raise(set_blocks(*self.state, group, lines, where, ids), lines)

    def truncate_rows(self, rows: Any, counts: Any, group: int = 0) -> None:
        """Shorten rows of one group to `counts` blocks; a row that is shorter already stays."""
        group = check_int("group", group, 0, self.num_groups - 1)
        lines, lengths = self._rows("rows", rows), as_int32("counts", counts)
        check_shape("counts", lengths, lines.shape, "[len(rows)]")
        clear_rows(*self.state, (group, group + 1), lines, lengths)

    def clear(self) -> None:
        """Empty every row of every group."""
        self.clear_rows(np.arange(self.max_num_reqs, dtype=np.int32))

    def _write(self, rows: Any, counts: Any, block_ids: Any, replace: bool) -> None:
        # The sealed function takes ready int32 arrays; anything else is converted, with its own errors.
        # Lists are not even tried: composing the compiler's refusal takes longer than converting them.
        done = None
        if type(rows) is type(counts) is type(block_ids) is np.ndarray and block_ids.dtype is _INT32:
            try:  # noqa: SIM105 - the hot path
                done = write_rows_at(self.addresses, rows, counts, block_ids, replace)
            except (TypeError, ValueError, AttributeError, IndexError):
                pass
        if done is None:
            rows, block_ids = _ready("rows", rows), _ready("block_ids", block_ids)
            counts = _lengths(counts, self.num_groups, rows.size)
            done = write_rows_at(self.addresses, rows, counts, block_ids, replace)
        if not done:
            found = find_fault(self.layout, self.counts, rows, counts, block_ids, replace)
            self._raise(found, rows)

    def _groups(self, group: int | None) -> tuple[int, int]:
        if group is None:
            return 0, self.num_groups
        first = check_int("group", group, 0, self.num_groups - 1)
        return first, first + 1

    def _rows(self, name: str, rows: Any) -> IntArray:
        return as_int32(name, rows, 0, self.max_num_reqs - 1)

    def _raise(self, fault: tuple[int, int, int, int], rows: IntArray) -> None:
        code, group, index, value = fault
        if code == Fault.NONE:
            return
        if code == Fault.ROW:
            raise ValueError(f"rows must lie in [0, {self.max_num_reqs - 1}], got {value} at place {index}")
        if code == Fault.SHAPE:
            raise ValueError(
                f"counts must have shape [num_groups, len(rows)] = [{self.num_groups}, {rows.size}], "
                f"got [{index}, {value}]"
            )
        if code == Fault.TOTAL:
            raise ValueError(f"block_ids must hold sum(counts) = {value} ids, got {index}")
        width, limit = (int(x) for x in self.layout[group, 1:])
        where = f"row {rows[index]} of group {group}"
        match code:
            case Fault.COUNT:
                message = f"counts must be at least -1, got {value} for {where}"
            case Fault.BLOCK_ID:
                message = f"block_ids must lie in [0, {limit}], got {value} for {where}"
            case Fault.RANGE:
                live = self.counts[group, rows[index]]
                message = f"columns must lie within the {live} live columns of {where}, got {value}"
            case _:
                raise CapacityError(
                    f"{where} must hold at most {width} blocks, got {value} "
                    "(raise max_model_len or max_num_blocks_per_req, or clear the row)"
                )
        raise ValueError(message)

    def _resize_subscribers(self, num: int) -> None:
        targets = self.num_groups * self.max_num_reqs
        ranges, dirty = np.zeros((num, targets, 4), np.int32), np.zeros((num, 1 + targets), np.int32)
        if num:
            ranges[: num - 1], dirty[: num - 1] = self.state.ranges, self.state.dirty
        self.state = MirrorState(self.blocks, self.layout, self.counts, ranges, dirty)
        self.addresses = address_table(*self.state)


def _aligned_zeros(num: int) -> IntArray:
    raw = np.zeros(num + _ALIGNMENT, np.int32)
    skip = -raw.ctypes.data // 4 % _ALIGNMENT  # JAX takes host arrays without a copy at 64 bytes only
    return raw[skip : skip + num]


def _read_only(array: IntArray) -> IntArray:
    view = array.view()
    view.flags.writeable = False
    return view


def _ready(name: str, values: Any) -> IntArray:
    # Compiled code checks the values; it takes only int32 arrays that are contiguous and writeable.
    array = as_int32(name, values, -MAX_INT32 - 1)
    return array if array.flags.writeable else array.copy()


def _lengths(counts: Any, num_groups: int, num_rows: int) -> IntArray:
    array = np.asarray(counts, dtype=None if np.size(counts) else np.int32)
    if array.ndim == 1 and num_groups == 1:
        array = array.reshape(1, -1)
    check_shape("counts", array, (num_groups, num_rows), "[num_groups, len(rows)]")
    return _ready("counts", array.ravel()).reshape(num_groups, num_rows)
