"""The engine's times and sums of times, `clock`, seconds."""

now = 0
step_end = 1  # and 2: of each row of steps
front_end_free = 3
last_update = 4
busy = 5
usage = 6  # used blocks x time
itl_sum = 7
itl_sum_squares = 8
wake = 9  # when the engine wants to go on
next_sample = 10  # infinite before the first arrival
sample_interval = 11
token_states = 12  # slots x time, from here on: see sim/memory_states.py
reserved = 13
internal = 14
external = 15

WIDTH = 16
