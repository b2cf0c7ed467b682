"""Step: what one commit hands to the attention kernels, as views of persistent device arrays."""

from typing import Any

from pagedkv.tables.geometry import Geometry
from pagedkv.tables.kept import Kept
from pagedkv.tables.output_set import OutputSet

__all__ = ["Step"]


class Step:
    """Device views of one committed step; valid until the next commit into the same output set.

    Parameters
    ----------
    outputs : OutputSet
        The arrays behind the views.
    ready : event
        Done once the arrays hold this step's values; used again after `staging_depth` further commits.
    num_reqs, num_reqs_padded : int
        Requests of the step, and rows handed out; padding rows are NULL.
    num_tokens, num_tokens_padded : int
        Scheduled tokens, and slots, positions and requests of tokens handed out: PAD and 0 past the last
        token.
    """

    __slots__ = (
        "_num_tokens",
        "_num_tokens_padded",
        "num_reqs",
        "num_reqs_padded",
        "outputs",
        "ready",
    )

    def __init__(
        self,
        outputs: OutputSet,
        ready: Any,
        num_reqs: int,
        num_reqs_padded: int,
        num_tokens: int,
        num_tokens_padded: int,
    ) -> None:
        self.outputs = outputs
        self.ready = ready
        self.num_reqs = num_reqs
        self.num_reqs_padded = num_reqs_padded
        # As pack_step gives it: negative where only the device knows, and -1 where nothing is padded.
        self._num_tokens = num_tokens
        self._num_tokens_padded = num_tokens_padded

    @property
    def num_tokens(self) -> int | None:
        """Scheduled tokens; None where only the device knows (query_start_loc was a device array)."""
        return self._num_tokens if self._num_tokens >= 0 else None

    @property
    def num_tokens_padded(self) -> int:
        """Slots, positions and requests of tokens handed out: as asked for, else all that there may be."""
        if self._num_tokens_padded >= 0:
            return self._num_tokens_padded
        return self._num_tokens if self._num_tokens >= 0 else -self._num_tokens - 1

    @property
    def geometry(self) -> Geometry:
        """Shapes of the tables, and what the kernels know of each group; never changed."""
        return self.outputs.geometry

    @property
    def kept(self) -> Kept:
        """What rooms above keep with the output set, by padded sizes; it may be forgotten at any time."""
        return self.outputs.kept

    def resized(self, num_reqs_padded: int, num_tokens_padded: int) -> "Step":
        """Return the same step with less padding; nothing is done on the device."""
        sizes = (self.num_reqs, num_reqs_padded, self._num_tokens, num_tokens_padded)
        return Step(self.outputs, self.ready, *sizes)

    def block_table(self, group: int = 0) -> Any:
        """Block table in batch order, int32 [num_reqs_padded, width], in manager blocks."""
        return self.outputs.shown.block_table(group, self.num_reqs_padded)

    def kernel_block_table(self, group: int = 0, view: int = 0) -> Any:
        """Block table in a view's kernel blocks, int32 [num_reqs_padded, width * ratio]."""
        return self.outputs.shown.kernel_block_table(group, view, self.num_reqs_padded)

    def slot_mapping(self, group: int = 0) -> Any:
        """Slot of each token, int64 [num_tokens_padded]; PAD_SLOT_ID where nothing is written."""
        return self.outputs.slot_mapping(group, self.num_tokens_padded)

    @property
    def query_start_loc(self) -> Any:
        """Prefix sums of the query lengths, int32 [num_reqs_padded + 1]; the last value repeats."""
        return self.outputs.view("query_start_loc", self.num_reqs_padded + 1)

    @property
    def seq_lens(self) -> Any:
        """Computed plus scheduled tokens of each request, int32 [num_reqs_padded]; 0 in the padding."""
        return self.outputs.view("seq_lens", self.num_reqs_padded)

    def local_seq_lens(self, group: int = 0) -> Any:
        """Tokens of `seq_lens` that this context-parallel rank holds, int32 [num_reqs_padded].

        The same as `seq_lens` where the group is not sharded; 0 in the padding and for a negative length.
        """
        return self.outputs.line("local_seq_lens", group, self.num_reqs_padded)

    def state_indices(self, group: int) -> Any:
        """Blocks of the states that the step writes, int32 [num_reqs_padded, 1 + num_speculative_blocks].

        Of the last token's column ("align", "all") or of column 0 ("none"), then of one column behind it for
        each draft; NULL past the row's blocks and in the padding.

        Raises
        ------
        ValueError
            The group holds no states.
        """
        return self.outputs.states.indices(group, self.num_reqs_padded)

    def initial_state_indices(self, group: int) -> Any:
        """Block of the state before the step, int32 [num_reqs_padded]; NULL where nothing is computed yet.

        NULL in the padding as well; errors as `state_indices`.
        """
        return self.outputs.states.initial_indices(group, self.num_reqs_padded)

    def state_columns(self, group: int) -> Any:
        """Columns of a state group's table that the step touches, int32 [3, num_reqs_padded].

        Those of the last computed token (-1 = none), of the first and of the last scheduled one: no column
        but 0 in the mode "none", and -1, 0, 0 in the padding. Each of the three lines is contiguous, all
        together are not. Errors as `state_indices`.
        """
        return self.outputs.states.columns(group, self.num_reqs_padded)

    @property
    def token_to_req_indices(self) -> Any:
        """Batch row of each token, int32 [num_tokens_padded]; 0 in the padding."""
        return self.outputs.view("token_reqs", self.num_tokens_padded)

    @property
    def positions(self) -> Any:
        """Position of each token in its sequence, int64 [num_tokens_padded]; 0 in the padding."""
        return self.outputs.view("positions", self.num_tokens_padded)
