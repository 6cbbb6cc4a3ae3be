"""What PyTorch refuses by values is refused everywhere: un-jitted, in every transform, and when a
compiled program has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import Refusing, refusing

import torchfunc_jax
from torchfunc_jax import functional_call, functionalize, grad, jit, jvp, vjp, vmap

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
GOOD, BAD = torch.tensor([1, 2]), torch.tensor([0, 23])

#: by name: a function of a (3, 4) tensor and two integers, which are fine if they are GOOD and
#: refused if they are BAD
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x[i]": lambda x, i: x[i],
    "x[-i]": lambda x, i: x[-i],
    "x[:, i]": lambda x, i: x[:, i],
    "x[0, i]": lambda x, i: x[0, i],
    "x[i] = 0": lambda x, i: torch.index_put(x, (i,), torch.zeros(())),
    "x[i] += 1": lambda x, i: torch.index_put(x, (i,), torch.ones(()), accumulate=True),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "take": lambda x, i: x.take(i),
    "put": lambda x, i: x.put(i, x[0, :2]),
    "scatter": lambda x, i: x.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None], x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i[:, None], x, "amax"),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:2]),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:2], "amax"),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i[None], x),
    "embedding_bag's offsets": lambda x, i: F.embedding_bag(torch.zeros_like(i), x, i - i.min()),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:2], i),
    "nll_loss": lambda x, i: F.nll_loss(x[:2], i),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x[:2], i),
    "multilabel_margin_loss": lambda x, i: F.multilabel_margin_loss(x[0], torch.cat([i, i])),
    "one_hot": lambda x, i: x[:2, :3] * F.one_hot(i, 3),
    "searchsorted's sorter": lambda x, i: (
        x * torch.searchsorted(x[0].detach(), x[0].detach(), sorter=torch.cat([i, i]))
    ),
    "i // i": lambda x, i: x[:2, 0] * (7 // i),
    "i % i": lambda x, i: x[:2, 0] * (i % i),
    "fmod": lambda x, i: x[:2, 0] * torch.fmod(i, i),
    "div": lambda x, i: x[:2, 0] * torch.div(i, i, rounding_mode="trunc"),
    "binary_cross_entropy": lambda x, i: F.binary_cross_entropy(
        x.sigmoid() * i[1] / 2, x.sigmoid().detach()
    ),
    "repeat_interleave": lambda x, i: x[0, :2].repeat_interleave(i, output_size=3),
    "segment_reduce": lambda x, i: torch.segment_reduce(x[:, 0], "sum", lengths=i),
    "lu_unpack": lambda x, i: x[:2, :2] * torch.lu_unpack(x[:2, :2], i.int())[0],
    "histc": lambda x, i: x * torch.histc(x.detach() / (i[0] > 0), 4),
    "cholesky": lambda x, i: torch.linalg.cholesky(
        torch.eye(3) * i[0] + (x @ x.mT) * 1e-3 - 0.5 * torch.eye(3)
    ),
    "inv": lambda x, i: torch.linalg.inv(torch.eye(3) * i[0]) * x[0, 0],
    "solve": lambda x, i: torch.linalg.solve(torch.eye(3) * i[0], x),
    "svd": lambda x, i: torch.linalg.svdvals(x + i[0].float().log() * 0),
    "eig": lambda x, i: torch.linalg.eig(x[:, :3] / (i[0] > 0))[0].real,
    "bernoulli": lambda x, i: x * torch.bernoulli(i[1] / 2 + 0 * x.detach()),
    "normal": lambda x, i: x * torch.normal(x.detach(), (5 - i[1]) + 0 * x.detach()),
    "poisson": lambda x, i: x * torch.poisson((5 - i[1]) + 0 * x.detach()),
    "multinomial": lambda x, i: x[:, :1] * torch.multinomial((5 - i[1]) + 0 * x.detach(), 1),
}

WAYS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "functionalize": lambda f, x, i: functionalize(f)(x, i),
    "grad": lambda f, x, i: grad(lambda x: f(x, i).sum())(x),
    "vjp": lambda f, x, i: vjp(lambda x: f(x, i), x)[0],
    "jvp": lambda f, x, i: jvp(lambda x: f(x, i), (x,), (x,)),
    "vmap": lambda f, x, i: vmap(f, randomness="different")(
        torch.stack([x, x]), torch.stack([GOOD, i])
    ),
    "vmap of indices": lambda f, x, i: vmap(f, (None, 0), randomness="different")(
        x, torch.stack([GOOD, i])
    ),
    "vmap in vmap": lambda f, x, i: vmap(vmap(f, randomness="different"), randomness="different")(
        x.expand(1, 2, 3, 4), torch.stack([GOOD, i])[None]
    ),
    "vmap of grad": lambda f, x, i: vmap(
        grad(lambda x, i: f(x, i).sum()), (None, 0), randomness="different"
    )(x, torch.stack([GOOD, i])),
    "grad of vmap": lambda f, x, i: grad(
        lambda x: vmap(f, (None, 0), randomness="different")(x, torch.stack([GOOD, i])).sum()
    )(x),
    "vmap of jvp": lambda f, x, i: vmap(
        lambda i: jvp(lambda x: f(x, i), (x,), (x,)), randomness="different"
    )(torch.stack([GOOD, i])),
    "autograd": lambda f, x, i: functionalize(f)(x.clone().requires_grad_(), i),
    "jit": lambda f, x, i: _jitted(f, None)(x, i),
    "jit of vmap": lambda f, x, i: _jitted(f, "vmap")(x, torch.stack([GOOD, i])),
    "jit of grad": lambda f, x, i: _jitted(f, "grad")(x, i),
    "jit in autograd": lambda f, x, i: _jitted(f, None)(x.clone().requires_grad_(), i),
}
_FAST = ("functionalize", "grad", "vmap", "vmap in vmap", "jit", "jit of vmap", "jit in autograd")
_kept: dict[Any, Any] = {}


def _jitted(f: Any, transform: str | None) -> Any:
    """One compiled function for the good call and the bad one."""
    inner = {
        "vmap": lambda f: vmap(f, (None, 0), randomness="different"),
        "grad": lambda f: grad(lambda x, i: f(x, i).sum()),
    }
    return _kept.setdefault((f, transform), jit(inner.get(transform, lambda f: f)(f)))


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    "way", [w if w in _FAST else pytest.param(w, marks=pytest.mark.slow) for w in WAYS]
)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_pytorch(name: str, way: str) -> None:
    f, run = REFUSED[name], WAYS[way]
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        f(X, BAD)
    run(f, X, GOOD)
    run(f, X, GOOD)  # compiled by now
    with pytest.raises((IndexError, RuntimeError)) as ours:
        run(f, X, BAD)
    # PyTorch's kernel of index_add raises IndexError for vectors and RuntimeError for more
    # dimensions; ours IndexError for both.
    assert type(ours.value) is (IndexError if name == "index_add" else type(theirs.value)), (
        ours.value,
        theirs.value,
    )
    run(f, X, GOOD)


def test_the_message_shows_the_line_under_jit() -> None:
    message = (
        r"index 23 is out of bounds for dimension 0 with size 3 \(at "
        r".*test_refused_values.py:\d+: .*SHOWN"
    )
    with pytest.raises(IndexError, match=message):
        jit(lambda x, i: x[i])(X, BAD)  # SHOWN


def test_a_refused_call_writes_nothing() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x[i]

    module, x = Counting(), X.clone()
    run = jit(lambda x, i: (module(x, i), x.add_(1))[0])
    run(x, GOOD)
    assert module.count == 1
    for call in (run, functionalize(lambda x, i: (module(x, i), x.add_(1))[0])):
        before = x.clone()
        with pytest.raises(IndexError):
            call(x, BAD)
        assert module.count == 1 and torch.equal(x, before)
    with pytest.raises(IndexError):
        jit(lambda p, x, i: functional_call(module, p, (x, i)))({"count": torch.zeros(())}, x, BAD)


def test_ignored_targets_are_not_checked() -> None:
    target = torch.tensor([-100, 2])
    for transform in (functionalize, jit):
        torch.testing.assert_close(
            transform(F.cross_entropy)(X[:2], target), F.cross_entropy(X[:2], target)
        )
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        jit(lambda x, t: F.cross_entropy(x, t, ignore_index=5))(X[:2], target)


def test_jax_arrays_are_computed_while_the_caller_goes_on() -> None:
    """As JAX has it: what is read out of range is NaN."""
    read = jit(lambda x, i: x[i])(jnp.asarray(X.numpy()), jnp.asarray(BAD.numpy()))
    assert bool(jnp.isnan(read[1]).all()) and not bool(jnp.isnan(read[0]).any())


def test_asserts_of_a_program() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() > 0, "the sum must be positive")
        return x.sqrt()

    ones = torch.ones(2)
    for transform in (functionalize, jit, vmap, lambda f: jit(vmap(f))):
        wide = ones[None] if transform not in (functionalize, jit) else ones
        run = transform(positive)
        torch.testing.assert_close(run(wide), wide)
        with pytest.raises(RuntimeError, match="the sum must be positive"):
            run(-wide)


@pytest.mark.parametrize("way", ["grad", "jit", "vmap", "jit(vmap)"])
def test_arguments_of_distributions_and_whether_all_values_are_true(way: str) -> None:
    def density(scale: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(0.0, scale, validate_args=True).log_prob(torch.ones(()))

    def positive(x: torch.Tensor) -> torch.Tensor:
        return (x * torch._is_all_true(x > 0) + x * torch._is_any_true(x > 0)).sum()

    def run(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        slope = grad(lambda x: f(x).sum())
        return {
            "grad": slope,
            "jit": jit(slope),
            "vmap": vmap(slope),
            "jit(vmap)": jit(vmap(slope)),
        }[way](x)

    for x, scale in [
        (torch.tensor([[1.0, -1.0]]), 1),
        (torch.tensor([[1.0, 1.0]]), 2),
        (torch.tensor([[-1.0, -1.0]]), 0),
    ]:
        torch.testing.assert_close(run(positive, x), torch.full((1, 2), float(scale)))
    torch.testing.assert_close(
        run(density, torch.tensor([[1.0, 2.0]])), torch.tensor([[0.0, -0.375]])
    )
    with pytest.raises(ValueError, match="constraint"):
        run(density, torch.tensor([[1.0, -2.0]]))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 4), size=st.integers(1, 3))
def test_indices_are_refused_just_where_pytorch_does(data: Any, n: int, size: int) -> None:
    index = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(-6, 6), min_size=size, max_size=size), min_size=2, max_size=2
            )
        )
    )
    x = torch.arange(float(n))
    for f in (
        lambda i: x[i],
        lambda i: x.take(i),
        lambda i: x.gather(0, i),
        lambda i: torch.zeros(n).scatter(0, i, 1.0),
    ):
        try:
            want = torch.stack([f(i) for i in index])
        except (IndexError, RuntimeError):
            want = None
        for run in (vmap(f), lambda i, f=f: torch.stack([functionalize(f)(r) for r in i])):
            if want is None:
                with pytest.raises((IndexError, RuntimeError)):
                    run(index)
            else:
                torch.testing.assert_close(run(index), want)


@pytest.mark.thin(2)
@pytest.mark.parametrize("way", ["functionalize", pytest.param("jit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", refusing(), ids=lambda op: op.full_name)
def test_pytorchs_own_bad_inputs(op: Refusing, way: str) -> None:
    """``op_db``'s error_inputs: refused with the same class of error."""
    transform = getattr(torchfunc_jax, way)
    asked = list(op.refused())
    if not asked:
        pytest.skip("none that is of dense tensors with memory of their own")
    for function, tensors, theirs in asked:
        with pytest.raises(Exception) as ours:
            transform(function)(*tensors)
        assert isinstance(ours.value, type(theirs)) or isinstance(theirs, type(ours.value)), (
            f"{ours.value!r} for {theirs!r}"
        )
