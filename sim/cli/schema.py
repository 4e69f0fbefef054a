"""`prefixsim schema`: the scenario's JSON Schema."""

from __future__ import annotations

from sim.cli.app import app
from sim.cli.messages import one_line_errors


@app.command()
def schema() -> None:
    """Print the JSON Schema of a scenario."""
    import json

    from sim.scenario import Scenario

    with one_line_errors():
        print(json.dumps(Scenario.model_json_schema(), indent=2), flush=True)
