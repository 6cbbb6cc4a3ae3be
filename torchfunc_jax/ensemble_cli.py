"""`torchfunc-jax ensemble`: trains the ensemble on handwritten digits and shows what came out; it
needs the extra `demo`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from torchfunc_jax.examples.digits import Settings, Training

EXAMPLES = """
[bold]Examples[/bold]

[cyan]torchfunc-jax ensemble[/cyan]

    Run the whole demo: 32 members for 40 epochs, beside torch.func.

[cyan]torchfunc-jax ensemble --members 8 --epochs 5[/cyan]

    Run a small demo.

[cyan]torchfunc-jax ensemble --no-compare --members 128 --output runs/large[/cyan]

    Train a larger ensemble, without torch.func.

[cyan]torchfunc-jax ensemble --devices 8 --mesh member=4,data=2[/cyan]

    Share the members among 4 devices and each batch among 2. Without a TPU or GPU, the 8 devices
    are simulated on the CPU.

[cyan]torchfunc-jax ensemble --devices 8 --processes 2[/cyan]

    The same devices in two processes, which find each other by jax.distributed.

[cyan]torchfunc-jax ensemble --resume[/cyan]

    Save a checkpoint at each epoch. After Ctrl-C or a crash, the same command goes on from there,
    also on other devices.

[cyan]torchfunc-jax ensemble --dry-run --members 4096 --mesh member=256[/cyan]

    Print what a run takes on 256 devices: memory, FLOPs and bytes sent. Nothing is trained, and the
    devices need not be there.

[cyan]torchfunc-jax ensemble --json | jq .by_size.nll.mean[/cyan]

    Print the report as JSON on stdout. The progress stays on stderr.

[cyan]python -c "import torch; print(len(torch.load('runs/ensemble/members.pt')))"[/cyan]

    Load the trained members: a list with one state dict for each, which
    torchfunc_jax.examples.digits.DigitNet takes.
"""


def ensemble(
    members: Annotated[
        int, typer.Option("--members", "-m", min=1, help="The number of networks in the ensemble.")
    ] = 32,
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs", "-e", min=1, help="The number of passes over the 1,437 training digits."
        ),
    ] = 40,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", "-b", min=1, max=1437, help="The number of digits in a batch."
        ),
    ] = 64,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", min=0.0, help="Adam's rate at first; it falls to 0.")
    ] = 8e-3,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            "-s",
            min=0,
            help="The seed of the split, the initial weights and the batches.",
        ),
    ] = 0,
    device: Annotated[
        str | None,
        typer.Option("--device", "-d", help="cpu, gpu or tpu; by default JAX's own choice."),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=1,
            help="The number of devices; on a CPU they are simulated. By default one.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option("--processes", min=1, help="The number of processes that share the devices."),
    ] = 1,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help=(
                "member=M,data=D: M devices share the members, and D each batch. By default as "
                "many as can share the members."
            ),
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep checkpoints in the output folder, and go on from the newest."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the run takes, without running it.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Train the same ensemble under torch.func too; not with --resume.",
        ),
    ] = True,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", file_okay=False, help="The folder for plots, weights and report."
        ),
    ] = Path("runs/ensemble"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead of tables.")
    ] = False,
) -> None:
    """Train an ensemble of small torch CNNs on handwritten digits as one XLA program, and the same
    ensemble under torch.func.

    Both start from the same weights and see the same batches of scikit-learn's 1,797 digits; a
    fifth of these is kept for testing. The command prints tables of step times, losses, accuracies,
    uncertainties and differences, and writes [green]ensemble.png[/green] (plots),
    [green]report.json[/green] and [green]members.pt[/green] (weights) into the output folder.

    Progress is shown in members per second: each member counts once for each step that it takes.

    Ctrl-C stops after the step that is running and keeps what was trained.
    """
    console = Console(stderr=True)
    console.print("[dim]Loading PyTorch and JAX ...[/dim]")
    try:
        import sklearn  # noqa: F401  # it has the digits; imported where they are read

        from torchfunc_jax.examples import digits_plots as plots
        from torchfunc_jax.examples.digits import Settings
    except ModuleNotFoundError as missing:
        raise SystemExit(
            f"torchfunc-jax ensemble: {missing.name} is not installed; pip install "
            "'torchfunc-jax[demo]' brings it"
        ) from None

    shape = _mesh(mesh, number, processes, members)
    settings = Settings(
        members, epochs, batch_size, learning_rate, seed, device, compare and not resume, shape
    )
    if dry_run:
        price(settings, as_json)
        return
    output.mkdir(parents=True, exist_ok=True)
    if processes > 1:
        result = _in_processes(settings, output, resume, processes, console)
    else:
        if shape is not None:
            _simulate(math.prod(shape))
        result = train(settings, output, resume)
    with console.status("Drawing ..."):
        (output / "report.json").write_text(json.dumps(result))
        plots.page(result).savefig(output / "ensemble.png")
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(*tables(result), sep="\n")
    console.print(
        f"Wrote [green]{output}[/green]: ensemble.png (plots), report.json, members.pt (weights)",
        highlight=False,
    )
    if result["interrupted"]:
        raise typer.Exit(130)


def _mesh(
    text: str | None, devices: int | None, processes: int, members: int
) -> tuple[int, int] | None:
    """The mesh that the options ask for; None: one device."""
    if text is None:
        n = devices or processes
        if n % processes:
            raise typer.BadParameter(
                f"--devices: expected a multiple of the {processes} processes, got {n}"
            )
        member = math.gcd(n, members)
        return None if n == 1 else (member, n // member)
    found = dict.fromkeys(("member", "data"), 1)
    for part in text.split(","):
        match = re.fullmatch(r"\s*(member|data)\s*=\s*([1-9]\d*)\s*", part)
        if match is None:
            raise typer.BadParameter(
                "--mesh: expected member=M,data=D with two positive numbers, "
                f"or one of them, got {text!r}"
            )
        found[match[1]] = int(match[2])
    shape = found["member"], found["data"]
    if devices is not None and math.prod(shape) != devices:
        raise typer.BadParameter(
            f"--mesh: expected M times D to be the {devices} devices, got "
            f"{shape[0]} times {shape[1]}"
        )
    if math.prod(shape) % processes:
        raise typer.BadParameter(
            f"--mesh: expected a multiple of the {processes} processes, got {shape[0]} times "
            f"{shape[1]} devices"
        )
    return shape


def _simulate(devices: int) -> None:
    """Let JAX have that many devices on a CPU, if it has not started yet; elsewhere the devices are
    those that are there.
    """
    import jax

    # JAX runs already; the mesh says whether its devices are enough
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", devices)


def _in_processes(
    settings: Settings, output: Path, resume: bool, processes: int, console: Console
) -> dict[str, Any]:
    """The report of a run in several processes of this machine."""
    from torchfunc_jax.ensemble import ProcessError, launch

    before = signal.getsignal(signal.SIGINT)
    if resume:  # SIGTERM is what launch passes on
        signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        return launch(
            _work,
            settings,
            output,
            resume,
            processes=processes,
            devices_per_process=math.prod(settings.mesh) // processes,
        )[0]
    except ProcessError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        if resume:
            console.print("The same command goes on from the last checkpoint.")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print(
            "Stopped; nothing is kept. With --resume, the same command would "
            "go on from the last checkpoint."
        )
        raise typer.Exit(130) from None
    except SystemExit:
        console.print("Stopped and saved; the same command goes on from here.")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _work(settings: Settings, output: Path, resume: bool) -> dict[str, Any]:
    """What each process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    os.dup2(2, 1)  # Gloo writes to stdout, which is for the report
    return train(settings, output, resume)


def train(settings: Settings, output: Path, resume: bool) -> dict[str, Any]:
    """Train, save the members, and report."""
    import jax

    from torchfunc_jax.examples.digits import Training, checkpoints, report, throughput

    console = Console(stderr=True, quiet=jax.process_index() > 0)
    try:
        training = Training(settings)
        kept = checkpoints(settings, output / "checkpoints") if resume else None
    except (ImportError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with (
            _denormals_flushed(),
            _stop_on_interrupt(console) as stop,
            _progress(console, training) as on_step,
        ):
            training.run(on_step, stop, kept)
    finally:
        training.save(output)
    with console.status("Testing the members and comparing ..."):
        result = report(training)
    if len(jax.local_devices()) > 1 and jax.process_count() == 1 and not training.interrupted:
        with console.status("Measuring a step on 1, 2, ... devices ..."):
            result["throughput"] = throughput(settings, training.digits)
    return result


def price(settings: Settings, as_json: bool) -> None:
    """Print what a step takes, by the program that XLA compiles for one device."""
    from torchfunc_jax.examples.digits import priced

    try:
        found = priced(settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print(
            json.dumps(
                dataclasses.asdict(found)
                | {"devices": found.devices, "total_flops": found.total_flops, "sent": found.sent}
            )
        )
    else:
        Console().print(found.table())


# -- what came out ---------------------------------------------------------------------------------
def tables(result: dict[str, Any]) -> list[Table | str]:
    """The report as rich tables: of the systems, of ensembles by their size, and of the systems'
    differences where there are two.
    """
    settings, where = result["settings"], result["machine"]
    systems = Table(
        title=(
            f"{settings['members']} CNNs of {result['parameters_per_member']:,} parameters, "
            f"{result['steps']} steps{' (stopped early)' if result['interrupted'] else ''}, "
            f"{result['test_images']} test digits"
        ),
        caption=(
            f"{where['cpu']}, {where['cores']} cores, {_devices(result)}; torch {where['torch']}, "
            f"jax {where['jax']}"
        ),
    )
    systems.add_column("", no_wrap=True)
    for name in (
        "step",
        "first step",
        "final loss",
        "accuracy,\nmean member",
        "accuracy,\nensemble vote",
    ):
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
    out: list[Table | str] = [systems, _by_size(result), _strange(result)]
    if "throughput" in result:
        speed = ", ".join(
            f"{row['members_per_second']:,.0f} on {row['devices']}" for row in result["throughput"]
        )
        out.append(
            f"Members trained per second, by devices: [bold]{speed}[/bold] "
            f"(on {where['cores']} cores)"
        )
    if "difference" not in result:
        return out
    difference = Table(
        title="Largest relative difference of the two",
        caption="training magnifies the rounding errors of every step",
    )
    difference.add_column("", no_wrap=True)
    difference.add_column("losses", justify="right")
    difference.add_column("gradients", justify="right")
    titles = {
        "first_step": "first step",
        "end_same_weights": "end, both given the same weights",
        "end": "end, each with its own weights",
    }
    for key, title in titles.items():
        one = result["difference"][key]
        difference.add_row(title, f"{one['loss']:.1e}", f"{one['gradient']:.1e}")
    return [*out, difference, _speed_up(result)]


def _devices(result: dict[str, Any]) -> str:
    kind, n, p = result["machine"]["device"], result["devices"], result["processes"]
    return f"device {kind}" if n == 1 else f"{n} devices ({kind}) in {p} process{'es' * (p > 1)}"


def _by_size(result: dict[str, Any]) -> Table:
    """The metrics of the mean probability of 1, 2, 4, ... members."""
    curve = result["by_size"]
    table = Table(
        title="The mean of so many members, on the test digits",
        caption="averages over 20 draws of members",
    )
    table.add_column("members", justify="right")
    for name in ("accuracy", "NLL", "Brier", "ECE"):
        table.add_column(name, justify="right")
    last = len(curve["members"]) - 1
    for i, size in enumerate(curve["members"]):
        if i == last or size & (size - 1) == 0:
            accuracy, nll, brier, ece = (
                curve[name]["mean"][i] for name in ("accuracy", "nll", "brier", "ece")
            )
            table.add_row(str(size), f"{accuracy:.2%}", f"{nll:.4f}", f"{brier:.4f}", f"{ece:.2%}")
    return table


def _strange(result: dict[str, Any]) -> Table:
    """How well the ensemble's uncertainty tells letters from digits."""
    found = result["out_of_distribution"]
    table = Table(
        title=f"Letters told from digits: {found['letters']} letters, made by turning digits"
    )
    for name in ("by", "AUROC", "FPR95"):
        table.add_column(name, justify="left" if name == "by" else "right")
    table.add_row(
        "entropy of a member, mean",
        f"{found['mean_member']['auroc']:.3f}",
        f"{found['mean_member']['fpr95']:.1%}",
    )
    for name, score in found["scores"].items():
        table.add_row(f"{name} of the ensemble", f"{score['auroc']:.3f}", f"{score['fpr95']:.1%}")
    return table


def _speed_up(result: dict[str, Any]) -> str:
    found, where = result["speed_up"], result["machine"]
    if found is None:
        return "Speed-up over torch.func: not shown, because so few steps tell nothing of it."
    load = (
        ""
        if where["load"] is None
        else f"; load of the machine {where['load']:.1f} on {where['cores']} cores"
    )
    busy = (
        "; other programs run here: measure again"
        if where["load"] is not None and where["load"] > 2 * where["cores"]
        else ""
    )
    return (
        f"Speed-up of a step over torch.func: [bold]{found['median']:.2f}x[/bold] "
        f"(half of the steps: {found['low']:.2f}x to {found['high']:.2f}x{load}{busy})"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


# -- while it runs ---------------------------------------------------------------------------------
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
    """Ctrl-C asks the training to stop after its step, so that weights are never half written; a
    second one stops at once.
    """
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        console.print("Stopping after this step and saving; press Ctrl-C again to stop at once.")

    before = signal.getsignal(signal.SIGINT)
    try:
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: no signals come here
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(console: Console, training: Training) -> Iterator[Callable[[Training], None]]:
    """A progress bar with the members per second and each system's loss; without a terminal, a line
    for each epoch.
    """
    members = training.settings.members

    def state(training: Training) -> str:
        losses = "  ".join(
            f"{name} {values[-1].mean():.4f}" for name, values in training.losses.items()
        )
        recent = training.seconds["torchfunc_jax"][1:][-50:]
        speed = f"{members * len(recent) / sum(recent):,.0f} members/s" if recent else ""
        return f"loss {losses}  {speed}"

    def done(training: Training) -> int:
        return training.resumed_at + len(training.losses["torchfunc_jax"])

    if not console.is_terminal:
        epoch = training.steps // training.settings.epochs

        def on_epoch(training: Training) -> None:
            if done(training) % epoch == 0:
                line = f"Training: {done(training)} of {training.steps} steps, {state(training)}"
                console.print(line, highlight=False, soft_wrap=True)

        yield on_epoch
        return
    with bar(console, "steps", "state") as shown:
        task = shown.add_task(f"Compiling {members} CNNs", total=training.steps, state="")

        def on_step(training: Training) -> None:
            shown.update(
                task,
                description=f"Training {members} CNNs",
                completed=done(training),
                state=f"[dim]{state(training)}[/dim]",
            )

        yield on_step


def bar(console: Console, unit: str, field: str) -> Progress:
    """A progress bar that shows a text of its own, the field, after the count."""
    done = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn(f"{{task.fields[{field}]}}"),
    )
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), *done, console=console, transient=True
    )
