"""Faults to put into a batch, its tables or its scheduler: each must end a life.

A fault is a function that takes pytest's monkeypatch; `FAULTS` says in which set-ups it is looked for.
"""

from . import life_batch_faults as batch
from . import life_device_faults as device

ORDERED, STABLE, MANAGED, CACHED = "batch order", "stable rows", "manager", "manager with a prefix cache"

FAULTS = {
    batch.resume_appends: (ORDERED, STABLE),
    batch.condense_forgets_a_row: (ORDERED,),
    batch.holes_are_not_closed: (ORDERED, STABLE, MANAGED),
    batch.left_rows_keep_their_ids: (ORDERED, STABLE),
    batch.rest_forgets_the_blocks: (ORDERED,),
    batch.kept_blocks_outlive_a_resume: (ORDERED,),
    batch.rest_gives_the_row_away: (STABLE,),
    batch.swaps_move_names_only: (ORDERED,),
    batch.order_is_left_alone: (ORDERED, STABLE, MANAGED),
    batch.manager_rows_are_remembered: (MANAGED, CACHED),
    batch.rejected_tokens_advance: (ORDERED, STABLE, CACHED),
    batch.device_counts_are_ignored: (ORDERED, STABLE, CACHED),
    batch.host_arrays_are_used_again: (ORDERED, STABLE, MANAGED),
    batch.dummies_use_live_rows: (STABLE, MANAGED),
    batch.dummies_do_not_let_the_batch_rest: (ORDERED,),
    device.drafts_take_the_slots_of_the_step: (ORDERED, CACHED),
    device.slots_keep_their_tail: (ORDERED, STABLE),
    device.positions_pass_the_model_length: (ORDERED, CACHED),
    device.larger_batches_stay_shown: (STABLE, MANAGED),
    device.windows_lose_a_column_early: (STABLE, CACHED),
    device.draft_states_stand_a_column_further: (ORDERED, CACHED),
    device.cut_requests_keep_their_length: (ORDERED, STABLE),
    batch.schedulers_free_a_block_early: (ORDERED, STABLE),
    batch.schedulers_settle_what_was_rejected: (MANAGED, CACHED),
}

ALONE = {
    batch.resume_appends: STABLE,
    batch.kept_blocks_outlive_a_resume: ORDERED,
    batch.swaps_move_names_only: ORDERED,
    batch.manager_rows_are_remembered: CACHED,
    batch.rejected_tokens_advance: CACHED,
    batch.device_counts_are_ignored: ORDERED,
    batch.dummies_use_live_rows: STABLE,
    device.windows_lose_a_column_early: MANAGED,
    device.draft_states_stand_a_column_further: ORDERED,
    device.cut_requests_keep_their_length: STABLE,
    batch.schedulers_free_a_block_early: ORDERED,
    batch.schedulers_settle_what_was_rejected: CACHED,
}
"""Those that cost a token its KV: it takes no look at the arrays to find them, in one set-up each."""
