"""hvp, jacobian_diagonal, laplacian and jet by nested transforms of torch.func's: for calls that
torch must see (handing_over.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

# torch's own, even after ``patch()`` has replaced them
from torch.func import grad_and_value, jvp, vmap
from torch.utils import _pytree as pytree


def hvp(func: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False) -> Any:
    gradients = grad_and_value(func, tuple(range(len(primals))), has_aux)
    pushed: Any = jvp(gradients, primals, tangents, has_aux=True)
    _, product, value = pushed
    return (value[0], product, value[1]) if has_aux else (value, product)


def jacobian_diagonal(
    func: Callable[..., Any], argnums: Any = 0, *, randomness: str = "error", chunk_size: Any = None
) -> Any:
    def of(args: tuple[Any, ...], n: int) -> Any:
        primals, spec = pytree.tree_flatten(args[n])

        def entries(*tangents: torch.Tensor) -> Any:
            pushed = jvp(
                lambda x: func(*args[:n], x, *args[n + 1 :]),
                (args[n],),
                (pytree.tree_unflatten(tangents, spec),),
            )[1]
            outs = pytree.tree_leaves(pushed)
            return tuple(
                [
                    torch.where(t != 0, out, torch.zeros_like(out)).sum()
                    for t, out in zip(tangents, outs, strict=True)
                ]
            )

        columns = _along_units(entries, primals, randomness, chunk_size)
        parts = [column.split([p.numel() for p in primals])[k] for k, column in enumerate(columns)]
        return pytree.tree_unflatten(
            [part.reshape(p.shape) for part, p in zip(parts, primals, strict=True)], spec
        )

    def diagonal(*args: Any) -> Any:
        return (
            of(args, argnums) if isinstance(argnums, int) else tuple([of(args, n) for n in argnums])
        )

    return diagonal


def laplacian(
    func: Callable[..., Any], argnums: Any = 0, *, randomness: str = "error", chunk_size: Any = None
) -> Any:
    def of(*args: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        primals, spec = pytree.tree_flatten([args[n] for n in positions])

        def along(*primals: torch.Tensor) -> Any:
            given = list(args)
            for n, x in zip(positions, pytree.tree_unflatten(primals, spec), strict=True):
                given[n] = x
            return func(*given)

        def second(*tangents: torch.Tensor) -> Any:
            return jvp(lambda *xs: jvp(along, xs, tangents)[1], tuple(primals), tangents)[1]

        return pytree.tree_map(
            lambda t: t.sum(0), _along_units(second, primals, randomness, chunk_size)
        )

    return of


def jet(
    func: Callable[..., Any], primals: Any, series: Any, factorial_scaled: bool = True
) -> tuple[Any, Any]:
    order = len(series[0])
    scale = [math.factorial(k) if factorial_scaled else 1 for k in range(1, order + 1)]

    def of(t: torch.Tensor) -> Any:
        curves = []
        for p, terms in zip(primals, series, strict=True):
            rest = torch.zeros_like(p)
            for c, s in zip(reversed(terms), reversed(scale), strict=True):
                rest = (rest + c / s) * t.to(p.dtype)
            curves.append(p + rest)
        return [func(*curves)]

    def once_more(lower: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def higher(t: torch.Tensor) -> Any:
            pushed: Any = jvp(lower, (t,), (torch.ones_like(t),))
            return [*pushed[0], pushed[1][-1]]

        return higher

    every: Callable[[torch.Tensor], Any] = of
    for _ in range(order):
        every = once_more(every)
    output, *rest = every(torch.zeros((), dtype=torch.float64))
    leaves, spec = pytree.tree_flatten(output)
    terms = [pytree.tree_leaves(r) for r in rest]
    scaled = [
        [c[i] * s / math.factorial(k) for k, (c, s) in enumerate(zip(terms, scale, strict=True), 1)]
        for i in range(len(leaves))
    ]
    return output, pytree.tree_unflatten(scaled, spec)


def _along_units(
    push: Callable[..., Any], primals: list[torch.Tensor], randomness: str, chunk_size: Any
) -> Any:
    """``push`` of each unit vector of the space of all primals together, given as one tangent for
    each primal.
    """
    sizes = [p.numel() for p in primals]
    units = [
        torch.eye(sum(sizes), dtype=p.dtype, device=p.device)
        .split(sizes, 1)[k]
        .reshape(-1, *p.shape)
        for k, p in enumerate(primals)
    ]
    return vmap(
        push, randomness=randomness, chunk_size=None if chunk_size == "auto" else chunk_size
    )(*units)
