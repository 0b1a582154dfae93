"""Log-probabilities in the two shapes of OpenAI's API.

Responsible for ``logprobs`` of /v1/completions (parallel lists) and of /v1/chat/completions (a list of objects). Knows
the tokeniser only through the bytes of each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvist.engine.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.server.ports import ServedTokenizer
    from kvist.server.prompts import Prompt
    from kvist.types import TokenLogprobs

Json = dict[str, Any]  # Any: a JSON document


def token_text(raw: bytes) -> str:
    r"""Return a token's text, or OpenAI's ``bytes:\xe2\x80`` form when it is a part of a character only.

    So two different tokens never share a key in ``top_logprobs`` because both decode to the replacement character.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """The ``logprobs`` objects of one choice of /v1/completions, in any number of pieces.

    Args:
        tokenizer: For the bytes of tokens.
        num_top: Alternatives asked for; 0 leaves ``top_logprobs`` null.
        prompt: What comes before the choice's first output token; not part of its text (``echo`` excludes
            log-probabilities).
    """

    def __init__(self, tokenizer: ServedTokenizer, num_top: int, prompt: Prompt) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._text_offset = 0
        # The rules by which the engine makes the text, so that offsets and text agree: control tokens have none, and
        # the tokens of one character all start where it will.
        self._detokenizer = Detokenizer(tokenizer, previous_token_id=prompt.token_ids[-1])

    def piece(self, entries: Sequence[TokenLogprobs]) -> Json:
        """Return the object for the next tokens of the choice."""
        offsets = []
        for entry in entries:
            offsets.append(self._text_offset)
            self._text_offset += len(self._detokenizer.append(entry.token_id))
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if self._num_top else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._text(token_id): logprob for token_id, logprob in entry.top}
        # OpenAI: "the API will always return the logprob of the sampled token".
        top.setdefault(self._text(entry.token_id), entry.logprob)
        return top

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id))


def chat_logprobs(tokenizer: ServedTokenizer, entries: Sequence[TokenLogprobs]) -> Json:
    """Return the ``logprobs`` object of a choice of /v1/chat/completions for some of its tokens."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, *pair) for pair in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: ServedTokenizer, token_id: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {"token": token_text(raw), "logprob": logprob, "bytes": list(raw)}
