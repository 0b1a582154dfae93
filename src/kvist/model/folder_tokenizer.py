"""A tokeniser out of a folder in Hugging Face's layout: tokenizer.json and the small files beside it.

Responsible for the meaning of tokenizer.json's decoder, of tokenizer_config.json and of generation_config.json. Knows
no tensor library; transformers is not imported, because that takes seconds and brings torch along.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kvist.errors import ModelLoadError
from kvist.model.gguf_tokenizer import set_text_borders
from kvist.model.vocabulary import PieceEncoding, Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

_NAMED_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
"""Control tokens that end a turn; they end an answer too where the chat template writes them."""


def vocabulary_from_folder(folder: Path) -> Vocabulary:
    """Return the vocabulary of a checkpoint folder.

    Raises:
        ModelLoadError: tokenizer.json is missing or damaged, or decodes in a way Kvist does not know.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"[tokenizer] {folder} has no tokenizer.json; save it there with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelLoadError(f"[tokenizer] {path} cannot be read: {error}") from error
    # Files remember limits of the last training run.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config)
    _add_missing_tokens(backend, config, special_tokens)
    if "add_bos_token" in config or "add_eos_token" in config:
        set_text_borders(
            backend,
            special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    encoding, strips_leading_space = _decoding(backend, path)
    added = backend.get_added_tokens_decoder()
    template = _chat_template(folder, config)
    bos = special_tokens.get("bos_token")
    return Vocabulary(
        backend=backend,
        size=1 + max(max(backend.get_vocab().values(), default=-1), max(added, default=-1)),
        encoding=encoding,
        literal_ids=frozenset(added),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        strips_leading_space=strips_leading_space,
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        eos_token_ids=_end_ids(folder, backend, special_tokens.get("eos_token"), template),
        chat_template=template,
        special_tokens=special_tokens,
    )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the named special tokens; each is a string, or an object with the text as ``content``."""
    texts = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def _add_missing_tokens(
    backend: Backend, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Make tokens that only tokenizer_config.json declares known to the backend, under their declared ids."""
    declared = config.get("added_tokens_decoder")
    entries = declared.items() if isinstance(declared, dict) else ()
    try:
        tokens = sorted((int(token_id), entry) for token_id, entry in entries)
        for token_id, entry in tokens:
            token = AddedToken(
                entry["content"],
                special=entry.get("special", False),
                normalized=entry.get("normalized", False),
                lstrip=entry.get("lstrip", False),
                rstrip=entry.get("rstrip", False),
                single_word=entry.get("single_word", False),
            )
            if token_id not in backend.get_added_tokens_decoder():
                add = backend.add_special_tokens if token.special else backend.add_tokens
                add([token])
                found = backend.token_to_id(token.content)
                if found != token_id:
                    raise ModelLoadError(
                        f"[tokenizer] tokenizer_config.json gives {token.content!r} the id {token_id}, "
                        f"tokenizer.json {found}"
                    )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"[tokenizer] added_tokens_decoder in tokenizer_config.json cannot be read: {error}"
        ) from error
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in special_tokens.values()
            if text not in special and backend.token_to_id(text) is not None
        ]
    )


def _decoding(backend: Backend, path: Path) -> tuple[PieceEncoding, bool]:
    """Return how pieces spell bytes, and whether decoding takes the first space away."""
    if backend.decoder is None:
        raise ModelLoadError(
            f"[tokenizer] {path} names no decoder; Kvist needs one to know its bytes"
        )
    top: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = top["decoders"] if top["type"] == "Sequence" else [top]
    kinds = {step["type"] for step in steps}
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return PieceEncoding.BYTE_LEVEL, False
    replaces = [step for step in steps if step["type"] == "Replace"]
    strips = any(
        step["type"] == "Strip" and step["content"] == " " and step["start"] == 1 for step in steps
    )
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and any(
        step["pattern"] == {"String": "▁"} and step["content"] == " " for step in replaces
    ):
        has_bytes = "ByteFallback" in kinds
        return (PieceEncoding.SENTENCEPIECE if has_bytes else PieceEncoding.METASPACE), strips
    if kinds == {"Metaspace"} and steps[0].get("replacement") == "▁":
        return PieceEncoding.METASPACE, steps[0].get("prepend_scheme", "always") != "never"
    raise ModelLoadError(
        f"[tokenizer] {path} decodes by {', '.join(sorted(kinds))}, expected byte-level BPE or SentencePiece"
    )


def _end_ids(
    folder: Path, backend: Backend, eos: str | None, template: str | None
) -> tuple[int, ...]:
    ids = [backend.token_to_id(eos)] if eos is not None else []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids += [token_id for token_id in values if type(token_id) is int]  # a bool is none
    ids += [backend.token_to_id(text) for text in _TURN_ENDS if template and text in template]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"[tokenizer] {path} cannot be read: {error}") from error
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # several, by name
        defaults = (
            entry.get("template")
            for entry in template
            if isinstance(entry, dict) and entry.get("name") == "default"
        )
        template = next(defaults, None)
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; empty when the file is absent."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"[tokenizer] {path} is not JSON: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"[tokenizer] {path} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"[tokenizer] {path} must hold a JSON object")
    return value
