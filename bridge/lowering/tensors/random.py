"""Random operators: uniform, normal and integer tensors, in-place fills, dropout, and draws from
the named distributions.

PyTorch draws the numbers of an operator registered with ``draws`` before its lowering would run,
and those for which a lowering asks torch_random in common/provided.py. The others are JAX's own;
every key comes from next_key. Low precision is then drawn in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from bridge.lowering.common.loops import searchsorted
from bridge.lowering.common.promotion import (
    cast,
    default_float,
    is_complex,
    is_floating,
    is_integral,
    jdtype,
    opmath,
    real_dtype,
)
from bridge.lowering.common.provided import (
    next_key,
    outside,
    refuse,
    torch_random,
    torch_random_by_value,
)
from bridge.lowering.registry import lowering


def _uniform(key: Array, shape: Sequence[int], dtype: np.dtype, low: float = 0.0) -> Array:
    """Uniform on [low, 1) in a floating dtype; narrow types are drawn in their own precision,
    because rounding could give 1.
    """
    return jax.random.uniform(key, tuple(shape), dtype, minval=low)


def _open_uniform(key: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Uniform on the open interval (0, 1), in the accumulation dtype."""
    work = opmath(dtype)
    return _uniform(key, shape, work, float(jnp.finfo(work).tiny))


def _normal(key: Array, shape: Sequence[int], dtype: np.dtype) -> Array:
    """Standard normal in the accumulation dtype; of a complex dtype, with variance 1/2 in each
    part.
    """
    return jax.random.normal(key, tuple(shape), opmath(dtype))


def _need_floating(dtype: np.dtype, name: str) -> None:
    if is_integral(dtype):
        raise NotImplementedError(
            f"{name}: not implemented for {np.dtype(dtype)}; expected a floating point dtype"
        )


# -- uniform, normal, integers ---------------------------------------------------------------------
@lowering("aten.rand", "aten.rand.generator", draws=True)
def aten_rand(
    size: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """rand(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
    bool? pin_memory=None) -> Tensor
    """
    out = jdtype(dtype, default_float())
    _need_floating(out, "rand")
    if not is_complex(out):
        return _uniform(next_key(generator), size, out)
    parts = _uniform(next_key(generator), (2, *size), real_dtype(out))
    return lax.complex(parts[0], parts[1])


@lowering("aten.randn", "aten.randn.generator", draws=True)
def aten_randn(
    size: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Array:
    """randn(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
    bool? pin_memory=None) -> Tensor
    """
    out = jdtype(dtype, default_float())
    _need_floating(out, "randn")
    return cast(_normal(next_key(generator), size, out), out)


@lowering("aten.rand_like", "aten.rand_like.generator", no_grad_outputs=(0,), draws=True)
def aten_rand_like(
    self: Array,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """rand_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
    bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
    """
    return aten_uniform(
        lax.full_like(self, 0, dtype=jdtype(dtype, self.dtype)), generator=generator
    )


@lowering("aten.randn_like", "aten.randn_like.generator", no_grad_outputs=(0,), draws=True)
def aten_randn_like(
    self: Array,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """randn_like(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,
    bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
    """
    out = jdtype(dtype, self.dtype)
    _need_floating(out, "randn_like")
    return cast(_normal(next_key(generator), self.shape, out), out)


@lowering("aten.uniform", draws=True)
def aten_uniform(
    self: Array, low: float = 0.0, high: float = 1.0, *, generator: torch.Generator | None = None
) -> Array:
    """uniform(Tensor self, float from=0., float to=1., *, Generator? generator=None) -> Tensor"""
    _need_floating(self.dtype, "uniform")
    if low > high:
        raise RuntimeError(
            f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}"
        )
    if is_complex(self):
        part = lax.real(self)
        return lax.complex(*(aten_uniform(part, low, high, generator=generator) for _ in range(2)))
    drawn = _uniform(next_key(generator), self.shape, self.dtype)
    return (
        drawn
        if (low, high) == (0, 1)
        else cast(cast(drawn, opmath(self.dtype)) * (high - low) + low, self.dtype)
    )


def _check_std(std: Any) -> None:
    if hasattr(std, "dtype"):
        refuse(std < 0, "normal expects all elements of std >= 0.0")
    elif std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")


def _scaled_normal(
    mean: Any, std: Any, shape: Sequence[int], dtype: np.dtype, generator: torch.Generator | None
) -> Array:
    _check_std(std)
    _need_floating(dtype, "normal")
    work = opmath(dtype)
    mean, std = (
        cast(lax.stop_gradient(v), work) if hasattr(v, "dtype") else v for v in (mean, std)
    )
    return cast(_normal(next_key(generator), shape, dtype) * std + mean, dtype)


@lowering("aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor")
def aten_normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Array:
    """normal.Tensor_Tensor(Tensor mean, Tensor std, *, Generator? generator=None) -> Tensor"""
    dtype = mean.dtype if hasattr(mean, "dtype") else std.dtype
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    if is_floating(dtype) and not hasattr(std, "dtype"):
        drawn = torch_random("aten.normal.Tensor_float", (mean, std), 0, generator=generator)
        if drawn is not None:
            return drawn + lax.stop_gradient(mean)
    elif is_floating(dtype):
        like = jnp.broadcast_to(cast(std, dtype), shape)
        rules = ("aten.normal.Tensor_Tensor", (mean, std)) if hasattr(mean, "dtype") else None
        drawn = torch_random("aten.normal.float_Tensor", (0.0, like), 1, rules, generator)
        if drawn is not None:
            _check_std(std)
            return cast(drawn * lax.stop_gradient(std) + lax.stop_gradient(mean), dtype)
    return _scaled_normal(mean, std, shape, dtype, generator)


@lowering("aten.normal.float_float", draws=True)
def aten_normal_float_float(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """normal.float_float(float mean, float std, SymInt[] size, *, Generator? generator=None,
    ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) ->
    Tensor
    """
    return _scaled_normal(mean, std, size, jdtype(dtype, default_float()), generator)


@lowering("aten.normal_functional", draws=True)
def aten_normal_functional(
    self: Array, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None
) -> Array:
    """normal_functional(Tensor self, float mean=0., float std=1., *, Generator? generator=None) ->
    Tensor
    """
    return _scaled_normal(mean, std, self.shape, self.dtype, generator)


def _integers(key: Array, shape: Sequence[int], low: int, high: Any, dtype: np.dtype) -> Array:
    """Uniform integers of [low, high) in that dtype, drawn in 32 bits if they fit, which is half
    the work of 64.
    """
    known = isinstance(low, int) and isinstance(high, int)
    if known and low >= high:
        raise RuntimeError(
            f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}"
        )
    narrow = known and low >= -(2**31) and high < 2**31
    return cast(
        jax.random.randint(key, tuple(shape), low, high, np.int32 if narrow else np.int64), dtype
    )


@lowering("aten.randint", "aten.randint.generator", draws=True)
def aten_randint(
    high: int,
    size: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """randint(SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout? layout=None, Device?
    device=None, bool? pin_memory=None) -> Tensor
    """
    return _integers(next_key(generator), size, 0, high, jdtype(dtype, np.int64))


@lowering("aten.randint.low", "aten.randint.low_generator", draws=True)
def aten_randint_low(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """randint.low(SymInt low, SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout?
    layout=None, Device? device=None, bool? pin_memory=None) -> Tensor
    """
    return _integers(next_key(generator), size, low, high, jdtype(dtype, np.int64))


@lowering(
    "aten.randint_like",
    "aten.randint_like.generator",
    "aten.randint_like.Tensor",
    "aten.randint_like.Tensor_generator",
    draws=True,
)
def aten_randint_like(
    self: Array,
    high: Any,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """randint_like(Tensor self, SymInt high, *, ScalarType? dtype=None, Layout? layout=None,
    Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor
    """
    return _integers(next_key(generator), self.shape, 0, high, jdtype(dtype, self.dtype))


@lowering("aten.randint_like.low_dtype", "aten.randint_like.low_generator_dtype", draws=True)
def aten_randint_like_low(
    self: Array,
    low: int,
    high: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """randint_like.low_dtype(Tensor self, SymInt low, SymInt high, *, ScalarType? dtype=None,
    Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat?
    memory_format=None) -> Tensor
    """
    return _integers(next_key(generator), self.shape, low, high, jdtype(dtype, self.dtype))


@lowering("aten.randperm", "aten.randperm.generator", draws=True)
def aten_randperm(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    **placement: Any,
) -> Array:
    """randperm(SymInt n, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool?
    pin_memory=None) -> Tensor
    """
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")
    return cast(
        jax.random.permutation(next_key(generator), jnp.arange(n, dtype=np.int32)),
        jdtype(dtype, np.int64),
    )


def _top_integer(dtype: np.dtype) -> int:
    """One more than the largest value of random_() in a dtype: it draws from all integers that the
    dtype holds exactly.
    """
    if dtype == np.bool_:
        return 2
    return (
        2 ** (jnp.finfo(dtype).nmant + 1) + 1
        if is_floating(dtype)
        else int(np.iinfo(dtype).max) + 1
    )


@lowering("aten.random", draws=True)
def aten_random(self: Array, *, generator: torch.Generator | None = None) -> Array:
    """random(Tensor self, *, Generator? generator=None) -> Tensor"""
    return aten_random_from(self, 0, None, generator=generator)


@lowering("aten.random.to", draws=True)
def aten_random_to(self: Array, to: int, *, generator: torch.Generator | None = None) -> Array:
    """random.to(Tensor self, int to, *, Generator? generator=None) -> Tensor"""
    return aten_random_from(self, 0, to, generator=generator)


@lowering("aten.random.from", draws=True)
def aten_random_from(
    self: Array, low: int, high: int | None, *, generator: torch.Generator | None = None
) -> Array:
    """random.from(Tensor self, int from, int? to, *, Generator? generator=None) -> Tensor"""
    high = _top_integer(self.dtype) if high is None else high
    # an int64 bound cannot include the largest value, so draw all values but the lowest, shifted by
    # one
    if high > np.iinfo(np.int64).max:
        return cast(
            jax.random.randint(next_key(generator), self.shape, low - 1, high - 1, np.int64) + 1,
            self.dtype,
        )
    return _integers(next_key(generator), self.shape, low, high, self.dtype)


# -- bernoulli and dropout -------------------------------------------------------------------------
def coin(key: Array, probability: float, shape: tuple[int, ...]) -> Array:
    """Independent bools, True with a probability known now: 32 random bits are compared with a
    threshold, without floats.
    """
    threshold = round(probability * 2**32)
    if threshold >= 2**32:
        return jnp.ones(tuple(shape), np.bool_)
    return jax.random.bits(key, tuple(shape), np.uint32) < np.uint32(threshold)


def _check_probability(p: float, name: str) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"{name} expects p to be in [0, 1], but got p={p}")


@lowering("aten.bernoulli")
def aten_bernoulli(self: Array, *, generator: torch.Generator | None = None) -> Array:
    """bernoulli(Tensor self, *, Generator? generator=None) -> Tensor"""
    return _bernoulli(self, self, None, generator)


@lowering("aten.bernoulli.Tensor", ordered=True)
def aten_bernoulli_tensor(
    self: Array, p: Array, *, generator: torch.Generator | None = None
) -> Array:
    """bernoulli.Tensor(Tensor self, Tensor p, *, Generator? generator=None) -> Tensor"""
    return _bernoulli(self, p, lambda whole: whole, generator)


def _bernoulli(self: Array, p: Array, order: Any, generator: torch.Generator | None) -> Array:
    _need_floating(p.dtype, "bernoulli")
    refuse(
        outside(p, 0, 1),
        "Expected p_in >= 0 && p_in <= 1 to be true, but got false: a "
        "probability is outside of [0, 1]",
    )
    p = cast(lax.stop_gradient(p), opmath(p.dtype))
    like, rules = jnp.broadcast_to(p, self.shape), ("aten.bernoulli", (p,))
    drawn = torch_random("aten.uniform_", (like,), rules=rules, generator=generator, order=order)
    return cast(
        (_uniform(next_key(generator), self.shape, p.dtype) if drawn is None else drawn) < p,
        self.dtype,
    )


@lowering("aten.bernoulli.p", draws=True)
def aten_bernoulli_p(
    self: Array, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Array:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    _check_probability(p, "bernoulli_")
    return cast(coin(next_key(generator), p, self.shape), self.dtype)


@lowering("aten.native_dropout", ordered=True)
def aten_native_dropout(input: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    """native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)"""
    if train is False or p == 0:
        return input, jnp.ones(input.shape, np.bool_)
    _check_probability(p, "dropout")
    scale = 1 / (1 - p) if p < 1 else 0.0
    mask = torch_random("aten.native_dropout", (input, p, True), order=lambda whole: whole)
    if mask is not None:
        return input * cast(mask, input.dtype) * scale, mask
    mask = coin(next_key(None), 1 - p, input.shape)
    return jnp.where(mask, input * scale, 0), mask


@lowering("aten.rrelu_with_noise_functional")
def aten_rrelu_with_noise(
    self: Array,
    noise: Array,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Array, Array]:
    """rrelu_with_noise_functional(Tensor self, Tensor noise, Scalar lower=0.125, Scalar
    upper=0.33333333333333331, bool training=False, Generator? generator=None) -> (Tensor, Tensor
    noise_out)
    """
    if not training:
        return jnp.where(self > 0, self, self * ((lower + upper) / 2)), noise
    slope = torch_random_by_value("aten.rrelu", (self,), (lower, upper, True), generator=generator)
    if slope is None:
        slope = jnp.where(self > 0, 1, aten_uniform(self, lower, upper, generator=generator))
    return jnp.where(self > 0, self, self * slope), slope


# -- named distributions ---------------------------------------------------------------------------
@lowering("aten.exponential", draws=True)
def aten_exponential(
    self: Array, lambd: float = 1.0, *, generator: torch.Generator | None = None
) -> Array:
    """exponential(Tensor self, float lambd=1., *, Generator? generator=None) -> Tensor"""
    _need_floating(self.dtype, "exponential")
    if lambd <= 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={lambd}")
    drawn = -lax.log1p(-_open_uniform(next_key(generator), self.shape, self.dtype)) / lambd
    # never 0, because quotients of exponentials are a common way to sample
    return cast(jnp.maximum(drawn, float(jnp.finfo(self.dtype).tiny)), self.dtype)


@lowering("aten.cauchy", draws=True)
def aten_cauchy(
    self: Array,
    median: float = 0.0,
    sigma: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Array:
    """cauchy(Tensor self, float median=0., float sigma=1., *,
    Generator? generator=None) -> Tensor
    """
    _need_floating(self.dtype, "cauchy")
    if sigma <= 0:
        raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    turn = (_open_uniform(next_key(generator), self.shape, self.dtype) - 0.5) * math.pi
    return cast(median + sigma * lax.tan(turn), self.dtype)


@lowering("aten.geometric", draws=True)
def aten_geometric(self: Array, p: float, *, generator: torch.Generator | None = None) -> Array:
    """geometric(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    work = self.dtype if is_floating(self) else np.dtype(np.float32)
    trials = lax.ceil(
        lax.log(_open_uniform(next_key(generator), self.shape, work)) / math.log1p(-p)
    )
    return cast(jnp.maximum(trials, 1), self.dtype)


@lowering("aten.log_normal", draws=True)
def aten_log_normal(
    self: Array, mean: float = 1.0, std: float = 2.0, *, generator: torch.Generator | None = None
) -> Array:
    """log_normal(Tensor self, float mean=1., float std=2., *,
    Generator? generator=None) -> Tensor
    """
    _need_floating(self.dtype, "log_normal")
    if std <= 0:
        raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}")
    return cast(
        lax.exp(_normal(next_key(generator), self.shape, self.dtype) * std + mean), self.dtype
    )


def _threefry(key: Array) -> Array:
    """A key of the generator that jax.random.poisson is written for,
    whatever the user's default.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), np.uint32), impl="threefry2x32")


@lowering("aten.poisson")
def aten_poisson(self: Array, generator: torch.Generator | None = None) -> Array:
    """poisson(Tensor self, Generator? generator=None) -> Tensor"""
    _need_floating(self.dtype, "poisson")
    refuse(outside(self, 0, np.inf), "invalid Poisson rate, expected rate to be non-negative")
    drawn = torch_random_by_value("aten.poisson", (self,), generator=generator)
    if drawn is not None:
        return drawn
    rate = cast(lax.stop_gradient(self), opmath(self.dtype))
    return cast(
        jax.random.poisson(_threefry(next_key(generator)), rate, rate.shape, np.int64), self.dtype
    )


@lowering("aten.binomial")
def aten_binomial(count: Array, prob: Array, generator: torch.Generator | None = None) -> Array:
    """binomial(Tensor count, Tensor prob, Generator? generator=None) -> Tensor"""
    _need_floating(count.dtype, "binomial")
    drawn = torch_random_by_value(
        "aten.binomial", jnp.broadcast_arrays(count, prob), generator=generator
    )
    if drawn is not None:
        return drawn
    work = opmath(count.dtype)
    n, p = (cast(lax.stop_gradient(x), work) for x in jnp.broadcast_arrays(count, prob))
    return cast(jax.random.binomial(next_key(generator), n, p, n.shape, work), count.dtype)


def _check_weights(weights: Array, num_samples: int, replacement: bool) -> None:
    """Raise PyTorch's errors for the weights of multinomial."""
    if not is_floating(weights):
        raise RuntimeError(
            f"multinomial only supports floating-point dtypes for input, got: {weights.dtype}"
        )
    if weights.ndim not in (1, 2):
        raise RuntimeError(f"prob_dist must be 1 or 2 dim, got {weights.ndim}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > weights.shape[-1]:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        )
    refuse(
        outside(weights, 0, float(jnp.finfo(weights.dtype).max)),
        "probability tensor contains either `inf`, `nan` or element < 0",
    )
    total = jnp.sum(cast(lax.stop_gradient(weights), opmath(weights.dtype)), -1)
    refuse(
        lax.le(total, lax.full_like(total, 0)),
        "invalid multinomial distribution (sum of probabilities <= 0)",
    )


@lowering("aten.multinomial", exact_out=True, ordered=True)
def aten_multinomial(
    self: Array,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Array:
    """multinomial(Tensor self, SymInt num_samples, bool replacement=False, *, Generator?
    generator=None) -> Tensor
    """
    _check_weights(self, num_samples, replacement)
    weights, batch = lax.stop_gradient(self), self.shape[:-1]
    # what PyTorch does, in the same steps
    rules = ("aten.multinomial", (weights, num_samples, replacement))
    if not replacement or num_samples == 1:
        drawn = torch_random(
            "aten.exponential_", (weights,), rules=rules, generator=generator, order=_rows
        )
        if drawn is not None:
            return cast(lax.top_k(weights / drawn, num_samples)[1], np.int64)
    else:
        drawn = torch_random(
            "aten.uniform_",
            (jnp.zeros((*batch, num_samples), np.float64),),
            rules=rules,
            generator=generator,
        )
        if drawn is not None:
            cumulative = lax.cumsum(weights, weights.ndim - 1)
            return _first_above(cast(cumulative / cumulative[..., -1:], np.float64), drawn, "left")
    weights, key = cast(weights, opmath(self.dtype)), next_key(generator)
    if not replacement or num_samples == 1:
        # the order of log p + Gumbel noise is a draw without replacement (the Gumbel-top-k trick,
        # https://arxiv.org/abs/1903.06059)
        noisy = lax.log(weights) + jax.random.gumbel(key, weights.shape, weights.dtype)
        return cast(lax.top_k(cast(noisy, np.float32), num_samples)[1], np.int64)
    cumulative = lax.cumsum(weights, weights.ndim - 1)
    level = _uniform(key, (*batch, num_samples), weights.dtype) * cumulative[..., -1:]
    # level < total, so the first entry above it exists, and has weight: the sums before and after
    # it differ
    return _first_above(cumulative, level, "right")


def _rows(weights: torch.Tensor) -> torch.Tensor:
    """The weights of all lanes as PyTorch's vmap divides them by exponential numbers: as rows,
    copied if they cannot be a view.
    """
    return torch.empty_like(weights.reshape(-1, weights.shape[-1])).view(weights.shape)


def _first_above(cumulative: Array, level: Array, side: str) -> Array:
    def search(row: Array, value: Array) -> Array:
        return searchsorted(row, value, side=side)

    return cast((jax.vmap(search) if cumulative.ndim == 2 else search)(cumulative, level), np.int64)


@jax.custom_jvp
def _gamma_of(alpha: Array, x: Array) -> Array:
    return x


@_gamma_of.defjvp
def _gamma_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return _gamma_of(*primals), aten_standard_gamma_grad(*primals) * tangents[0]


@lowering("aten._standard_gamma")
def aten_standard_gamma(self: Array, generator: torch.Generator | None = None) -> Array:
    """_standard_gamma(Tensor self, Generator? generator=None) -> Tensor"""
    _need_floating(self.dtype, "_standard_gamma")
    work = opmath(self.dtype)
    # differentiable by implicit reparameterization, as PyTorch's (https://arxiv.org/abs/1805.08498)
    found = torch_random_by_value("aten._standard_gamma", (self,), generator=generator)
    if found is not None:
        return _gamma_of(self, found)
    drawn = jax.random.gamma(next_key(generator), cast(self, work), self.shape, work)
    return cast(jnp.maximum(drawn, float(jnp.finfo(self.dtype).tiny)), self.dtype)


@lowering("aten._standard_gamma_grad")
def aten_standard_gamma_grad(self: Array, output: Array) -> Array:
    """_standard_gamma_grad(Tensor self, Tensor output) -> Tensor"""
    work = opmath(self.dtype)
    return cast(lax.random_gamma_grad(cast(self, work), cast(output, work)), self.dtype)


def _beta_gradient(x: Array, alpha: Array, beta: Array) -> Array:
    """dx/dalpha of x ~ Beta(alpha, beta) by implicit reparameterization: -(dF/dalpha)(x) / F'(x), F
    the distribution function.

    dF/dalpha is the integral of the density times log t - digamma(alpha) + digamma(alpha + beta)
    over [0, x] or, as the whole is 0, minus that over [x, 1]; the side away from the mean is used,
    with t = x exp(-s) on a double-exponential grid in s.
    """
    left = x * (alpha + beta) < alpha
    z, a, b = jnp.where(left, x, 1 - x), jnp.where(left, alpha, beta), jnp.where(left, beta, alpha)
    odds = z / (1 - z)
    width = 1 / (jnp.abs(a - (b - 1) * odds) + jnp.sqrt(jnp.abs(b - 1) * odds / (1 - z)))
    step = 1 / 8
    u = np.arange(-3.5, 12.5, step).reshape(-1, *[1] * x.ndim).astype(x.dtype)
    s = width * np.exp(u - np.exp(-u))
    log_rest = jnp.log1p(-odds * jnp.expm1(-s))  # log((1 - t) / (1 - z)) for t = z exp(-s)
    log_t = jnp.where(left, jnp.log(z) - s, jnp.log1p(-z) + log_rest)
    weight = jnp.exp((b - 1) * log_rest - a * s) * (
        log_t - jax.scipy.special.digamma(alpha) + jax.scipy.special.digamma(alpha + beta)
    )
    integral = z * jnp.sum(weight * s * (1 + np.exp(-u)), axis=0) * step
    return jnp.where(left, -integral, integral)


@lowering("aten._dirichlet_grad")
def aten_dirichlet_grad(x: Array, alpha: Array, total: Array) -> Array:
    """_dirichlet_grad(Tensor x, Tensor alpha, Tensor total) -> Tensor"""
    value, a, all_ = (cast(v, np.float64) for v in jnp.broadcast_arrays(x, alpha, total))
    value = jnp.clip(value, float(jnp.finfo(x.dtype).tiny), 1 - float(jnp.finfo(x.dtype).epsneg))
    return cast(_beta_gradient(value, a, all_ - a) / (1 - value), x.dtype)


@jax.custom_jvp
def _dirichlet_of(alpha: Array, x: Array) -> Array:
    return x


@_dirichlet_of.defjvp
def _dirichlet_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    (alpha, x), (t, _) = primals, tangents
    moved = (
        aten_dirichlet_grad(
            x, alpha, jnp.broadcast_to(jnp.sum(alpha, -1, keepdims=True), alpha.shape)
        )
        * t
    )
    return _dirichlet_of(alpha, x), moved - x * jnp.sum(moved, -1, keepdims=True)


@lowering("aten._sample_dirichlet")
def aten_sample_dirichlet(self: Array, generator: torch.Generator | None = None) -> Array:
    """_sample_dirichlet(Tensor self, Generator? generator=None) -> Tensor"""
    _need_floating(self.dtype, "_sample_dirichlet")
    work = opmath(self.dtype)
    alpha = cast(self, work)
    found = torch_random_by_value("aten._sample_dirichlet", (self,), generator=generator)
    if found is not None:
        return cast(_dirichlet_of(alpha, cast(found, work)), self.dtype)
    # in logarithms, because all gammas of small concentrations may underflow
    drawn = jax.random.loggamma(next_key(generator), lax.stop_gradient(alpha), alpha.shape, work)
    return cast(_dirichlet_of(alpha, jax.nn.softmax(drawn, axis=-1)), self.dtype)
