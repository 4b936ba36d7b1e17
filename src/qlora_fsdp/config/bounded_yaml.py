"""Reads YAML that somebody else may have written, in bounded time and memory, as plain values. Imports no torch.

A few hundred bytes of nested aliases can stand for billions of values, and a hundred thousand brackets exhaust the
stack of a parser. So the text is first parsed into a sequence of events, which takes no memory, and is loaded only
if it is small.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

MAX_BYTES = 2**20  # of a file
MAX_VALUES = 2**17  # in a file, with everything that aliases repeat
MAX_DEPTH = 64  # of lists and mappings inside one another
MAX_BITS = 64  # of an integer: longer ones take long to print, and no setting needs one

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# Only what is printed as it was written: a text setting such as run.name keeps `010`, `0x10` and `1_000` as they are,
# which YAML would read as 8, 16 and 1000. A setting that wants a whole number makes 1000 of `1_000` itself.
_INT = re.compile(r"^-?(?:0|[1-9][0-9]*)$")
_OTHERS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML as people write settings: 1e-4 is a number, 24:00:00, 2024-01-01 and 010 are texts, a key stands once."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node: Any) -> int:
        # Python reads no more than 4,300 digits. And with `!!int` before it, it may be any text.
        mark = node.start_mark
        try:
            value = int(node.value) if len(node.value) <= MAX_BITS else 2**MAX_BITS
        except ValueError:
            raise yaml.MarkedYAMLError(problem="!!int stands before another value", problem_mark=mark) from None
        if value.bit_length() > MAX_BITS:
            raise yaml.MarkedYAMLError(problem=f"an integer has more than {MAX_BITS} bits", problem_mark=mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} stands there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-0123456789"))


def read_yaml(file: Path, *, allows_aliases: bool = True) -> Any:
    """Returns what is in a YAML file: mappings, lists and plain values.

    Raises:
        OSError: the file can't be opened.
        ValueError: it is too large, too deep, or no valid YAML; the message says where.
    """
    return parse_yaml(read_small_text(file), allows_aliases=allows_aliases)


def parse_yaml(text: str, *, allows_aliases: bool = True) -> Any:
    """Returns what a text in YAML says.

    Raises:
        ValueError: it is too deep, stands for too many values, or is no valid YAML; the message says where.
    """
    try:
        _check_size(text, allows_aliases)
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader that refuses still more
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ValueError(f"{line}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_settings(text: str) -> dict[Any, Any]:
    """Returns the lines of a file of settings; none of an empty one.

    Raises:
        ValueError: as of `parse_yaml`, or it is no mapping.
    """
    values = parse_yaml(text)
    if not isinstance(values, (dict, type(None))):
        raise ValueError("it holds no lines such as `training.max_steps: 100`")
    return values or {}


def read_small_text(file: Path) -> str:
    """Returns the text of a small file.

    Raises:
        OSError: the file can't be opened.
        ValueError: it is too large, or no text.
    """
    with file.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES // 2**20} MiB")
    return content.decode("utf-8")


def _check_size(text: str, allows_aliases: bool) -> None:
    """Counts the values, with what aliases repeat, and the depth, before anything is made of them."""
    sizes: dict[str, int] = {}  # by anchor
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor and values so far, outermost first
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        problem = None
        anchor = getattr(event, "anchor", None)
        size = 0
        if isinstance(event, yaml.AliasEvent):
            problem = None if allows_aliases else "aliases such as *name are not allowed"
            size = sizes.get(anchor, MAX_VALUES) if anchor is not None else 0  # one that is inside of itself has no end
        elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            open_nodes.append((anchor, 1))
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        if anchor is not None and size and not isinstance(event, yaml.AliasEvent):
            sizes[anchor] = size
        open_nodes[-1] = (open_nodes[-1][0], open_nodes[-1][1] + size)
        if len(open_nodes) > MAX_DEPTH:
            problem = f"lists and mappings are nested more than {MAX_DEPTH} deep"
        elif open_nodes[-1][1] > MAX_VALUES:
            problem = f"it stands for more than {MAX_VALUES:,} values"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
