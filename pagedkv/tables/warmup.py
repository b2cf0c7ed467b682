"""warmup: capture ahead what steps will launch, so that no step pays for it."""

from collections.abc import Iterable

from pagedkv.tables.committer import Committer
from pagedkv.tables.sizes import Sizes, bucket, decode_words

__all__ = ["warmup"]


def warmup(committer: Committer, num_tokens: Iterable[int], max_new_blocks: int | None) -> int:
    """Capture, for every ring buffer and output set, the sizes of decode steps and of `num_tokens`."""
    if not committer.graphs.in_use:
        return 0
    geometry = committer.geometry
    most_words = min(
        decode_words(geometry.max_num_reqs, len(geometry.specs), max_new_blocks),
        committer.staging.words.size,
    )
    gathers = {0}
    if committer.is_stable:
        gathers |= {1, geometry.max_num_reqs}
    for words in _buckets(most_words):
        for tokens in {0, geometry.max_num_reqs, *num_tokens}:
            for gather in gathers:
                _capture(committer, Sizes(words, tokens, gather, False))
                _capture(committer, Sizes(words, tokens, gather, True))
    return sum(len(buffer.graphs) for buffer in committer.ring.buffers)


def _buckets(most: int) -> list[int]:
    sizes, words = [], 256
    while words < bucket(most):
        sizes.append(words)
        words = bucket(words + 1)
    return [*sizes, words]


def _capture(committer: Committer, sizes: Sizes) -> None:
    for out in range(len(committer.outputs)):
        for buffer in committer.ring.buffers:
            fits = bucket(sizes.words) <= buffer.words.size
            if fits and committer.graphs.in_use and sizes.key(out) not in buffer.graphs:
                committer.capture(buffer, sizes.key(out), out)
