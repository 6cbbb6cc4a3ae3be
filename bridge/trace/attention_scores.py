"""How many scores attention computes at once, which a process, or a ``with`` block of a thread,
chooses.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from bridge.process import having, process
from bridge.trace.levels import state


@contextlib.contextmanager
def attention_scores(at_once: float) -> Iterator[None]:
    """Choose how many scores attention computes at once, for a ``with`` block in this thread.

    The scores of queries and keys are a matrix for each head. One with more elements than this is
    computed by blocks of queries, each with at most so many scores, or 16 queries:
    ``scaled_dot_product_attention``, ``nn.MultiheadAttention(...)(need_weights=False)`` and
    ``flex_attention``, with every derivative. The memory then grows with the number of queries and
    keys, not with their product. Attention with dropout is computed at once. The environment
    variable ``TORCHFUNC_JAX_ATTENTION_SCORES`` chooses for a whole process.

    It holds for the transforms that are called inside of the block, and inside of a jitted function
    for what is computed in the block. Inside of a function that is not jitted the block has no
    effect.

    Args:
        at_once: the number of scores of one head, at least 1; 2 ** 18 unless something else is
            chosen, which is 512 queries and keys. ``math.inf``: all.

    Raises:
        ValueError: at_once is no number, or less than 1.

    Source: https://arxiv.org/abs/2112.05682, whose blocks are of keys too.

    Example:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from torchfunc_jax import attention_scores, hvp, jit
        >>> q = torch.randn(2, 100, 4, dtype=torch.float64)
        >>> f = jit(
        ...     lambda q: hvp(
        ...         lambda q: scaled_dot_product_attention(q, q, q).square().sum(), (q,), (q,)
        ...     )[1][0]
        ... )
        >>> with attention_scores(1000):
        ...     in_blocks = f(q)
        >>> torch.allclose(in_blocks, f(q))
        True
    """
    with having(state, attention_scores=checked(at_once)):
        yield


def at_once() -> float:
    """How many scores of a head attention computes at once in a program that is traced now."""
    return state.attention_scores or process.attention_scores


def checked(at_once: float) -> float:
    """The argument of ``attention_scores``; raises ValueError if it is something else."""
    if isinstance(at_once, bool) or not isinstance(at_once, int | float) or not at_once >= 1:
        raise ValueError(
            "at_once: expected a number of scores, at least 1, or math.inf "
            f"for all, got {at_once!r}"
        )
    return at_once if at_once == math.inf else int(at_once)


def of_environment() -> float:
    """What the environment variable chooses."""
    text = os.environ.get("TORCHFUNC_JAX_ATTENTION_SCORES", str(2**18))
    try:
        return checked(float(text))
    except ValueError:
        raise ValueError(
            "TORCHFUNC_JAX_ATTENTION_SCORES: expected a number of scores, at least 1, or inf for "
            f"all, got {text!r}"
        ) from None


process.attention_scores = of_environment()
