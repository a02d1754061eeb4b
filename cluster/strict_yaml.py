"""YAML files that people write. A key that stands twice is refused: the parser would take the last one silently."""

from __future__ import annotations

from typing import Any

import yaml

from cluster.errors import UserError


class _RepeatedKeyError(Exception):
    """Not a YAMLError, so that it has a sentence of its own."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here merge keys (<<) are not put in yet: to write a key anew beside one is what they are for.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise _RepeatedKeyError(f"the key {key.value!r} twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node


def read_yaml(text: str, name: str) -> Any:
    """The file's content. Raises ``UserError`` of one sentence that begins with ``name``."""
    try:
        return yaml.load(text, _Loader)
    except _RepeatedKeyError as error:
        raise UserError(f"{name} has {error}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2020-13-45 is a ValueError
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}.") from None
