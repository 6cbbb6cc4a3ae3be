"""Ensemble: its members are the modules that were put in, however many there are, and it changes
and is kept as a list is.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from torchfunc_jax.ensemble import Ensemble, Trainer


class Net(nn.Module):
    """Parameters and buffers of several dtypes, tied weights, and a frozen one."""

    def __init__(self, width: int = 4, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, stride=stride)
        self.norm = nn.BatchNorm2d(width)
        self.one, self.two = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.two.weight = self.one.weight
        self.narrow = nn.Parameter(torch.randn(width).bfloat16(), requires_grad=False)
        self.register_buffer("mask", torch.rand(width) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).mean((2, 3))
        return torch.where(self.mask, self.two(self.one(x).tanh()), x) * self.narrow.float()


def equal(a: nn.Module | dict[str, Any], b: nn.Module | dict[str, Any]) -> bool:
    one, two = (x.state_dict() if isinstance(x, nn.Module) else x for x in (a, b))
    return list(one) == list(two) and all(
        one[k].dtype == two[k].dtype and torch.equal(one[k], two[k]) for k in one
    )


def test_a_member_depends_on_its_seed_and_index_alone():
    small, large, other = (
        Ensemble(Net, 2, seed=3),
        Ensemble(Net, 5, seed=3),
        Ensemble(Net, 2, seed=4),
    )
    assert [equal(small[i], large[i]) for i in range(2)] == [True, True]
    assert not equal(large[0], large[1]) and not equal(small[0], other[0])


def test_the_generator_goes_on_as_if_nothing_was_drawn():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    Ensemble(Net, 3).reseed(1, seed=2)
    assert torch.equal(torch.rand(3), expected)


def test_members_are_the_modules():
    modules = [Net() for _ in range(3)]
    modules[1].norm.running_mean += 1
    ens = Ensemble.of(modules)
    assert len(ens) == 3 and all(equal(a, b) for a, b in zip(ens, modules, strict=True))
    assert (
        all(equal(ens.state_dict(i), m.state_dict()) for i, m in enumerate(modules))
        and len(ens.state_dicts()) == 3
    )
    assert equal(ens[-1], modules[2]) and type(ens[0]) is Net
    member = ens[0]
    assert member.two.weight is member.one.weight and not member.narrow.requires_grad
    assert (
        ens.params["conv.weight"].shape == (3, 4, 1, 3, 3)
        and ens.params["narrow"].dtype == "bfloat16"
    )
    with torch.no_grad():
        modules[0].conv.weight.zero_()
        ens[0].conv.weight.zero_()
    assert np.asarray(ens.params["conv.weight"])[0].any()  # no memory is shared
    for i in (3, -4):
        with pytest.raises(IndexError, match="3 members"):
            ens[i]


def test_changes():
    ens = Ensemble(Net, 3, seed=0)
    before, more = list(ens), [Net(), Net()]
    ens.append(*more)
    assert len(ens) == 5 and all(equal(a, b) for a, b in zip(ens, before + more, strict=True))
    ens.drop([0, -1])
    assert (
        all(equal(a, b) for a, b in zip(ens, [before[1], before[2], more[0]], strict=True))
        and len(ens) == 3
    )
    kept = ens.copy()
    ens.reseed([1], seed=7)
    assert (
        equal(ens[0], before[1])
        and equal(ens[1], Ensemble(Net, 2, seed=7)[1])
        and equal(ens[2], more[0])
    )
    assert equal(kept[1], before[2])
    with pytest.raises(ValueError, match="positive multiple"):
        ens.drop(range(3))
    with pytest.raises(ValueError, match="function that makes a member"):
        Ensemble.of(before).reseed(0, 1)


def test_a_file_keeps_an_ensemble(tmp_path):
    ens = Ensemble(Net, 3, seed=1)
    ens.save(tmp_path / "ens.pt")
    loaded = Ensemble.load(tmp_path / "ens.pt", Net)
    assert (
        len(loaded) == 3
        and all(equal(a, b) for a, b in zip(loaded, ens, strict=True))
        and equal(loaded.template, ens[0])
    )
    loaded.reseed(0, seed=1)
    assert equal(loaded[0], ens[0])
    with pytest.raises(
        ValueError, match=r"'narrow' is \[3, 4\] in the file of 3 members, and \[5\] in a member"
    ):
        Ensemble.load(tmp_path / "ens.pt", lambda: Net(5))
    torch.save({}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"that Ensemble.save has written"):
        Ensemble.load(tmp_path / "other.pt", Net)


def with_extra(value: Any) -> nn.Module:
    net = Net()
    net.extra = value
    return net


def scaled(scale: float) -> Any:
    return lambda x: x * scale


def frozen() -> nn.Module:
    net = Net()
    net.conv.weight.requires_grad_(False)
    return net


DIFFERENT = {
    "a shape": (Net(), Net(5), r"'conv.*4.* in member 0, .*5.* in member 1"),
    "an attribute": (
        Net(),
        Net(stride=2),
        r"'conv.stride' is \(1, 1\) in member 0, \(2, 2\) in member 1",
    ),
    "a class": (
        nn.Sequential(nn.ReLU()),
        nn.Sequential(nn.Tanh()),
        "'0' is ReLU in member 0, Tanh in member 1",
    ),
    "a missing parameter": (
        nn.Linear(2, 2),
        nn.Linear(2, 2, bias=False),
        "'bias' is .*2.* in member 0, .* in member 1",
    ),
    "a mode": (Net(), Net().eval(), "'training' is True in member 0, False in member 1"),
    "requires_grad": (Net(), frozen(), "'conv.weight' .* without requires_grad in member 1"),
    "a tensor that is no buffer": (
        with_extra(torch.ones(2)),
        with_extra(torch.zeros(2)),
        "'extra' is neither a parameter nor a buffer",
    ),
    "a setting in a dict": (
        with_extra({"scale": [1.0, 2.0]}),
        with_extra({"scale": [1.0, 3.0]}),
        "'extra' is .*2.0.* in member 0, .*3.0",
    ),
    "a function": (with_extra(torch.relu), with_extra(torch.tanh), "'extra' is <.* relu.*tanh"),
    "a function of its own": (
        with_extra(scaled(1.0)),
        with_extra(scaled(2.0)),
        "'extra' is <function",
    ),
    "a partial function": (
        with_extra(partial(torch.mul, other=1)),
        with_extra(partial(torch.mul, other=2)),
        "'extra' is functools",
    ),
    "an array": (with_extra(np.ones(2)), with_extra(np.zeros(2)), "'extra' is array"),
    "tensors in a list": (
        with_extra([torch.ones(2)]),
        with_extra([torch.zeros(2)]),
        r"'extra' is \[tensor",
    ),
    "a class in an attribute": (
        with_extra(nn.ReLU),
        with_extra(nn.Tanh),
        "'extra' is ReLU in member 0, Tanh in member 1",
    ),
    "a dtype": (
        Net(),
        Net().double(),
        (
            "'narrow' is torch.bfloat16 of shape .* torch.float64|'conv.weight' "
            "is torch.float32 of shape"
        ),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_architecture_is_refused(name):
    one, two, words = DIFFERENT[name]
    with pytest.raises(ValueError, match=words):
        Ensemble.of([one, two])


def test_parametrized_layers_are_one_architecture():
    def normed() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    ens = Ensemble(normed, 2)
    assert equal(Ensemble.of(list(ens))[1], ens[1]) and sorted(ens.params) == sorted(
        n for n, _ in normed().named_parameters()
    )
    with pytest.raises(ValueError, match=r"'.*' is .* in member 0, .* in member 1"):
        Ensemble.of([normed(), nn.Linear(3, 2)])


@pytest.mark.parametrize("hook", ["spectral_norm", "weight_norm", "pruning"])
def test_tensors_that_hooks_compute(hook):
    """Old spectral_norm and weight_norm, and pruning: a member's weight is its own, also before it
    is called.
    """
    make = {
        "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
        "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        "pruning": lambda: prune.l1_unstructured(nn.Linear(3, 2), "weight", 0.5),
    }[hook]
    modules, x = [make() for _ in range(3)], torch.randn(4, 3)
    for module in modules:
        module(x)
    ens = Ensemble.of(modules)
    for member, module in zip(ens, modules, strict=True):
        assert equal(member, module)
        torch.testing.assert_close(
            member.weight.detach(),
            module.eval()(torch.eye(3)).T.detach() - module.bias[:, None].detach(),
        )
    torch.testing.assert_close(ens.logits(x), torch.stack([module(x) for module in modules]))


EQUAL: dict[str, Any] = {
    "tensors": lambda: torch.ones(2),
    "a dict of lists": lambda: {"a": [1, np.ones(2), torch.zeros(1)]},
    "NaN": lambda: [math.nan],
    "a function": lambda: scaled(2.0),
    "a partial function": lambda: partial(torch.mul, other=2),
    "a generator": torch.Generator,
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_attributes_are_allowed(name):
    assert len(Ensemble.of([with_extra(EQUAL[name]()), with_extra(EQUAL[name]())])) == 2


class Remembers(nn.Linear):
    """Stores what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last


def test_what_members_store_does_not_stay_in_the_ensemble():
    """Neither from their calls before, nor from those in programs, in which it has no values."""
    modules, x = [Remembers(3, 2) for _ in range(2)], torch.randn(4, 3)
    for module in modules:
        module(x)
    ens = Ensemble.of(modules)
    trainer = Trainer(
        ens,
        lambda member, x: member(x).square().mean() + member.last.square().mean(),
        lr=0.0,
        loss_of="module",
    )
    expected = torch.stack([2 * module(x).square().mean() for module in modules]).detach()
    torch.testing.assert_close(trainer.step(x), expected)
    torch.testing.assert_close(
        ens.logits(x), torch.stack([module(x) for module in modules]).detach()
    )
    for member, module in zip(ens, modules, strict=True):
        assert torch.equal(member(x), module(x)) and member.last.shape == (4, 2)
    assert not hasattr(
        Trainer(Ensemble(lambda: Remembers(3, 2), 2), lambda out: out.sum()).ensemble[0], "last"
    )


REFUSED = {
    "no members": (lambda: Ensemble(Net, 0), ValueError, "positive multiple"),
    "an empty list": (lambda: Ensemble.of([]), ValueError, "positive multiple"),
    "no module": (
        lambda: Ensemble(lambda: 3, 2),
        TypeError,
        "expected an nn.Module as member 0, got int",
    ),
    "a compiled module": (
        lambda: Ensemble(lambda: torch.compile(nn.Linear(3, 2)), 2),
        TypeError,
        "expected the module itself",
    ),
    "a lazy module": (lambda: Ensemble(lambda: nn.LazyLinear(2), 2), TypeError, "not initialized"),
    "other axes": (
        lambda: Ensemble(Net, 2, mesh=jax.make_mesh((1,), ("x",))),
        ValueError,
        r'axes "member" and "data"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


class Several(nn.Module):
    """Takes two arguments, and returns a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        return {"out": self.layer(x) * scale, "pair": (x.sum(), x.argmax(-1))}


@pytest.mark.parametrize("chunk", [None, 2])
def test_logits_are_the_members_outputs_in_evaluation_mode(chunk):
    ens, x = Ensemble(lambda: nn.Sequential(Net(), nn.Dropout(0.5)), 3), torch.randn(5, 1, 6, 6)
    for _ in range(2):
        found = ens.logits(x, chunk=chunk)
        torch.testing.assert_close(
            found, torch.stack([copy.deepcopy(m).eval()(x) for m in ens]), rtol=1e-5, atol=1e-6
        )
    ens.take([2, 1])
    torch.testing.assert_close(ens.logits(x, chunk=chunk), found[[2, 1]])


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_logits_of_several_arguments_and_results(kind):
    ens, x, scale = Ensemble(Several, 2), torch.randn(4, 3), torch.tensor(2.0)
    found = ens.logits((x, scale) if kind == "tuple" else {"x": x, "scale": scale})
    expected = [m(x, scale) for m in ens]
    torch.testing.assert_close(found["out"], torch.stack([e["out"] for e in expected]))
    torch.testing.assert_close(
        found["pair"][1].long(), torch.stack([e["pair"][1] for e in expected])
    )
