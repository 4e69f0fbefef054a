"""The command. Results go to stdout, progress and messages to stderr.

Exit status: 0 good, 1 something was found, 2 bad input, 130 interrupted.
"""

try:
    from sim.cli import (  # noqa: F401  they register themselves
        bench,
        calibrate,
        explain,
        explore,
        measure,
        mrc,
        plan,
        run,
        schema,
        sweep,
        trace,
        verify,
    )
    from sim.cli.app import app, main
except KeyboardInterrupt:
    import os

    os.write(2, b"prefixsim: interrupted; nothing was written\n")
    os._exit(130)

__all__ = ["app", "main"]
