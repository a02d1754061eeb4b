"""Column types from values: what the values of a column have been, and the type that holds them all unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

_INT64 = 2**63
_EXACT_IN_FLOAT = 2**53
_DECIMAL = 10**38
_MAX_DIGITS = 40
_BIG_INTEGER = pa.decimal128(38, 0)
_SCALARS: dict[type, str] = {str: "text", bool: "bool", float: "float"}
_WHOLE = r"^(0|-?[1-9][0-9]*)$"
_FRACTION = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+(e[+-][0-9]+)?")


@dataclass(slots=True)
class Facts:
    """What the values of one column, or of the elements of its lists, have been. Nulls leave no trace."""

    kinds: set[str] = field(default_factory=set)
    """Of ``text bool float int big huge list object``; ``big`` is beyond 64 bits, ``huge`` beyond 38 digits."""
    exact: bool = True
    """Every integer is a float without rounding."""
    items: Facts | None = None
    fields: dict[str, Facts] | None = None
    ragged: bool = False
    """Objects differ in their keys, so that a struct could not tell an absent key from a null."""

    def observe(self, values: Sequence[Any]) -> None:
        """Take note of JSON values."""
        for kind in set(map(type, values)):
            if kind in _SCALARS:
                self.kinds.add(_SCALARS[kind])
            elif kind is int:
                self._observe_integers([value for value in values if type(value) is int])
            elif kind is list:
                self.kinds.add("list")
                self.items = self.items or Facts()
                self.items.observe([item for value in values if type(value) is list for item in value])
            elif kind is dict:
                self._observe_objects([value for value in values if type(value) is dict])

    def observe_text(self, column: pa.ChunkedArray) -> None:
        """Take note of CSV fields: a number or truth value only where its text can be had back from it."""
        texts = pc.unique(column.filter(pc.not_equal(column, "")))
        whole = pc.match_substring_regex(texts, _WHOLE)
        integers = texts.filter(whole).to_pylist()
        if any(len(text) > _MAX_DIGITS for text in integers):
            self.kinds.add("huge")
        elif integers:
            self._observe_integers(list(map(int, integers)))
        for text in texts.filter(pc.invert(whole)).to_pylist():
            self.kinds.add(_kind_of_text(text))
            if "text" in self.kinds:
                return

    def merge(self, other: Facts) -> None:
        """Take note of all that the other has seen."""
        self.ragged |= other.ragged or (
            self.fields is not None and other.fields is not None and self.fields.keys() != other.fields.keys()
        )
        self.kinds |= other.kinds
        self.exact &= other.exact
        if other.items is not None:
            self.items = self.items or Facts()
            self.items.merge(other.items)
        for name, facts in (other.fields or {}).items():
            self.fields = {} if self.fields is None else self.fields
            self.fields.setdefault(name, Facts()).merge(facts)

    def arrow_type(self) -> pa.DataType | None:
        """The type that holds all the values; None if there is none, and they are carried as JSON text."""
        match sorted(self.kinds):
            case [] | ["text"]:
                return pa.string()
            case ["bool"] | ["true"] | ["True"]:
                return pa.bool_()
            case ["int"]:
                return pa.int64()
            case ["big"] | ["big", "int"]:
                return _BIG_INTEGER
            case ["float"]:
                return pa.float64()
            case ["float", "int"] if self.exact:
                return pa.float64()
            case ["list"]:
                items = (self.items or Facts()).arrow_type()
                return None if items is None else pa.list_(items)
            case ["object"] if not self.ragged:
                types = {name: facts.arrow_type() for name, facts in (self.fields or {}).items()}
                return None if None in types.values() else pa.struct(list(types.items()))
        return None

    def fits(self, type: pa.DataType) -> bool:
        """Whether a column of ``type`` holds all the values unchanged."""
        own = self.arrow_type()
        if not self.kinds or own == type:
            return True
        if own is None:
            return False
        if pt.is_list(type) and pt.is_list(own) and self.items is not None:
            return self.items.fits(type.value_type)
        if pt.is_struct(type) and pt.is_struct(own) and self.fields is not None:
            names = {type.field(i).name for i in range(type.num_fields)}
            return names == self.fields.keys() and all(
                facts.fits(type.field(name).type) for name, facts in self.fields.items()
            )
        return pt.is_int64(own) and (type == _BIG_INTEGER or (pt.is_float64(type) and self.exact))

    def _observe_integers(self, integers: list[int]) -> None:
        low, high = min(integers), max(integers)
        self.exact &= low >= -_EXACT_IN_FLOAT and high <= _EXACT_IN_FLOAT
        if low >= -_INT64 and high < _INT64:
            self.kinds.add("int")
        else:
            self.kinds.add("big" if low > -_DECIMAL and high < _DECIMAL else "huge")

    def _observe_objects(self, objects: list[dict[str, Any]]) -> None:
        self.kinds.add("object")
        keys = objects[0].keys() if self.fields is None else self.fields.keys()
        self.fields = self.fields or {name: Facts() for name in keys}
        if not keys or "" in keys or any(value.keys() != keys for value in objects):
            self.ragged = True  # then the fields do not matter
            return
        for name, facts in self.fields.items():
            facts.observe([value[name] for value in objects])


def merge_columns(columns: Iterable[dict[str, Facts]]) -> dict[str, Facts]:
    """Facts by column from those of parts of the input, columns in order of appearance."""
    merged: dict[str, Facts] = {}
    for part in columns:
        for name, facts in part.items():
            merged.setdefault(name, Facts()).merge(facts)
    return merged


def _kind_of_text(text: str) -> str:
    """The kind of a CSV field that is no plain integer. ``true`` and ``True`` are different spellings."""
    if text.lower() in ("true", "false") and text in ("true", "false", "True", "False"):
        return "true" if text.islower() else "True"
    return "float" if _FRACTION.fullmatch(text) and repr(float(text)) == text else "text"
