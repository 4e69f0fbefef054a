"""Columns of `requests`, by slot; a request keeps its slot from loading to its end."""

# the first RECORDED go into the record of an ended request
request_id = 0  # -1: the slot is vacant
session_id = 1
tenant = 2
prefix_group = 3
prompt_len = 4
n = 5  # samples of its request
beam_width = 6
num_cached_tokens = 7  # hit tokens at the first admission, -1: not yet admitted
num_preemptions = 8
num_evictions = 9  # cached blocks that its allocations evicted
output_len = 10
max_tokens = 11
priority = 12
namespace = 13
lora = 14
rank = 15  # the last tie-break of the priority order
first_segment = 16  # its row of segments
num_segments = 17
status = 18
num_tokens = 19  # prompt + outputs so far
num_computed = 20  # tokens whose KV exists or is scheduled (num_computed_tokens)
num_blocks = 21  # length of its block table
num_cached_blocks = 22  # how many of them are registered
edge = 23  # scheduling up to this many tokens needs a block or completes one
seat = 24
node = 25  # where its path ends in the chain tree, held while seated
in_flight = 26  # tokens scheduled and not yet returned
placeholders = 27  # output tokens scheduled and not yet known (async)
stale = 28  # in flight when it was preempted (async)
watched = 29  # its end causes something outside the engine
wait_class = 30  # order in the waiting queue: class, then time, then rank
history_node = 31  # where the tokens it has written down in the history end, 0: it writes none
history_segment = 32  # that node's segment, in its row
history_start = 33  # tokens before it
history_tokens = 34  # tokens written down
fate_evicted = 35  # prompt tokens by their fate, see sim/fates.py; those hit are num_cached_tokens
fate_last_token = 36
fate_partial_block = 37
fate_isolated = 38
fate_cold = 39
owner = 40  # its tenant and prefix group, as a small number
next_sample = 41  # the slot of the next live sample of its request, in a ring

RECORDED = 10
WIDTH = 42
