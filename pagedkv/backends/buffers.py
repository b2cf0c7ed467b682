"""HostBuffer: one staging buffer, with the event that says when it may be written again."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HostBuffer"]


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A staging buffer in host memory (pinned on a GPU backend).

    Parameters
    ----------
    words : int32 [num_words]
        The memory.
    event : event
        Recorded after the copy that reads the buffer; synchronize before writing again.
    event_id : int
        Its bare handle.
    address : int
        Address of the memory, for the copy.
    memory : object
        Keeps pinned memory alive.
    """

    words: npt.NDArray[np.int32]
    event: Any
    event_id: int
    address: int = 0
    memory: Any = None
    next: Any = None
    """The buffer that follows in the ring."""
    graphs: dict[int, Any] = field(default_factory=dict)
    """Captured steps of host inputs, by the key of their sizes."""
    device_graphs: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Captured steps that read device arrays, by their addresses and the key."""

    def drop_graphs(self) -> None:
        """Forget what was captured: the other end of the copy has moved."""
        self.graphs.clear()
        self.device_graphs.clear()
