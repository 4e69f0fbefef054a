"""The experiments of the PagedAttention paper (Kwon et al., SOSP 2023), beside what it published.

`python -m sim.paper` runs scenarios/paper and writes results/paper.md with its tables and figures.
"""
