"""Columns of `requests`, by slot; a request keeps its slot from loading to its end."""

request_id = 0  # -1: the slot is vacant
prompt_len = 1
output_len = 2
max_tokens = 3
priority = 4
namespace = 5
lora = 6
session_id = 7
tenant = 8
prefix_group = 9
rank = 10  # the last tie-break of the priority order
first_segment = 11  # its row of segments
num_segments = 12
status = 13
num_tokens = 14  # prompt + outputs so far
num_computed = 15  # tokens whose KV exists or is scheduled (num_computed_tokens)
num_blocks = 16  # length of its block table
num_cached_blocks = 17  # how many of them are registered
edge = 18  # scheduling up to this many tokens needs a block or completes one
seat = 19
node = 20  # where its path ends in the chain tree, held while seated
in_flight = 21  # tokens scheduled and not yet returned
placeholders = 22  # output tokens scheduled and not yet known (async)
stale = 23  # in flight when it was preempted (async)
num_preemptions = 24
num_cached_tokens = 25  # hit tokens at the first admission, -1: not yet admitted
watched = 26  # its end causes something outside the engine
wait_class = 27  # order in the waiting queue: class, then time, then rank

WIDTH = 28
