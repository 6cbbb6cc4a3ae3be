"""Where a computed tensor lies in memory: what as_strided reads, which counts there, is what
PyTorch reads, or an error.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings

import jax
import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchfunc_jax
from bridge import to_jax
from bridge.operators.operands import _CONTIGUOUS
from torchfunc_jax import jit

X = torch.arange(12.0).reshape(3, 4).cos()
MANY = torch.arange(24.0).reshape(2, 3, 4).cos()
STRIDES = (5,), (1,)


def image(x):
    return x.reshape(1, 3, 2, 2)


def last(x):
    return image(x).contiguous(memory_format=torch.channels_last)


ORDERS = {
    "elementwise": lambda x: x.mT.exp().as_strided(*STRIDES),
    "two operands": lambda x: (x.mT * x.mT.sin()).as_strided(*STRIDES),
    "and a scalar": lambda x: (x.mT * torch.tensor(2.0)).as_strided(*STRIDES),
    "where": lambda x: torch.where(x.mT > 0, x.mT, 0).as_strided(*STRIDES),
    "clone": lambda x: x.mT.clone().as_strided(*STRIDES),
    "contiguous": lambda x: x.mT.exp().contiguous().as_strided(*STRIDES),
    "contiguous clone": lambda x: (
        x.mT.exp().clone(memory_format=torch.contiguous_format).as_strided(*STRIDES)
    ),
    "dtype": lambda x: x.mT.double().as_strided(*STRIDES),
    "like": lambda x: torch.zeros_like(x.mT).copy_(x.mT).as_strided(*STRIDES),
    "empty_strided": lambda x: (
        torch.empty_strided((4, 3), (1, 4), dtype=x.dtype).copy_(x.mT).as_strided(*STRIDES)
    ),
    "new_empty_strided": lambda x: (
        x.new_empty_strided((4, 3), (1, 4)).copy_(x.mT).as_strided(*STRIDES)
    ),
    "channels last": lambda x: last(x).as_strided(*STRIDES),
    "of channels last": lambda x: last(x).relu().as_strided(*STRIDES),
    "like channels last": lambda x: (
        torch.empty_like(image(x), memory_format=torch.channels_last)
        .copy_(image(x))
        .as_strided(*STRIDES)
    ),
    "in place": lambda x: x.mT.clone().add_(1).as_strided(*STRIDES),
    "a write": lambda x: (lambda y: (y.as_strided(*STRIDES).mul_(2), y)[1])(x.mT.sin()),
    "a view": lambda x: x.mT.exp()[:, 1:].as_strided((3,), (1,)),
    "a transposed result": lambda x: x.exp().mT.as_strided(*STRIDES),
    "beside it": lambda x: (lambda y: y.as_strided(*STRIDES) + y.sum())(x.mT.exp()),
    "as_strided_copy": lambda x: torch.as_strided_copy(x.mT.exp(), *STRIDES),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x.mT.exp(), x.new_zeros(5), *STRIDES),
    "a product": lambda x: (x.mT @ x).as_strided(*STRIDES),
    "softmax": lambda x: x.mT.softmax(0).as_strided(*STRIDES),
    "flip": lambda x: x.mT.flip(0).as_strided(*STRIDES),
    "sum": lambda x: x.mT.sum(0).as_strided((2,), (2,)),
    "padded": lambda x: F.pad(x.mT, (1, 1), mode="reflect").as_strided(*STRIDES),
    "of an expanded index": lambda x: (
        x.exp().scatter_add(0, torch.tensor([2, 0, 1, 0]).expand(3, 4), x).as_strided(*STRIDES)
    ),
    "index_add": lambda x: x.mT.index_add(0, torch.tensor([1, 0]), x.mT[:2]).as_strided(*STRIDES),
}
#: torch.func's vmap refuses them, and PyTorch runs as_strided where the order in memory is not that
#: of a record.
NOT_MAPPED = {"empty_strided", "channels last", "of channels last", "like channels last"}
#: PyTorch's order in memory is not known here: PyTorch runs these, jit calls the function itself,
#: and a trace of JAX's own refuses them.
UNKNOWN = {
    "sort": lambda x: x.mT.sort(0)[0].as_strided(*STRIDES),
    "svd": lambda x: torch.linalg.svd(x)[2].abs().as_strided(*STRIDES),
    "qr": lambda x: torch.linalg.qr(x)[0].exp().as_strided(*STRIDES),
    "inverse": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3)).as_strided(*STRIDES),
    "convolution": lambda x: F.conv2d(last(x), torch.ones(4, 3, 1, 1)).as_strided(*STRIDES),
    "different orders": lambda x: (x.mT + x.exp().reshape(4, 3)).as_strided(*STRIDES),
    "of an inner grad": lambda x: torchfunc_jax.grad(lambda a: a.as_strided(*STRIDES).exp().sum())(
        x.mT.sort(0)[0]
    ),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ORDERS)
def test_as_strided_of_a_computed_tensor(name):
    f = ORDERS[name]

    def weighted(x):
        out = f(x)
        return (out * torch.arange(out.numel()).reshape(out.shape)).sum()

    for found in (torchfunc_jax.functionalize(f)(X.clone()), jit(f)(X.clone())):
        torch.testing.assert_close(found, f(X.clone()))
    each = torch.stack([f(x.clone()) for x in MANY])
    if name in NOT_MAPPED:
        with pytest.raises(RuntimeError) as expected:
            torch.func.vmap(f)(MANY)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            torchfunc_jax.vmap(f)(MANY)
    else:
        torch.testing.assert_close(torchfunc_jax.vmap(f)(MANY), each)
    torch.testing.assert_close(jit(torchfunc_jax.vmap(f))(MANY), each)
    # PyTorch has no gradient of as_strided_scatter here
    x, step = X.double(), 1e-6 * torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
    slope = torch.stack([(weighted(x + h) - weighted(x - h)) / 2e-6 for h in step])
    torch.testing.assert_close(
        torchfunc_jax.grad(weighted)(x), slope.reshape(3, 4), rtol=1e-6, atol=1e-6
    )


#: What plain PyTorch refuses of a tensor [3, 4].
REFUSED = {
    "clone": lambda x: x.clone(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(memory_format=torch.channels_last),
    "of three dimensions": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "to": lambda x: x.to(memory_format=torch.channels_last),
    "to another dtype": lambda x: x.to(torch.float64, memory_format=torch.channels_last),
    "like": lambda x: x + torch.zeros_like(x, memory_format=torch.channels_last),
    "empty": lambda x: x + torch.empty(3, 4, memory_format=torch.channels_last).zero_(),
    "empty that preserves": lambda x: (
        x + torch.empty((3, 4), memory_format=torch.preserve_format).zero_()
    ),
    "too few strides": lambda x: x + x.new_empty_strided([3, 4], [1]).zero_(),
    "a negative stride": lambda x: x + x.new_empty_strided([3, 4], [-1, 1]).zero_(),
    "too many strides": lambda x: x + torch.empty_strided([3, 4], [1, 1, 1]).zero_(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strides_and_memory_formats_that_pytorch_refuses(name):
    f = REFUSED[name]
    with pytest.raises(RuntimeError) as theirs:
        f(X)
    by_lane = torchfunc_jax.vmap(f)
    for call in (
        jit(f),
        torchfunc_jax.grad(lambda x: f(x).sum()),
        lambda x: by_lane(x[None]),
        lambda x: jit(by_lane)(x[None]),
    ):
        with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
            call(X)


@pytest.mark.parametrize("name", UNKNOWN)
def test_as_strided_where_the_order_is_unknown(name):
    f = UNKNOWN[name]
    with pytest.raises(
        RuntimeError,
        match=(
            r"as_strided: it is not known how .*call "
            r"\.clone\(memory_format=torch\.contiguous_format\)"
        ),
    ):
        jax.jit(torchfunc_jax.functionalize(f))(to_jax(X))
    torch.testing.assert_close(torchfunc_jax.functionalize(f)(X), f(X))
    if "inner" not in name:
        torch.testing.assert_close(jit(f)(X), f(X))


class Orders(TorchDispatchMode):
    """Notes for each of PyTorch's operators whether its results were contiguous where an operand
    was not.
    """

    def __init__(self):
        super().__init__()
        self.found: dict[str, set[bool]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            func._schema.name in _CONTIGUOUS
            and not func._schema.is_mutable
            and not all(x.is_contiguous() for x in strided((args, kwargs)))
        ):
            self.found.setdefault(func._schema.name, set()).update(
                x.is_contiguous() for x in strided(out)
            )
        return out


def strided(tree):
    return [
        x
        for x in pytree.tree_leaves(tree)
        if isinstance(x, torch.Tensor) and x.layout is torch.strided
    ]


def moved(x, last):
    """The same tensor in another order of memory; an index is one row, expanded."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.dim() < 2:
        return x
    if x.dtype == torch.long and x.shape[0] > 1:
        return x[:1].expand(x.shape)
    if last and x.dim() == 4:
        return x.detach().contiguous(memory_format=torch.channels_last)
    return x.detach().mT.contiguous().mT


@pytest.mark.slow
def test_operators_with_contiguous_results_in_pytorch():
    orders = Orders()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for op in op_db:
            if torch.float32 not in op.dtypes:
                continue
            for sample, last in itertools.product(
                itertools.islice(op.sample_inputs("cpu", torch.float32), 6), (False, True)
            ):
                args, kwargs = pytree.tree_map(
                    lambda x, last=last: moved(x, last), (sample.args, sample.kwargs)
                )
                first = pytree.tree_map(lambda x, last=last: moved(x, last), sample.input)
                # of a sample that this order makes invalid
                with contextlib.suppress(Exception), orders:
                    op(first, *args, **kwargs)
    assert [name for name, found in orders.found.items() if False in found] == []
    assert len(orders.found) > 60
