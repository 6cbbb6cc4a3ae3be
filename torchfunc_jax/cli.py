"""The command `torchfunc-jax`: the ensemble demo (it needs the extra `demo`), parity with torch.func, the doctor, what is installed."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchfunc_jax import parity_cli

if TYPE_CHECKING:
    from torchfunc_jax.doctor import Checked, Report
    from torchfunc_jax.examples.digits import Training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="[bold]torch.func on JAX.[/bold] JAX transforms PyTorch code, and XLA compiles it.",
)

ENSEMBLE_EXAMPLES = """
[bold]Examples[/bold]

[cyan]torchfunc-jax ensemble[/cyan]

    Run the whole demo: 32 members for 40 epochs, beside torch.func.

[cyan]torchfunc-jax ensemble --members 8 --epochs 5[/cyan]

    Run a small demo.

[cyan]torchfunc-jax ensemble --no-compare --members 128 --output runs/large[/cyan]

    Train a larger ensemble, without torch.func.

[cyan]torchfunc-jax ensemble --json | jq .speed_up[/cyan]

    Print the report as JSON on stdout. The progress stays on stderr.

[cyan]python -c "import torch; print(len(torch.load('runs/ensemble/members.pt')))"[/cyan]

    Load the trained members: a list with one state dict for each, which torchfunc_jax.examples.digits.DigitNet takes.
"""

DOCTOR_EXAMPLES = """
[bold]Examples[/bold]

[cyan]torchfunc-jax doctor[/cyan]

    Print the versions, the devices, the known problems and the self-check. Paste this into a bug report.

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


@app.command(epilog=ENSEMBLE_EXAMPLES)
def ensemble(
    members: Annotated[int, typer.Option("--members", "-m", min=1, help="The number of networks in the ensemble.")] = 32,
    epochs: Annotated[int, typer.Option("--epochs", "-e", min=1, help="The number of passes over the 1,437 training digits.")] = 40,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, max=1437, help="The number of digits in a batch.")] = 64,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0.0, help="Adam's rate at first; it falls to 0.")] = 8e-3,
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, help="The seed of the split, the initial weights and the batches.")] = 0,
    device: Annotated[str | None, typer.Option("--device", "-d", help="cpu, gpu or tpu; by default JAX's own choice.")] = None,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Train the same ensemble under torch.func too.")] = True,
    output: Annotated[Path, typer.Option("--output", "-o", file_okay=False, help="The folder for plots, weights and report.")] = Path(
        "runs/ensemble"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Train an ensemble of small torch CNNs on handwritten digits as one XLA program, and the same ensemble under torch.func.

    Both start from the same weights and see the same batches of scikit-learn's 1,797 digits; a fifth of these is kept for testing.
    The command prints a table of step times, losses, test accuracies and differences, and writes
    [green]ensemble.png[/green] (plots), [green]report.json[/green] and [green]members.pt[/green] (weights) into the output folder.

    Ctrl-C stops after the step that is running and keeps what was trained.
    """
    console = Console(stderr=True)
    console.print("[dim]Loading PyTorch and JAX ...[/dim]")
    try:
        import sklearn  # noqa: F401  # it has the digits; imported where they are read

        from torchfunc_jax.examples import digits_plots as plots
        from torchfunc_jax.examples.digits import Settings, Training, report
    except ModuleNotFoundError as missing:
        raise SystemExit(f"torchfunc-jax ensemble: {missing.name} is not installed; pip install 'torchfunc-jax[demo]' brings it") from None

    settings = Settings(members, epochs, batch_size, learning_rate, seed, device, compare)
    try:
        training = Training(settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    output.mkdir(parents=True, exist_ok=True)
    try:
        with _denormals_flushed(), _stop_on_interrupt(console) as stop, _progress(console, training) as on_step:
            training.run(on_step, stop)
    finally:
        training.save(output)
    with console.status("Testing the members and comparing ..."):
        result = report(training)
        (output / "report.json").write_text(json.dumps(result))
        plots.page(result).savefig(output / "ensemble.png")
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(*tables(result), sep="\n")
    console.print(f"Wrote [green]{output}[/green]: ensemble.png (plots), report.json, members.pt (weights)", highlight=False)
    if training.interrupted:
        raise typer.Exit(130)


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Print what is installed: versions, devices, and the number of operators that have a lowering.

    [bold]Example[/bold]

    [cyan]torchfunc-jax info[/cyan]
    """
    import jax

    from bridge.lowering.registry import LOWERINGS
    from torchfunc_jax._machine import machine

    facts = machine() | {"devices": [str(d) for d in jax.devices()], "lowered_operators": len(LOWERINGS)}
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        table.add_row(f"[bold]{key}[/bold]", str(value))
    Console().print(table)


@app.command(epilog=DOCTOR_EXAMPLES)
def doctor(
    check: Annotated[bool, typer.Option("--check/--no-check", help="Run the self-check, which takes a minute or two.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
) -> None:
    """Print what is installed, what is known to be wrong with it, and whether the transforms agree with torch.func here.

    Each check runs a program under torch.func and under torchfunc_jax, un-jitted and compiled, in a process of its own.
    The exit code is 1 if one of them differs. A bug report starts with this output.
    """
    console = Console(stderr=True)
    console.print("[dim]Loading PyTorch and JAX ...[/dim]")
    from torchfunc_jax.doctor import CHECKS, examine

    with _bar(console, "checks", "name") as bar:
        task = bar.add_task("Checking", total=len(CHECKS), name="", visible=check and console.is_terminal)

        def on_check(name: str, result: Checked | None) -> None:
            if result is None:
                bar.update(task, name=f"[dim]{name}[/dim]")
                return
            bar.update(task, advance=1)
            if not as_json:
                Console().print(f"{_mark(result)} {name} [dim]{result.seconds:.1f} s[/dim]", highlight=False, soft_wrap=True)

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
        ("versions", report.versions), ("processor", report.cpu), ("settings", report.settings), ("environment", report.environment)
    ):
        here.add_row(f"[bold]{title}[/bold]", "\n".join(f"{name} {value}" for name, value in facts.items()) or "-")
    here.add_row("[bold]devices[/bold]", "\n".join(report.devices))
    known = Table(title="Known about this combination", title_justify="left", show_header=False, box=None)
    known.add_column(overflow="fold")
    for row in report.known:
        known.add_row(f"[bold]{row.title}[/bold]: {row.status}\n{escape(row.what)}")
    failed = [c for c in report.checks if c.difference is not None]
    shown: list[Table | str] = [here, known if report.known else "Nothing is known to be wrong with this combination."]
    shown += [f"[red]{c.name}[/red]: {escape(str(c.difference))}" for c in failed]
    if report.checks:
        seconds = sum(c.seconds for c in report.checks)
        shown.append(f"{len(report.checks) - len(failed)} of {len(report.checks)} checks agree with torch.func ({seconds:.0f} s)")
    return shown


def _mark(result: Checked) -> str:
    return "[green]right[/green]" if result.difference is None else "[red]wrong[/red]"


app.command(epilog=parity_cli.EXAMPLES)(parity_cli.parity)


def tables(result: dict[str, Any]) -> list[Table | str]:
    """The report as rich tables: one of the systems, and one of their differences where there are two."""
    settings, where = result["settings"], result["machine"]
    systems = Table(
        title=f"{settings['members']} CNNs of {result['parameters_per_member']:,} parameters, {result['steps']} steps"
        f"{' (stopped early)' if result['interrupted'] else ''}, {result['test_images']} test digits",
        caption=f"{where['cpu']}, {where['cores']} cores, device {where['device']}; torch {where['torch']}, jax {where['jax']}",
    )
    systems.add_column("", no_wrap=True)
    for name in ("step", "first step", "final loss", "accuracy,\nmean member", "accuracy,\nensemble vote"):
        systems.add_column(name, justify="right")
    for name, one in result["systems"].items():
        accuracy = one["test_accuracy"]
        systems.add_row(
            f"[bold]{name}[/bold]",
            _number(one["step_ms"], "{:.1f} ms"),
            _number(one["first_step_s"], "{:.2f} s"),
            _number(one["final_loss"], "{:.5f}"),
            f"{accuracy['mean_member']:.2%}",
            f"{accuracy['vote']:.2%}",
        )
    if "difference" not in result:
        return [systems]
    difference = Table(title="Largest relative difference of the two", caption="training magnifies the rounding errors of every step")
    difference.add_column("", no_wrap=True)
    difference.add_column("losses", justify="right")
    difference.add_column("gradients", justify="right")
    titles = {"first_step": "first step", "end_same_weights": "end, both given the same weights", "end": "end, each with its own weights"}
    for key, title in titles.items():
        one = result["difference"][key]
        difference.add_row(title, f"{one['loss']:.1e}", f"{one['gradient']:.1e}")
    speed_up = f"Speed-up of a step over torch.func: [bold]{_number(result['speed_up'], '{:.2f}x')}[/bold]"
    return [systems, difference, speed_up]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


@contextlib.contextmanager
def _denormals_flushed() -> Iterator[None]:
    """As XLA does: Adam's moments of idle units otherwise slow torch down."""
    import torch

    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def _stop_on_interrupt(console: Console) -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the training to stop after its step, so that weights are never half written; a second one stops at once."""
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        console.print("Stopping after this step and saving; press Ctrl-C again to stop at once.")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: no signals come here
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(console: Console, training: Training) -> Iterator[Callable[[Training], None]]:
    """A progress bar with the current loss of each system; without a terminal, a line for each epoch."""

    def losses(training: Training) -> str:
        return "  ".join(f"{name} {values[-1].mean():.4f}" for name, values in training.losses.items())

    if not console.is_terminal:
        epoch = training.steps // training.settings.epochs

        def on_epoch(training: Training) -> None:
            done = len(training.losses["torchfunc_jax"])
            if done % epoch == 0:
                console.print(f"Training: {done} of {training.steps} steps, loss {losses(training)}", highlight=False, soft_wrap=True)

        yield on_epoch
        return
    with _bar(console, "steps", "losses") as bar:
        task = bar.add_task(f"Compiling {training.settings.members} CNNs", total=training.steps, losses="")

        def on_step(training: Training) -> None:
            name = f"Training {training.settings.members} CNNs"
            bar.update(task, description=name, advance=1, losses=f"[dim]loss[/dim] {losses(training)}")

        yield on_step


def _bar(console: Console, unit: str, field: str) -> Progress:
    """A progress bar that shows a text of its own, the field, after the count."""
    done = BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(), TextColumn(f"{{task.fields[{field}]}}")
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), *done, console=console, transient=True)


def main() -> None:
    """The entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
