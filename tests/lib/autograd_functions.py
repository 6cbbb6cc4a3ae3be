"""autograd.Functions that several tests use. The derivatives that they give are not the true ones,
so that it is seen which was taken.
"""

from __future__ import annotations

from typing import Any

import torch

Function = torch.autograd.Function


class ContextInForward(Function):
    """sin(x), with twice its derivative, written as before PyTorch 2."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * g * x.cos()


class SetupContext(Function):
    """The same, as torch.func asks for it."""

    generate_vmap_rule = True
    backward = ContextInForward.backward

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])


class SavesItsOutput(Function):
    """exp(x), with three times its derivative, which it takes from its output as torch.exp does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return 3 * g * y


class Cubed(Function):
    """x³, with 5x as its derivative; its vmap calls it again, as PyTorch's documentation does."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 5 * g * x

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 5 * t * x

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return Cubed.apply(x), in_dims[0]
