"""The command `torchfunc-jax parity` compares a function under torch.func and under torchfunc_jax,
or a module and a port of it.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from torchfunc_jax.port_parity_cli import compare, data, rules, show

if TYPE_CHECKING:
    import torch

    from torchfunc_jax.testing import Check, Difference

EXAMPLES = """
[bold]Examples[/bold]

[cyan]torchfunc-jax parity torch:sin --shape 3,4[/cyan]

    Compare a function of one argument of shape (3, 4), its vjp and its jvp.

[cyan]torchfunc-jax parity mymodel:loss -s 8,3 -s 3 -t grad \\
    -t "vmap(grad, in_dims=(0, None))"[/cyan]

    Compare other transforms of a function of two arguments.

[cyan]torchfunc-jax parity mymodel:Net --init hidden=32 --input "randn(4, 3)"[/cyan]

    Make an nn.Module with Net(hidden=32), and compare its outputs, gradients and buffers.

[cyan]torchfunc-jax parity torch.nn.functional:nll_loss --input "randn(4, 3)" \\
    --input "randint(0, 3, (4,))" --kwarg reduction="'sum'"[/cyan]

    Pass integers and keyword arguments.

[cyan]torchfunc-jax parity torch:reshape --input "randn(4)" --input "(3,)" \\
    --raises RuntimeError[/cyan]

    Check that both raise a RuntimeError.

[cyan]torchfunc-jax parity train.py:step --inputs train.py:example --json \\
    | jq .checks[0].details[/cyan]

    Take the function from a file, and the arguments from example(), which returns a tuple.

[cyan]torchfunc-jax parity model.py:Net --against port.py:FlaxNet --shape 4,3,8,8[/cyan]

    Compare a torch module with a port of it to JAX or Flax: outputs, gradients, buffers, five steps
    of an optimizer. The first layer that differs is named. The port is a module of flax.linen or
    flax.nnx, or a function apply(params, x).

[cyan]torchfunc-jax parity model.py:Net --against port.py:apply --variables port.py:init \\
    --names names.json --shape 8,3[/cyan]

    The port's arrays are made by init(), and names.json says which tensor is which of them where
    shapes and names do not: {"fc.weight": "head/kernel"}. With --names port.py:convert, a function
    makes them of {torch's name: array}.

[bold]Exit codes[/bold]

0: all agree. 1: something differs, both raise without --raises, or nothing could be compared. 2:
the command could not run.
"""

Many = list[str] | None
_PORT: dict[str, Any] = {"rich_help_panel": "Beside a port"}


def parity(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function, an nn.Module, or a class whose instance is called.",
        ),
    ],
    transform: Annotated[
        Many,
        typer.Option(
            "--transform",
            "-t",
            help=(
                "grad, vmap(grad, in_dims=(0, None)), ...; repeatable. Default: call, vjp and jvp."
            ),
        ),
    ] = None,
    shape: Annotated[
        Many,
        typer.Option(
            "--shape", "-s", help="The shape of a random argument: 3,4, or (); repeatable."
        ),
    ] = None,
    specs: Annotated[
        Many,
        typer.Option(
            "--input",
            metavar="VALUE",
            help="An argument: randn(4, 3), randint(9, (4,)), 0.5, \\[ones(2), 3]; repeatable.",
        ),
    ] = None,
    kwarg: Annotated[
        Many,
        typer.Option(
            "--kwarg", metavar="NAME=VALUE", help="A keyword argument, as for --input; repeatable."
        ),
    ] = None,
    init: Annotated[
        Many,
        typer.Option(
            "--init",
            metavar="[NAME=]VALUE",
            help="An argument of the class or function that makes the module; repeatable.",
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            "--inputs",
            "-i",
            metavar="MODULE:FUNCTION",
            help="A function that returns the arguments as a tuple.",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="The dtype of --shape, and of randn, ones, ... without dtype=."
        ),
    ] = "float32",
    jit: Annotated[
        bool, typer.Option("--jit/--no-jit", help="Compare the compiled function too.")
    ] = True,
    values: Annotated[
        bool,
        typer.Option(
            "--values/--no-values", help="Compare values, not only structure, shapes and types."
        ),
    ] = True,
    raises: Annotated[
        Many,
        typer.Option(
            "--raises",
            metavar="NAME",
            help="An exception that both must raise: ValueError, mymodel:MyError; repeatable.",
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", min=0, help="The relative tolerance; the default depends on the dtype."
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            "--atol", min=0, help="The absolute tolerance; the default depends on the dtype."
        ),
    ] = None,
    draws: Annotated[
        int,
        typer.Option(
            "--draws", min=100, help="The number of calls on each side if random numbers differ."
        ),
    ] = 1000,
    allow_empty: Annotated[
        bool,
        typer.Option(
            "--allow-empty",
            help="Accept outputs without tensors, or with empty tensors or NaN alone.",
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            help="The seed of the arguments, of the parameters and of the function's draws.",
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODULE:PORT",
            help="A port of the module, which is compared with it.",
            **_PORT,
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--names",
            metavar="FILE.json|MODULE:FUNCTION",
            help="Which tensor is which array of the port.",
            **_PORT,
        ),
    ] = None,
    variables: Annotated[
        str | None,
        typer.Option(
            "--variables",
            metavar="MODULE:NAME",
            help="An example of the port's arrays, or what makes it.",
            **_PORT,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="flax or torch: of the port's arrays, where shapes leave it open.",
            **_PORT,
        ),
    ] = None,
    channels_last: Annotated[
        bool | None,
        typer.Option(
            "--channels-last/--channels-first", help="Of the port; by default what fits.", **_PORT
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            metavar="MODULE:FUNCTION",
            help="A loss of the output and the targets.",
            **_PORT,
        ),
    ] = None,
    port_loss: Annotated[
        str | None,
        typer.Option("--port-loss", metavar="MODULE:FUNCTION", help="The same in JAX.", **_PORT),
    ] = None,
    target: Annotated[
        Many,
        typer.Option(
            "--target", metavar="VALUE", help="A tensor for the losses; repeatable.", **_PORT
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="sgd (the default) or adam.", **_PORT)
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=0, help="Of the optimizer; 5 by default.", **_PORT)
    ] = None,
    mode: Annotated[
        Many, typer.Option("--mode", help="eval or train; repeatable. Default: both.", **_PORT)
    ] = None,
) -> None:
    """Run a function under torch.func and under torchfunc_jax, eagerly and compiled, and show where
    they differ.

    The comparison covers values, structure, dtypes, shapes, devices and requires_grad of the
    outputs, their gradients, the exceptions, and the inputs, parameters and buffers that the
    function changes in place. Random functions are recognized, and compared by the same numbers or
    by their distribution over many draws.

    With --against, a torch module is compared with a port of it to JAX or Flax instead.
    """
    console = Console(stderr=True)
    of_ports: dict[str, Any] = {
        "names": names,
        "variables": variables,
        "layout": layout,
        "channels_last": channels_last,
        "loss": loss,
        "port_loss": port_loss,
        "targets": target,
        "optimizer": optimizer,
        "steps": steps,
        "modes": mode,
    }
    _refuse_options_of_the_other(against, of_ports, {"transform": transform, "raises": raises})
    fn: Any = _load(function, "MODULE:FUNCTION")
    port: Any = None if against is None else _load(against, "--against")
    with _bar(console) as progress:
        progress(0, 1, "Loading PyTorch and JAX")
        import torch

        from torchfunc_jax._parity_runs import derived
        from torchfunc_jax.testing import failed
        from torchfunc_jax.testing import parity as run

        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise typer.BadParameter(f"torch has no dtype {dtype!r}", param_hint="--dtype")
        # not the numbers that the function draws
        generator = torch.Generator().manual_seed(derived("arguments", seed))
        with torch.random.fork_rng():
            torch.manual_seed(derived("parameters", seed))
            fn = _made(fn, init, generator, kind, function)
            args = _arguments(inputs, shape, specs, kind, generator)
        named = dict(_named(k, "--kwarg", generator, kind) for k in kwarg or [])
        if against is not None:
            if names is not None:
                of_ports["names"] = (
                    rules(names) if names.endswith(".json") else _load(names, "--names")
                )
            of_ports["variables"] = None if variables is None else _load(variables, "--variables")
            losses = [
                None if name is None else _load(name, "--loss")
                for name in (loss, of_ports.pop("port_loss"))
            ]
            of_ports["loss"] = tuple(losses) if loss is not None else None
            of_ports["targets"] = [_value(x, "--target", generator, kind) for x in target or []]
            report = compare(
                fn,
                port,
                args,
                named,
                of_ports | {"rtol": rtol, "atol": atol, "draws": draws, "seed": seed},
            )
    if against is not None:
        if as_json:
            print(json.dumps(_finite(data(function, against, report))))
        else:
            show(function, against, report)
        if not report.equal:
            raise typer.Exit(1)
        return
    with _bar(console) as progress:
        classes = tuple(_error(name) for name in raises or [])
        try:
            checks = run(
                fn,
                *args,
                transforms=transform or ("call", "vjp", "jvp"),
                kwargs=named,
                jit=jit,
                rtol=rtol,
                atol=atol,
                check_values=values,
                raises=classes or None,
                allow_empty=allow_empty,
                draws=draws,
                seed=seed,
                progress=progress,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--transform") from None
    failure = failed(checks)
    if as_json:
        told = {
            "function": function,
            "agree": failure is None,
            "failure": failure,
            "checks": [dataclasses.asdict(c) for c in checks],
        }
        print(json.dumps(_finite(told)))
    else:
        out = Console()
        out.print(table(function, checks))
        notes, differences = (
            [(n, c) for c in checks for n in c.notes],
            [(c.difference, c) for c in checks if c.difference],
        )
        for color, said in (("yellow", notes), ("red", differences)):
            for text in dict.fromkeys(t for t, _ in said):
                where = "; ".join(f"{c.transform}, {c.mode}" for t, c in said if t == text)
                out.print(
                    f"[{color}]{escape(where)}:[/{color}] {escape(text)}",
                    highlight=False,
                    soft_wrap=True,
                )
        if failure is not None and not any(c.difference for c in checks):
            out.print(f"[red]{escape(function)} {escape(failure)}[/red]", highlight=False)
    if failure is not None:
        raise typer.Exit(1)


def _refuse_options_of_the_other(
    against: str | None, of_ports: dict[str, Any], of_functions: dict[str, Any]
) -> None:
    """Raises if an option was given that only a comparison with a port has, or only one without."""
    wrong = [
        name for name, x in (of_ports if against is None else of_functions).items() if x is not None
    ]
    if wrong:
        option = (
            "--"
            f"{ {'targets': 'target', 'modes': 'mode'}.get(wrong[0], wrong[0]).replace('_', '-') }"
        )
        why = (
            "it is of use with --against alone"
            if against is None
            else "--against has no use for it"
        )
        raise typer.BadParameter(why, param_hint=option)
    if (of_ports["loss"] is None) != (of_ports["port_loss"] is None):
        raise typer.BadParameter(
            "expected both --loss, in torch, and --port-loss, in JAX", param_hint="--loss"
        )


def table(function: str, checks: list[Check]) -> Table:
    """The checks as a rich table, a line for each transform and mode."""
    shown = Table(title=f"{escape(function)}: torch.func and torchfunc_jax")
    for name in ("transform", "mode", "result"):
        shown.add_column(name, no_wrap=name == "mode")
    shown.add_column("largest difference", justify="right")
    for c in checks:
        color = "green" if c.compared else "yellow"
        result = (
            f"[{color}]{escape(c.agreed)}[/{color}]"
            if c.details is None
            else f"[red]{_short(c.details)}[/red]"
        )
        shown.add_row(
            escape(c.transform), c.mode, result, "-" if c.largest is None else f"{c.largest:.1e}"
        )
    return shown


def _short(difference: Difference) -> str:
    """The difference in a few words; sentences about it are printed below the table."""
    at = f" in {difference.where}" if difference.where else ""
    return escape(f"{_KINDS.get(difference.kind, f'another {difference.kind}')}{at}")


_KINDS = {
    "raised": "an exception",
    "nothing compared": "nothing compared",
    "repetition": "a seed does not repeat",
}


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[float, float, str], None]]:
    """A progress bar on a terminal, once two seconds have passed."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("")
    timer = threading.Timer(2.0, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=escape(what)
        )
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def _finite(x: Any) -> Any:
    """The report with infinities and NaN as strings, because JSON lacks them."""
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(v) for v in x]
    return repr(x) if isinstance(x, float) and not math.isfinite(x) else x


# -- the function and its arguments ----------------------------------------------------------------
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
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        sys.modules.pop(os.path.basename(module)[:-3] if module.endswith(".py") else "", None)
        why = (
            str(error)
            if isinstance(error, ImportError | OSError)
            else f"importing it raised {_shown(error)}"
        )
        raise typer.BadParameter(f"{name}: {why}", param_hint=where) from None
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise typer.BadParameter(f"{name}: {error}", param_hint=where) from None
    return found


def _shown(error: BaseException) -> str:
    from torchfunc_jax._parity_compare import shown_error

    return shown_error(error)


def _called(what: str, where: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fn's result; an exception ends the command, because nothing was compared."""
    try:
        return fn(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise typer.BadParameter(f"{what} raised {_shown(error)}", param_hint=where) from None


def _made(fn: Any, init: Many, generator: torch.Generator, dtype: torch.dtype, name: str) -> Any:
    """The function, or an instance of the class, or the result of a function that gets the
    arguments of --init.
    """
    if init is None and not inspect.isclass(fn):
        return fn
    from torchfunc_jax.parity_specs import pair

    positional = [
        _value(x, "--init", generator, dtype, words=True) for x in init or [] if pair(x)[0] is None
    ]
    named = dict(
        _named(x, "--init", generator, dtype, words=True)
        for x in init or []
        if pair(x)[0] is not None
    )
    made = _called(f"{name}: making it", "--init", fn, *positional, **named)
    if not callable(made):
        raise typer.BadParameter(
            f"{name}: expected a function or nn.Module, made a {type(made).__name__}",
            param_hint="--init",
        )
    return made


def _arguments(
    inputs: str | None, shape: Many, specs: Many, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    given = [
        name for name, x in (("--inputs", inputs), ("--shape", shape), ("--input", specs)) if x
    ]
    if len(given) > 1:
        raise typer.BadParameter(
            f"expected one way to give the arguments, got {' and '.join(given)}",
            param_hint=given[1],
        )
    if inputs:
        args = _called(f"{inputs}: calling it", "--inputs", _load(inputs, "--inputs"))
        return args if isinstance(args, tuple) else (args,)
    if specs:
        return tuple(_value(x, "--input", generator, dtype) for x in specs)
    arguments = []
    for text in shape or []:
        try:
            size = [int(n) for n in text.strip("()[] ").split(",") if n.strip()]
        except ValueError:
            raise typer.BadParameter(
                f"expected sizes such as 3,4, got {text!r}", param_hint="--shape"
            ) from None
        arguments.append(_value(f"randn({size})", "--shape", generator, dtype))
    return tuple(arguments)


def _value(
    text: str, where: str, generator: torch.Generator, dtype: torch.dtype, words: bool = False
) -> Any:
    from torchfunc_jax.parity_specs import value

    try:
        return value(text, generator, dtype, words)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=where) from None


def _named(
    text: str, where: str, generator: torch.Generator, dtype: torch.dtype, words: bool = False
) -> tuple[str, Any]:
    from torchfunc_jax.parity_specs import pair

    name, spec = pair(text)
    if name is None:
        raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint=where)
    return name, _value(spec, where, generator, dtype, words)


def _error(name: str) -> type[BaseException]:
    """An exception's class by its name: Python's, this library's, or MODULE:NAME."""
    from bridge import errors

    found = (
        _load(name, "--raises")
        if ":" in name
        else getattr(builtins, name, None) or getattr(errors, name, None)
    )
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise typer.BadParameter(
            f"expected an exception such as ValueError or mymodel:MyError, got {name!r}",
            param_hint="--raises",
        )
    return found
