"""Columns of `times`, by slot, seconds."""

# the first RECORDED go into the record of an ended request
arrival_time = 0
scheduled_time = 1
first_token_time = 2
last_token_time = 3
ready_time = 4  # when the front end hands it to the scheduler
wait_time = 5

RECORDED = 4
WIDTH = 6
