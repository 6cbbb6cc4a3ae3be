"""Results that share memory: views of arguments and of captured tensors, and arguments that were
changed in place.

The truth is torch.func, and for jit of a plain function the function itself. Compared are whose
memory a result has, where in it, with which strides and bits, of which tensor it is a view, and
what has become of the arguments.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
from torch.utils import _pytree as pytree

import torchfunc_jax
from bridge.process import process
from torchfunc_jax import jit


def _written(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


def _put(x: torch.Tensor) -> torch.Tensor:
    return x.index_put_((torch.tensor([0, 2]),), torch.ones(6, dtype=x.dtype))


def _then(
    write: Callable[[torch.Tensor], Any], result: Callable[[torch.Tensor], Any]
) -> Callable[[torch.Tensor], Any]:
    def program(x: torch.Tensor) -> Any:
        write(x)
        return result(x)

    return program


#: Programs of a lane [4, 6] and of a captured tensor [4, 6].
VIEWS: dict[str, Callable[..., Any]] = {
    "identity": lambda x, w: x,
    "view": lambda x, w: x.view(-1),
    "view to more": lambda x, w: x.view(2, 2, 6),
    "view dtype": lambda x, w: (
        x.view(torch.int32) if x.dtype is torch.float32 else x.view(torch.float32)
    ),
    "reshape": lambda x, w: x.reshape(3, 8),
    "flatten": lambda x, w: x.flatten(),
    "unflatten": lambda x, w: x.unflatten(1, (2, 3)),
    "transpose": lambda x, w: x.transpose(0, 1),
    "t": lambda x, w: x.t(),
    "T": lambda x, w: x.T,
    "mT": lambda x, w: x.mT,
    "permute": lambda x, w: x.view(2, 2, 6).permute(2, 0, 1),
    "movedim": lambda x, w: x.movedim(0, 1),
    "expand": lambda x, w: x.expand(3, 4, 6),
    "unsqueeze": lambda x, w: x.unsqueeze(1),
    "squeeze": lambda x, w: x[:1].squeeze(0),
    "select": lambda x, w: x.select(1, 2),
    "narrow": lambda x, w: x.narrow(0, 1, 2),
    "slice": lambda x, w: x[1:, ::2],
    "index": lambda x, w: x[1],
    "ellipsis": lambda x, w: x[..., None, 1],
    "unbind": lambda x, w: x.unbind(0),
    "split": lambda x, w: x.split(2),
    "split sizes": lambda x, w: x.split([1, 3]),
    "chunk": lambda x, w: x.chunk(2, 1),
    "tensor_split": lambda x, w: x.tensor_split(3, 1),
    "diagonal": lambda x, w: x.diagonal(1),
    "unfold": lambda x, w: x.unfold(1, 2, 2),
    "detach": lambda x, w: x.detach(),
    "contiguous": lambda x, w: x.contiguous(),
    "to": lambda x, w: x.to(x.dtype),
    "chain": lambda x, w: x.t()[1:].unsqueeze(0).movedim(0, 2)[..., 0].t(),
    "several": lambda x, w: {"x": x, "parts": [x[0], x.t()], "new": x * 2},
    "no_grad": lambda x, w: torch.no_grad()(lambda: x.view(-1))(),
    "captured": lambda x, w: (x * 2, w),
    "view of captured": lambda x, w: w.t()[1:],
    "computed": lambda x, w: x.abs().view(-1),
}
COMPLEX: dict[str, Callable[..., Any]] = {
    "view_as_real": lambda x, w: torch.view_as_real(x),
    "real": lambda x, w: x.real,
    "imag": lambda x, w: x.imag,
    "conj": lambda x, w: x.conj(),
    "mH": lambda x, w: x.mH,
    "view_as_complex": lambda x, w: torch.view_as_complex(torch.view_as_real(x)),
    "identity of complex": lambda x, w: x,
    "real of the conjugate": lambda x, w: x.conj().real,
    "imag of the conjugate": lambda x, w: x.conj().imag,
    "part of real of the conjugate": lambda x, w: x.conj()[1:].real[:, ::2],
}
WRITES: dict[str, Callable[..., Any]] = {
    "exp_": lambda x, w: x.exp_(),
    "add_": lambda x, w: x.add_(1),
    "mul_ of a view": lambda x, w: x[0].mul_(2),
    "view of a written": lambda x, w: _then(torch.Tensor.sin_, lambda x: x.view(-1))(x),
    "view, then write": lambda x, w: _then(lambda x: x.view(-1).mul_(3), lambda x: x.t())(x),
    "copy_": lambda x, w: x.copy_(torch.ones(6)),
    "index_put_": lambda x, w: _put(x),
    "setitem": lambda x, w: _written(x, 0, 5.0),
    "setitem of a view": lambda x, w: _written(x.t(), (slice(None), 1), 5.0),
    "zero_ of the transposed": lambda x, w: x.t().zero_(),
    "iadd": lambda x, w: x.__iadd__(1),
}
#: The ways to call a program: transforms of torch.func's or ours, the function of one lane, the
#: argument and a tangent.
VMAPS: dict[str, Callable[..., Any]] = {
    "vmap": lambda F, f, x, t: F.vmap(f)(x),
    "vmap, in_dims=1, out_dims=1": lambda F, f, x, t: F.vmap(f, 1, 1)(x.transpose(0, 1)),
    "vmap, out_dims=-1": lambda F, f, x, t: F.vmap(f, out_dims=-1)(x),
    "vmap of vmap": lambda F, f, x, t: F.vmap(F.vmap(f, 1, 1), out_dims=1)(
        x.view(3, 1, 4, 6).transpose(1, 2)
    ),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "functionalize": lambda F, f, x, t: F.functionalize(f)(x[0]),
    "grad's aux": lambda F, f, x, t: F.grad(lambda x: (x.abs().sum(), f(x)), has_aux=True)(x[0])[1],
    "vjp": lambda F, f, x, t: F.vjp(f, x[0])[0],
    "jvp": lambda F, f, x, t: F.jvp(f, (x[0],), (t[0],)),
    "jvp, transposed tangent": lambda F, f, x, t: F.jvp(f, (x[0],), (t.view(3, 6, 4)[0].t(),)),
    "jvp, expanded tangent": lambda F, f, x, t: F.jvp(f, (x[0],), (t[0, 0].expand(4, 6),)),
    "jvp, tangent that begins elsewhere": lambda F, f, x, t: F.jvp(f, (x[0],), (t[1],)),
    "jvp, tangent in larger memory": lambda F, f, x, t: F.jvp(f, (x[0].clone(),), (t[0],)),
    "jacrev's aux": lambda F, f, x, t: F.jacrev(lambda x: (x.abs().sum(), f(x)), has_aux=True)(
        x[0]
    )[1],
    "vmap of jvp": lambda F, f, x, t: F.vmap(lambda x, t: F.jvp(f, (x,), (t,)))(x, t),
    "vmap of grad's aux": lambda F, f, x, t: F.vmap(
        F.grad(lambda x: (x.abs().sum(), f(x)), has_aux=True)
    )(x)[1],
}
NOT_VIEWABLE = "view size is not compatible with input tensor's size and stride"


def _described(out: Any, given: dict[str, torch.Tensor]) -> list[Any]:
    """What of the memory of the outputs torch.func's user sees."""
    found = []
    for t in pytree.tree_leaves(out):
        owner = next(
            (
                n
                for n, g in given.items()
                if g.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
            ),
            None,
        )
        if owner is None:
            found.append((t.shape, t.dtype))
            continue
        g = given[owner]
        base = (
            "itself" if t is g else None if t._base is None else t._base is g or t._base is g._base
        )
        found.append(
            (
                owner,
                base,
                t.shape,
                t.dtype,
                t.stride(),
                t.storage_offset(),
                t.data_ptr() - g.data_ptr(),
                t.is_conj(),
                t.is_neg(),
                t.requires_grad,
            )
        )
    return found


def _run(
    way: Callable[..., Any],
    program: Callable[..., Any],
    F: Any,
    dtype: torch.dtype,
    jitted: bool,
    requires_grad: bool,
    lay: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    x = lay(torch.linspace(0.5, 2, 72).view(3, 4, 6).to(dtype))
    t, w = (
        torch.linspace(1, 3, 72).view(3, 4, 6).to(dtype),
        torch.linspace(0, 1, 24).view(4, 6).to(dtype),
    )
    x.requires_grad_(requires_grad)

    def call(x: torch.Tensor, t: torch.Tensor) -> Any:
        return way(F, lambda x: program(x, w), x, t)

    try:
        out = (jit(call) if jitted else call)(x, t)
    except RuntimeError as error:
        return str(error)
    values = [
        v.detach().resolve_conj().resolve_neg().clone() for v in [*pytree.tree_leaves(out), x, t, w]
    ]
    return _described(out, {"x": x, "t": t, "w": w}), values


def _agree(
    way: Callable[..., Any],
    program: Callable[..., Any],
    jitted: bool,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = False,
    lay: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> None:
    theirs = _run(way, program, torch.func, dtype, False, requires_grad, lay)
    if isinstance(theirs, str) and NOT_VIEWABLE not in theirs:
        return  # torch.func refuses it
    ours = _run(way, program, torchfunc_jax, dtype, jitted, requires_grad, lay)
    if isinstance(theirs, str):
        assert isinstance(ours, str) and NOT_VIEWABLE in ours
        return
    assert not isinstance(ours, str), ours
    assert ours[0] == theirs[0]
    for mine, expected in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, expected, equal_nan=True)


def _vmaps(name: str) -> list[Callable[..., Any]]:
    # torch.func expands a result that is the same in each lane to a wrong shape if out_dims is not
    # 0
    return [VMAPS["vmap"]] if "captured" in name else [*VMAPS.values()]


def _dtype(name: str) -> torch.dtype:
    return torch.complex64 if name in COMPLEX else torch.float32


@pytest.mark.thin(4)
@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize("name", [*VIEWS, *COMPLEX, *WRITES])
def test_memory_is_torch_funcs_under_vmap(name: str, jitted: bool) -> None:
    for way in _vmaps(name):
        _agree(way, (VIEWS | COMPLEX | WRITES)[name], jitted, _dtype(name))


@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize(
    "name", ["real", "conj", "mH", "identity of complex", "real of the conjugate"]
)
def test_memory_of_mapped_conjugates_is_torch_funcs(name: str, jitted: bool) -> None:
    for way in VMAPS.values():
        _agree(way, COMPLEX[name], jitted, torch.complex64, lay=torch.conj)


@pytest.mark.parametrize("name", [*VIEWS, *COMPLEX, *WRITES])
def test_memory_is_the_functions_own_under_jit(name: str) -> None:
    for lay in (
        lambda x: x[1],
        lambda x: x.view(3, 6, 4)[1].t(),
        lambda x: x[1].conj(),
        lambda x: torch._neg_view(x[1]),
    ):
        _agree(
            lambda F, f, x, t: f(x), (VIEWS | COMPLEX | WRITES)[name], True, _dtype(name), lay=lay
        )


def _slow_but(names: list[str], fast: tuple[str, ...]) -> list[Any]:
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.thin(2)
@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize("way", OTHERS)
@pytest.mark.parametrize(
    "name",
    _slow_but([*VIEWS, *WRITES], ("identity", "chain", "detach", "exp_", "view of a written")),
)
def test_memory_is_torch_funcs_under_the_other_transforms(
    name: str, way: str, jitted: bool
) -> None:
    _agree(OTHERS[way], (VIEWS | WRITES)[name], jitted)


@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize(
    "name", _slow_but([*VIEWS], ("identity", "chain", "detach", "no_grad", "captured"))
)
def test_views_of_tensors_that_require_grad(name: str, jitted: bool) -> None:
    for way in [*_vmaps(name), OTHERS["functionalize"], OTHERS["grad's aux"]]:
        _agree(way, VIEWS[name], jitted, requires_grad=True)


@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
def test_a_view_of_100_megabytes_takes_no_memory(jitted: bool) -> None:
    x = torch.zeros(25_000, 1000)
    call = lambda x: torchfunc_jax.vmap(lambda r: r.view(10, 100).t())(x)
    call = jit(call) if jitted else call
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = call(x)
    assert out.data_ptr() == x.data_ptr() and out._base is x
    out[0, 0, 0] = 7
    assert x[0, 0] == 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


#: Programs of an argument [2, 3, 4] through transforms F, each with two results that are
#: differentiated twice.
DIFFERENTIATED: dict[str, Callable[..., Any]] = {
    "vmap": lambda F, x: F.vmap(lambda r: (r.view(-1), r.sin()))(x),
    "vmap of another": lambda F, x: F.vmap(lambda r: (r.t()[1:], (r * 2).t()))(x),
    "results that share": lambda F, x: F.vmap(lambda r: ((y := r.sin()), y.t()))(x),
    "functionalize": lambda F, x: F.functionalize(lambda x: (x.view(-1), x.sin()))(x),
    "grad's aux": lambda F, x: F.grad(
        lambda x: (x.sin().sum(), x.t()[1:]) if x.dim() == 2 else (x.sin().sum(), x[1:]),
        has_aux=True,
    )(x),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_torch_autograd_goes_back_through_results_that_share_memory(
    name: str, jitted: bool
) -> None:
    found = []
    for F in (torch.func, torchfunc_jax):
        x = torch.linspace(0, 1, 24).view(2, 3, 4).requires_grad_()
        call = lambda x, F=F: DIFFERENTIATED[name](F, x)
        first, second = (jit(call) if jitted and F is torchfunc_jax else call)(x)
        (once,) = torch.autograd.grad((first**2).sum() + (second**3).sum(), x, create_graph=True)
        found.append((once, *torch.autograd.grad((once**2).sum(), x)))
    torch.testing.assert_close(found[1], found[0])


#: Functions of an argument [2, 3, 4] that write through a view which a transform has returned.
THROUGH: dict[str, Callable[..., Any]] = {
    "vmap": lambda F, x: F.vmap(lambda r: r.view(-1))(x).mul_(2),
    "vmap of vmap": lambda F, x: F.vmap(
        lambda r: F.vmap(lambda q: q.view(2, 2), out_dims=1)(r).add_(1).amax()
    )(x),
    "vmap in grad": lambda F, x: F.grad(lambda x: F.vmap(lambda r: r.t())(x * 1).mul_(2).sum())(x),
    "functionalize in vmap": lambda F, x: F.vmap(lambda r: F.vmap(lambda q: q[1:])(r).zero_())(x),
    "a part": lambda F, x: F.vmap(lambda r: r.diagonal(), in_dims=1, out_dims=1)(
        x.transpose(1, 2)
    ).neg_(),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize("name", THROUGH)
def test_a_write_to_a_view_that_a_transform_has_returned(name: str, jitted: bool) -> None:
    found = []
    for F in (torch.func, torchfunc_jax):
        x = torch.linspace(0, 1, 24).view(2, 3, 4)
        call = lambda x, F=F: THROUGH[name](F, x)
        out = (jit(call) if jitted and F is torchfunc_jax else call)(x)
        found.append((out, x))
    torch.testing.assert_close(found[1], found[0])


#: Programs of an argument in channels_last memory, and of one that is transposed, in which a view
#: is possible, or is not.
STRIDED: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x: (x + 1).permute(0, 2, 3, 1).view(-1),
    "of itself": lambda x: x.permute(0, 2, 3, 1).view(-1),
    "clone": lambda x: x.clone().permute(0, 2, 3, 1).view(-1),
    "contiguous": lambda x: x.contiguous().view(-1),
    "no view": lambda x: x.view(-1),
    "no view of a result": lambda x: x.exp().view(-1),
    "no view of a clone": lambda x: x.clone().view(-1),
    "asks": lambda x: torch.tensor([*x.stride(), x.is_contiguous(), *(x * 2).stride()]),
}


@pytest.mark.parametrize(
    "transform",
    [
        jit,
        lambda f: lambda x: torchfunc_jax.jacrev(lambda x: (x.sum(), f(x)), has_aux=True)(x)[1],
        torchfunc_jax.functionalize,
    ],
    ids=["jit", "jacrev", "functionalize"],
)
@pytest.mark.parametrize("name", STRIDED)
def test_strides_inside_are_those_of_plain_pytorch(name: str, transform: Any) -> None:
    x = torch.linspace(0, 1, 120).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = []
    for run in (STRIDED[name], transform(STRIDED[name])):
        try:
            found.append(run(x))
        except RuntimeError as error:
            assert NOT_VIEWABLE in str(error)
            found.append(NOT_VIEWABLE)
    assert (found[0] is NOT_VIEWABLE) == name.startswith("no view")
    if name.startswith("no view"):
        assert found[1] is NOT_VIEWABLE
    else:
        torch.testing.assert_close(found[1], found[0])


#: What a lane [3, 3] and a tensor [3, 3], mapped or not, are computed to in steps.
LANES: dict[str, list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "pointwise": [lambda a, w: a * 2, lambda a, w: a.relu(), lambda a, w: a + 1],
    "transposed": [lambda a, w: -a.t(), lambda a, w: a.exp().t(), lambda a, w: a + a.t()],
    "of two": [lambda a, w: a + w, lambda a, w: w * a, lambda a, w: torch.where(a > 0, w, a)],
    "of one that is computed": [lambda a, w: a * (w + 1), lambda a, w: w.exp() - a],
    "products": [lambda a, w: a @ w, lambda a, w: w @ a, lambda a, w: a * 2],
    "copies": [
        lambda a, w: a.clone(),
        lambda a, w: a.contiguous(),
        lambda a, w: torch.zeros_like(a) + w,
    ],
    "reductions": [
        lambda a, w: a.softmax(0),
        lambda a, w: a.sum(0, keepdim=True) * a,
        lambda a, w: a.max(1, keepdim=True)[0] + a,
    ],
    "joined": [
        lambda a, w: torch.cat([a, w])[:3],
        lambda a, w: torch.stack([a, w])[0] * 2,
        lambda a, w: a.flip(0),
    ],
    "views": [
        lambda a, w: a[1:].mul(2),
        lambda a, w: a.unsqueeze(0)[0],
        lambda a, w: a.expand(2, *a.shape)[1] * 1,
    ],
    "no view": [lambda a, w: a * 2, lambda a, w: a.view(-1)],
    "viewed": [lambda a, w: a.reshape(-1) * 2, lambda a, w: a.view(3, 3)],
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("way", ["unjitted", "jitted", "grad", "nested"])
@pytest.mark.parametrize("program", LANES)
def test_strides_of_lanes_are_those_of_torch_func(program: str, way: str) -> None:
    def seen(F: Any, in_dims: tuple[int, int | None]) -> list[Any]:
        found: list[Any] = []

        def body(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for step in LANES[program]:
                a = step(a, w)
                found.append((a.stride(), a.is_contiguous()))
            return a.sum()

        x, w = torch.linspace(-1, 1, 27).view(3, 3, 3), torch.linspace(0, 1, 27).view(3, 3, 3)
        call = F.vmap(body, in_dims)
        if way == "nested":
            call, x = F.vmap(call, (1, None)), torch.linspace(-1, 1, 54).view(3, 2, 3, 3)
        try:
            w = w[0] if in_dims[1] is None else w
            (
                jit(call)
                if way == "jitted" and F is torchfunc_jax
                else F.grad(lambda x: call(x, w).sum())
                if way == "grad"
                else call
            )(*[x, w][: 1 if way == "grad" else 2])
        except RuntimeError as error:
            assert NOT_VIEWABLE in str(error)
            found.append(NOT_VIEWABLE)
        return found

    for in_dims in [(0, 0), (1, None), (2, 1), (-1, 0), (1, 2)]:
        assert seen(torchfunc_jax, in_dims) == seen(torch.func, in_dims), in_dims


@pytest.mark.parametrize("jitted", [False, True], ids=["unjitted", "jitted"])
@pytest.mark.parametrize(
    "lane",
    [
        lambda a: a.argmax(keepdim=True),
        lambda a: a.argmin(keepdim=True),
        lambda a: a.sin().argmax(keepdim=True),
        torchfunc_jax.grad(lambda a: (a * a.argmax(keepdim=True)).sum()),
    ],
)
def test_shapes_that_torch_funcs_vmap_gets_wrong(
    lane: Callable[[torch.Tensor], torch.Tensor], jitted: bool
) -> None:
    x = torch.linspace(-1, 1, 24).cos().view(2, 4, 3)
    mapped = torchfunc_jax.vmap(lane, 1)
    assert torch.equal(
        (jit(mapped) if jitted else mapped)(x), torch.stack([lane(each) for each in x.unbind(1)])
    )


def test_parameters_are_themselves_and_donated_arguments_are_not() -> None:
    module, x = torch.nn.Linear(3, 3), torch.arange(6.0).view(2, 3)
    assert jit(lambda: module.weight)() is module.weight
    transposed, _ = jit(lambda x: (module.weight.t(), module(x)))(x)
    transposed.sum().backward()
    assert transposed._base is module.weight and torch.equal(module.weight.grad, torch.ones(3, 3))
    given = x.clone()
    assert torch.equal(jit(lambda x: x.view(-1), donate=0)(given), x.view(-1))


@pytest.mark.parametrize("transform", [torchfunc_jax.vmap, jit, torchfunc_jax.functionalize])
@pytest.mark.parametrize(
    "view",
    [
        lambda z: z,
        torch.conj,
        torch.real,
        torch.imag,
        lambda z: z.view(-1),
        lambda z: z.conj().imag,
    ],
)
def test_values_of_views_of_a_conjugate(transform: Any, view: Any) -> None:
    z = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3).conj()
    expected = (
        torch.stack([view(lane) for lane in z]) if transform is torchfunc_jax.vmap else view(z)
    )
    torch.testing.assert_close(transform(view)(z), expected)


@pytest.mark.parametrize(
    "cut, programs",
    [
        (lambda data, k: (data[8 * k : 8 * k + 8], 0), 1),
        # 7 lanes run by a program for 8
        (lambda data, k: (data[:8, None].transpose(0, 1)[:, : 5 + k], 1), 3),
    ],
    ids=["batches of a data set", "numbers of lanes in another dimension"],
)
def test_programs_do_not_depend_on_places_in_memory(
    cut: Callable[..., Any], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "programs", type(process.programs)())
    data = torch.linspace(0, 1, 64 * 3).view(64, 3)
    call = lambda r: (r.sin() * 1.25).sum()
    for k in range(4):
        batch, dim = cut(data, k)
        torch.testing.assert_close(
            torchfunc_jax.vmap(call, dim)(batch), torch.func.vmap(call, dim)(batch)
        )
    assert len(process.programs.records) == programs


CONJUGATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argument": lambda z: z,
    "conj": torch.conj,
    "twice": lambda z: z.conj().conj(),
    "part": lambda z: z.conj()[:1],
    "real": lambda z: z.conj().real,
    "mH": lambda z: z[None].mH,
    "resolved": lambda z: z.conj().resolve_conj(),
    "computed": lambda z: z.conj() * 2,
    "abs": torch.abs,
}


@pytest.mark.parametrize("way", ["grad", "vjp", "jvp", "vmap", "jit", "jit of grad"])
@pytest.mark.parametrize("name", CONJUGATES)
def test_is_conj(name: str, way: str) -> None:
    z = torch.tensor([1 + 1j, 2 - 3j])

    def told(F: Any) -> list[bool]:
        found: list[bool] = []

        def f(z: torch.Tensor) -> torch.Tensor:
            found[:] = [CONJUGATES[name](z).is_conj(), torch.is_conj(CONJUGATES[name](z))]
            return z.abs().sum()

        jitted = jit if F is torchfunc_jax else lambda f: f
        calls = {
            "grad": lambda: F.grad(f)(z),
            "vjp": lambda: F.vjp(f, z),
            "jvp": lambda: F.jvp(f, (z,), (z,)),
            "jit": lambda: jitted(f)(z),
            "vmap": lambda: F.vmap(f)(torch.stack([z, z])),
            "jit of grad": lambda: jitted(F.grad(f))(z),
        }
        calls[way]()
        return found

    assert told(torchfunc_jax) == told(torch.func)


SHARED: dict[str, tuple[Any, Callable[[torch.Tensor], Any]]] = {
    "one tensor twice": (lambda T: T.vmap(_write_first), lambda x: (x, x)),
    "a list": (lambda T: T.vmap(lambda xs: _write_first(*xs)), lambda x: ([x, x],)),
    "overlapping views": (
        lambda T: T.vmap(_write_first, in_dims=1),
        lambda x: (x[:, 1:], x[:, :-1]),
    ),
    "a grad inside": (
        lambda T: T.vmap(lambda a, b: (a.add_(1), T.grad(lambda c: (c * a * b).sum())(b))[1]),
        lambda x: (x, x),
    ),
    "captured as well": (
        lambda T: lambda x: T.vmap(lambda a, b: a.add_(b) * x.sum())(x, x),
        lambda x: (x,),
    ),
}


def _write_first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a + b


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", SHARED)
def test_a_write_to_one_of_two_inputs_that_share_memory(case: str, compiled: bool) -> None:
    make, given = SHARED[case]
    found = []
    for T in (torchfunc_jax, torch.func):
        x = torch.arange(6.0).reshape(2, 3)
        fn = make(T)
        found.append(((jit(fn) if compiled and T is torchfunc_jax else fn)(*given(x)), x))
    (out, x), (expected, x_expected) = found
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x, x_expected)
