"""Says in sentences why jitted functions compile: each new program is compared with the earlier
programs, which did not fit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import jax
import torch

from bridge.boundary.calls import Call
from bridge.boundary.results import Twin
from bridge.convert import trees
from bridge.convert.strides import strides_of
from bridge.jit.compiled import Compiled
from bridge.process import process
from bridge.programs.guards import Guards, describe


@contextmanager
def explain(file: TextIO | None = None) -> Iterator[list[str]]:
    """While entered, say why ``jit`` compiles each program: which argument, module, attribute or
    state has changed.

    The environment variable ``TORCHFUNC_JAX_EXPLAIN=1`` does the same for a whole process, on
    standard error.

    docs/jit.md says which changes compile a program.

    Args:
        file: where the sentences are printed; None: standard error.

    Returns:
        a context manager that gives a list; each sentence is appended to it.

    Example:
        >>> import io, torch
        >>> from torchfunc_jax import explain, jit
        >>> f = jit(torch.sin)
        >>> with explain(io.StringIO()) as log:
        ...     _ = f(torch.ones(2)), f(torch.ones(3))
        >>> print(log[1])
        jit of sin: a program was compiled: args[0] was float32[2] and now is float32[3]
    """
    log: list[str] = []
    entry = (log, file)
    process.explanations.append(entry)
    try:
        yield log
    finally:
        process.explanations[:] = [e for e in process.explanations if e is not entry]


def say(jitted: Any, sentence: str) -> None:
    """Append a sentence to the log of each entered ``explain``, and print it."""
    said = f"jit of {name_of(jitted)}: {sentence}"
    for log, file in list(process.explanations):
        log.append(said)
        print(said, file=file or sys.stderr)
    if not process.explanations and os.environ.get("TORCHFUNC_JAX_EXPLAIN", "0") not in ("", "0"):
        print(said, file=sys.stderr)


def name_of(jitted: Any) -> str:
    """The name of a jitted function in messages: its own name, or the class of a module."""
    return getattr(jitted, "__name__", type(getattr(jitted, "__wrapped__", jitted)).__name__)


def reason(facts: dict[str, str], others: Sequence[tuple[dict[str, str], Guards]]) -> str:
    """How a new program differs from the most similar earlier one, by its facts and by the changes
    that the earlier one's guards find.
    """
    if not others:
        return "it is the first one"
    found = min(
        (_differences(old, facts) + list(guards.differences()) for old, guards in reversed(others)),
        key=len,
    )
    if not found:
        return (
            "a captured tensor has another shape, dtype or requires_grad, or a number does not fit "
            "into the program that takes it as an input, because of its size or because a "
            "comparison with it has another answer"
        )
    return "; ".join(dict.fromkeys(found))


def _differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [
        f"{name} was {before.get(name, 'not there')} and now is {now.get(name, 'not there')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def name_of_leaf(path: Sequence[Any]) -> str:
    """``args[0]['w']``: the name of a leaf of (args, kwargs), by its path."""
    which, *steps = path
    return ("args" if which == 0 else "kwargs") + "".join(f"[{step!r}]" for step in steps)


def facts(call: Call, key: Any, entry: Compiled) -> dict[str, str]:
    """The conditions of a program in words: the names of arguments and states, each with its
    description.
    """
    found = {"the structure of the arguments": repr(call.spec)}
    numbered = {i: k for k, i in enumerate(entry.numbered)}
    recording = key[-2]
    for i, (path, x) in enumerate(zip(trees.paths(call.spec), call.leaves, strict=True)):
        name = name_of_leaf(path)
        if isinstance(x, torch.Tensor):
            what = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            strides = strides_of(x)
            what += f" with strides {list(strides)}" if strides else ""
            what += f" on {x.device}" if x.device.type != "cpu" else ""
            what += ", requires grad" if recording and x.requires_grad else ""
        elif type(x) is Twin:
            what = f"the same tensor as {[*found][1 + x.first]}"
        elif isinstance(x, jax.Array):
            what = f"a jax.Array, {x.dtype}{list(x.shape)}"
        elif numbered.get(i) in entry.changing:
            what = f"{type(x).__name__}, an input"
        else:
            text = repr(x)
            what = text if len(text) < 80 else f"{text[:77]}..."
            what = f"{type(x).__name__} {what}" if isinstance(x, bool | int | float) else what
        found[name] = what
    states = {
        "grad mode": "on" if recording else "off",
        "random numbers": "torch's" if key[-4] else "JAX's",
    }
    return {**found, **states, **describe(key[-1])}
