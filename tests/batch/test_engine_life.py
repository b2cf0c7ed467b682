"""Whole lives of an engine, against a model that knows for every token where its KV lies.

PAGEDKV_LIFE_EXAMPLES sets the number of runs of each set-up: thousands for a night.
"""

import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from pagedkv import PagedKVError

from . import life_commit, life_drafts, life_split, life_update
from .engine_life import EngineMachine, live
from .life_faults import ALONE, FAULTS
from .life_world import SETUPS

SETTINGS = settings(
    max_examples=int(os.environ.get("PAGEDKV_LIFE_EXAMPLES", "30")),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
CHOICES = [(fault, setup) for fault, setups in FAULTS.items() for setup in setups]
MOST_LIVES = 40
REFUSALS = (PagedKVError, ValueError, LookupError)


def live_often(setup, backend, num_lives, *, past=()):
    for seed in range(num_lives):
        with suppress(*past):
            live(setup, backend, seed, num_actions=40)


@pytest.mark.parametrize("setup", SETUPS)
def test_every_token_lies_where_the_device_says(setup, backend):
    run_state_machine_as_test(lambda: EngineMachine(setup, backend), settings=SETTINGS)


@pytest.mark.parametrize(("fault", "setup"), CHOICES, ids=lambda choice: getattr(choice, "__name__", choice))
def test_a_seeded_fault_ends_a_life(fault, setup, monkeypatch):
    fault(monkeypatch)

    with pytest.raises((AssertionError, *REFUSALS)):
        live_often(setup, "numpy", MOST_LIVES)


@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.__name__)
def test_a_fault_that_costs_kv_is_found_without_a_look_at_the_arrays(fault, monkeypatch):
    fault(monkeypatch)
    monkeypatch.setattr(life_commit.Committer, "check", lambda *_: None)
    for module, name in (
        (life_update, "check_batch"),
        (life_update, "check_order"),
        (life_split, "check_parts"),
        (life_drafts, "equal"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)

    # A life that the library itself refuses to go on with shows nothing of the model.
    with pytest.raises(AssertionError, match=r"lost|written|moved|not there|no slot"):
        live_often(ALONE[fault], "numpy", MOST_LIVES, past=REFUSALS)


@pytest.mark.parametrize("setup", SETUPS)
def test_lives_without_a_fault_end_well(setup, backend):
    live_often(setup, backend, 4)
