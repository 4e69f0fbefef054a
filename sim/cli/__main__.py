"""`python -m sim.cli`, as `prefixsim`."""

from sim.cli import main

main()
