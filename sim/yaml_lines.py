"""YAML as scenarios are written in: YAML 1.2 scalars, each field once, and the line of every field."""

from __future__ import annotations

import re
from typing import Any

import yaml

from sim.errors import InputError, Location

Lines = dict[Location, str]  # "source:line" for each path of keys
MOST = 10_000  # fields and items: a few lines of aliases can stand for more than any memory holds


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (`no` is a string, `1e3` a number), and the vLLM benchmark's `inf`."""


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what _Loader would read as something else than a string."""


_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.?inf|\.?nan|\.NaN"

for _yaml_class in (_Loader, _Dumper):
    _yaml_class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in (
        ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?[0-9]{1,1000}", list("-+0123456789")),
        ("float", _NUMBER, list("-+0123456789.in")),
    ):
        _yaml_class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
        )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda _, node: float(re.sub(r"\.(?=[in])", "", node.value.lower()))
)


def parse(
    text: str, source: str, lines: Lines, what: str = "the scenario", *, numbers: bool = False
) -> dict[str, Any]:
    """The mapping in a YAML text; `lines` is filled with "source:line" for each path of keys.

    numbers: whole numbers may be field names too. Raises InputError for what is not YAML, no mapping,
    given twice, or bears a tag such as !!set.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            hint = "; `prefixsim schema` lists its fields" if "scenario" in what else ""
            raise InputError(f"{source}: {what} is empty{hint}")
        if not isinstance(root, yaml.MappingNode):
            example = " such as `workload:`" if "scenario" in what else ""
            raise InputError(f"{source}:1: {what} should be a mapping of fields{example}")
        _mark(root, (), source, lines, loader, numbers)
        data: dict[str, Any] = _apart(loader.construct_document(root))
        return data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{source}:{mark.line + 1}" if mark else source
        raise InputError(f"{at}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InputError(f"{source}: nested too deeply; four levels are enough") from None


def _mark(
    node: yaml.Node, location: Location, source: str, lines: Lines, loader: _Loader, numbers: bool
) -> None:
    """Note the lines of everything in `node`, and refuse what a scenario has no use for."""
    if len(lines) > MOST:
        raise InputError(f"{source}: stands for more than {MOST:,} values; write fewer, without aliases")
    if isinstance(node, yaml.MappingNode):
        implied = {"tag:yaml.org,2002:map"}
        for key, value in node.value:
            line = f"{source}:{key.start_mark.line + 1}"
            number = isinstance(key, yaml.ScalarNode) and key.tag == "tag:yaml.org,2002:int" and numbers
            here = (*location, key.value if isinstance(key, yaml.ScalarNode) else "?")
            if number:
                here = (*location, int(key.value))
            elif not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                named = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise InputError(f"{line}: a field name should be a word, not {named}")
            if here in lines:
                raise InputError(f"{line}: {'.'.join(map(str, here))}: given twice; keep one of the two")
            lines[here] = line
            _mark(value, here, source, lines, loader, numbers)
    elif isinstance(node, yaml.SequenceNode):
        implied = {"tag:yaml.org,2002:seq"}
        for i, item in enumerate(node.value):
            lines[(*location, i)] = f"{source}:{item.start_mark.line + 1}"
            _mark(item, (*location, i), source, lines, loader, numbers)
    else:
        plain = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        implied = {"tag:yaml.org,2002:str", plain}
    if node.tag not in implied:
        raise InputError(f"{source}:{node.start_mark.line + 1}: a tag ({node.tag}) has no use here; drop it")


def _apart(value: Any) -> Any:
    """A copy in which an alias is a value of its own: what is set in one place is set in no other."""
    if isinstance(value, dict):
        return {key: _apart(one) for key, one in value.items()}
    return [_apart(one) for one in value] if isinstance(value, list) else value


def dump(data: dict[str, Any]) -> str:
    """YAML text of a mapping that `parse` reads back as the same."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text
