"""What a tokeniser is made of, whichever file format it came from.

Responsible for the record that the readers (``gguf_tokenizer``, ``folder_tokenizer``) hand to ``tokenizer``, and for
the bytes that a piece of vocabulary stands for. Reads no files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, assert_never

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class PieceEncoding(Enum):
    """How the vocabulary spells bytes."""

    BYTE_LEVEL = "byte_level"
    """GPT-2: each character of a piece stands for one byte."""
    SENTENCEPIECE = "sentencepiece"
    """U+2581 stands for a space, ``<0x0A>`` for one byte, everything else for itself."""
    METASPACE = "metaspace"
    """U+2581 stands for a space, everything else for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokeniser as read from a checkpoint."""

    backend: Backend
    """Encodes; not used for decoding."""
    size: int
    """Largest token id plus one."""
    encoding: PieceEncoding
    literal_ids: frozenset[int]
    """Tokens whose text is itself, outside ``encoding``: control tokens and others that are matched whole."""
    special_ids: frozenset[int]
    """Control tokens, which are not part of a text; a subset of ``literal_ids``."""
    strips_leading_space: bool
    """Encoding puts a space before a text, so decoding takes one away."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer; the checkpoint's main one first."""
    chat_template: str | None
    """Jinja source."""
    special_tokens: dict[str, str]
    """Texts of special tokens by the names chat templates use: ``bos_token``, ``eos_token``, ..."""


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[int, int]:
    """Return GPT-2's spelling of bytes: code point of the character -> byte.

    Printable Latin-1 characters stand for themselves, the other bytes for the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()


def piece_bytes(piece: str, encoding: PieceEncoding) -> bytes:
    """Return the bytes that an ordinary piece stands for."""
    match encoding:
        case PieceEncoding.BYTE_LEVEL:
            try:
                return bytes(_BYTE_LEVEL[ord(character)] for character in piece)
            except KeyError:
                # Not spelled in bytes: a token somebody added without marking it. Its text is the best reading.
                return piece.encode()
        case PieceEncoding.SENTENCEPIECE:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
        case PieceEncoding.METASPACE:
            return piece.replace("▁", " ").encode()
        case _:
            assert_never(encoding)
