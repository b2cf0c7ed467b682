"""The main job: replay request traces through the library, and verify every token's place."""

from pagedkv.replay.job import replay as replay
from pagedkv.replay.options import ReplayOptions as ReplayOptions
from pagedkv.replay.traces import read_trace as read_trace
from pagedkv.replay.traffic import generate_trace as generate_trace

__all__ = ["ReplayOptions", "generate_trace", "read_trace", "replay"]
