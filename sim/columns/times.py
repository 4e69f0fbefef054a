"""Columns of `times`, by slot, seconds."""

# the first RECORDED go into the record of an ended request
arrival_time = 0
submitted_time = 1  # when it comes to an engine; later than its arrival where a router let it wait
ready_time = 2  # when the front end hands it to the scheduler
scheduled_time = 3
first_token_time = 4
last_token_time = 5
wait_time = 6

RECORDED = 6
WIDTH = 7
