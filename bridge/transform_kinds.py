"""The kinds of transforms, and of the other levels of a trace or a record: a row for each.

What a level does to tensors is asked of its kind, never of a kind's name. The functions that run a
transform again are entered into its row by the file that has the transform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Kind:
    """One kind.

    Attributes:
        name: as errors say it.
        maps: whether its function runs once for several lanes.
        reverse, forward: whether it differentiates its function, and in which mode.
        leaves: whether a value that its function has kept has a value after it as well.
        in_texts: whether the text of a tensor inside of it is the tensor's value with the number
            of the level around it.
        again: runs a recorded transform on traced tensors. It takes the transform's function, the
            operands, and the params of the Begin and of the End; it returns the results, and a
            function that pulls back or pushes forward, or None.
        in_torch: runs a recorded transform in PyTorch (see ``bridge.record.in_torch.Level``). It
            takes the operands and the params of the Begin. None: PyTorch cannot.
        record: writes a call of this kind down that is neither a torch function nor a transform.
    """

    name: str
    maps: bool = False
    reverse: bool = False
    forward: bool = False
    leaves: bool = False
    in_texts: bool = False
    again: Callable[..., Any] | None = None
    in_torch: Callable[..., Any] | None = None
    record: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return self.name


VMAP = Kind("vmap", maps=True, leaves=True)
GRAD = Kind("grad", reverse=True, leaves=True, in_texts=True)
VJP = Kind("vjp", reverse=True, leaves=True, in_texts=True)
JACREV = Kind("jacrev", reverse=True, leaves=True, in_texts=True)
JVP = Kind("jvp", forward=True, leaves=True, in_texts=True)
LINEARIZE = Kind("linearize", forward=True, leaves=True)
JET = Kind("jet", forward=True)
FUNCTIONALIZE = Kind("functionalize")
#: the forward of an autograd.Function, whose own rules give the derivatives
FUNCTION = Kind("function")
#: what the backward pass computes again
CHECKPOINT = Kind("checkpoint", leaves=True)
#: a whole trace
ROOT = Kind("root")
#: a step that runs several times
LOOP = Kind("loop")
#: of equal blocks, the one that is traced for others
BLOCK = Kind("block")
#: takes back what is written to tensors of outer levels, and does nothing else
PLAIN = Kind("plain")

_ALL = (VMAP, GRAD, VJP, JACREV, JVP, LINEARIZE, JET)
MAPPING = frozenset([kind for kind in _ALL if kind.maps])
REVERSE = frozenset([kind for kind in _ALL if kind.reverse])
FORWARD = frozenset([kind for kind in _ALL if kind.forward])
DIFFERENTIATING = REVERSE | FORWARD
#: torch.func has a level for each of these, which a tensor's text counts
NUMBERED = MAPPING | DIFFERENTIATING
