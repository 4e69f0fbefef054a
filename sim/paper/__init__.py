"""The experiments of the PagedAttention paper (Kwon et al., SOSP 2023) as scenarios, beside what it published.

`python -m sim.paper` runs scenarios/paper, compares, and writes results/paper.md with its tables and figures.
"""
