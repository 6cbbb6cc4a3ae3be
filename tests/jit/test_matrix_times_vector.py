"""Small products of a matrix and a vector become sums in programs that are compiled fast, and have
the same results.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from bridge.xla import vector_products

ROWS = (((2,), (1,)), ((0,), (0,)))  # [B, N, K] @ [B, K, M]


@pytest.mark.parametrize(
    "left, right, numbers, dtype, becomes_a_sum",
    [
        ((4, 10, 20), (4, 20, 1), ROWS, "float32", True),
        ((4, 1, 20), (4, 20, 10), ROWS, "float64", True),
        ((10, 20), (20,), (((1,), (0,)), ((), ())), "float32", True),
        ((20,), (20, 10), (((0,), (0,)), ((), ())), "float32", True),
        ((20,), (20,), (((0,), (0,)), ((), ())), "float64", True),
        ((20, 10), (20, 1), (((0,), (0,)), ((), ())), "float32", True),
        # two dimensions summed, in another order
        ((3, 4, 5, 6), (6, 4), (((3, 1), (0, 1)), ((), ())), "float32", True),
        ((5, 3, 1, 2), (2, 3, 7), (((3,), (0,)), ((1,), (1,))), "float32", False),  # five rows
        # a batch that is not in front
        ((1, 3, 1, 2), (2, 3, 7), (((3,), (0,)), ((1,), (1,))), "float32", True),
        ((4, 10, 20), (4, 20, 2), ROWS, "float32", False),
        ((10, 20), (20,), (((1,), (0,)), ((), ())), "int32", False),
        # XLA writes this as a multiplication
        ((10, 1), (1, 1), (((1,), (0,)), ((), ())), "float32", False),
        ((2, 65), (65,), (((1,), (0,)), ((), ())), "float32", False),  # a longer sum than allowed
        ((2000, 20), (20,), (((1,), (0,)), ((), ())), "float32", False),  # a large one
    ],
)
def test_products_with_a_vector(
    left: Any, right: Any, numbers: Any, dtype: str, becomes_a_sum: bool
) -> None:
    rng = np.random.default_rng(0)
    x, y = [(9 * rng.normal(size=shape)).astype(dtype) for shape in (left, right)]
    with jax.enable_x64(True):
        wanted = lax.dot_general(x.astype("float64"), y.astype("float64"), numbers)
        lowered = jax.jit(
            lambda x, y: lax.dot_general(x, y, numbers, precision="highest") + 1
        ).lower(x, y)
        vector_products.as_sums(lowered, 64)
        found = lowered.compile()(x, y)
    assert ("dot_general" not in lowered.as_text()) is becomes_a_sum
    assert (found.shape, found.dtype) == (wanted.shape, dtype)
    np.testing.assert_allclose(
        found, np.asarray(wanted) + 1, rtol=1e-5, atol=1e-3 if dtype == "float32" else 1e-11
    )


def test_products_in_a_loop() -> None:
    def power(matrix: jax.Array, vector: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, v: matrix @ v, vector)

    matrix, vector = np.arange(9, dtype="float32").reshape(3, 3) / 9, np.ones(3, "float32")
    lowered = jax.jit(power).lower(matrix, vector)
    vector_products.as_sums(lowered, 64)
    assert "dot_general" not in lowered.as_text()
    np.testing.assert_allclose(
        lowered.compile()(matrix, vector), np.linalg.matrix_power(matrix, 3) @ vector, rtol=1e-5
    )
