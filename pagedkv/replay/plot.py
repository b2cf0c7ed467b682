"""Plot: utilisation, running sequences and bytes per step over simulated time, as a PNG."""

from importlib.util import find_spec

import numpy as np

from pagedkv.replay.errors import ReplayInputError
from pagedkv.replay.step_log import StepLog

__all__ = ["check_plot_available", "write_plot"]

_MAX_POINTS = 2_000


def check_plot_available() -> None:
    """Raise ReplayInputError where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ReplayInputError("--plot needs matplotlib, which is not installed (pip install pagedkv[plot])")


def write_plot(path: str, log: StepLog, title: str) -> None:
    """Write the figure; OSError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state
    from matplotlib.figure import Figure

    steps = np.unique(np.linspace(0, max(log.num_steps - 1, 0), _MAX_POINTS).astype(np.int64))[
        : log.num_steps
    ]
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    time = log.column("time")[steps]
    for name, label in _SHARES.items():
        top.plot(time, log.column(name)[steps], label=label, linewidth=1)
    top.set(ylabel="written / held slots", ylim=(0, 1.02))
    top.set_title(title, parse_math=False)  # a name is no formula
    middle.plot(time, log.column("num_reqs")[steps], color="tab:green", linewidth=1)
    middle.set(ylabel="running sequences")
    for name, label in _BYTES.items():
        bottom.plot(time, log.column(name)[steps], label=label, linewidth=1)
    bottom.set(ylabel="bytes per step", xlabel="simulated time (s)")
    if log.num_steps:
        bottom.set_yscale("log")
    top.legend(loc="lower right")
    bottom.legend(loc="best")
    figure.savefig(path, format="png", dpi=120)


_SHARES = {
    "utilization": "paged",
    "utilization_pow2": "next power of two",
    "utilization_reserved": "model length reserved",
}
_BYTES = {"h2d_bytes": "committed", "full_upload_bytes": "rows sent whole"}
