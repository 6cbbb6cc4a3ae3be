"""The command `torchfunc-jax parity`: the same function under torch.func and under torchfunc_jax, as a table."""
from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from torchfunc_jax.testing import Check

EXAMPLES = """
[bold]Examples[/bold]

[cyan]torchfunc-jax parity torch:sin --shape 3,4[/cyan]

    One argument of shape (3, 4); the function itself, its vjp and its jvp.

[cyan]torchfunc-jax parity mymodel:loss -s 8,3 -s 3 -t grad -t "vmap(grad, in_dims=(0, None))"[/cyan]

    Two arguments, other transforms.

[cyan]torchfunc-jax parity train.py:step --inputs train.py:example --json[/cyan]

    From a file; the arguments are what example() returns, a tuple.
"""


def parity(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="A function or nn.Module; a class is made without arguments.")],
    transform: Annotated[
        list[str] | None, typer.Option("--transform", "-t", help="call, grad, vmap(grad, in_dims=(0, None)), ...; again for more.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", "-s", help="Of a random argument: 3,4, or () for a number; again for more.")
    ] = None,
    inputs: Annotated[
        str | None, typer.Option("--inputs", "-i", metavar="MODULE:FUNCTION", help="Returns the arguments as a tuple.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the random arguments.")] = "float32",
    jit: Annotated[bool, typer.Option("--jit/--no-jit", help="Compare the compiled function too.")] = True,
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Compare values, not only shapes and types (off for random functions).")
    ] = True,
    rtol: Annotated[float | None, typer.Option("--rtol", min=0, help="Relative tolerance; by dtype if not given.")] = None,
    atol: Annotated[float | None, typer.Option("--atol", min=0, help="Absolute tolerance; by dtype if not given.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random arguments and of each run.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a function under torch.func and under torchfunc_jax, eagerly and compiled, and show where they differ.

    Compared are values, structure, dtypes, shapes, devices and requires_grad of what is returned, the class of what is raised,
    and inputs that were changed in place. Ends with 1 where something differs.
    """
    from torchfunc_jax.testing import parity as run

    fn: Any = _load(function, "MODULE:FUNCTION")
    fn = fn() if inspect.isclass(fn) else fn
    args = _load(inputs, "--inputs")() if inputs else _random(shape or [], dtype, seed)
    args = args if isinstance(args, tuple) else (args,)
    try:
        checks = run(
            fn, *args, transforms=transform or ("call", "vjp", "jvp"), jit=jit, rtol=rtol, atol=atol, check_values=values, seed=seed
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--transform") from None
    agree = all(c.difference is None for c in checks)
    if as_json:
        print(json.dumps({"function": function, "agree": agree, "checks": [dataclasses.asdict(c) for c in checks]}))
    else:
        Console().print(table(function, checks))
    if not agree:
        raise typer.Exit(1)


def table(function: str, checks: list[Check]) -> Table:
    """The checks as a rich table, a line for each transform and mode."""
    shown = Table(title=f"{escape(function)}: torch.func and torchfunc_jax", show_lines=any(c.difference for c in checks))
    for name in ("transform", "mode", "result"):
        shown.add_column(name, no_wrap=name == "mode")
    shown.add_column("largest difference", justify="right")
    for c in checks:
        result = f"[green]{c.agreed}[/green]" if c.difference is None else f"[red]{escape(c.difference)}[/red]"
        shown.add_row(escape(c.transform), c.mode, result, "-" if c.largest is None else f"{c.largest:.1e}")
    return shown


def _load(name: str, where: str) -> Any:
    module, _, attribute = name.rpartition(":")
    if not module or not attribute:
        raise typer.BadParameter(f"expected MODULE:FUNCTION, got {name!r}", param_hint=where)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(os.path.basename(module)[:-3], module)
            assert spec is not None and spec.loader is not None
            found = sys.modules.get(spec.name)
            if found is None or getattr(found, "__file__", None) != spec.origin:
                found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, OSError) as error:
        raise typer.BadParameter(f"{name}: {error}", param_hint=where) from None
    return found


def _random(shapes: list[str], dtype: str, seed: int) -> tuple[Any, ...]:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise typer.BadParameter(f"torch has no dtype {dtype!r}", param_hint="--dtype")
    generator = torch.Generator().manual_seed(seed)
    arguments = []
    for text in shapes:
        try:
            size = [int(n) for n in text.strip("()[] ").split(",") if n.strip()]
            arguments.append((torch.randn(size, generator=generator) * (1 if kind.is_floating_point or kind.is_complex else 10)).to(kind))
        except (ValueError, RuntimeError):
            raise typer.BadParameter(f"expected sizes such as 3,4, got {text!r}", param_hint="--shape") from None
    return tuple(arguments)
