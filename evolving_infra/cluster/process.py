"""What every process of a cluster does: log, stop on a signal, die with its parent."""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from evolving_infra import env
from evolving_infra.cluster.places import Places
from evolving_infra.errors import BackendError, EvolvingInfraError, InputError
from evolving_infra.kv.channel import Channel, Handler, connect

PR_SET_PDEATHSIG = 1
RECONNECT_S = 0.2
CRASHED = 70
REFUSED = 78

Main = Callable[[Places, str, str, asyncio.Event], Awaitable[None]]
"""(places, secret, name of this process, set when it shall stop)"""


def run(main: Main, description: str) -> None:
    """Run ``main`` until it returns or a signal asks it to stop.

    Exit code 1 on an error, ``REFUSED`` if trying again can't help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory of the cluster")
    parser.add_argument("--name", default="", help="name of this process, such as node0")
    options = parser.parse_args()
    die_with_parent()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        asyncio.run(_until_signalled(main, Places(options.run_dir), options.name))
    except EvolvingInfraError as error:
        logging.getLogger("evolving_infra").error("%s", error)
        sys.exit(REFUSED if isinstance(error, InputError | BackendError) else 1)


async def _until_signalled(main: Main, places: Places, name: str) -> None:
    secret = env.secret()
    if secret is None:
        raise InputError("EVOLVING_INFRA_SECRET: expected the cluster's secret, got nothing")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(places, secret, name, stop)


def crash(error: BaseException) -> None:
    """A broken process must not go on serving: end it, the launcher starts a new one."""
    logging.getLogger("evolving_infra").critical("unexpected error", exc_info=error)
    os._exit(CRASHED)


def guarded(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task whose unexpected error ends the process, instead of leaving a request waiting."""
    task = asyncio.create_task(work)
    task.add_done_callback(_crash_on_error)
    return task


def _crash_on_error(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        error = task.exception()
        if error is not None:
            crash(error)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its launcher dies: nothing is left behind.

    A launcher that died before is noticed by its process id.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if env.parent() not in (None, os.getppid()):
        sys.exit(1)


async def keep_connected(
    address: str,
    secret: str,
    stop: asyncio.Event,
    handler: Handler,
    on_open: Callable[[Channel], Awaitable[None]],
    **hello: object,
) -> None:
    """Hold a channel to ``address`` open until ``stop``: connect, run, and again after a break."""
    stopping = asyncio.create_task(stop.wait())
    while not stop.is_set():
        try:
            channel = await connect(address, secret, pid=os.getpid(), **hello)
        except EvolvingInfraError as error:
            logging.getLogger("evolving_infra").info("%s; trying again", error)
            await asyncio.wait([stopping], timeout=RECONNECT_S)
            continue
        reading = asyncio.create_task(channel.run(handler))
        await on_open(channel)
        await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        await channel.close()
        await reading
    stopping.cancel()
