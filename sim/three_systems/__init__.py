"""The ways to share a prefix side by side: loads, caches and block sizes, in results/three_systems.md.

`python -m sim.three_systems` runs scenarios/sweeps/three_systems.yaml and writes the page beside its tables.
"""
