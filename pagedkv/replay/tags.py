"""Tags: what the simulated KV cache holds, one integer per position, and the loops that move it.

    tag = (key * max_model_len + position + 1) * num_groups + group

`key` is the prefix key of the token's block inside the prompt, and a number of the request's own past it.
Two positions have equal tags exactly where a KV cache holds equal values: equal tokens after an equal
prefix, at the same position, in the same group. Nothing is hashed, so nothing collides.
"""

from typing import Any

from pagedkv.compiled import compiled

__all__ = ["EMPTY", "describe_tag", "expected_tags", "read_back", "write_through_slots"]

EMPTY = 0
"""Content of a slot to which nothing was written since its block was handed out; less than every tag."""


@compiled
def expected_tags(
    positions: Any,  # int64 [>= sum(counts)], out
    tags: Any,  # int64 [>= sum(counts)], out: without the group
    requests: Any,  # int64 [n]
    starts: Any,  # int64 [n], first position of each
    counts: Any,  # int64 [n], positions of each
    key_start_loc: Any,  # int64 [num_requests + 1]
    prefix_keys: Any,  # int64 [...]
    hashed_lens: Any,  # int64 [num_requests]
    hash_block_size: int,
    num_prefix_keys: int,
    max_model_len: int,
) -> int:
    """Fill in the positions and tags of runs of tokens, one run a request; return how many."""
    t = 0
    for i in range(len(requests)):
        request, keys = requests[i], key_start_loc[requests[i]]
        for p in range(starts[i], starts[i] + counts[i]):
            own = p >= hashed_lens[request]
            key = num_prefix_keys + request if own else prefix_keys[keys + p // hash_block_size]
            positions[t] = p
            tags[t] = key * max_model_len + p + 1
            t += 1
    return t


@compiled
def write_through_slots(
    kv: Any,  # int64 [num_blocks * stride], one rank's cache, out
    slots: Any,  # int64 [num_tokens]
    tags: Any,  # int64 [num_tokens]
    owners: Any,  # int32 [num_tokens], out: counted up where this rank owns the token
    block_size: int,
    stride: int,
    num_groups: int,
    group: int,
) -> None:
    """Write every owned token's tag where the slot mapping says; a slot outside the cache owns nothing."""
    for t in range(min(len(tags), len(slots))):
        block = slots[t] // block_size
        place = block * stride + slots[t] - block * block_size
        if slots[t] >= 0 and place < len(kv):
            kv[place] = tags[t] * num_groups + group
            owners[t] += 1


@compiled
def read_back(
    kv: Any,  # int64 [num_blocks * stride], one rank's cache
    block_ids: Any,  # int32 [n], from the block table: the block of each position's column
    positions: Any,  # int64 [n]
    tags: Any,  # int64 [n], without the group
    found: Any,  # int64 [n], out: what stands there
    block_size: int,
    stride: int,
    world_size: int,
    interleave: int,
    rank: int,
    num_groups: int,
    group: int,
) -> tuple[int, int, int]:
    """Read positions as an attention kernel does; return (how many are this rank's, wrong ones, first wrong).

    Position p of a virtual block of ``block_size * world_size`` tokens, at offset o in it, is rank
    ``(o // interleave) % world_size``'s, at ``o // (world_size * interleave) * interleave + o % interleave``
    in that rank's block.
    """
    num_read, num_wrong, first_wrong = 0, 0, -1
    for i in range(len(positions)):
        o = positions[i] % (block_size * world_size)
        if (o // interleave) % world_size != rank:
            continue
        num_read += 1
        place = block_ids[i] * stride + o // (world_size * interleave) * interleave + o % interleave
        found[i] = kv[place] if stride <= place < len(kv) else EMPTY  # block 0 is nobody's
        if found[i] != tags[i] * num_groups + group:
            num_wrong += 1
            if first_wrong < 0:
                first_wrong = i
    return num_read, num_wrong, first_wrong


def describe_tag(tag: int, num_groups: int, num_prefix_keys: int, max_model_len: int) -> str:
    """Say in words what a tag stands for."""
    if tag == EMPTY:
        return "nothing written"
    content, group = divmod(tag, num_groups)
    key, position = divmod(content - 1, max_model_len)
    of = f"prefix {key}" if key < num_prefix_keys else f"request {key - num_prefix_keys}"
    return f"position {position} of {of} in group {group}"
