"""SchedulerOutput: what a scheduler decided for one step, as arrays."""

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["NOBODY", "AdmittedRequests", "RunningRequests", "SchedulerOutput"]


class AdmittedRequests(NamedTuple):
    """Requests that start or start again in this step; their blocks replace what their rows held.

    Attributes
    ----------
    req_ids : sequence of hashable, length n
        Names of the requests, each once.
    num_prefill_tokens : array_like of int, shape [n]
        Tokens known so far: the prompt, and after a preemption the outputs as well. Steps that start
        below it are prefills.
    num_scheduled_tokens : array_like of int, shape [n]
        Tokens of this step.
    num_computed_tokens : array_like of int, shape [n], optional
        Tokens that are in the cache already (prefix hits). By default 0, or with a manager what it has.
    num_blocks : array_like of int, shape [G, n], optional
        Blocks of each request in each group, those of the hits included. None with a manager, which
        writes the tables itself.
    block_ids : array_like of int, shape [sum of num_blocks], optional
        Ids, group by group, and request by request within a group.
    handles : array_like of int64, shape [n], optional
        With a manager: the sequences' handles. Otherwise the batch makes handles of its own.
    """

    req_ids: Sequence[Hashable] = ()
    num_prefill_tokens: Any = ()
    num_scheduled_tokens: Any = ()
    num_computed_tokens: Any = None
    num_blocks: Any = None
    block_ids: Any = None
    handles: Any = None


class RunningRequests(NamedTuple):
    """Requests that go on; new blocks are appended to their rows.

    Attributes
    ----------
    handles : ndarray of int64, shape [n]
        Each once, in any order.
    num_scheduled_tokens : ndarray of int32, shape [n]
        Tokens of this step, drafts included.
    num_computed_tokens : ndarray of int32, shape [n], optional
        Tokens in the cache; by default those before the request's last step and those of it. To be given
        where drafts were rejected. On the host this may be an upper bound, see `InputBatch.commit`.
    num_new_blocks : ndarray of int32, shape [G, n], optional
        Blocks that each request takes in each group; none by default, and with a manager.
    block_ids : ndarray of int32, shape [sum of num_new_blocks], optional
        Ids, group by group, and request by request within a group.
    """

    handles: Any = ()
    num_scheduled_tokens: Any = ()
    num_computed_tokens: Any = None
    num_new_blocks: Any = None
    block_ids: Any = None


NOBODY: Final = AdmittedRequests()
"""No request starts."""


class SchedulerOutput(NamedTuple):
    """One scheduler step.

    A running request that is not named rests: it leaves the batch, keeps its blocks, and comes back with
    `running`. Whether blocks are appended or replace a row is decided by the list that a request is in, and
    by nothing else.

    Attributes
    ----------
    running : RunningRequests
    new : AdmittedRequests
        An id that is known already starts anew (a streaming session's next prompt): its handle changes.
    resumed : AdmittedRequests
        Known requests whose blocks had been taken away.
    finished, preempted : sequence of hashable
        Ids that are over, and ids that lose their blocks and row until they are resumed. Both are dealt
        with before anything else, so an id can be finished and new in one step.
    """

    running: RunningRequests = RunningRequests()
    new: AdmittedRequests = NOBODY
    resumed: AdmittedRequests = NOBODY
    finished: Sequence[Hashable] = ()
    preempted: Sequence[Hashable] = ()
