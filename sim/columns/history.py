"""Columns of `nodes[node, column]` of the history: pieces of sequences, and how far they were computed."""

parent = 0
branch = 1  # tokens of the parent's piece before this one starts; of a namespace's own node: minus its number
segment = 2
computed = 3  # tokens of the piece that anybody has computed; of a namespace's own node: that it has
plain = 4  # that requests without LoRA and cache_salt (namespace 0) have computed
next_in_bucket = 5

WIDTH = 6
