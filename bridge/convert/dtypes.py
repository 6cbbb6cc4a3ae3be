"""Maps torch dtypes to JAX dtypes and back by one table, and finds the dtype that torch promotes
operands to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import ml_dtypes  # noqa: F401  names for np.dtype
import numpy as np
import torch

_TO_JAX = {
    getattr(torch, name): np.dtype(name)  # ml_dtypes teaches numpy bfloat16 and the 8-bit floats
    for name in (
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    )
}
_TO_TORCH = {j: t for t, j in _TO_JAX.items()}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The JAX (numpy) dtype of a torch dtype; raises TypeError if JAX has none (``complex32``,
    quantized types).

    Example:
        >>> to_jax(torch.float32)
        dtype('float32')
    """
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise TypeError(
            f"dtype: JAX has no counterpart of {dtype}; convert the tensor first, for example with "
            ".to(torch.float32)"
        ) from None


def to_torch(dtype: object) -> torch.dtype:
    """The torch dtype of a numpy dtype, or of anything that ``np.dtype`` takes; raises TypeError if
    torch has none (``int4``, PRNG keys).

    Example:
        >>> to_torch(np.int64)
        torch.int64
    """
    try:
        return _TO_TORCH[dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)]  # type: ignore[call-overload]
    except (KeyError, TypeError):
        raise TypeError(
            f"dtype: torch has no counterpart of the JAX dtype {dtype}; cast "
            "it first, for example with .astype"
        ) from None


#: Kinds of dtypes, in the order of promotion: a later kind prevails over an earlier one.
BOOL, INT, FLOAT, COMPLEX = range(4)


def kind(dtype: torch.dtype) -> int:
    """The kind of a dtype: BOOL, INT, FLOAT or COMPLEX."""
    return (
        COMPLEX
        if dtype.is_complex
        else FLOAT
        if dtype.is_floating_point
        else BOOL
        if dtype is torch.bool
        else INT
    )


def of_number(x: complex | np.number | np.bool_) -> torch.dtype:
    """The dtype of a Python or numpy number as an operand."""
    if isinstance(x, bool | np.bool_):
        return torch.bool
    if isinstance(x, int | np.integer):
        return torch.int64
    default = torch.get_default_dtype()
    if not isinstance(x, complex):
        return default
    return torch.complex128 if default is torch.float64 else torch.complex64


def promoted(operands: Iterable[Any]) -> torch.dtype:
    """torch.result_type for any number of operands: tensors, JAX arrays and Python numbers.

    There are three classes of operands: with dimensions, 0-dim, and numbers. A lower class counts
    only if its kind is higher
    (https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc). None is no
    operand.

    Example:
        >>> promoted(
        ...     [torch.ones(2, dtype=torch.float16), torch.tensor(1.0, dtype=torch.float64), 2]
        ... )
        torch.float16
        >>> promoted([torch.ones(2, dtype=torch.int8), 2.5])
        torch.float32
    """
    found: list[torch.dtype | None] = [None, None, None]
    for x in operands:
        if x is None:
            continue
        if hasattr(x, "dtype"):
            rank, dtype = (
                (0 if x.ndim else 1),
                x.dtype if isinstance(x.dtype, torch.dtype) else to_torch(x.dtype),
            )
        else:
            rank, dtype = 2, of_number(x)
        have = found[rank]
        found[rank] = dtype if have is None or have is dtype else torch.promote_types(have, dtype)
    return _of_classes(*found)


@functools.cache
def _of_classes(*found: torch.dtype | None) -> torch.dtype:
    given = [dtype for dtype in found if dtype is not None]
    if not given:
        raise TypeError("operands: expected at least one tensor or number, got none")
    common = given[0]
    for dtype in given[1:]:
        if kind(dtype) > kind(common):
            # a float tensor's width survives a complex number: float64 * 1j is complex128
            complex_float = dtype.is_complex and common.is_floating_point
            common = torch.promote_types(common, torch.complex64) if complex_float else dtype
    return common
