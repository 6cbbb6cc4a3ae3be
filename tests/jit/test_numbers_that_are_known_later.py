"""The number that ``item()`` gives of what a jitted function computes: it is known when the program
has run, and can be returned, kept and computed with until then.
"""

from __future__ import annotations

import dataclasses
import math
import queue
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agreement import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from bridge.errors import DataDependentError, EscapedTensorError
from torchfunc_jax import export, jit


@dataclasses.dataclass
class Report:
    loss: float
    tensors: torch.Tensor


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        self.losses: list[float] = []
        self.total, self.seen = 0.0, 0
        self.by_name: dict[str, Any] = {}
        self.register_buffer("steps", torch.tensor(0))


def _step(m: Trained, x: torch.Tensor) -> torch.Tensor:
    m.optimizer.zero_grad()
    loss = m.lin(x).square().mean()
    loss.backward()
    m.optimizer.step()
    return loss


def _returned(F: Any, m: Trained, x: torch.Tensor) -> Any:
    return _step(m, x).item()


def _appended(F: Any, m: Trained, x: torch.Tensor) -> Any:
    m.losses.append(_step(m, x).item())


def _summed(F: Any, m: Trained, x: torch.Tensor) -> Any:
    loss = _step(m, x)
    m.total += loss.item() * len(x)
    m.seen += (x > 0).sum().item()
    return loss.detach()


def _in_dicts_and_tuples(F: Any, m: Trained, x: torch.Tensor) -> Any:
    m.by_name["loss"] = _step(m, x).item()
    return {"mean": (x.mean().item(), x), "correct": (x > 0).sum().item() / x.numel()}


def _in_an_object(F: Any, m: Trained, x: torch.Tensor) -> Any:
    return Report(x.sum().item(), x * 2)


def _in_arithmetic(F: Any, m: Trained, x: torch.Tensor) -> Any:
    n, s = (x > 0).sum().item(), x.sum().item()
    return [n + 1, n - 2.5, 3 * n, n / 4, n // 2, n % 3, -n, abs(n - 5), 2 * s + n, s**2, 1 / s]


def _beside_other_numbers(F: Any, m: Trained, x: torch.Tensor) -> Any:
    m.seen += 1
    m.steps += 1
    return m.seen * x.sum().item() + m.steps.item(), m.steps.item() / m.seen


def _back_in_tensors(F: Any, m: Trained, x: torch.Tensor) -> Any:
    s = x.abs().max().item()
    scaled = [
        x / s,
        x.clamp(max=s / 2),
        torch.full((2,), s),
        x.new_full((2,), s),
        x.clone().fill_(s),
    ]
    return [*scaled, torch.tensor(s), torch.add(x, x, alpha=s), torch.add(x, x, alpha=x.sum())]


def _in_a_gradient(F: Any, m: Trained, x: torch.Tensor) -> Any:
    def loss(x: torch.Tensor) -> torch.Tensor:
        value = x.sin().sum()
        m.losses.append(value.item())
        return value * value.item()

    value, pull = F.vjp(loss, x)
    return F.grad(loss)(x), value, pull(torch.ones(()))


def _of_a_parameter(F: Any, m: Trained, x: torch.Tensor) -> Any:
    return (m.lin(x) * m.lin.weight[0, 0].item()).sum(), m.lin.bias[1].item()


def _of_other_dtypes(F: Any, m: Trained, x: torch.Tensor) -> Any:
    kinds = torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8
    return [x.abs().sum().to(dtype).item() for dtype in kinds], x[:1, :1].item()


def _in_lists(F: Any, m: Trained, x: torch.Tensor) -> Any:
    m.losses.extend(x.argmax(1).tolist())
    return x.tolist(), x.sum().tolist(), x[:0].tolist(), x[:, :0].tolist()


def _as_an_index(F: Any, m: Trained, x: torch.Tensor) -> Any:
    best, last = x[:, 0].argmax().item(), x[0].argmin().item()
    changed = x.clone()
    changed[best, last] = 5.0
    return x[best], x[best, -last], x[..., last], changed, [x[k] for k in x.argmax(0).tolist()]


#: Each with the number of its programs for four calls.
CASES: dict[str, tuple[Callable[[Any, Trained, torch.Tensor], Any], int]] = {
    "returned": (_returned, 2),
    "appended": (_appended, 2),
    "summed": (_summed, 3),
    "in dicts and tuples": (_in_dicts_and_tuples, 2),
    "in an object": (_in_an_object, 1),
    "in arithmetic": (_in_arithmetic, 1),
    "beside other numbers": (_beside_other_numbers, 2),
    "back in tensors": (_back_in_tensors, 1),
    "in a gradient": (_in_a_gradient, 1),
    "of a parameter": (_of_a_parameter, 1),
    "of other dtypes": (_of_other_dtypes, 1),
    "in lists": (_in_lists, 1),
    "as an index": (_as_an_index, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_number_of_each_call(name: str) -> None:
    function, programs = CASES[name]
    mine, theirs = Trained(), Trained()
    fast = jit(lambda x: function(torchfunc_jax, mine, x))
    for k in range(4):
        x = (k + 1.5) * torch.arange(12.0).reshape(4, 3).cos()
        close = {"rtol": 1e-5, "atol": 1e-6}
        same(_in_tensors(fast(x)), _in_tensors(function(torch.func, theirs, x)), **close)
        for each in ("losses", "total", "seen", "by_name"):
            same(_in_tensors(getattr(mine, each)), _in_tensors(getattr(theirs, each)), **close)
        same(mine.state_dict(), theirs.state_dict(), **close)
    assert len(fast.programs()) == programs


def _in_tensors(x: Any) -> Any:
    """The same with tensors in the place of floats, which are compared within a tolerance."""
    if isinstance(x, Report):
        return [type(x), *map(_in_tensors, dataclasses.astuple(x))]
    if isinstance(x, list | tuple):
        return type(x)(map(_in_tensors, x))
    if isinstance(x, dict):
        return {key: _in_tensors(value) for key, value in x.items()}
    return torch.tensor(x, dtype=torch.float64) if type(x) is float else x


#: What asks for the number before the program has run.
ASKING: dict[str, Callable[[Any], Any]] = {
    "if": lambda x: x if x.sum().item() > 0 else -x,
    "truth": lambda x: x if x.sum().item() else -x,
    "max": lambda x: max(x.sum().item(), 1.0),
    "float": lambda x: float(x.sum()),
    "round": lambda x: round(x.sum().item(), 2),
    "math": lambda x: math.exp(x.sum().item()),
    "f-string": lambda x: f"{x.sum().item():.2f}",
    "shape": lambda x: torch.zeros(x.sum().long().item()),
    "a shape among others": lambda x: x.reshape(x.sum().long().item(), 1),
    "a part": lambda x: x.narrow(0, 0, x.sum().long().item()),
    "a list": lambda x: sorted(x.tolist()),
    "a list of bools": lambda x: (x > 0).tolist(),
    "a long list": lambda x: x.repeat(100).tolist(),
    "key": lambda x: {x.sum().item(): x},
    "NumPy": lambda x: np.mean([x.sum().item()]),
    "a power of integers": lambda x: 2 ** x.sum().long().item(),
    "an integer divided by one": lambda x: 7 // x.sum().long().item(),
    "bool": lambda x: (x > 0).all().item(),
    "checkpoint": lambda x: checkpoint(lambda x: x * x.sum().item(), x, use_reentrant=False),
    "vmap": lambda x: torchfunc_jax.vmap(lambda row: row * row.item())(x),
}


def test_an_index_out_of_bounds() -> None:
    with pytest.raises(IndexError, match="index 5 is out of bounds for dimension 0 with size 3"):
        jit(lambda x, i: x[i.item()])(torch.ones(3), torch.tensor(5))


@pytest.mark.parametrize("name", ASKING)
def test_code_that_asks_for_it_is_refused(name: str) -> None:
    kept: list[float] = []

    def function(x: torch.Tensor) -> Any:
        kept.append(x.sum().item())
        return ASKING[name](x)

    for _ in range(2):
        with pytest.raises(DataDependentError, match=r"item\(\)|\.item|needs a tensor's values"):
            jit(function)(torch.ones(3))
    assert not kept


@pytest.mark.parametrize(
    "call",
    [
        lambda f: jit(f)(jnp.ones(3)),
        lambda f: jax.jit(jit(f))(jnp.ones(3)),
        lambda f: export(f, torch.ones(3)),
    ],
    ids=["arrays", "jax.jit", "export"],
)
def test_programs_of_jax_have_none(call: Callable[[Any], Any]) -> None:
    """They may be parts of other traces, and of other processes."""
    with pytest.raises(DataDependentError, match=r"item\(\)"):
        call(lambda x: x.sum().item())


def test_a_lowered_program_computes_it() -> None:
    f = jit(lambda x: x.sum().item())
    assert "f64" in f.lower(torch.ones(2)).as_text()
    assert [v.aval.shape for v in f.jaxpr(torch.ones(2)).jaxpr.outvars] == [()]


def test_it_is_not_kept_where_jit_does_not_look() -> None:
    """No program could put the number there, and what stands for it is of no use to anybody."""
    kept: Any = queue.SimpleQueue()

    @jit
    def fast(x: torch.Tensor) -> torch.Tensor:
        kept.put({"loss": x.sum().item() + 1})
        return x * 2

    for _ in range(2):
        with pytest.raises(DataDependentError, match="keeps it where jit does not look: return it"):
            fast(torch.ones(3))
    number = kept.get()["loss"]
    for use in (float, repr, lambda number: number + 1, lambda number: number > 1):
        with pytest.raises(EscapedTensorError):
            use(number)


def test_what_stands_for_it_is_not_kept_after_an_error() -> None:
    kept: list[Any] = []

    @jit
    def fast(x: torch.Tensor) -> Any:
        kept.append("begun")
        kept.append(x.sum().item())
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fast(torch.ones(3))
    assert [type(x) for x in kept] in ([], [str])  # and nothing that stands for the number


def test_it_is_divided_by_zero_as_in_python() -> None:
    for divide in (lambda n: n / 0, lambda n: n // 0, lambda n: n % 0.0):
        with pytest.raises(ZeroDivisionError):
            jit(lambda x, divide=divide: divide(x.sum().item()))(torch.ones(3))
    assert jit(lambda x: 1 / x.sum().item())(torch.zeros(3)) == math.inf


@pytest.mark.parametrize("f", [lambda x: (x > 0).all().item(), lambda x: (x.sum() * 1j).item()])
def test_item_of_a_bool_or_complex_tensor_names_its_dtype(f):
    with pytest.raises(RuntimeError, match=r"item\(\) of a torch.*return or keep the tensor"):
        jit(f)(torch.ones(3))


@pytest.mark.parametrize("method", ["is_integer", "hex", "as_integer_ratio"])
def test_methods_of_an_unknown_float(method):
    with pytest.raises(RuntimeError, match=r"item\(\) needs a tensor's values"):
        jit(lambda x: getattr(x.sum().item(), method)())(torch.ones(3))
