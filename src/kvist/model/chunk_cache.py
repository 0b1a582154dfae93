"""Encode long texts by parts that were encoded before.

Responsible for cutting a text where no token can reach across, and for remembering the ids of the parts. Knows no
file format. Prompts repeat their words far more often than anything else, and a dictionary lookup per word is about ten
times faster than splitting and merging it again (English on a busy 2-core server: 6 against 0.6 MB/s; a prompt of 2,000
tokens in 3 instead of 15 ms, much of the time to first token when the whole prompt is cached).

A cut is between a printable ASCII character and a space that an ASCII letter follows. It is used only where it is
certain that no token reaches across it (``cutting_of``):
    - byte-level BPE: no piece of the known splitting expressions holds a space behind its first character, and none
      looks behind itself;
    - SentencePiece: no token of the vocabulary holds a space behind a printable ASCII character.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvist.model.gguf_tokenizer import PRE_TOKENIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer as Backend

_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
_REACHES_ACROSS = re.compile(r"[!-~][ ▁]")
_MIN_TEXT_LEN = 64
"""Characters below which cutting gains nothing."""
_MAX_PART_LEN = 128
"""Longer parts are not worth remembering: they hardly repeat."""
_MAX_PARTS = 50_000
"""About 10 MB; then the memory starts afresh."""
_SAFE_SPLITS = frozenset(split for pre in PRE_TOKENIZERS.values() for split in pre.splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """Where the texts of one tokeniser can be cut."""

    pattern: re.Pattern[str]
    """Matches the empty string at each cut."""
    has_prefix: bool
    """Encoding puts a space before a text."""


class ChunkCache:
    """Ids of the parts of texts under one mode of encoding.

    Thread-safe: what is looked up is never taken from what another thread may clear.

    Args:
        encode: Encodes one part, without tokens around it.
        cutting: Where to cut.
    """

    def __init__(self, encode: Callable[[str], list[int]], cutting: Cutting) -> None:
        self._encode = encode
        self._cut = cutting.pattern
        # A part that continues a text brings the space that encoding would put before it.
        self._skipped = 1 if cutting.has_prefix else 0
        self._ids: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Return what ``encode`` returns for the whole text.

        Complexity: O(characters); a lookup for each part that is known.
        """
        if len(text) < _MIN_TEXT_LEN:
            return self._encode(text)
        first, *others = self._cut.split(text)
        known = self._ids
        ids: dict[str, tuple[int, ...]] = {}
        for part in set(others):
            found = known.get(part)
            if found is None:
                found = tuple(self._encode(part[self._skipped :]))
                if len(part) <= _MAX_PART_LEN:
                    known[part] = found
            ids[part] = found
        result = list(chain(self._encode(first), chain.from_iterable(map(ids.__getitem__, others))))
        if len(known) > _MAX_PARTS:
            known.clear()
        return result


def cutting_of(backend: Backend) -> Cutting | None:
    """Return where texts can be cut so that the ids of the parts are those of the whole, whatever the text.

    None: nowhere for certain.

    Complexity: O(vocabulary) for SentencePiece, else O(added tokens).
    """
    added = backend.get_added_tokens_decoder().values()
    if any(
        token.lstrip or token.rstrip or token.single_word or _REACHES_ACROSS.search(token.content)
        for token in added
    ):
        return None
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    if pre_tokenizer is None:
        is_safe = _is_sentencepiece(backend, normalizer)
    else:
        is_safe = (normalizer is None or normalizer["type"] == "NFC") and _is_byte_level(
            pre_tokenizer.get("pretokenizers", [pre_tokenizer])
        )
    if not is_safe:
        return None
    has_prefix = normalizer is not None and normalizer["type"] == "Sequence"
    before = _PRINTABLE
    if has_prefix:
        # Behind a token that is matched whole, encoding puts a space of its own: such a part is not a continuation.
        before = "".join(sorted(set(before) - {token.content[-1] for token in added}))
    pattern = re.compile(rf"(?<=[{re.escape(before)}])(?= [A-Za-z])")
    return Cutting(pattern=pattern, has_prefix=has_prefix)


def _is_byte_level(steps: list[dict[str, Any]]) -> bool:
    return all(_is_safe_step(step) for step in steps) and any(
        step["type"] == "Split" or step.get("use_regex") for step in steps
    )


def _is_safe_step(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(split)}, "behavior": "Isolated"}:
            return split in _SAFE_SPLITS and not step["invert"]
        case _:
            return False


def _is_sentencepiece(backend: Backend, normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    match normalizer.get("normalizers", [normalizer]):
        case [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}] | [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]:
            # Without a token for the space, unknown characters would join across the cut.
            return backend.token_to_id("▁") is not None and not any(
                _REACHES_ACROSS.search(piece)
                for piece in backend.get_vocab(with_added_tokens=False)
            )
        case _:
            return False


def _state(component: Any) -> dict[str, Any] | None:  # noqa: ANN401  # any component of tokenizers
    if component is None:
        return None
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state
