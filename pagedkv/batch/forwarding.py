"""FromBatch: fields of a step's batch, read through one of its groups."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

__all__ = ["FromBatch"]

T = TypeVar("T")


class FromBatch(Generic[T]):
    """In a class body, a read-only property: the field of the same name of ``self.batch``.

    It leaves a plain `property` behind, which costs a reader less than a descriptor in Python.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, property(attrgetter(f"batch.{name}"), doc=f"`BatchMetadata.{name}`."))

    if TYPE_CHECKING:

        @overload
        def __get__(self, group: None, owner: type) -> "FromBatch[T]": ...
        @overload
        def __get__(self, group: Any, owner: type | None = None) -> T: ...
        def __get__(self, group: Any, owner: type | None = None) -> Any: ...
