"""Columns by node."""

parent = 0
branch = 1  # tokens of the parent's piece before this node starts
segment = 2
skip = 3  # tokens of the segment before this node's piece
length = 4  # tokens of the piece
depth = 5  # tokens of the path before the piece
first_chain = 6  # its run of chain ids
num_chains = 7
refs = 8  # requests that end here, children, and cached chain ids
next_in_bucket = 9  # of a free node: the next free node
first_block = 10  # the number, from 1, of the full block that its first chain id names
key = 11  # of its segment, see sim/content_key.py

WIDTH = 12
