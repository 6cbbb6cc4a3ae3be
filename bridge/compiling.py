"""Compiler options for our programs, which only versions of jaxlib that are known to compile
wrongly need.

jaxlib 0.10.2 and 0.11.0 hand parts of a program for x86 CPUs to a library, as ``__ynn_fusion``,
that computes some of them wrongly (the last of more than 32,768 rows) and ends the process in
others (seven dimensions or more). A compiler option turns this off, but for products of matrices by
themselves, which the library computes rightly, and up to ten times as fast as XLA:
https://github.com/jax-ml/jax/issues/39103, https://github.com/jax-ml/jax/issues/39257.

JAX takes options only for an outermost ``jax.jit``, not for an operator that runs by itself and not
for the functions of jax.numpy. Therefore the option belongs to a scope: all that JAX compiles on
this thread inside of ``correctly`` gets it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jaxlib

from bridge import private_jax
from bridge.errors import at_line

_MISCOMPILING = ("0.10.2", "0.11.0")
_OPTION = "xla_cpu_experimental_ynn_fusion_type"
_RIGHT = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"  # what the library computes rightly
# JAX keeps programs that are compiled in different contexts apart
_correct = jax.make_user_context(False)
_nothing = contextlib.nullcontext()


class MiscompilationWarning(UserWarning):
    """The user's own jax.jit compiles one of our functions with a jaxlib that is known to compile
    some programs wrongly.
    """


def correctly() -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX compiles correctly, on this thread.

    Returns:
        AbstractContextManager: to be entered once.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.make_user_context.html

    Example:
        >>> import jax.numpy as jnp
        >>> from bridge.compiling import correctly
        >>> with correctly():
        ...     print(jnp.arange(3).sum())
        3
    """
    return _correct(True) if _installed() else _nothing


def options() -> dict[str, str] | None:
    """``compiler_options`` for a program that is compiled outside of ``correctly``; None if none
    are needed.

    Example:
        >>> jax.jit(lambda x: x + 1, compiler_options=options())(1).item()
        2
    """
    return {_OPTION: _RIGHT} if miscompiles() and jax.default_backend() == "cpu" else None


def at_call() -> contextlib.AbstractContextManager[Any]:
    """A context for calls of a program that was jitted with ``options``: ``correctly`` if these
    could not know the backend.

    Entering ``correctly`` takes two microseconds, a seventh of a small program's call.
    """
    return _nothing if options_suffice() else correctly()


@functools.cache
def options_suffice() -> bool:
    """Whether a program that was jitted with ``options`` can be called without ``correctly``."""
    return not miscompiles() or jax.default_backend() == "cpu"


def miscompiles() -> bool:
    """Whether this jaxlib compiles some programs for this processor wrongly; not if the user has
    set the option in ``XLA_FLAGS``.
    """
    return (
        jaxlib.__version__ in _MISCOMPILING
        and platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
        and not re.search(rf"{_OPTION}=({_RIGHT})?(\s|$)", os.environ.get("XLA_FLAGS", ""))
    )


@functools.cache
def _installed() -> bool:
    """Whether ``correctly`` has to do anything; if so, JAX asks ``_more`` from now on."""
    found = miscompiles()
    if found:
        private_jax.add_compiler_options(_more)
    return found


def _more(backend: str) -> dict[str, str]:
    return {_OPTION: _RIGHT} if _correct.value and backend == "cpu" else {}


def warn_of_jit(values: Iterable[Any]) -> None:
    """Warn once, with MiscompilationWarning, if the user's own jax.jit or jax.grad will compile the
    program of these results.
    """
    if (
        _installed()
        and not _correct.value
        and private_jax.compiled_later(values)
        and jax.default_backend() == "cpu"
    ):
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        "a function of torchfunc_jax runs inside your own jax.jit or jax.grad, and jaxlib "
        f"{jaxlib.__version__} compiles some programs for x86 CPUs wrongly. Set the environment "
        f"variable XLA_FLAGS=--{_OPTION}= before JAX is used, or write "
        f'jax.jit(..., compiler_options={{"{_OPTION}": ""}}), or call what you have jitted in '
        "`with bridge.compiling.correctly():`; jaxlib "
        f"0.11.1 and later compile correctly (Python 3.12 and later){at_line()}",
        MiscompilationWarning,
        stacklevel=2,
    )


__all__ = ["MiscompilationWarning", "correctly", "miscompiles", "options", "warn_of_jit"]
