"""Every overload that has a lowering is run, on its own and un-jitted, and compared with PyTorch's
CPU kernel of the same overload.

Where values are drawn, their distribution is compared, and that a seed or a generator repeats them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import lowerings
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from bridge.convert import tensors
from bridge.lowering.registry import LOWERINGS, overload
from bridge.trace import tracing

pytestmark = pytest.mark.sweep

PLACES: dict[str, list[Any]] = json.loads(lowerings.PLACES.read_text())
ALL = [f for f in LOWERINGS if not str(f).startswith("test_")]  # other tests register some
RUN = [f for f in ALL if f in lowerings.CASES or str(f) in PLACES]
#: Whether the database is the one that the places are in: another torch's has other operators and
#: samples.
THERE = (
    f"torch=={torch.__version__.partition('+')[0]}\n"
    in (lowerings.PLACES.parents[2] / "constraints.txt").read_text()
)
ELSEWHERE = (
    "lowerings.json tells of the torch in constraints.txt; this one's database "
    "has no telling sample there"
)


def as_jax(tree: Any) -> Any:
    return pytree.tree_map(lambda x: tensors.to_jax(x) if isinstance(x, torch.Tensor) else x, tree)


def as_torch(tree: Any) -> list[torch.Tensor]:
    """The tensors, arrays and numbers of a result, as plain tensors."""
    leaves = [x for x in pytree.tree_leaves(tree) if x is not None]
    return [
        tensors.to_torch(x)
        if isinstance(x, jax.Array | np.ndarray)
        else torch.as_tensor(x).detach()
        for x in leaves
    ]


def call_of(func: Any) -> lowerings.Call:
    if func in lowerings.CASES:
        return lowerings.CASES[func]()
    try:
        return lowerings.call_of(func, PLACES[str(func)])
    except (KeyError, IndexError):
        if THERE:
            raise
        pytest.skip(ELSEWHERE)


def lowered(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    with tracing.root():
        out = LOWERINGS[func](*as_jax(args), **as_jax(kwargs))
    return as_torch(out)


def plain(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    return as_torch(lowerings.TRUTH.get(func, func)(*args, **kwargs))


# -- results that say the same in other numbers ----------------------------------------------------
def _eigenvectors(out: list[torch.Tensor], args: Any) -> list[torch.Tensor]:
    """Eigenvectors have any phase: the matrix that they make up."""
    values, vectors = out
    return [
        values,
        vectors @ torch.diag_embed(values).to(vectors.dtype) @ vectors.mH,
        vectors.mH @ vectors,
    ]


def _without_workspace(out: list[torch.Tensor], args: Any) -> list[torch.Tensor]:
    """The fourth is the kernel's own memory."""
    return out[:3]


def _forward_variables(out: list[torch.Tensor], args: Any) -> list[torch.Tensor]:
    """The kernel leaves the steps after a sample's end unwritten."""
    loss, alpha = out
    steps, labels = (torch.as_tensor(lengths) for lengths in args[2:4])
    inside = (torch.arange(alpha.shape[1]) < steps[:, None])[..., None] & (
        torch.arange(alpha.shape[2]) <= 2 * labels[:, None]
    )[:, None]
    return [loss, torch.where(inside, alpha, 0)]


SAID: dict[Any, Callable[[list[torch.Tensor], Any], list[torch.Tensor]]] = {
    overload("aten._linalg_eigh"): _eigenvectors,
    overload("aten._ctc_loss"): _forward_variables,
    overload("aten._ctc_loss.Tensor"): _forward_variables,
    overload("aten.mkldnn_rnn_layer"): _without_workspace,
}


#: Overloads whose results are zeros or nothing.
SILENT = {
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.new_zeros.default",
    "aten.zero.default",
    "aten._foreach_zero.default",
    "aten._efficientzerotensor.default",
    "aten._linalg_check_errors.default",
}


def says_something(out: list[torch.Tensor]) -> bool:
    """Whether there is a number other than 0 and NaN in a result."""
    return any(bool((t.nan_to_num(0, 1, 1) if t.is_floating_point() else t).any()) for t in out)


def of_one_distribution(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Kolmogorov's and Smirnov's test of two samples, at a level that equal distributions fail once
    in 20000.
    """
    a, b = (np.sort(x.double().flatten().numpy()) for x in (mine, theirs))
    assert a.size == b.size >= 1000
    at = np.concatenate([a, b])
    apart = np.abs(np.searchsorted(a, at, "right") - np.searchsorted(b, at, "right")).max() / a.size
    assert apart < 2.3 * math.sqrt(2 / a.size)


def test_nothing_is_left_out() -> None:
    assert [str(f) for f in ALL if f not in RUN] == []


def test_what_the_factorizations_report() -> None:
    info, check = torch.tensor([0, 2, 1], dtype=torch.int32), overload("aten._linalg_check_errors")
    for name in ("linalg.cholesky", "linalg.inv", "linalg.eigh"):
        said = []
        for run in (lowered, plain):
            run(check, (info * 0, name), {"is_matrix": False})
            with pytest.raises(torch.linalg.LinAlgError) as error:
                run(check, (info, name), {"is_matrix": False})
            said.append(str(error.value).split(": ")[:2])
        assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("func", [f for f in RUN if f not in lowerings.CHANCE], ids=str)
def test_as_the_kernel(func: Any) -> None:
    args, kwargs = call_of(func)
    mine, theirs = lowered(func, args, kwargs), plain(func, args, kwargs)
    assert len(mine) >= len(theirs)
    if not (says_something(theirs) or str(func) in SILENT or "empty" in str(func)):
        assert not THERE
        pytest.skip(ELSEWHERE)
    if func in SAID:
        mine, theirs = SAID[func](mine, args), SAID[func](theirs, args)
    for m, t in zip(mine, theirs, strict=False):
        assert m.shape == t.shape
        assert m.dtype == t.dtype
        if "empty" not in str(func):  # what happened to be in memory
            torch.testing.assert_close(m, t, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("func", [f for f in RUN if f in lowerings.CHANCE], ids=str)
def test_drawn_as_by_the_kernel(func: Any) -> None:
    args, kwargs = call_of(func)
    mine, theirs = lowered(func, args, kwargs), plain(func, args, kwargs)
    for m, t in zip(mine, theirs, strict=True):
        assert m.shape == t.shape
        assert m.dtype == t.dtype
        of_one_distribution(m, t)
        if "randperm" in str(func):
            assert torch.equal(m.sort().values, t.sort().values)


@pytest.mark.slow
@pytest.mark.parametrize("func", [f for f in RUN if f in lowerings.CHANCE], ids=str)
def test_a_seed_repeats_what_is_drawn(func: Any) -> None:
    def draw(seed: int, times: int = 1) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        args, kwargs = call_of(func)
        return [lowered(func, args, kwargs)[0] for _ in range(times)][-1]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(1, times=2))
    has_its_own = "generator" in call_of(func)[1]
    assert torch.equal(draw(1), draw(2)) == has_its_own
