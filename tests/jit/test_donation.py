"""jit(donate=...): where results are, which memory is written to, and that no number is wrong for
it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchfunc_jax import jit

N = 5000


def state(value: float = 0.0) -> torch.Tensor:
    return torch.full((N,), value)


class Cache:
    """An object, and no tree: what transformers' caches are."""

    def __init__(self) -> None:
        self.keys, self.length = state(), torch.tensor(0)


def returned(cache: torch.Tensor, x: torch.Tensor) -> Any:
    return cache + x


def written_and_returned(cache: torch.Tensor, x: torch.Tensor) -> Any:
    cache[1:3].add_(x[1:3])
    return cache


@pytest.mark.parametrize("function", [returned, written_and_returned])
@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: {"a": [t, state(3.0)]}], ids=["a tensor", "a tree"]
)
def test_from_the_second_call_on_results_take_the_arguments_memory(
    function: Any, wrap: Callable[[Any], Any]
) -> None:
    def step(tree: Any, x: torch.Tensor) -> Any:
        return (
            {"a": [function(t, x) for t in tree["a"]]}
            if isinstance(tree, dict)
            else function(tree, x)
        )

    def first(tree: Any) -> torch.Tensor:
        return tree["a"][0] if isinstance(tree, dict) else tree

    fast, x, tree = jit(step, donate=0), torch.arange(float(N)), wrap(state())
    expected, places, before = first(step(wrap(state()), x)), [], tree
    for k in range(4):
        tree = fast(before := tree, x)
        torch.testing.assert_close(first(tree), (k + 1) * expected)
        places.append(first(tree).data_ptr())
    assert len(set(places)) == 1 and first(before).numel() == 0


def test_a_tensor_or_an_object_that_is_written_to_stays_what_it_is() -> None:
    def step(cache: Any, x: torch.Tensor) -> torch.Tensor:
        cache.keys.add_(x)
        cache.length.add_(1)
        return cache.keys.sum()

    def write(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return t.add_(x).sum()

    cache, x, alone, places = Cache(), torch.ones(N), state(), []
    fast, fast_alone = jit(step, donate=0), jit(write, donate=0)
    for k in range(4):
        assert fast(cache, x) == fast_alone(alone, x) == (k + 1) * N
        assert cache.length == k + 1
        assert torch.equal(cache.keys, state(k + 1.0)) and torch.equal(alone, state(k + 1.0))
        places.append((cache.keys.data_ptr(), alone.data_ptr()))
    assert len(set(places)) == 1
    cache.keys = state(7.0)
    assert fast(cache, x) == 8 * N and torch.equal(cache.keys, state(8.0))
    cache.keys.fill_(1)
    assert fast(cache, x) == 2 * N


def test_a_view_of_a_donated_tensor_keeps_its_memory() -> None:
    fast, x = jit(returned, donate=0), torch.ones(N)
    t = fast(state(), x)
    view = t[5:]
    for _ in range(3):
        t = fast(t, x)
    address = t.data_ptr()
    del t
    gc.collect()
    others = [fast(state(9.0), x) for _ in range(8)]
    assert torch.equal(view, state(4.0)[5:]) and all(o.data_ptr() != address for o in others)


@pytest.mark.parametrize(
    "other", [lambda t: t, lambda t: t[: N // 2], lambda t: t.view(2, -1)[1], lambda t: t.detach()]
)
def test_memory_that_another_argument_shares_is_not_written_to(other: Any) -> None:
    def shifted(t: torch.Tensor, u: torch.Tensor) -> Any:
        return t + 1, u.flip(0) * 2

    fast, first = jit(shifted, donate=0), jit(returned, donate=0)
    t = first(torch.arange(float(N)), torch.ones(N))
    expected, u = shifted(t.clone(), other(t.clone())), other(t)
    torch.testing.assert_close(fast(t, u), expected)
    captured = first(torch.arange(float(N)), torch.ones(N))
    expected = captured + captured.flip(0)
    torch.testing.assert_close(jit(lambda t: t + captured.flip(0), donate=0)(captured), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.unsqueeze_(0),
        lambda t: t.resize_(N // 2),
        lambda t: t.mul_(3),
        lambda t: t.requires_grad_(),
        lambda t: setattr(t, "data", state(5.0)),
    ],
)
def test_results_that_were_changed_are_donated_right(change: Any) -> None:
    fast = jit(lambda t: t * 2 + 1, donate=0)
    t = fast(fast(state(1.0)))
    change(t)
    expected = t.detach() * 2 + 1
    with torch.no_grad():
        found = fast(t)
    torch.testing.assert_close(found, expected)


def test_an_index_that_is_out_of_range_empties_what_was_donated() -> None:
    fast = jit(lambda t, i: t.index_fill(0, i, 1.0), donate=0)
    t = fast(fast(state(), torch.tensor([1])), torch.tensor([2]))
    with pytest.raises(IndexError):
        fast(t, torch.tensor([N]))
    assert t.numel() == 0


def test_a_donated_tensor_of_torchs_is_unchanged_and_may_be_given_again() -> None:
    fast, t = jit(returned, donate=0), state()
    for _ in range(3):
        assert torch.equal(fast(t, torch.ones(N)), state(1.0)) and torch.equal(t, state())


def test_gradients_with_donated_arguments() -> None:
    fast = jit(lambda t, x: (t * x).sin(), donate=0)
    t = jit(returned, donate=0)(state(1.0), torch.ones(N)).requires_grad_()
    x = torch.linspace(0, 1, N)
    fast(t, x).sum().backward()
    torch.testing.assert_close(t.grad, x * (t.detach() * x).cos())
