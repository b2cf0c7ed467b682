"""MultiGroupBlockTable: the block tables of all KV-cache groups, committed together."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pagedkv.backends import get_backend
from pagedkv.checks import check_int
from pagedkv.mirror import HostMirror
from pagedkv.specs import ContextParallel, KVCacheGroupSpec, max_block_id, table_width
from pagedkv.tables.block_table import BlockTable
from pagedkv.tables.captured import CapturedStep
from pagedkv.tables.committer import Committer
from pagedkv.tables.flat_ids import flat_ids
from pagedkv.tables.geometry import Geometry
from pagedkv.tables.joining import check_mirror, rows_of
from pagedkv.tables.separate import compute_slot_mapping
from pagedkv.tables.step import Step
from pagedkv.tables.warmup import warmup

__all__ = ["MultiGroupBlockTable"]

_SINGLE_DEVICE = ContextParallel()


class MultiGroupBlockTable:
    """Block tables of several KV-cache groups over the same requests.

    Row operations write the host mirror; `commit` brings the device up to date, in one copy for all
    groups, and returns the step's arrays. Not thread-safe: one writer, one committer at a time.

    Parameters
    ----------
    groups : sequence of KVCacheGroupSpec or int
        The groups; an int is a plain block size, in tokens.
    max_num_reqs : int
        Rows of each table.
    max_model_len : int
        Longest sequence, in tokens; positions at or past it are never written.
    max_num_batched_tokens : int
        Most tokens of one step, padding included.
    context_parallel : ContextParallel
        World, rank and interleave; sharded groups hold this rank's share.
    token_alignment : int or None
        Each row's width in tokens is a multiple of it (128 serves the TRT-LLM and CUTLASS MLA kernels).
    stable_rows : bool
        False: row i of the table is request i of the batch. True: a request keeps its row, and each
        step names the `rows` in batch order.
    backend : {"auto", "numpy", "numba", "cupy"}
    device : int, optional
        CUDA device number; CuPy's current device where None.
    mirror : HostMirror, optional
        Commit an existing mirror (of the same rows and widths) instead of a new one.
    staging_depth : int
        Pinned buffers in the ring: commits in flight before the host waits.
    slot_dtype : dtype
        int64, or int32 for consumers that want it; block ids whose slots do not fit are refused.

    Raises
    ------
    ValueError
        Sizes that do not fit each other; see the message.
    BackendUnavailableError
        The backend cannot run here.

    Examples
    --------
    >>> import numpy as np
    >>> table = MultiGroupBlockTable([16, 32], 4, 512, 64, backend="numpy")
    >>> table.add_row(([5, 8], [3]), 0)
    >>> step = table.commit(1, np.array([0, 3], np.int32), np.array([15], np.int32))
    >>> step.slot_mapping(0), step.slot_mapping(1)
    (array([ 95, 128, 129]), array([111, 112, 113]))
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroupSpec | int],
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        *,
        context_parallel: ContextParallel = _SINGLE_DEVICE,
        token_alignment: int | None = 128,
        stable_rows: bool = False,
        backend: str = "auto",
        device: int | None = None,
        mirror: HostMirror | None = None,
        staging_depth: int = 3,
        slot_dtype: Any = np.int64,
    ) -> None:
        specs = [_spec_of(group) for group in _sequence("groups", groups)]
        length = check_int("max_model_len", max_model_len, 1)
        self.max_num_reqs = check_int("max_num_reqs", max_num_reqs, 1)
        self.max_num_batched_tokens = check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        self.max_model_len = length
        self.stable_rows = stable_rows
        widths = [table_width(spec, length, context_parallel, token_alignment) for spec in specs]
        place = get_backend(backend, device, slot_dtype)
        bits = 8 * place.slot_dtype.itemsize
        limits = [max_block_id(spec, bits) for spec in specs]
        if mirror is None:
            mirror = HostMirror(self.max_num_reqs, widths, limits)
        self.mirror = check_mirror(mirror, specs, widths, self.max_num_reqs, stable=stable_rows)
        self.rows_for_writing = rows_of(self.mirror)
        geometry = Geometry.build(
            specs,
            widths,
            self.max_num_reqs,
            self.max_num_batched_tokens,
            [length] * len(specs),
            context_parallel,
        )
        self.mirror.limit_block_ids(limits)
        self._committer = Committer(
            place,
            geometry,
            self.mirror,
            stable_rows=stable_rows,
            staging_depth=check_int("staging_depth", staging_depth, 1),
        )
        self._groups = tuple(BlockTable._of(self, self._committer, g) for g in range(len(specs)))  # noqa: SLF001

    # --- what it is ---------------------------------------------------------------------------

    def __getitem__(self, group: int) -> BlockTable:
        """Return the table of one group."""
        if not 0 <= group < len(self._groups):  # IndexError ends an iteration
            raise IndexError(f"group must lie in [0, {len(self._groups) - 1}], got {group}")
        return self._groups[group]

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    @property
    def num_groups(self) -> int:
        """Number of KV-cache groups."""
        return len(self._groups)

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._committer.backend.name  # type: ignore[no-any-return]

    @property
    def device(self) -> int | None:
        """CUDA device number, None on the numpy backend."""
        return self._committer.backend.device  # type: ignore[no-any-return]

    @property
    def num_h2d_copies(self) -> int:
        """Host-to-device copies enqueued so far (on NumPy: staged)."""
        return int(self._committer.totals[0])

    @property
    def num_h2d_bytes(self) -> int:
        """Bytes of those copies."""
        return int(self._committer.totals[1])

    # --- rows ---------------------------------------------------------------------------------

    def add_row(self, block_ids: Sequence[Any], row: int) -> None:
        """Replace a row in every group: one list of ids a group, None to leave a group alone.

        Raises
        ------
        CapacityError, ValueError, TypeError
            As `add_rows`; no group was changed.
        """
        self.rows_for_writing.add_rows([row], *flat_ids(block_ids, self.num_groups))

    def append_row(self, block_ids: Sequence[Any], row: int) -> None:
        """Append to a row in every group: one list of ids a group, empty or None for nothing."""
        self.rows_for_writing.append_rows([row], *flat_ids(block_ids, self.num_groups))

    def clear_row(self, row: int) -> None:
        """Empty a row in every group."""
        self.rows_for_writing.clear_rows([row])

    def move_row(self, src: int, tgt: int) -> None:
        """Move a row onto another in every group; the source becomes empty."""
        self.rows_for_writing.move_rows([src], [tgt])

    def swap_row(self, a: int, b: int) -> None:
        """Exchange two rows in every group."""
        self.rows_for_writing.swap_rows([a], [b])

    def add_rows(self, rows: Any, counts: Any, block_ids: Any) -> None:
        """Replace rows in one call; a repeated row keeps its last content.

        Parameters
        ----------
        rows : array_like of int32, shape [n]
        counts : array_like of int32, shape [G, n]
            Blocks for each row and group; -1 leaves the row of that group alone.
        block_ids : array_like of int32, shape [sum of counts]
            Ids, group by group, and row by row within a group.

        Raises
        ------
        CapacityError
            A row would exceed its width.
        ValueError, TypeError
            A row, count or id is out of range or of the wrong type, or their numbers do not match.
        """
        self.rows_for_writing.add_rows(rows, counts, block_ids)

    def append_rows(self, rows: Any, counts: Any, block_ids: Any) -> None:
        """Append to rows in one call; arguments and errors as `add_rows`."""
        self.rows_for_writing.append_rows(rows, counts, block_ids)

    def clear_rows(self, rows: Any) -> None:
        """Empty rows in every group."""
        self.rows_for_writing.clear_rows(rows)

    def move_rows(self, srcs: Any, tgts: Any) -> None:
        """Move rows pair by pair, in order; each source becomes empty."""
        self.rows_for_writing.move_rows(srcs, tgts)

    def swap_rows(self, a_rows: Any, b_rows: Any) -> None:
        """Exchange rows pair by pair, in order."""
        self.rows_for_writing.swap_rows(a_rows, b_rows)

    def null_columns(self, rows: Any, starts: Any, ends: Any, group: int = 0) -> None:
        """Set columns [start, end) of rows to NULL and keep the counts (blocks out of the window)."""
        self.rows_for_writing.null_columns(rows, starts, ends, group)

    def clear(self) -> None:
        """Empty all rows of all groups; the device follows at the next commit."""
        self.rows_for_writing.clear()

    # --- commits ------------------------------------------------------------------------------

    def commit(
        self,
        num_reqs: int,
        query_start_loc: Any,
        num_computed_tokens: Any,
        *,
        rows: Any = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        positions: Any = None,
        out: int = 0,
        stream: Any = None,
    ) -> Step:
        """Bring the device up to date and map this step's tokens to slots, in one copy.

        Everything is enqueued on `stream`; nothing is waited for, except a staging buffer whose own
        copy has not run yet.

        Parameters
        ----------
        num_reqs : int
            Requests of the step, at most max_num_reqs.
        query_start_loc : int32 [num_reqs + 1]
            Prefix sums of scheduled tokens, starting with 0. On the host or the device.
        num_computed_tokens : int32 [num_reqs]
            Tokens of each request computed before this step. On the host or the device. Tokens whose
            position lies outside the request's blocks map to PAD; nothing is raised.
        rows : int32 [num_reqs], optional
            With stable rows: the table row of each request, -1 for a dummy; repeats are legal. Host.
        num_reqs_padded, num_tokens_padded : int, optional
            Sizes that the consumer reads, for CUDA graphs: padded rows are NULL, padded slots PAD.
        positions : int64 [num_tokens], optional
            Position of each token, on the host or the device; formed from the above where None.
        out : int
            Output set to write; see `outputs`.
        stream : CuPy stream, optional
            CuPy's current stream of the table's device where None.

        Returns
        -------
        Step
            Device views, in batch order, valid until the next commit into the same output set.

        Raises
        ------
        CapacityError, ValueError, TypeError
            Sizes, order, dtype or device are wrong, or a device array lies in what this step writes (its own
            query_start_loc and positions may be given as they are); nothing was enqueued or changed.
        PagedKVError
            The stream is being captured (use `captured_step`); or a captured step was packed and not yet
            replayed.
        """
        if num_reqs_padded is None:
            num_reqs_padded = num_reqs
        if num_tokens_padded is None:
            num_tokens_padded = -1
        elif num_tokens_padded < 0:
            raise ValueError(f"num_tokens_padded must be None or at least 0, got {num_tokens_padded}")
        if not type(num_reqs) is type(num_reqs_padded) is type(num_tokens_padded) is int:
            # NumPy's integers become ints; compiled code would take a float as well, and cut it.
            num_reqs = check_int("num_reqs", num_reqs)
            num_reqs_padded = check_int("num_reqs_padded", num_reqs_padded)
            num_tokens_padded = check_int("num_tokens_padded", num_tokens_padded, -1)
        committer = self._committer
        backend = committer.backend
        if backend.current_device() != backend.device:
            step = (num_reqs, query_start_loc, num_computed_tokens, rows, num_reqs_padded, num_tokens_padded)
            with backend.activate():
                return committer.commit(*step, positions, out, stream)
        return committer.commit(
            num_reqs,
            query_start_loc,
            num_computed_tokens,
            rows,
            num_reqs_padded,
            num_tokens_padded,
            positions,
            out,
            stream,
        )

    def commit_block_table(self, num_reqs: int | None = None, stream: Any = None) -> None:
        """Send every changed row to the device, whatever `num_reqs`; no copy where nothing changed."""
        if num_reqs is not None:
            check_int("num_reqs", num_reqs, 0, self.max_num_reqs)
        with self._committer.backend.activate():
            self._committer.commit_rows(stream)

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: Any,
        positions: Any,
        *,
        rows: Any = None,
        out: int = 0,
        stream: Any = None,
    ) -> tuple[Any, ...]:
        """Map tokens to slots in every group, from the committed tables.

        For tokens that come after the step, such as drafts: give them an output set of their own, and the
        step keeps its slots. Nothing but the slots is written. With device arrays it can be captured in a
        consumer's CUDA graph; prepare one call before.

        Parameters
        ----------
        num_reqs : int
            Requests, at most max_num_reqs.
        query_start_loc : int32 [num_reqs + 1]
            Prefix sums of the tokens of each request. A device array is read in place, a host array staged.
        positions : int64 [num_tokens]
            Position of each token; host or device likewise.
        rows : int32 [num_reqs], optional
            Table row of each request, -1 for a dummy; row i for request i where None. With stable rows give
            them (`InputBatch.rows`): row i is whoever's it is.
        out : int
            Output set whose slots are written; see `outputs`.
        stream : CuPy stream, optional

        Returns
        -------
        tuple of int64 [num_tokens]
            Slots of each group, device views, valid until the next call into the same output set. As long
            as `positions` where query_start_loc is on the device; PAD past the last token.

        Raises
        ------
        CapacityError, ValueError, TypeError
            Sizes, order, dtype or device are wrong, or a device array lies in the slots that are written;
            nothing was enqueued or changed.
        PagedKVError
            The stream is being captured and an array lies on the host; or it is not, and a captured step was
            packed and not yet replayed.

        Examples
        --------
        >>> table = MultiGroupBlockTable([16], 4, 40, 64, backend="numpy")
        >>> table.outputs(2)
        >>> table.add_row(([3, 8, 5],), 0)
        >>> step = table.commit(1, [0, 1], [37])
        >>> table.compute_slot_mapping(1, [0, 3], np.array([38, 39, 40]), out=1)
        (array([86, 87, -1]),)
        >>> step.slot_mapping(0)
        array([85])
        """
        return compute_slot_mapping(self._committer, num_reqs, query_start_loc, positions, rows, out, stream)

    def slot_mapping(self, group: int, num_tokens: int, out: int = 0) -> Any:
        """Slots that output set `out` holds for a group, int64 [num_tokens] on the device; a view.

        PAD past the last token of the last commit or mapping into this set, so any padded size may be read.
        """
        check_int("num_tokens", num_tokens, 0, self.max_num_batched_tokens)
        return self._committer.output_set(out).slot_mapping(group, num_tokens)

    def outputs(self, num: int) -> None:
        """Make sure that there are `num` persistent output sets, so that steps in flight keep theirs.

        With rows in batch order the block tables themselves are shared by all sets; with stable rows each
        set has its own.
        """
        self._committer.add_outputs(check_int("number of output sets", num, 1))

    def captured_step(
        self,
        num_reqs_padded: int,
        num_tokens_padded: int,
        *,
        max_new_blocks: int | None = None,
        out: int = 0,
    ) -> CapturedStep:
        """Return a step that can be captured in anyone's CUDA graph; see `CapturedStep`."""
        return CapturedStep(self._committer, num_reqs_padded, num_tokens_padded, max_new_blocks, out)

    def warmup(self, num_tokens: Iterable[int] = (), *, max_new_blocks: int | None = None) -> int:
        """Compile the kernels and capture the graphs that steps will need; returns how many there are.

        Parameters
        ----------
        num_tokens : iterable of int
            Step sizes to expect, in tokens; decode steps of all sizes are always covered.
        max_new_blocks : int, optional
            Blocks that one step appends at most, over all groups; one per request and group where None.
        """
        return warmup(self._committer, num_tokens, max_new_blocks)


def _sequence(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list or tuple, one entry a group, got {type(values).__name__}")
    return values


def _spec_of(group: Any) -> KVCacheGroupSpec:
    if isinstance(group, KVCacheGroupSpec):
        return group
    if not isinstance(group, int | np.integer):
        raise TypeError(
            f"groups must hold KVCacheGroupSpec or int block sizes, got {type(group).__name__} "
            "(a manager's groups are manager.table_groups)"
        )
    return KVCacheGroupSpec(int(group))
