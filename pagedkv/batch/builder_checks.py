"""What `MetadataBuilders` refuses: groups, keys and builders that are none, and metadata of other groups."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np

from pagedkv.checks import check_int
from pagedkv.specs import KVCacheGroupSpec

__all__ = ["Specs", "as_hashable", "as_specs", "check_specs", "check_ubatch", "takes_updates"]

Specs: TypeAlias = tuple[KVCacheGroupSpec, ...]


def as_specs(specs: Iterable[Any]) -> Specs:
    """Return group specs as a tuple, an int block size as the spec of such blocks."""
    if not isinstance(specs, Iterable):
        raise TypeError(f"specs must be a list, one entry a group, got {type(specs).__name__}")
    return tuple(_as_spec(spec) for spec in specs)


def _as_spec(spec: Any) -> KVCacheGroupSpec:
    if isinstance(spec, KVCacheGroupSpec):
        return spec
    if not isinstance(spec, int | np.integer):
        raise TypeError(
            f"specs must hold KVCacheGroupSpec or int block sizes, got {type(spec).__name__} "
            "(give the block table's; a manager's are manager.table_groups)"
        )
    return KVCacheGroupSpec(int(spec))


def as_hashable(key: Any) -> Hashable:
    """Return a key, or raise where it cannot be one."""
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            f"key must be hashable, got {type(key).__name__} (a tuple of names and numbers is)"
        ) from None
    return key  # type: ignore[no-any-return]


def takes_updates(builder: Any) -> bool:
    """Whether a builder takes another group's metadata over; raise where a factory has made no builder."""
    supports = getattr(builder, "supports_update_block_table", None)
    if supports is None or not callable(getattr(builder, "build", None)):
        raise TypeError(
            "factory must return a MetadataBuilder, with supports_update_block_table and build(), "
            f"got {type(builder).__name__} (return the object that factory(spec, view, ubatch) makes)"
        )
    if supports and not callable(getattr(builder, "update_block_table", None)):
        raise TypeError(
            f"factory must return a builder with update_block_table() where it supports that, "
            f"got {type(builder).__name__} (or set supports_update_block_table = False)"
        )
    return bool(supports)


def check_ubatch(ubatch: int, num_ubatches: int) -> None:
    """Raise unless there are builders for this micro-batch."""
    if check_int("ubatch", ubatch) >= num_ubatches:
        raise ValueError(
            f"num_ubatches must be at least {ubatch + 1} for micro-batch {ubatch}, got {num_ubatches} "
            "(pass it to MetadataBuilders: as many as a step is split into at most)"
        )


def check_specs(own: Specs, given: Sequence[KVCacheGroupSpec]) -> None:
    """Raise unless a step's groups are those that builders were made for, views in any notation."""
    remedy = "(give MetadataBuilders the specs of the block table)"
    if len(own) != len(given):
        raise ValueError(f"metadata must be of {len(own)} groups, got {len(given)} {remedy}")
    for group, (one, other) in enumerate(zip(own, given, strict=True)):
        if one != other and _resolved(one) != _resolved(other):
            names = [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]
            wanted, got = (", ".join(f"{n}={getattr(spec, n)!r}" for n in names) for spec in (one, other))
            raise ValueError(f"group {group} of the metadata must have {wanted}, got {got} {remedy}")


def _resolved(spec: KVCacheGroupSpec) -> tuple[KVCacheGroupSpec, list[tuple[int, int]]]:
    return replace(spec, kernel_views=()), spec.views()
