"""Sparse matrices, captured, passed and made inside a transform: the results are those of the same
program with dense matrices.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchfunc_jax

warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta")

_EDGES, _OTHER = (
    torch.tensor([[0, 3, 1, 4, 0, 2], [1, 0, 3, 2, 1, 2]]),
    torch.tensor([[0, 1], [3, 2]]),
)


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _matrix(layout: str, seed: int = 0, edges: torch.Tensor = _EDGES) -> torch.Tensor:
    """A sparse matrix [5, 4]; the first entry of the COO one occurs twice."""
    coo = torch.sparse_coo_tensor(edges, _numbers(edges.shape[1], seed=seed), (5, 4))
    return {
        "coo": lambda: coo,
        "coalesced": coo.coalesce,
        "csr": coo.to_sparse_csr,
        "csc": coo.to_sparse_csc,
    }[layout]()


def _as_torch_func(call: Callable[[Any], Any]) -> None:
    """A call that PyTorch runs, of a namespace of transforms, does what torch.func does: the same
    results, or an error of that class.
    """
    found = []
    for T in (torch.func, torchfunc_jax):
        try:
            found.append(call(T))
        except RuntimeError as error:
            found.append(type(error))
    assert isinstance(found[0], type) == isinstance(found[1], type), found
    if isinstance(found[0], type):
        assert found[1] is found[0]
    else:
        _agree(found[1], found[0])


_ADDED = _numbers(5, 3, seed=5)


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.layout is torch.strided else matrix.to_dense()


# of a matrix [5, 4] and x [4, 3]; each also runs with the dense matrix
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "operator": lambda a, x: a @ x,
    "matmul": lambda a, x: torch.matmul(a, x),
    "mm": lambda a, x: torch.mm(a, x).sin(),
    "method mm": lambda a, x: a.mm(x),
    "sparse.mm": lambda a, x: torch.sparse.mm(a, x) if a.layout is not torch.strided else a @ x,
    "spmm": lambda a, x: torch.spmm(a, x),
    "vector": lambda a, x: a @ x[:, 0],
    "mv": lambda a, x: torch.mv(a, x[:, 1]) * 2,
    "addmm": lambda a, x: torch.addmm(_ADDED, a, x, beta=0.5, alpha=2),
    "addmm that is added to nothing": lambda a, x: torch.addmm(_ADDED, a, x, beta=0),
    "sparse.addmm": lambda a, x: (
        torch.sparse.addmm if a.layout is not torch.strided else torch.addmm
    )(_ADDED, a, x),
    "on the right": lambda a, x: (x @ x.t() @ a.t()).cos(),
    "rmatmul": lambda a, x: x[:3].t()[:, [0, 1, 2, 0, 1]] @ a,
    "transposed": lambda a, x: a.t() @ (a @ x),
    "transpose": lambda a, x: a.transpose(0, 1) @ x[[0, 1, 2, 3, 0]],
    "linear": lambda a, x: nn.functional.linear(x.t(), a),
    "scaled": lambda a, x: (a * 2.0) @ x + (3 * a) @ x,
    "by names": lambda a, x: (
        nn.functional.linear(input=x.t(), weight=a, bias=None)
        + torch.addmm(input=_ADDED, mat1=a, mat2=x).t()
    ),
    "divided, negated": lambda a, x: (-a.clone() / 4.0) @ x * a.sum(),
    "property T": lambda a, x: a.T @ x[[0, 1, 2, 3, 0]] + a.transpose(-1, -2) @ x[[3, 2, 1, 0, 0]],
    "to_dense": lambda a, x: _dense(a) * x[:, 0] + a @ x[:, :1],
    "twice": lambda a, x: a @ (x * (a @ x).sum()),
    "shapes": lambda a, x: a @ x * a.shape[0] / a.size(1) + a.dim(),
}
WAYS: dict[str, Callable[[Any, Callable[..., torch.Tensor], torch.Tensor, torch.Tensor], Any]] = {
    "vmap": lambda T, f, a, x: T.vmap(f, (None, 0))(a, torch.stack([x, x.cos(), x + 1])),
    "grad": lambda T, f, a, x: T.grad(lambda a, x: f(a, x).pow(2).sum(), argnums=1)(a, x),
    "vjp": lambda T, f, a, x: T.vjp(lambda x: f(a, x), x)[1](f(_dense(a), x)),
    "jvp": lambda T, f, a, x: T.jvp(lambda x: f(a, x), (x,), (x.sin(),)),
    "jacrev": lambda T, f, a, x: T.jacrev(f, argnums=1)(a, x),
    "hessian": lambda T, f, a, x: T.hessian(lambda a, x: f(a, x).pow(3).sum(), argnums=1)(a, x),
    "vmap of grad": lambda T, f, a, x: T.vmap(T.grad(lambda x, a: f(a, x).pow(2).sum()), (0, None))(
        torch.stack([x, x + 1]), a
    ),
    "captured in a vmap of grad": lambda T, f, a, x: T.vmap(T.grad(lambda x: f(a, x).pow(2).sum()))(
        torch.stack([x, x + 1])
    ),
}


def _agree(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


_OTHERS = ("operator", "vector", "addmm", "on the right", "transposed", "scaled", "to_dense")


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("product", "layout"),
    [
        *((p, "coo") for p in PRODUCTS),
        *((p, each) for each in ("coalesced", "csr", "csc") for p in _OTHERS),
    ],
)
def test_products_in_every_transform(product: str, layout: str) -> None:
    """With matrices and numbers that change from call to call."""
    f = PRODUCTS[product]
    for run in WAYS.values():
        for seed in (0, 1):
            a, x = _matrix(layout, seed), _numbers(4, 3, seed=10 + seed)
            _agree(run(torchfunc_jax, f, a, x), run(torch.func, f, a.to_dense(), x))


@pytest.mark.thin(4)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_in_jitted_transforms(product: str) -> None:
    """The matrix is an argument of the jitted function, or captured; numbers change from call to
    call.
    """
    f, layout = PRODUCTS[product], "csr" if product in _OTHERS else "coo"
    for way in ("vmap", "grad"):
        run = WAYS[way]
        passed = torchfunc_jax.jit(lambda a, x, run=run: run(torchfunc_jax, f, a, x))
        a = _matrix(layout)
        captured = torchfunc_jax.jit(lambda x, a=a, run=run: run(torchfunc_jax, f, a, x))
        for seed in range(3):
            x = _numbers(4, 3, seed=10 + seed)
            expected = run(torch.func, f, a.to_dense(), x)
            _agree(passed(a, x), expected)
            _agree(captured(x), expected)
        other = _matrix(layout, seed=3)
        _agree(passed(other, x), run(torch.func, f, other.to_dense(), x))


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_a_matrix_that_is_made_inside_of_values_that_are_differentiated(jitted: bool) -> None:
    def attention(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a = torch.sparse_coo_tensor(_EDGES, weights.tanh(), (5, 4))
        return (torch.sparse.mm(a, x) + a.coalesce() @ x + (2 * a.t()).t() @ x).pow(2).sum()

    def dense(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (
            (
                4
                * torch.zeros(5, 4, dtype=x.dtype).index_put(
                    _EDGES.unbind(), weights.tanh(), accumulate=True
                )
                @ x
            )
            .pow(2)
            .sum()
        )

    gradient = torchfunc_jax.grad(attention, argnums=(0, 1))
    gradients = torchfunc_jax.vmap(gradient, (0, None))
    if jitted:
        gradient, gradients = torchfunc_jax.jit(gradient), torchfunc_jax.jit(gradients)
    for seed in range(3):
        weights, x = _numbers(6, seed=seed), _numbers(4, 3, seed=seed + 5)
        _agree(gradient(weights, x), torch.func.grad(dense, argnums=(0, 1))(weights, x))
        many = torch.stack([weights, weights.cos()])
        if not jitted:  # PyTorch runs it: a matrix of mapped values
            _as_torch_func(
                lambda T, of=(many, x): T.vmap(T.grad(attention, argnums=(0, 1)), (0, None))(*of)
            )
            continue
        _agree(
            gradients(many, x),
            torch.func.vmap(torch.func.grad(dense, argnums=(0, 1)), (0, None))(many, x),
        )


class _Convolution(nn.Module):
    """A graph convolution whose adjacency matrix is a buffer."""

    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.linear = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adjacency @ torch.relu(self.linear(x))


def _loss(
    model: nn.Module,
    params: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    x: torch.Tensor,
) -> torch.Tensor:
    return torchfunc_jax.functional_call(model, (params, buffers), (x,)).pow(2).mean()


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_a_module_whose_buffer_is_sparse(jitted: bool, layout: str) -> None:
    """Buffers among the arguments, and in the module; a new matrix with other entries, other values
    in place, another shape.
    """
    torch.manual_seed(0)
    model, twin = _Convolution(_matrix(layout)), _Convolution(_matrix(layout))
    twin.load_state_dict(model.state_dict())
    of_module = torchfunc_jax.grad(
        lambda params, x: torchfunc_jax.functional_call(model, params, (x,)).pow(2).mean()
    )
    of_arguments = torchfunc_jax.grad(lambda params, buffers, x: _loss(model, params, buffers, x))
    if jitted:
        of_module, of_arguments = torchfunc_jax.jit(of_module), torchfunc_jax.jit(of_arguments)

    def check(x: torch.Tensor) -> None:
        twin.adjacency = model.adjacency.to_dense()
        params = {k: p.detach() for k, p in model.named_parameters()}
        expected = torch.func.grad(
            lambda p: torch.func.functional_call(twin, p, (x,)).pow(2).mean()
        )(params)
        _agree(of_module(params, x), expected)
        _agree(of_arguments(params, dict(model.named_buffers()), x), expected)

    x = _numbers(4, 3, seed=3)
    check(x)
    check(x * 2)
    model.adjacency.values().mul_(3.0) if layout == "csr" else model.adjacency._values().mul_(3.0)
    check(x)
    model.adjacency = _matrix(layout, seed=4)  # the same shapes
    check(x)
    model.adjacency = _matrix(layout, seed=4, edges=_OTHER)  # fewer entries
    check(x)
    edges = _EDGES.flip(1) + 1
    model.adjacency = (
        torch.sparse_coo_tensor(edges, _numbers(6, seed=6), (7, 5))
        if layout == "coo"
        else _matrix("csr", 7)
    )
    check(_numbers(model.adjacency.shape[1], 3, seed=8))
    model.adjacency = _matrix("coo", 9).to_dense()
    check(x)


def test_backward_goes_through_a_transform_with_a_sparse_matrix() -> None:
    """torch's autograd differentiates arguments, captured tensors, and values of which the function
    makes a sparse matrix.
    """
    a, scale, weights = (
        _matrix("coo"),
        _numbers(3, seed=2).requires_grad_(),
        _numbers(6).requires_grad_(),
    )
    xs = torch.stack([_numbers(4, 3), _numbers(4, 3, seed=1)]).requires_grad_()

    def captured(x: torch.Tensor) -> torch.Tensor:
        return a @ (x * scale)

    def made(x: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(_EDGES, weights, (5, 4)) @ x

    def dense(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.zeros(5, 4, dtype=x.dtype).index_put(_EDGES.unbind(), weights, accumulate=True)
            @ x
        )

    def gradients(
        mapped: Callable[..., torch.Tensor], of: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(mapped(xs).pow(2).sum(), of)

    expected = gradients(torch.func.vmap(lambda x: a.to_dense() @ (x * scale)), (xs, scale))
    for wrap in (lambda g: g, torchfunc_jax.jit):
        _agree(gradients(wrap(torchfunc_jax.vmap(captured)), (xs, scale)), expected)
    both = gradients(
        torch.func.vmap(lambda x: a.to_dense() @ (x * scale) + dense(x)), (xs, scale, weights)
    )
    f = torchfunc_jax.vmap(lambda x: captured(x) + made(x))
    _agree(gradients(torchfunc_jax.jit(f), (xs, scale, weights)), both)
    # PyTorch runs what makes a matrix, and what captures such a one
    _as_torch_func(lambda T: gradients(T.vmap(made), (xs, weights)))
    outside = torch.sparse_coo_tensor(_EDGES, weights, (5, 4))
    _as_torch_func(lambda T: T.grad(lambda x: (outside @ x).sum())(_numbers(4, 3)))
    with pytest.raises((TypeError, NotImplementedError), match="requires grad; detach it"):
        torchfunc_jax.jit(torchfunc_jax.grad(lambda x: (outside @ x).sum()))(_numbers(4, 3))
    with torch.no_grad():
        _agree(
            torchfunc_jax.vmap(lambda x: outside @ x)(xs), outside.to_dense().detach() @ xs.detach()
        )


def test_products_of_batches() -> None:
    three = torch.stack([_matrix("coo"), _matrix("coo", 1)]).coalesce()
    for T, a in ((torchfunc_jax, three), (torch.func, three.to_dense())):
        found = T.vmap(T.grad(lambda x, a=a: torch.bmm(a, torch.stack([x, x.sin()])).pow(2).sum()))(
            _numbers(3, 4, 3)
        )
        if T is torchfunc_jax:
            ours = found
    _agree(ours, found)


@pytest.mark.parametrize("jitted", [False, True], ids=["un-jitted", "jitted"])
def test_a_matrix_that_is_no_longer_coalesced(jitted: bool) -> None:
    """It has as many entries as the first one; PyTorch gives its values to no one before it is
    coalesced.
    """
    matrices, x = [_matrix("coalesced")], _numbers(5)
    f = torchfunc_jax.vmap(lambda s: s * matrices[0].values().sum())
    f = torchfunc_jax.jit(f) if jitted else f
    _agree(f(x), x * matrices[0].values().sum())
    matrices[0] = torch.sparse_coo_tensor(_EDGES[:, :5], _numbers(5, seed=2), (5, 4))
    with pytest.raises(RuntimeError, match="coalesce"):
        f(x)
    matrices[0] = matrices[0].coalesce()
    _agree(f(x), x * matrices[0].values().sum())


def test_what_python_asks_of_a_sparse_tensor() -> None:
    a = _matrix("coalesced")

    def f(x: torch.Tensor) -> torch.Tensor:
        assert a.is_sparse and a.layout is torch.sparse_coo and a.is_coalesced()
        rows, columns = a.indices()
        return (
            torch.zeros(5, dtype=x.dtype).index_add(0, rows, a.values() * x[columns, 0]) * a._nnz()
        )

    x = _numbers(4, 3)
    expected = torch.func.grad(lambda x: ((a.to_dense() @ x[:, 0]) * a._nnz()).pow(2).sum())(x)
    for T in (lambda g: g, torchfunc_jax.jit):
        _agree(T(torchfunc_jax.grad(lambda x: f(x).pow(2).sum()))(x), expected)


#: Functions of a sparse matrix and x that go wrong: the class of the error under jit, and words of
#: it.
WRONG: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Any, str]] = {
    "shapes": (lambda a, x: a @ x.t(), RuntimeError, "cannot be multiplied"),
    "a short vector": (lambda a, x: a @ x[:3, 0], RuntimeError, "cannot be multiplied"),
    "on the right": (lambda a, x: x @ a, RuntimeError, "cannot be multiplied"),
    "dtypes": (lambda a, x: a @ x.float(), RuntimeError, "same dtype"),
    # NotImplementedError, a RuntimeError, or PyTorch's own
    "exp": (lambda a, x: torch.exp(a) + x[0, 0], RuntimeError, "exp|Sparse"),
    "times a tensor": (lambda a, x: a * x[:, 0], NotImplementedError, "to_dense"),
    "in place": (
        lambda a, x: a.mul_(2.0) @ x,
        (NotImplementedError, RuntimeError),
        "sparse|Sparse",
    ),
}


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_operands_are_refused(name: str, layout: str) -> None:
    """The errors say what came; nothing is computed of entries that are not there."""
    f, kind, words = WRONG[name]
    a, xs = _matrix(layout), torch.stack([_numbers(4, 3)] * 2)
    before = a.to_dense()
    with pytest.raises(kind, match=words):
        torchfunc_jax.jit(torchfunc_jax.vmap(lambda x: f(a, x).sum()))(xs)
    assert torch.equal(a.to_dense(), before)
    _agree(
        torchfunc_jax.grad(lambda x: (a @ x).sum())(_numbers(4, 3)),
        before.sum(0)[:, None].expand(4, 3),
    )


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_operands_without_jit(name: str, layout: str) -> None:
    """What torch.func computes, or an error of the class that it raises; a matrix that is changed
    is changed once.
    """
    f = WRONG[name][0]
    matrices: dict[Any, torch.Tensor] = {}

    def call(T: Any) -> torch.Tensor:
        a = matrices[T] = _matrix(layout)
        return T.vmap(lambda x: f(a, x).sum())(torch.stack([_numbers(4, 3)] * 2))

    _as_torch_func(call)
    assert torch.equal(matrices[torchfunc_jax].to_dense(), matrices[torch.func].to_dense())
    a = _matrix(layout)
    _agree(
        torchfunc_jax.grad(lambda x: (a @ x).sum())(_numbers(4, 3)),
        a.to_dense().sum(0)[:, None].expand(4, 3),
    )


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_matrix_is_not_differentiated(layout: str) -> None:
    with pytest.raises(TypeError, match="among what grad"):
        torchfunc_jax.grad(lambda a, x: (a @ x).sum())(_matrix(layout), _numbers(4, 3))


def test_threads_use_matrices_of_their_own() -> None:
    model = _Convolution(_matrix("coo")).double()
    found: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        a, x = _matrix("coo", k), _numbers(4, 3, seed=k)
        for _ in range(3):
            found[k] = torchfunc_jax.jit(torchfunc_jax.grad(lambda x: (a @ x).pow(2).sum()))(x)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for k in range(4):
        a, x = _matrix("coo", k).to_dense(), _numbers(4, 3, seed=k)
        _agree(found[k], torch.func.grad(lambda x, a=a: (a @ x).pow(2).sum())(x))
    del model


def test_a_matrix_is_not_kept_alive() -> None:
    import gc
    import weakref

    a = _matrix("coo")
    torchfunc_jax.jit(torchfunc_jax.vmap(lambda a, x: a @ x, (None, 0)))(a, _numbers(2, 4, 3))
    torchfunc_jax.vmap(lambda a, x: a @ x, (None, 0))(a, _numbers(2, 4, 3))
    watched = weakref.ref(a)
    del a
    gc.collect()
    assert watched() is None
