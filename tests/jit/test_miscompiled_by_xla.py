"""Two programs that jaxlib 0.10.2 and 0.11.0 compile wrongly for x86 CPUs, in every way that we
have of running one.

One comes out with a wrong last row, the other ends the process: a process of its own runs them all,
and has XLA write down what it made of each, so that a way whose numbers happen to be right is seen
to be compiled correctly too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import bridge
import torchfunc_jax
from bridge import compiling
from bridge.flax import NNX, Linen
from torchfunc_jax import grad, jacfwd, jit, jvp, linearize, vjp, vmap


@dataclasses.dataclass
class Program:
    """A function of one lane, its arguments for all lanes, and how many vmaps that takes."""

    function: Callable[..., torch.Tensor]
    args: tuple[torch.Tensor, ...]
    depth: int

    def mapped(self, transforms: Any = torchfunc_jax) -> Callable[..., torch.Tensor]:
        found = self.function
        for _ in range(self.depth):
            found = transforms.vmap(found)
        return found

    def loss(self, transforms: Any = torchfunc_jax) -> Callable[..., torch.Tensor]:
        mapped = self.mapped(transforms)
        return lambda *args: (mapped(*args) ** 2).sum()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(x.numpy()) for x in self.args)

    @property
    def module(self) -> nn.Module:
        mapped = self.mapped()

        class Module(nn.Module):
            def __init__(self, first: torch.Tensor) -> None:
                super().__init__()
                self.first = nn.Parameter(first)

            def forward(self, *others: torch.Tensor) -> torch.Tensor:
                return mapped(self.first, *others)

        return Module(self.args[0])


def _programs() -> dict[str, Program]:
    torch.manual_seed(0)
    rows, matrix, blocks = (
        torch.randn(32769, 3),
        torch.randn(3, 3),
        torch.randn(2, 3, 1, 2, 2, 8, 8, 8),
    )
    return {
        "rows": Program(lambda r: ((matrix @ r) ** 2).sum(), (rows,), 1),
        "ranks": Program(lambda a, b: (a * b).sum(0), (blocks[0], blocks[1]), 3),
    }


def _backward(run: Callable[..., torch.Tensor], p: Program) -> torch.Tensor:
    first = p.args[0].clone().requires_grad_()
    run(first, *p.args[1:]).sum().backward()
    return first.grad


def _squared(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: run(*args) ** 2


def _backward_of_module(
    run: Callable[..., torch.Tensor], module: nn.Module, p: Program
) -> torch.Tensor:
    (run(*p.args[1:]) ** 2).sum().backward()
    return next(module.parameters()).grad


def _in_a_thread(run: Callable[..., Any], *args: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(*args)))
    thread.start()
    thread.join()
    return found[0]


def _thrice(run: Callable[..., Any], *args: Any) -> Any:
    return [run(*args) for _ in range(3)][-1]


def _tangent(run: Callable[..., Any], p: Program) -> Any:
    return jvp(run, p.args, p.args)[1]


def _user_scope(run: Callable[..., Any], *args: Any) -> Any:
    with compiling.correctly():
        return run(*args)


def _warned(run: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(*args)


def _lowered(jitted: Any, p: Program) -> Any:
    captured = [jnp.asarray(c.cell_contents.numpy()) for c in p.function.__closure__ or ()]
    compiled = jitted.lower(*p.args).compile()
    with jax.enable_x64(True):
        # None: the program draws no random numbers
        return compiled([*p.arrays, *captured], None)[0]


VALUES: dict[str, Callable[[Program], Any]] = {
    "vmap": lambda p: p.mapped()(*p.args),
    "vmap, again": lambda p: _thrice(p.mapped(), *p.args),
    "vmap, in a thread": lambda p: _in_a_thread(p.mapped(), *p.args),
    "vmap by chunks": lambda p: vmap(
        Program(p.function, (), p.depth - 1).mapped(), chunk_size=p.args[0].shape[0]
    )(*p.args),
    "nested vmap": lambda p: vmap(p.mapped())(*[x[None] for x in p.args])[0],
    "jit": lambda p: jit(p.mapped())(*p.args),
    "jit inside": lambda p: vmap(jit(Program(p.function, (), p.depth - 1).mapped()))(*p.args),
    "jit that donates": lambda p: _warned(jit(p.mapped(), donate=0), *[x.clone() for x in p.args]),
    "jit, in a thread": lambda p: _in_a_thread(jit(p.mapped()), *p.args),
    "jit, lowered": lambda p: _lowered(jit(p.mapped()), p),
    "jax.Arrays": lambda p: p.mapped()(*p.arrays),
    "jax.Arrays, jit": lambda p: jit(p.mapped())(*p.arrays),
    "under jax.vmap": lambda p: jax.vmap(p.mapped())(*[a[None] for a in p.arrays])[0],
    "functional_call": lambda p: torchfunc_jax.functional_call(
        p.module, {"first": p.args[0]}, p.args[1:]
    ),
    "jit of functional_call": lambda p: jit(
        lambda x: torchfunc_jax.functional_call(p.module, {"first": x}, p.args[1:])
    )(p.args[0]),
    "bridge.call": lambda p: bridge.call(p.module, bridge.params(p.module), {}, p.arrays[1:])[0],
    "Linen": lambda p: Linen(p.module).apply({"params": bridge.params(p.module)}, *p.arrays[1:]),
    "NNX": lambda p: NNX(p.module)(*p.arrays[1:]),
    "nnx.jit in our scope": lambda p: _user_scope(
        nnx.jit(lambda m, *xs: m(*xs)), NNX(p.module), *p.arrays[1:]
    ),
    "jax.jit in our scope": lambda p: _user_scope(jax.jit(p.mapped()), *p.arrays),
    "jax.jit with our options": lambda p: _warned(
        jax.jit(p.mapped(), compiler_options=compiling.options()), *p.arrays
    ),
    "vjp": lambda p: vjp(p.mapped(), *p.args)[0],
    "linearize": lambda p: linearize(p.mapped(), *p.args)[0],
}
GRADIENTS: dict[str, Callable[[Program], Any]] = {
    "grad": lambda p: grad(p.loss())(*p.args),
    "grad, again": lambda p: _thrice(grad(p.loss()), *p.args),
    "jit of grad": lambda p: jit(grad(p.loss()))(*p.args),
    "vmap of grad": lambda p: vmap(grad(p.loss()))(*[x[None] for x in p.args])[0],
    "grad of jit": lambda p: grad(jit(p.loss()))(*p.args),
    "vjp, pulled later": lambda p: vjp(p.loss(), *p.args)[1](torch.tensor(1.0))[0],
    "backward": lambda p: _backward(_squared(p.mapped()), p),
    "backward, again": lambda p: _thrice(_backward, _squared(p.mapped()), p),
    "backward of jit": lambda p: _backward(_squared(jit(p.mapped())), p),
    "backward of a module": lambda p: _backward_of_module(m := p.module, m, p),
    "backward of a jitted module": lambda p: _backward_of_module(jit(m := p.module), m, p),
    "jax.Arrays": lambda p: grad(p.loss())(*p.arrays),
    "jit, jax.Arrays": lambda p: jit(grad(p.loss()))(*p.arrays),
}
TANGENTS: dict[str, Callable[[Program], Any]] = {
    "jvp": lambda p: _tangent(p.mapped(), p),
    "jvp, again": lambda p: _thrice(_tangent, p.mapped(), p),
    "jit of jvp": lambda p: jit(lambda *args: jvp(p.mapped(), args, args)[1])(*p.args),
    "jvp of jit": lambda p: _tangent(jit(p.mapped()), p),
    "jacfwd": lambda p: jacfwd(lambda t: p.mapped()(*[x * t for x in p.args]))(torch.tensor(1.0)),
    "linearize, pushed later": lambda p: linearize(p.mapped(), *p.args)[1](*p.args),
}
SECOND: dict[str, Callable[[Program], Any]] = {
    "grad of grad": lambda p: grad(lambda *args: grad(p.loss())(*args).sum())(*p.args),
    "jit of grad of grad": lambda p: jit(grad(lambda *args: grad(p.loss())(*args).sum()))(*p.args),
    "backward of grad": lambda p: _backward(grad(p.loss()), p),
    "backward of jit of grad": lambda p: _backward(jit(grad(p.loss())), p),
    "backward of backward": lambda p: _backward(
        lambda *args: torch.autograd.grad(p.loss()(*args), args[0], create_graph=True)[0], p
    ),
    "jvp of grad": lambda p: jvp(
        grad(p.loss()), p.args, (torch.ones_like(p.args[0]), *map(torch.zeros_like, p.args[1:]))
    )[1],
}
KINDS = {"value": VALUES, "gradient": GRADIENTS, "tangent": TANGENTS, "second derivative": SECOND}
WAYS = [(kind, way) for kind, ways in KINDS.items() for way in ways]
FAST = [
    ("value", "vmap"),
    ("value", "nested vmap"),
    ("value", "jit"),
    ("value", "functional_call"),
    ("value", "jax.Arrays"),
    ("value", "bridge.call"),
    ("value", "Linen"),
    ("value", "jax.jit in our scope"),
    ("gradient", "grad"),
    ("gradient", "backward"),
    ("gradient", "backward of jit"),
    ("tangent", "jvp"),
    ("second derivative", "backward of grad"),
]


def _truth(p: Program) -> dict[str, torch.Tensor]:
    p = Program(p.function, tuple(x.double() for x in p.args), p.depth)
    if p.depth == 1:
        (matrix,) = [c.cell_contents.double() for c in p.function.__closure__]
        p.function = lambda r: ((matrix @ r) ** 2).sum()
    return {
        "value": p.mapped(torch.func)(*p.args),
        "gradient": torch.func.grad(p.loss(torch.func))(*p.args),
        "tangent": torch.func.jvp(p.mapped(torch.func), p.args, p.args)[1],
        "second derivative": torch.func.grad(
            lambda *args: torch.func.grad(p.loss(torch.func))(*args).sum()
        )(*p.args),
    }


def only_products(program: str) -> bool:
    """Whether XLA hands nothing over to YNNPACK but products of matrices by themselves."""
    handed = re.findall(r"calls=(%[\w.]+)[^\n]*__ynn_fusion", program)
    bodies = [
        re.search(rf"^{re.escape(name)} .*?^}}", program, re.MULTILINE | re.DOTALL)
        for name in handed
    ]
    return all(
        set(re.findall(r" = \S+ ([\w-]+)\(", body[0])) <= {"parameter", "dot"} for body in bodies
    )


def _main(folder: Path, ways: list[tuple[str, str]]) -> None:
    """Run every program in these ways; print a line of JSON for each: its greatest error, and the
    modules with a fusion for YNNPACK.
    """
    seen: set[Path] = set()
    for name, program in _programs().items():
        truth = _truth(program)
        for kind, way in ways:
            out = KINDS[kind][way](program)
            found = (
                out.detach() if isinstance(out, torch.Tensor) else torch.from_numpy(np.array(out))
            ).double()
            new = set(folder.glob("*after_optimizations.txt")) - seen
            seen |= new
            fused = [f.name for f in new if not only_products(f.read_text())]
            print(
                json.dumps(
                    [
                        name,
                        kind,
                        way,
                        float((found - truth[kind]).abs().max() / truth[kind].abs().max()),
                        fused,
                    ]
                ),
                flush=True,
            )


@functools.cache
def outcomes(fast: bool) -> dict[tuple[str, ...], tuple[float, list[str]]]:
    """The greatest error and the fusions of the programs in all fast ways, or all others, as a
    process of its own found them.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        command = [sys.executable, __file__, folder, "fast" if fast else "slow"]
        done = subprocess.run(
            command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
        )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        print(f"ended by {done.returncode} after {lines[-1:]}", done.stderr[-2000:])
    return {(name, kind, way): (error, fused) for name, kind, way, error, fused in lines}


@pytest.mark.parametrize("name", ["rows", "ranks"])
@pytest.mark.parametrize(
    ("kind", "way"), [pytest.param(*x, marks=() if x in FAST else pytest.mark.slow) for x in WAYS]
)
def test_each_way_of_running_a_program(name: str, kind: str, way: str) -> None:
    found = outcomes((kind, way) in FAST)
    assert (name, kind, way) in found, "the process ended before"
    error, fused = found[name, kind, way]
    assert error < 1e-5
    assert not (compiling.miscompiles() and fused)


def test_a_users_own_jit_is_warned_of_once_and_left_alone() -> None:
    program = _programs()["rows"]
    (rows,) = program.arrays
    mine = lambda x: (x @ x.T[:, :3]).sum(1)
    before = jax.jit(mine).lower(rows).compile().as_text()
    calls = {
        "jit": lambda: jax.jit(program.mapped())(rows),
        "grad": lambda: jax.grad(lambda x: program.mapped()(x).sum())(rows),
        "jit of ours": lambda: jax.jit(jit(program.mapped()))(rows),
        "nnx.jit": lambda: nnx.jit(lambda x: program.mapped()(x))(rows),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", compiling.MiscompilationWarning)
        (
            program.mapped()(rows),
            jit(program.mapped())(rows),
            jax.vmap(program.mapped())(rows[None]),
            grad(program.loss())(rows),
        )
    for call in calls.values():
        compiling._warn.cache_clear()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            call(), call()
        said = [str(w.message) for w in given if w.category is compiling.MiscompilationWarning]
        assert len(said) == compiling.miscompiles()
        assert all(
            "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=" in text
            and "test_miscompiled_by_xla.py" in text
            for text in said
        )
    assert jax.jit(lambda x: mine(x)).lower(rows).compile().as_text().count(
        "__ynn_fusion"
    ) == before.count("__ynn_fusion")


@pytest.mark.parametrize(
    ("version", "machine", "flags", "expected"),
    [
        ("0.10.2", "x86_64", "", True),
        ("0.11.0", "AMD64", "--xla_dump_to=x", True),
        ("0.10.2", "arm64", "", False),
        ("0.11.1", "x86_64", "", False),
        ("0.12.0.1", "x86_64", "", False),
        ("0.10.1", "x86_64", "", False),
        ("0.10.2", "x86_64", "--xla_cpu_experimental_ynn_fusion_type= --xla_dump_to=x", False),
        (
            "0.10.2",
            "x86_64",
            "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
            False,
        ),
        ("0.10.2", "x86_64", "--xla_cpu_experimental_ynn_fusion_type=reduce", True),
    ],
)
def test_which_versions_get_the_option(
    monkeypatch: pytest.MonkeyPatch, version: str, machine: str, flags: str, expected: bool
) -> None:
    monkeypatch.setattr("jaxlib.__version__", version)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert compiling.miscompiles() is expected
    assert compiling.options() == (
        {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
        if expected
        else None
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiling.options() is None


@pytest.mark.skipif(not compiling.miscompiles(), reason="this version compiles correctly")
def test_what_is_still_handed_over() -> None:
    rows = jnp.ones((40000, 3))
    program = lambda x: ((x @ x[:3]) ** 2).sum(1)
    plain, right = (
        jax.jit(program, compiler_options=o).lower(rows).compile().as_text()
        for o in (None, compiling.options())
    )
    assert "__ynn_fusion" in right and only_products(right) and not only_products(plain)


SIZES = st.sampled_from([1, 2, 3, 5, 8, 17, 33, 64, 129, 257])


@given(
    batch=st.lists(SIZES, max_size=2),
    left=st.lists(SIZES, max_size=2),
    right=st.lists(SIZES, max_size=2),
    summed=SIZES,
    large=st.sampled_from([None, 16385, 32769, 65537]),
    data=st.data(),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    then=st.sampled_from(["nothing", "a sum of squares", "a maximum", "a transpose"]),
)
@settings(max_examples=40, deadline=None)
def test_products_are_right(batch, left, right, summed, large, data, dtype, then) -> None:
    """Any product, in any order of its dimensions and whatever reads it, compiled with the option,
    against float64.
    """
    left = left if large is None else [large, *left[1:]]
    assume(
        np.prod([*batch, *left, summed]) < 1e6
        and np.prod([*batch, *right, summed]) < 1e6
        and np.prod([*batch, *left, *right]) < 1e6
    )
    sides, names = [], []
    rng = np.random.default_rng(0)
    for free, side in ((left, "left"), (right, "right")):
        found = [
            *(("batch", k, n) for k, n in enumerate(batch)),
            *((side, k, n) for k, n in enumerate(free)),
            ("summed", 0, summed),
        ]
        names.append(data.draw(st.permutations(found)))
        sides.append(jnp.asarray(rng.normal(size=[n for *_, n in names[-1]]), dtype))
    contracted = tuple([(dims.index(("summed", 0, summed)),) for dims in names])
    batched = tuple(
        [tuple([dims.index(("batch", k, n)) for k, n in enumerate(batch)]) for dims in names]
    )
    after = {
        "nothing": lambda y: y,
        "a sum of squares": lambda y: (y * y).sum(),
        "a maximum": lambda y: y.clip(0),
        "a transpose": lambda y: y.T * 2,
    }
    # XLA for CPUs cannot run some products of bfloat16 into float32, in plain JAX of every version:
    # DotThunk::Execute: BF16 x BF16 = F32
    to, rtol, atol = (None, 2e-2, 2e-2) if dtype == "bfloat16" else ("float32", 1e-4, 1e-5)
    product = lambda a, b: jax.lax.dot_general(
        a, b, (contracted, batched), preferred_element_type=to
    )
    found = jax.jit(lambda a, b: after[then](product(a, b)), compiler_options=compiling.options())(
        *sides
    )
    with jax.enable_x64(True):
        exact = jax.lax.dot_general(
            *[jnp.asarray(np.asarray(x, np.float64)) for x in sides], (contracted, batched)
        )
        expected = after[then](exact)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=rtol, atol=atol * summed
    )


def test_programs_for_other_backends_do_not_get_the_option() -> None:
    with compiling.correctly():
        assert compiling._more("gpu") == compiling._more("tpu") == {}
        assert bool(compiling._more("cpu")) == compiling.miscompiles()
    assert compiling._more("cpu") == {}


if __name__ == "__main__":
    _main(Path(sys.argv[1]), [x for x in WAYS if (x in FAST) == (sys.argv[2] == "fast")])
