"""Random row operations, commits and steps: tables, slots and step arrays always equal the model's.

PAGEDKV_TABLE_EXAMPLES sets the number of runs: fewer under a sanitizer, thousands for a night.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import TableMachine

SETTINGS = settings(
    max_examples=int(os.environ.get("PAGEDKV_TABLE_EXAMPLES", "150")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_tables_equal_the_model(backend):
    run_state_machine_as_test(lambda: TableMachine(backend), settings=SETTINGS)
