"""One function called in every way that there is: by each transform, un-jitted and jitted, on
tensors passed and captured.

The truth is plain PyTorch: its values, its autograd, and a loop over the lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from agreement import same
from torch.utils import _pytree as pytree

import torchfunc_jax


def _loss(out: Any) -> torch.Tensor:
    """A number that weighs every floating element of the outputs differently."""
    leaves = [
        x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    return sum(
        (
            x * torch.cos(torch.arange(x.numel(), dtype=torch.float64)).reshape(x.shape).to(x.dtype)
        ).sum()
        for x in leaves
    )


def in_every_way(
    fn: Callable[..., Any],
    *args: Any,
    lanes: bool | str = True,
    grads: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare fn(*args) with plain PyTorch's in every way.

    The floating tensors among the arguments are differentiated, and mapped over three lanes that
    differ; other arguments are static. lanes: "jit": they are mapped under jit alone.
    """
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    xs = tuple(args[i].detach() for i in where)

    def of_floats(*floats: Any) -> Any:
        full = list(args)
        for i, x in zip(where, floats, strict=True):
            full[i] = x
        return fn(*full)

    def loss(*floats: Any) -> Any:
        out = of_floats(*floats)
        return _loss(out), out

    def truth(floats: Any) -> Any:
        leaves = [x.clone().requires_grad_() for x in floats]
        total, out = loss(*leaves)
        found = (
            torch.autograd.grad(total, leaves, allow_unused=True)
            if grads and total.requires_grad
            else [None] * len(leaves)
        )
        zeros = tuple(
            torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)
        )
        return zeros, pytree.tree_map(
            lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out
        )

    def agree(actual: Any, expected: Any) -> None:
        same(actual, expected, rtol=rtol, atol=atol)

    places = tuple(range(len(xs)))
    gradient = torchfunc_jax.grad(loss, places, has_aux=True)
    slopes, values = truth(xs)
    jitted = torchfunc_jax.jit(of_floats)
    agree(jitted(*xs), values)
    agree(torchfunc_jax.jit(lambda: of_floats(*xs))(), values)
    if grads:
        agree(gradient(*xs), (slopes, values))
        agree(torchfunc_jax.jit(gradient)(*xs), (slopes, values))
        leaves = [x.clone().requires_grad_() for x in xs]
        captured = torchfunc_jax.jit(lambda: loss(*leaves)[0])
        for run in (lambda: torchfunc_jax.jit(loss)(*leaves)[0], captured):
            found = torch.autograd.grad(run(), leaves, allow_unused=True)
            agree(
                tuple(
                    torch.zeros_like(x) if g is None else g
                    for g, x in zip(found, leaves, strict=True)
                ),
                slopes,
            )
    if lanes:
        stacked = tuple(torch.stack([x, x * 0.5, x * -0.75]) for x in xs)
        each = [truth(rows) for rows in zip(*stacked, strict=True)]
        expected = pytree.tree_map(
            lambda *rows: torch.stack(rows) if isinstance(rows[0], torch.Tensor) else rows[0], *each
        )
        if lanes != "jit":
            agree(torchfunc_jax.vmap(of_floats)(*stacked), expected[1])
        else:
            agree(torchfunc_jax.jit(torchfunc_jax.vmap(of_floats))(*stacked), expected[1])
        if grads:
            if lanes != "jit":
                agree(torchfunc_jax.vmap(gradient)(*stacked), expected)
            agree(torchfunc_jax.jit(torchfunc_jax.vmap(gradient))(*stacked), expected)
