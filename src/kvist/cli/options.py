"""Command-line flags made from the configuration dataclasses.

Responsible for the one translation between a dataclass field and a flag: its name (``_`` becomes ``-``), type, default,
help and choices. A command declares a parameter of type ``EngineConfig``, ``ServerConfig`` or ``SamplingParams`` and
gets every flag of it, so no option's name is written twice. Knows nothing of what the options do.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kvist.cli.console import EXIT_USAGE, fail, reported_errors
from kvist.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from kvist.errors import ConfigError, InvalidSamplingParams
from kvist.types import SamplingParams

Command = Callable[..., None]
"""A function that typer runs as a command."""

ENGINE_GROUPS: dict[str, type] = {
    "Model": ModelConfig,
    "KV cache": CacheConfig,
    "Scheduling": SchedulerConfig,
}
"""Panels of the help text, and the dataclasses they show, of an ``EngineConfig``."""

GROUPS: dict[type, dict[str, type]] = {
    EngineConfig: ENGINE_GROUPS,
    ServerConfig: {"Server": ServerConfig},
    SamplingParams: {"Sampling": SamplingParams},
}
"""What a command may declare, and the groups of flags it then gets."""


class Only:
    """Beside a configuration object in ``Annotated``: the command takes these of its options and no others."""

    def __init__(self, *field_names: str) -> None:
        self.field_names = frozenset(field_names)


class Without:
    """Beside a configuration object in ``Annotated``: the command takes all of its options but these."""

    def __init__(self, *field_names: str) -> None:
        self.field_names = frozenset(field_names)


SINGLE_TENANT = Without("cache_share", "pin_fraction")
"""For commands whose one user needs no share of the cache, and can pin nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option of the command line."""

    field_name: str
    """Field of the dataclass, and keyword of the Python API."""
    panel: str
    """Heading it stands under."""
    kind: type
    """Type of one value: int, float, str or bool."""
    is_repeatable: bool
    """Whether it may be given several times."""
    key_kind: type | None
    """Type of the keys, where its values are KEY=NUMBER pairs: int or str; None where they are not."""
    metavar: str
    """What stands for one value in the help text."""
    default: Any  # any field default
    """None where nothing is set."""
    help: str
    choices: tuple[str, ...]
    """Empty: anything goes."""

    @property
    def name(self) -> str:
        """The flag as typed, dashes included."""
        return "--" + self.field_name.replace("_", "-")


@cache
def flags_of(declared: type) -> tuple[Flag, ...]:
    """Return the flags of an ``EngineConfig``, ``ServerConfig`` or ``SamplingParams``, in declaration order."""
    flags: list[Flag] = []
    for panel, kind in GROUPS[declared].items():
        # Names that the dataclass's module imports for type checkers only.
        hints = get_type_hints(kind, localns={"Mapping": Mapping})
        flags += [
            _flag(field, hints[field.name], panel=panel, kind=kind)
            for field in dataclasses.fields(kind)
        ]
    return tuple(flags)


def takes_options(function: Command) -> Command:
    """Give a command the flags of the configuration objects among its parameters, and the common error handling.

    Args:
        function: Its parameters annotated ``EngineConfig``, ``ServerConfig`` or ``SamplingParams`` are filled in; the
            others are ordinary typer parameters and come first in the help text.

    Returns:
        A function for ``typer.Typer.command``; an option out of its range leaves it with exit code 2.
    """
    hints = get_type_hints(function, include_extras=True)
    own: list[inspect.Parameter] = []
    declared: dict[str, type] = {}
    flags: dict[str, tuple[Flag, ...]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = _declared_kind(hints[name])
        if kind is None:
            own.append(parameter.replace(annotation=hints[name]))
        else:
            declared[name] = kind
            flags[name] = _taken_flags(hints[name], kind)

    def command(**values: Any) -> None:  # noqa: ANN401  # what typer parsed, by parameter name
        built = {
            name: _build(
                declared[name], {flag: values.pop(flag.field_name) for flag in flags[name]}
            )
            for name in declared
        }
        with reported_errors():
            function(**values, **built)

    parameters = own + [_parameter(flag) for group in flags.values() for flag in group]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__module__ = function.__module__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    # typer reads a command's flags from its signature.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # a documented protocol
    return command


def markdown_table(declared: type) -> str:
    """Return the options of one configuration object as a Markdown table, as README.md shows it."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for flag in flags_of(declared):
        choices = (
            f" ({', '.join(f'`{choice}`' for choice in flag.choices)})" if flag.choices else ""
        )
        default = "" if flag.default in (None, (), {}) else f"`{flag.default}`"
        lines.append(f"| `{flag.name}` | {default} | {flag.help}{choices} |")
    return "\n".join(lines)


def _declared_kind(hint: Any) -> type | None:  # noqa: ANN401  # a type
    """Return the configuration object that a parameter stands for; None for an ordinary parameter."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    # Ordinary parameters may be unions, which are unhashable in some forms.
    return kind if isinstance(kind, type) and kind in GROUPS else None


def _taken_flags(hint: Any, kind: type) -> tuple[Flag, ...]:  # noqa: ANN401  # a type
    known = {flag.field_name for flag in flags_of(kind)}
    names = set(known)
    for extra in get_args(hint)[1:]:
        if isinstance(extra, (Only, Without)):
            assert extra.field_names <= known
            names = (
                names & extra.field_names if isinstance(extra, Only) else names - extra.field_names
            )
    return tuple(flag for flag in flags_of(kind) if flag.field_name in names)


def _flag(field: dataclasses.Field[Any], hint: Any, *, panel: str, kind: type) -> Flag:  # noqa: ANN401  # a type
    value_types = [t for t in get_args(hint) if t is not NoneType]
    inner = value_types[0] if get_origin(hint) is UnionType else hint
    origin = get_origin(inner)
    default = None if field.default is dataclasses.MISSING else field.default
    kind_of_one = get_args(inner)[0] if origin is tuple else str if origin is Mapping else inner
    return Flag(
        field_name=field.name,
        panel=panel,
        kind=kind_of_one,
        is_repeatable=origin is tuple,
        key_kind=get_args(inner)[0] if origin is Mapping else None,
        metavar=field.metadata.get("metavar", kind_of_one.__name__.upper()),
        default=default,
        help=field.metadata.get("help") or _field_docstrings(kind)[field.name],
        choices=tuple(field.metadata.get("choices", ())),
    )


@cache
def _field_docstrings(kind: type) -> dict[str, str]:
    """Return the string below each field of a dataclass; Python keeps them in the source only."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    docstrings: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(before.target, ast.Name)
            docstrings[before.target.id] = _plain(ast.literal_eval(after.value))
    return docstrings


def _plain(docstring: str) -> str:
    """Return a docstring as the one line of plain text that a terminal wants."""
    return " ".join(docstring.replace("``", "").split())


def _parameter(flag: Flag) -> inspect.Parameter:
    option: dict[str, Any] = {"help": flag.help, "rich_help_panel": flag.panel}
    names = [flag.name]
    annotation: Any = flag.kind  # Any: a type built at run time
    default = flag.default
    if flag.is_repeatable or flag.key_kind is not None:
        annotation, default = list[flag.kind], None  # type: ignore[name-defined]  # a run-time type
        option["metavar"] = flag.metavar
    if default is None:
        annotation = annotation | None
    if flag.kind is bool:
        names = [f"{flag.name}/--no-{flag.name[2:]}"]
    if flag.choices:
        option["callback"] = _choice_check(flag)
        option["autocompletion"] = _choice_completion(flag)
        option["metavar"] = "|".join(flag.choices)
    return inspect.Parameter(
        flag.field_name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, typer.Option(*names, **option)],
    )


def _choice_check(flag: Flag) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value in flag.choices:
            return value
        close = difflib.get_close_matches(value, flag.choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise typer.BadParameter(
            f"expected one of {', '.join(flag.choices)}, received {value!r}{hint}"
        )

    return check


def _choice_completion(flag: Flag) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in flag.choices if choice.startswith(incomplete)]

    return complete


def _build(declared: type, values: dict[Flag, Any]) -> EngineConfig | ServerConfig | SamplingParams:
    """Build the configuration object from the parsed values; leave with a usage error when they do not fit."""
    given = {
        flag.field_name: _from_command_line(flag, value)
        for flag, value in values.items()
        if value not in (None, [])
    }
    try:
        if declared is EngineConfig:
            return EngineConfig.from_options(**given)
        if declared is ServerConfig:
            return ServerConfig(**given)
        return SamplingParams(**given)
    except (ConfigError, InvalidSamplingParams) as error:
        fail(str(error), exit_code=EXIT_USAGE)


def _from_command_line(flag: Flag, value: Any) -> Any:  # noqa: ANN401  # any option's value
    if flag.is_repeatable:
        return tuple(value)
    if flag.key_kind is None:
        return value
    pairs: dict[Any, float] = {}  # Any: keys of the flag's own type
    for pair in value:
        text, separator, number = pair.partition("=")
        try:
            key = flag.key_kind(text)
            if key in pairs:
                fail(f"[{flag.name}] {text} was given twice; give it once", exit_code=EXIT_USAGE)
            pairs[key] = float(number)
        except ValueError:
            fail(
                f"[{flag.name}] expected {flag.metavar}, received {pair!r}"
                + ("" if separator else " without '='"),
                exit_code=EXIT_USAGE,
            )
    return pairs
