"""A simulated run beside the recording of a real one: what `prefixsim run --against` does.

    beside.py      what is compared, and by which clock
    decisions.py   step by step: where the decisions part, and why
    sides.py       each side as columns: a row a request, curves over time
    figures.py, tables.py   for the console, the CSV, the PNG and the page
"""
