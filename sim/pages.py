"""Pages in Markdown, from templates beside those of the HTML report."""

from __future__ import annotations

from typing import Any

import jinja2


def rendered(template: str, **values: Any) -> str:
    """The page that a template of sim/templates makes of `values`; a name it lacks is an error."""
    options: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
    loader = jinja2.PackageLoader("sim", "templates")
    pages = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **options)
    return pages.get_template(template).render(**values)
