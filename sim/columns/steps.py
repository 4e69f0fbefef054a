"""Rows of `steps[row, step]`: what the (up to two) steps in flight run, in scheduled order."""

slot = 0
request_id = 1  # at that time: a slot may have changed hands
tokens = 2
samples = 3  # whether the step yields a token for it

WIDTH = 4
