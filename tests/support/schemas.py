"""Random JSON schemas of bounded size, in the keywords that applications use."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.sampled_from(["name", "age", "a b", "größe", 'quo"te', "x", "items", "kind"])


def _strings() -> st.SearchStrategy[Schema]:
    lengths = st.integers(0, 3).flatmap(
        lambda low: st.builds(
            lambda more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 6),
        )
    )
    patterns = st.sampled_from([r"^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "^(yes|no)!?$"])
    formats = st.sampled_from(["uuid", "ipv4", "ipv6"])
    return st.one_of(
        lengths,
        patterns.map(lambda pattern: {"type": "string", "pattern": pattern}),
        formats.map(lambda name: {"type": "string", "format": name}),
    )


def _numbers() -> st.SearchStrategy[Schema]:
    integers = st.tuples(st.integers(-200, 200), st.integers(0, 500)).map(
        lambda span: {"type": "integer", "minimum": span[0], "maximum": span[0] + span[1]}
    )
    numbers = st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(
        lambda span: {"type": "number", "minimum": span[0], "exclusiveMaximum": span[0] + span[1]}
    )
    return integers | numbers


def _leaves() -> st.SearchStrategy[Schema]:
    constants = st.sampled_from([1, "one", None, True, "é\n", [1, 2]])
    return st.one_of(
        _strings(),
        _numbers(),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        constants.map(lambda value: {"const": value}),
        st.lists(constants.filter(lambda value: value != 1), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )


def _arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    lists = st.tuples(items, st.integers(0, 2), st.integers(0, 2)).map(
        lambda one: {
            "type": "array",
            "items": one[0],
            "minItems": one[1],
            "maxItems": one[1] + one[2],
        }
    )
    tuples = st.lists(items, min_size=1, max_size=3).map(
        lambda some: {
            "type": "array",
            "prefixItems": some,
            "items": False,
            "minItems": len(some),
        }
    )
    return lists | tuples


def _objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def build(properties: dict[str, Schema], required: set[int]) -> Schema:
        names = list(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": [name for number, name in enumerate(names) if number in required],
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(_NAMES, values, max_size=4), st.sets(st.integers(0, 3)))


def _unions(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(values, min_size=2, max_size=3).map(lambda some: {"anyOf": some})


def _references(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return values.map(
        lambda value: {
            "type": "array",
            "items": {"$ref": "#/$defs/part"},
            "minItems": 1,
            "maxItems": 2,
            "$defs": {"part": value},
        }
    )


def schemas() -> st.SearchStrategy[Schema]:
    """Whole schemas. References are at the top: their definitions must be there too."""
    nested = st.recursive(
        _leaves(),
        lambda values: st.one_of(_arrays(values), _objects(values), _unions(values)),
        max_leaves=6,
    )
    return nested | _references(nested)
