"""Columns of the radix tree's nodes, `nodes[node, column]`; node 0 is the root, and heads the list."""

parent_page = 0  # the last page of the run above it, 0: the root's child
first_page = 1  # its run of pages, joined by RadixTree.pages
num_pages = 2
depth = 3  # pages of the path before its run
lock_ref = 4  # requests that hold it; it holds for all nodes above it too
num_children = 5
last_access = 6  # a number drawn at each use, never a time
before = 7  # in the list of unlocked nodes, least recently used first
after = 8  # of an unused node: the next unused node

WIDTH = 9
