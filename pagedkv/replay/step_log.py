"""StepLog: a number per step for each thing that the report and the plot show."""

from time import perf_counter

import numpy as np
import numpy.typing as npt

__all__ = ["PHASES", "StepLog"]

PHASES = ("schedule", "allocate", "rows", "commit", "verify", "finish")
"""What a step's host time is divided into, in order."""

_COLUMNS = (
    "time",  # simulated seconds at the step's end
    "num_reqs",
    "num_tokens",
    "utilization",  # NaN where nothing is held
    "utilization_reserved",
    "utilization_pow2",
    "h2d_copies",  # the most of any rank
    "h2d_bytes",  # mean over the ranks
    "full_upload_bytes",
)


class StepLog:
    """Per-step values in one growing array, and a stopwatch for the phases of the current step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._values = np.zeros((1024, len(_COLUMNS)))
        self._phase_us = np.zeros((1024, len(PHASES)), np.float32)
        self._elapsed = dict.fromkeys(PHASES, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """Start a step's stopwatch."""
        self._elapsed = dict.fromkeys(PHASES, 0.0)
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = perf_counter()
        self._elapsed[phase] += now - self._last
        self._last = now

    def record(self, **values: float) -> None:
        """Close the step with a value for each column."""
        if self.num_steps == len(self._values):
            self._values = np.concatenate((self._values, np.zeros_like(self._values)))
            self._phase_us = np.concatenate((self._phase_us, np.zeros_like(self._phase_us)))
        self._values[self.num_steps] = [values[name] for name in _COLUMNS]
        self._phase_us[self.num_steps] = [seconds * 1e6 for seconds in self._elapsed.values()]
        self.num_steps += 1

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """One value per step, float64 [num_steps]."""
        return self._values[: self.num_steps, _COLUMNS.index(name)]

    def mean(self, name: str) -> float:
        """Mean over the steps in which there was something to measure; 0 where there was none."""
        values = self.column(name)
        values = values[~np.isnan(values)]
        return float(values.mean()) if len(values) else 0.0

    def host_us(self) -> dict[str, dict[str, float]]:
        """Microseconds per step, p50, p99 and mean, by phase and for the whole step."""
        phases = self._phase_us[: self.num_steps].astype(np.float64)
        table = dict(zip(PHASES, phases.T, strict=True)) | {"total": phases.sum(axis=1)}
        return {name: _quantiles(values) for name, values in table.items()}


def _quantiles(values: npt.NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "mean": round(float(values.mean()), 2)}
