"""Whether the fields of a dataclass hold what they declare.

Responsible for values that come from other people's Python code, where nothing has parsed them: a float that stands
for a count passes every comparison and fails much later, in somebody else's thread. Knows no option by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from numbers import Integral, Real


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A field with a value of another type."""

    name: str
    expected: str
    """What the field takes, in words."""
    value: object


def mismatch(instance: object) -> Mismatch | None:
    """Return the first field of the dataclass instance whose value is not of the declared type; None when all are.

    Whole numbers pass for ``float``, numpy's numbers pass for Python's, lists pass for tuples; a bool is no number.
    Fields declared as anything else than the types in this module's table are not looked at.
    """
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]  # every caller passes a dataclass instance
        # Annotations are strings everywhere in this package.
        declared = str(field.type).removesuffix(" | None")
        value = getattr(instance, field.name)
        if declared not in _KINDS or (value is None and declared != field.type):
            continue
        expected, is_kind = _KINDS[declared]
        if not is_kind(value):
            return Mismatch(name=field.name, expected=expected, value=value)
    return None


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_text, value))


def _are_integers(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_integer, value))


def _maps_integers_to_numbers(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(map(_is_integer, value))
        and all(map(_is_number, value.values()))
    )


def _maps_texts_to_numbers(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(map(_is_text, value))
        and all(map(_is_number, value.values()))
    )


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("a whole number", _is_integer),
    "float": ("a number", _is_number),
    "str": ("a string", _is_text),
    "bool": ("True or False", _is_bool),
    "tuple[str, ...]": ("a tuple of strings", _are_texts),
    "tuple[int, ...]": ("a tuple of whole numbers", _are_integers),
    "Mapping[str, float]": ("a mapping from names to numbers", _maps_texts_to_numbers),
    "Mapping[int, float]": ("a mapping from token ids to numbers", _maps_integers_to_numbers),
}
