"""Columns by block id."""

ref_cnt = 0  # how many block tables name it
next_free = 1  # the free queue; meaningless while ref_cnt > 0
prev_free = 2
chain = 3  # the chain id of its content, 0: not cached
next_duplicate = 4  # blocks of one chain id in the order they were cached, circular
prev_duplicate = 5
warm = 6  # whether its content was cached before the run began, see sim/snapshot.py

WIDTH = 7
