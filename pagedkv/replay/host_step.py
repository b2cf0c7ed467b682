"""HostStep: a committed step as the oracle reads it, in host arrays."""

from typing import Any

from pagedkv.tables.step import Step

__all__ = ["HostStep"]


class HostStep:
    """Arrays of one step on the host: the step's own on NumPy, copies that are made once elsewhere.

    Valid until the next commit; reading waits for the device.

    Parameters
    ----------
    step : Step
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._arrays: dict[tuple[str, tuple[int, ...]], Any] = {}

    def block_table(self, group: int) -> Any:
        """Block table in batch order, int32 [num_reqs, width]."""
        return self._fetched("block_table", group)

    def kernel_block_table(self, group: int, view: int) -> Any:
        """Block table in a view's kernel blocks, int32 [num_reqs, width * ratio]."""
        return self._fetched("kernel_block_table", group, view)

    def slot_mapping(self, group: int) -> Any:
        """Slot of each scheduled token, int64 [num_tokens]."""
        return self._fetched("slot_mapping", group)

    @property
    def seq_lens(self) -> Any:
        """Computed and scheduled tokens of each request, int32 [num_reqs]."""
        return _on_host(self._step.seq_lens)

    @property
    def positions(self) -> Any:
        """Position of each scheduled token, int64 [num_tokens]."""
        return _on_host(self._step.positions)

    def _fetched(self, name: str, *where: int) -> Any:
        array = self._arrays.get((name, where))
        if array is None:
            array = self._arrays[name, where] = _on_host(getattr(self._step, name)(*where))
        return array


def _on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array
