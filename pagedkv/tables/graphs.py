"""StepGraphs: a packed step goes out as one captured graph, or one by one where none can be captured."""

import warnings
from typing import Any

from pagedkv.backends.buffers import HostBuffer
from pagedkv.tables.inputs import HOST_ONLY, Inputs
from pagedkv.tables.output_set import OutputSet
from pagedkv.tables.sizes import Sizes
from pagedkv.tables.step_kernels import Staging, StepKernels

__all__ = ["StepGraphs"]

_MOST_DEVICE_GRAPHS = 256


class StepGraphs:
    """Captures and launches the graphs of one table set; each belongs to its ring buffer.

    Parameters
    ----------
    backend : backend
    kernels : StepKernels
    """

    def __init__(self, backend: Any, kernels: StepKernels) -> None:
        self._backend, self._kernels = backend, kernels
        self.in_use = backend.has_graphs

    def capture(self, buffer: HostBuffer, staging: Staging, key: int, outputs: OutputSet) -> None:
        """Capture a step of host inputs and the sizes of `key`, and keep it with its buffer."""
        run = self._kernels.run(buffer, staging, Sizes.of(key), outputs, HOST_ONLY)
        self._capture(run, buffer.graphs, key)

    def send(
        self,
        buffer: HostBuffer,
        staging: Staging,
        key: int,
        outputs: OutputSet,
        inputs: Inputs,
        stream: Any,
    ) -> None:
        """Enqueue a packed step, and capture it where that has not been done.

        A graph holds the addresses of device inputs. Arrays that come once go out one by one, so that only
        those that come again are captured.
        """
        run = self._kernels.run(buffer, staging, Sizes.of(key), outputs, inputs.device)
        graphs: dict[Any, Any] = buffer.device_graphs if inputs.device_key else buffer.graphs
        at = (key, *inputs.device_key) if inputs.device_key else key
        if not self.in_use or (inputs.device_key and at not in graphs):
            self._remember(graphs, at)
            run(stream)
        elif graphs.get(at) is not None or self._capture(run, graphs, at):
            self._backend.launch(graphs[at].graphExec, stream.ptr)
        else:
            run(stream)

    def _capture(self, run: Any, graphs: dict[Any, Any], at: Any) -> bool:
        try:
            graphs[at] = self._backend.capture(run)
        except RuntimeError as error:  # the driver's no
            self.in_use = False
            warnings.warn(f"steps are enqueued one by one, since none can be captured: {error}", stacklevel=6)
            return False
        return True

    def _remember(self, graphs: dict[Any, Any], at: Any) -> None:
        # Inputs that came once leave no graph; where many came twice, some graph may be in flight.
        if len(graphs) >= _MOST_DEVICE_GRAPHS:
            for key in [key for key, graph in graphs.items() if graph is None]:
                del graphs[key]
        if len(graphs) >= _MOST_DEVICE_GRAPHS:
            self._backend.synchronize()
            graphs.clear()
        graphs[at] = None
