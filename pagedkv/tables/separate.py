"""compute_slot_mapping apart from a commit: from tables on the device, for arrays of either kind."""

from typing import Any

import numpy as np

from pagedkv.checks import check_int
from pagedkv.tables.committer import Committer
from pagedkv.tables.faults import PackFault, find_fault
from pagedkv.tables.inputs import NO_INT32, device_or_host
from pagedkv.tables.modes import BATCH_ORDER, STABLE
from pagedkv.tables.output_set import OutputSet
from pagedkv.tables.pack import TOKENS_FLOOR, TOKENS_SEEN
from pagedkv.tables.refusals import refuse

__all__ = ["compute_slot_mapping"]


def compute_slot_mapping(
    committer: Committer,
    num_reqs: int,
    query_start_loc: Any,
    positions: Any,
    rows: Any,
    out: int,
    stream: Any,
) -> tuple[Any, ...]:
    """Check, stage what lies on the host (one copy each), and launch slot_mapping over all groups.

    Returns the slots of each group in output set `out`: views, as long as there may be tokens.
    """
    with committer.backend.activate():
        outputs = committer.output_set(out)
        num_tokens = _compute(committer, outputs, num_reqs, query_start_loc, positions, rows, stream)
        return tuple(outputs.slot_mapping(g, num_tokens) for g in range(len(committer.geometry.specs)))


def _compute(
    committer: Committer,
    outputs: OutputSet,
    num_reqs: int,
    query_start_loc: Any,
    positions: Any,
    rows: Any,
    stream: Any,
) -> int:
    geometry, backend = committer.geometry, committer.backend
    check_int("num_reqs", num_reqs, 0, geometry.max_num_reqs)
    starts = device_or_host(backend, "query_start_loc", query_start_loc, num_reqs + 1, np.int32)
    where = device_or_host(backend, "positions", positions, None, np.int64)
    lines = (None, None)
    if rows is not None:
        lines = device_or_host(backend, "rows", rows, num_reqs, np.int32)
    if starts[1] is not None or where[1] is not None or lines[1] is not None:
        device = {"query_start_loc": starts[1], "positions": where[1], "rows": lines[1]}
        outputs.overlaps.refuse_of_slots(device)
    num_positions = int(where[0].size if where[1] is None else where[1].size)
    has_host_rows = rows is not None and lines[1] is None
    _check(committer, starts[0], lines[0] if has_host_rows else NO_INT32, num_positions, num_reqs)
    if starts[1] is None:
        num_tokens = int(starts[0][num_reqs])
    else:
        num_tokens = -min(num_positions, geometry.max_num_batched_tokens) - 1
    stream = backend.stream(stream)
    is_captured = stream.ptr != 0 and backend.is_capturing(stream.ptr)
    if not is_captured:  # a captured call runs with the consumer's graph, whenever that is
        committer.refuse_pending()
    capacity = (geometry.max_num_reqs + 1, geometry.max_num_batched_tokens, geometry.max_num_reqs)
    names = ("query_start_loc", "positions", "rows")
    # All sets share the staged arrays: `stage` lets its copy wait for the kernel of the last call.
    inputs = [
        device if host is None or device is not None else committer.stage(name, host, room, stream)
        for name, room, (host, device) in zip(
            names, capacity, (starts, _cut(where, num_tokens), lines), strict=True
        )
    ]
    most = num_tokens if num_tokens >= 0 else -num_tokens - 1
    fill = max(most, int(outputs.seen[TOKENS_SEEN]))
    if is_captured:  # replays are not seen from here: each fills all, and later steps reckon with them
        fill = geometry.max_num_batched_tokens
        outputs.seen[TOKENS_FLOOR] = max(most, int(outputs.seen[TOKENS_FLOOR]))
    outputs.seen[TOKENS_SEEN] = fill  # lowered by the next commit, which pads the positions as well
    scalars = (num_reqs, num_tokens, fill, int(rows is not None))
    if is_captured:  # the consumer's graph has its own order
        committer.kernels.slot_mapping(committer.staging, outputs, inputs, scalars, stream)
        return most
    committer.order(stream.ptr)
    committer.kernels.slot_mapping(committer.staging, outputs, inputs, scalars, stream)
    committer.finish(committer.call_event, stream.ptr)
    return most


def _check(committer: Committer, starts: Any, rows: Any, num_positions: int, num_reqs: int) -> None:
    # The look that a commit takes at its arguments; empty arrays stand for what lies on the device.
    geometry = committer.geometry
    mode = STABLE if rows.size else BATCH_ORDER  # of the packer's modes, the one that looks at rows
    most, sizes = geometry.max_num_batched_tokens, (num_reqs, num_reqs, -1, mode)
    found = find_fault(committer.mirror.counts, most, starts, NO_INT32, rows, num_positions, *sizes)
    if found[0] != PackFault.NONE:
        refuse(*found, geometry, -1)


def _cut(where: tuple[Any, Any], num_tokens: int) -> tuple[Any, Any]:
    host, device = where
    most = num_tokens if num_tokens >= 0 else -num_tokens - 1
    return (host, device) if device is not None else (host[:most], None)
