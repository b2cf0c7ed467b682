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
    address : int
        Address of the memory, for the copy.
    memory : object
        Keeps pinned memory alive.
    """

    words: npt.NDArray[np.int32]
    event: Any
    address: int = 0
    memory: Any = None
    graphs: dict[Any, Any] = field(default_factory=dict)
