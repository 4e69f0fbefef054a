"""The server of the page, on this machine only."""

from __future__ import annotations

import contextlib
import os
import socket
from importlib.util import find_spec
from pathlib import Path

from sim.errors import InputError

HOST = "127.0.0.1"
PORT = 2718
PAGE = Path(__file__).with_name("page.py")


def check_installed() -> None:
    """Raise InputError where the page's library is not installed."""
    if find_spec("marimo") is None:
        raise InputError("explore needs marimo: pip install 'prefixsim[notebooks]'")


def listening(port: int) -> socket.socket:
    """A socket of this machine at `port`, 0 for any that is free. Raises InputError where it is taken."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((HOST, port))
        server.listen()  # who comes before the page is ready waits
    except OSError as problem:
        server.close()
        reason = (problem.strerror or str(problem)).lower()
        raise InputError(f"--port {port}: {reason}; try another, or 0 for any that is free") from None
    return server


def warm_up() -> None:
    """Compile and load what the page needs first, so that its first answer does not wait."""
    from sim.explore import address, under_load

    under_load.answer(address.Controls())


def serve(server: socket.socket) -> None:
    """Serve the page to this machine until interrupted, which ends the process with status 0."""
    import marimo
    import uvicorn

    app = marimo.create_asgi_app(quiet=True).with_app(path="/", root=str(PAGE)).build()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)  # for pages that are open
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        uvicorn.Server(config).run(sockets=[server])
    os._exit(0)  # each page has a thread, which would go on
