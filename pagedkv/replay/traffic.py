"""Traffic: seeded, conversation-like requests with shared prefixes, for a replay without a trace.

Conversations start as a Poisson process. Each opens with one of a few system prompts (shared by all that
chose it), and each turn's prompt is everything said so far and a new message, so later turns repeat the
earlier ones' blocks. Message and output lengths are log-normal, one message in twenty brings a document.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pagedkv.replay.requests import HASH_BLOCK_SIZE, RequestsBuilder
from pagedkv.replay.traces import Trace
from pagedkv.specs import cdiv

__all__ = ["DEFAULT_NUM_REQUESTS", "generate_trace"]

DEFAULT_NUM_REQUESTS = 2_000

_CONVERSATIONS_PER_SECOND = 6.0
_MEAN_TURNS = 3.5
_MEAN_PAUSE_S = 15.0
_SYSTEM_PROMPT_BLOCKS = (2, 1, 4, 3)  # in hash blocks; the first is the most popular
_SYSTEM_PROMPT_SHARES = (0.5, 0.25, 0.15, 0.1)
_MEDIAN_MESSAGE, _MEDIAN_OUTPUT, _MEDIAN_DOCUMENT = 150, 150, 4_000
_DOCUMENT_SHARE = 0.05
_LONGEST_PROMPT = 32_000


@dataclass
class _Conversation:
    """One conversation between two of its turns."""

    number: int
    system_prompt: int
    prompt_len: int
    turns_left: int
    turn: int = field(default=0)

    def hash_names(self) -> list[tuple[int, ...]]:
        """One name per block of the prompt: equal leading names, equal tokens."""
        shared = _SYSTEM_PROMPT_BLOCKS[self.system_prompt]
        full = self.prompt_len // HASH_BLOCK_SIZE
        names: list[tuple[int, ...]] = [(self.system_prompt, block) for block in range(shared)]
        names += [(self.number, block, -1) for block in range(shared, full)]
        # a partial last block is named by its turn: the next turn's block of that number holds more
        return names + [(self.number, full, self.turn)] * (cdiv(self.prompt_len, HASH_BLOCK_SIZE) - full)


def generate_trace(num_requests: int = DEFAULT_NUM_REQUESTS, seed: int = 0) -> Trace:
    """Generate `num_requests` requests; equal seeds give equal traces."""
    rng = np.random.default_rng(seed)
    builder = RequestsBuilder()
    names: dict[tuple[int, ...], int] = {}
    for arrival, conversation in _turns(rng, num_requests):
        output_len = _length(rng, _MEDIAN_OUTPUT, 0.9)
        hash_ids = [names.setdefault(name, len(names)) for name in conversation.hash_names()]
        builder.add(arrival, conversation.prompt_len, output_len, hash_ids)
        conversation.prompt_len += output_len + _message(rng)
        conversation.turn += 1
    return Trace(builder.build(), f"built-in traffic (seed {seed})", "generated")


def _turns(rng: np.random.Generator, num_requests: int) -> Iterator[tuple[float, _Conversation]]:
    """Yield (arrival, conversation) in order of arrival; the caller moves the conversation on."""
    opening, number = 0.0, 0
    waiting: list[tuple[float, int, _Conversation]] = []
    for _ in range(num_requests):
        while not waiting or opening <= waiting[0][0]:
            heapq.heappush(waiting, (opening, number, _opened(rng, number)))
            opening, number = opening + rng.exponential(1 / _CONVERSATIONS_PER_SECOND), number + 1
        arrival, _, conversation = heapq.heappop(waiting)
        yield arrival, conversation
        conversation.turns_left -= 1
        if conversation.turns_left > 0 and conversation.prompt_len <= _LONGEST_PROMPT:
            later = arrival + 2.0 + rng.exponential(_MEAN_PAUSE_S)
            heapq.heappush(waiting, (later, conversation.number, conversation))


def _opened(rng: np.random.Generator, number: int) -> _Conversation:
    system = int(rng.choice(len(_SYSTEM_PROMPT_SHARES), p=_SYSTEM_PROMPT_SHARES))
    prompt_len = _SYSTEM_PROMPT_BLOCKS[system] * HASH_BLOCK_SIZE + _message(rng)
    return _Conversation(number, system, prompt_len, int(rng.geometric(1 / _MEAN_TURNS)))


def _message(rng: np.random.Generator) -> int:
    document = _length(rng, _MEDIAN_DOCUMENT, 0.8) if rng.random() < _DOCUMENT_SHARE else 0
    return _length(rng, _MEDIAN_MESSAGE, 1.0) + document


def _length(rng: np.random.Generator, median: int, sigma: float) -> int:
    return 1 + int(rng.lognormal(np.log(median), sigma))
