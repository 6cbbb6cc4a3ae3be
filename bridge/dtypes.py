"""Which JAX dtype stands for which torch dtype, both ways.  One table; nothing about arrays or tensors lives here."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

_PAIRS: tuple[tuple[torch.dtype, type], ...] = (
    (torch.bool, np.bool_),
    (torch.uint8, np.uint8),
    (torch.uint16, np.uint16),
    (torch.uint32, np.uint32),
    (torch.uint64, np.uint64),
    (torch.int8, np.int8),
    (torch.int16, np.int16),
    (torch.int32, np.int32),
    (torch.int64, np.int64),
    (torch.float16, np.float16),
    (torch.bfloat16, ml_dtypes.bfloat16),
    (torch.float32, np.float32),
    (torch.float64, np.float64),
    (torch.complex64, np.complex64),
    (torch.complex128, np.complex128),
    (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz),
    (torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz),
)
_TO_JAX = {t: np.dtype(j) for t, j in _PAIRS}
_TO_TORCH = {j: t for t, j in _TO_JAX.items()}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The JAX (numpy) dtype that holds the values of a torch dtype.

    Args:
        dtype: a torch dtype.

    Returns:
        np.dtype: same kind and width.

    Raises:
        TypeError: JAX has no such type (``complex32``, quantized types).

    Example:
        >>> import torch
        >>> from bridge import dtypes
        >>> dtypes.to_jax(torch.float32)
        dtype('float32')
    """
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise TypeError(
            f"dtype: JAX has no counterpart of {dtype}; convert the tensor first, for example with .to(torch.float32)"
        ) from None


def to_torch(dtype: object) -> torch.dtype:
    """The torch dtype that holds the values of a JAX (numpy) dtype.

    Args:
        dtype: a numpy dtype, or anything ``np.dtype`` takes.

    Returns:
        torch.dtype: same kind and width.

    Raises:
        TypeError: torch has no such type (``int4``, PRNG keys, …).

    Example:
        >>> import numpy as np
        >>> from bridge import dtypes
        >>> dtypes.to_torch(np.int64)
        torch.int64
    """
    try:
        return _TO_TORCH[dtype]  # type: ignore[index]
    except (KeyError, TypeError):
        pass
    try:
        return _TO_TORCH[np.dtype(dtype)]  # type: ignore[call-overload]
    except (KeyError, TypeError):
        raise TypeError(f"dtype: torch has no counterpart of the JAX dtype {dtype}; cast it first, for example with .astype") from None
