"""`torchfunc-jax parity --against`: a torch module beside a port of it to JAX or Flax."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from torchfunc_jax.testing import PortReport


def compare(
    module: Any, port: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> PortReport:
    """The report; what keeps it from being made ends the command with the exit code 2."""
    from torch import nn

    from torchfunc_jax.testing import PortError, port_parity

    if not isinstance(module, nn.Module):
        raise typer.BadParameter(
            f"expected an nn.Module beside a port, got {type(module).__name__}",
            param_hint="MODULE:FUNCTION",
        )
    try:
        return port_parity(
            module,
            port,
            *args,
            kwargs=kwargs,
            **{name: x for name, x in options.items() if x is not None},
        )
    except (PortError, ValueError) as error:
        Console(stderr=True).print(
            f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True
        )
        raise typer.Exit(2) from None


def rules(path: str) -> dict[str, str]:
    """The rules of a name map, from a JSON file."""
    try:
        read = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--names") from None
    if not isinstance(read, dict) or not all(isinstance(x, str) for x in read.values()):
        raise typer.BadParameter(
            f'{path}: expected an object {{"torch\'s name": "path in the port"}}',
            param_hint="--names",
        )
    return read


def data(module: str, port: str, report: PortReport) -> dict[str, Any]:
    """The report as JSON has it."""
    checks = [dataclasses.asdict(c) for c in report.checks]
    for check in checks:
        difference = check["difference"]
        if difference is not None:
            difference["torch"], difference["port"] = (
                difference.pop("torch_func"),
                difference.pop("torchfunc_jax"),
            )
    departure = None if report.departure is None else dataclasses.asdict(report.departure)
    return {
        "module": module,
        "port": port,
        "equal": report.equal,
        "departure": departure,
        "checks": checks,
        "names": report.names,
        "missing": report.missing,
        "notes": report.notes,
    }


def show(module: str, port: str, report: PortReport) -> None:
    """Print the report: a table, and sentences about what differs."""
    table = Table(title=f"{escape(module)} and its port {escape(port)}")
    for name in ("dtype", "mode", "result"):
        table.add_column(name, no_wrap=name != "result")
    table.add_column("largest difference", justify="right")
    for c in report.checks:
        result = (
            f"[green]{escape(c.agreed)}[/green]"
            if c.difference is None
            else f"[red]{escape(c.difference.where)} differs[/red]"
        )
        table.add_row(c.dtype, c.mode, result, "-" if c.largest is None else f"{c.largest:.1e}")
    out = Console()
    out.print(table)
    for line in report.sentences():
        color = "yellow" if line in report.notes else "red"
        out.print(f"[{color}]{escape(line)}[/{color}]", highlight=False, soft_wrap=True)
