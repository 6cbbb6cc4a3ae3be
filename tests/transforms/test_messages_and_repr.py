"""What a user reads is what torch.func says: errors under vmap, and tensors that are printed inside
of a transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import same

import torchfunc_jax
from bridge.errors import DataDependentError
from torchfunc_jax import grad, jit, vmap

_X, _Z = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2)

#: What one lane does -> words of torch.func's error.
WORDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "if": (lambda r: r if r.sum() > 0 else -r, "data-dependent control flow"),
    "bool": (lambda r: bool(r[0]), "data-dependent control flow"),
    "not": (lambda r: r * (not r[0]), "data-dependent control flow"),
    "is_nonzero": (lambda r: torch.is_nonzero(r[0]), "data-dependent control flow"),
    "item": (lambda r: r[0].item(), r"calling .item\(\) on a Tensor"),
    "float": (lambda r: float(r[0]), r"calling .item\(\) on a Tensor"),
    "int": (lambda r: int(r[0]), r"calling .item\(\) on a Tensor"),
    "format": (lambda r: f"{r[0]:.2f}", r"calling .item\(\) on a Tensor"),
    "nonzero": (
        lambda r: r.nonzero(),
        "vmap: We do not support batching operators that can output dynamic shape",
    ),
    "where": (torch.where, r"can output dynamic shape\. Attempted to vmap over aten::where"),
    "unique": (torch.unique, r"can output dynamic shape\. Attempted to vmap over aten::_unique2"),
    "fill_ of an unmapped tensor": (
        lambda r: _Z.fill_(r[0]),
        r"vmap: fill_\(self, \*extra_args\) is not possible",
    ),
    "masked_fill_": (
        lambda r: _Z.masked_fill_(_Z > 0, r[0]),
        r"vmap: (aten::)?masked_fill_\(self, \*extra_args\) is not possible",
    ),
    "mul_": (
        lambda r: _Z.mul_(r),
        r"vmap: inplace arithmetic\(self, \*extra_args\) is not possible",
    ),
    "batch norm": (
        lambda r: torch.nn.functional.batch_norm(r.expand(3, 2), _Z, _Z, training=True),
        "running_mean or running_var, which",
    ),
    "mm": (
        lambda r: torch.mm(r, r),
        (
            r"Shape mismatch: Got incorrect dims for mm\(a, b\). a has dim 1and b has dim 1but "
            r"expected them to "
            "have dim 2 and dim 2"
        ),
    ),
    "mv": (lambda r: torch.mv(r, r), r"Shape mismatch: Got incorrect dims for mv"),
    "bmm": (lambda r: r.bmm(r), r"Shape mismatch: Got incorrect dims for bmm"),
    "dot": (lambda r: torch.dot(r[None], r), "Got wrong shapes for dot"),
    "if, of several values": (lambda r: r if r > 0 else -r, "data-dependent control flow"),
}


@pytest.mark.parametrize("way", ["un-jitted", "jit"])
@pytest.mark.parametrize("name", WORDS)
def test_the_words_of_an_error_under_vmap(name: str, way: str) -> None:
    lane, words = WORDS[name]
    for transform in (torch.func.vmap, vmap if way == "un-jitted" else lambda f: jit(vmap(f))):
        with pytest.raises(RuntimeError, match=words):
            transform(lane)(_X)


#: A tensor that is made of a list of tensors: it has no derivative.
OF_A_LIST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda x: torch.tensor([x, 1.0]),
    "of a tuple": lambda x: torch.tensor((x,)),
    "nested": lambda x: torch.tensor([[x], [2.0]]),
    "as_tensor": lambda x: torch.as_tensor([x]),
    "asarray": lambda x: torch.asarray([x]),
    "Tensor": lambda x: torch.Tensor([x]),
    "new_tensor": lambda x: x.new_tensor([x, 2]),
    "new_tensor of integers": lambda x: x.long().new_tensor(data=[[x.long()]]),
    "new": lambda x: x.new([x, 2]),
    "FloatTensor": lambda x: torch.FloatTensor([[x], [x]]),
    "of booleans and complex numbers": lambda x: torch.tensor([x > 0, x * 1j]).abs(),
}


@pytest.mark.parametrize("name", OF_A_LIST)
def test_a_tensor_of_a_list_of_tensors(name: str) -> None:
    x, f = torch.tensor(3.0), lambda x: (OF_A_LIST[name](x) * x).sum()
    for run in (
        lambda T: T.grad(f)(x),
        lambda T: T.jvp(f, (x,), (x,)),
        lambda T: T.vjp(f, x)[1](x),
        lambda T: T.grad(T.grad(f))(x),
    ):
        same(run(torchfunc_jax), run(torch.func))
    for transform in (torch.func.vmap, vmap, lambda f: jit(vmap(f))):
        with pytest.raises(RuntimeError, match=r"calling .item\(\) on a Tensor"):
            transform(f)(_X[0])
    with pytest.raises(DataDependentError, match="under jit only its shape and dtype are known"):
        jit(grad(f))(x)


@pytest.mark.parametrize("way", ["un-jitted", "jit"])
def test_random_numbers_in_place_of_an_unmapped_tensor(way: str) -> None:
    for F in (torch.func, torchfunc_jax):
        mapped = F.vmap(lambda r, p: _Z.bernoulli_(p), (0, None), randomness="different")
        with pytest.raises(
            RuntimeError, match="Cannot ask for different inplace randomness on an unbatched tensor"
        ):
            (jit(mapped) if way == "jit" and F is torchfunc_jax else mapped)(_X, _X[0] / 4)


@pytest.mark.parametrize("way", ["un-jitted", "jit"])
def test_a_tensor_that_escaped_from_vmap(way: str) -> None:
    for F in (torch.func, torchfunc_jax):
        kept: list[torch.Tensor] = []
        mapped = F.vmap(F.grad(lambda r, kept=kept: (kept.append(r), r.sum())[1]))
        (jit(mapped) if way == "jit" and F is torchfunc_jax else mapped)(_X)
        with pytest.raises(
            RuntimeError, match="your tensor may have escaped from inside a function being vmapped"
        ):
            kept[0] + 1


def test_a_value_is_no_error_under_grad() -> None:
    assert grad(lambda r: r.sum() if r.sum() > 0 else -r.sum())(_X).equal(torch.ones(2, 2))


FORMATTED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "number": (lambda x: x.sum(), ""),
    "number with two digits": (lambda x: x.sum(), ".2f"),
    "vector": (lambda x: x[0], ""),
    "vector with two digits": (lambda x: x[0], ".2f"),
    "integer": (lambda x: x.long().sum(), "05d"),
    "captured vector": (lambda x: _Z, ".2f"),
    "captured number": (lambda x: _Z.sum(), ""),
}


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "in PyTorch"])
@pytest.mark.parametrize("name", FORMATTED)
def test_formatted_tensors(name: str, recorded: bool) -> None:
    """Without a format, a number that a vmap maps is shown; torch.func has an error for it."""
    take, spec = FORMATTED[name]

    def formatted(T: Any, mapped: bool) -> Any:
        found: list[str] = []

        def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if not recorded:
                x = x.as_strided(x.shape, x.stride())
            found.append(format(take(x), spec))
            return (x * y).sum()

        try:
            if mapped:
                T.vmap(f)(torch.stack([_X, _X]), torch.ones(2))
            else:
                T.grad(f)(_X, torch.tensor(2.0))
                T.vmap(f, (None, 0))(_X, torch.ones(2))
        except (RuntimeError, TypeError) as error:
            return isinstance(error, TypeError), str(error)[:60]
        return found

    assert formatted(torchfunc_jax, False) == formatted(torch.func, False)
    if name != "number":
        assert formatted(torchfunc_jax, True) == formatted(torch.func, True)


PRINTED: dict[str, Callable[[Any, Callable[[torch.Tensor], Any]], Any]] = {
    "vmap": lambda T, f: T.vmap(f)(_X),
    "vmap over dim 1": lambda T, f: T.vmap(f, in_dims=1)(_X),
    "vmap in vmap": lambda T, f: T.vmap(T.vmap(f))(_X),
    "vmap of integers": lambda T, f: T.vmap(f)(_X.long()),
    "grad": lambda T, f: T.grad(f)(_X),
    "grad in grad": lambda T, f: T.grad(T.grad(f))(_X[0, 0]),
    "grad in vmap": lambda T, f: T.vmap(T.grad(f))(_X),
    "vmap in grad": lambda T, f: T.grad(lambda a: T.vmap(f)(a).sum())(_X),
    "vjp": lambda T, f: T.vjp(f, _X),
    "jvp": lambda T, f: T.jvp(f, (_X,), (_X,)),
    "jacfwd": lambda T, f: T.jacfwd(f)(_X[0]),
}


@pytest.mark.parametrize("name", PRINTED)
def test_printed_tensors(name: str) -> None:
    def printed(T: Any) -> list[str]:
        found: list[str] = []

        def f(x: torch.Tensor) -> torch.Tensor:
            found.append("the function runs")
            found.extend(
                [
                    repr(x),
                    str(x.sin()),
                    repr(torch.ones(2)),
                    repr(x + _X[0, 0]),
                    repr(_X),
                    f"{x}" if x.dim() else "",
                ]
            )
            y = x.sin()
            y += 1
            found.append(repr(y))
            return y.double().sum()

        PRINTED[name](T, f)
        return found

    assert printed(torchfunc_jax) == printed(torch.func)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["vmap", "functionalize"])
def test_a_tensor_from_outside_is_shown_as_written(name: str, recorded: bool) -> None:
    def printed(T: Any) -> list[str]:
        found: list[str] = []
        vector, number = torch.zeros(2), torch.tensor(0.0)

        def f(x: torch.Tensor) -> torch.Tensor:
            found.extend([f"{number}", repr(vector)])
            vector.add_(1)
            number.add_(2)
            found.extend([repr(vector), str(vector), f"{vector}", f"{vector!s:>30}", repr(number)])
            return x.sum()

        for x in (_X, _X + 1):
            with torch.autocast("cpu", enabled=not recorded):  # under autocast nothing is recorded
                getattr(T, name)(f)(x)
        return found

    assert printed(torchfunc_jax) == printed(torch.func)


def test_many_tensors_are_shown() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.sin()
            shown.append(repr(x))
        return x

    shown: list[str] = []
    torch.func.vmap(f)(_X)
    expected = list(shown)
    for _ in range(2):  # PyTorch runs the second call from its start
        shown.clear()
        vmap(f)(_X)
        assert shown == expected


def test_a_tensor_is_shown_in_the_forward_of_a_function() -> None:
    found: list[str] = []

    class Shows(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            found.append(repr(x * 2))
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * ctx.saved_tensors[0].cos()

    for k in range(2):
        found.clear()
        torch.func.vmap(torch.func.grad(lambda x: Shows.apply(x).sum()))(_X + k)
        torch.testing.assert_close(
            vmap(grad(lambda x: Shows.apply(x).sum()))(_X + k), (_X + k).cos()
        )
        assert len(found) == 2 and found[1] == found[0]


def test_printed_tensors_without_values() -> None:
    found: list[str] = []
    jit(vmap(grad(lambda x: (found.append(repr(x)), x.sum())[1])))(_X)
    text = found[0]
    assert text.replace("\n", "").replace("    ", "") == (
        "GradTrackingTensor(lvl=2, value=BatchedTensor(lvl=1, bdim=0, value=Traced(shape=(2, 2), "
        "dtype=torch.float32)))"
    )
    jit(vmap(lambda x, y: (found.append(repr(y.abs())), x)[1], (0, None)))(_X, _X)
    assert found[1] == "Traced(shape=(2, 2), dtype=torch.float32)", "no vmap maps it"
    kept: list[torch.Tensor] = []
    for transform in (vmap, lambda f: jit(vmap(f))):
        transform(lambda x: (kept.append(x), x.sin())[1])(_X)
        assert "escaped" in repr(kept[-1])
    jit(lambda x: (kept.append(x), x.sin())[1])(_X)
    assert kept[-1] is _X
