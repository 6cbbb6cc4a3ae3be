"""Rewritten products (bridge/xla/products.py): outer products in the order of their result, and
weights before few rows.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import torchfunc_jax
from bridge.xla.products import equations, in_order, rearranged, rearranging


def names(jaxpr):
    return [e.primitive.name for e in jaxpr.eqns]


def both(function, *args):
    """The outputs of a function as it is and rewritten, and the rewritten program."""
    made = jax.make_jaxpr(function)(*args)
    written = in_order(made.jaxpr)
    before = jax.core.eval_jaxpr(made.jaxpr, made.consts, *args)
    after = jax.core.eval_jaxpr(written, made.consts, *args)
    assert [x.shape for x in before] == [x.shape for x in after]
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    return made.jaxpr, written


@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    left=st.lists(st.integers(1, 3), max_size=2),
    right=st.lists(st.integers(1, 3), max_size=2),
    data=st.data(),
    dtype=st.sampled_from(["float32", "bfloat16", "complex64", "int32"]),
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_any_batched_outer_product(batch, left, right, data, dtype):
    rng = np.random.default_rng(0)
    places = [data.draw(st.permutations(range(len(batch) + len(free)))) for free in (left, right)]
    # where the batch dimensions of each side lie
    dims = [tuple(p.index(i) for i in range(len(batch))) for p in places]
    sides = [
        jnp.asarray(rng.integers(-9, 9, [(*batch, *free)[k] for k in p]), dtype)
        for p, free in zip(places, (left, right), strict=True)
    ]
    n = len(batch) + len(left) + len(right)
    first, second = data.draw(st.permutations(range(n))), data.draw(st.permutations(range(n)))

    def function(a, b):
        product = lax.dot_general(a, b, (((), ()), (dims[0], dims[1])))
        return lax.transpose(lax.transpose(product, first), second)

    both(function, *sides)


A, B = jnp.arange(6.0).reshape(2, 3), jnp.arange(8.0).reshape(2, 4)
OUTER = (((), ()), ((0,), (0,)))
KEPT = {
    "a product in its own order": lambda a, b: lax.dot_general(a, b, OUTER),
    "turned and turned back": lambda a, b: lax.transpose(
        lax.transpose(lax.dot_general(a, b, OUTER), (0, 2, 1)), (0, 2, 1)
    ),
    "read by something else too": lambda a, b: (lambda p: (p.sum(), lax.transpose(p, (0, 2, 1))))(
        lax.dot_general(a, b, OUTER)
    ),
    "an output too": lambda a, b: (lambda p: (p, lax.transpose(p, (0, 2, 1))))(
        lax.dot_general(a, b, OUTER)
    ),
    "a sum of products": lambda a, b: lax.transpose(
        lax.dot_general(a, b, (((0,), (0,)), ((), ()))), (1, 0)
    ),
    "wider than its sides": lambda a, b: lax.transpose(
        lax.dot_general(
            a.astype("bfloat16"), b.astype("bfloat16"), OUTER, preferred_element_type="float32"
        ),
        (0, 2, 1),
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_stays_as_it_is(case):
    made, written = both(KEPT[case], A, B)
    assert names(written) == names(made)


def test_two_products_and_what_lies_between():
    def function(a, b):
        first = lax.dot_general(a, b, OUTER)
        second = lax.dot_general(jnp.sin(b), jnp.cos(a), OUTER)
        return lax.transpose(first, (2, 0, 1)), lax.transpose(second, (1, 2, 0)), jnp.tanh(a)

    _, written = both(function, A, B)
    assert "dot_general" not in names(written)


def test_jacobian_of_a_batch_has_no_copy():
    torch.manual_seed(0)
    m, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    p = dict(m.named_parameters())

    def jacobians(tf):
        return tf.vmap(tf.jacrev(lambda p, x: tf.functional_call(m, p, (x,)).tanh()), (None, 0))

    jitted = torchfunc_jax.jit(jacobians(torchfunc_jax))
    expected, found = jacobians(torch.func)(p, x), jitted(p, x)
    for k in expected:
        torch.testing.assert_close(found[k], expected[k])
    # and it can still be differentiated, as the product that it was
    loss = lambda tf: lambda p: sum((j**2).sum() for j in jacobians(tf)(p, x).values())
    for k, g in torch.func.grad(loss(torch.func))(p).items():
        torch.testing.assert_close(
            torchfunc_jax.jit(torchfunc_jax.grad(loss(torchfunc_jax)))(p)[k], g
        )


def every_name(jaxpr):
    """The names of all primitives, those of loops and calls too."""
    params = jax.tree.leaves(
        [list(e.params.values()) for e in jaxpr.eqns], is_leaf=lambda p: hasattr(p, "eqns")
    )
    inner = [p for p in params if hasattr(p, "eqns")]
    return names(jaxpr) + [name for p in inner for name in every_name(getattr(p, "jaxpr", p))]


@given(
    rows=st.lists(st.integers(1, 3), max_size=2),
    batch=st.lists(st.integers(1, 3), max_size=2),
    repeated=st.lists(st.integers(1, 3), max_size=2),
    data=st.data(),
    weight_last=st.booleans(),
    lies=st.sampled_from(["in its rows", "in its columns"]),
)
@settings(max_examples=40, deadline=None)
def test_any_product_of_a_weight_keeps_its_value(rows, batch, repeated, data, weight_last, lies):
    """w: [*batch, 128, 144], repeated for each matrix of x; x: [*batch, *repeated, *rows, 144] in
    any order of its dimensions.
    """
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(*batch, 128, 144)))
    w = w if lies == "in its rows" else jnp.swapaxes(w, -1, -2)
    whole = (*batch, *repeated, *rows, 144)
    # dimension k of x is dimension place[k] of the whole
    place = data.draw(st.permutations(range(len(whole))))
    x = jnp.asarray(rng.normal(size=[whole[k] for k in place]))
    nb, nr = len(batch), len(repeated)

    def product(x, w):
        wide = lax.broadcast_in_dim(
            w, (*batch, *repeated, *w.shape[-2:]), (*range(nb), nb + nr, nb + nr + 1)
        )
        wide = lax.transpose(wide, data_order)
        at = [data_order.index(d) for d in range(nb + nr)]
        contracted = data_order.index(nb + nr + (lies == "in its rows"))
        on_x = place.index(len(whole) - 1), [place.index(d) for d in range(nb + nr)]
        sides = [(x, *on_x), (wide, contracted, at)]
        (a, ca, ba), (b, cb, bb) = sides if weight_last else sides[::-1]
        return lax.dot_general(a, b, (((ca,), (cb,)), (tuple(ba), tuple(bb))))

    data_order = data.draw(st.permutations(range(nb + nr + 2)))
    made = jax.make_jaxpr(product)(x, w)
    expected = jax.core.eval_jaxpr(made.jaxpr, made.consts, x, w)[0]
    for cpu in (True, False):
        written = rearranged(made.jaxpr, cpu)
        (found,) = jax.core.eval_jaxpr(written, made.consts, x, w)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        first = cpu and lies == "in its rows" and 4 * np.prod([*rows, *repeated]) <= 144
        assert ("optimization_barrier" in names(written)) == first
        (dot,) = [e for e in written.eqns if e.primitive is lax.dot_general_p]
        if repeated:
            assert len(dot.params["dimension_numbers"][1][0]) == nb
        if not repeated and not first:
            assert written is made.jaxpr


X, W = jnp.ones((4, 256)), jnp.ones((512, 256))
LEFT_ALONE = {
    "many rows": lambda x, w: jnp.tile(x, (30, 1)) @ w.T,
    "a small weight": lambda x, w: x @ w[:8].T,
    "a weight whose columns are summed": lambda x, w: x @ w[:256],
    "whole numbers": lambda x, w: x.astype(int) @ w.T.astype(int),
    "two contracted dimensions": lambda x, w: jnp.einsum(
        "sab,lab->sl", x.reshape(4, 16, 16), w.reshape(512, 16, 16)
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_products_that_stay(case):
    made = jax.make_jaxpr(LEFT_ALONE[case])(X, W).jaxpr
    assert rearranged(made, True) is made


def test_products_inside_of_loops_branches_and_calls():
    def function(x, w):
        x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ w[:256].T), None), x, None, length=3)
        x = lax.cond(x[0].sum() > 0, lambda x: x @ w[:256].T, lambda x: x, x)
        return jax.jit(lambda x: x @ w.T)(x)

    x, w = (
        jnp.sin(jnp.arange(1024.0)).reshape(4, 256),
        jnp.cos(jnp.arange(512 * 256.0)).reshape(512, 256) / 16,
    )
    made = jax.make_jaxpr(function)(x, w)
    written = rearranged(made.jaxpr, True)
    assert every_name(written).count("optimization_barrier") == 3
    np.testing.assert_allclose(
        jax.core.eval_jaxpr(written, made.consts, x, w)[0], function(x, w), rtol=1e-4, atol=1e-5
    )
    for k, gradient in enumerate(jax.grad(lambda *a: function(*a).sum(), (0, 1))(x, w)):
        again = rearranging(jax.grad(lambda *a: function(*a).sum(), k), made.jaxpr)
        np.testing.assert_allclose(jax.jit(again)(x, w), gradient, rtol=1e-4, atol=1e-4)


ROWS, LANES = (
    jnp.sin(jnp.arange(1536.0)).reshape(96, 16),
    jnp.cos(jnp.arange(8 * 32 * 16.0)).reshape(8, 32, 16),
)
# of rows [96, 16] and lanes of weights [8, 32, 16]: the function, and how many transposes put the
# lanes before the rows
IN_LANES = {
    "a bias of each lane": (lambda x, w: jax.vmap(lambda w: jnp.tanh(x @ w.T + w.sum(1)))(w), 1),
    "lanes of lanes": (
        lambda x, w: jax.vmap(jax.vmap(lambda w: jnp.sin(x @ w.T + w.sum(1))))(
            w.reshape(2, 4, 32, 16)
        ),
        1,
    ),
    "two layers": (
        lambda x, w: jax.vmap(lambda w: jnp.tanh(jnp.tanh(x @ w.T + w.sum(1)) @ w))(w),
        1,
    ),
    "a bias of all lanes": (
        lambda x, w: jax.vmap(lambda w: jnp.tanh(x @ w.T + 1), out_axes=1)(w),
        0,
    ),
    "the weight first": (lambda x, w: jax.vmap(lambda w: jnp.tanh((w @ x.T).T + w.sum(1)))(w), 0),
    "rows of each lane": (
        lambda x, w: jax.vmap(lambda w, x: jnp.tanh(x @ w.T + w.sum(1)))(w, x.reshape(8, 12, 16)),
        0,
    ),
    "one weight": (
        lambda x, w: jax.vmap(lambda x: jnp.tanh(x @ w[0].T + x.sum()))(x.reshape(8, 12, 16)),
        0,
    ),
    "no lanes": (lambda x, w: jnp.tanh((x @ w.reshape(256, 16).T).T), 0),
    "a small product": (lambda x, w: jax.vmap(lambda w: jnp.tanh(x[:48] @ w.T + w.sum(1)))(w), 0),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", IN_LANES)
def test_lanes_that_lie_before_the_rows(case):
    function, count = IN_LANES[case]
    for f in (function, jax.grad(lambda x, w: (function(x, w) ** 2).sum(), (0, 1))):
        made = jax.make_jaxpr(f)(ROWS, LANES)
        written = rearranged(made.jaxpr, True)
        barriers = every_name(written).count("optimization_barrier")
        assert barriers == count if f is function else barriers >= count
        for found, expected in zip(
            jax.core.eval_jaxpr(written, made.consts, ROWS, LANES),
            jax.tree.leaves(f(ROWS, LANES)),
            strict=True,
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert (
            rearranged(made.jaxpr, False) is rearranged(made.jaxpr, True, final=False) is made.jaxpr
        )


def in_loops(jaxpr):
    """The primitives in the loops of a jaxpr, with the shapes of their results."""
    loops = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive is lax.scan_p]
    return [(e.primitive.name, e.outvars[0].aval.shape) for loop in loops for e in loop.eqns]


STEPS = {  # of a state [2, 3], a weight [3, 3], and an input [2, 3]: the new state
    "a product": lambda h, w, x: jnp.tanh(h @ w + x),
    "the transposed weight": lambda h, w, x: jnp.tanh(h @ w.T + x),
    "two products of one weight": lambda h, w, x: jnp.tanh((h + x) @ w) @ w,
    "an einsum": lambda h, w, x: jnp.tanh(jnp.einsum("bi,oi->bo", x, w) + h),
    "the weight itself": lambda h, w, x: jnp.tanh(h @ w + x) * w.sum(),
    "a product of the input with itself": lambda h, w, x: h + (x.T @ x)[:2] @ w,
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize("case", STEPS)
def test_sums_of_products_in_loops(case, vmapped, reverse):
    rng = np.random.default_rng(0)
    h, w, xs = (jnp.asarray(rng.normal(size=s) / 2) for s in ((1, 3), (3, 3), (5, 1, 3)))

    def loss(w, h, xs):
        last, every = lax.scan(
            lambda h, x: (h := STEPS[case](h, w, x), h.sum(0)), h, xs, reverse=reverse
        )
        return (last**2).sum() + jnp.cos(every).sum()

    if case == "a product of the input with itself":
        h, xs = jnp.concatenate([h, h]), jnp.concatenate([xs, xs], 1)
    gradient = jax.grad(loss, (0, 1, 2))
    if vmapped:
        gradient, w, h = (
            jax.vmap(gradient, (0, 0, None)),
            jnp.stack([w, w.T]),
            jnp.stack([h, 2 * h]),
        )
    made = jax.make_jaxpr(gradient)(w, h, xs)
    written = rearranged(made.jaxpr, True)
    expected = gradient(w, h, xs)
    for found, e in zip(jax.core.eval_jaxpr(written, made.consts, w, h, xs), expected, strict=True):
        np.testing.assert_allclose(found, e, rtol=1e-4, atol=1e-5)
    if case in ("a product", "the transposed weight", "an einsum"):
        assert ("dot_general", w.shape) in in_loops(made.jaxpr) and (
            "dot_general",
            w.shape,
        ) not in in_loops(written)


def test_a_sum_that_the_loop_reads_stays_in_it():
    def function(w, xs):
        return lax.scan(lambda total, x: (total + x.T @ x, total.sum()), w, xs)

    made = jax.make_jaxpr(function)(jnp.ones((3, 3)), jnp.ones((5, 1, 3))).jaxpr
    assert rearranged(made, True) is made


def test_a_step_of_a_loop_that_returns_or_reads_constants():
    def function(w, xs):
        return lax.scan(lambda total, x: (total + np.float32(1), x.T @ x), w, xs)

    made = jax.make_jaxpr(function)(jnp.ones(()), jnp.ones((5, 1, 3))).jaxpr
    assert rearranged(made, True) is made
    x = torch.rand(5, requires_grad=True)
    torchfunc_jax.jit(lambda x: torch.special.chebyshev_polynomial_t(x, 3))(x).sum().backward()
    torch.testing.assert_close(x.grad, 12 * x.detach() ** 2 - 3)


LAYERS = {
    "linear": lambda: torch.nn.Linear(128, 160),
    "lstm": lambda: torch.nn.LSTM(128, 128, batch_first=True),
    "attention": lambda: torch.nn.TransformerEncoderLayer(
        128, 4, 256, dropout=0.0, batch_first=True
    ),
}
WAYS = {  # functions of a loss of parameters and of one sequence, the parameters, and sequences
    "jit": lambda loss, p, x: torchfunc_jax.jit(lambda p, x: torch.stack([loss(p, t) for t in x]))(
        p, x
    ),
    "un-jitted": lambda loss, p, x: torchfunc_jax.vmap(lambda t: loss(p, t))(x),
    "jit(vmap)": lambda loss, p, x: torchfunc_jax.jit(torchfunc_jax.vmap(loss, (None, 0)))(p, x),
    "jit(vmap(grad))": lambda loss, p, x: torchfunc_jax.jit(
        torchfunc_jax.vmap(torchfunc_jax.grad(loss), (None, 0))
    )(p, x),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_torch_with_few_rows(layer, way):
    torch.manual_seed(0)
    m = LAYERS[layer]().double()

    def loss(p, t):
        out = torchfunc_jax.functional_call(m, p, (t[None],))
        return ((out[0] if isinstance(out, tuple) else out) ** 2).sum()

    for shape in ((2, 3, 128), (3, 2, 128)):
        x = torch.randn(shape, dtype=torch.float64)
        p = {
            k: v.detach().clone().requires_grad_(way != "jit(vmap(grad))")
            for k, v in m.named_parameters()
        }
        found = WAYS[way](loss, p, x)
        expected = [loss(dict(m.named_parameters()), t) for t in x]
        wanted = [torch.autograd.grad(e, list(m.parameters()), retain_graph=True) for e in expected]
        if way == "jit(vmap(grad))":
            torch.testing.assert_close(
                list(found.values()), [torch.stack(g) for g in zip(*wanted, strict=True)]
            )
        else:
            torch.testing.assert_close(found, torch.stack(expected))
            gradients = torch.autograd.grad(found.sum(), list(p.values()))
            torch.testing.assert_close(gradients, tuple(sum(g) for g in zip(*wanted, strict=True)))


@pytest.mark.parametrize(
    "product",
    [
        torch.mv,
        lambda m, v: torch.addmv(torch.ones(3), m, v),
        lambda m, v: torch.nn.functional.linear(v, m),
    ],
)
def test_a_matrix_times_mapped_vectors_is_their_rows_times_its_transpose(product):
    m, rows = torch.arange(12.0).reshape(3, 4), torch.arange(40.0).reshape(5, 2, 4)
    f = torchfunc_jax.jit(torchfunc_jax.vmap(torchfunc_jax.vmap(product, (None, 0)), (None, 0)))
    torch.testing.assert_close(
        f(m, rows), torch.func.vmap(torch.func.vmap(product, (None, 0)), (None, 0))(m, rows)
    )
    text = f.lower(m, rows).as_text().split("dot_general")[1]
    # XLA carries one through the operators that follow, and reads memory in strides there
    assert "transpose" not in text


def test_results_that_are_operands_or_one_result_twice() -> None:
    """A loop of which one carried value never changes, as in the second derivative of a recurrent
    layer: JAX gives its first value as its last one.
    """
    new = jax.make_jaxpr(lambda x, y: [x * 1, x * 2, y * 3, y * 4])(1.0, 2.0).jaxpr

    def run(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        z = x + y
        return [x, z, z, jnp.sin(y)]

    made = equations(run, new.invars, new.outvars)
    found = jax.core.eval_jaxpr(new.replace(eqns=made), [], 1.0, 2.0)
    assert [*map(float, found)] == pytest.approx([1.0, 3.0, 3.0, math.sin(2.0)])
