"""One tensor across the border and back: every dtype and memory layout, what is shared and what is
copied, and for how long.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import functorch.experimental
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from agreement import same
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchfunc_jax
from bridge import to_jax, to_torch
from bridge.convert import dtypes
from torchfunc_jax import (
    chunk_vmap,
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jit,
    jvp,
    linearize,
    vjp,
    vmap,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, torch.complex64, torch.complex128, *FLOAT8]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (
        (torch.randn(shape, dtype=torch.float64) * 3)
        .abs()
        .to(torch.complex128 if dtype.is_complex else torch.float64)
        .to(dtype)
    )


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(4, 3).T,
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "sliced": lambda: torch.randn(7, 9)[1::2, 2:8:3],
    "offset": lambda: torch.randn(20)[3:15].view(3, 4),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "expanded 0-dim": lambda: torch.tensor(2.0).expand(3),
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
    "empty inside": lambda: torch.empty(3, 0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conj bit": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg bit": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "real view": lambda: torch.randn(3, dtype=torch.complex64).real,
    "as_strided overlap": lambda: torch.randn(6).as_strided((4, 3), (1, 1)),
    "requires grad": lambda: torch.randn(3, requires_grad=True),
    "non-leaf": lambda: torch.randn(3, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "inference": lambda: _inference(),
    "unaligned": lambda: torch.randn(33)[1:],
}


def as_torch_func(call: Callable[[Any], Any]) -> None:
    """A call, which gets a namespace of transforms, does what torch.func does: the same results, or
    an error of the same class.
    """

    def outcome(T: Any) -> Any:
        try:
            found = call(T)
        except Exception as error:
            return type(error)
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: list(t.unbind()) if t.is_nested else t, found
        )

    mine, theirs = outcome(torchfunc_jax), outcome(torch.func)
    assert mine is theirs or (not isinstance(mine, type) and not isinstance(theirs, type)), (
        f"{mine}, and torch.func: {theirs}"
    )
    same(mine, theirs)


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3)


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (130, 7)], ids=str)
def test_every_dtype_round_trips(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    t = sample(dtype, *shape)
    array = to_jax(t)
    assert array.dtype == dtypes.to_jax(dtype) and array.shape == shape
    back = to_torch(array)
    assert back.dtype == dtype and back.shape == t.shape
    exact = lambda a: a.to(torch.float32) if dtype in FLOAT8 else a
    assert torch.equal(exact(back), exact(t))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in FLOAT8], ids=str)
def test_every_dtype_through_vmap_and_jit(dtype: torch.dtype) -> None:
    t = sample(dtype, 3, 4)
    for result in (vmap(lambda a: (a, a[:2]))(t), jit(vmap(lambda a: (a, a[:2])))(t)):
        same(result, (t, t[:, :2]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str) -> None:
    t = LAYOUTS[name]()
    plain = t.detach().clone().resolve_conj().resolve_neg()
    assert np.array_equal(np.asarray(to_jax(t)), plain.numpy())
    for result in (torchfunc_jax.functionalize(lambda a: a * 2)(t), jit(lambda a: a * 2)(t)):
        same(result, plain * 2, graph=False)
    for result in (
        vmap(lambda _, a: a + 1, in_dims=(0, None))(torch.ones(2), t),
        jit(lambda: t + 1)(),
    ):
        same(result if result.shape == plain.shape else result[0], plain + 1, graph=False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_and_flags_inside_are_those_outside(name: str) -> None:
    t = LAYOUTS[name]()
    seen = {}

    def look(a: torch.Tensor) -> torch.Tensor:
        seen.update(
            shape=a.shape,
            dtype=a.dtype,
            device=a.device,
            dim=a.dim(),
            numel=a.numel(),
            complex=a.is_complex(),
        )
        return a.clone()

    torchfunc_jax.functionalize(look)(t)
    assert seen == {
        "shape": t.shape,
        "dtype": t.dtype,
        "device": t.device,
        "dim": t.dim(),
        "numel": t.numel(),
        "complex": t.is_complex(),
    }


@given(st.lists(st.integers(0, 4), max_size=4), st.randoms())
def test_any_view_of_any_shape(shape: list[int], random: Any) -> None:
    t = torch.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    for _ in range(3):
        if t.dim() < 1:
            break
        d = random.randrange(t.dim())
        kind = random.choice(["transpose", "slice", "flip", "select", "unsqueeze"])
        if kind == "transpose":
            t = t.transpose(d, random.randrange(t.dim()))
        elif kind == "slice":
            t = t[(slice(None),) * d + (slice(random.randrange(3), None, random.randrange(1, 3)),)]
        elif kind == "flip":
            t = t.flip(d)
        elif kind == "select" and t.shape[d]:
            t = t.select(d, random.randrange(t.shape[d]))
        else:
            t = t.unsqueeze(d)
    assert np.array_equal(np.asarray(to_jax(t)), t.numpy())
    assert torch.equal(to_torch(to_jax(t)), t)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "dequantize"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.ones(3, dtype=torch.complex32), "complex32"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "to_padded_tensor",
        ),
    ],
    ids=["sparse", "csr", "quantized", "meta", "complex32", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_cross_says_what_to_do(make: Callable[[], torch.Tensor], says: str) -> None:
    t = make()
    with pytest.raises(TypeError, match=says):
        to_jax(t)
    call = lambda T: T.vmap(lambda _, a: a, in_dims=(0, None))(torch.ones(2), t)
    if t.is_quantized or t.is_nested or t.is_meta:  # PyTorch runs it
        as_torch_func(call)
    else:
        with pytest.raises(TypeError, match=says):
            call(torchfunc_jax)
    with pytest.raises(TypeError, match=says):
        jit(lambda a: a)(t)
    same(jit(torch.sin)(torch.ones(2)), torch.ones(2).sin())


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4], ids=str)
def test_what_torch_lacks_says_so(dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype"):
        to_torch(jnp.ones(3, dtype))


#: Calls with a namespace of transforms and a nested tensor, which PyTorch runs.
NESTED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda T, t: T.vmap(torch.sin)(t),
    "vmap in chunks": lambda T, t: T.vmap(lambda d: d["a"].sin(), chunk_size=1)({"a": t}),
    "grad": lambda T, t: T.grad(torch.sum)(t),
    "vjp": lambda T, t: T.vjp(torch.sin, t)[0],
    "cotangent": lambda T, t: T.vjp(torch.sin, torch.ones(2))[1](t),
    "jvp": lambda T, t: T.jvp(torch.sin, (t,), (t,)),
    "tangent": lambda T, t: T.jvp(torch.sin, (torch.ones(2),), (t,)),
    "tangent of linearize": lambda T, t: T.linearize(torch.sin, torch.ones(2))[1](t),
    "jacrev": lambda T, t: T.jacrev(torch.sin)(t),
    "jacfwd": lambda T, t: T.jacfwd(torch.sin)(t),
    "hessian": lambda T, t: T.hessian(torch.sum)(t),
    "captured by vmap": lambda T, t: T.vmap(lambda x: x * t[0].sum())(torch.ones(2)),
    "captured by grad": lambda T, t: T.grad(lambda x: (x * t.sum()).sum())(torch.ones(2)),
    "chunk_vmap": lambda T, t: (
        chunk_vmap if T is torchfunc_jax else functorch.experimental.chunk_vmap
    )(torch.sin)(t),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_for_pytorch_alone(name: str, layout: torch.layout) -> None:
    t, x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout), torch.ones(2)
    as_torch_func(lambda T: NESTED[name](T, t))
    refused = r"got a nested one; convert it with \.to_padded_tensor"
    if layout is torch.strided:
        with pytest.raises(TypeError, match=refused):
            jit(lambda: NESTED[name](torchfunc_jax, t))()
    with pytest.raises(TypeError, match=refused):
        jit(lambda x: x * t.sin().sum())(x)


# -- memory ----------------------------------------------------------------------------------------
def test_large_tensors_share_memory_both_ways() -> None:
    t = torch.randn(1024, 64)
    array = to_jax(t, copy=False)
    assert array.unsafe_buffer_pointer() == t.data_ptr()
    assert to_jax(t, copy=False) is array, "the crossing is remembered"
    back = to_torch(jnp.arange(4096.0))
    assert back[7] == 7


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "setitem": lambda t: t.__setitem__((0, 0), 5.0),
    ".data write": lambda t: t.data.mul_(2),
    ".data rebind": lambda t: setattr(t, "data", torch.full_like(t, 3.0)),
    "view write": lambda t: t.view(-1)[1:3].zero_(),
    "detached write": lambda t: t.detach().add_(1),
    "numpy write": lambda t: t.detach().numpy().__setitem__((0, 0), 9.0),
    "set_": lambda t: t.set_(torch.full((4, 64), 2.0)),
    "set_ another shape": lambda t: t.set_(torch.full((2, 64), 2.0)),
    "resize_": lambda t: t.resize_(2, 64),
    "t_": lambda t: t.t_(),
    "squeeze shape": lambda t: t.unsqueeze_(0),
    "copy_": lambda t: t.copy_(torch.randn(4, 64)),
    "as_strided_": lambda t: t.as_strided_((3, 5), (5, 1), 2),
    "optimizer": lambda t: torch.optim.SGD([_with_grad(t)], lr=0.1).step(),
}


def _with_grad(t: torch.Tensor) -> torch.Tensor:
    t.grad = torch.ones_like(t)
    return t


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("call", ["argument", "captured", "to_jax"])
def test_a_change_in_place_is_seen_by_the_next_call(name: str, call: str) -> None:
    t = torch.randn(4, 64)
    lane = torch.ones(2)
    calls = {
        "argument": lambda: torchfunc_jax.functionalize(lambda a: a * 1)(t),
        "captured": lambda: vmap(lambda a: t * a)(lane)[0],
        "to_jax": lambda: to_torch(to_jax(t)).clone(),
    }
    for _ in range(3):  # the third time everything that is remembered is
        same(calls[call](), t.clone())
    CHANGES[name](t)
    expected = t.detach().clone()
    for _ in range(2):
        same(calls[call](), expected)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen_by_a_compiled_function(name: str) -> None:
    t = torch.randn(4, 64)
    fn = jit(lambda a: a * 1)
    for _ in range(3):
        same(fn(t), t.clone())
    CHANGES[name](t)
    for _ in range(2):
        same(fn(t), t.detach().clone())


def test_a_copy_shares_no_memory_with_arguments_captures_or_other_results() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    functions = [
        lambda a: a.clone(),
        lambda a: (a.clone(), a + 0),
        lambda a: a.view(-1).clone(),
        lambda a: {"a": a[:] * 1, "w": w.clone(), "t": a.detach().to(a.dtype, copy=True)},
        lambda a: (w.clone(), w.clone()),
        lambda a: (lambda b: (b, b.clone()))(a + 1),
    ]
    wrappers = [
        torchfunc_jax.functionalize,
        jit,
        vmap,
        lambda f: jit(vmap(f)),
        lambda f: lambda a: jvp(f, (a,), (a,))[0],
        lambda f: lambda a: vjp(f, a)[0],
    ]
    for f in functions:
        for wrap in wrappers:
            before = x.clone(), w.clone()
            leaves, _ = torch.utils._pytree.tree_flatten(wrap(f)(x))
            addresses = [t.untyped_storage().data_ptr() for t in (x, w, *leaves)]
            assert len(set(addresses)) == len(addresses)
            for t in leaves:
                t.zero_()
            assert torch.equal(x, before[0]) and torch.equal(w, before[1])


def test_writing_to_a_result_does_not_change_the_next_one() -> None:
    x = torch.randn(64, 64)
    for fn in (
        vmap(torch.sin),
        jit(torch.sin),
        grad(lambda a: a.sin().sum()),
        lambda a: vjp(torch.sin, a)[0],
    ):
        first = fn(x)
        expected = first.clone()
        first.zero_()
        same(fn(x), expected)


def test_writing_to_a_tensor_after_the_call_changes_no_pullback() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    out, pull = vjp(lambda a: (a * a * w, (a * a * w).sin()), x)
    value, push = linearize(lambda a: (a * a * w, (a * a * w).sin()), x)
    ones = torch.ones(64, 64)
    expected = torch.func.vjp(lambda a: (a * a * w, (a * a * w).sin()), x.clone())[1]((ones, ones))
    pushed = torch.func.jvp(lambda a: (a * a * w, (a * a * w).sin()), (x.clone(),), (ones,))[1]
    for t in (x, w, *out, *value):
        t.zero_()
    same(pull((ones, ones)), expected)
    same(push(ones), pushed)


@pytest.mark.parametrize("name", ["argument", "captured", "requires grad"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_after_writing_to_what_it_needs_raises_or_is_right(
    name: str, compiled: bool, create_graph: bool
) -> None:
    x, c, w = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    fn = vmap(lambda a: a * (c * w).sin())
    out = (jit(fn) if compiled else fn)(x)
    (expected,) = torch.autograd.grad(torch.func.vmap(lambda a: a * (c * w).sin())(x).sum(), w)
    with torch.no_grad():
        {"argument": x, "captured": c, "requires grad": w}[name].add_(1)
    try:
        (found,) = torch.autograd.grad(out.sum(), w, create_graph=create_graph)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert name != "requires grad"
        same(found, expected)


# -- how long things live --------------------------------------------------------------------------
def test_no_tensor_is_kept_alive() -> None:
    def run() -> list[weakref.ref[Any]]:
        x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
        fn = lambda a: (a @ w).sin()
        fn_jit = jit(fn)
        results = [
            vmap(fn)(x),
            jacrev(lambda a: fn(a).sum())(x),
            fn_jit(x),
            vjp(fn, x)[0],
            to_jax(x),
        ]
        results[0].sum().backward()
        fn_jit(x).sum().backward()
        return [weakref.ref(t) for t in (x, w, *results)]

    refs = run()
    refs += run()
    gc.collect()
    assert not [r() for r in refs if r() is not None]


def test_no_module_is_kept_alive() -> None:
    def run() -> list[weakref.ref[Any]]:
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        x = torch.randn(8, 64)
        parameters = dict(model.named_parameters())
        jit(model)(x)
        vmap(lambda a: model[0](a))(x)
        grad(lambda p: functional_call(model, p, (x,)).sum())(parameters)
        return [weakref.ref(model), *map(weakref.ref, parameters.values())]

    refs = run()
    gc.collect()
    assert not [r() for r in refs if r() is not None]


def test_memory_of_a_result_outlives_the_array_it_came_from() -> None:
    t = vmap(lambda a: a * 2)(torch.ones(512, 64))
    gc.collect()
    vmap(lambda a: a * 3)(torch.ones(512, 64))
    assert bool((t == 2).all())


# -- jax.Arrays ------------------------------------------------------------------------------------
JAX_CALLS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda x: vmap(torch.sin)(x),
    "vmap out_dims": lambda x: vmap(lambda a: (a, a.sum()), in_dims=1, out_dims=(1, 0))(x),
    "vmap chunked": lambda x: vmap(torch.sin, chunk_size=1)(x),
    "grad": lambda x: grad(lambda a: (a**3).sum())(x),
    "grad_and_value": lambda x: grad_and_value(lambda a: (a**3).sum())(x),
    "vjp": lambda x: vjp(torch.exp, x)[1](x),
    "jvp": lambda x: jvp(torch.exp, (x,), (x,)),
    "linearize": lambda x: linearize(torch.exp, x)[1](x),
    "jacrev": lambda x: jacrev(torch.exp)(x),
    "jacfwd": lambda x: jacfwd(torch.exp)(x),
    "hessian": lambda x: hessian(lambda a: (a**3).sum())(x),
    "jit": lambda x: jit(torch.exp)(x),
    "jit tree": lambda x: jit(lambda d: {"o": d["a"] * 2})({"a": x}),
    "jit of grad": lambda x: jit(grad(lambda a: (a**3).sum()))(x),
}


def to_arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)]


@pytest.mark.parametrize("name", JAX_CALLS)
def test_jax_arrays_in_jax_arrays_out(name: str) -> None:
    x = torch.randn(2, 3)
    array = jnp.asarray(x.numpy())
    result = JAX_CALLS[name](array)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(result))
    expected = jax.tree_util.tree_leaves(
        jax.tree_util.tree_map(lambda t: t.numpy(), JAX_CALLS[name](x))
    )
    for mine, theirs in zip(to_arrays(result), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert mine.dtype == theirs.dtype


@pytest.mark.parametrize("name", [n for n in JAX_CALLS if not n.startswith("jit")])
def test_inside_the_users_own_jax_jit(name: str) -> None:
    array = jnp.asarray(torch.randn(2, 3).numpy())
    for mine, theirs in zip(
        to_arrays(jax.jit(JAX_CALLS[name])(array)), to_arrays(JAX_CALLS[name](array)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_module_inside_the_users_own_jax_transforms() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    params = {k: jnp.asarray(v.detach().numpy()) for k, v in model.named_parameters()}

    def loss(p: Any, a: Any) -> Any:
        return functional_call(model, p, (a,)).sum()

    model(x).sum().backward()
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        for a in (x, jnp.asarray(x.numpy())):
            found = transform(lambda p, a=a: loss(p, a))(params)
            for k, v in model.named_parameters():
                np.testing.assert_allclose(
                    np.asarray(found[k]), v.grad.numpy(), rtol=1e-5, atol=1e-6
                )
    per_sample = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, jnp.asarray(x.numpy()))
    expected = torch.func.vmap(
        torch.func.grad(lambda p, a: torch.func.functional_call(model, p, (a,)).sum()),
        in_dims=(None, 0),
    )({k: v.detach() for k, v in model.named_parameters()}, x)
    for k, v in expected.items():
        np.testing.assert_allclose(np.asarray(per_sample[k]), v.numpy(), rtol=1e-5, atol=1e-6)


def test_jax_keeps_its_own_dtypes_and_settings() -> None:
    seen = []

    def fn(a: Any) -> Any:
        out = grad(lambda t: (t**2).sum())(a)
        seen.append((jax.config.jax_enable_x64, jnp.ones(1).dtype))
        return out * 2

    result = jax.jit(fn)(jnp.ones(3))
    assert result.dtype == jnp.float32 and seen == [(False, jnp.float32)]


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_a_default_device(device: str) -> None:
    from bridge import devices

    x = torch.randn(3, 4)
    with devices.use(device):
        same(vmap(torch.sin)(x), x.sin())
        same(jit(torch.sin)(x), x.sin())
    assert devices.default() is None
    with pytest.raises(ValueError, match="device: no JAX device"):
        devices.set_default("abacus")


@pytest.mark.parametrize("transform", [torchfunc_jax.vmap, torchfunc_jax.jit])
def test_as_strided_of_a_captured_view_counts_in_its_whole_memory(transform: Any) -> None:
    part = torch.arange(20.0)[5:15]
    x = torch.ones(2, 2, 2)
    for view in (
        lambda: part.as_strided((2, 2), (1, 2)),
        lambda: part.as_strided((2, 2), (1, 2), 7),
        lambda: part[2:].as_strided((2, 2), (1, 2)),
        lambda: part.as_strided((2, 3), (3, 1), 7).as_strided((2, 2), (2, 1)),
        lambda: part.view(2, 5).t().as_strided((2, 2), (1, 2)),
    ):
        torch.testing.assert_close(transform(lambda x, view=view: x * view())(x), x * view())
    turned = part.view(2, 5).t()
    before, after = (
        (lambda: part.as_strided((2, 2), (1, 2), 0)),
        (lambda: part.as_strided((2, 2), (1, 2), 14)),
    )
    for outside in (before, after, lambda: turned.as_strided((2,), (1,))):
        # the function itself is called: what lies outside has not crossed
        if transform is torchfunc_jax.jit:
            torch.testing.assert_close(
                transform(lambda x, outside=outside: x * outside())(x), x * outside()
            )
            continue
        same(
            transform(lambda x, outside=outside: x * outside())(x),
            torch.func.vmap(lambda x, outside=outside: x * outside())(x),
        )
