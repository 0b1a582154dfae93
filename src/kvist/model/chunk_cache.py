"""Encode long texts by parts that were encoded before.

Responsible for cutting a text where no token can reach across, and for remembering the ids of the parts. Knows no file
format. Prompts repeat their words far more often than anything else: a dictionary lookup per word is about 15 times
faster than splitting and merging it again (10-14 against 0.8 MB/s for English on a 2-core server), which is the larger
part of the time to first token when the whole prompt is cached.

A cut is between a printable ASCII character and a space that an ASCII letter follows. It is used only where it is
certain that no token reaches across it (``can_cut``):
    - byte-level BPE: no piece of the known splitting expressions holds a space behind its first character, and none
      looks behind itself;
    - SentencePiece: no token of the vocabulary holds a space behind a printable ASCII character.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvist.model.gguf_tokenizer import PRE_TOKENIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer as Backend

_CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z])")
_REACHES_ACROSS = re.compile(r"[!-~][ ▁]")
_MIN_TEXT_LEN = 64
"""Characters below which cutting gains nothing."""
_MAX_PART_LEN = 128
"""Longer parts are not worth remembering: they hardly repeat."""
_MAX_PARTS = 50_000
"""About 10 MB; then the memory starts afresh."""
_SAFE_SPLITS = frozenset(split for pre in PRE_TOKENIZERS.values() for split in pre.splits)


class ChunkCache:
    """Ids of the parts of texts under one mode of encoding. Not thread-safe.

    Args:
        encode: Encodes one part, without tokens around it.
        has_prefix: ``encode`` puts a space before the text. A part that continues a text begins with its own, which is
            left out then.
    """

    def __init__(self, encode: Callable[[str], list[int]], *, has_prefix: bool) -> None:
        self._encode = encode
        self._has_prefix = has_prefix
        self._ids: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Return what ``encode`` returns for the whole text.

        Complexity: O(characters); a lookup for each part that is known.
        """
        if len(text) < _MIN_TEXT_LEN:
            return self._encode(text)
        first, *others = _CUT.split(text)
        known = self._ids
        passing: dict[str, tuple[int, ...]] = {}
        for part in set(others).difference(known):
            ids = tuple(self._encode(part[1:] if self._has_prefix else part))
            (known if len(part) <= _MAX_PART_LEN else passing)[part] = ids
        lookup = (known | passing if passing else known).__getitem__
        result = list(chain(self._encode(first), chain.from_iterable(map(lookup, others))))
        if len(known) > _MAX_PARTS:
            known.clear()
        return result


def can_cut(backend: Backend) -> bool:
    """Whether encoding the parts of a cut text gives the ids of the whole, whatever the text.

    Complexity: O(vocabulary) for SentencePiece, else O(added tokens).
    """
    for token in backend.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word:
            return False
        if _REACHES_ACROSS.search(token.content):
            return False
    normalizer = _state(backend.normalizer)
    pre_tokenizer = _state(backend.pre_tokenizer)
    if pre_tokenizer is None:
        return _is_sentencepiece(backend, normalizer)
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        (normalizer is None or normalizer["type"] == "NFC")
        and all(_is_safe_step(step) for step in steps)
        and any(step["type"] == "Split" or step.get("use_regex") for step in steps)
    )


def has_prefix(backend: Backend) -> bool:
    """Whether the backend puts a space before each text it encodes, by its normaliser."""
    normalizer = _state(backend.normalizer)
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    return any(step["type"] == "Prepend" for step in steps)


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
