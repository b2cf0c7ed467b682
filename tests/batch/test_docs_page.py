"""The examples of docs/batch.md give what their comments say; the engine's loop does so on every backend."""

import pytest

from pagedkv import KVCacheManager
from pagedkv.batch import InputBatch
from tests.docs_examples import examples_of, run_example

EXAMPLES = examples_of("batch.md")
LOOPS = [example for example in EXAMPLES if "while waiting or running" in example]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_gives_what_it_says(example, monkeypatch):
    monkeypatch.setenv("PAGEDKV_BACKEND", "numpy")
    run_example(example)


@pytest.mark.parametrize("example", LOOPS, ids=["loop"] * len(LOOPS))
def test_the_loop_runs_on_every_backend_and_meets_all_that_it_shows(example, backend, monkeypatch):
    """It preempts, resumes, hits the prefix cache and pads, or those parts of it would go untested."""
    seen = {"preempted": 0, "resumed": 0, "hit": 0, "padded": 0}

    def update(batch, output):
        seen["preempted"] += len(output.preempted)
        seen["resumed"] += len(output.resumed.req_ids)
        return real_update(batch, output)

    def match_prefix(manager, seq):
        hit = real_match(manager, seq)
        seen["hit"] += hit
        return hit

    def commit(batch, **padding):
        metadata = real_commit(batch, **padding)
        seen["padded"] += metadata.batch.num_reqs - metadata.batch.num_reqs_unpadded
        return metadata

    real_update, real_commit, real_match = InputBatch.update, InputBatch.commit, KVCacheManager.match_prefix
    monkeypatch.setattr(InputBatch, "update", update)
    monkeypatch.setattr(InputBatch, "commit", commit)
    monkeypatch.setattr(KVCacheManager, "match_prefix", match_prefix)
    monkeypatch.setenv("PAGEDKV_BACKEND", backend)

    names = run_example(example)

    assert names["table"].backend == backend
    assert set(names["num_outputs"].values()) == {names["NUM_OUTPUTS"]}
    assert names["manager"].num_free_blocks == names["manager"].pool.num_blocks - 1
    assert min(seen.values()) > 0, seen
