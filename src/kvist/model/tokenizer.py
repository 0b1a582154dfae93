"""Text to token ids and back.

Responsible for the operations; where the vocabulary comes from is ``gguf_tokenizer`` and ``folder_tokenizer``. Knows no
tensor library. Text in messages and errors never includes prompts.

Invariants:
    1. ``decode`` joins the bytes of the tokens and reads them as UTF-8; what is not UTF-8 becomes U+FFFD, as Python's
       "replace" has it. No spaces are "cleaned up".
    2. Unless the checkpoint normalises its input, ``decode(encode(text))`` is ``text`` for every text in which no token
       is matched whole and whose bytes the vocabulary has; bytes it lacks are dropped, as by the model's own tokeniser
       (SmolLM2 lacks six control characters).
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvist.errors import ModelLoadError, RequestError
from kvist.model.chat_template import ChatTemplate, plain_messages, plain_tools
from kvist.model.chunk_cache import ChunkCache, cutting_of
from kvist.model.folder_tokenizer import vocabulary_from_folder
from kvist.model.gguf_file import read_gguf
from kvist.model.gguf_tokenizer import vocabulary_from_gguf
from kvist.model.vocabulary import piece_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tokenizers import Tokenizer as Backend

    from kvist.model.vocabulary import Vocabulary

    Message = Mapping[str, Any]  # Any: content may be text or a list of parts
    Tool = Mapping[str, Any]  # Any: a JSON schema


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokeniser of a .gguf file or of a folder with tokenizer.json.

    Raises:
        ModelLoadError: There is none, or it is of a kind that Kvist does not know.
    """
    if path.is_file():
        return Tokenizer(vocabulary_from_gguf(read_gguf(path).metadata))
    return Tokenizer(vocabulary_from_folder(path))


class Tokenizer:
    """One model's tokeniser. Thread-safe.

    Args:
        vocabulary: Owned by this object from here on.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._backend.encode_special_tokens = False
        self._cutting = cutting_of(vocabulary.backend)
        self._encode = self._cached(self._encode_whole)
        self._literal_lock = threading.Lock()
        """Held while ``_encode_literally`` is made."""
        self._before, self._behind = _text_borders(vocabulary.backend)
        self._bytes: list[bytes | None] = [None] * vocabulary.size
        self.vocab_size = vocabulary.size
        """Largest token id plus one; the model's embedding may have more rows."""
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        """Every token that ends an answer; the checkpoint's main one first."""
        self.strips_leading_space = vocabulary.strips_leading_space
        """Whether encoding puts a space before a text that decoding takes away again (SentencePiece)."""
        self.chat_template = (
            None
            if vocabulary.chat_template is None
            else ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens)
        )
        """None: the model was not made for chat."""

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,  # noqa: FBT001, FBT002  # the name users know from transformers
        *,
        parse_special: bool = True,
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Any text without lone surrogates.
            add_special_tokens: Put the tokens around it that the model expects around a text (often bos). False for
                rendered chat templates, which spell them out.
            parse_special: Read the text of a control token (``<|im_end|>``) as that token, as transformers and most
                servers do for plain prompts. False reads it as ordinary characters, so that whoever wrote the text
                cannot forge the structure around it.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        try:
            encode = self._encode if parse_special else self._literal_encode()
            ids = encode(text)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "[tokenizer] the text must be valid Unicode, received lone surrogates; remove them"
            ) from error
        if add_special_tokens:
            return [*self._before, *ids, *self._behind]
        return ids

    def _encode_whole(self, text: str) -> list[int]:
        return _encode(self._backend, text)

    def _literal_encode(self) -> Callable[[str], list[int]]:
        # The first caller makes it, and others wait rather than make it again.
        with self._literal_lock:
            return self._encode_literally

    @cached_property
    def _encode_literally(self) -> Callable[[str], list[int]]:
        # A backend of its own, made when it is first asked for: to switch the other's mode there and back, every
        # client's text would have to wait for that of the one before.
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = True
        return self._cached(partial(_encode, backend))

    def _cached(self, encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
        """Return ``encode`` with a memory, or as it is where texts cannot be cut for certain."""
        return encode if self._cutting is None else ChunkCache(encode, self._cutting).encode

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids, as one text from its beginning.

        Args:
            token_ids: In order; ids outside the vocabulary have no text.
            skip_special: Leave control tokens out; False spells them.
        """
        special = self._vocabulary.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in special)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, exactly; for control tokens, their spelling.

        Empty for ids that have no token: embeddings are often padded to a round number of rows.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            piece = self._backend.id_to_token(token_id)
            if piece is None:
                data = b""
            elif token_id in self._vocabulary.literal_ids:
                data = piece.encode()
            else:
                data = piece_bytes(piece, self._vocabulary.encoding)
            self._bytes[token_id] = data
        return data

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is not part of a text."""
        return token_id in self._vocabulary.special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002  # the name users know
        *,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """Return the text that the model's template makes of a conversation, and of the tools it may use.

        Raises:
            RequestError: The model has no template, or the template refuses the messages or has no place for tools.
        """
        if self.chat_template is None:
            raise RequestError(
                "[chat] this model has no chat template; send a plain prompt to /v1/completions, "
                "or load an instruct model"
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002  # as apply_chat_template
        *,
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, in which only the template can place control tokens.

        The text of a control token inside a message or a tool is read as ordinary characters, so a quoted
        ``<|im_end|>`` neither ends a turn nor forges one (a SentencePiece model that puts a space before texts sees one
        inside it). Conversations without such text have the ids of the rendered text.

        Raises:
            RequestError: As ``apply_chat_template`` and ``encode``; or there is such text, and the template escapes it.
        """
        given = [plain_messages(messages), None if tools is None else plain_tools(tools)]
        (quoted, quoted_tools), marker = self._break_special(given)
        text = self.apply_chat_template(quoted, add_generation_prompt, tools=quoted_tools)
        if marker is not None and marker.encode("unicode_escape").decode() in text:
            raise RequestError(
                "[chat] a message or a tool holds the text of a control token, which the model's template escapes, "
                "so that it cannot be told from its own; take the text out",
                param="messages" if tools is None else "tools",
            )
        ids: list[int] = []
        for part in (text,) if marker is None else text.split(marker):
            ids += self.encode(part, add_special_tokens=False)
        return ids

    def _break_special(
        self, values: list[Any]
    ) -> tuple[list[Any], str | None]:  # Any: JSON of the same form
        """Return JSON values with a marker inside each control token's text, and the marker; None: there was none.

        Breaking the text apart is safer than putting marks around it: whatever a template cuts out of a message, no
        part between two markers spells a control token.
        """
        strings = list(_strings(values))
        if not any(map(self._spelling.occurs_in, strings)):
            return values, None
        # Noncharacters of Unicode should not occur; counted on until the marker certainly does not.
        number = 0
        while any((marker := f"\ufdd0{number}\ufdd1") in string for string in strings):
            number += 1
        return _map_strings(values, lambda s: self._spelling.split(s, marker)), marker

    @cached_property
    def _spelling(self) -> _SpecialSpelling:
        ids = self._vocabulary.special_ids
        return _SpecialSpelling(piece for i in ids if (piece := self._backend.id_to_token(i)))


def _encode(backend: Backend, text: str) -> list[int]:
    # A batch of one: for a single text the library keeps the interpreter's lock, and a prompt of megabytes would
    # stop every thread of the server for seconds.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _text_borders(backend: Backend) -> tuple[list[int], list[int]]:
    """Return the ids that the backend puts before and behind a text."""
    around: list[int] = backend.encode("", add_special_tokens=True).ids
    if not around:
        return [], []
    text = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for num_before in range(len(around) + 1):
        if around[:num_before] + text + around[num_before:] == whole:
            return around[:num_before], around[num_before:]
    raise ModelLoadError(
        "[tokenizer] the tokeniser's post-processor must put fixed tokens around a text, and does something else"
    )


class _SpecialSpelling:
    """Finds the texts of control tokens. Some vocabularies have thousands, too many for one regular expression."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def occurs_in(self, text: str) -> bool:
        """Return whether the text has a control token's text in it."""
        return next(self._starts(text), None) is not None

    def _starts(self, text: str) -> Iterator[int]:
        for match in self._first.finditer(text):
            start = match.start()
            if any(text[start : start + length] in self._texts for length in self._lengths):
                yield start

    def split(self, text: str, marker: str) -> str:
        """Return the text with ``marker`` behind the first character of each control token's text."""
        cuts = [0, *(start + 1 for start in self._starts(text)), len(text)]
        return marker.join(text[start:end] for start, end in pairwise(cuts))


def _strings(value: object) -> Iterator[str]:
    """Yield every string inside a JSON value, keys of objects too: those of a schema are the client's."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


# Any: a JSON value of the same form.
def _map_strings(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
