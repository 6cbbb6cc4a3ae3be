"""jit: a torch function compiled into one XLA program."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, overload

from torch.compiler import is_dynamo_compiling

from bridge.boundary.handing_over import refuse_no_function
from bridge.errors import public
from bridge.jit.compiled import ProgramInfo
from bridge.jit.jitted import Jitted
from bridge.trace.torch_random import checked


@overload
def jit(
    func: Callable[..., Any],
    *,
    donate: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    max_programs: int = 64,
    random_numbers: str | None = None,
) -> Jitted: ...


@overload
def jit(
    func: None = None,
    *,
    donate: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    max_programs: int = 64,
    random_numbers: str | None = None,
) -> Callable[[Callable[..., Any]], Jitted]: ...


@public
def jit(
    func: Callable[..., Any] | None = None,
    *,
    donate: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    max_programs: int = 64,
    random_numbers: str | None = None,
) -> Any:
    """Compile a function of tensors into one XLA program; also transforms (``jit(vmap(grad(f)))``)
    and modules.

    The function's Python runs once for each combination of tree structure, shapes, dtypes, static
    arguments, PyTorch's ambient state (autocast, default dtype and device, ...), and the modules,
    hooks and Python values that it uses. Tensors it captures are inputs, read at each call; tensors
    it changes in place are changed when the call returns; random numbers are drawn from torch's
    generator, anew at each call, before the program runs. If arguments share memory and the
    function writes to one of them, the function itself runs, without compilation.

    A Python float or int is static when it is first seen. When it changes, it becomes an input of
    the program, unless the function asks for its value (a comparison, a shape, ``int()``): then it
    stays static, and each value has a program of its own. Other Python values that the function
    uses (numbers, strings, functions, objects and containers of them in variables, defaults,
    attributes and classes) are always static: when one changes, the function is traced anew. Other
    sources of values are read only when the function is traced: the environment, files, clocks,
    ``globals()["name"]``, the attributes of installed packages, containers of more than 4096
    numbers, and numpy arrays of more than a megabyte. docs/jit.md has the details; ``explain``
    tells why a program was compiled.

    Args:
        func: takes and returns pytrees of tensors and static values; None: returns a decorator.
        donate: positions of arguments whose memory may be reused for the results; they must not be
            used after the call, except for tensors that func writes to.
        static_argnums: positions of arguments that are static as a whole; leaves that are neither
            tensors nor numbers always are.
        random_numbers: "torch": torch draws the random numbers before the program runs; "jax": the
            program does, from a key; None: as ``torchfunc_jax.random_numbers`` and the environment
            say.
        max_programs: how many programs are kept; after that the least recently used one is dropped.

    Returns:
        Jitted: it is called like func, and returns torch tensors for torch tensors, jax.Arrays for
            jax.Arrays.

    Raises:
        DataDependentError: the function asks for values of tensors (``if x.sum() > 0``), or for a
            shape that depends on them.
        RuntimeError: the function changes a generator, or memory that its inputs share, in a way
            that cannot be compiled, and cannot run uncompiled because its arguments are jax.Arrays.
        ValueError: (at the call) donate names no argument of it.
        TypeError: a static argument that is not hashable; func is no function.
        ValueError: max_programs is not positive; another value of random_numbers; static_argnums
            names no argument of func.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.jit.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import grad, jit
        >>> jit(grad(lambda x: (x**2).sum()))(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    if func is not None:
        refuse_no_function(func, "jit")
    if max_programs < 1:
        raise ValueError(f"max_programs: expected a positive number, got {max_programs}")
    checked(random_numbers)
    if is_dynamo_compiling() and func is not None:
        return func
    if func is None:
        return functools.partial(
            jit,
            donate=donate,
            static_argnums=static_argnums,
            max_programs=max_programs,
            random_numbers=random_numbers,
        )
    positions = _positions("static_argnums", static_argnums)
    if positions and (beyond := max(positions)) >= (count := _positional(func)):
        raise ValueError(
            f"static_argnums: expected positions of the function's {count} positional arguments, "
            f"counted from 0, got {beyond}"
        )
    return Jitted(func, _positions("donate", donate), positions, max_programs, random_numbers)


def _positional(func: Callable[..., Any]) -> float:
    """How many positional arguments a function takes at most; infinity if it does not say so."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return math.inf
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return math.inf
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _positions(name: str, argnums: int | Sequence[int]) -> tuple[int, ...]:
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not all(hasattr(n, "__index__") and (n >= 0 or name == "donate") for n in positions):
        raise ValueError(
            f"{name}: expected positions of arguments, counted from 0, got {argnums!r}"
        )
    return positions


__all__ = ["Jitted", "ProgramInfo", "jit"]
