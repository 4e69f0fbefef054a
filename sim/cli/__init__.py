"""The command. Results go to stdout, progress and messages to stderr.

Exit status: 0 good, 1 something was found, 2 bad input, 130 interrupted.
"""

from sim.cli import bench, calibrate, explain, measure, run, schema, verify  # noqa: F401  they register themselves
from sim.cli.app import app, main

__all__ = ["app", "main"]
