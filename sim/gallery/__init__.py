"""Pictures of results/ that lay something beside what a command has found.

`python -m sim.gallery NAME` draws them anew, from the tables in results/NAME into the same folder:
`fourteen_tokens`, a sweep beside the closed form, and `bench`, this simulator's speed beside a peer's.
"""
