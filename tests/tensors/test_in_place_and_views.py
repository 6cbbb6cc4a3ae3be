"""In-place operators, views, assignment, out= and aliasing inside transforms: each program beside
plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import fresh, same
from hypothesis import given, settings
from hypothesis import strategies as st

import torchfunc_jax
from torchfunc_jax import functionalize, grad, jit, vmap

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {}


def program(fn: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Declare a program of one [3, 4] tensor, which it does not change, that is differentiable
    wherever it is floating.
    """
    PROGRAMS[fn.__name__] = fn
    return fn


@program
def add_in_place(x):
    y = x.clone()
    y.add_(1).mul_(x)
    y -= 2
    y /= 3
    return y


@program
def write_to_a_row(x):
    y = x * 1
    y[0] = x[1]
    y[1] += 2
    y[-1, 1:] *= x[0, 1:]
    return y


@program
def write_forms(x):
    y = torch.zeros(3, 4, dtype=x.dtype)
    y[:, 1] = x[:, 0]
    y[..., 2:] = x[..., :2]
    y[None, 0] = 5.0
    y[1:, ::2] = x[0, 0]
    y[[0, 2], [1, 3]] = x[0, :2]
    y[torch.tensor([1, 1])] = x[2]
    return y


@program
def write_by_mask(x):
    y = x.clone()
    y[torch.tensor([True, False, True])] = 0.0
    y.masked_fill_(torch.eye(3, 4, dtype=torch.bool), -1.0)
    return y


@program
def a_view_sees_its_base(x):
    y = x.clone()
    v = y.view(-1)
    t = y.t()
    y[0, 0] = 7.0
    return v * 1, t * 1


@program
def a_base_sees_its_view(x):
    y = x.clone()
    y.view(-1)[3:].mul_(2)
    y.t()[1].add_(1)
    y.unsqueeze(0).transpose(0, 1).squeeze(1)[2] = 3.0
    return y


@program
def views_of_views(x):
    y = x.clone()
    a = y.view(2, 6)[:, 1:5]
    b = (
        a.reshape(2, 2, 2).permute(2, 0, 1)
        if a.is_contiguous()
        else a.unflatten(1, (2, 2)).permute(2, 0, 1)
    )
    b[1].fill_(0.5)
    b[0, 1] += y[0, :2]
    return y, a * 1, b * 1


@program
def diagonal_and_unfold(x):
    y = x.clone()
    y.diagonal().mul_(3)
    y.diagonal(1)[0] = x[0, 0]
    return y


@program
def chunks(x):
    y = x.clone()
    a, b = y.chunk(2, dim=1)
    a.add_(b)
    first, *rest = y.unbind(0)
    first.mul_(2)
    rest[1].sub_(first)
    left, right = y.split([1, 3], dim=1)
    right *= left
    return y


@program
def expand_then_write_the_base(x):
    y = x[0].clone()
    e = y.expand(3, 4)
    y.add_(1)
    return e * x


@program
def reshape_that_copies(x):
    y = x.clone()
    copy = y.t().reshape(-1)
    copy.zero_()
    return y, copy


@program
def contiguous_is_itself(x):
    y = x.clone()
    y.contiguous().add_(1)
    y.t().contiguous().add_(1)
    return y


@program
def as_strided(x):
    y = x.clone()
    y.as_strided((2, 2), (4, 2), 1).fill_(9.0)
    return y, y.as_strided((2, 3), (1, 2)) * 1


@program
def out_arguments(x):
    y = torch.empty(3, 4, dtype=x.dtype)
    with torch.no_grad():
        torch.add(torch.ones(3, 4, dtype=x.dtype), 2, out=y)
    return y + x


@program
def fill_and_copy(x):
    y = torch.empty_like(x)
    y.fill_(2.0)
    y[0].copy_(x[1])
    z = torch.ones(3, 4, dtype=torch.float32)
    z.copy_(x)
    return y, z


@program
def scatter_in_place(x):
    y = x.clone()
    index = torch.tensor([[0, 1, 2, 0]])
    y.scatter_(0, index, x[:1])
    y.scatter_add_(0, index, x[1:2])
    y.index_add_(1, torch.tensor([3]), x[:, :1])
    y.index_copy_(0, torch.tensor([1]), x[:1])
    y.index_fill_(1, torch.tensor([2]), 4.0)
    return y


@program
def index_put(x):
    y = x.clone()
    y.index_put_((torch.tensor([0, 0, 1]), torch.tensor([1, 1, 2])), x[0, :3], accumulate=True)
    return y


@program
def activations_in_place(x):
    y = x.clone()
    torch.nn.functional.relu_(y[0])
    y[1].clamp_(-0.5, 0.5)
    y[2].sigmoid_()
    return y


@program
def dtype_is_kept(x):
    y = torch.arange(12).reshape(3, 4)
    y += 1
    y[0] = 3.7
    y.mul_(2)
    return y, x * y


@program
def shape_changes_in_place(x):
    y = x.clone()
    y.t_()
    y.unsqueeze_(0)
    y.squeeze_()
    y.transpose_(0, 1)
    return y.add_(1)


@program
def swap_rows(x):
    y = x.clone()
    y[[0, 1]] = y[[1, 0]]
    y[0], y[1] = y[1].clone(), y[0].clone()
    return y


@program
def a_loop_that_fills(x):
    y = torch.zeros(5, 4, dtype=x.dtype)
    y[0] = x[0]
    for i in range(1, 5):
        y[i] = y[i - 1] * 0.5 + x[i % 3]
    return y


@program
def detach_shares_memory(x):
    y = x.clone()
    y.detach().add_(1)
    return y


@program
def real_and_imaginary(x):
    z = torch.complex(x, x * 2)
    v = torch.view_as_real(z.clone())
    v[..., 0] = 1.0
    w = z.clone()
    w.imag.mul_(2)
    return v, w.real, w.imag


@program
def aliases_in_outputs(x):
    y = x * 2
    return y, y.view(-1), y[0], y


@program
def cumulative_and_sorted(x):
    y = x.clone()
    y.cumsum_(1)
    y[1] = y[1].sort()[0]
    return y.flip(0).clone().tril_()


@program
def random_free_factories(x):
    y = x.new_zeros(2, 4)
    y[1] = x[1]
    z = torch.full_like(x, 3.0)
    z[:2] += y
    return z


def reference(fn: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    return fn(x.detach().clone())


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("wrap", [functionalize, jit], ids=["eager", "compiled"])
def test_a_program_computes_what_it_computes_in_torch(name: str, wrap: Any) -> None:
    fn, x = PROGRAMS[name], torch.randn(3, 4)
    before = x.clone()
    same(wrap(fn)(x), reference(fn, x))
    same(x, before)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "compiled"])
def test_under_vmap(name: str, wrap: Any) -> None:
    fn, x = PROGRAMS[name], torch.randn(2, 3, 4)
    results = [reference(fn, lane) for lane in x]
    expected = torch.utils._pytree.tree_map(lambda *lanes: torch.stack(lanes), *results)
    same(wrap(vmap(fn))(x), expected)


#: Programs that torch's own autograd refuses to differentiate.
REFUSED = {"chunks", "activations_in_place"}


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in REFUSED])
@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "compiled"])
def test_under_grad(name: str, wrap: Any) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        out = PROGRAMS[name](x)
        return sum(
            ((t.real if t.is_complex() else t) ** 2).sum().to(x.dtype)
            for t in torch.utils._pytree.tree_leaves(out)
        )

    x = torch.randn(3, 4)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf, allow_unused=True)
    same(
        wrap(grad(loss))(x),
        torch.zeros_like(x) if expected is None else expected,
        rtol=1e-4,
        atol=1e-5,
    )


# -- what a function does to its arguments ---------------------------------------------------------
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "whole": lambda x, y: x.add_(y),
    "row": lambda x, y: x.__setitem__(0, y[1]),
    "view": lambda x, y: x.view(-1)[2:5].zero_(),
    "both": lambda x, y: (x.mul_(2), y.sub_(x)),
    "swap": lambda x, y: (x.copy_(y.clone()), y.fill_(1.0))[0],
    "out": lambda x, y: torch.mul(x, 2, out=y),
    "twice": lambda x, y: x.add_(1) + x.add_(1),
    "returned view": lambda x, y: x.add_(1)[0],
    "detached": lambda x, y: x.detach().add_(1),
    "data": lambda x, y: x.data.add_(1),
    "other shape for a while": lambda x, y: (
        (x.unsqueeze_(0).mul_(2), y.t_().add_(1), x.squeeze_(0), y.t_())[1] * 1
    ),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "wrap",
    [functionalize, jit, vmap, lambda f: jit(vmap(f))],
    ids=["eager", "jit", "vmap", "jit-vmap"],
)
def test_written_arguments(name: str, wrap: Any) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = WRITES[name](x, y)
        return out if isinstance(out, torch.Tensor) else x * 1

    lanes = wrap not in (functionalize, jit)
    shape = (2, 3, 4) if lanes else (3, 4)
    mine = torch.randn(shape), torch.randn(shape)
    theirs = fresh(mine)
    expected = (
        torch.stack([fn(a, b) for a, b in zip(*theirs, strict=True)]) if lanes else fn(*theirs)
    )
    same(wrap(fn)(*mine), expected)
    same(mine, theirs)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded base"])
def test_written_arguments_of_any_layout(layout: str) -> None:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        base = torch.randn(6, 8)
        return base, {
            "transposed": base.t(),
            "sliced": base[1::2, ::3],
            "expanded base": base.view(-1)[4:28].view(4, 6),
        }[layout]

    for wrap in (functionalize, jit):
        base, x = make()
        other, y = make()
        wrap(lambda a: a[0].add_(1))(x)
        y[0].add_(1)
        same(base, other)


@pytest.mark.parametrize("way", ["vmap", "functionalize", "jit", "jit(vmap)"])
@pytest.mark.parametrize(
    "change", ["unsqueeze_(0)", "transpose_(0, 1)", "mul_(2).t_()", "t_().mul_(2)"]
)
def test_arguments_whose_shape_changes_in_place(change: str, way: str) -> None:
    """The results and what is written are PyTorch's; the argument itself keeps its shape, except
    where PyTorch runs the call.
    """

    def fn(x: torch.Tensor) -> torch.Tensor:
        eval(f"x.{change}", {"x": x})
        return x * 3

    ways = {
        "vmap": vmap,
        "functionalize": functionalize,
        "jit": jit,
        "jit(vmap)": lambda f: jit(vmap(f)),
    }
    mine = (
        torch.arange(12.0).reshape(3, 4)
        if way in ("jit", "functionalize")
        else torch.arange(60.0).reshape(5, 3, 4)
    )
    theirs = mine.clone()
    want = fn(theirs) if theirs.dim() == 2 else torch.stack([fn(x.clone()) for x in theirs])
    same(ways[way](fn)(mine), want)
    if way == "vmap":
        theirs = torch.arange(60.0).reshape(5, 3, 4)
        torch.func.vmap(fn)(theirs)
        same(mine, theirs)
        assert mine.stride() == theirs.stride()
    elif "mul_" in change:
        assert torch.equal(mine, 2 * torch.arange(float(mine.numel())).reshape(mine.shape))


# x [3, 4]; resize_ keeps elements at their places in memory
RESIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in order": lambda x: (x * 2).resize_(2, 3),
    "transposed": lambda x: (x.T * 2).resize_(5),
    "of a clone": lambda x: x.T.clone().resize_(2, 4),
    "of dimensions of size 1": lambda x: (x[:, None].transpose(0, 2) * 2).resize_(3, 2),
    "channels last": lambda x: (
        x.view(1, 3, 2, 2).to(memory_format=torch.channels_last) * 2
    ).resize_(12),
    "written to afterwards": lambda x: (x.T * 2).resize_(2, 2).add_(1),
    "resize_as_": lambda x: (x.T * 2).resize_as_(x),
}


@pytest.mark.parametrize("case", RESIZED)
@pytest.mark.parametrize("compiled", [False, True], ids=["un-jitted", "jit"])
def test_resize_of_any_layout(case: str, compiled: bool) -> None:
    f, x = RESIZED[case], torch.arange(12.0).reshape(3, 4)
    wrap = jit if compiled else lambda f: f
    same(wrap(functionalize(f))(x), f(x))
    lanes = torch.stack([x, x + 1])
    if compiled:
        same(jit(vmap(f))(lanes), torch.stack([f(x), f(x + 1)]))
        return
    for _ in range(2):  # torch.func counts the places through the memory of all lanes
        with pytest.raises(
            RuntimeError, match=r"required rank 4|inside vmap, where PyTorch gives wrong numbers"
        ):
            vmap(f)(lanes)
    for T in (torch.func, torchfunc_jax):
        with pytest.raises(RuntimeError, match="cannot resize variables that require grad"):
            T.grad(lambda x: f(x).sum())(x)


def test_version_counters_move_so_that_autograd_notices() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 1
    out = y.exp()
    version = out._version
    functionalize(lambda a: a.mul_(2))(out)
    assert out._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_grad = torch.autograd.grad(out.sum(), x)
        assert y_grad is None


def test_writing_to_an_expanded_tensor_raises_as_in_torch() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[:1].expand(3, 4).add_(x)

    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError) as theirs:
        fn(x.clone())
    for wrap in (functionalize, jit):
        with pytest.raises(RuntimeError, match="single memory location"):
            wrap(fn)(x)
    assert "single memory location" in str(theirs.value)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x.clone().add_(torch.ones(2, 3, 4)), "broadcast shape"),
        (lambda x: torch.ones(3, dtype=torch.int64).add_(1.5), "can't be cast"),
        (lambda x: x.clone()[0].copy_(torch.ones(5)), "must match"),
    ],
)
def test_refused_writes(fn: Callable[[torch.Tensor], Any], words: str) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match=words):
        fn(x)
    for wrap in (functionalize, jit, torchfunc_jax.vmap):
        with pytest.raises(RuntimeError, match=words):
            wrap(fn)(x if wrap is not torchfunc_jax.vmap else x.expand(2, 3, 4))


STEPS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "view": lambda ts: ts.append(ts[-1].reshape(-1) if ts[-1].is_contiguous() else ts[-1]),
    "row": lambda ts: ts.append(ts[-1][0] if ts[-1].dim() and ts[-1].shape[0] else ts[-1]),
    "tail": lambda ts: ts.append(ts[-1][1:] if ts[-1].dim() else ts[-1]),
    "step": lambda ts: ts.append(ts[-1][::2] if ts[-1].dim() else ts[-1]),
    "transpose": lambda ts: ts.append(ts[-1].t() if ts[-1].dim() == 2 else ts[-1]),
    "unsqueeze": lambda ts: ts.append(ts[-1].unsqueeze(0)),
    "base": lambda ts: ts.append(ts[0]),
    "clone": lambda ts: ts.append(ts[-1].clone()),
    "add": lambda ts: ts[-1].add_(1),
    "scale": lambda ts: ts[-1].mul_(-2),
    "fill first": lambda ts: ts[-1][..., :1].fill_(5.0) if ts[-1].dim() else ts[-1].fill_(5.0),
    "write base": lambda ts: ts[0][0].sub_(3),
    "middle": lambda ts: ts[len(ts) // 2].mul_(0.5),
}


@settings(max_examples=25)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=9))
def test_any_sequence_of_views_and_writes(steps: list[str]) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        tensors = [x.clone()]
        for step in steps:
            STEPS[step](tensors)
        return [t * 1 for t in tensors]

    x = torch.arange(12.0).reshape(3, 4)
    same(functionalize(fn)(x), fn(x))
    batch = torch.stack([x, x + 1])
    same([t[1] for t in vmap(fn)(batch)], fn(x + 1))


DETACHED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a result": lambda T, x: T.grad(lambda x: (x.sin().detach_() * x).sum())(x),
    "the function torch.detach_": lambda T, x: T.grad(lambda x: (torch.detach_(x.sin()) * x).sum())(
        x
    ),
    "then written to": lambda T, x: T.grad(lambda x: (x.sin().detach_().mul_(2) * x).sum())(x),
    "written to by its other name": lambda T, x: T.grad(_two_names)(x),
    "inside grad of grad, at the inner level alone": lambda T, x: T.grad(
        lambda x: T.grad(lambda y: (y.sin().detach_() * y * x).sum())(x).sum()
    )(x),
    "inside jvp, which has no such thing": lambda T, x: T.jvp(
        lambda x: x.sin().detach_() * x, (x,), (x,)
    )[1],
    "inside jvp of grad": lambda T, x: T.jvp(
        T.grad(lambda x: (x.sin().detach_() * x).sum()), (x,), (x,)
    )[1],
}


def _two_names(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    z = y.detach_()
    y.mul_(2)
    return (z * x).sum()


@pytest.mark.parametrize("name", DETACHED)
@pytest.mark.parametrize("compiled", [False, True])
def test_detach_in_place_stops_the_gradient_where_torch_func_does(
    name: str, compiled: bool
) -> None:
    x = torch.randn(3, dtype=torch.float64)
    run = lambda x: DETACHED[name](torchfunc_jax, x)
    same((jit(run) if compiled else run)(x), DETACHED[name](torch.func, x))


def test_detach_in_place_inside_vmap() -> None:
    x = torch.randn(3, dtype=torch.float64)
    # torch.func cannot: what vmap holds is a view
    same(vmap(grad(lambda x: x.sin().detach_() * x))(x), x.sin())


OVERLAPPING: dict[str, Callable[[torch.Tensor], Any]] = {
    "part of a window": lambda y: y.unfold(0, 2, 1)[0, 1:].fill_(9.0),
    "first window": lambda y: y.unfold(0, 2, 1)[0].mul_(9.0),
    "last window": lambda y: y.unfold(0, 2, 1)[1].mul_(3.0),
    "diagonal of windows": lambda y: y.unfold(0, 2, 1).diagonal(1, 0, 1).fill_(9.0),
    "all windows": lambda y: y.unfold(0, 2, 1).fill_(9.0),
    "windows that are apart": lambda y: y.unfold(0, 2, 2)[0].fill_(9.0),
    "first row of as_strided": lambda y: y.as_strided((2, 2), (1, 1))[0].fill_(9.0),
    "a view of a view of it": lambda y: y.unfold(0, 2, 1).t()[1].unsqueeze(0)[:, :1].fill_(9.0),
    "first row of expand": lambda y: y.expand(2, 3)[0].fill_(9.0),
    "part of a row of expand": lambda y: y.expand(2, 3)[1, 1:].add_(9.0),
    "select of expand": lambda y: y.unsqueeze(0).expand(2, 3).select(0, 1).mul_(2.0),
    "broadcast_to": lambda y: torch.broadcast_to(y, (2, 3))[1].add_(1),
    "a row of a part of expand": lambda y: y[1:].expand(2, 2)[1][:1].mul_(5.0),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("way", ["functionalize", "jit", "vmap", "jit(vmap)", "grad"])
@pytest.mark.parametrize("case", OVERLAPPING)
def test_writes_to_part_of_a_view_in_which_elements_are_several(case: str, way: str) -> None:
    """The elements that are not written to stand for the same memory, and must not bring its old
    value back.
    """

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        windows = y.unfold(0, 2, 1)
        OVERLAPPING[case](y)
        return torch.cat([y, (windows * 2).flatten()])

    for x in (torch.arange(3.0), torch.tensor([5.0, -1.0, 2.0])):
        if way == "grad":
            leaf = x.clone().requires_grad_()
            (fn(leaf) ** 2).sum().backward()
            same(grad(lambda x: (fn(x) ** 2).sum())(x), leaf.grad)
        elif "vmap" in way:
            mapped = jit(vmap(fn)) if "jit" in way else vmap(fn)
            same(mapped(torch.stack([x, x + 1])), torch.stack([fn(x), fn(x + 1)]))
        else:
            same((jit if way == "jit" else functionalize)(fn)(x), fn(x))


#: A fill of a view that overlaps itself, and a fill of the same memory that does not; PyTorch has
#: no derivative of the first.
FILLED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "fill_": (lambda y: y.expand(2, 3).fill_(9.0), lambda y: y.fill_(9.0)),
    "zero_ of a part": (lambda y: y[1:, None].expand(2, 4)[:, 1:].zero_(), lambda y: y[1:].zero_()),
    "fill_ with a tensor": (lambda y: y.expand(2, 3).fill_(y.sum()), lambda y: y.fill_(y.sum())),
    "a number as item": (
        lambda y: y.expand(2, 3).__setitem__(slice(None), 9.0),
        lambda y: y.fill_(9.0),
    ),
}


@pytest.mark.parametrize("way", ["functionalize", "jit", "vmap", "jit(vmap)", "grad"])
@pytest.mark.parametrize("case", FILLED)
def test_fills_of_views_in_which_elements_are_several(case: str, way: str) -> None:
    def fn(x: torch.Tensor, which: int = 0) -> torch.Tensor:
        y = x * 1
        FILLED[case][which](y)
        return (y * x).sum() + y

    x = torch.tensor([5.0, -1.0, 2.0])
    if way == "grad":
        same(grad(lambda x: fn(x).sum())(x), torch.func.grad(lambda x: fn(x, 1).sum())(x))
    elif "vmap" in way:
        same(
            (jit(vmap(fn)) if "jit" in way else vmap(fn))(torch.stack([x, x + 1])),
            torch.stack([fn(x, 1), fn(x + 1, 1)]),
        )
    else:
        same((jit if way == "jit" else functionalize)(fn)(x), fn(x, 1))


AT_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "read": lambda y, i: None,
    "write to y[i]": lambda y, i: y[i].mul_(5),
    "write to y[:, i]": lambda y, i: y[:, i].fill_(3.0),
    "write to y[..., i]": lambda y, i: y[..., i].add_(y[..., 0]),
    "write to y[i, None]": lambda y, i: y[i, None].mul_(5),
    "write to y[i, i]": lambda y, i: y[i, i].mul_(5),
    "write to part of y[i]": lambda y, i: y[i][..., :1].mul_(7),
    "write to y[..., 1:][i]": lambda y, i: y[..., 1:][i].mul_(3),
    "write to narrow": lambda y, i: y.narrow(1, i, 1).mul_(5),
    "write to select": lambda y, i: torch.select(y, 1, i).mul_(5),
    "y[i] = number": lambda y, i: y.__setitem__(i, 9.0),
    "y[:, i] = tensor": lambda y, i: y.__setitem__((slice(None), i), torch.arange(4.0)),
    "y[i] = tensor with a dimension more": lambda y, i: y.__setitem__(i, torch.ones(1, 1, 3, 4)),
    "y[i] += 1": lambda y, i: y.__setitem__(i, y[i] + 1),
    "y[i, [0, 1]] = number": lambda y, i: y.__setitem__((i, [0, 1]), -1.0),
}


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    "way",
    [
        "argument",
        "captured",
        "jit, argument",
        "jit, captured",
        "jit, computed",
        "vmap",
        "jit(vmap)",
        "jit(grad)",
    ],
)
@pytest.mark.parametrize("case", AT_PLACE)
def test_an_integer_tensor_as_index(case: str, way: str) -> None:
    """y[i] is a view of y, as in PyTorch; under jit, i is an input of the program."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 1
        view, base = y[i], y[:, i]
        AT_PLACE[case](y, i)
        return torch.cat([y.flatten(), view.flatten() * 2, base.flatten() * 3])

    x, place = torch.arange(24.0).reshape(2, 3, 4) + 1, torch.tensor(0)
    ways: dict[str, Callable[..., Any]] = {
        "argument": functionalize(fn),
        "captured": functionalize(lambda x, i: fn(x, place)),
        "jit, argument": jit(fn),
        "jit, captured": jit(lambda x, i: fn(x, place)),
        "jit, computed": jit(lambda x, i: fn(x, i * 1)),
        "vmap": lambda x, i: vmap(fn, (0, None))(x[None], i)[0],
        "jit(vmap)": lambda x, i: jit(vmap(fn, (0, None)))(x[None], i)[0],
        "jit(grad)": jit(grad(lambda x, i: (fn(x, i) ** 2).sum())),
    }
    for dtype in (torch.int64, torch.int32):
        place = torch.tensor(0, dtype=dtype)
        for number in (1, -1, 0):
            place.fill_(number)
            leaf = x.clone().requires_grad_()
            want = fn(leaf, place)
            if way == "jit(grad)":
                (want,) = torch.autograd.grad((want**2).sum(), leaf)
            same(ways[way](x, place), want.detach())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_integer_as_index_of_a_captured_tensor(compiled: bool) -> None:
    table, place = torch.arange(12.0).reshape(3, 4), torch.tensor(0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = (
            table[place]
            + table.select(1, place)[0]
            + table.narrow(0, place, 1)[0] * table[:, place, None][0]
        )
        return x * (rows + table[place, [0, 1, 2, 3]]) * torch.nn.functional.one_hot(place, 4)

    run = jit(fn) if compiled else functionalize(fn)
    for number in (1, 2, 0):
        place.fill_(number)
        same(run(torch.ones(4)), fn(torch.ones(4)))

    def write(x: torch.Tensor) -> torch.Tensor:
        table[place] = x
        return table * 1

    run = jit(write) if compiled else functionalize(write)
    for number in (1, -1):
        place.fill_(number)
        mine = run(torch.ones(4) * number), table.clone()
        same(mine, (write(torch.ones(4) * number), table))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mapped_integer_as_index_of_what_is_written(compiled: bool) -> None:
    def fn(y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[i] = 9.0
        y[:, i] += torch.tensor([4.0, 5.0])
        y[i].mul_(100)  # a copy, as in torch.func
        return y

    y, places = torch.arange(12.0).reshape(2, 2, 3), torch.tensor([1, -2])
    mapped = jit(vmap(fn)) if compiled else vmap(fn)
    same(mapped(y, places), torch.func.vmap(fn)(y, places))
    for f, words in (
        (fn, "index 7 is out of bounds for dimension 0 with size 2"),
        (lambda y, i: y[0][i], "out of"),
    ):
        with pytest.raises(IndexError, match=words):
            (jit(f) if compiled else functionalize(f))(y[0], torch.tensor(7))


MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsafe_chunk": lambda y: y.unsafe_chunk(2)[0].mul_(3),
    "unsafe_split": lambda y: torch.unsafe_split(y, 1, 1)[2].mul_(3),
    "unsafe_split_with_sizes": lambda y: y.unsafe_split_with_sizes([1, 3], 1)[1].mul_(3),
    "a list that has a tensor twice": lambda y: torch._foreach_mul_([y, y], 2),
    "a list that has a tensor twice, and numbers": lambda y: torch._foreach_add_(
        [y, y], [2.0, 3.0]
    ),
    "a list of a tensor and a part of it": lambda y: torch._foreach_neg_([y, y[:1]]),
    "a list that reads what it wrote": lambda y: torch._foreach_copy_([y[0], y[1]], [y[1], y[0]]),
    "a list that reads what it wrote, thrice": lambda y: torch._foreach_addcmul_(
        [y[0], y[1]], [y[1], y[0]], [y[2], y[0]], [2.0, 3.0]
    ),
    "complex numbers of real ones": lambda y: y.view(torch.complex128)[..., 0].fill_(1 + 2j),
    "real numbers of complex ones": lambda y: (
        y.view(torch.complex64).view(torch.float32)[..., 1:].fill_(9.0)
    ),
    "bits of numbers": lambda y: y.view(torch.int32)[1].bitwise_and_(0x7FF00000),
    "fill_diagonal_": lambda y: y.fill_diagonal_(7.0),
    "fill_diagonal_ of a tall one": lambda y: y[:, 2:].fill_diagonal_(7.0, wrap=True),
    "fill_diagonal_ of another order": lambda y: y.t().fill_diagonal_(7.0, wrap=True),
    "fill_diagonal_ of a place": lambda y: y[torch.tensor(1), None].t().fill_diagonal_(7.0),
    "fill_diagonal_ of three dimensions": lambda y: y.view(3, 2, 2)[:2].fill_diagonal_(7.0),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    "way", ["functionalize", "jit", "vmap", "vmap over the last dimension", "jit(vmap)", "grad"]
)
@pytest.mark.parametrize("case", MEMORY)
def test_writes_to_memory_that_several_tensors_share(case: str, way: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        # the lanes of x need not be, and only contiguous numbers have a view of another width
        y = (x * 1).contiguous()
        MEMORY[case](y)
        return y * 1

    for x in (torch.arange(12.0).reshape(3, 4) + 1, torch.arange(12.0).reshape(3, 4).flip(0) / 2):
        if way == "grad":
            leaf = x.clone().requires_grad_()
            # PyTorch's autograd does not know that these share memory
            if "unsafe" not in case and "list" not in case:
                (fn(leaf) ** 2).sum().backward()
                same(grad(lambda x: (fn(x) ** 2).sum())(x), leaf.grad)
        elif "vmap" in way:
            dim = -1 if "last" in way else 0
            mapped = vmap(fn, in_dims=dim)
            same(
                (jit(mapped) if "jit" in way else mapped)(torch.stack([x, x + 1], dim)),
                torch.stack([fn(x), fn(x + 1)]),
            )
        else:
            same((jit if way == "jit" else functionalize)(fn)(x), fn(x))


def test_as_strided_of_a_place_that_only_the_program_knows() -> None:
    fn = lambda x, i: x[i].as_strided((2,), (1,)) * 1
    x, place = torch.arange(12.0).reshape(3, 4), torch.tensor(1)
    same(jit(fn)(x, place), fn(x, place))  # it calls the function itself
    same(jit(vmap(fn, (0, None)))(x[None], place), fn(x, place)[None])
    # PyTorch runs it
    same(vmap(fn, (0, None))(x[None], place), torch.func.vmap(fn, (0, None))(x[None], place))


class _Held(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t, self.weight = (
            torch.ones(3),
            torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False),
        )

    def values(self) -> dict[str, Any]:
        found = {"t": self.t, "weight": self.weight, "grad": self.weight.grad}
        return {
            name: (type(x), x.clone()) if isinstance(x, torch.Tensor) else x
            for name, x in found.items()
        }


#: Give a tensor from outside other memory; torch.func's vmap does all of it.
GIVEN_MEMORY: dict[str, Callable[[_Held], Any]] = {
    "data": lambda m: setattr(m.t, "data", torch.zeros(3)),
    "data of a parameter": lambda m: setattr(m.weight, "data", m.weight.data * 2),
    "data, and back": lambda m: [setattr(m.t, "data", x) for x in (torch.zeros(3), m.t.data)],
    "set_": lambda m: m.t.set_(torch.zeros(3)),
    "grad": lambda m: setattr(m.weight, "grad", torch.ones(3)),
    "another dtype": lambda m: m.double(),
    "a new parameter": lambda m: setattr(
        m, "weight", torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    ),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.zeros(3)}, assign=True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", GIVEN_MEMORY)
def test_a_tensor_from_outside_gets_other_memory(case: str, compiled: bool) -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def through(transform: Callable[..., Any], held: _Held) -> Any:
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x * held.t * held.weight
            GIVEN_MEMORY[case](held)
            return y + x * held.t * held.weight

        run = transform(f)
        return [(run(x), held.values()) for _ in range(2)]

    same(
        through(lambda f: jit(vmap(f)) if compiled else vmap(f), _Held()),
        through(torch.func.vmap, _Held()),
    )
    if compiled:
        same(through(jit, _Held()), through(lambda f: f, _Held()))
        return
    # the module gets another tensor, and none gets other memory
    if case in ("a new parameter", "load_state_dict"):
        differentiated = lambda T: through(lambda f: T.grad(lambda x: f(x).sum()), _Held())
        same(differentiated(torchfunc_jax), differentiated(torch.func))
    held = _Held()
    before = held.values()
    loss = lambda x: (GIVEN_MEMORY[case](held), x * held.t)[1].sum()
    if case == "set_":
        for T in (torch.func, torchfunc_jax):
            with pytest.raises(
                RuntimeError,
                match=r"aten::set_\.source_Tensor\) that would mutate a captured Tensor",
            ):
                T.grad(loss)(x)
            same(held.values(), before)
    # after torch.func's grad, whoever reads the data of the others may end the process
    run = jit(grad(loss)) if case in ("a new parameter", "load_state_dict", "set_") else grad(loss)
    with pytest.raises(
        RuntimeError, match=r"get other memory inside it.*copy_ under torch\.no_grad"
    ):
        run(x)
    same(held.values(), before)


def test_a_tensor_from_outside_is_swapped_for_one_of_a_transform_as_in_torch_func() -> None:
    def swapped(T: Any, transform: str) -> Any:
        t = torch.ones(3)

        def f(x: torch.Tensor) -> torch.Tensor:
            torch.utils.swap_tensors(t, torch.zeros(3))
            return (x * t).sum() if transform == "grad" else x + t

        return getattr(T, transform)(f)(torch.ones(2, 3)), t + 0

    for transform in ("grad", "vmap"):
        same(swapped(torchfunc_jax, transform), swapped(torch.func, transform))
    t = torch.ones(3)
    with pytest.raises(RuntimeError, match="swap_tensors: a tensor from outside"):
        jit(grad(lambda x: (torch.utils.swap_tensors(t, torch.zeros(3)), (x * t).sum())[1]))(
            torch.ones(3)
        )
    same(t, torch.ones(3))


def test_data_of_another_shape() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(3)
        y.data = torch.full((2, 3), 7.0)
        return x + y.add_(1)

    x = torch.ones(4, 3)
    same(vmap(f)(x), torch.full((4, 2, 3), 9.0))
    same(jit(vmap(f))(x), torch.full((4, 2, 3), 9.0))
    derivative = lambda T: T.grad(lambda x: f(x).sum())(x[0])
    same(jit(lambda: derivative(torchfunc_jax))(), torch.full((3,), 2.0))
    for T in (torchfunc_jax, torch.func):
        with pytest.raises(
            RuntimeError, match=r"mutating directly with `\.data` inside functorch transform"
        ):
            derivative(T)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "write", [torch.Tensor.copy_, torch.Tensor.add_, lambda a, b: a.fill_(2.0)]
)
def test_the_error_names_the_operator_that_wrote_in_a_vmap_inside(
    write: Any, compiled: bool
) -> None:
    captured = torch.ones(3)
    words = []
    for T in (torchfunc_jax, torch.func):
        fn = T.grad(lambda x, T=T: (T.vmap(write)(captured, (x * 2).detach()), x.sum() * 3)[1])
        with pytest.raises(RuntimeError, match="mutate a captured Tensor") as raised:
            (jit(fn) if compiled and T is torchfunc_jax else fn)(torch.ones(3))
        words.append(str(raised.value))
    assert words[0] == words[1]
