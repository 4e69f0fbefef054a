"""Columns of `requests`, by slot; a request keeps its slot from loading to its end."""

# the first RECORDED go into the record of an ended request
request_id = 0  # -1: the slot is vacant
session_id = 1
tenant = 2
prefix_group = 3
prompt_len = 4
num_cached_tokens = 5  # hit tokens at the first admission, -1: not yet admitted
num_preemptions = 6
num_evictions = 7  # cached blocks that its allocations evicted
output_len = 8
max_tokens = 9
priority = 10
namespace = 11
lora = 12
rank = 13  # the last tie-break of the priority order
first_segment = 14  # its row of segments
num_segments = 15
status = 16
num_tokens = 17  # prompt + outputs so far
num_computed = 18  # tokens whose KV exists or is scheduled (num_computed_tokens)
num_blocks = 19  # length of its block table
num_cached_blocks = 20  # how many of them are registered
edge = 21  # scheduling up to this many tokens needs a block or completes one
seat = 22
node = 23  # where its path ends in the chain tree, held while seated
in_flight = 24  # tokens scheduled and not yet returned
placeholders = 25  # output tokens scheduled and not yet known (async)
stale = 26  # in flight when it was preempted (async)
watched = 27  # its end causes something outside the engine
wait_class = 28  # order in the waiting queue: class, then time, then rank
history_node = 29  # where the tokens it has written down in the history end, 0: it writes none
history_segment = 30  # that node's segment, in its row
history_start = 31  # tokens before it
history_tokens = 32  # tokens written down
fate_evicted = 33  # prompt tokens by their fate, see sim/fates.py; those hit are num_cached_tokens
fate_last_token = 34
fate_partial_block = 35
fate_isolated = 36
fate_cold = 37
owner = 38  # its tenant and prefix group, as a small number

RECORDED = 8
WIDTH = 39
