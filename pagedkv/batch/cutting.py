"""The host's side of a split: which rows and tokens each micro-batch takes, and what they become in it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pagedkv.batch.batch_metadata import BatchMetadata
from pagedkv.batch.step_part import Place
from pagedkv.checks import IntArray, check_int
from pagedkv.constants import NULL_BLOCK_ID

__all__ = ["check_cuts", "part_of", "places_of", "reads_before_written"]


def check_cuts(cuts: Sequence[int], num_tokens: int, most: int) -> list[int]:
    """Return cuts as ints, or raise: at most `most`, strictly increasing within (0, num_tokens)."""
    checked = [check_int("cuts", cut, 1, max(num_tokens - 1, 0)) for cut in cuts]
    if len(checked) > most:
        raise ValueError(
            f"cuts must be at most {most} for {most + 1} micro-batches, got {len(checked)} "
            "(build MicroBatches for more)"
        )
    for before, cut in pairwise(checked):
        if cut <= before:
            raise ValueError(f"cuts must increase, got {cut} after {before}")
    return checked


def places_of(batch: BatchMetadata, cuts: Sequence[int]) -> list[Place]:
    """Return where each micro-batch lies: every row in one, and in all that have tokens of it.

    A row without tokens lies in the later of two micro-batches at whose cut it stands. Rows of the padding
    lie in the last.
    """
    starts = batch.query_start_loc_cpu[: batch.num_reqs_unpadded + 1]
    places, first_req, first_token = [], 0, 0
    for cut in cuts:
        last_req = min(int(np.searchsorted(starts, cut)), batch.num_reqs_unpadded)
        places.append(Place(first_req, last_req, first_token, cut))
        first_req, first_token = last_req - int(starts[last_req] > cut), cut
    return [*places, Place(first_req, batch.num_reqs, first_token, batch.num_actual_tokens)]


def part_of(batch: BatchMetadata, place: Place, ubatch: int) -> BatchMetadata:
    """Return what the host says of a micro-batch; the device arrays are still those of the step."""
    first_req, last_req, first_token, last_token = place
    num_reqs = last_req - first_req
    starts = batch.query_start_loc_cpu[first_req : last_req + 1]
    query_start_loc = np.minimum(np.maximum(starts, first_token), last_token) - np.int32(first_token)
    seq_lens = batch.seq_lens_cpu_upper_bound[first_req:last_req] - _lens(np.maximum(starts, last_token))
    computed = batch.num_computed_tokens_cpu[first_req:last_req] + _lens(np.minimum(starts, first_token))
    is_prefilling = batch.is_prefilling[first_req:last_req].copy()
    for array in (query_start_loc, seq_lens, computed, is_prefilling):
        array.setflags(write=False)
    num_tokens = min(last_token, batch.num_tokens_unpadded) - first_token
    return replace(
        batch,
        query_start_loc_cpu=query_start_loc,
        seq_lens_cpu_upper_bound=seq_lens,
        num_computed_tokens_cpu=computed,
        is_prefilling=is_prefilling,
        num_reqs=num_reqs,
        num_actual_tokens=last_token - first_token,
        num_reqs_unpadded=min(last_req, batch.num_reqs_unpadded) - first_req,
        num_tokens_unpadded=max(num_tokens, 0),
        max_query_len=_largest(_lens(batch.query_start_loc_cpu), _lens(query_start_loc), batch.max_query_len),
        max_seq_len=_largest(batch.seq_lens_cpu_upper_bound, seq_lens, batch.max_seq_len),
        ubatch=ubatch,
    )


def reads_before_written(
    blocks: IntArray, column_tokens: int, places: Sequence[Place], parts: Sequence[BatchMetadata]
) -> bool:
    """Whether a micro-batch reads a block that is written by a later one.

    Parameters
    ----------
    blocks : int32 [num_reqs, width]
        The blocks of each request in one group, NULL past its own.
    column_tokens : int
        Tokens of a sequence that one column covers, over all ranks.
    places, parts
        The micro-batches, as `places_of` and `part_of` give them.
    """
    starts = np.arange(blocks.shape[1]) * column_tokens
    later = np.empty(0, np.int32)
    for place, part in zip(reversed(places), reversed(parts), strict=True):
        rows = blocks[place.first_req : place.last_req]  # without the padding
        computed = part.num_computed_tokens_cpu[: len(rows), None]
        known = computed - computed % column_tokens  # whole columns: no other request goes on with the last
        if np.isin(rows[starts < known], later).any():
            return True
        ends = part.seq_lens_cpu_upper_bound[: len(rows), None]
        written = rows[(starts >= known) & (starts < ends) & (computed < ends)]
        later = np.concatenate([later, written[written != NULL_BLOCK_ID]])
    return False


def _lens(starts: IntArray) -> IntArray:
    return starts[1:] - starts[:-1]  # np.diff, which costs three times as much


def _largest(of_step: IntArray, of_part: IntArray, bound: int) -> int:
    # A bound above all lengths of the step is a promise, such as that of a captured graph: it stays.
    return bound if bound > of_step.max(initial=0) else int(of_part.max(initial=0))
