"""GraphSizes: which captured CUDA graph a batch runs in, and how far it is padded for it."""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from pagedkv.checks import check_int

__all__ = ["GraphMode", "GraphShape", "GraphSizes"]


class GraphMode(Enum):
    """What of a model's forward pass runs in a CUDA graph."""

    NONE = 0
    """Nothing: the batch runs as it is."""

    PIECEWISE = 1
    """All but attention: tokens are padded, requests are not."""

    FULL = 2
    """The whole pass: tokens and requests are padded."""


class GraphShape(NamedTuple):
    """Sizes that a graph is captured for, or that a batch without one has; a key for a dict of graphs.

    Parameters
    ----------
    mode : GraphMode
    num_tokens_padded : int
        Tokens; with NONE the batch's own.
    num_reqs_padded : int, optional
        Requests with FULL; otherwise None, requests are not padded.
    uniform_query_len : int, optional
        Tokens of every request, where the graph takes uniform batches only.
    """

    mode: GraphMode
    num_tokens_padded: int
    num_reqs_padded: int | None = None
    uniform_query_len: int | None = None


class GraphSizes:
    """The shapes that graphs are captured for, and the one that each batch runs in.

    A batch is uniform where each request has `uniform_query_len` tokens: 1 when decoding, more when draft
    tokens are verified. Uniform batches run in full graphs of their own; all others, and uniform ones that
    are too large for those, run in `mixed` mode.

    Parameters
    ----------
    capture_sizes : iterable of int
        Numbers of tokens to capture, in any order. Sizes above `max_num_tokens` are left out, as no buffer
        holds them. Empty: nothing is captured.
    max_num_reqs, max_num_tokens : int
        Most requests and tokens of a batch.
    uniform_query_len : int, optional
        Tokens of each request of a uniform batch. Their sizes are the multiples of it among
        `capture_sizes`. None: uniform batches run as all others.
    mixed : GraphMode
        FULL graphs take batches of any query lengths, PIECEWISE graphs too, with attention outside; NONE,
        only uniform batches run in graphs.

    Raises
    ------
    ValueError
        A size out of range, or no multiple of `uniform_query_len` among `capture_sizes`.
    TypeError
        A size is no int, or `mixed` no GraphMode.

    Examples
    --------
    >>> sizes = GraphSizes([1, 2, 4, 8], max_num_reqs=6, max_num_tokens=64)
    >>> sizes.dispatch(num_reqs=3, num_tokens=3, max_query_len=1)[1:]
    (4, 4, 1)
    >>> sizes.dispatch(num_reqs=3, num_tokens=7, max_query_len=5)[:2]
    (<GraphMode.PIECEWISE: 1>, 8)
    >>> sizes.dispatch(num_reqs=3, num_tokens=50, max_query_len=40)[:2]
    (<GraphMode.NONE: 0>, 50)
    """

    def __init__(
        self,
        capture_sizes: Iterable[int],
        max_num_reqs: int,
        max_num_tokens: int,
        *,
        uniform_query_len: int | None = 1,
        mixed: GraphMode = GraphMode.PIECEWISE,
    ) -> None:
        self.max_num_reqs = check_int("max_num_reqs", max_num_reqs, 1)
        self.max_num_tokens = check_int("max_num_tokens", max_num_tokens, 1)
        if uniform_query_len is not None:
            uniform_query_len = check_int("uniform_query_len", uniform_query_len, 1, self.max_num_tokens)
        if not isinstance(mixed, GraphMode):
            raise TypeError(f"mixed must be a GraphMode, got {type(mixed).__name__}")
        self.uniform_query_len = uniform_query_len
        self.mixed = mixed
        sizes = _sorted_sizes(capture_sizes, self.max_num_tokens)
        uniform = _uniform_shapes(sizes, uniform_query_len, self.max_num_reqs)
        others = _mixed_shapes(sizes, mixed, self.max_num_reqs)
        # Stable: of two shapes with as many tokens the mixed one, which may need more memory, comes first.
        self._captures = tuple(sorted(others + uniform, key=lambda shape: -shape.num_tokens_padded))
        # By requests, as a uniform batch has a fixed number of tokens for each; and by tokens.
        self._uniform = _next_shapes(
            {shape.num_tokens_padded // (uniform_query_len or 1): shape for shape in uniform}
        )
        self._mixed = _next_shapes({shape.num_tokens_padded: shape for shape in others})

    def captures(self) -> tuple[GraphShape, ...]:
        """Return every shape to capture, largest first, so that smaller ones reuse its memory."""
        return self._captures

    def dispatch(self, num_reqs: int, num_tokens: int, max_query_len: int) -> GraphShape:
        """Return the smallest captured shape that holds a batch; mode NONE where none does.

        Parameters
        ----------
        num_reqs, num_tokens, max_query_len : int
            Requests of the batch, their tokens in all, and the most that one of them has or may have.

        Returns
        -------
        GraphShape
            One of `captures()`, no smaller than the batch; or NONE with the batch's own `num_tokens`.

        Raises
        ------
        ValueError
            A number out of range.
        TypeError
            A number is no int.
        """
        if not (
            type(num_reqs) is type(num_tokens) is type(max_query_len) is int
            and 0 <= num_reqs <= self.max_num_reqs
            and 0 <= num_tokens <= self.max_num_tokens
            and max_query_len >= 0
        ):
            num_reqs = check_int("num_reqs", num_reqs, 0, self.max_num_reqs)
            num_tokens = check_int("num_tokens", num_tokens, 0, self.max_num_tokens)
            max_query_len = check_int("max_query_len", max_query_len)
        if (
            max_query_len == self.uniform_query_len
            and num_tokens == num_reqs * max_query_len
            and num_reqs < len(self._uniform)
        ):
            return self._uniform[num_reqs]
        at = num_tokens
        if num_reqs > num_tokens and self.mixed is GraphMode.FULL:
            at = num_reqs  # some have no tokens, and a full graph has no more requests than tokens
        if at < len(self._mixed):
            return self._mixed[at]
        return GraphShape(GraphMode.NONE, num_tokens)


def _sorted_sizes(capture_sizes: Iterable[int], max_num_tokens: int) -> list[int]:
    checked = {check_int("capture_sizes", size, 1) for size in capture_sizes}
    return sorted(size for size in checked if size <= max_num_tokens)


def _uniform_shapes(sizes: list[int], query_len: int | None, max_num_reqs: int) -> list[GraphShape]:
    if query_len is None or not sizes:
        return []
    multiples = [size for size in sizes if size % query_len == 0]
    if not multiples:
        raise ValueError(
            f"capture_sizes must hold a multiple of uniform_query_len {query_len}, got {sizes} "
            "(add multiples, or pass uniform_query_len=None)"
        )
    most = max_num_reqs * query_len
    # One size may be larger than any batch; a second one would never be run.
    used = [size for i, size in enumerate(multiples) if i == 0 or multiples[i - 1] < most]
    return [
        GraphShape(GraphMode.FULL, size, min(size // query_len, max_num_reqs), query_len) for size in used
    ]


def _mixed_shapes(sizes: list[int], mode: GraphMode, max_num_reqs: int) -> list[GraphShape]:
    if mode is GraphMode.NONE:
        return []
    full = mode is GraphMode.FULL
    return [GraphShape(mode, size, min(size, max_num_reqs) if full else None) for size in sizes]


def _next_shapes(shapes: dict[int, GraphShape]) -> list[GraphShape]:
    """List for each number up to the largest key the shape of the smallest key that holds it."""
    found: list[GraphShape] = []
    for size in sorted(shapes):
        found += [shapes[size]] * (size + 1 - len(found))
    return found
