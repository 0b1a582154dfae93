"""Every exception that Kvist raises on purpose.

Responsible for the names, the hierarchy and the wire facts (HTTP status, OpenAI error code) of each error. Knows
nothing about requests, tensors or HTTP libraries.

    EngineError
      ConfigError            the user's configuration cannot work
      ModelLoadError         a checkpoint is missing, corrupt or unsupported
      RequestError           this request is invalid                    -> HTTP 400
        PromptTooLong        prompt (plus output) exceeds the context   -> HTTP 400, context_length_exceeded
        InvalidSamplingParams  a sampling value is out of its range     -> HTTP 400
        UnsupportedParameter   a parameter Kvist does not implement     -> HTTP 400
        NotCached              a prefix to pin or retain is not computed -> HTTP 400
        PinBudgetExceeded      pins would hold more than they may       -> HTTP 400
      EngineOverloaded       the queue is full                          -> HTTP 429
      DeadlineExceeded       the request's own time ran out           -> HTTP 504
      EngineStopped          the engine has been shut down              -> HTTP 503
      TraceError             a recorded trace cannot be read
      BenchError             a benchmark cannot be run, or its result must not be believed
      KernelUnavailable      a forced implementation cannot run here
      InvariantViolation     a bug in Kvist; carries a state dump

Messages follow one form: ``[where] what was expected, what was received (with values), what to do``.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that Kvist raises on purpose."""


class ConfigError(EngineError):
    """The configuration cannot work; the message names the option to change."""


class ModelLoadError(EngineError):
    """A checkpoint or tokeniser is missing, corrupt, or of an unsupported kind."""


class RequestError(EngineError):
    """A request is invalid.

    Args:
        message: What was expected, what was received, what to do.
        param: The request parameter at fault, as spelled on the wire; None when it is the request as a whole.
        code: Machine-readable code in OpenAI's vocabulary.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class PromptTooLong(RequestError):
    """The prompt, or prompt plus requested output, does not fit the context or the KV memory."""

    code = "context_length_exceeded"


class InvalidSamplingParams(RequestError):
    """A sampling parameter is out of its valid range."""

    code = "invalid_value"


class UnsupportedParameter(RequestError):
    """The parameter is unknown, or known and not implemented; never silently ignored."""

    code = "unsupported_parameter"


class NotCached(RequestError):
    """A prefix that was to be pinned or retained is not computed, or no longer; nothing changed."""

    code = "not_cached"


class PinBudgetExceeded(RequestError):
    """Pins would hold more blocks than they may; the message has both numbers."""

    code = "pin_budget_exceeded"


class EngineOverloaded(EngineError):
    """The waiting queue is full.

    Args:
        message: The queue's length and limit, and the option that raises it.
        retry_after_s: Seconds after which a retry is reasonable.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EngineError):
    """The time that the request gave itself ran out before it had any output."""


class EngineStopped(EngineError):
    """The engine was shut down before, or while, this request ran."""


class TraceError(EngineError):
    """A recorded trace is missing, malformed, or of an unknown format; the message has the line number."""


class BenchError(EngineError):
    """A benchmark cannot be run, or somebody computed the wrong thing, so that its times mean nothing."""


class KernelUnavailable(EngineError):
    """A kernel implementation that was asked for by name cannot run on this machine."""


class InvariantViolation(EngineError):
    """A bug in Kvist: an internal law does not hold. The message carries the counters involved."""
