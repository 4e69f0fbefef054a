"""What the command says instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

Location = tuple[str | int, ...]  # the keys that lead to a field


class InputError(ValueError):
    """Something a person gave cannot be used. The text is one line: where, what, the remedy."""


class Livelock(Exception):
    """The scheduler goes round in circles, as vLLM's would with the same configuration."""


MOST_NAMES = 30  # in one message


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the names there are where none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, 1, 0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are: {', '.join(known)}" if 0 < len(known) <= MOST_NAMES else ""


def describe(
    error: ValidationError, model: type[BaseModel], data: Mapping[str, Any], where: Callable[[Location], str]
) -> str:
    """One line for what pydantic found wrong with `data` as `model`: the first finding in full.

    `where` names the place of a path of keys, e.g. `scenario.yaml:12`.
    """
    found = [(_path(item, data), item) for item in error.errors(include_url=False)]
    # A union reports every branch it tried: what went wrong deepest is what was meant.
    found = [
        (path, item)
        for path, item in found
        if not any(len(other) > len(path) and other[: len(path)] == path for other, _ in found)
    ]
    # A misspelt field is also a missing one: the misspelling says more.
    found.sort(key=lambda one: one[1]["type"] != "extra_forbidden")
    path, item = found[0]
    same = [other for at, other in found if at == path]
    others = len({at for at, _ in found}) - 1
    path, text = _finding(path, item, same, model, data)
    more = f" (and {others} more)" if others else ""
    place = [where(path), ".".join(map(str, path))] if path else [where(path)]
    return f"{': '.join(place)}: {text}{more}"


def _finding(
    path: Location,
    item: ErrorDetails,
    same: Sequence[ErrorDetails],
    model: type[BaseModel],
    data: Mapping[str, Any],
) -> tuple[Location, str]:
    """The path to name and what is wrong there."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return path, "unknown field" + suggestion(str(path[-1]), _fields(model, path[:-1], data))
    if kind == "missing":
        return path, "this field is required"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = str(context["discriminator"]).strip("'")
        known = sorted(_tags(model, path, data, tag))
        if kind == "union_tag_not_found":
            return (*path, tag), f"this field is required; one of: {', '.join(known)}"
        return (*path, tag), f"unknown value {context['tag']!r}" + suggestion(str(context["tag"]), known)
    if kind == "value_error":
        return path, str(context["error"])
    if kind in ("too_short", "too_long"):
        most = "least" if kind == "too_short" else "most"
        limit = context["min_length" if kind == "too_short" else "max_length"]
        return path, f"should have at {most} {limit} entries, not {context['actual_length']}"
    wanted = " or ".join(dict.fromkeys(_wanted(other) for other in same))
    text = f"should be {wanted}, not {item['input']!r}"
    options = [word.strip("' ") for other in same for word in _options(other)]
    if isinstance(item["input"], str) and difflib.get_close_matches(item["input"], options, 1, 0.6):
        text += suggestion(item["input"], options)
    return path, text


def _wanted(item: ErrorDetails) -> str:
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "a mapping of fields"
    if item["type"] == "too_short":
        return f"a list of at least {item['ctx']['min_length']}"
    return item["msg"].removeprefix("Input should be ").removeprefix("Input should ")


def _options(item: ErrorDetails) -> list[str]:
    expected = str(item.get("ctx", {}).get("expected", ""))
    return expected.replace(" or ", ",").split(",") if expected else []


def _path(item: ErrorDetails, data: Any) -> Location:
    """Where `data` is wrong: pydantic's location without the union branches it names on the way."""
    path: list[str | int] = []
    for key in item["loc"]:
        if key in data if isinstance(data, Mapping) else _has_item(data, key):
            data = data[key]
            path.append(key)
    if item["type"] == "missing":
        path.append(item["loc"][-1])
    return tuple(path)


def _has_item(data: Any, key: str | int) -> bool:
    return isinstance(data, (list, tuple)) and isinstance(key, int) and key < len(data)


def _alternatives(annotation: Any) -> list[Any]:
    """What an annotation allows: unions and Annotated unwrapped."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def _is_model(kind: Any) -> bool:
    from pydantic import BaseModel

    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _under(kind: Any, key: str | int) -> list[Any]:
    """What may stand under a key of a model, a mapping or a list."""
    if _is_model(kind):
        field = _by_name(kind).get(str(key))
        return _alternatives(field.annotation) if field else []
    parts = get_args(kind)
    return _alternatives(parts[-1]) if get_origin(kind) in (dict, list) else []


def _candidates(model: type[BaseModel], path: Location, data: Any) -> list[type[BaseModel]]:
    """The models that may stand at `path`; of a tagged union, the one whose tags `data` bears."""
    candidates: list[Any] = [model]
    for key in path:
        if isinstance(data, list) and isinstance(key, int):
            data = data[key]
        else:
            data = data.get(key) if isinstance(data, Mapping) else None
        candidates = [kind for one in candidates for kind in _under(one, key)]
        if isinstance(data, Mapping):
            tagged = [one for one in candidates if _is_model(one) and _bears(one, data)]
            candidates = tagged or candidates
    return [one for one in candidates if _is_model(one)]


def _bears(model: type[BaseModel], data: Mapping[str, Any]) -> bool:
    literals = {name: get_args(field.annotation) for name, field in model.model_fields.items()}
    return any(
        data.get(name) in values
        for name, values in literals.items()
        if name in ("kind", "distribution", "form")
    )


def _fields(model: type[BaseModel], path: Location, data: Mapping[str, Any]) -> list[str]:
    names = [name for one in _candidates(model, path, data) for name in _by_name(one)]
    return list(dict.fromkeys(names))


def _by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A model's fields by every name that its data may use."""
    from pydantic import AliasChoices

    fields = dict(model.model_fields)
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            fields |= {str(name): field for name in field.validation_alias.choices}
    return fields


def _tags(model: type[BaseModel], path: Location, data: Mapping[str, Any], tag: str) -> set[str]:
    fields = [one.model_fields.get(tag) for one in _candidates(model, path, data)]
    return {value for field in fields if field for value in get_args(field.annotation)}
