"""BatchMetadata: what the attention layers of all groups read of a step, on the device and on the host."""

from dataclasses import dataclass, fields, make_dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.checks import IntArray

__all__ = ["BatchMetadata", "BoolArray", "WritableBatch", "writable"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BatchMetadata:
    """What all groups of one step share; R requests and T tokens, padding included.

    Arrays on the host are copies of their own and cannot be written to: they stay true whatever later steps
    do. Arrays on the device are valid until the next commit into the same output set, or the next split into
    the same `MicroBatches`.

    Where num_computed_tokens was a device array, the device may know that fewer tokens are computed than the
    host does (drafts that were rejected): lengths on the device are exact, those on the host upper bounds.

    Parameters
    ----------
    query_start_loc : int32 [R + 1], on the device
        First token of each request; the last value repeats in the padding.
    query_start_loc_cpu : int32 [R + 1]
        The same on the host.
    seq_lens : int32 [R], on the device
        Computed and scheduled tokens of each request; 0 in the padding.
    seq_lens_cpu_upper_bound : int32 [R]
        The host's, at least as large.
    num_computed_tokens_cpu : int32 [R]
        Tokens computed before this step, as the host knows them: an upper bound as well. 0 in the padding.
    positions : int64 [T], on the device
        Position of each token in its sequence; 0 in the padding.
    token_to_req_indices : int32 [T], on the device
        Request of each token; 0 in the padding.
    is_prefilling : bool [R]
        Whether the request starts the step within its prompt; False in the padding.
    num_reqs, num_actual_tokens : int
        R and T.
    num_reqs_unpadded, num_tokens_unpadded : int
        Those that are real. Where only the device knows the tokens, the host's count of them.
    max_query_len, max_seq_len : int
        Upper bounds of the query lengths and of `seq_lens`.
    causal : bool
        Whether tokens see only what is before them; a group of cross attention says False by itself.
    ubatch : int
        Number of the micro-batch; 0 for a step that is whole.
    """

    query_start_loc: Any
    query_start_loc_cpu: IntArray
    seq_lens: Any
    seq_lens_cpu_upper_bound: IntArray
    num_computed_tokens_cpu: IntArray
    positions: Any
    token_to_req_indices: Any
    is_prefilling: BoolArray
    num_reqs: int
    num_actual_tokens: int
    num_reqs_unpadded: int
    num_tokens_unpadded: int
    max_query_len: int
    max_seq_len: int
    causal: bool = True
    ubatch: int = 0

    def __repr__(self) -> str:
        """Sizes alone: to show a device array, the host would have to wait for it."""
        return (
            f"BatchMetadata(num_reqs={self.num_reqs_unpadded} of {self.num_reqs}, "
            f"num_tokens={self.num_tokens_unpadded} of {self.num_actual_tokens}, "
            f"max_query_len={self.max_query_len}, max_seq_len={self.max_seq_len}, ubatch={self.ubatch})"
        )


def writable(frozen: type) -> Any:
    """Return a dataclass of the same slots that can be written to.

    A frozen dataclass sets each field by a call, which makes an object three times as dear. An object
    of the writable class becomes one of the frozen class when its ``__class__`` is set.
    """
    names = [(field.name, Any) for field in fields(frozen)]
    return make_dataclass(f"Writable{frozen.__name__}", names, slots=True, eq=False, repr=False)


WritableBatch = writable(BatchMetadata)
