"""``Ensemble``: many torch modules of one architecture, whose parameters and buffers are stacked in jax.Arrays over one or many devices."""
from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from torch import nn

import bridge
from bridge import compiling
from bridge.convert import tensors
from torchfunc_jax.ensemble.meshes import DATA, MEMBER, Placement, gathered, row


@contextlib.contextmanager
def _seeded(seed: int, index: int) -> Iterator[None]:
    """While entered, torch draws what belongs to this member alone; afterwards its generators go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1))
        yield


class Ensemble:
    """``n`` members."""

    def __init__(self, make_member: Callable[[], nn.Module], n: int, seed: int = 0, mesh: Mesh | None = None) -> None:
        def make(i: int) -> nn.Module:
            with _seeded(seed, i):
                return make_member()

        self._build(make, n, mesh)

    @classmethod
    def of(cls, modules: Sequence[nn.Module], mesh: Mesh | None = None) -> Ensemble:
        made = cls.__new__(cls)
        made._build(list(modules).__getitem__, len(modules), mesh)
        return made

    def _build(self, make: Callable[[int], nn.Module], n: int, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.placement = Placement(mesh)
        self.placement.check(n)
        self.template = copy.deepcopy(make(0))
        self._n = n
        names = {name for name, _ in self.template.named_parameters()}

        def member(i: int) -> dict[str, jax.Array]:
            module = self.template if i == 0 else make(i)
            return {**bridge.params(module), **bridge.buffers(module)}

        state = self.placement.stacked(n, member)
        self.params = {name: x for name, x in state.items() if name in names}
        self.buffers = {name: x for name, x in state.items() if name not in names}

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> nn.Module:
        i = operator.index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"expected the index of one of {len(self)} members, got {i}")
        i %= len(self)
        params, buffers = ({name: row(x, i) for name, x in some.items()} for some in (self.params, self.buffers))
        return bridge.load(copy.deepcopy(self.template), params, buffers)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))

    def state_dict(self, i: int) -> dict[str, torch.Tensor]:
        return self[i].state_dict()

    def state_dicts(self) -> list[dict[str, torch.Tensor]]:
        return [self.state_dict(i) for i in range(len(self))]

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Every member's output in evaluation mode: [n, B, ...]."""
        place = self.placement

        def one(params: Any, buffers: Any, x: Any) -> Any:
            return bridge.call(self.template, params, buffers, (x,), training=False)[0]

        spread = DATA if inputs.shape[0] % place.size(DATA) == 0 else None
        every = place.over(
            jax.vmap(one, (0, 0, None)), (place.spec(MEMBER), place.spec(MEMBER), place.spec(spread)), place.spec(MEMBER, spread), False
        )
        with compiling.correctly():
            return tensors.to_torch(jax.numpy.asarray(gathered(jax.jit(every)(self.params, self.buffers, place.put(inputs, spread)))))
