"""Checked access to the entries of a configuration file or a GGUF header.

Responsible for types, bounds and messages, so that a wrong or hostile entry becomes a ``ModelLoadError`` naming it.
Knows no architecture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

from kvist.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DIMENSION = 16_777_216
"""Upper bound of every size read from a file: far above any model, far below what would exhaust memory by itself."""


class Fields:
    """The entries of one file.

    Args:
        values: Entries as parsed. An entry that is None counts as absent.
        where: Name of the source, for messages.
        prefix: Prepended to every key that is looked up (``llama.`` in a GGUF header).
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.where = where

    def has(self, key: str) -> bool:
        """Return whether the entry is there and not None."""
        return self.get(key) is not None

    def get(self, key: str) -> Any:  # noqa: ANN401  # as parsed
        """Return the entry unchecked; None when absent."""
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number in [1, MAX_DIMENSION]; required when there is no default.

        Raises:
            ModelLoadError: The entry is absent without a default, of another type, or out of bounds.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIMENSION:
            self._refuse(key, f"a whole number in [1, {MAX_DIMENSION}]", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number > 0; required when there is no default.

        Raises:
            ModelLoadError: The entry is absent without a default, of another type, or out of bounds.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(key, "a number", value)
        if not _is_positive(value):
            self._refuse(key, "a finite number > 0", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a finite number > 0, or None when the entry is absent."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            ModelLoadError: The entry is of another type.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; required when there is no default.

        Raises:
            ModelLoadError: The entry is absent without a default, or of another type.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            self._refuse(key, "a string", value)
        return value

    def group(self, key: str) -> Fields | None:
        """Return a nested group of entries, None when absent.

        Raises:
            ModelLoadError: The entry is of another type.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._refuse(key, "a group of entries", value)
        return Fields(value, f"{self.where}: {self._prefix}{key}")

    def items(
        self, key: str, length: int
    ) -> list[Any] | None:  # Any: the caller checks the elements
        """Return a list of the given length, None when absent.

        Raises:
            ModelLoadError: The entry is not a list of that length.
        """
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            self._refuse(key, f"a list of {length} values", value)
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return a required list of finite numbers > 0.

        Raises:
            ModelLoadError: The entry is absent, of another length, or holds something else.
        """
        values = self.items(key, length)
        is_valid = values is not None and all(
            isinstance(value, int | float) and _is_positive(value) for value in values
        )
        if values is None or not is_valid:
            self._refuse(key, f"a list of {length} numbers > 0", values)
        return tuple(float(value) for value in values)

    def texts(self, key: str) -> list[str] | None:
        """Return a list of strings, None when absent.

        Raises:
            ModelLoadError: The entry is of another type.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self._refuse(key, "a list of strings", value)
        return value

    def _value(self, key: str, default: Any) -> Any:  # noqa: ANN401  # checked by the callers
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"[spec] {self.where}: {self._prefix}{key} is missing")
        return value

    def _refuse(self, key: str, expected: str, value: object) -> NoReturn:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        raise ModelLoadError(
            f"[spec] {self.where}: {self._prefix}{key} should be {expected}, received {shown}"
        )


def _is_positive(value: float) -> bool:
    """Whether the value is a finite float > 0. A file may hold an integer that no float can."""
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:
        return False
