"""Events of a manager, which knows the tokens: one per run of blocks that a sequence published."""

from typing import Any

from pagedkv.allocation import sequence_state as s
from pagedkv.allocation.block_records import Keys
from pagedkv.allocation.events import BlockRemoved, BlockStored, Event, key_bytes
from pagedkv.allocation.group_rules import BLOCK_SIZE, HASHES
from pagedkv.allocation.prefix_index import REMOVED

__all__ = ["events_with_tokens"]


def events_with_tokens(rows: Keys, state: Any) -> list[Event]:
    """Turn logged rows into events; the sequences that they name must not have changed since."""
    events: list[Event] = []
    run: list[tuple[bytes, int, int, int]] = []  # hash, group, place, logical block
    for kind, k0, k1, tag in rows.tolist():
        block_hash, group = key_bytes(k0, k1)
        place, block = tag >> 32, tag & 0xFFFFFFFF
        if run and (kind == REMOVED or (group, place, block) != (*run[-1][1:3], run[-1][3] + 1)):
            events.append(_stored(run, state))
            run = []
        if kind == REMOVED:
            events.append(BlockRemoved(block_hash, group))
        else:
            run.append((block_hash, group, place, block))
    if run:
        events.append(_stored(run, state))
    return events


def _stored(run: list[tuple[bytes, int, int, int]], state: Any) -> BlockStored:
    _, group, place, first = run[0]
    extent = int(state.arrays.sequences[place, s.EXTENT])
    hashes, size = (int(state.arrays.groups[group, column]) for column in (HASHES, BLOCK_SIZE))
    parent = None
    if first > 0:
        parent = state.arrays.keys[extent + first * hashes - 1].astype("<u8").tobytes()
    page = size // hashes
    start = (extent + first * hashes) * page
    return BlockStored(
        block_hashes=tuple(block_hash for block_hash, *_ in run),
        group=group,
        parent_block_hash=parent,
        token_ids=state.arrays.tokens[start : start + len(run) * size].copy(),
        block_size=size,
    )
