"""`prefixsim explore`: a page to play with, first 14 tokens, then a server under load.

page.py is the page, a marimo app of short cells. What it shows is made here, without marimo:
two_prompts.py and under_load.py ask the simulator; drawing.py, tables.py and words.py show its
answers; address.py keeps the controls in the page's address.
"""
