"""Columns of `times`, by slot, seconds."""

# the first RECORDED go into the record of an ended request
arrival_time = 0
ready_time = 1  # when the front end hands it to the scheduler
scheduled_time = 2
first_token_time = 3
last_token_time = 4
wait_time = 5

RECORDED = 5
WIDTH = 6
