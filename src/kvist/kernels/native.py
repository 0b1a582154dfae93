"""The one door to the native kernels, ``kvist._native``: whether they are there, and which instruction set they use.

Responsible for importing the extension, which a package built without a C++ compiler does not have: everything here
can be asked without it, and what needs it raises ``KernelUnavailable`` with the reason. Knows nothing of what the
kernels compute, and imports no tensor library.

The choice of an instruction set is the process's, not the thread's, and must not change while a step runs. It is made
at the first use of the extension: of the sets that the CPU has, the best one whose kernels compute there what the
portable ones do (a check of a few milliseconds). ``KVIST_ISA`` makes it by hand, without the check.
"""

from __future__ import annotations

import importlib
import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvist import envvars
from kvist.errors import ConfigError, KernelUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

logger = logging.getLogger(__name__)

_NAME = "kvist._native"
_choice_lock = threading.Lock()
_is_chosen = False
_extension: ModuleType | None = None
_why_not = ""
try:
    _extension = importlib.import_module(_NAME)
except ModuleNotFoundError:
    _why_not = (
        "the native kernels were not built: no compiler for C++20 was found when Kvist was installed, or it failed; "
        "everything runs on torch, slower"
    )
except ImportError as error:
    _why_not = f"the native kernels cannot be loaded ({error}); everything runs on torch, slower"


def available() -> bool:
    """Return whether the native kernels are there."""
    return _extension is not None


def why_not() -> str:
    """Return why the native kernels are not there, and what that means; empty when they are."""
    return _why_not


def extension() -> ModuleType:
    """Return the extension module.

    Side effects:
        The first call chooses the instruction set.

    Raises:
        KernelUnavailable: It is not there.
    """
    global _is_chosen  # noqa: PLW0603  # once for the process, as the choice is
    if _extension is None:
        raise KernelUnavailable(f"[native] {_why_not}")
    if not _is_chosen:
        with _choice_lock:
            if not _is_chosen:
                if not envvars.forced_isa():
                    leave_wrong_kernels(_extension)
                _is_chosen = True
    return _extension


def leave_wrong_kernels(module: ModuleType) -> None:
    """Make the best instruction set current whose kernels agree with the portable ones; warn of each that does not.

    Args:
        module: The extension, with the best set current.
    """
    names = module.isas()
    for name, next_name in zip(names, [*names[1:], ""], strict=True):
        difference = module.self_check(name) if next_name else ""
        if not difference:
            module.force_isa(name)
            return
        logger.warning(
            "the native kernels for %s do not compute on this CPU what the portable ones do (%s); falling back to %s. "
            "Please report it; KVIST_ISA=%s runs them nevertheless",
            name,
            difference,
            next_name,
            name,
        )


def isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU and this build can run, the best one first, ``serial`` last.

    Raises:
        KernelUnavailable: The native kernels are not there.
    """
    return tuple(extension().isas())


def isa() -> str:
    """Return the instruction set that runs now: the best one, unless ``KVIST_ISA`` or ``forced_isa`` says otherwise.

    Raises:
        KernelUnavailable: The native kernels are not there.
        ConfigError: ``KVIST_ISA`` names none of ``isas()``.
    """
    module = extension()
    try:
        return str(module.isa())
    except ValueError:
        raise ConfigError(
            f"[environment] KVIST_ISA must be one of {', '.join(isas())}; set it to one of them, or unset it"
        ) from None


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Run every native kernel in the named instruction set, in all threads, until the block ends.

    Raises:
        KernelUnavailable: The native kernels are not there, or the CPU or the build has no such set.
    """
    module = extension()
    if name not in isas():
        raise KernelUnavailable(
            f"[native] expected an instruction set out of {', '.join(isas())}, received {name!r}"
        )
    previous = isa()
    module.force_isa(name)
    try:
        yield
    finally:
        module.force_isa(previous)


def describe() -> str:
    """Return in words, for a line of output, what the kernels run on."""
    return f"native kernels, {isa()}" if available() else _why_not
