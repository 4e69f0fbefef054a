"""Rows of `queues`: lists of slots, each as long as a number in `count` says."""

running = 0  # in order of admission
waiting = 1  # a binary heap on (wait_class, wait_time, rank)
aside = 2  # taken out of the waiting queue for the rest of a step
arrivals = 3  # arrived and not yet in the waiting queue
vacant = 4  # a stack of unused slots
preempted = 5  # in the current step, in order
admitted = 6  # in the current step, in order
due = 7  # by place in the running list, see decode_run

WIDTH = 8
