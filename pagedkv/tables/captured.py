"""CapturedStep: a step for a consumer's own CUDA graph, with a staging buffer of its own."""

from typing import Any

from pagedkv.checks import check_int
from pagedkv.errors import CapacityError, PagedKVError
from pagedkv.tables.committer import Committer
from pagedkv.tables.inputs import HOST_ONLY, check_rows_given, step_inputs
from pagedkv.tables.sizes import Sizes, bucket, decode_words
from pagedkv.tables.step import Step
from pagedkv.tables.step_kernels import Staging

__all__ = ["CapturedStep"]


class CapturedStep:
    """A step whose copy and kernels can be captured: fixed addresses, fixed sizes, a private buffer.

    Call `enqueue(stream)` while the consumer's graph is captured. Then, for each replay: `pack(...)`,
    launch the graph, and `mark_replayed(stream)`, which is what lets the next `pack` wait for the copy.
    Between `pack` and `mark_replayed` the table takes no other step, and maps no slots outside of one
    (`compute_slot_mapping`, `EncoderSlotMapping`) but into a graph that is being captured.
    A replay has its own stream: where the table was last committed on another one, let the replay's
    stream wait for that step's `ready` event first.

    Parameters
    ----------
    committer : Committer
    num_reqs_padded, num_tokens_padded : int
        Sizes that every replay hands out, padding included.
    max_new_blocks : int, optional
        Blocks (and changed ranges) that one replay carries at most, over all groups; one per request
        and group where None.
    out : int
        Output set.
    """

    def __init__(
        self,
        committer: Committer,
        num_reqs_padded: int,
        num_tokens_padded: int,
        max_new_blocks: int | None,
        out: int,
    ) -> None:
        geometry = committer.geometry
        self.num_reqs_padded = check_int("num_reqs_padded", num_reqs_padded, 0, geometry.max_num_reqs)
        self.num_tokens_padded = check_int(
            "num_tokens_padded", num_tokens_padded, 0, geometry.max_num_batched_tokens
        )
        outputs = committer.output_set(out)
        words = bucket(decode_words(geometry.max_num_reqs, len(geometry.specs), max_new_blocks))
        self._committer, self._out = committer, out
        self._buffer = committer.backend.host_buffer(words)
        self._staging = Staging(committer.backend, words)
        gather = geometry.max_num_reqs if committer.is_stable else 0
        sizes = Sizes.of(Sizes(words, num_tokens_padded, gather, True).key(out))
        self._awaits_replay = False
        # Binding and compiling must not happen inside the consumer's capture.
        self._run = committer.kernels.run(self._buffer, self._staging, sizes, outputs, HOST_ONLY)
        committer.backend.compile()

    def is_of(self, table: Any) -> bool:
        """Whether a `MultiGroupBlockTable` has made it."""
        return getattr(table, "_committer", None) is self._committer

    def enqueue(self, stream: Any = None) -> None:
        """Enqueue the copy and the kernels on a stream, which may be capturing."""
        backend = self._committer.backend
        with backend.activate():
            self._run(backend.stream(stream))

    def pack(
        self, num_reqs: int, query_start_loc: Any, num_computed_tokens: Any, *, rows: Any = None
    ) -> Step:
        """Write the next replay's step into the private buffer, once its last copy has run.

        Arguments as `MultiGroupBlockTable.commit`, on the host; positions are formed on the device.

        Raises
        ------
        PagedKVError
            The last packed step was not replayed, or `mark_replayed` was not called.
        CapacityError
            The step has more requests or new blocks than the capture holds; nothing changed.
        ValueError, TypeError
            As `commit`, or more tokens than the capture holds; nothing changed.
        """
        if self._awaits_replay:
            raise PagedKVError("captured step must be replayed, and mark_replayed called, before pack")
        if check_int("num_reqs", num_reqs) > self.num_reqs_padded:
            raise CapacityError(
                f"num_reqs must be at most the captured {self.num_reqs_padded}, got {num_reqs}"
            )
        committer = self._committer
        check_rows_given(rows, stable=committer.is_stable)
        inputs = step_inputs(committer.backend, num_reqs, query_start_loc, num_computed_tokens, None, rows)
        if inputs.device_key:
            raise TypeError("a captured step's inputs must be host arrays, which travel in its own buffer")
        committer.backend.wait_for(self._buffer.event_id)
        key, num_tokens = committer.pack(
            self._buffer, inputs, num_reqs, self.num_reqs_padded, self.num_tokens_padded, self._out
        )
        if key < 0:
            raise CapacityError(
                f"captured step must fit {self._buffer.words.size} words, got {-key} "
                "(raise max_new_blocks, or commit the new rows before)"
            )
        self._awaits_replay = True
        committer.hold(self)
        outputs = committer.outputs[self._out]
        return Step(
            outputs, self._buffer.event, num_reqs, self.num_reqs_padded, num_tokens, self.num_tokens_padded
        )

    def mark_replayed(self, stream: Any = None) -> None:
        """Say that the graph was launched on `stream` after `pack`.

        Raises
        ------
        PagedKVError
            Nothing was packed since the last replay.
        """
        if not self._awaits_replay:
            raise PagedKVError("mark_replayed must follow a pack, got none since the last replay")
        backend = self._committer.backend
        self._committer.finish(self._buffer.event, backend.stream(stream).ptr)
        self._committer.pending = None
        self._awaits_replay = False
