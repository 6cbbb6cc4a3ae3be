"""The command `torchfunc-jax`: the doctor and what is installed; the ensemble and parity are in
files of their own.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchfunc_jax import ensemble_cli, parity_cli
from torchfunc_jax.ensemble_cli import bar

if TYPE_CHECKING:
    from torchfunc_jax.doctor import Checked, Report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="[bold]torch.func on JAX.[/bold] JAX transforms PyTorch code, and XLA compiles it.",
)

DOCTOR_EXAMPLES = """
[bold]Examples[/bold]

[cyan]torchfunc-jax doctor[/cyan]

    Print the versions, the devices, the known problems and the self-check. Paste this into a bug
    report.

[cyan]torchfunc-jax doctor --json > doctor.json[/cyan]

    Print the same as JSON on stdout. The progress stays on stderr.

[cyan]torchfunc-jax doctor --no-check[/cyan]

    Print the report at once, without the self-check.

[cyan]torchfunc-jax doctor && python train.py[/cyan]

    Train only if every check agrees with torch.func.
"""


@app.callback()
def _top() -> None:
    """Keeps `torchfunc-jax` a command with subcommands."""


app.command(epilog=ensemble_cli.EXAMPLES)(ensemble_cli.ensemble)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what is installed: versions, devices, and the number of operators that have a lowering.

    [bold]Example[/bold]

    [cyan]torchfunc-jax info[/cyan]
    """
    import jax

    from bridge.lowering.registry import LOWERINGS
    from torchfunc_jax._machine import machine

    facts = machine() | {
        "devices": [str(d) for d in jax.devices()],
        "lowered_operators": len(LOWERINGS),
    }
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        table.add_row(f"[bold]{key}[/bold]", str(value))
    Console().print(table)


@app.command(epilog=DOCTOR_EXAMPLES)
def doctor(
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Run the self-check, which takes a minute or two."),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead of tables.")
    ] = False,
) -> None:
    """Print what is installed, what is known to be wrong with it, and whether the transforms agree
    with torch.func here.

    Each check runs a program under torch.func and under torchfunc_jax, un-jitted and compiled, in a
    process of its own. The exit code is 1 if one of them differs. A bug report starts with this
    output.
    """
    console = Console(stderr=True)
    console.print("[dim]Loading PyTorch and JAX ...[/dim]")
    from torchfunc_jax.doctor import CHECKS, examine

    with bar(console, "checks", "name") as shown:
        task = shown.add_task(
            "Checking", total=len(CHECKS), name="", visible=check and console.is_terminal
        )

        def on_check(name: str, result: Checked | None) -> None:
            if result is None:
                shown.update(task, name=f"[dim]{name}[/dim]")
                return
            shown.update(task, advance=1)
            if not as_json:
                Console().print(
                    f"{_mark(result)} {name} [dim]{result.seconds:.1f} s[/dim]",
                    highlight=False,
                    soft_wrap=True,
                )

        report = examine(check, on_check)
    if as_json:
        print(json.dumps(dataclasses.asdict(report) | {"ok": report.ok}))
    else:
        Console().print(*findings(report), sep="\n")
    if not report.ok:
        raise typer.Exit(1)


def findings(report: Report) -> list[Table | str]:
    """The report of the doctor as rich tables: what is here, what is known, what failed."""
    here = Table(show_header=False, box=None)
    for title, facts in (
        ("versions", report.versions),
        ("processor", report.cpu),
        ("settings", report.settings),
        ("environment", report.environment),
    ):
        here.add_row(
            f"[bold]{title}[/bold]",
            "\n".join(f"{name} {value}" for name, value in facts.items()) or "-",
        )
    here.add_row("[bold]devices[/bold]", "\n".join(report.devices))
    known = Table(
        title="Known about this combination", title_justify="left", show_header=False, box=None
    )
    known.add_column(overflow="fold")
    for row in report.known:
        known.add_row(f"[bold]{row.title}[/bold]: {row.status}\n{escape(row.what)}")
    failed = [c for c in report.checks if c.difference is not None]
    shown: list[Table | str] = [
        here,
        known if report.known else "Nothing is known to be wrong with this combination.",
    ]
    shown += [f"[red]{c.name}[/red]: {escape(str(c.difference))}" for c in failed]
    if report.checks:
        seconds = sum(c.seconds for c in report.checks)
        shown.append(
            f"{len(report.checks) - len(failed)} of {len(report.checks)} checks agree with "
            f"torch.func ({seconds:.0f} s)"
        )
    return shown


def _mark(result: Checked) -> str:
    return "[green]right[/green]" if result.difference is None else "[red]wrong[/red]"


app.command(epilog=parity_cli.EXAMPLES)(parity_cli.parity)


def main() -> None:
    """The entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
