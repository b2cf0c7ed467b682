"""The errors behind the fault codes of compiled calls."""

from typing import Any

from pagedkv.allocation import sequence_state as s
from pagedkv.errors import CapacityError, OutOfBlocksError, StaleSequenceError

__all__ = ["raise_fault"]


def raise_fault(
    manager: Any, fault: int, at: int, handles: Any, value: Any = None, *, counts: str = "num_new_tokens"
) -> None:
    """Raise the error of a fault at place `at` of a batch; nothing has changed then.

    `counts` names the argument that holds the numbers of tokens, `value` has them, or one of them.
    """
    if fault == s.GOOD:
        return
    name = f"seqs[{at}]"
    handle = int(handles[at]) if at >= 0 else -1
    match fault:
        case s.BAD_HANDLE:
            raise StaleSequenceError(
                f"{name} must be a live sequence, got {handle} (freed, or not of this manager)"
            )
        case s.REPEATED:
            raise ValueError(f"{name} must occur once in a batch, got {handle} again")
        case s.NOT_RUNNING:
            raise ValueError(
                f"{name} must hold a row: {handle} waits or was preempted (allocate_slots first)"
            )
        case s.OUT_OF_BLOCKS:
            raise OutOfBlocksError(
                int(value),
                manager.num_free_blocks,
                at,
                manager.pool.num_blocks - 1,
                manager.num_unfinished_copies,
            )
        case s.OUT_OF_ROWS:
            raise CapacityError(
                f"{name} needs a row: all {manager.mirror.max_num_reqs} are taken "
                "(free or preempt a sequence, or raise max_num_seqs)"
            )
        case s.TOO_LONG:
            raise CapacityError(
                f"{name} would exceed max_model_len {manager.max_model_len} (end the sequence)"
            )
        case s.RUNS:
            raise ValueError(
                f"{name} must wait: {handle} runs, and only waiting sequences are looked up "
                "(match_prefix before the first allocation, or after preempt)"
            )
        case s.NO_WAY_BACK:
            raise ValueError(
                f"{name} cannot go back: {handle} runs, and its window or state is past that "
                "(preempt it, then match and compute again)"
            )
        case _:
            raise ValueError(_bad_count(manager, counts, at, handle, value))


def _bad_count(manager: Any, counts: str, at: int, handle: int, value: Any) -> str:
    got = value[at] if hasattr(value, "__len__") else value
    line = manager.line(handle)
    tokens, computed, allocated = (int(line[x]) for x in (s.NUM_TOKENS, s.NUM_COMPUTED, s.ALLOCATED))
    match counts:
        case "num_new_tokens":
            return f"{counts}[{at}] must be at least 1, got {got} (leave out who has nothing to compute)"
        case "lens":
            return f"lens[{at}] must be at least 0, got {got} (truncate takes tokens back)"
        case "num_tokens":
            return f"num_tokens must lie in [1, {tokens}], the sequence's tokens, got {got}"
        case _:
            return (
                f"{counts}[{at}] must lie in [{computed}, {max(computed, min(tokens, allocated))}]: "
                f"{computed} are computed, {tokens} known and {allocated} allocated for, got {got} "
                "(commit what a step computed, before or after the new tokens are appended)"
            )
