"""MetadataBuilders: what each attention layer's kernel reads, built once a step where groups agree."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from pagedkv.batch.builder_checks import (
    Specs,
    as_hashable,
    as_specs,
    check_specs,
    check_ubatch,
    takes_updates,
)
from pagedkv.checks import check_int, check_view
from pagedkv.specs import KVCacheGroupSpec

if TYPE_CHECKING:
    from pagedkv.batch.metadata import CommonAttentionMetadata, StepMetadata

__all__ = ["BuilderFactory", "MetadataBuilder", "MetadataBuilders"]

M = TypeVar("M")


class MetadataBuilder(Protocol[M]):
    """Makes an attention kernel's metadata from a step's; may keep device buffers that graphs read.

    It does the same at capture and at run time, so that what a captured graph reads is written anew in
    every step.
    """

    @property
    def supports_update_block_table(self) -> bool:
        """Whether `update_block_table` may stand in for `build`; read once.

        False where more than table and slots differs from group to group, such as state indices.
        """

    def build(self, common: "CommonAttentionMetadata", *, for_capture: bool) -> M:
        """Return the metadata of one attention group; `for_capture` also for dummy runs of a full graph."""

    def update_block_table(self, built: M, block_table: Any, slot_mapping: Any) -> M:
        """Return a new object as `built`, but with another group's table and slots.

        Parameters
        ----------
        built : M
            What another builder of the same kind has built in this step. It stays as it is, and what is not
            of one table (lengths, schedules) is taken from it, not from this builder's buffers.
        block_table : int32 [num_reqs, width]
        slot_mapping : int64 [num_tokens]
        """


BuilderFactory: TypeAlias = Callable[[KVCacheGroupSpec, int | None, int], MetadataBuilder[Any]]
"""(spec, view, ubatch) -> builder."""


class _Planned(NamedTuple):
    """How one attention group's metadata comes about in one micro-batch."""

    group: int
    view: int | None
    builder: MetadataBuilder[Any]
    first: int | None  # attention group whose metadata is updated; None: built


class MetadataBuilders:
    """The metadata builders of all attention groups, one for each micro-batch.

    An attention group is layers of one KV-cache group that share a builder. Attention groups with equal
    spec, key and view need the same metadata but for table and slots: where their builders support it, the
    first registered is built, and the others are updated from it. Registering fixes all this; capture and
    run time do the same, and no micro-batch reads what another has built.

    Parameters
    ----------
    specs : sequence of KVCacheGroupSpec or int
        The KV-cache groups, as in the block table; an int is a block size.
    num_ubatches : int
        Micro-batches that a step is split into at most.
    """

    def __init__(self, specs: Sequence[KVCacheGroupSpec | int], num_ubatches: int = 1) -> None:
        self.specs: Specs = as_specs(specs)
        self._checked_specs = self.specs  # of the last table whose metadata came
        self.num_ubatches = check_int("num_ubatches", num_ubatches, 1)
        self._plans: tuple[list[_Planned], ...] = tuple([] for _ in range(self.num_ubatches))
        self._firsts: dict[Hashable, int] = {}

    def register(
        self,
        group: int,
        factory: BuilderFactory,
        *,
        key: Hashable = None,
        view: int | None = None,
    ) -> int:
        """Add an attention group, and return its number: its place in what `build` returns.

        Parameters
        ----------
        group : int
            Its KV-cache group.
        factory : callable
            ``factory(spec, view, ubatch)`` returns the builder for one micro-batch.
        key : hashable, optional
            The kind of builder and all that it is set up with besides the spec, such as its number of query
            heads; `factory` itself where None.
        view : int, optional
            Kernel view of the group whose table the builder reads; the one in manager blocks where None.

        Raises
        ------
        ValueError
            There is no such group, or no such view of it.
        TypeError
            The group or view is no int, the key is not hashable, or the factory has made no builder.
        """
        spec = self.specs[check_int("group", group, 0, len(self.specs) - 1)]
        if view is not None:
            check_view(group, view, len(spec.kernel_views))
            view = int(view)
        number = len(self._plans[0])
        kind = (spec, as_hashable(factory if key is None else key), view)
        made = [factory(spec, view, ubatch) for ubatch in range(self.num_ubatches)]
        supports = [takes_updates(builder) for builder in made]
        first = number
        if all(supports):
            first = self._firsts.setdefault(kind, number)
        for plan, builder in zip(self._plans, made, strict=True):
            plan.append(_Planned(group, view, builder, None if first == number else first))
        return number

    def build(
        self,
        metadata: "StepMetadata | list[StepMetadata] | tuple[StepMetadata, ...]",
        *,
        for_capture: bool = False,
    ) -> list[tuple[Any, ...]]:
        """Build the metadata of all attention groups.

        Parameters
        ----------
        metadata : StepMetadata, or list or tuple of them
            The step, or one micro-batch; or its micro-batches, from the first on.
        for_capture : bool
            The step is captured, or is a dummy run of a captured graph; handed on to the builders.

        Returns
        -------
        list of tuple
            For each micro-batch one object an attention group, in the order registered.

        Raises
        ------
        ValueError
            Micro-batches out of order or too many, or of other groups than `specs`: nothing was built. Or an
            update has returned the object that it was given.
        """
        if not isinstance(metadata, (list, tuple)):
            metadata = (metadata,)
        elif (found := [step.batch.ubatch for step in metadata]) != list(range(len(metadata))):
            raise ValueError(f"micro-batches must come in order, 0 first, got {found}")
        for step in metadata:
            if not 0 <= step.batch.ubatch < self.num_ubatches:
                check_ubatch(step.batch.ubatch, self.num_ubatches)
            if (specs := step.step.geometry.specs) is not self._checked_specs:
                check_specs(self.specs, specs)
                self._checked_specs = specs
        return [self._build_ubatch(step, for_capture) for step in metadata]

    def _build_ubatch(self, step: "StepMetadata", for_capture: bool) -> tuple[Any, ...]:
        built: list[Any] = []
        groups = step.groups
        for group, view, builder, first in self._plans[step.batch.ubatch]:
            common = groups[group]
            table = common.block_table_tensor if view is None else common.kernel_block_table(view)
            if first is not None:
                updated = builder.update_block_table(built[first], table, common.slot_mapping)
                if updated is built[first]:
                    raise ValueError(
                        "update_block_table must return a new object, got the one that it was given "
                        "(copy it, as with dataclasses.replace)"
                    )
                built.append(updated)
                continue
            if view is not None:
                common = replace(common, block_table_tensor=table)
            built.append(builder.build(common, for_capture=for_capture))
        return tuple(built)
