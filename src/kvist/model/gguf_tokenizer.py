"""A tokeniser out of the metadata of a GGUF file.

Responsible for what ``tokenizer.ggml.*`` means: the two families of vocabulary, the pre-tokenisers named in files,
token types, and which tokens begin and end a text. Knows nothing of the container format or of tensors.

Source: the behaviour of llama.cpp (src/llama-vocab.cpp), where files are made; the splitting expressions are those of
the models' own tokenizer.json. Differences, each towards the model's own tokeniser:
    - special tokens are matched leftmost-longest, not longest-first over the whole text;
    - Qwen's text is normalised to NFC;
    - control tokens never arise from merging ordinary text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvist.errors import ModelLoadError
from kvist.model.vocabulary import PieceEncoding, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""``tokenizer.ggml.token_type``; 1 is an ordinary token."""

_END_TOKENS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
)
"""Control tokens that end a turn or a document wherever they exist; files name one of them at most."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is cut before byte-pair merging, and what else comes with a ``tokenizer.ggml.pre`` name."""

    names: tuple[str, ...]
    splits: tuple[str, ...]
    """Applied one after the other; text between matches is a piece of its own."""
    ignores_merges: bool = False
    """A piece that is a token as a whole is taken as that token, whatever the merges say."""
    adds_bos: bool = False
    """Unless the file says otherwise."""
    is_nfc: bool = False
    """The text is brought to Unicode normalisation form C first."""


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre
    for pre in (
        PreTokenizer(
            names=("default",),
            splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
        ),
        PreTokenizer(names=("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "exaone4"), splits=(_GPT2,)),
        PreTokenizer(
            names=("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
            splits=(r"\p{N}", _GPT2),
        ),
        PreTokenizer(
            names=("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
            splits=(_LLAMA3,),
            ignores_merges=True,
            adds_bos=True,
        ),
        PreTokenizer(names=("dbrx", "smaug-bpe"), splits=(_LLAMA3,)),
        PreTokenizer(names=("qwen2", "deepseek-r1-qwen"), splits=(_QWEN2,), is_nfc=True),
        PreTokenizer(names=("tekken",), splits=(_TEKKEN,), ignores_merges=True, adds_bos=True),
        PreTokenizer(
            names=("deepseek-coder",),
            splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
        ),
    )
    for name in pre.names
}
"""Every pre-tokeniser that Kvist knows, by the names files use."""


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary that the metadata describes.

    Args:
        metadata: Key-value section of a GGUF file. Any: values are those of the file, checked here.

    Raises:
        ModelLoadError: An entry is missing, of the wrong type or inconsistent, or the kind of tokeniser is unknown.
    """
    model = _get(metadata, "model", str)
    if model not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"[tokenizer] tokenizer.ggml.model must be gpt2 or llama, received {model!r}"
        )
    pieces = [
        piece or f"[EMPTY_{token_id}]"
        for token_id, piece in enumerate(_get_list(metadata, "tokens", str))
    ]
    types = _get_list(metadata, "token_type", int, default=[1] * len(pieces))
    _check_length("token_type", types, pieces)
    if model == "gpt2":
        adds_bos, backend = _byte_level(metadata, pieces)
        strips_leading_space = False
    else:
        pieces = [
            # User-defined tokens are matched in the text as it is, before spaces are replaced.
            piece.replace("▁", " ") if kind == _USER_DEFINED else piece
            for piece, kind in zip(pieces, types, strict=True)
        ]
        adds_bos = True
        strips_leading_space = bool(_get(metadata, "add_space_prefix", bool, default=True))
        backend = _sentencepiece(metadata, pieces, types, has_prefix=strips_leading_space)
    _add_whole_tokens(backend, pieces, types)
    bos = _token_id(metadata, "bos_token_id", pieces)
    eos = _token_id(metadata, "eos_token_id", pieces)
    adds_bos = _get(metadata, "add_bos_token", bool, default=adds_bos)
    adds_eos = _get(metadata, "add_eos_token", bool, default=False)
    set_text_borders(
        backend, pieces[bos] if adds_bos and bos is not None else None,
        pieces[eos] if adds_eos and eos is not None else None,
    )  # fmt: skip
    special = {token_id for token_id, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)}
    return Vocabulary(
        backend=backend,
        size=len(pieces),
        encoding=PieceEncoding.BYTE_LEVEL if model == "gpt2" else PieceEncoding.SENTENCEPIECE,
        literal_ids=frozenset(special | {i for i, k in enumerate(types) if k == _USER_DEFINED}),
        special_ids=frozenset(special),
        strips_leading_space=strips_leading_space,
        bos_token_id=bos,
        eos_token_ids=_end_ids(metadata, pieces, types, eos),
        chat_template=_get(metadata, "chat_template", str, default=None, prefix="tokenizer."),
        special_tokens=_special_tokens(metadata, pieces),
    )


def set_text_borders(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make ``backend`` put these tokens around a text when it is asked to add special tokens."""
    single = [token for token in (bos, "$A", eos) if token is not None]
    around = [(token, backend.token_to_id(token)) for token in {bos, eos} if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)


def _byte_level(metadata: Mapping[str, Any], pieces: Sequence[str]) -> tuple[bool, Tokenizer]:
    """Return whether texts begin with the bos token by default, and the byte-level BPE backend."""
    name = _get(metadata, "pre", str, default="default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelLoadError(
            f"[tokenizer] unknown pre-tokeniser {name!r} in tokenizer.ggml.pre; "
            f"known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    # Spaces are spelled otherwise in byte-level pieces, so the first one is the border.
    halves = (merge.partition(" ") for merge in _get_list(metadata, "merges", str))
    merges = [(left, right) for left, _, right in halves]
    backend = _bpe(pieces, merges, ignore_merges=pre.ignores_merges)
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    # The library has GPT-2's expression built in, a third faster than the same one given to it.
    ends_with_gpt2 = pre.splits[-1] == _GPT2
    splits = pre.splits[:-1] if ends_with_gpt2 else pre.splits
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=ends_with_gpt2)]
    )
    backend.decoder = decoders.ByteLevel()
    return pre.adds_bos, backend


def _sentencepiece(
    metadata: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int], *, has_prefix: bool
) -> Tokenizer:
    scores = _get_list(metadata, "scores", float)
    _check_length("scores", scores, pieces)
    unknown = _token_id(metadata, "unknown_token_id", pieces)
    backend = _bpe(
        pieces,
        _merges_by_score(pieces, scores, types),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    replace = normalizers.Replace(" ", "▁")
    # Between special tokens each stretch of text is normalised on its own, and gets its own space.
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if has_prefix else replace
    )
    return backend


def _merges_by_score(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return every merge that SentencePiece's algorithm can make, best score first.

    SentencePiece joins the adjacent pair whose *result* is the token of the best score; byte-pair encoding follows a
    list of pairs. Listing all pairs that make a token, in the order of that token's score, gives the same result but
    for ties, where the list prefers the longer left half and SentencePiece the leftmost place.

    Complexity: O(characters in the vocabulary); 0.1 s for 32,000 tokens, 1 s for 262,000.
    """
    whole = (_UNKNOWN, _CONTROL, _BYTE)
    can_merge = {p for p, kind in zip(pieces, types, strict=True) if kind not in whole}
    merges = [
        (-score, -border, piece)
        for piece, score, kind in zip(pieces, scores, types, strict=True)
        if kind not in whole
        for border in range(1, len(piece))
        if piece[:border] in can_merge and piece[border:] in can_merge
    ]
    merges.sort()
    return [(piece[:-border], piece[-border:]) for _, border, piece in merges]


def _bpe(
    pieces: Sequence[str],
    merges: Sequence[tuple[str, str]],
    **options: Any,  # noqa: ANN401  # tokenizers' own
) -> Tokenizer:
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        twice = next(piece for token_id, piece in enumerate(pieces) if ids[piece] != token_id)
        raise ModelLoadError(f"[tokenizer] tokenizer.ggml.tokens holds {twice!r} twice")
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelLoadError(
            f"[tokenizer] tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}"
        ) from error


def _add_whole_tokens(backend: Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    special, user_defined = [], []
    for piece, kind in zip(pieces, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(piece, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            user_defined.append(AddedToken(piece, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(user_defined)


def _end_ids(
    metadata: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int], eos: int | None
) -> tuple[int, ...]:
    named = [eos, *(_token_id(metadata, key, pieces) for key in ("eot_token_id", "eom_token_id"))]
    known = set(_END_TOKENS)
    by_text = [
        token_id
        for token_id, piece in enumerate(pieces)
        if types[token_id] in (_CONTROL, _USER_DEFINED) and piece in known
    ]
    # A dict keeps the order: the file's own end-of-sequence token is the first.
    return tuple(dict.fromkeys(i for i in (*named, *by_text) if i is not None))


def _special_tokens(metadata: Mapping[str, Any], pieces: Sequence[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(metadata, f"{key}_token_id", pieces) for name, key in names.items()}
    return {name: pieces[token_id] for name, token_id in ids.items() if token_id is not None}


def _token_id(metadata: Mapping[str, Any], name: str, pieces: Sequence[str]) -> int | None:
    token_id: int | None = _get(metadata, name, int, default=None)
    if token_id is not None and not 0 <= token_id < len(pieces):
        raise ModelLoadError(
            f"[tokenizer] tokenizer.ggml.{name} must be below the vocabulary's size {len(pieces)}, received {token_id}"
        )
    return token_id


_REQUIRED: Any = object()


# Any: the value has the type asked for, or is the default.
def _get(
    metadata: Mapping[str, Any],
    name: str,
    kind: type,
    *,
    default: Any = _REQUIRED,  # noqa: ANN401
    prefix: str = "tokenizer.ggml.",
) -> Any:  # noqa: ANN401
    value = metadata.get(prefix + name)
    if value is None:
        if default is _REQUIRED:
            raise ModelLoadError(
                f"[tokenizer] the file has no {prefix}{name}; it holds no tokeniser that Kvist can use"
            )
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelLoadError(
            f"[tokenizer] {prefix}{name} must be of type {kind.__name__}, received {type(value).__name__}"
        )
    return value


def _get_list(
    metadata: Mapping[str, Any],
    name: str,
    kind: type,
    *,
    default: Any = _REQUIRED,  # noqa: ANN401
) -> list[Any]:
    values: list[Any] = _get(metadata, name, list, default=default)
    if not {type(value) for value in values} <= {kind}:
        raise ModelLoadError(
            f"[tokenizer] tokenizer.ggml.{name} must be an array of {kind.__name__}"
        )
    return values


def _check_length(name: str, values: Sequence[object], pieces: Sequence[str]) -> None:
    if len(values) != len(pieces):
        raise ModelLoadError(
            f"[tokenizer] tokenizer.ggml.{name} has {len(values)} entries for {len(pieces)} tokens"
        )
