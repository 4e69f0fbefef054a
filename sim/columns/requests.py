"""Columns of `requests`, by slot; a request keeps its slot from loading to its end."""

# the first RECORDED go into the record of an ended request
request_id = 0  # -1: the slot is vacant
session_id = 1
tenant = 2
prefix_group = 3
prompt_len = 4
num_cached_tokens = 5  # hit tokens at the first admission, -1: not yet admitted
num_preemptions = 6
output_len = 7
max_tokens = 8
priority = 9
namespace = 10
lora = 11
rank = 12  # the last tie-break of the priority order
first_segment = 13  # its row of segments
num_segments = 14
status = 15
num_tokens = 16  # prompt + outputs so far
num_computed = 17  # tokens whose KV exists or is scheduled (num_computed_tokens)
num_blocks = 18  # length of its block table
num_cached_blocks = 19  # how many of them are registered
edge = 20  # scheduling up to this many tokens needs a block or completes one
seat = 21
node = 22  # where its path ends in the chain tree, held while seated
in_flight = 23  # tokens scheduled and not yet returned
placeholders = 24  # output tokens scheduled and not yet known (async)
stale = 25  # in flight when it was preempted (async)
watched = 26  # its end causes something outside the engine
wait_class = 27  # order in the waiting queue: class, then time, then rank
history_node = 28  # where the tokens it has written down in the history end, 0: it writes none
history_segment = 29  # that node's segment, in its row
history_start = 30  # tokens before it
history_tokens = 31  # tokens written down
fate_evicted = 32  # prompt tokens by their fate, see sim/fates.py; those hit are num_cached_tokens
fate_last_token = 33
fate_partial_block = 34
fate_isolated = 35
fate_cold = 36

RECORDED = 7
WIDTH = 37
