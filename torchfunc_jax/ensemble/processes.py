"""Processes of one run: started on this machine (``launch``) or by a cluster, and ended with a
named error when one of them is lost.

``jax.distributed`` connects them. Beside it each process has a thread that watches the others over
a connection to process 0: a process that is killed, fails or falls silent is named in the message
of all others, which end with exit code ``LOST``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import jax

from bridge import private_jax, processes
from bridge.errors import public

__all__ = ["LOST", "ProcessError", "initialize", "launch"]

#: Exit code of a process that ends because another one is lost.
LOST = 85
_PREEMPTED = 128 + signal.SIGTERM
# exit codes of processes that are less likely to be the cause
_LATER = {None: 1, -signal.SIGABRT: 2, LOST: 3}


class ProcessError(RuntimeError):
    """A process of a run failed, was killed or did not come.

    Attributes:
        process: its index; None if none can be told.
    """

    def __init__(self, message: str, process: int | None = None) -> None:
        super().__init__(message)
        self.process = process


@public
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = processes.TIMEOUT,
    limit: float = 30.0,
    **options: Any,
) -> None:
    """Connect the processes of a run, each of which calls this before it uses a device, and let
    them watch each other from now on.

    If one of them is killed, ends by an error or does not answer, each of the others prints which
    and ends with exit code ``LOST``, even if it waits in a collective. A process whose program has
    come to its end is not lost.

    Args:
        coordinator_address: "host:port" of process 0, whose port is free. This and the next two may
            be left out where JAX finds them by itself: Cloud TPU, Slurm, Open MPI, Kubernetes.
        num_processes: how many there are.
        process_id: the index of this one.
        timeout: seconds to wait for the others at the start.
        limit: seconds within which the others end when a process is lost. One that is killed is
            noticed at once, one whose machine or network fails by its silence.
        options: further arguments of ``jax.distributed.initialize``.

    Raises:
        RuntimeError: a process did not come in time, and the message says which.
        ValueError: an argument is missing and JAX cannot find it; the limit is not positive.

    Source: https://docs.jax.dev/en/latest/multi_process.html

    Example:
        >>> from torchfunc_jax.ensemble import initialize
        >>> initialize("10.0.0.1:1234", num_processes=2, process_id=0, limit=20)  # doctest: +SKIP
    """
    if limit <= 0:
        raise ValueError(f"limit: expected a positive number of seconds, got {limit}")
    if None in (coordinator_address, num_processes, process_id):
        coordinator_address, num_processes, process_id = private_jax.cluster(
            coordinator_address, num_processes, process_id, timeout
        )
        if None in (coordinator_address, num_processes, process_id):
            raise ValueError(
                "initialize: JAX finds no cluster around this process; pass coordinator_address, "
                "num_processes and process_id, or use launch"
            )
    if coordinator_address.rpartition(":")[0] in ("", "0.0.0.0", "[::]"):
        raise ValueError(
            "coordinator_address: expected 'host:port' by which the others reach process 0, got "
            f"{coordinator_address!r}"
        )
    _connected(coordinator_address, num_processes, process_id, timeout, limit, options)


def _connected(
    address: str, count: int, me: int, timeout: float, limit: float, options: dict[str, Any]
) -> _Watch | None:
    host = address.rpartition(":")[0]
    # JAX ends processes too, without a name
    options = {"heartbeat_timeout_seconds": max(100, round(2 * limit)), **options}
    processes.initialize(address, count, me, timeout, **options)
    if count == 1:
        return None
    server = (
        socket.create_server((host if host in ("127.0.0.1", "localhost") else "", 0))
        if me == 0
        else None
    )
    own = [server.getsockname()[1], secrets.token_hex()] if server else []
    port, word = json.loads(
        processes.exchange(json.dumps(own), tuple(range(count)), timeout, "initialize")[0]
    )
    return _Watch(me, count, limit, word, server or socket.create_connection((host, port), limit))


# -- watching --------------------------------------------------------------------------------------
class _Peer:
    """One connection: what has come and is no whole line yet, and when something came last."""

    def __init__(self, connection: socket.socket, index: int | None = None) -> None:
        self.connection, self.index, self.rest, self.heard = (
            connection,
            index,
            b"",
            time.monotonic(),
        )
        self.name = f"process {index}"
        connection.settimeout(1.0)

    def lines(self) -> Iterator[str | None]:
        """What the other side says; None when the connection has ended."""
        try:
            data = self.connection.recv(65536)
        except TimeoutError:
            return
        except OSError:
            data = b""
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if not data:
            yield None

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # its end is noticed where it is read
            self.connection.sendall(text.encode() + b"\n")


class _Watch:
    """The thread that watches: in process 0 all other processes, in another process that one, which
    passes on what it learns.

    Said are lines: "" (still here), "hello [word, index, name]", "bye" (my program has come to its
    end) and "lost [index, what happened]".
    """

    def __init__(
        self, me: int, count: int, limit: float, word: str, connection: socket.socket
    ) -> None:
        self.me, self.count, self.limit, self.word = me, count, limit, word
        self.step = min(limit / 5, 1.0)  # seconds between two signs of life
        self.name = f"process {me} of {count} (number {os.getpid()} on {socket.gethostname()})"
        self.server = connection if me == 0 else None
        self.awaited = set(range(1, count)) if me == 0 else set()  # who has not said hello
        self.selector = selectors.DefaultSelector()
        self.peers: list[_Peer] = []
        if self.server:
            self.selector.register(connection, selectors.EVENT_READ)
        else:
            self.meet(_Peer(connection, 0))
        self.speaking, self.left, self.alone = threading.Lock(), False, threading.Event()
        threading.Thread(target=self.run, name="watch of the processes", daemon=True).start()
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            if issubclass(kind, Exception):
                self.leave(self.failure(error))

        sys.excepthook = hook
        # after jax.distributed's own, so it runs before that waits for the others
        atexit.register(self.leave)

    def meet(self, peer: _Peer) -> None:
        self.peers.append(peer)
        self.selector.register(peer.connection, selectors.EVENT_READ, peer)
        if not self.server:
            peer.say("hello " + json.dumps([self.word, self.me, self.name]))

    def part(self, peer: _Peer) -> None:
        self.peers.remove(peer)
        self.selector.unregister(peer.connection)
        peer.connection.close()
        if not self.peers and not self.awaited:
            self.alone.set()

    def run(self) -> None:
        step = self.step
        began = told = time.monotonic()
        while True:
            for key, _ in self.selector.select(step):
                if key.data is None:
                    self.meet(_Peer(self.server.accept()[0]))
                elif not all(self.hear(key.data, line) for line in key.data.lines()):
                    self.part(key.data)
            now = time.monotonic()
            if now - told >= step:
                told = now
                for peer in self.peers:
                    peer.say("")
            for peer in [p for p in self.peers if now - p.heard > self.limit - 2 * step]:
                if peer.index is None:  # a stranger
                    self.part(peer)
                else:
                    self.lost(
                        peer.index,
                        f"{peer.name} has not answered for {now - peer.heard:.1f} seconds",
                    )
            if self.awaited and now - began > self.limit - step:
                missing = min(self.awaited)
                self.lost(
                    missing,
                    f"process {missing} of {self.count} has not come to the watch within "
                    f"{now - began:.1f} seconds",
                )

    def hear(self, peer: _Peer, line: str | None) -> bool:
        """Take in what a peer says; False: nothing more will come of it."""
        kind, _, rest = (line or "").partition(" ")
        if line is None:
            if peer.index is not None:
                self.lost(
                    peer.index,
                    f"{peer.name} has ended without a word: it was killed, or ran out of memory",
                )
        elif peer.index is None:
            word, index, name = json.loads(rest) if kind == "hello" else (None, None, None)
            if word == self.word:
                peer.index, peer.name = index, name
                self.awaited.discard(index)
                peer.say("hello " + json.dumps([word, 0, self.name]))
            return word == self.word
        elif kind == "hello":
            peer.name = json.loads(rest)[2]
        elif kind == "lost":
            self.lost(*json.loads(rest))
        return line is not None and kind != "bye"

    def lost(self, index: int, what: str) -> None:
        """Tell everyone which process is lost, and end this one."""
        with self.speaking:
            if self.left:
                return
            for peer in self.peers:
                peer.say("lost " + json.dumps([index, what]))
            self.outlive(index)
            _ends(
                LOST,
                f"process {self.me} of {self.count} ends because another one is lost: {what}\n",
            )

    def failure(self, error: BaseException) -> str:
        """What to tell the others of an error; if another process was lost before, the thread knows
        in a moment and ends this one.
        """
        time.sleep(min(1.0, self.limit / 4))
        return "".join(traceback.format_exception_only(error)).strip()

    def leave(self, failure: str = "") -> None:
        """The last words of this process; after a failure it ends at once, because jax.distributed
        would wait for the others.
        """
        if self.server and not failure:
            self.alone.wait()  # until then it is told, and tells the others, who is lost
        with self.speaking:
            if self.left:
                return
            self.left = True
            for peer in list(self.peers):
                peer.say(
                    f"lost {json.dumps([self.me, f'{self.name} has failed: {failure}'])}"
                    if failure
                    else "bye"
                )
            if failure:
                self.outlive(self.me)
                _ends(1)

    def outlive(self, index: int) -> None:
        """In process 0, wait a moment until the others have ended but for one: JAX ends them,
        without a name, when its coordinator has.
        """
        until = time.monotonic() + self.step
        there = (
            [peer.connection for peer in self.peers if peer.index != index] if self.server else []
        )
        with contextlib.suppress(OSError, ValueError):  # the other thread may close a connection
            while there and (rest := until - time.monotonic()) > 0:
                ready = wait(there, rest)
                there = [c for c in there if c not in ready or c.recv(65536)]


def _ends(code: int, said: str = "") -> None:
    """End this process now, whatever its threads wait for."""
    with contextlib.suppress(OSError):
        os.write(2, said.encode())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


# -- starting --------------------------------------------------------------------------------------
@public
def launch(
    target: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    processes: int = 2,
    devices_per_process: int = 1,
    timeout: float = 60.0,
    limit: float = 30.0,
    logs: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Run a function or a script in several processes of this machine, connected over loopback,
    each with CPU devices of its own.

    SIGTERM is passed on to the processes, so that a run with checkpoints saves and ends. On a pod
    or cluster, where something else starts the processes, call ``initialize`` in each.

    Args:
        target: a function that pickle can find (of a module), the name of a module, or the path of
            a script (".py"). It is called or run as ``__main__`` in each process when they are
            connected, and must not use devices when it is imported.
        args: of the function.
        processes: how many.
        devices_per_process: CPU devices that each process has; ``jax.devices()`` are those of all
            processes.
        timeout: seconds that the processes wait for each other at the start.
        limit: seconds within which all end when one is lost, as of ``initialize``.
        logs: a folder in which process i writes "process_i.txt"; None: they write where this one
            does.

    Returns:
        list: what the function returned in each process, which pickle must be able to send.

    Raises:
        ProcessError: a process failed, was killed or did not come, and the message says which; by
            then all have ended.
        TypeError, ValueError: an argument is wrong.
        SystemExit: with code 143, if SIGTERM ended the run.

    Source: https://docs.jax.dev/en/latest/multi_process.html

    Example:
        >>> from torchfunc_jax.ensemble import launch
        >>> launch("train.py", processes=4)  # doctest: +SKIP
    """
    if not callable(target) and not isinstance(target, str | os.PathLike):
        raise TypeError(
            "target: expected a function, the name of a module or the path of "
            f"a script, got {target!r}"
        )
    if args and not callable(target):
        raise TypeError("args: a script takes none; use a function")
    for name, number in (("processes", processes), ("devices_per_process", devices_per_process)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}: expected a positive integer, got {number!r}")
    folder = None if logs is None else Path(logs).absolute()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    # which imports torch and JAX once; it has used no device when it forks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchfunc_jax.ensemble"])
    settings = {
        "port": _free_port(),
        "count": processes,
        "devices": devices_per_process,
        "timeout": timeout,
        "limit": limit,
        "logs": folder,
    }
    running = _Running(
        context, [(target, args, {**settings, "me": i}) for i in range(processes)], limit
    )
    with running.passing_on():
        return running.results()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class _Running:
    """The processes that ``launch`` has started."""

    def __init__(self, context: Any, jobs: list[Any], limit: float) -> None:
        self.limit = limit
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(theirs, dict(os.environ), *job),
                name=f"process {len(self.processes)}",
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    @contextlib.contextmanager
    def passing_on(self) -> Iterator[None]:
        """While entered, SIGTERM goes to the processes; at the end none of them is left."""
        before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(
                signal.SIGTERM, lambda *_: [process.terminate() for process in self.processes]
            )
        try:
            yield
        finally:
            for process in self.processes:
                process.kill()
                process.join()
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def results(self) -> list[Any]:
        """What the processes return; ProcessError names the first that failed,
        when all have ended.
        """
        count, until = len(self.processes), float("inf")
        told: dict[int, tuple[str, Any]] = {}
        failed: list[int] = []  # in the order of their ends

        def look() -> None:
            for i, pipe in enumerate(self.pipes):
                with contextlib.suppress(EOFError, OSError):
                    while not pipe.closed and pipe.poll():
                        told[i] = pipe.recv()
                    continue
                pipe.close()
            failed.extend(
                i
                for i, p in enumerate(self.processes)
                if p.exitcode not in (None, 0, _PREEMPTED) and i not in failed
            )

        while (
            alive := [p.sentinel for p in self.processes if p.exitcode is None]
        ) and time.monotonic() < until:
            wait([*alive, *(pipe for pipe in self.pipes if not pipe.closed)], 0.5)
            look()
            if failed and until == float("inf"):
                until = time.monotonic() + 0.9 * self.limit
        look()  # at those that have ended since
        codes = [process.exitcode for process in self.processes]
        if failed or until < float("inf"):
            # others end because of the first, by the watch or, if that was process 0, by JAX; one
            # that is stopped does not end
            first = min(
                [*failed, *(i for i in range(count) if codes[i] is None)],
                key=lambda i: _LATER.get(codes[i], 0),
            )
            raise ProcessError(
                f"launch: process {first} of {count} "
                f"{told.get(first, (None, _ended(codes[first])))[1]}",
                first,
            )
        if _PREEMPTED in codes:
            raise SystemExit(_PREEMPTED)
        return [told[i][1] for i in range(count)]


def _ended(code: int | None) -> str:
    if code is None:
        return "did not answer"
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def _child(
    pipe: Connection,
    environment: dict[str, str],
    target: Any,
    args: tuple[Any, ...],
    settings: dict[str, Any],
) -> None:
    """One process of ``launch``."""
    os.environ.update(environment)
    me, count = settings["me"], settings["count"]
    if settings["logs"]:
        log = os.open(settings["logs"] / f"process_{me}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings["devices"])
    threading.Thread(target=_orphaned, daemon=True).start()
    watch = None
    try:
        watch = _connected(
            f"127.0.0.1:{settings['port']}", count, me, settings["timeout"], settings["limit"], {}
        )
        result = _run(target, args)
        pipe.send(("result", result))
    except SystemExit as error:  # of a script, or Preempted
        if watch:
            watch.leave("" if error.code in (None, 0, _PREEMPTED) else f"SystemExit: {error.code}")
        raise
    except Exception as error:
        traceback.print_exc()
        text = watch.failure(error) if watch else str(error)
        pipe.send(("error", f"has failed: {text}"))
        if watch:
            watch.leave(text)
        _ends(1)
    if watch:
        watch.leave()
    jax.distributed.shutdown()


def _orphaned() -> None:
    """End this process when the one that launched it has ended."""
    wait([multiprocessing.parent_process().sentinel])
    _ends(LOST, "the process that launched this one has ended\n")


def _run(target: Any, args: tuple[Any, ...]) -> Any:
    if callable(target):
        return target(*args)
    if os.fspath(target).endswith(".py"):
        runpy.run_path(os.fspath(target), run_name="__main__")
    else:
        runpy.run_module(os.fspath(target), run_name="__main__", alter_sys=True)
    return None
