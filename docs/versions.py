"""Writes versions.md: the core of the tests on the versions of Python, PyTorch and JAX that people
have, each in an environment of its own.

The core is everything but the slow tests and the sweeps over all operators (the marks "slow" and
"sweep"). `make test-versions` runs this with the standard library and rich alone. What a run finds
goes to versions.json, which keeps the combinations that were not asked for, and the page is made of
that. With ``--switches`` a part of the core runs once without and once with each of the options of
JAX that are to become its defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "versions.md", ROOT / "docs" / "versions.json"
CORE = "not slow and not sweep"
#: what pytest says of a test, and how it is counted
VERDICTS = {
    "PASSED": "passed",
    "XPASS": "passed",
    "FAILED": "failed",
    "ERROR": "failed",
    "SKIPPED": "skipped",
    "XFAIL": "skipped",
}
# bytes: CUDA's libraries, which PyPI's torch brings on Linux (6.5 GB), and their downloads; 9.3 GB
# were seen
_NEEDED = 9.5e9
#: JAX's options that are to become its defaults, with the values that they will have; JAX reads
#: each from an environment variable of this name in capitals
SWITCHES = {
    "jax_scan3": "1",
    "jax_remat3": "1",
    "jax_custom_vjp3": "1",
    "jax_custom_jvp3": "1",
    "jax_auto_pcast": "0",
    "jax_explicit_x64_dtypes": "error",
}
#: what ``--switches`` runs: loops, checkpoints, rules of derivatives, meshes, and types of 64 bits
SWITCHED = [
    "tests/transforms/test_transforms.py",
    "tests/transforms/test_branches.py",
    "tests/transforms/test_random_numbers_in_loops.py",
    "tests/jit/test_jit.py",
    "tests/jit/test_backward_inside_jit.py",
    "tests/autograd/test_custom_function_rules.py",
    "tests/tensors/test_jax_functions.py",
    "tests/modules/test_checkpoint_policies.py",
    "tests/distributed/test_sharded_modules.py",
]
#: what the page says of the failures with each
WHY = {
    "jax_scan3": (
        "the new scan of JAX 0.12.0.1 is not finished. It has no rules for vmap and for reverse "
        "mode, and ignores `reverse=True`."
    ),
    "jax_remat3": (
        "JAX asks the policy of a checkpoint about fewer primitives. The results are the same."
    ),
    "jax_auto_pcast": (
        "inside of `jax.shard_map`, JAX 0.12.0.1 itself cannot compute `jax.lax.logistic`, nor the "
        "derivatives of `jnp.tanh(x)` and `x**2` (`ValueError: Primitive mul requires varying "
        "manual axes to match`). The tests that fail have these in a layer, or in JAX code of "
        "their own. Other torch code runs there, because this library lets JAX cast the operands "
        "in it, whatever the option says. Programs without `shard_map` run as before."
    ),
}
_PACKAGES = ("torch", "jax", "jaxlib", "flax", "numpy")

EXAMPLES = """
examples:
  python docs/versions.py                            the oldest and the newest that can run here
  python docs/versions.py --only newest --no-write   as in continuous integration: only a table
  python docs/versions.py --only all --delete        all, one environment on the disk at a time
  python docs/versions.py --only 3.12,2.14.1,0.11.2  one combination: Python, torch, jax
  python docs/versions.py --switches --jobs 1        the newest with each of JAX's coming defaults
  python docs/versions.py --only newest --tests tests/jit/test_jit.py tests/docs --no-write
  python docs/versions.py --only newest --no-write --json | jq '.[].failures'

  TORCHFUNC_JAX_VERSIONS_DIR=/big/disk python docs/versions.py    environments kept elsewhere
  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-versions   torch without CUDA

An environment takes 6 GB with PyPI's torch on Linux, a tenth of that without CUDA, and is made
once; it is brought up to date when pyproject.toml changes. Ends with 1 if a test failed, a
combination could not be installed, or the time ran out; with --if-possible, with 1 if a test
failed. A combination that could not be tested keeps the results that it had on the page.
"""


class Combination(NamedTuple):
    """Versions that are tested together; Python's without its last number."""

    python: str
    torch: str
    jax: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, jax {self.jax}"

    @property
    def folder(self) -> str:
        """The name of its environment."""
        return f"python{self.python}-torch{self.torch}-jax{self.jax}"


#: the first one of each whose Python is here is taken; jax 0.10.2 is the last for Python 3.11
OLDEST = (
    Combination("3.11", "2.11.0", "0.10.2"),
    Combination("3.12", "2.11.0", "0.10.2"),
    Combination("3.13", "2.11.0", "0.10.2"),
)
NEWEST = (
    Combination("3.13", "2.15.0", "0.12.0.1"),
    Combination("3.12", "2.15.0", "0.12.0.1"),
    Combination("3.11", "2.15.0", "0.10.2"),
)
ALL = (
    OLDEST[0],
    Combination("3.12", "2.12.1", "0.11.2"),
    Combination("3.12", "2.13.0", "0.11.2"),
    Combination("3.12", "2.14.1", "0.11.2"),
    Combination("3.11", "2.15.0", "0.10.2"),
    NEWEST[0],
)


@dataclasses.dataclass
class Row:
    """What one combination did.

    Attributes:
        combination: Python, torch, jax.
        versions: what was installed, by package.
        counts: passed, failed, skipped; empty where no test ran.
        failures: the names of the tests that failed.
        problem: why there are no counts; "" where there are.
        of_machine: whether the problem is the machine's: no room, nothing installed, or too little
            time while no test had failed.
        minutes: of installing, and of the tests.
        where: date, commit and machine.
        switch: the option of JAX that was switched on, "none" for a run of the same tests without
            one; "" for the core.
        errors: by the name of a test that failed, the first line of its error.
    """

    combination: Combination
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    problem: str = ""
    of_machine: bool = False
    minutes: dict[str, float] = dataclasses.field(default_factory=dict)
    where: dict[str, str] = dataclasses.field(default_factory=dict)
    switch: str = ""
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.combination}{f', {self.switch}' if self.switch else ''}"

    @property
    def right(self) -> bool:
        """Whether the tests ran and none failed."""
        return not self.problem and not self.failures and bool(self.counts.get("passed"))

    @property
    def has_results(self) -> bool:
        """Whether tests ran, also if some failed."""
        return any(self.counts.values())


class NotTested(Exception):
    """Why a combination was not tested to the end."""


class NotHere(NotTested):
    """The machine is why: its disk, its network or its time."""


# -- Pythons ---------------------------------------------------------------------------------------
def pythons() -> dict[str, str]:
    """The Pythons of pyenv, of PATH, and the one that runs this, where they can make environments:
    "3.13" -> its path.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    path_variable = map(Path, filter(None, os.environ.get("PATH", "").split(os.pathsep)))
    found: dict[str, str] = {}
    for folder in (
        *sorted(pyenv.glob("versions/*/bin")),
        *path_variable,
        Path(sys.base_prefix) / "bin",
    ):
        for path in sorted(folder.glob("python3.*")) if folder.is_dir() else ():
            if not re.fullmatch(r"python3\.1\d", path.name):
                continue
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                ask = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
                version = subprocess.run(
                    [path, "-c", ask], capture_output=True, text=True, check=True, timeout=60
                ).stdout.strip()
                found.setdefault(version, str(path))
    return found


def chosen(asked: list[str], here: dict[str, str]) -> tuple[list[Combination], list[str]]:
    """The combinations that are asked for, and what there is to say about those that are not as
    asked.

    Args:
        asked: "oldest", "newest", "all", or "python,torch,jax".
        here: the Pythons of this machine.

    Raises:
        ValueError: a word that is none of these.
    """
    found: list[Combination] = []
    said: list[str] = []
    for word in asked:
        if word in ("oldest", "newest"):
            row = OLDEST if word == "oldest" else NEWEST
            first = next((c for c in row if c.python in here), None)
            if first is None:
                raise ValueError(
                    f"--only {word}: this machine has none of Python "
                    f"{', '.join(sorted(c.python for c in row))}"
                )
            if first != row[0]:
                said.append(
                    f"Python {row[0].python} is not on this machine: the {word} combination is "
                    f"{first} in the place of {row[0]}"
                )
            found.append(first)
        elif word == "all":
            found += ALL
        elif re.fullmatch(r"3\.\d+(,\d+(\.\w+)*){2}", word):
            found.append(Combination(*word.split(",")))
        else:
            raise ValueError(
                f"--only {word}: expected oldest, newest, all, or versions of Python, torch, jax "
                "as in 3.13,2.15.0,0.12.0.1"
            )
    return list(dict.fromkeys(found)), said


# -- environments ----------------------------------------------------------------------------------
def environments() -> Path:
    """The folder of the environments."""
    return Path(os.environ.get("TORCHFUNC_JAX_VERSIONS_DIR") or ROOT / ".venv-versions").resolve()


def install(combination: Combination, here: dict[str, str]) -> Path:
    """Make the environment of a combination, or bring it up to date, and return its folder.

    Raises:
        NotHere: the disk has too little room, there is no such Python, or pip says no.
    """
    folder = environments() / combination.folder
    stamp, wanted = (
        folder / ".installed",
        hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
    )
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    if combination.python not in here:
        raise NotHere(f"Python {combination.python} is not on this machine")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if not stamp.exists() and free < _NEEDED:
        raise NotHere(
            f"{free / 1e9:.1f} GB are free in {folder.parent.name}, and an environment needs up to "
            f"{_NEEDED / 1e9:.1f}"
        )
    if not stamp.exists():
        _run([here[combination.python], "-m", "venv", "--clear", str(folder)])
    pip = [
        *_python(folder),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--no-color",
        "--disable-pip-version-check",
    ]
    exact = [f"torch=={combination.torch}", f"jax=={combination.jax}", f"jaxlib=={combination.jax}"]
    _run([*pip, "-e", f"{ROOT}[test]", *exact])
    stamp.write_text(wanted)
    return folder


def _python(folder: Path) -> list[str]:
    return [str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")]


def _run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        NotHere: it cannot be started, or it fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NotHere(f"not installed: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise NotHere(f"not installed: {(errors or lines or ['no message'])[-1]}")
    return done.stdout


def installed(folder: Path) -> dict[str, str]:
    """The versions in an environment.

    Raises:
        NotHere: its Python or one of the packages is missing.
    """
    ask = (
        "import json, platform; from importlib.metadata import version as v; print(json.dumps({p: "
        f"v(p) for p in {_PACKAGES}}} | "
        '{"python": platform.python_version()}))'
    )
    return json.loads(_run([*_python(folder), "-c", ask]))


@functools.cache
def switches(folder: Path) -> list[str]:
    """Those of SWITCHES that the JAX of an environment has.

    Raises:
        NotHere: JAX cannot be imported.
    """
    ask = f"import jax; print(*[s for s in {list(SWITCHES)} if hasattr(jax.config, s)])"
    return _run([*_python(folder), "-c", ask]).split()


# -- tests -----------------------------------------------------------------------------------------
def core(
    folder: Path,
    tests: list[str],
    jobs: int,
    limit: float,
    on_progress: Callable[[int, int], None],
    switch: str = "",
) -> tuple[dict[str, int], dict[str, str]]:
    """Run the core of the tests in an environment.

    Args:
        folder: the environment.
        tests: files, or [] for all.
        jobs: processes.
        limit: minutes after which they are stopped.
        on_progress: called with percents and the number of failures, as they come.
        switch: the option of JAX that is switched on; "" or "none" for none.

    Returns:
        how many tests passed, failed and were skipped, and by the names of those that failed, in
        their order, the first lines of their errors.

    Raises:
        NotHere: the time ran out before a test had failed.
        NotTested: pytest ended in the middle, or ran no test.
    """
    command = [
        *_python(folder),
        "-m",
        "pytest",
        "-v",
        "--color=no",
        "-n",
        str(jobs),
        "--dist",
        "worksteal",
        "-m",
        CORE,
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    # compiled modules and programs are kept in the environment: in the clone they would be those of
    # another version
    kept = {
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "PYTHONDONTWRITEBYTECODE": "",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "COLUMNS": "400",  # the summary has the first line of each error, cut at this width
    }
    if switch in SWITCHES:
        kept[switch.upper()] = SWITCHES[switch]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | kept,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(limit * 60, stop)
    timer.start()
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, dict[str, str]()
    percent, last = 0, ""
    try:
        # what pytest prints is kept
        with (folder / f"core{switch and f'-{switch}'}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                last = line.strip() or last
                if told := re.match(r"\[gw\d+\] \[ *(\d+)%\] (\w+) (.*\S)", line):
                    percent, verdict = int(told[1]), VERDICTS[told[2]]
                    counts[verdict] += 1
                    failures |= {told[3]: ""} if verdict == "failed" else {}
                    on_progress(percent, len(failures))
                elif line.startswith(("FAILED ", "ERROR ")):
                    for name in failures:
                        error = line.partition(f" {name} - ")[2].strip()
                        failures[name] = first_line(error) or failures[name]
        process.wait()
    finally:
        timer.cancel()
        process.kill()
    if late.is_set() and not failures:
        raise NotHere(
            f"the tests were stopped after {limit:g} minutes, at {percent} %; {counts['passed']} "
            "had passed, and none had failed"
        )
    if not late.is_set() and (process.returncode not in (0, 1) or not any(counts.values())):
        raise NotTested(f"pytest ended with {process.returncode}: {last}")
    return counts, dict(sorted(failures.items()))


def first_line(error: str) -> str:
    """The first line of an error in pytest's summary, without the folders of this machine."""
    return re.sub(r"(?:/[\w.+-]+)+/", "", error.split("\\n")[0]).strip()


def tested(
    combination: Combination,
    here: dict[str, str],
    asked: argparse.Namespace,
    on_stage: Callable[[str, int, int], None],
) -> Iterator[Row]:
    """Install a combination and run the tests on it, once or with each switch."""
    row = Row(combination, where=_where(), switch="" if asked.switches is None else "none")
    start = time.monotonic()
    try:
        on_stage("installing", 0, 0)
        folder = install(combination, here)
        row.versions = installed(folder)
        row.minutes["installing"] = round((time.monotonic() - start) / 60, 1)
        for switch in [""] if asked.switches is None else asked.switches or ["none", *SWITCHES]:
            if not switch or switch == "none" or switch in switches(folder):
                run = dataclasses.replace(row, switch=switch)
                yield _run_of(run, folder, asked, on_stage)
    except NotTested as why:
        row.problem, row.of_machine = str(why), isinstance(why, NotHere)
        yield row
    finally:
        if asked.delete:
            shutil.rmtree(environments() / combination.folder, ignore_errors=True)


def _run_of(
    row: Row, folder: Path, asked: argparse.Namespace, on_stage: Callable[[str, int, int], None]
) -> Row:
    """The row with what its tests did."""
    start = time.monotonic()
    stage = f"testing {row.switch}".rstrip()
    try:
        row.counts, row.errors = core(
            folder,
            asked.tests or (SWITCHED if row.switch else []),
            asked.jobs,
            asked.limit,
            lambda done, bad: on_stage(stage, done, bad),
            row.switch,
        )
        row.failures = list(row.errors)
        minutes = round((time.monotonic() - start) / 60, 1)
        row.minutes = row.minutes | {"testing": minutes}
    except NotTested as why:
        row.problem, row.of_machine = str(why), isinstance(why, NotHere)
    return row


def _where() -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.*)$", info.read_text(), re.M) if info.exists() else []
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "machine": (
            f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, "
            f"{platform.system()}"
        ),
    }


# -- what is shown ---------------------------------------------------------------------------------
def table(rows: list[Row]) -> Table:
    """The rows as a rich table."""
    shown = Table(title="The core of the tests, by versions")
    for name in ("Python", "torch", "jax", "flax", "numpy"):
        shown.add_column(name)
    for name in ("passed", "failed", "skipped", "installing", "testing"):
        shown.add_column(name, justify="right")
    if any(row.switch for row in rows):
        shown.add_column("switch")
    for row in rows:
        shown.add_row(*cells(row), *([row.switch] if row.switch else []))
    return shown


def cells(row: Row) -> list[str]:
    """What both tables say of a row."""
    versions = {**row.combination._asdict(), **row.versions}
    times = [
        f"{row.minutes[stage]:.1f} min" if stage in row.minutes else "-"
        for stage in ("installing", "testing")
    ]
    counts = [str(row.counts.get(name, "-")) for name in ("passed", "failed", "skipped")]
    return [
        *(versions.get(name, "-") for name in ("python", "torch", "jax", "flax", "numpy")),
        *counts,
        *times,
    ]


def page(rows: list[Row]) -> str:
    """The text of versions.md."""
    with_switches, rows = [r for r in rows if r.switch], [r for r in rows if not r.switch]
    lines = [
        "# Versions",
        "",
        *_wrapped(
            "This page has the results of the tests on the supported versions of Python, PyTorch "
            "and JAX. Each combination of versions has an environment of its own, with the newest "
            "release of every other package that fits. The tests are the core: all but the slow "
            "ones and the sweeps over all operators, whose results are in "
            "[coverage.md](coverage.md). `make test-versions` runs the oldest and the newest "
            'combination and writes this page; `make test-versions ARGS="--only all"` runs all '
            "combinations. The time of installing is 0.0 min where the environment was there "
            "before."
        ),
        "",
        (
            "| Python | PyTorch | JAX | Flax | NumPy | passed | failed | skipped | installing | "
            "testing | date | commit |"
        ),
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
        *(
            f"| {' | '.join([*cells(row), row.where['date'], row.where['commit']])} |"
            for row in rows
        ),
        "",
    ]
    for machine in dict.fromkeys(row.where["machine"] for row in rows):
        where = [str(row.combination) for row in rows if row.where["machine"] == machine]
        lines += [*_wrapped(f"These ran on {machine}: {'; '.join(where)}."), ""]
    lines += [
        "`torchfunc-jax doctor` prints the versions that you have, and their known faults.",
        "",
    ]
    if any(not row.right for row in rows):
        lines += ["## What failed", ""]
        for row in rows:
            if not row.right:
                names = [row.problem] if row.problem else [f"`{name}`" for name in row.failures]
                lines += [f"{row.combination}:", "", *(f"- {name}" for name in names), ""]
    return "\n".join([*lines, *_section_of_switches(with_switches)])


def _section_of_switches(rows: list[Row]) -> list[str]:
    """The lines of versions.md about JAX's coming defaults."""
    if not rows:
        return []
    files = ", ".join(f"`{name.removeprefix('tests/')}`" for name in SWITCHED)
    text = (
        "Some options of JAX are to get another default value. The table has the results of a part "
        "of the core without these values (none) and with each of them, one at a time, which an "
        f"environment variable such as `JAX_SCAN3=1` sets. The tests are those of {files}. "
        '`make test-versions ARGS="--switches"` runs them again.'
    )
    lines = ["## JAX's coming defaults", "", *_wrapped(text), ""]
    lines += [
        "| JAX | option | passed | failed | skipped | date | commit |",
        "| --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        value = f"`{row.switch}={SWITCHES[row.switch]}`" if row.switch in SWITCHES else "none"
        counts = [str(row.counts.get(name, "-")) for name in ("passed", "failed", "skipped")]
        shown = [row.combination.jax, value, *counts, row.where["date"], row.where["commit"]]
        lines.append(f"| {' | '.join(shown)} |")
    for row in rows:
        if row.right:
            continue
        why = f" {WHY[row.switch]}" if row.switch in WHY else ""
        lines += ["", *_wrapped(f"With `{row.switch}` (JAX {row.combination.jax}):{why}"), ""]
        if row.problem:
            lines.append(f"- {row.problem}")
        for error in dict.fromkeys(row.errors.values()):
            names = [name for name, of in row.errors.items() if of == error]
            number = f"{len(names)} tests, such as" if len(names) > 1 else "1 test,"
            lines.append(f"- {number} `{names[0]}`: `` {error} ``")
    return [*lines, ""]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def load() -> list[Row]:
    """The rows of versions.json."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return [Row(**row | {"combination": Combination(*row["combination"])}) for row in known]


def write(rows: list[Row]) -> dict[str, Row]:
    """Put rows in the place of those of the same combination and switch, and write versions.json
    and versions.md. A row without results never takes the place of one that has some.

    Returns:
        By why there are no new results, the row that is kept.
    """
    merged: dict[Any, Row] = {}
    kept: dict[str, Row] = {}
    for row in [*load(), *rows]:
        old = merged.get((row.combination, row.switch))
        if old is not None and old.has_results and not row.has_results:
            kept[f"{row}: {row.problem}"] = old
        else:
            merged[row.combination, row.switch] = row
    ordered = sorted(
        merged.values(),
        key=lambda row: (
            [[int(n) for n in re.findall(r"\d+", v)] for v in row.combination[1:]],
            ["", "none", *SWITCHES].index(row.switch),
        ),
    )
    RESULTS.write_text(json.dumps([dataclasses.asdict(row) for row in ordered], indent=1) + "\n")
    PAGE.write_text(page(ordered))
    return kept


@contextlib.contextmanager
def _progress(
    console: Console,
) -> Iterator[Callable[[Combination], Callable[[str, int, int], None]]]:
    """A bar for each combination; without a terminal, a line for each tenth."""
    done = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *done,
        console=console,
        disable=not console.is_terminal,
    ) as bar:

        def begin(combination: Combination) -> Callable[[str, int, int], None]:
            task = bar.add_task(str(combination), total=None, failed="")
            said = ("", -1)

            def on_stage(stage: str, done: int, failed: int) -> None:
                nonlocal said
                runs, words = stage.startswith("testing"), f"{failed} failed" if failed else ""
                bar.update(
                    task,
                    description=f"{combination}: {stage}",
                    total=100 if runs else None,
                    completed=done,
                    failed=words,
                )
                if not console.is_terminal and said != (stage, done // 10):
                    said = (stage, done // 10)
                    percent = f" {done} % {words}".rstrip() if runs else ""
                    console.print(
                        f"{combination}: {stage}{percent}", highlight=False, soft_wrap=True
                    )

            return on_stage

        yield begin


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python docs/versions.py",
        description="Run the core of the tests on several versions of Python, PyTorch and JAX.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = "oldest, newest, all, or PYTHON,TORCH,JAX; again for more (oldest and newest)"
    parser.add_argument("--only", action="append", metavar="WHICH", help=which)
    parser.add_argument(
        "--switches",
        nargs="*",
        choices=["none", *SWITCHES],
        metavar="NAME",
        help=f"some tests without (none) and with each of {', '.join(SWITCHES)}, or these",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (2)")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=[],
        metavar="FILE",
        help="these test files, in the place of all",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=60,
        metavar="MINUTES",
        help="stop the tests of a combination after so long (60)",
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete each environment after its tests"
    )
    possible = "what cannot be installed here, or takes too long, is named and is no failure"
    parser.add_argument("--if-possible", action="store_true", help=possible)
    parser.add_argument(
        "--no-write",
        action="store_true",
        help="leave docs/versions.md and docs/versions.json as they are",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    asked = options(argv)
    console = Console(stderr=True)
    here = pythons()
    try:
        default = ["oldest", "newest"] if asked.switches is None else ["newest"]
        combinations, said = chosen(asked.only or default, here)
    except ValueError as error:
        console.print(error, highlight=False, soft_wrap=True)
        return 2
    console.print(f"Pythons on this machine: {', '.join(sorted(here))}", highlight=False)
    for line in said:
        console.print(f"[bold]{line}[/bold]", highlight=False, soft_wrap=True)
    rows: list[Row] = []
    try:
        with _progress(console) as begin:
            for combination in combinations:
                rows.extend(tested(combination, here, asked, begin(combination)))
    finally:
        if rows and not asked.no_write and not asked.tests:
            for why, row in write(rows).items():
                keeps = f"docs/versions.md keeps the results of {row.where['date']}"
                console.print(f"{why}; {keeps}", highlight=False, markup=False, soft_wrap=True)
    if asked.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
        for row in rows:
            for line in [row.problem] if row.problem else row.failures:
                print(f"{row}: {line}")
    return 0 if all(row.right or (asked.if_possible and row.of_machine) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
