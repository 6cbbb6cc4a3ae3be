"""Random small programs of tensors, and random nestings of transforms around them.

A program is a list of steps drawn from a seed: element-wise operators, matrix products, indexing,
views, in-place operators, over a handful of variables that all have the shape [3, 3]. It is the
same Python for torch.func and for torchfunc_jax.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[list[torch.Tensor], random.Random], None]


def _pick(v: list[torch.Tensor], r: random.Random) -> torch.Tensor:
    return v[r.randrange(len(v))]


def _elementwise(v: list[torch.Tensor], r: random.Random) -> None:
    a, b = _pick(v, r), _pick(v, r)
    v.append(
        r.choice(
            [
                lambda: a + b,
                lambda: a * b,
                lambda: a - 2 * b,
                lambda: torch.sin(a),
                lambda: torch.tanh(a),
                lambda: a.sigmoid(),
                lambda: torch.where(a > b, a, b * 0.5),
                lambda: a / (1 + b * b),
                lambda: torch.exp(-a * a),
                lambda: (a * a + 1).log(),
                lambda: a.clamp(-0.5, 0.5),
                lambda: torch.nn.functional.softplus(a),
                lambda: torch.relu(a),
                lambda: a.abs().add(0.1).sqrt(),
            ]
        )()
    )


def _product(v: list[torch.Tensor], r: random.Random) -> None:
    a, b = _pick(v, r), _pick(v, r)
    v.append(
        r.choice(
            [
                lambda: a @ b,
                lambda: a.t() @ b,
                lambda: torch.einsum("ij,kj->ik", a, b),
                lambda: torch.outer(a[0], b[:, 1]),
                lambda: torch.addmm(a, a, b, alpha=0.5),
                lambda: (a @ b[0]).expand(3, 3),
                lambda: torch.nn.functional.linear(a, b, a[2]),
            ]
        )()
    )


def _reduce(v: list[torch.Tensor], r: random.Random) -> None:
    a, dim = _pick(v, r), r.randrange(2)
    v.append(
        r.choice(
            [
                lambda: a.sum(dim, keepdim=True).expand(3, 3),
                lambda: a - a.mean(dim, keepdim=True),
                lambda: a.softmax(dim),
                lambda: a.cumsum(dim),
                lambda: a.logsumexp(dim, keepdim=True) * a,
                lambda: a.amax(dim, keepdim=True) + a,
                lambda: a.sort(dim)[0],
                lambda: a.norm() * a,
                lambda: a.prod(dim, keepdim=True).expand_as(a) + a,
                lambda: a.var(dim, keepdim=True) * a,
            ]
        )()
    )


def _index(v: list[torch.Tensor], r: random.Random) -> None:
    a, b, i = _pick(v, r), _pick(v, r), r.randrange(3)
    order = torch.tensor(r.sample(range(3), 3))
    v.append(
        r.choice(
            [
                lambda: a[order],
                lambda: a[:, order] * b,
                lambda: a.index_select(1, order),
                lambda: a.gather(0, order.expand(3, 3)),
                lambda: torch.cat([a[i:], b[:i]]),
                lambda: torch.stack([a[i], b[i], a[:, i]]),
                lambda: a.roll(1, 0),
                lambda: a.flip(1),
                lambda: torch.scatter_add(a, 0, order.expand(3, 3), b),
                lambda: a.masked_fill(b > 0, 0.3),
                lambda: a.tril() + b.triu(),
            ]
        )()
    )


def _view(v: list[torch.Tensor], r: random.Random) -> None:
    a = _pick(v, r)
    v.append(
        r.choice(
            [
                lambda: a.t(),
                lambda: a.reshape(9).view(3, 3),
                lambda: a.permute(1, 0),
                lambda: a.unsqueeze(0).squeeze(0),
                lambda: a.diagonal().expand(3, 3),
                lambda: a.contiguous().view(-1).reshape(3, 3),
                lambda: a.unbind(0)[1].expand(3, 3),
                lambda: torch.cat(a.chunk(3, 1), 1),
                lambda: a.as_strided((3, 3), (1, 3)) if a.is_contiguous() else a.t(),
            ]
        )()
    )


def _in_place(v: list[torch.Tensor], r: random.Random) -> None:
    a, b, i = _pick(v, r).clone(), _pick(v, r), r.randrange(3)
    action = r.choice(
        [
            lambda: a.mul_(b),
            lambda: a.add_(b, alpha=2),
            lambda: a[i].copy_(b[0]),
            lambda: a[:, i].add_(b[i]),
            lambda: a.t()[i].mul_(0.5),
            lambda: a.view(9)[::2].sin_(),
            lambda: a.diagonal().fill_(0.7),
            lambda: a.__setitem__((slice(1, 3), i), b[1:, 0]),
            lambda: a.clamp_(min=-0.2),
            lambda: a.zero_().add_(b),
            lambda: a[1:].copy_(b[:2]),
            lambda: a.index_fill_(0, torch.tensor([i]), 0.1),
        ]
    )
    view = (
        r.choice([lambda: a, lambda: a[1:].sum() * a, lambda: a.t()])() if r.random() < 0.3 else a
    )
    action()
    v.append(a)
    if view is not a and view.shape == a.shape:
        v.append(view)


STEPS: list[Step] = [
    _elementwise,
    _elementwise,
    _product,
    _reduce,
    _index,
    _view,
    _in_place,
    _in_place,
]


def program(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function [3, 3] -> [3, 3] drawn from a seed."""
    plan = [
        (random.Random(seed * 1009 + k).choice(STEPS), seed * 1009 + k)
        for k in range(random.Random(seed).randint(2, 7))
    ]

    def run(x: torch.Tensor) -> torch.Tensor:
        v = [x, torch.full((3, 3), 0.25) + x * 0.5]
        for step, step_seed in plan:
            step(v, random.Random(step_seed))
        return v[-1] + 0.1 * v[-2]

    return run


def _grad(F: Any, f: Any) -> Any:
    return lambda x: F.grad(lambda y: f(y).sum())(x)


def _vmap(F: Any, f: Any) -> Any:
    return lambda x: F.vmap(f)(torch.stack([x, x * 0.5])).sum(0)


def _vmap_out(F: Any, f: Any) -> Any:
    return lambda x: F.vmap(f, in_dims=2, out_dims=1)(torch.stack([x, x.flip(0)], 2)).mean(1)


def _jvp(F: Any, f: Any) -> Any:
    return lambda x: F.jvp(f, (x,), (torch.ones_like(x) * 0.5,))[1]


def _vjp(F: Any, f: Any) -> Any:
    def run(x: torch.Tensor) -> torch.Tensor:
        out, pull = F.vjp(f, x)
        return pull(out * 0.3)[0]

    return run


def _jacrev(F: Any, f: Any) -> Any:
    return lambda x: F.jacrev(lambda y: f(y).sum(0))(x).sum(0)


def _jacfwd(F: Any, f: Any) -> Any:
    return lambda x: F.jacfwd(lambda y: f(y)[0])(x).sum(0)


TRANSFORMS = [_grad, _vmap, _vmap_out, _jvp, _vjp, _jacrev, _jacfwd]


def nested(F: Any, seed: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], str]:
    """Up to three transforms of F around the program of a seed, and their names."""
    r = random.Random(seed + 10**6)
    chosen = [r.choice(TRANSFORMS) for _ in range(r.randint(1, 3))]
    f = program(seed)
    for t in chosen:
        f = t(F, f)
    return f, " of ".join(t.__name__[1:] for t in reversed(chosen))
