"""Subclasses of torch.Tensor, passed and captured: torch.func's results; under jit, an error where
a class has rules for its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same

import torchfunc_jax


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Strict(torch.Tensor):
    """A subclass that refuses operands of classes that it does not know, as those of torchvision
    do, and returns plain tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, t) for t in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Twice(torch.Tensor):
    """A subclass whose sum is twice the sum; the results of all operators on
    it are of this class.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.Tensor.sum else found


# of v [3] and a tensor s [3] of the subclass
FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda v, s: v * s,
    "method": lambda v, s: v * s.sum(),
    "product of its own": lambda v, s: v * (s * 2),
    "a tuple of results": lambda v, s: v * s.max(0).values + s.unbind(0)[1],
    "in a list": lambda v, s: torch.stack([v, s]),
    "factory": lambda v, s: v + s.new_ones(3),
    "gradient": lambda v, s: (v * s * s).sum() * s.mean(),
}
WAYS: dict[str, Callable[[Any, Callable[..., torch.Tensor], torch.Tensor, Any], Any]] = {
    "vmap": lambda T, f, v, s: T.vmap(f, (0, *[None] * len(s)))(torch.stack([v, v + 1]), *s),
    "grad": lambda T, f, v, s: T.grad(lambda *a: f(*a).sum())(v, *s),
    "jvp": lambda T, f, v, s: T.jvp(lambda v: f(v, *s), (v,), (v * 2,)),
    "vmap of grad": lambda T, f, v, s: T.vmap(
        T.grad(lambda *a: f(*a).sum()), (0, *[None] * len(s))
    )(torch.stack([v, v + 1]), *s),
    "jacrev": lambda T, f, v, s: T.jacrev(f)(v, *s),
}
JITTED = {"jit of grad": "grad", "jit of vmap": "vmap"}


@pytest.mark.thin(2)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "passed"])
@pytest.mark.parametrize("kind", [Plain, Strict])
@pytest.mark.parametrize("way", [*WAYS, *JITTED])
def test_subclasses(way: str, kind: type[torch.Tensor], captured: bool) -> None:
    for name, function in FUNCTIONS.items():
        for call in range(2):
            v, s = (
                torch.tensor([0.5, -1.0, 2.0]) + call,
                (torch.arange(3.0) - call).as_subclass(kind),
            )
            f = (lambda v, s=s, function=function: function(v, s)) if captured else function
            given = () if captured else (s,)
            expected = WAYS[JITTED.get(way, way)](torch.func, f, v, given)
            if way in JITTED:
                found = torchfunc_jax.jit(
                    lambda v, *s, f=f: WAYS[JITTED[way]](torchfunc_jax, f, v, s)
                )(v, *given)
            else:
                found = WAYS[way](torchfunc_jax, f, v, given)
            for mine, theirs in zip(
                *[x if isinstance(x, tuple) else (x,) for x in (found, expected)], strict=True
            ):
                assert type(mine) is torch.Tensor, (name, type(mine))
                same(mine, theirs.as_subclass(torch.Tensor))


@pytest.mark.parametrize("way", WAYS)
def test_a_class_with_rules_for_its_results(way: str) -> None:
    """PyTorch runs it; JAX, which runs it under jit, refuses it."""
    v, s = torch.ones(3), torch.arange(3.0).as_subclass(Twice)
    for name in ("product", "method", "in a list"):
        call = lambda T, name=name: WAYS[way](T, lambda v: FUNCTIONS[name](v, s), v, ())
        for _ in range(2):
            found, expected = [
                x if isinstance(x, tuple) else (x,) for x in map(call, (torchfunc_jax, torch.func))
            ]
            for mine, theirs in zip(found, expected, strict=True):
                assert type(mine) is type(theirs)
                same(mine.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor))
        refused = r"got a Twice.*x\.as_subclass\(torch\.Tensor\).*test_tensor_subclasses\.py"
        with pytest.raises(NotImplementedError, match=refused):
            torchfunc_jax.jit(lambda call=call: call(torchfunc_jax))()
