"""BlockTable: the block table of one KV-cache group, with the names the field knows."""

from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.checks import IntArray, as_int32, check_int, check_view
from pagedkv.kernels import _grid as grids
from pagedkv.kernels import definition
from pagedkv.specs import ContextParallel, KVCacheGroupSpec
from pagedkv.tables.committer import Committer
from pagedkv.tables.inputs import device_or_host
from pagedkv.tables.separate import compute_slot_mapping

if TYPE_CHECKING:
    from pagedkv.tables.multi_group import MultiGroupBlockTable

__all__ = ["BlockTable"]

_SINGLE_DEVICE = ContextParallel()


class BlockTable:
    """Block table of one group: row = request, column = logical block, value = physical block.

    Row operations write the host mirror and are seen by the device after the next commit.

    Parameters
    ----------
    block_size : int
        Tokens in a block.
    max_num_reqs : int
        Rows.
    max_num_blocks_per_req : int
        Columns: blocks that a row may hold (of this rank, under context parallel).
    max_num_batched_tokens : int
        Most tokens of one step.
    max_model_len : int, optional
        Positions at or past it map to PAD; what the columns can hold where None.
    kernel_views : tuple
        Attention kernels' block sizes, see `KVCacheGroupSpec`.
    context_parallel : ContextParallel
        World, rank and interleave.
    cp_sharded : bool
        False: every rank holds all tokens.
    slot_mapping : bool
        False: all slots are PAD.
    stable_rows : bool
        True: requests keep their rows; the mapping names them.
    backend : {"auto", "numpy", "numba", "cupy"}
    device : int, optional
        CUDA device number.
    slot_dtype : dtype
        int64, or int32; block ids whose slots do not fit are refused.

    Examples
    --------
    >>> table = BlockTable(16, 4, 8, 64, backend="numpy")
    >>> table.add_row([5, 8], 0)
    >>> table.append_row([2], 0)
    >>> table.commit_block_table(1)
    >>> table.compute_slot_mapping(1, [0, 3], np.array([15, 16, 32]))
    >>> table.slot_mapping[:4]
    array([ 95, 128,  32,  -1])
    """

    _group = 0
    _owner: "MultiGroupBlockTable"
    _committer: Committer

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        *,
        max_model_len: int | None = None,
        kernel_views: tuple[Any, ...] = (),
        context_parallel: ContextParallel = _SINGLE_DEVICE,
        cp_sharded: bool = True,
        slot_mapping: bool = True,
        stable_rows: bool = False,
        backend: str = "auto",
        device: int | None = None,
        slot_dtype: Any = np.int64,
    ) -> None:
        from pagedkv.tables.multi_group import MultiGroupBlockTable

        spec = KVCacheGroupSpec(block_size, kernel_views, cp_sharded, slot_mapping, max_num_blocks_per_req)
        if max_model_len is None:
            max_model_len = block_size * max_num_blocks_per_req * spec.shard(context_parallel).world_size
        self._owner = MultiGroupBlockTable(
            [spec],
            max_num_reqs,
            max_model_len,
            max_num_batched_tokens,
            context_parallel=context_parallel,
            token_alignment=None,
            stable_rows=stable_rows,
            backend=backend,
            device=device,
            slot_dtype=slot_dtype,
        )
        self._committer = self._owner._committer  # noqa: SLF001

    @classmethod
    def _of(cls, owner: "MultiGroupBlockTable", committer: Committer, group: int) -> "BlockTable":
        table = cls.__new__(cls)
        table._owner, table._committer, table._group = owner, committer, group  # noqa: SLF001
        return table

    # --- rows ---------------------------------------------------------------------------------

    def add_row(self, block_ids: Any, row: int) -> None:
        """Replace a row: int32 [n] block ids in sequence order. Errors as `append_rows`."""
        self.add_rows([row], [np.size(block_ids)], block_ids)

    def append_row(self, block_ids: Any, row: int) -> None:
        """Append block ids to a row; nothing changes where there are none. Errors as `append_rows`."""
        self.append_rows([row], [np.size(block_ids)], block_ids)

    def clear_row(self, row: int) -> None:
        """Empty a row; all its columns become NULL."""
        self._rows.clear_rows([row], self._group)

    def move_row(self, src: int, tgt: int) -> None:
        """Move a row onto another; the source becomes empty, and `move_row(i, i)` changes nothing."""
        self._rows.move_rows([src], [tgt], self._group)

    def swap_row(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self.swap_rows([a], [b])

    def add_rows(self, rows: Any, counts: Any, block_ids: Any) -> None:
        """Replace rows in one call; arguments and errors as `append_rows`."""
        self._rows.add_rows(rows, self._own(counts), block_ids)

    def append_rows(self, rows: Any, counts: Any, block_ids: Any) -> None:
        """Append to rows in one call.

        Parameters
        ----------
        rows : array_like of int32, shape [n]
        counts : array_like of int32, shape [n]
            Blocks for each row.
        block_ids : array_like of int32, shape [sum of counts]
            Block ids, row by row.

        Raises
        ------
        CapacityError
            A row would exceed its columns.
        ValueError, TypeError
            A row, count or id is out of range or of the wrong type, or their numbers do not match.
        """
        self._rows.append_rows(rows, self._own(counts), block_ids)

    def clear_rows(self, rows: Any) -> None:
        """Empty rows."""
        self._rows.clear_rows(rows, self._group)

    def move_rows(self, srcs: Any, tgts: Any) -> None:
        """Move rows pair by pair, in order; each source becomes empty."""
        self._rows.move_rows(srcs, tgts, self._group)

    def swap_rows(self, a_rows: Any, b_rows: Any) -> None:
        """Exchange rows pair by pair, in order."""
        self._rows.swap_rows(a_rows, b_rows, self._group)

    def null_columns(self, rows: Any, starts: Any, ends: Any) -> None:
        """Set columns [start, end) of rows to NULL and keep the counts."""
        self._rows.null_columns(rows, starts, ends, self._group)

    def clear(self) -> None:
        """Empty all rows; the device follows at the next commit."""
        self.clear_rows(np.arange(self._owner.max_num_reqs, dtype=np.int32))

    # --- commits ------------------------------------------------------------------------------

    def commit_block_table(self, num_reqs: int | None = None, stream: Any = None) -> None:
        """Send every changed row to the device, whatever `num_reqs`; no copy where nothing changed."""
        self._owner.commit_block_table(num_reqs, stream)

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: Any,
        positions: Any,
        *,
        rows: Any = None,
        stream: Any = None,
    ) -> None:
        """Map tokens to slots from the committed table; the result stands in `slot_mapping`.

        A table of several groups maps them all, and into any of its output sets:
        `MultiGroupBlockTable.compute_slot_mapping`.

        Parameters
        ----------
        num_reqs : int
            Requests of the step.
        query_start_loc : int32 [num_reqs + 1]
            Prefix sums of the query lengths. A device array is read in place, a host array staged.
        positions : int64 [num_tokens]
            Position of each token; host or device likewise.
        rows : int32 [num_reqs], optional
            Table row of each request, -1 for a dummy; row i for request i where None.
        stream : CuPy stream, optional

        Raises
        ------
        ValueError, TypeError, CapacityError
            Sizes, order, dtype or device are wrong; nothing was enqueued.
        PagedKVError
            As `MultiGroupBlockTable.compute_slot_mapping`.
        """
        compute_slot_mapping(self._committer, num_reqs, query_start_loc, positions, rows, 0, stream)

    # --- what it holds ------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens in a manager block."""
        return self._spec.block_size

    @property
    def slot_mapping(self) -> Any:
        """Slots of the last mapping, int64 [max_num_batched_tokens] on the device; PAD past the end.

        Those of output set 0, as all that a table of one group has.
        """
        return self._committer.outputs[0].slot_mapping(self._group, self._owner.max_num_batched_tokens)

    def get_device_tensor(self, num_reqs: int) -> Any:
        """Rows [0, num_reqs) of the committed table on the device, int32 [num_reqs, width]; a view."""
        check_int("num_reqs", num_reqs, 0, self._owner.max_num_reqs)
        return self._committer.stored.block_table(self._group, num_reqs)

    def get_kernel_tensor(self, num_reqs: int, view: int = 0) -> Any:
        """Those rows in a view's kernel blocks, int32 [num_reqs, width * ratio]; a view.

        With stable rows the kernel views are kept in batch order: take them from the step.
        """
        check_int("num_reqs", num_reqs, 0, self._owner.max_num_reqs)
        check_view(self._group, view, len(self._spec.kernel_views))
        if self._owner.stable_rows:
            raise ValueError("kernel views of a table with stable rows must be taken from the step")
        return self._committer.stored.kernel_block_table(self._group, view, num_reqs)

    def get_numpy_array(self) -> IntArray:
        """Read-only view of the host mirror, int32 [max_num_reqs, width]."""
        return self._owner.mirror.block_table(self._group)

    @property
    def num_blocks_per_row(self) -> IntArray:
        """Read-only view of the row counts, int32 [max_num_reqs], in blocks."""
        return self._owner.mirror.num_blocks(self._group)

    def map_to_kernel_blocks(self, block_ids: Any, view: int = 0) -> Any:
        """Expand manager block ids to a view's kernel blocks: ``id * stride + j``; NULL stays NULL.

        Parameters
        ----------
        block_ids : int32 array, shape [n]
            On the host, or a CuPy array on the table's device.
        view : int
            Which of the group's kernel views.

        Returns
        -------
        int32 array, shape [n * ratio], where the ids were

        Raises
        ------
        ValueError, TypeError
            An id on the host is out of range; a device array is not int32, contiguous and flat.
        """
        check_view(self._group, view, len(self._spec.kernel_views))
        ratio, stride = self._spec.views()[view]
        backend = self._committer.backend
        host, device = device_or_host(backend, "block_ids", block_ids, None, np.int32)
        if device is None:
            ids = as_int32("block_ids", host, 0, int(self._owner.mirror.layout[self._group, 2]))
            out = np.empty(ids.size * ratio, np.int32)
            definition("expand_blocks")(ids, out, ids.size, ratio, stride)
            return out
        out = backend.zeros(block_ids.size * ratio, np.int32)
        launch = backend.bind("expand_blocks", (block_ids, out, block_ids.size, ratio, stride))
        launch(grids.expand_blocks(block_ids.size * ratio), backend.stream(None))
        return out

    @property
    def _rows(self) -> Any:
        return self._owner.rows_for_writing

    @property
    def _spec(self) -> KVCacheGroupSpec:
        return self._committer.geometry.specs[self._group]

    def _own(self, counts: Any) -> IntArray:
        # Counts of this group; the others' rows are left alone (-1).
        own = np.asarray(counts, dtype=None if np.size(counts) else np.int32)
        if self._owner.num_groups == 1:
            return own
        every = np.full(
            (self._owner.num_groups, own.size), -1, np.int64 if own.dtype.kind == "u" else own.dtype
        )
        every[self._group] = own
        return every
