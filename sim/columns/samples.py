"""Columns of `samples`, by sample: what the engine looked like just before an instant."""

num_running = 0
num_waiting = 1  # in the scheduler's queue, not in the front end
num_blocks = 2  # blocks in use
num_evictions = 3  # from here on: since the start of the run
num_preemptions = 4
queries = 5  # tokens of first admissions
hits = 6
num_scheduled_tokens = 7

WIDTH = 8
