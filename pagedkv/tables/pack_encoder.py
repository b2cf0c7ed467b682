"""The encoder's tokens as a step of their own: one group, and every request from position 0 on."""

from dataclasses import replace

import numpy as np

from pagedkv.checks import IntArray
from pagedkv.kernels import _layout as layout
from pagedkv.specs import ContextParallel
from pagedkv.tables.geometry import Geometry

__all__ = ["encoder_geometry", "encoder_words", "pack_encoder"]


def encoder_geometry(geometry: Geometry, group: int, max_num_tokens: int) -> Geometry:
    """Describe one group as a table set of its own: its stored rows, its tokens those of the encoder."""
    spec = geometry.specs[group]
    place = [layout.CP_WORLD, layout.CP_RANK, layout.CP_INTERLEAVE]
    own = replace(spec, kernel_views=(), max_num_encoder_tokens=None)
    found = Geometry.build(
        [own],
        [geometry.widths[group]],
        geometry.max_num_reqs,
        max_num_tokens,
        [spec.max_num_encoder_tokens or 0],
        ContextParallel(*geometry.groups[group, place].tolist()),
    )
    found.groups[0, layout.TABLE_OFFSET] = geometry.table_offsets[group]
    return replace(found, table_offsets=(0, 0))  # it stores nothing itself


def encoder_words(num_reqs: int) -> int:
    """Words that `pack_encoder` writes at most."""
    return layout.HEADER_WORDS + 3 * (num_reqs + 4)


def pack_encoder(
    words: IntArray, starts: IntArray, lines: IntArray | None, num_reqs_fill: int, fill: int
) -> int:
    """Write a step that starts at position 0 of each request; returns how many words it takes."""
    num_reqs = starts.size - 1
    header = words[: layout.HEADER_WORDS]
    header[:] = 0
    header[layout.NUM_REQS], header[layout.NUM_REQS_FILL] = num_reqs, num_reqs_fill
    header[layout.NUM_TOKENS], header[layout.NUM_TOKENS_FILL] = starts[num_reqs], fill
    header[layout.POSITIONS] = header[layout.ROWS] = -1
    end = layout.HEADER_WORDS
    sections = [(layout.QUERY_START_LOC, starts), (layout.NUM_COMPUTED_TOKENS, np.zeros(num_reqs, np.int32))]
    if lines is not None:
        sections.append((layout.ROWS, lines))
    for word, values in sections:
        header[word] = end
        words[end : end + values.size] = values
        end += -(-values.size // 4) * 4
    return end
