"""The record of exchanges: written whole or not at all, read by line, and made into samples."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from forge.errors import ConfigError, DataError
from forge.generator.openai import Exchange, exchanges_to_samples, read_exchanges
from forge.generator.openai.records import Recorder, RecordError
from forge.testing.generators import FakeGenerator
from forge.types import Completion, VersionSpan
from openai_serving import client_of, serving

SPANS = (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))


def completion(prompt: tuple[int, ...], drawn: tuple[int, ...]) -> Completion:
    logprobs = tuple(-(token + 1) / 8 for token in drawn)
    return Completion(prompt, drawn, logprobs, None, "text é\n", "stop", stop_reason=9, versions=SPANS[: len(drawn)])


def exchange(prompt: tuple[int, ...], drawn: tuple[int, ...], *, id: str, conversation: str = "c") -> Exchange:
    return Exchange.of(
        completion(prompt, drawn), id=id, conversation=conversation, continues=None, time=1.5, request={}
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "exchanges.jsonl"
    recorder = Recorder(path, clock=lambda: 12.5)
    request = {"messages": [{"role": "user", "content": "é"}], "sampling": {"temperature": 1.0}}
    written = [
        recorder.write(completion((1, 2), (3, 4)), id="a", request=request),
        recorder.write(replace(completion((5,), (6,)), full_logprobs=(-1.0,)), id="b", request={}),
    ]
    assert list(read_exchanges(path)) == written, "each line is there as soon as it is written"
    recorder.close()
    assert written[0].time == 12.5
    assert written[0].versions == SPANS
    assert written[1].full_logprobs == (-1.0,)
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["request"] == request


def test_conversations_are_found_by_their_tokens(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x.jsonl")
    first = recorder.write(completion((1, 2), (3, 4)), id="a", request={})
    second = recorder.write(completion((1, 2, 3, 4, 5), (6, 7)), id="b", request={})
    third = recorder.write(completion((1, 2, 3, 4, 5, 6, 7, 8), (9,)), id="c", request={})
    branch = recorder.write(completion((1, 2, 3, 4, 5, 6, 8), (9,)), id="d", request={})
    other = recorder.write(completion((1, 2, 3, 5), (6,)), id="e", request={})
    assert [one.continues for one in (first, second, third, branch, other)] == [None, "a", "b", "a", None]
    assert {one.conversation for one in (second, third, branch)} == {first.conversation}
    assert other.conversation != first.conversation
    recorder.close()


def test_conversations_with_a_name_do_not_mix(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x.jsonl")
    for name in ("left", "right"):
        recorder.write(completion((1, 2), (3,)), id=f"{name} 1", request={}, conversation=name)
    left = recorder.write(completion((1, 2, 3, 4), (5,)), id="left 2", request={}, conversation="left")
    assert (left.continues, left.conversation) == ("left 1", "left")
    changed = recorder.write(completion((1, 7, 3, 4), (5,)), id="right 2", request={}, conversation="right")
    assert (changed.continues, changed.conversation) == (None, "right"), "its text came back with other tokens"
    unnamed = recorder.write(completion((1, 2, 3, 4), (5,)), id="?", request={})
    assert unnamed.continues is None
    recorder.close()


def test_an_exchange_that_cannot_be_written_is_an_error() -> None:
    recorder = Recorder("/dev/full")
    with pytest.raises(RecordError) as caught:
        recorder.write(completion((1,), (2,)), id="a", request={})
    assert caught.value.path == "/dev/full"
    assert "No space left" in str(caught.value)
    recorder.close()


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    recorder = Recorder(path)
    recorder.write(completion((1,), (2,)), id="a", request={})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(RecordError, match="only 20 of"):
            recorder.write(completion((1,), (2,)), id="b", request={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    recorder.write(completion((1,), (2,)), id="c", request={})
    recorder.close()
    assert [one.id for one in read_exchanges(path)] == ["a", "c"]


def test_a_number_that_json_has_not_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    recorder = Recorder(path)
    recorder.write(completion((1,), (2,)), id="a", request={})
    with pytest.raises(RecordError):
        recorder.write(replace(completion((1,), (2,)), logprobs=(-math.inf,)), id="b", request={})
    assert [one.id for one in read_exchanges(path)] == ["a"]
    recorder.close()


def test_the_client_is_told_when_the_record_fails() -> None:
    with serving(FakeGenerator(["one two"]), record="/dev/full") as server, client_of(server) as client:
        ask: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
        with pytest.raises(openai.InternalServerError, match="/dev/full") as caught:
            client.chat.completions.create(**ask)
        assert caught.value.status_code == 500
        with pytest.raises(openai.InternalServerError, match="/dev/full"):
            client.completions.create(model="fake", prompt="Hi")
        reasons = []
        with pytest.raises(openai.APIError, match="/dev/full"):
            reasons += [chunk.choices[0].finish_reason for chunk in client.chat.completions.create(**ask, stream=True)]
        assert "stop" not in reasons


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Recorder(tmp_path)
    assert (caught.value.path, caught.value.value) == ("serve.record", str(tmp_path))
    assert "directory" in str(caught.value.rule)
    mine = Recorder(tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match="one server writes to a file"):
        Recorder(tmp_path / "x.jsonl")
    mine.close()
    Recorder(tmp_path / "x.jsonl").close()


def test_an_earlier_record_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = exchange((1,), (2,), id="a").to_line()
    path.write_bytes(line + line.rstrip(b"\n"))
    recorder = Recorder(path)
    recorder.write(completion((1,), (2,)), id="b", request={})
    recorder.close()
    assert [one.id for one in read_exchanges(path)] == ["a", "a", "b"]
    path.write_bytes(line + line[:40])
    with pytest.raises(ConfigError, match="cut off"):
        Recorder(path)
    assert path.read_bytes() == line + line[:40], "what is there is never touched"
    long = exchange((1,) * 70_000, (2,), id="long").to_line()
    path.write_bytes(long * 2)
    Recorder(path).close()
    assert path.read_bytes() == long * 2


def test_what_the_server_records(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tools = [{"type": "function", "function": {"name": "f"}}]
    with serving(FakeGenerator(["It is."]), record=str(path)) as server, client_of(server) as client:
        chat = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "Hi"}],
            n=2,
            temperature=0.5,
            tools=tools,
            metadata={"conversation": "from the body"},
        )
        text = client.completions.create(
            model="fake", prompt=["a", "b"], extra_headers={"x-forge-conversation": "from a header"}
        )
        list(client.completions.create(model="fake", prompt="c", stream=True))
    exchanges = list(read_exchanges(path))
    names = ["from the body"] * 2 + ["from a header"] * 2
    assert [one.conversation for one in exchanges[:4]] == names
    assert exchanges[4].conversation.startswith("conv-")
    assert [one.id for one in exchanges[:4]] == [f"{chat.id}-0", f"{chat.id}-1", f"{text.id}-0", f"{text.id}-1"]
    first = exchanges[0]
    assert first.request == {
        "messages": [{"role": "user", "content": "Hi"}],
        "template": {"tools": tools},
        "sampling": {"temperature": 0.5, "n": 2},
    }
    assert first.token_ids == tuple(map(ord, "It is."))
    assert first.prompt_ids == tuple(map(ord, "user: Hi\nassistant: "))
    assert first.full_logprobs == first.logprobs
    assert first.text == "It is."
    assert [one.request["prompt"] for one in exchanges[2:]] == ["a", "b", "c"]


class Telling(FakeGenerator):
    """Its card says how it draws where a request is silent, as a real generator's does."""

    async def _card(self) -> dict[str, Any]:
        return {**await super()._card(), "sampling": {"temperature": 0.7, "top_p": 0.9}}


def test_the_record_says_how_tokens_were_drawn(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with serving(Telling(), record=str(path)) as server, client_of(server) as client:
        client.completions.create(model="fake", prompt="a", top_p=0.5)
    (found,) = read_exchanges(path)
    assert found.request["sampling"] == {"temperature": 0.7, "top_p": 0.5, "n": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b"{", "Expecting"),
        (b"[]", "not an object"),
        ({"token_ids": [1, 2.5]}, "token_ids is not a list of token ids"),
        ({"token_ids": [True, 1]}, "token_ids is not"),
        ({"logprobs": [-1.0]}, "not one logprob for each token"),
        ({"full_logprobs": [-1.0]}, "not one logprob for each token"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"versions": [[1, 2]]}, "versions is not"),
        ({"finish_reason": "tired"}, "finish_reason is not one of"),
        ({"conversation": None}, "conversation is not a text"),
        ("text", "it lacks text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, change: bytes | str | dict[str, Any], words: str) -> None:
    good = exchange((1,), (2, 3), id="a").to_line()
    fields = json.loads(good)
    if isinstance(change, str):
        del fields[change]
    bad = (
        change if isinstance(change, bytes) else json.dumps({**fields, **(change if isinstance(change, dict) else {})})
    )
    path = tmp_path / "x.jsonl"
    path.write_bytes(good + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n" + good)
    reading = read_exchanges(path)
    assert next(reading).id == "a"
    with pytest.raises(DataError) as caught:
        next(reading)
    assert caught.value.path == f"{path}:2"
    assert words in str(caught.value.rule)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = exchange((1,), (2,), id="a").to_line()
    path.write_bytes(line + line[:30])
    assert [one.id for one in read_exchanges(path)] == ["a"]
    with pytest.raises(DataError, match="No such file"):
        list(read_exchanges(tmp_path / "none.jsonl"))


def test_an_exchange_as_a_sample() -> None:
    (sample,) = exchanges_to_samples([exchange((1, 2), (3, 4), id="a")])
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_weights.tolist() == [0, 0, 1, 1]
    assert sample.fields["logprobs"].tolist() == [0, 0, -0.5, -0.625]
    assert sample.identity == "exchange a"


def test_turns_that_extend_each_other_are_one_sample() -> None:
    turns = [
        exchange((1, 2), (3, 4), id="a"),
        exchange((8,), (9,), id="other", conversation="d"),
        exchange((1, 2, 3, 4, 5), (6,), id="b"),
        exchange((1, 2, 3, 4, 5, 6, 7), (0,), id="c"),
    ]
    other, sample = exchanges_to_samples(turns)
    assert other.token_ids.tolist() == [8, 9]
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert sample.loss_weights.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert sample.fields["logprobs"].tolist() == [0, 0, -0.5, -0.625, 0, -0.875, 0, -0.125]
    assert sample.identity == "exchange c"


def test_a_turn_goes_on_from_the_longest_before_it() -> None:
    turns = [
        exchange((1,), (2,), id="a"),
        exchange((1, 2, 3), (4,), id="b"),
        exchange((1,), (2,), id="a again"),
        exchange((1, 2, 3, 4, 5), (6,), id="c"),
    ]
    again, sample = exchanges_to_samples(turns)
    assert again.identity == "exchange a again"
    assert sample.loss_weights.tolist() == [0, 1, 0, 1, 0, 1]


def test_every_drawn_token_counts_once() -> None:
    turns = [
        exchange((1,), (2,), id="a"),
        exchange((1, 2, 3), (4,), id="left"),
        exchange((1, 2, 3), (5,), id="right"),
        exchange((1, 6, 3), (7,), id="changed"),
        exchange((1, 2, 3, 4), (8,), id="elsewhere", conversation="d"),
    ]
    samples = {sample.identity.split()[1]: sample for sample in exchanges_to_samples(turns)}
    assert set(samples) == {"left", "right", "changed", "elsewhere"}
    assert samples["left"].loss_weights.tolist() == [0, 1, 0, 1]
    assert samples["right"].loss_weights.tolist() == [0, 0, 0, 1], "the turn that both share counts in the first"
    assert samples["right"].fields["logprobs"].tolist() == [0, -0.375, 0, -0.75]
    assert samples["changed"].loss_weights.tolist() == [0, 0, 0, 1]
    assert sum(float(sample.loss_weights.sum()) for sample in samples.values()) == len(turns)
    assert exchanges_to_samples([]) == []
