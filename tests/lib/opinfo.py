"""PyTorch's own database of operators and samples, run through every transform and compared with
plain PyTorch.

A *cell* is an operator, a dtype and a mode. Truth is plain PyTorch on the CPU: a call for jit,
autograd for vjp, dual numbers for jvp (autograd of autograd where an operator has no forward
formula), one call after the other for vmap and vmapvjp. This module answers one cell at a time;
verdicts.py says when an answer is the truth; docs/coverage.py runs all cells.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import verdicts
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from bridge.errors import DataDependentError

MODES = ("jit", "vjp", "jvp", "vmap", "vmapvjp")
DTYPES = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "complex64",
    "complex128",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
)

#: Operators whose values are random or unset: shapes and dtypes are compared; their distributions
#: have tests of their own.
RANDOM = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "uniform",
        "rand_like",
        "randn_like",
        "randint_like",
        "randn",
        "randint",
        "rand",
        "randperm",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "nn.functional.dropout",
        "nn.functional.dropout2d",
        "nn.functional.dropout3d",
        "nn.functional.alpha_dropout",
        "nn.functional.feature_alpha_dropout",
        "nn.functional.rrelu",
        "nn.functional.fractional_max_pool2d",
        "nn.functional.fractional_max_pool3d",
        "svd_lowrank",
        "pca_lowrank",
        "nn.functional.scaled_dot_product_attention",
        "torch.ops.aten._efficient_attention_forward",
        "torch.ops.aten._flash_attention_forward",
        "nn.functional.multi_head_attention_forward",
    }
)
#: Of those, the ones that are random only with arguments that ask for it: whether a sample does
#: not.
_DETERMINED = {
    "nn.functional.scaled_dot_product_attention": lambda sample: not sample.kwargs.get("dropout_p"),
    # the eleventh parameter is dropout_p
    "nn.functional.multi_head_attention_forward": lambda sample: (
        not (sample.args[9] > 0 and sample.kwargs["training"])
    ),
}

#: Operators for which torch.func.jvp itself is wrong (the vjp of the vjp says so, finite
#: differences too): it forgets the tangent of nll_loss's and cross_entropy's weight, all of them in
#: the chunked loss and in scatter_reduce's products; cholesky_inverse's formula holds near the
#: identity alone, where the database's samples are.
_WRONG_FORWARD = frozenset(
    {
        "nn.functional.nll_loss",
        "nn.functional.cross_entropy",
        "nn.functional.linear_cross_entropy",
        "scatter_reduce",
        "cholesky_inverse",
    }
)


def _logcumsumexp_forward(p: Problem) -> Tensors:
    """The weighted means of the tangents: torch.func.jvp and the vjp of the vjp are both off, or
    NaN, far from the maximum.
    """
    (x,), (tangent,), (out,) = p.primals(p.values), p.tangents(), p.smooth(*p.primals(p.values))
    if not x.ndim:
        return out, tangent
    rows, means, tangents = (t.movedim(p.sample.args[0], -1) for t in (x, out, tangent))
    weights = (rows.unsqueeze(-2) - means.unsqueeze(-1)).exp().tril()
    return out, (weights * tangents.unsqueeze(-2)).sum(-1).movedim(-1, p.sample.args[0])


#: Operators whose forward mode is stated here, because PyTorch has no true one.
_STATED_FORWARD = {"logcumsumexp": _logcumsumexp_forward}


def _renorm_in_words(x: torch.Tensor, p: float, dim: int, maxnorm: float) -> torch.Tensor:
    norms = torch.linalg.vector_norm(
        x, p, [d for d in range(x.ndim) if d != dim % x.ndim], keepdim=True
    )
    return torch.where(norms > maxnorm, x * (maxnorm / (norms + 1e-7)), x)


#: Operators differentiated as another composition, because PyTorch's own derivative is NaN:
#: renorm's of complex numbers by the maximum.
_IN_WORDS = {"renorm": _renorm_in_words}

RIGHT = "right"


class NoTruth(Exception):
    """PyTorch itself has no answer here: nothing to compare with."""


class TookTooLong(Exception):
    """A cell's time is up."""


def operators() -> dict[str, Any]:
    """Every operator of the database that runs on dense CPU tensors, by its name and variant."""
    found: dict[str, Any] = {}
    for op in op_db:
        if op.supported_dtypes("cpu") and "sparse" not in op.name:
            found.setdefault(
                op.name + ("." + op.variant_test_name if op.variant_test_name else ""), op
            )
    return found


def draw(op: Any, dtype: torch.dtype, seed: int, limit: int = 400) -> list[Any]:
    """The operator's samples; another seed gives the same shapes with other values."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), limit))


def chosen(samples: list[Any], count: int) -> list[int]:
    """That many positions, spread evenly; a single one is the first whose tensors are not empty."""
    if not samples:
        return []
    if count == 1:
        return [next((i for i, s in enumerate(samples) if all(t.numel() for t in _tensors(s))), 0)]
    return sorted({round(k * (len(samples) - 1) / (count - 1)) for k in range(count)})


def _tensors(sample: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _inexact(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


Tensors = tuple[torch.Tensor, ...]


class Problem:
    """One sample as a function from tensors to tensors, with two sets of arguments.

    Args:
        op: the OpInfo.
        sample: one of its samples.
        other: the same sample with other values, for the second lane of a vmap.
    """

    def __init__(self, op: Any, sample: Any, other: Any) -> None:
        self.name, self.op, self.sample, self.run = op.name, op, sample, op.op
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.where = [i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)]
        # views are asked for their own elements
        self.values: Tensors = tuple(self.leaves[i].detach().clone() for i in self.where)
        if not self.values or any(t.layout != torch.strided for t in self.values):
            raise NoTruth
        second = [t.detach().clone() for t in _tensors(other)]
        like = len(second) == len(self.values)
        self.second: Tensors = tuple(
            b if like and b.shape == a.shape and b.dtype == a.dtype and _inexact(a) else a
            for a, b in zip(self.values, second if like else self.values)
        )
        self.random = op.name in RANDOM and not _DETERMINED.get(op.name, lambda s: False)(sample)
        self.out = self(*[t.clone() for t in self.values])
        #: for a problem written in float64, the narrow one that it is
        self.narrow: Problem | None = None
        #: which arguments and results have derivatives
        self.active = [i for i, t in enumerate(self.values) if _inexact(t)]
        self.outs = [i for i, t in enumerate(self.out) if _inexact(t)]

    def __call__(self, *values: torch.Tensor) -> Tensors:
        leaves = list(self.leaves)
        for i, t in zip(self.where, values):
            leaves[i] = t
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        out = self.run(first, *args, **kwargs)
        post = self.sample.output_process_fn_grad
        found = tuple(
            x for x in pytree.tree_leaves(post(out) if post else out) if isinstance(x, torch.Tensor)
        )
        if not found:
            raise NoTruth
        return found

    def smooth(self, *active: torch.Tensor) -> Tensors:
        """The function from the arguments that have derivatives to the results that have them."""
        values = list(self.values)
        for i, t in zip(self.active, active):
            values[i] = t
        out = self(*values)
        return tuple(out[i] for i in self.outs)

    def primals(self, values: Tensors) -> Tensors:
        return tuple(values[i] for i in self.active)

    def cotangents(self, seed: int = 7) -> Tensors:
        return _normal([self.out[i] for i in self.outs], seed)

    def tangents(self) -> Tensors:
        if self.narrow is not None:
            return verdicts.wide(self.narrow.tangents())
        return _normal(list(self.primals(self.values)), 7)

    def wide(self) -> Problem:
        """The same problem computed in float64, with the values, cotangents and tangents that the
        narrow dtype holds.
        """
        found = copy.copy(self)
        found.narrow = self
        found.leaves = [
            verdicts.WIDE.get(x, x) if isinstance(x, torch.dtype) else x for x in self.leaves
        ]
        found.values, found.second = verdicts.wide(self.values), verdicts.wide(self.second)
        return found

    def untied(self) -> Problem:
        """The same problem where no two of the first argument's elements are equal, so that only
        one order of them is right.
        """
        found = copy.copy(self)
        found.values, found.second = (
            (verdicts.untied(ts[0]), *ts[1:]) for ts in (self.values, self.second)
        )
        return found


def _normal(like: list[torch.Tensor], seed: int) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in like)


# -- truth -----------------------------------------------------------------------------------------
def _backward(p: Problem, primals: Tensors, cotangents: Tensors) -> Tensors:
    p = copy.copy(p)
    p.run = _IN_WORDS.get(p.name, p.run)
    xs = [t.detach().clone().requires_grad_() for t in primals]
    pairs = [(o, c.to(o.dtype)) for o, c in zip(p.smooth(*xs), cotangents) if o.requires_grad]
    if not pairs:
        raise NoTruth
    found = torch.autograd.grad([o for o, _ in pairs], xs, [c for _, c in pairs], allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, xs))


def _forward(p: Problem) -> Tensors:
    if p.name in _STATED_FORWARD:
        return _STATED_FORWARD[p.name](p)
    primals, tangents = p.primals(p.values), p.tangents()
    if p.name not in _WRONG_FORWARD:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            outs, moved = map(pytree.tree_leaves, torch.func.jvp(p.smooth, primals, tangents))
            # of some half results PyTorch has float32 ones
            return (*outs, *(t.to(o.dtype) for o, t in zip(outs, moved)))
    xs = [t.detach().clone().requires_grad_() for t in primals]
    outs = p.smooth(*xs)
    if not all(o.requires_grad for o in outs):
        raise NoTruth
    us = [torch.zeros_like(o).requires_grad_() for o in outs]
    pulled = torch.autograd.grad(outs, xs, us, create_graph=True, allow_unused=True)
    linear = [(g, t) for g, t in zip(pulled, tangents) if g is not None and g.requires_grad]
    if not linear:
        raise NoTruth
    found = torch.autograd.grad(
        [g for g, _ in linear], us, [t for _, t in linear], allow_unused=True
    )
    return tuple(o.detach() for o in outs) + tuple(
        torch.zeros_like(u) if g is None else g for g, u in zip(found, us)
    )


def _clones(values: Tensors) -> Tensors:
    return tuple(t.clone() for t in values)


def _lanes(first: Tensors, second: Tensors) -> Tensors:
    return tuple(torch.stack([a, b]) for a, b in zip(first, second))


def _two(p: Problem, run: Callable[[Tensors], Tensors]) -> tuple[Tensors, Tensors]:
    """What run gives for two lanes, and the second lane's values: the first's again where the two
    differ in shape.
    """
    first = run(p.values)
    try:
        second = run(p.second)
        if [t.shape for t in second] == [t.shape for t in first]:
            return _lanes(first, second), p.second
    except Exception:
        pass
    return _lanes(first, run(p.values)), p.values


@dataclasses.dataclass
class Question:
    """A cell's truth, the same computation written with a transforms' namespace, and what the
    verdict on an answer takes.
    """

    truth: Tensors
    ask: Callable[[Any], Any]
    terms: verdicts.Terms


def question(p: Problem, mode: str) -> Question:
    """The question a mode puts.

    Raises:
        NoTruth: PyTorch has no answer itself.
    """
    options = {"randomness": "different"} if p.random else {}
    terms = verdicts.Terms(p.name, p.random)
    if mode == "jit":
        terms.exact = lambda: p.wide()(*_clones(p.wide().values))
        terms.ranked = verdicts.ranked(p.name, p.sample, p.values[0])
        # batch norm's samples share what it writes to
        return Question(p.out, lambda F: F.jit(p)(*_clones(p.values)), terms)
    if mode == "vmap":
        truth, second = _two(p, lambda values: p(*_clones(values)))
        terms.exact = lambda: _lanes(
            *[p.wide()(*_clones(verdicts.wide(values))) for values in (p.values, second)]
        )
        terms.ranked = verdicts.ranked(
            p.name, p.sample, torch.stack([p.values[0], second[0]]), lanes=True
        )
        return Question(truth, lambda F: F.vmap(p, **options)(*_lanes(p.values, second)), terms)
    if not (p.active and p.outs and p.op.supports_autograd):
        raise NoTruth
    p = p.untied() if p.name in verdicts.RANKED else p
    try:
        if mode == "vjp":
            cts = p.cotangents()
            terms.exact = lambda: _backward(p.wide(), p.primals(p.wide().values), cts)
            truth = _backward(p, p.primals(p.values), cts)
            return Question(truth, lambda F: F.vjp(p.smooth, *p.primals(p.values))[1](cts), terms)
        if mode == "jvp":
            terms.exact = lambda: _forward(p.wide())
            return Question(
                _forward(p), lambda F: F.jvp(p.smooth, p.primals(p.values), p.tangents()), terms
            )
        seeds = iter((7, 8, 8, 8))
        truth, second = _two(
            p, lambda values: _backward(p, p.primals(values), p.cotangents(next(seeds)))
        )
        cts = _lanes(p.cotangents(7), p.cotangents(8))
        both = ((p.values, 7), (second, 8))
        terms.exact = lambda: _lanes(
            *[
                _backward(p.wide(), p.primals(verdicts.wide(values)), p.cotangents(k))
                for values, k in both
            ]
        )
    except (NoTruth, TookTooLong):
        raise
    except Exception as error:
        raise NoTruth from error
    n = len(p.active)

    def pulled(F: Any) -> Callable[..., Any]:
        return lambda *xs: F.vjp(p.smooth, *xs[:n])[1](tuple(xs[n:]))

    return Question(
        truth,
        lambda F: F.vmap(pulled(F), **options)(
            *_lanes(p.primals(p.values), p.primals(second)), *cts
        ),
        terms,
    )


# -- answers ---------------------------------------------------------------------------------------
def answer(F: Any, p: Problem, q: Question) -> str:
    """ "right", or why not."""
    try:
        found = verdicts.difference(q.ask(F), q.truth, q.terms)
    except TookTooLong:
        return "wrong: took too long"
    except Exception as error:
        if isinstance(error, DataDependentError):
            return (
                "impossible: the output's shape, or the program, depends on values, and XLA "
                "compiles for known shapes"
            )
        if "no counterpart" in str(error):
            return "impossible: " + str(error).partition("dtype: ")[2].partition(";")[0]
        return f"wrong: {type(error).__name__}: " + " ".join(str(error).split())[:160]
    return RIGHT if found is None else "wrong: " + found


class _Alarm:
    """Raises TookTooLong in the main thread when the seconds are over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def ring(*_: Any) -> None:
            raise TookTooLong

        self.before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


@dataclasses.dataclass
class Cell:
    """An operator in a mode and dtype: one answer for each namespace,
    its first that is not right.
    """

    operator: str
    dtype: str
    mode: str
    answers: dict[str, str]
    right: dict[str, int]
    samples: int
    seconds: float


def cells(
    key: str,
    op: Any,
    namespaces: dict[str, Any],
    dtype: str = "float32",
    modes: tuple[str, ...] = MODES,
    samples: int = 1,
    limit: float = 60,
) -> Iterator[Cell]:
    """One operator's cells, those for which PyTorch has an answer.

    Args:
        key, op: the operator.
        namespaces: name -> module with the transforms; one without ``jit`` is not asked in that
            mode.
        dtype, modes, samples: which cells, and how many samples for each.
        limit: seconds an answer may take.
    """
    kind = getattr(torch, dtype)
    if kind not in op.supported_dtypes("cpu"):
        return
    try:
        first, second = draw(op, kind, 0), draw(op, kind, 1)
    except Exception:  # samples that this build of PyTorch cannot make
        return
    second = second if len(second) == len(first) else first
    problems = []
    for k in chosen(first, samples):
        try:
            with _Alarm(limit):
                problems.append(Problem(op, first[k], second[k]))
        except Exception:
            continue
    for mode in modes:
        start = time.perf_counter()
        asked = {n: F for n, F in namespaces.items() if mode != "jit" or hasattr(F, "jit")}
        cell = Cell(
            key, dtype, mode, dict.fromkeys(asked, RIGHT), dict.fromkeys(asked, 0), 0, math.nan
        )
        for p in problems:
            try:
                with _Alarm(limit):
                    q = question(p, mode)
            except Exception:
                continue
            cell.samples += 1
            for n, F in asked.items():
                try:
                    with _Alarm(limit), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        found = answer(F, p, q)
                except TookTooLong:
                    found = "wrong: took too long"
                cell.right[n] += found == RIGHT
                if found != RIGHT and cell.answers[n] == RIGHT:
                    cell.answers[n] = found
        if cell.samples:
            cell.seconds = round(time.perf_counter() - start, 3)
            yield cell
