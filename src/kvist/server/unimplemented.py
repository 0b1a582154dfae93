"""The parameters of OpenAI's API that Kvist does not implement, and the values of them that ask for nothing.

Responsible for refusing each by name with the reason. A client library that always sends ``"functions": null`` or
``"response_format": {"type": "text"}`` asks for nothing, so that is accepted. Knows nothing of the parameters that
*are* implemented.

Source: the parameter lists of openai-python 3.57, ``types/completion_create_params.py`` and
``types/chat/completion_create_params.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvist.errors import UnsupportedParameter

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Unimplemented:
    """One parameter that is known and refused."""

    reason: str
    """What is missing, or what to do instead; completes "... is not implemented: "."""
    neutral: tuple[object, ...] = ()
    """Values, beside null, that change nothing in OpenAI's API either."""

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether the value can be accepted because it has no effect."""
        # The types are compared too: in Python 0 == False and 1 == True.
        return value is None or any(
            type(value) is type(neutral) and value == neutral for neutral in self.neutral
        )


_NO_TOOLS = "Kvist does not call tools"
_NO_CALLS = (
    "Kvist shows tools to the model and returns what it writes as content; it parses no calls, so it can force "
    "and forbid none"
)
_NO_AUDIO = "Kvist produces text only"
_NO_CACHE_HINTS = "Kvist caches every prompt's prefix by itself, private to the API key"
_NO_STORE = "Kvist keeps no copy of requests or answers"
_USE_KEYS = "give each user an API key of their own, which is also a private cache namespace"

_STREAM_ONLY = {
    "include_obfuscation": Unimplemented("Kvist does not pad its stream", (False,)),
}
STREAM_OPTIONS: Mapping[str, Unimplemented] = _STREAM_ONLY

COMPLETION: Mapping[str, Unimplemented] = {
    "best_of": Unimplemented("only best_of equal to n is possible; ask for n and choose yourself"),
    "suffix": Unimplemented("Kvist does not fill in the middle"),
    "user": Unimplemented(_USE_KEYS),
}

CHAT: Mapping[str, Unimplemented] = {
    "audio": Unimplemented(_NO_AUDIO),
    "function_call": Unimplemented(_NO_TOOLS, ("none",)),
    "functions": Unimplemented(_NO_TOOLS, ([],)),
    "metadata": Unimplemented(_NO_STORE, ({},)),
    "modalities": Unimplemented(_NO_AUDIO, (["text"],)),
    "moderation": Unimplemented("Kvist does not moderate"),
    "parallel_tool_calls": Unimplemented(_NO_CALLS, (True,)),
    "prediction": Unimplemented("Kvist does not speculate from predicted outputs"),
    "prompt_cache_key": Unimplemented(_NO_CACHE_HINTS),
    "prompt_cache_options": Unimplemented(_NO_CACHE_HINTS),
    "reasoning_effort": Unimplemented("Kvist does not steer reasoning"),
    "response_format": Unimplemented(
        "Kvist does not constrain its output; only text is possible", ({"type": "text"},)
    ),
    "safety_identifier": Unimplemented(_USE_KEYS),
    "service_tier": Unimplemented("Kvist has one tier", ("auto", "default")),
    "store": Unimplemented(_NO_STORE, (False,)),
    "tool_choice": Unimplemented(_NO_CALLS, ("none", "auto")),
    "user": Unimplemented(_USE_KEYS),
    "verbosity": Unimplemented("Kvist does not steer verbosity", ("medium",)),
    "web_search_options": Unimplemented("Kvist does not search the web"),
}

MESSAGE: Mapping[str, Unimplemented] = {
    "annotations": Unimplemented("Kvist does not cite sources", ([],)),
    "audio": Unimplemented(_NO_AUDIO),
    "function_call": Unimplemented(_NO_TOOLS),
    "name": Unimplemented("chat templates have no place for it; write it into the content"),
    "refusal": Unimplemented("write it as content"),
    "tool_call_id": Unimplemented(_NO_TOOLS),
    "tool_calls": Unimplemented(_NO_TOOLS, ([],)),
}

FUNCTION: Mapping[str, Unimplemented] = {
    "strict": Unimplemented("Kvist does not constrain its output", (False,)),
}

TEXT_PART: Mapping[str, Unimplemented] = {
    "prompt_cache_breakpoint": Unimplemented(_NO_CACHE_HINTS),
}


def drop_neutral(
    document: Mapping[str, Any],  # Any: a JSON document
    table: Mapping[str, Unimplemented],
    path: str,
) -> dict[str, Any]:
    """Return ``document`` without the entries of ``table`` that ask for nothing.

    Args:
        document: A JSON object of the client's.
        table: The parameters refused there.
        path: Where the object is in the request, ending with a dot; empty at the top.

    Raises:
        UnsupportedParameter: An entry of ``table`` asks for something.
    """
    kept = {}
    for name, value in document.items():
        entry = table.get(name)
        if entry is None:
            kept[name] = value
        elif not entry.asks_for_nothing(value):
            raise UnsupportedParameter(
                f"[request] {path}{name} is part of OpenAI's API but not implemented: {entry.reason}; "
                "leave it out",
                param=f"{path}{name}",
            )
    return kept
