"""Element-wise comparison, logic and bits. Selection by a mask (where, masked_fill) is in
masking.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from bridge.lowering.common.builders import align, binary, fused, number
from bridge.lowering.registry import lowering

#: the comparison, and what it presumes of numbers: weights that are >= 0 and do not sum to 0,
#: degrees of freedom that are not <= 0, sums of windows that are not < 1e-11
_COMPARISONS: dict[str, tuple[Callable, bool | None]] = {
    "eq": (lax.eq, None),
    "ge": (lax.ge, True),
    "gt": (lax.gt, None),
    "le": (lax.le, False),
    "lt": (lax.lt, False),
    "ne": (lax.ne, True),
}
for _name, (_fn, _presumed) in _COMPARISONS.items():
    _compare = binary(_fn, boolean=True, primitive=True)
    lowering(f"aten.{_name}.Tensor")(_compare)
    lowering(f"aten.{_name}.Scalar", presumed=_presumed)(_compare)


# -- logic: operands keep their own dtypes; only their truth counts --------------------------------
def _logical(fn: Callable) -> Callable:
    @fused
    def mixed(a: Array, b: Array) -> Array:
        return fn(
            *align(*(x if x.dtype == np.bool_ else lax.ne(x, number(0, x.dtype)) for x in (a, b)))
        )

    return mixed


for _name, _fn in {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}.items():
    lowering(f"aten.logical_{_name}")(_logical(_fn))


# -- bits ------------------------------------------------------------------------------------------
def _integral(name: str, fn: Callable, bools: bool = True) -> Callable:
    def checked(a: Array, b: Array) -> Array:
        if a.dtype.kind not in ("iub" if bools else "iu"):
            raise NotImplementedError(
                f"self, other: {name} is not defined for {a.dtype}; expected integers"
                + " or bools" * bools
            )
        return fn(a, b)

    return binary(checked)


for _name, _fn in {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}.items():
    _names = [f"aten.bitwise_{_name}.{kind}" for kind in ("Tensor", "Scalar", "Scalar_Tensor")]
    lowering(*_names)(_integral(f"bitwise_{_name}", _fn))


def _shift_right(a: Array, b: Array) -> Array:
    # unsigned types shift in zeros, signed ones the sign; counts beyond the width (negative ones
    # too) shift everything out
    return (lax.shift_right_logical if a.dtype.kind == "u" else lax.shift_right_arithmetic)(a, b)


for _name, _fn in {"left": lax.shift_left, "right": _shift_right}.items():
    _names = [
        f"aten.bitwise_{_name}_shift.{kind}"
        for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ]
    _names += [f"aten.__{_name[0]}shift__.{kind}" for kind in ("Tensor", "Scalar")]
    lowering(*_names)(_integral(f"bitwise_{_name}_shift", _fn, bools=False))
lowering("aten.gcd")(_integral("gcd", jnp.gcd, bools=False))
lowering("aten.lcm")(_integral("lcm", jnp.lcm, bools=False))
