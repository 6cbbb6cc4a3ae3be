"""Runs lowerings in the trace of a program: what they compute from constants
alone is computed now.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bridge.errors import DataDependentError
from bridge.trace import python_numbers
from bridge.trace.levels import answers, state


class NotConstant(Exception):
    """Raised by an operation whose result must not be a constant of the program, such as a random
    number.
    """


def run(lower: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """lower(*args, **kwargs); a small computation on constants is done now
    (``torch.tensor(3).item()``).
    """
    operands = [
        v for x in (*args, *kwargs.values()) for v in (x if type(x) in (list, tuple) else (x,))
    ]
    if not any(isinstance(v, jax.core.Tracer) or python_numbers.is_input(v) for v in operands):
        size = sum(
            math.prod(n for n in x if isinstance(n, int) and n > 0)
            for x in args
            if type(x) in (list, tuple)
        )
        if size + sum(v.size for v in operands if isinstance(v, jax.Array)) <= state.folded:
            # unless the lowering draws random numbers, or a key, which are inputs of the program
            with (
                contextlib.suppress(NotConstant, jax.errors.JAXTypeError),
                jax.ensure_compile_time_eval(),
            ):
                return lower(*args, **kwargs)
    # Without JAX's inner jits: a program is traced once, and each inner jit would be a trace of its
    # own. Those on empty arrays stay. JAX drops such operands, and only the call of a jitted
    # function still shows what PyTorch goes back to.
    empty = any(isinstance(x, jax.Array) and not x.size for x in args)
    known = answers()
    with contextlib.nullcontext() if empty else jax.disable_jit():
        try:
            out = lower(*args, **kwargs)
        except (DataDependentError, jax.errors.JAXTypeError):
            if known is None or (given := known.values_of(args, kwargs)) is None:
                raise
            return run(lower, *given)
    if known is not None:
        known.follow(lower, args, kwargs, out)
    return out
