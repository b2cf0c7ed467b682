"""step_metadata: the metadata of a step for those who use the tables without an input batch."""

from typing import Any

import numpy as np

from pagedkv.batch.metadata import StepMetadata
from pagedkv.checks import IntArray, as_int32, check_int, check_shape
from pagedkv.constants import MAX_INT32
from pagedkv.tables.step import Step

__all__ = ["step_metadata"]


def step_metadata(
    step: Step,
    query_start_loc: Any,
    num_computed_tokens: Any,
    *,
    num_prefill_tokens: Any = None,
    max_seq_len: int | None = None,
    causal: bool = True,
) -> StepMetadata:
    """Return what attention reads of a committed step; nothing is done on the device, or waited for.

    Parameters
    ----------
    step : Step
        What a commit returned.
    query_start_loc : array_like of int32, shape [num_reqs + 1]
        As it was committed; on the host, and copied. Where the commit had it on the device, the host's: with
        as many tokens or more, and split over the same requests.
    num_computed_tokens : array_like of int32, shape [num_reqs]
        As it was committed; on the host, and copied. Where the commit had it on the device, upper bounds.
    num_prefill_tokens : array_like of int32, shape [num_reqs], optional
        Tokens of each prompt: a request that has computed fewer is prefilling. None: none of them is.
    max_seq_len : int, optional
        Longest sequence to promise, such as the model length while a graph is captured; by default the
        longest of the step.
    causal : bool
        Whether tokens see only what is before them; a group of cross attention says False by itself.

    Returns
    -------
    StepMetadata

    Raises
    ------
    ValueError
        A shape or number that is not the step's; prefix sums that do not start with 0 or decrease; lengths
        past int32; a max_seq_len below the longest sequence.
    TypeError
        Values that are no integers, or arrays on the device.

    Examples
    --------
    >>> from pagedkv import MultiGroupBlockTable
    >>> table = MultiGroupBlockTable([16], 4, 512, 64, backend="numpy")
    >>> table.add_row([[5, 8]], 0)
    >>> starts, computed = [0, 3], [15]
    >>> metadata = step_metadata(table.commit(1, starts, computed, num_reqs_padded=2), starts, computed)
    >>> metadata[0].slot_mapping, metadata[0].seq_lens_cpu_upper_bound
    (array([ 95, 128, 129]), array([18,  0], dtype=int32))
    """
    num_reqs = step.num_reqs
    starts = _on_host("query_start_loc", query_start_loc, num_reqs + 1, "[num_reqs + 1]")
    computed = _on_host("num_computed_tokens", num_computed_tokens, num_reqs, "[num_reqs]")
    query_lens = np.diff(starts)
    _check_starts(step, starts, query_lens)
    seq_lens = computed.astype(np.int64) + query_lens
    longest = int(seq_lens.max(initial=0))
    if longest > MAX_INT32:
        raise ValueError(f"computed and scheduled tokens must be at most {MAX_INT32}, got {longest}")

    host = np.zeros((3, step.num_reqs_padded + 1), np.int32)
    host[0, : num_reqs + 1], host[0, num_reqs + 1 :] = starts, starts[num_reqs]
    host[1, :num_reqs], host[2, :num_reqs] = seq_lens, computed
    is_prefilling = np.zeros(step.num_reqs_padded, np.bool_)
    if num_prefill_tokens is not None:
        prompts = _on_host("num_prefill_tokens", num_prefill_tokens, num_reqs, "[num_reqs]")
        is_prefilling[:num_reqs] = computed < prompts
    if max_seq_len is not None:
        longest = check_int("max_seq_len", max_seq_len, longest)
    return StepMetadata.of(step, host, is_prefilling, int(query_lens.max(initial=0)), longest, causal)


def _on_host(name: str, values: Any, size: int, meaning: str) -> IntArray:
    if hasattr(values, "__cuda_array_interface__"):
        raise TypeError(
            f"{name} must lie on the host, got {type(values).__name__} (metadata never waits for the device)"
        )
    array = as_int32(name, values)
    check_shape(name, array, (size,), meaning)
    return array


def _check_starts(step: Step, starts: IntArray, query_lens: IntArray) -> None:
    if starts[0]:
        raise ValueError(f"query_start_loc must start with 0, got {starts[0]}")
    if query_lens.min(initial=0) < 0:
        place = int(np.argmax(query_lens < 0)) + 1
        raise ValueError(f"query_start_loc must not decrease, got {starts[place]} at {place}")
    total = int(starts[-1])
    if step.num_tokens is not None and total != step.num_tokens:
        raise ValueError(f"query_start_loc must end with the step's {step.num_tokens} tokens, got {total}")
    if total > step.num_tokens_padded:
        raise ValueError(
            f"query_start_loc must end with at most {step.num_tokens_padded} tokens, got {total} "
            "(commit with a larger num_tokens_padded)"
        )
