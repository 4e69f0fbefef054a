"""`prefixsim explore`: the interactive page."""

from __future__ import annotations

import threading
import webbrowser
from typing import Annotated

import typer

from sim.cli.app import app
from sim.cli.messages import announce_compilation, one_line_errors, say


@app.command()
def explore(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0: any that is free.")] = 2718,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
) -> None:
    """Open a page to play with: block hits of two prompts, then a server under load."""
    with one_line_errors():
        from sim.explore import serve

        serve.check_installed()
        server = serve.listening(port)
        announce_compilation()
        serve.warm_up()
        address = f"http://{serve.HOST}:{server.getsockname()[1]}"
        say(f"the page is at {address}; Ctrl-C ends it")
        if browser:
            threading.Timer(1.0, webbrowser.open, [address]).start()
        serve.serve(server)
