"""Columns by chain id; 0 names nothing."""

block = 0  # its earliest surviving block, 0: not cached (cached_block_hash_to_block)
node = 1  # the node that owns it; of the first of a free run: the next such run

WIDTH = 2
