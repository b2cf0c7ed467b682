"""warmup: capture ahead what steps will launch, so that no step pays for it."""

from collections.abc import Iterable

from pagedkv.kernels._layout import WRITE_WORDS
from pagedkv.tables.committer import Committer, Sizes, decode_words, token_bucket
from pagedkv.tables.pack import Mode
from pagedkv.tables.staging import bucket

__all__ = ["warmup"]


def warmup(committer: Committer, num_tokens: Iterable[int], max_new_blocks: int | None) -> int:
    """Capture, for every ring buffer and output set, the sizes of decode steps and of `num_tokens`."""
    if not committer.use_graphs:
        return 0
    geometry = committer.geometry
    most_words = min(
        decode_words(geometry.max_num_reqs, len(geometry.specs), max_new_blocks),
        committer.staging.words.size,
    )
    tokens = {token_bucket(n) for n in (1, geometry.max_num_reqs, *num_tokens)}
    gathers = {0}
    if committer.mode is Mode.STABLE:
        gathers |= {token_bucket(1), token_bucket(geometry.max_num_reqs)}
    total = 0
    for words in _buckets(most_words):
        for size in tokens:
            for gather in gathers:
                for writes in (False, True):
                    total += _capture(committer, Sizes(words, size, gather, writes))
    return total


def _buckets(most: int) -> list[int]:
    sizes, words = [], 256
    while words < bucket(most):
        sizes.append(words)
        words = bucket(words + WRITE_WORDS)
    return [*sizes, words]


def _capture(committer: Committer, sizes: Sizes) -> int:
    device = (None, None, None)
    count = 0
    for out in range(len(committer.outputs)):
        for buffer in committer.ring.buffers:
            if sizes.words <= buffer.words.size:
                key = (sizes, out, 0, 0, 0)
                if key not in buffer.graphs:
                    buffer.graphs[key] = committer.capture(buffer, sizes, out, device)
                count += 1
    return count
