"""Token ids are equal exactly where tags are."""

import numpy as np
from hypothesis import given, settings

from pagedkv.replay.contents import Contents
from pagedkv.replay.token_ids import TokenIds

from .runs import requests_of, traffic


def all_ids(requests):
    """(token id, tag) of every position of every request."""
    tokens, contents = TokenIds(requests), Contents(requests, 4096, 1)
    for request, (prompt, total) in enumerate(
        zip(requests.prompt_lens.tolist(), requests.total_lens.tolist(), strict=True)
    ):
        late = np.arange(prompt, total)
        ids = [*tokens.prompt(request).tolist(), *tokens.sampled(np.full_like(late, request), late).tolist()]
        _, tags = contents.runs(np.array([request]), np.array([0]), np.array([total]))
        yield from zip(ids, tags.tolist(), strict=True)


@settings(deadline=None, max_examples=40)
@given(traffic())
def test_ids_are_equal_exactly_where_contents_are(requests):
    pairs = set(all_ids(requests))

    assert len(pairs) == len({token for token, _ in pairs}) == len({tag for _, tag in pairs})


def test_ids_are_int32_and_a_prompt_has_one_each():
    tokens = TokenIds(requests_of((0.0, 700, 3, 1, 2), (0.0, 5, 0)))

    assert (tokens.prompt(0).dtype, tokens.prompt(0).shape, tokens.prompt(1).shape) == (
        np.int32,
        (700,),
        (5,),
    )
    assert tokens.sampled(np.array([0, 1]), np.array([700, 5])).dtype == np.int32
