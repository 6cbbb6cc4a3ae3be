"""Outer products in the order in which they are wanted (bridge/jit/outer_products.py): the same bits, and only if nothing else reads it."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import torchfunc_jax
from bridge.jit.outer_products import in_order


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
    batch=st.lists(st.integers(1, 3), max_size=2), left=st.lists(st.integers(1, 3), max_size=2),
    right=st.lists(st.integers(1, 3), max_size=2), data=st.data(), dtype=st.sampled_from(["float32", "bfloat16", "complex64", "int32"]),
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_any_batched_outer_product(batch, left, right, data, dtype):
    rng = np.random.default_rng(0)
    places = [data.draw(st.permutations(range(len(batch) + len(free)))) for free in (left, right)]
    dims = [tuple(p.index(i) for i in range(len(batch))) for p in places]  # where the batch dimensions of each side lie
    sides = [
        jnp.asarray(rng.integers(-9, 9, [(*batch, *free)[k] for k in p]), dtype) for p, free in zip(places, (left, right), strict=True)
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
    "turned and turned back": lambda a, b: lax.transpose(lax.transpose(lax.dot_general(a, b, OUTER), (0, 2, 1)), (0, 2, 1)),
    "read by something else too": lambda a, b: (lambda p: (p.sum(), lax.transpose(p, (0, 2, 1))))(lax.dot_general(a, b, OUTER)),
    "an output too": lambda a, b: (lambda p: (p, lax.transpose(p, (0, 2, 1))))(lax.dot_general(a, b, OUTER)),
    "a sum of products": lambda a, b: lax.transpose(lax.dot_general(a, b, (((0,), (0,)), ((), ()))), (1, 0)),
    "wider than its sides": lambda a, b: lax.transpose(
        lax.dot_general(a.astype("bfloat16"), b.astype("bfloat16"), OUTER, preferred_element_type="float32"), (0, 2, 1)
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
        torch.testing.assert_close(torchfunc_jax.jit(torchfunc_jax.grad(loss(torchfunc_jax)))(p)[k], g)
