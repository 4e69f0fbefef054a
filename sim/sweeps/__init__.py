"""Sweeps: one scenario at every point of a grid, with several seeds.

schema.py says what a sweep's file may say, axes.py the values along an axis, grid.py the points;
work.py is what one run leaves, content.py what runs share, processes.py and cluster.py are where
runs happen, journal.py and folder.py what survives a kill; table.py, bands.py and figures.py are
the results, execute.py all of it in order.
"""
