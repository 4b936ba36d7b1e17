"""`qlora-fsdp schema`: prints a JSON schema of the settings, for editors of YAML files.

It is made of the schema and of the options under conf/. An editor with a YAML language server completes and checks a
file of `--config` whose first line is `# yaml-language-server: $schema=schema.json`. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from qlora_fsdp.common.startup import end_with_the_reader
from qlora_fsdp.config.reading.command_line import conf_folder, default_options, group_options
from qlora_fsdp.config.recorded import plain_default, sections_of
from qlora_fsdp.config.schema import Bounds
from qlora_fsdp.config.settings import Setting, all_settings

USAGE = "usage: qlora-fsdp schema > schema.json"

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the one that editors know
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_OF_OTHERS = {"type": "string", "pattern": r"\$\{.+\}"}  # ${section.name}
_PATHS = {"model": "a folder or a hub name", "data": "a file, a folder or a hub name"}


def json_schema() -> dict[str, Any]:
    """Returns the schema of a file of `--config`; `definitions` has each section by itself, as in conf/SECTION/."""
    settings = all_settings()
    groups = {group: _options(group) for group in default_options()}
    sections = sections_of({key: _value(setting) for key, setting in settings.items()})
    definitions = {
        section: {"type": ["object", "null"], "properties": values, "additionalProperties": False}
        for section, values in sections.items()
    }
    properties: dict[str, Any] = {section: {"$ref": f"#/definitions/{section}"} for section in sections}
    properties |= {group: {"anyOf": [*_ref(group, sections), option]} for group, option in groups.items()}
    properties |= {key: _value(setting) for key, setting in settings.items()}
    properties["defaults"] = {"type": "array", "description": "For a file of --config-dir: `override /GROUP: OPTION`."}
    return {
        "$schema": _DRAFT,
        "title": "Settings of qlora-fsdp",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "definitions": definitions,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the schema; returns 0, or 2 if there are arguments."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments:
        print(f"{(__doc__ or '').strip()}\n\n{USAGE}")
        return 0 if set(arguments) <= {"-h", "--help"} else 2
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0


def _options(group: str) -> dict[str, Any]:
    """The options of a group; those of a folder of one's own are not known here, so that any text may be one."""
    names = group_options(group, [conf_folder()])
    described = f"An option of the group: {', '.join(names)}" + (f"; or {_PATHS[group]}." if group in _PATHS else ".")
    return {
        "anyOf": [{"enum": names}, {"type": ["string", "array"] if group == "data" else "string"}],
        "description": described,
        "default": default_options()[group],
    }


def _ref(group: str, sections: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"$ref": f"#/definitions/{group}"}] if group in sections else [{"type": "null"}]


def _value(setting: Setting) -> dict[str, Any]:
    """The schema of one setting's value."""
    allowed = _typed(setting.type, setting.bounds)
    if setting.choices or setting.facets.values:
        allowed = {"enum": list(setting.choices or setting.facets.values)}
    if setting.facets.text_or_list:
        allowed = {"type": ["string", "array"], "items": {"type": "string"}}
    alternatives = [allowed, *([{"type": "null"}] if setting.is_optional else [])]
    if allowed and allowed.get("type") != "string":
        alternatives.append(_OF_OTHERS)
    about = {"description": setting.comment, "default": plain_default(setting.key)}
    return about | (alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives})


def _typed(kind: Any, bounds: Bounds | None) -> dict[str, Any]:
    """The schema of a Python type. Any is nothing in particular, or a bounded number if there are bounds."""
    origin = get_origin(kind) or kind
    schema: dict[str, Any] = {"type": _NAMES[origin]} if origin in _NAMES else {}
    if origin is list:
        schema["items"] = _typed(get_args(kind)[0], None)
    elif origin is dict:
        schema["additionalProperties"] = _typed(get_args(kind)[1], None)
    if bounds is not None:  # of numbers alone: a text, such as auto, passes
        schema["minimum" if bounds.includes_low else "exclusiveMinimum"] = bounds.low
        schema |= {"exclusiveMaximum": bounds.high} if bounds.high < float("inf") else {}
    return schema


if __name__ == "__main__":
    end_with_the_reader()
    sys.exit(main())
