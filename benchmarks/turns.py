"""Contenders in turns: chunks of steps one after the other, because the clock of a shared machine wanders."""

import gc
import time

import numpy as np

CHUNK = 40


class Steps:
    """Arguments of a contender's steps, one after the other, with room in every row."""

    def __init__(self, contender, traffic):
        self.contender, self.traffic, self.num = contender, traffic, 0

    def next(self):
        if self.num % self.traffic.steps_until_full == 0:
            self.contender.reset()
        self.num += 1
        return self.traffic.step(self.num - 1)


class Clock:
    """Microseconds of one contender's steps: until the call returns, and until the device is done.

    `arguments` returns those of the next step; it is called with the device busy, and not timed.
    """

    def __init__(self, contender, arguments, stream):
        self.contender, self.arguments, self.stream = contender, arguments, stream
        self.host, self.done = [], []

    def prepare(self):
        """Return the next step's arguments, with the device idle."""
        arguments = self.arguments()
        self.stream.synchronize()
        return arguments

    def run(self, rounds, *, keep=True):
        for _ in range(rounds):
            arguments = self.prepare()
            began = time.perf_counter()
            self.contender.step(*arguments)
            returned = time.perf_counter()
            self.stream.synchronize()
            finished = time.perf_counter()
            if keep:
                self.host.append(1e6 * (returned - began))
                self.done.append(1e6 * (finished - began))

    def figures(self):
        """Return median and 99th percentile of both, in microseconds."""
        return {
            "host_us_p50": round(float(np.median(self.host)), 2),
            "host_us_p99": round(float(np.percentile(self.host, 99)), 2),
            "done_us_p50": round(float(np.median(self.done)), 2),
            "done_us_p99": round(float(np.percentile(self.done, 99)), 2),
        }


def take_turns(clocks, benchmark, mine, *, slow=""):
    """Let all contenders run in chunks, a `slow` one in shorter ones; the fixture times steps of `mine`."""
    for clock in clocks.values():
        clock.run(CHUNK, keep=False)
    rounds = 1 if benchmark.disabled else 25 * CHUNK
    state = {"round": 0}

    def setup():
        if state["round"] % CHUNK == 0:
            for name, clock in clocks.items():
                clock.run(2 if benchmark.disabled else CHUNK // 8 if name == slow else CHUNK)
        state["round"] += 1
        return clocks[mine].prepare(), {}

    gc.disable()
    try:
        benchmark.pedantic(clocks[mine].contender.step, setup=setup, rounds=rounds)
    finally:
        gc.enable()
    for name, clock in clocks.items():
        benchmark.extra_info[name] = clock.figures()
