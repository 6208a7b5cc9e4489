"""JSON schemas of other projects: what does not fit is named with its path."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from forge import Task
from forge.envs.external.adapting import content_text, cut_text, with_text
from forge.envs.external.schemas import CompiledSchema, SchemaTool, problem_in
from forge.errors import OptionError
from forge.testing import play


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Piece(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Color
    weight: float | None = None
    next: Piece | None = None


class Move(BaseModel):
    kind: Literal["move"] = "move"
    row: int = Field(ge=0, lt=8)
    word: Annotated[str, Field(min_length=1, max_length=3, pattern="^[a-z]+$")] = "a"
    pieces: list[Piece] = Field(default_factory=list, max_length=2)
    pair: tuple[int, str] = (1, "x")
    extra: dict[str, bool] = Field(default_factory=dict)


SCHEMA = Move.model_json_schema()
COMPILED = CompiledSchema(SCHEMA)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"row": 1}, None),
        ({"row": 1, "pieces": [{"color": "red", "next": {"color": "blue"}}], "extra": {"a": True}}, None),
        ({"row": 1, "pair": [2, "y"]}, None),
        ([], "value: expected object, got []"),
        ({}, "row: it is missing"),
        ({"row": True}, "row: expected integer, got true"),
        ({"row": 8}, "row: expected below 8, got 8"),
        ({"row": -1}, "row: expected at least 0, got -1"),
        ({"row": 1, "kind": "stay"}, 'kind: expected "move", got "stay"'),
        ({"row": 1, "word": "A"}, 'word: expected text that matches ^[a-z]+$, got "A"'),
        ({"row": 1, "word": "abcd"}, 'word: expected a length of at most 3, got "abcd"'),
        ({"row": 1, "pieces": [{"color": "green"}]}, 'pieces[0].color: expected one of ["red", "blue"], got "green"'),
        ({"row": 1, "pieces": [{"color": "red", "x": 1}]},
         "pieces[0].x: there is no such field; fields: color, weight, next"),
        ({"row": 1, "pieces": [{"color": "red", "weight": "2"}]}, 'pieces[0].weight: expected number, got "2"'),
        ({"row": 1, "pieces": [{"color": "red", "next": {}}]}, "pieces[0].next.color: it is missing"),
        ({"row": 1, "pair": ["x", "y"]}, 'pair[0]: expected integer, got "x"'),
        ({"row": 1, "pair": [1]}, "pair: expected a number of items of at least 2, got [1]"),
        ({"row": 1, "extra": {"a": 1}}, "extra.a: expected boolean, got 1"),
        ({"row": float("nan")}, "row: expected integer, got nan"),
    ],
)  # fmt: skip
def test_the_first_problem_is_named(value: Any, problem: str | None) -> None:
    assert problem_in(value, SCHEMA) == problem


def test_a_schema_that_contains_itself_ends() -> None:
    loop = {"$ref": "#"}
    assert problem_in({}, loop) is None
    assert CompiledSchema(loop).problem({}) is None
    piece = CompiledSchema(Piece.model_json_schema())
    assert piece.problem({"color": "red", "next": {"color": "red", "next": {"color": "blue"}}}) is None
    assert piece.problem({"color": "red", "next": {"color": "red", "next": {}}}) == "next.next.color: it is missing"
    assert "nested too deeply" in str(
        problem_in(1, {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})
    )
    assert problem_in(1, {"type": "string", "pattern": "("}) == "value: expected string, got 1"
    assert problem_in("a", {"pattern": "("}) is None


leaves = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False, width=16)
keys = st.sampled_from(["row", "color", "weight", "next", "pieces", "pair", "word", "extra", "kind"])
values = st.recursive(
    leaves | st.sampled_from(["red", "ab", "A"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_the_verdict_is_that_of_a_full_validator(value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    verdict = jsonschema.Draft202012Validator(SCHEMA).is_valid(value)
    assert (problem_in(value, SCHEMA) is None) == verdict
    assert COMPILED.problem(value, "it") == problem_in(value, SCHEMA, "it")


def test_a_tool_of_a_schema() -> None:
    given_arguments = []

    async def move(arguments: dict[str, Any]) -> dict[str, Any]:
        given_arguments.append(arguments)
        return {"moved": True}

    made = SchemaTool(move, name="move", description="Move.", parameters=SCHEMA)
    assert made.schema["function"]["parameters"]["required"] == ["row"]

    async def program(task: Task, agent: Any) -> float:
        await agent.run_tools([{"role": "user", "content": "Go."}], tools=[made])
        return 1.0

    calls = [f'<tool_call>{{"name": "move", "arguments": {{"row": {row}}}}}</tool_call>' for row in (9, 3)]
    run = asyncio.run(play(program, [*calls, "Done."]))
    assert [turn.messages[0]["content"] for turn in run.turns[1:]] == [
        "Error: bad arguments of move: row: expected below 8, got 9.",
        '{"moved": true}',
    ]
    assert given_arguments == [{"row": 3}]
    with pytest.raises(OptionError, match="not an object"):
        SchemaTool(move, name="move", description="", parameters={"type": "string"})


def test_texts_for_the_policy() -> None:
    user, system = {"role": "user", "content": "Play."}, {"role": "system", "content": "Be brief."}
    assert with_text([system, user], "A board.") == [system, {"role": "user", "content": "Play.\n\nA board."}]
    assert with_text([system], "A board.") == [system, {"role": "user", "content": "A board."}]
    assert with_text([], "A board.") == [{"role": "user", "content": "A board."}]
    assert with_text([user], "") == [user]
    assert cut_text("abcdef", 6) == "abcdef"
    assert cut_text("abcdefgh", 4).startswith("ab\n[… the text has 8 characters")
    assert content_text({"content": [{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}]}) == "a\nb"
    assert content_text({"n": 1}) == '{"n": 1}'
