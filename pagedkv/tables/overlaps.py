"""Overlaps: device inputs that lie in what the kernels that read them write.

Inputs on the device are read in place, by threads and groups that run in any order: what one writes, others
may read too late. So slot_mapping, which reads every input, must be given none that lies in its outputs.
gather_rows runs before it and state_indices after it; both read num_computed_tokens alone.

Two inputs may be the step's own: slot_mapping overwrites each element of query_start_loc and positions with
what it was given for that element, and reads nothing behind them that it pads. Where they are given from a
later element on, each value moves, and may be overwritten before it was read.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkv.tables.pack import OUT

if TYPE_CHECKING:
    from pagedkv.tables.output_set import OutputSet

__all__ = ["Overlaps"]

_OF_STEP = ("query_start_loc", "num_computed_tokens", "positions")
_COMPUTED = ("num_computed_tokens",)


class _Span(NamedTuple):
    start: int  # addresses
    end: int
    name: str
    readers: tuple[str, ...]  # inputs that are still read when it is written


class Overlaps:
    """Where the kernels of one output set write, and which inputs must not lie there.

    Parameters
    ----------
    outputs : OutputSet
        Of a backend on a device.
    """

    def __init__(self, outputs: "OutputSet") -> None:
        states, shown = outputs.states, outputs.shown
        written = [
            ("slot_mapping", outputs.slots, _OF_STEP),
            ("positions", outputs.positions, _OF_STEP),
            ("seq_lens", outputs.seq_lens, _OF_STEP),
            ("query_start_loc", outputs.query_start_loc, _OF_STEP),
            ("token_to_req_indices", outputs.token_reqs, _OF_STEP),
            ("local_seq_lens", outputs.local_seq_lens, _OF_STEP),
            ("state_indices", states.all_indices, _COMPUTED),
            ("initial_state_indices", states.all_initial, _COMPUTED),
            ("state_columns", states.all_columns, _COMPUTED),
        ]
        if outputs.is_stable:  # else apply_writes alone writes tables, and reads no input
            written += [("block_table", shown.tables, _COMPUTED)]
            written += [("kernel_block_table", shown.kernel_tables, _COMPUTED)]
        self._spans = sorted(
            _Span(array.data.ptr, array.data.ptr + array.nbytes, name, readers)
            for name, array, readers in written
        )
        self._starts = [span.start for span in self._spans]
        self._out = int(outputs.seen[OUT])

    def refuse_of_step(self, device: tuple[Any, Any, Any]) -> None:
        """Raise ValueError where query_start_loc, num_computed_tokens or positions would be overwritten.

        None stands for one that is on the host, which the step's copy carries.
        """
        for name, array in zip(_OF_STEP, device, strict=True):
            span = None if array is None else self._find(array.data.ptr)
            if span is None or name not in span.readers:
                continue
            if name != span.name:
                self._refuse(name, span)
            if array.data.ptr != span.start:
                raise ValueError(
                    f"{name} must start where those that this step writes do, or lie elsewhere, got those of "
                    f"output set {self._out} from byte {array.data.ptr - span.start} on (give a copy, or "
                    "alternate between two sets: outputs(2), out=)"
                )

    def refuse_of_slots(self, device: dict[str, Any]) -> None:
        """Raise ValueError where an input of a mapping apart from a step lies in the slots that it writes.

        It writes nothing else.
        """
        for name, array in device.items():
            span = None if array is None else self._find(array.data.ptr)
            if span is not None and span.name == "slot_mapping":
                self._refuse(name, span)

    def _find(self, address: int) -> _Span | None:
        at = bisect_right(self._starts, address) - 1
        return self._spans[at] if at >= 0 and address < self._spans[at].end else None

    def _refuse(self, name: str, span: _Span) -> None:
        raise ValueError(
            f"{name} must not lie in the {span.name} that this call writes, got that of output "
            f"set {self._out} (alternate between two sets: outputs(2), out=)"
        )
