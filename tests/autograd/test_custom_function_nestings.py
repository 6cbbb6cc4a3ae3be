"""autograd.Function with a vmap of its own (and a generated one), under nestings of transforms,
beside torch.func; and its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same
from autograd_functions import Cubed

import torchfunc_jax
from torchfunc_jax import grad, jit, vmap


class Generated(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context, backward, jvp = (
        Cubed.forward,
        Cubed.setup_context,
        Cubed.backward,
        Cubed.jvp,
    )


# of (transforms, the Function, x [2, 3])
PROGRAMS: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "grad of vmap": lambda T, c, x: T.grad(lambda x: T.vmap(c)(x).sum())(x),
    "vmap of grad": lambda T, c, x: T.vmap(T.grad(lambda a: c(a).sum()))(x),
    "grad of vmap of vmap": lambda T, c, x: T.grad(lambda x: T.vmap(T.vmap(c))(x).sum())(x),
    "vmap of grad of vmap": lambda T, c, x: T.vmap(T.grad(lambda a: T.vmap(c)(a).sum()))(x),
    "vmap over another dimension": lambda T, c, x: T.grad(lambda x: T.vmap(c, 1)(x).sum())(x),
    "grad of grad of vmap": lambda T, c, x: T.grad(
        lambda x: T.grad(lambda x: (T.vmap(c)(x) ** 2).sum())(x).sum()
    )(x),
    "jacrev of vmap": lambda T, c, x: T.jacrev(T.vmap(c))(x),
    "jacfwd of vmap": lambda T, c, x: T.jacfwd(T.vmap(c))(x),
    "vmap of jacrev": lambda T, c, x: T.vmap(T.jacrev(c))(x),
    "jvp of vmap": lambda T, c, x: T.jvp(T.vmap(c), (x,), (x,)),
    "vmap of jvp": lambda T, c, x: T.vmap(lambda a: T.jvp(c, (a,), (a,)))(x),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("function", [Cubed, Generated])
def test_functions_with_a_rule_for_vmap(function: Any, name: str, compiled: bool) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)

    def run(T: Any) -> Callable[..., Any]:
        return lambda x: PROGRAMS[name](T, function.apply, x)

    mine = run(torchfunc_jax)
    same((jit(mine) if compiled else mine)(x), run(torch.func)(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_from_outside(compiled: bool) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    mapped = jit(vmap(Cubed.apply)) if compiled else vmap(Cubed.apply)
    same(torch.autograd.grad(mapped(x).sum(), x), (5 * x,), graph=False)


class Failing(Cubed):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the user's own")

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return Failing.apply(x), in_dims[0]


@pytest.mark.parametrize("transform", [grad, vmap, lambda f: jit(vmap(f))])
def test_frames_of_an_error_can_be_looked_at(transform: Any) -> None:
    """Debuggers and pytest read the locals of every frame; one whose cells were never filled would
    end the interpreter.
    """
    with pytest.raises(ValueError, match="of the user's own") as caught:
        transform(lambda x: Failing.apply(x).sum())(torch.ones(3))
    frame = caught.value.__traceback__
    names = []
    while frame is not None:
        names.append(frame.tb_frame.f_code.co_name)
        assert isinstance(frame.tb_frame.f_locals, object)
        frame = frame.tb_next
    assert "forward" in names


class Refuses(torch.autograd.Function):
    """x, and a backward that raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        raise LookupError("too late")


@pytest.mark.parametrize(
    "transform", [vmap, jit, lambda f: jit(vmap(f))], ids=["vmap", "jit", "jit of vmap"]
)
def test_a_backward_that_raises_does_so_in_the_backward_pass(transform: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    out = transform(Refuses.apply)(x)
    same(out, x)
    with pytest.raises(LookupError, match="too late"):
        out.sum().backward()
    same(transform(Refuses.apply)(x.detach()), x.detach())


class Constant(torch.autograd.Function):
    """Two ones, of whatever; its backward gives 3."""

    generate_vmap_rule = True
    forward = staticmethod(lambda x: torch.ones(2))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: torch.full((3,), 3.0))
    jvp = staticmethod(lambda ctx, t: torch.full((2,), 5.0))


@pytest.mark.parametrize(
    "transform",
    [vmap, lambda f: jit(vmap(f)), lambda f: vmap(vmap(f))],
    ids=["vmap", "jit of vmap", "twice"],
)
def test_an_output_that_does_not_depend_on_the_mapped_input(transform: Any) -> None:
    x = torch.zeros(4, 4, 3, requires_grad=True)
    out = transform(lambda x: Constant.apply(x.flatten()[:3]))(x)
    assert torch.equal(out, torch.ones(*out.shape)) and out.shape[-1] == 2 and out.requires_grad
    (found,) = torch.autograd.grad(out.sum(), x)
    assert found.sum().item() == 3 * 3 * out.numel() / 2
    assert torch.equal(
        transform(lambda x: torchfunc_jax.jvp(Constant.apply, (x,), (x,))[1])(
            x.detach()[..., :1].sum(-1)
        ),
        5 * out,
    )
