"""Values written on a command line: ``randn(4, 3)``, ``hidden=32``, ``{'x': ones(2)}``. Only
factories of tensors are called.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

# Factories of tensors: those that draw random numbers, and those that take the dtype given by
# --dtype
_RANDOM = frozenset({"randn", "rand", "randint", "randperm", "normal"})
_FLOATING = frozenset(
    {"randn", "rand", "ones", "zeros", "full", "eye", "linspace", "logspace", "empty"}
)
_FACTORIES = _RANDOM | _FLOATING | {"tensor", "arange"}


def value(
    text: str, generator: torch.Generator, dtype: torch.dtype = torch.float32, words: bool = False
) -> Any:
    """The value of a spec.

    Args:
        text: a Python literal, a call of a tensor's factory (randn, rand, randint, randperm,
            normal, ones, zeros, full, eye, linspace, logspace, arange, tensor) as one writes it
            after ``torch.``, or tuples, lists and dicts of such.
        generator: random tensors are drawn from it.
        dtype: of randn, rand, ones, zeros, full, eye, linspace and logspace if the call names none.
        words: take any other text as a string.

    Raises:
        ValueError: the text is none of these, or PyTorch refuses the call.

    Example:
        >>> import torch
        >>> from torchfunc_jax.parity_specs import value
        >>> g = torch.Generator().manual_seed(0)
        >>> (
        ...     value("randn(4, 3, dtype=float64)", g).dtype,
        ...     value("[1, {'n': ones(2)}]", g),
        ...     value("relu", g, words=True),
        ... )
        (torch.float64, [1, {'n': tensor([1., 1.])}], 'relu')
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, generator, dtype, words)
    except (SyntaxError, ValueError, TypeError, RuntimeError) as error:
        if words and not isinstance(error, TypeError | RuntimeError):
            return text
        why = (
            "it is no Python expression"
            if isinstance(error, SyntaxError)
            else str(error).strip().partition("\n")[0]
        )
        raise ValueError(
            f"expected a value such as 3, randn(4, 3), or randint(0, 10, (4,)), got {text!r}: {why}"
        ) from None


def pair(text: str) -> tuple[str | None, str]:
    """The name and the spec of ``hidden=32``; the name is None if there is none.

    Example:
        >>> from torchfunc_jax.parity_specs import pair
        >>> pair("hidden=32"), pair("randn(3, dtype=float64)")
        (('hidden', '32'), (None, 'randn(3, dtype=float64)'))
    """
    name, found, spec = text.partition("=")
    return (name.strip(), spec) if found and name.strip().isidentifier() else (None, text)


def _value(node: ast.AST, generator: torch.Generator, dtype: torch.dtype, words: bool) -> Any:
    def below(child: ast.AST) -> Any:
        return _value(child, generator, dtype, words)

    if isinstance(node, ast.List | ast.Tuple):
        items = [below(x) for x in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(node.keys):
        return {
            below(k): below(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None
        }
    if isinstance(node, ast.Call):
        return _made(node, generator, dtype, below)
    name = (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )
    if isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if isinstance(node, ast.Name):
        if words:
            return name
        raise ValueError(f"{name!r} is no value; write strings in quotes")
    return ast.literal_eval(node)


def _made(
    node: ast.Call, generator: torch.Generator, dtype: torch.dtype, below: Callable[[ast.AST], Any]
) -> torch.Tensor:
    """The tensor that a call of a factory makes."""
    called = ast.unparse(node.func).removeprefix("torch.")
    if called not in _FACTORIES:
        raise ValueError(f"{called!r} is none of {', '.join(sorted(_FACTORIES))}")
    options = {k.arg: below(k.value) for k in node.keywords if k.arg}
    args = [below(x) for x in node.args]
    if called in _RANDOM:
        options["generator"] = generator
    if called in _FLOATING:
        options.setdefault("dtype", dtype)
    wanted = options.get("dtype")
    if called in ("randn", "rand") and not (wanted.is_floating_point or wanted.is_complex):
        grad = options.pop("requires_grad", False)
        return (
            (torch.randn(*args, **{**options, "dtype": torch.float32}) * 10)
            .to(wanted)
            .requires_grad_(grad)
        )
    return getattr(torch, called)(*args, **options)
