"""A conversion of a tensor to what it is already gives the tensor itself, as in PyTorch; so a
module can be moved to its own device and dtype inside of a transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchfunc_jax import grad, jit, vmap

CONVERSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a dtype": lambda t: t.to(t.dtype),
    "a device": lambda t: t.to(torch.device("cpu")),
    "the name of a device": lambda t: t.to("cpu"),
    "a device and a dtype": lambda t: t.to(torch.device("cpu"), t.dtype, False),
    "a device and no dtype": lambda t: t.to(torch.device("cpu"), None, False),
    "by names": lambda t: t.to(device="cpu", dtype=t.dtype),
    "another tensor's": lambda t: t.to(t),
    "cpu": lambda t: t.cpu(),
    "type": lambda t: t.type(t.dtype),
    "type_as": lambda t: t.type_as(t),
    "contiguous": lambda t: t.contiguous(),
    "resolve_conj": lambda t: t.resolve_conj(),
}
WAYS: dict[str, Callable[[Callable[[torch.Tensor], Any]], Callable[[torch.Tensor], Any]]] = {
    "PyTorch": lambda f: f,
    "vmap": vmap,
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "jit": jit,
    "jit of vmap": lambda f: jit(vmap(f)),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum())),
}
CAPTURED = torch.randn(2), torch.tensor(True), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_the_tensor_itself(conversion: str, way: str) -> None:
    convert, seen = CONVERSIONS[conversion], []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append([convert(t) is t for t in (x, *CAPTURED)])
        return x * 2

    WAYS[way](f)(torch.ones(4, 3) if "vmap" in way else torch.ones(3))
    assert seen and all(map(all, seen)), seen


class Moved(nn.Module):
    """Moves itself to the device and dtype of its input, as acquisition functions of published
    libraries do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("shift", torch.tensor([1.0, 2.0]))
        self.register_buffer("trained", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(x)
        if not self.trained:
            raise RuntimeError("not trained")
        return (self.linear(x) + self.shift).square()


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_moves_itself_nowhere(way: str) -> None:
    """torch.func ends the process for it in a transform that differentiates."""
    module = Moved()
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    x = torch.randn(4, 3) if "vmap" in way else torch.randn(3)
    found = WAYS[way](module)(x)
    rows = x.clone().requires_grad_()
    want = module(rows)
    if "grad" in way:
        (want,) = torch.autograd.grad(want.sum(), rows)
    torch.testing.assert_close(found.detach(), want.detach())
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all(after[name] is t for name, t in before.items())


@pytest.mark.parametrize("way", ["grad", "vmap of grad"])
def test_a_module_that_changes_its_dtype_is_refused(way: str) -> None:
    module = Moved().double()
    run = WAYS[way](module)
    for f in (run, jit(run)):
        with pytest.raises(RuntimeError, match="data: a tensor from outside the transform"):
            f(torch.ones(4, 3) if "vmap" in way else torch.ones(3))
        assert module.linear.weight.dtype == torch.float64
