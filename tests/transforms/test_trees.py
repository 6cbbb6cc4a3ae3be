"""Trees: flattening and back, beside torch's and JAX's own pytrees."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from agreement import same
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from bridge.convert import trees
from torchfunc_jax import grad, jit, vmap


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Particle:
    position: Any
    velocity: Any


class Box:
    """A node that only torch knows."""

    def __init__(self, inside: Any, label: str) -> None:
        self.inside, self.label = inside, label

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Box)
            and self.label == other.label
            and bool(self.inside == other.inside)
        )


@jax.tree_util.register_pytree_node_class
class Crate(Box):
    """A node that only JAX knows."""

    def tree_flatten(self) -> tuple[tuple[Any], str]:
        return (self.inside,), self.label

    @classmethod
    def tree_unflatten(cls, label: str, children: tuple[Any]) -> Crate:
        return cls(children[0], label)


pytree.register_dataclass(Particle, serialized_type_name="test_trees.Particle")
pytree.register_pytree_node(
    Box,
    lambda b: ([b.inside], b.label),
    lambda children, label: Box(*children, label),
    serialized_type_name="test_trees.Box",
)

leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.booleans())


def containers(
    children: st.SearchStrategy[Any], torch_only: bool = False
) -> st.SearchStrategy[Any]:
    keys = st.text("abc", min_size=1, max_size=2)
    every = [
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=3).map(collections.OrderedDict),
        st.tuples(children, children).map(lambda t: Pair(*t)),
        st.tuples(children, children).map(lambda t: Particle(*t)),
        children.map(lambda c: Box(c, "b")),
        st.lists(children, max_size=3).map(lambda c: collections.deque(c, maxlen=5)),
    ]
    return st.one_of(every if torch_only else [*every, children.map(lambda c: Crate(c, "c"))])


trees_of_all = st.recursive(leaves, containers, max_leaves=8)
trees_of_torch = st.recursive(leaves, lambda c: containers(c, torch_only=True), max_leaves=8)


@given(trees_of_all)
def test_unflatten_inverts_flatten(tree: Any) -> None:
    found, spec = trees.flatten(tree)
    assert trees.unflatten(spec, found) == tree
    assert type(trees.unflatten(spec, found)) is type(tree)
    assert trees.count(spec) == len(found)


@given(trees_of_torch)
def test_leaves_are_those_of_torch_in_torchs_order(tree: Any) -> None:
    assert trees.flatten(tree)[0] == pytree.tree_leaves(tree)


@given(trees_of_all, trees_of_all)
def test_specs_are_equal_exactly_when_structures_are(a: Any, b: Any) -> None:
    first, second = trees.flatten(a)[1], trees.flatten(b)[1]
    assert first == trees.flatten(copy.deepcopy(a))[1]
    assert hash(first) == hash(trees.flatten(copy.deepcopy(a))[1])
    zeros = lambda t: trees.map_leaves(lambda _: 0, t)
    same_structure = zeros(a) == zeros(b) and type(zeros(a)) is type(zeros(b))
    if first == second:
        assert same_structure


@given(trees_of_all)
def test_map_leaves_keeps_the_structure(tree: Any) -> None:
    mapped = trees.map_leaves(lambda x: (x,).__hash__(), tree)
    assert trees.flatten(mapped)[1] == trees.flatten(tree)[1]


@given(trees_of_all)
def test_an_int_spreads_over_every_tree(tree: Any) -> None:
    found, spec = trees.flatten(tree)
    assert trees.broadcast(0, spec) == [0] * len(found)
    assert trees.broadcast(None, spec) == [None] * len(found)
    assert trees.broadcast(trees.map_leaves(lambda _: 1, tree), spec) == [1] * len(found)


@pytest.mark.parametrize(
    "kind", [dict, collections.OrderedDict, lambda items: collections.defaultdict(int, items)]
)
def test_the_keys_of_a_prefix_may_come_in_another_order(kind: Any) -> None:
    """torch.func takes dims by position, whatever their keys: where that differs from the dims by
    key, it is refused.
    """
    prefix, tree = kind({"b": 1, "a": [1, 1]}), {"a": [2, 3], "b": (4, 5)}
    assert trees.broadcast(prefix, trees.flatten(tree)[1]) == pytree._broadcast_to_and_flatten(
        prefix, pytree.tree_flatten(tree)[1]
    )
    assert trees.broadcast(kind({"b": 1, "a": 0}), trees.flatten(tree)[1]) is None
    assert trees.broadcast(kind({"b": 1, "c": 1}), trees.flatten(tree)[1]) is None


@given(trees_of_torch, trees_of_torch)
def test_prefixes_spread_as_in_torch(prefix: Any, tree: Any) -> None:
    prefix = trees.map_leaves(lambda _: 1, prefix)
    expected = pytree._broadcast_to_and_flatten(prefix, pytree.tree_flatten(tree)[1])
    assert trees.broadcast(prefix, trees.flatten(tree)[1]) == expected


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_number_of_leaves(extra: int) -> None:
    found, spec = trees.flatten({"a": [1, 2], "b": (3,)})
    with pytest.raises(ValueError, match="leaves"):
        trees.unflatten(spec, (found + [0])[: len(found) + extra])


def test_dicts_keep_their_order() -> None:
    tree = {"b": 1, "a": 2}
    found, spec = trees.flatten(tree)
    assert found == [1, 2] and list(trees.unflatten(spec, found)) == ["b", "a"]
    assert spec != trees.flatten({"a": 1, "b": 2})[1]


def test_is_leaf() -> None:
    assert trees.flatten([1, (2, 3)], is_leaf=lambda x: isinstance(x, tuple))[0] == [1, (2, 3)]


def test_other_containers() -> None:
    default = collections.defaultdict(list, a=1)
    found, spec = trees.flatten(default)
    again = trees.unflatten(spec, found)
    assert again == default and again.default_factory is list
    assert trees.flatten({1, 2})[0] == [{1, 2}], "a set is a leaf"
    assert trees.flatten("text")[0] == ["text"]
    assert len(trees.flatten(torch.Size([1, 2]))[0]) == len(pytree.tree_leaves(torch.Size([1, 2])))
    for x in (torch.ones(2, 2), jnp.ones((2, 2))):
        assert trees.flatten(x)[1] is trees.LEAF


@pytest.mark.parametrize(
    "make",
    [Pair, Particle, lambda a, b: Box([a, b], "l"), lambda a, b: Crate((a, b), "l")],
    ids=["namedtuple", "dataclass", "torch's", "jax's"],
)
def test_every_node_through_the_transforms(make: Any) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    tree = make(x, y)
    doubled = lambda t: trees.map_leaves(lambda a: a * 2, t)
    for wrap in (vmap, lambda f: jit(vmap(f)), jit):
        found, spec = trees.flatten(wrap(doubled)(tree))
        assert spec == trees.flatten(tree)[1]
        same(found, [x * 2, y * 2])
    total = lambda t: sum((a**2).sum() for a in trees.flatten(t)[0])
    for wrap in (grad, lambda f: jit(grad(f))):
        found, spec = trees.flatten(wrap(total)(tree))
        assert spec == trees.flatten(tree)[1]
        same(found, [x * 2, y * 2])
