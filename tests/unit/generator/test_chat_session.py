"""Talking to a policy without a terminal: questions, commands, what is kept, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forge.config import Sampling
from forge.errors import ActorFailure, ModelError, PromptError
from forge.generator.chat_session import ChatSession
from forge.testing.generators import FakeGenerator
from forge.types import Delta


class ListScreen:
    """Keeps what a session shows."""

    def __init__(self) -> None:
        self.answers: list[str] = [""]
        self.summaries: list[str | None] = []
        self.notes: list[str] = []
        self.problems: list[str] = []

    def show(self, text: str) -> None:
        self.answers[-1] += text

    def end(self, summary: str | None) -> None:
        self.summaries.append(summary)
        self.answers.append("")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def problem(self, text: str) -> None:
        self.problems.append(text)


class Talk:
    """A session on a fake policy, and what it showed after some lines."""

    def __init__(self, policy: FakeGenerator, **options: Any) -> None:
        self.policy, self.screen = policy, ListScreen()
        self.session = ChatSession(policy, self.screen, **options)
        self.session.clock = iter(range(1000)).__next__

    def say(self, *lines: str) -> list[bool]:
        async def each() -> list[bool]:
            return [await self.session.handle(line) for line in lines]

        return asyncio.run(each())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# ---- questions


def test_answers_come_piece_by_piece_and_the_history_is_sent() -> None:
    talk = Talk(FakeGenerator(["It is four.", "Because."]))
    shown: list[str] = []
    talk.screen.show = shown.append  # type: ignore[method-assign]
    assert talk.say("What is 2+2?", "", "   ", "Why?") == [True] * 4
    assert shown == ["It", " is", " four.", "Because."]
    assert [request.messages for request in talk.policy.requests] == [
        (user("What is 2+2?"),),
        (user("What is 2+2?"), assistant("It is four."), user("Why?")),
    ]
    assert all(request.sampling.n == 1 for request in talk.policy.requests)
    assert talk.session.messages[-1] == assistant("Because.")
    assert talk.screen.summaries == [
        "11.0 tokens/s, 11 tokens, stop, initial weights",
        "8.0 tokens/s, 8 tokens, stop, initial weights",
    ]


def test_the_summary_names_every_version_that_made_tokens() -> None:
    policy = FakeGenerator(["one two"], pause_after=1)
    policy.version = 3

    async def update_in_between() -> None:
        asking = asyncio.create_task(talk.session.handle("go"))
        await policy.paused.wait()
        policy.version = 4
        policy.resume()
        await asking

    talk = Talk(policy)
    asyncio.run(update_in_between())
    assert talk.screen.summaries == ["7.0 tokens/s, 7 tokens, stop, version 3 and version 4"]


def test_a_stopped_answer_is_cancelled_and_stays_as_far_as_it_came() -> None:
    policy = FakeGenerator(["one two three", "more"], pause_after=2)
    talk = Talk(policy)

    async def stop_in_between() -> list[bool]:
        asking = asyncio.create_task(talk.session.handle("count"))
        await policy.paused.wait()
        stopped = [talk.session.stop()]
        assert await asking
        policy.resume()
        return [*stopped, talk.session.stop()]

    assert asyncio.run(stop_in_between()) == [True, False]
    assert policy.num_cancelled == 1
    assert talk.screen.answers == ["one two", ""]
    assert talk.screen.summaries == ["7.0 tokens/s, 7 tokens, stopped, initial weights"]
    talk.say("go on")
    assert policy.requests[1].messages == (user("count"), assistant("one two"), user("go on"))
    assert policy.num_cancelled == 1


def test_a_stream_that_never_waits_is_heard_out_no_further_than_the_stop() -> None:
    class Eager(FakeGenerator):
        async def _deltas(self, *arguments: Any) -> Any:
            for _ in range(1000):
                yield Delta(0, (97,), (-0.1,), "a", self.version)

    talk = Talk(Eager())

    async def stop_at_once() -> int:
        show = talk.screen.show

        def stop_soon(text: str) -> None:
            show(text)
            asyncio.get_running_loop().call_soon(talk.session.stop)

        talk.screen.show = stop_soon  # type: ignore[method-assign]
        assert await talk.session.handle("go")
        return talk.policy.num_cancelled

    assert asyncio.run(stop_at_once()) == 1  # and the request has ended when the line has
    assert talk.screen.answers == ["a", ""]
    assert talk.session.messages[-1] == assistant("a")


def test_an_answer_stopped_before_it_began_is_forgotten_with_its_question() -> None:
    began = asyncio.Event()

    class Slow(FakeGenerator):
        async def _deltas(self, *arguments: Any) -> Any:
            began.set()
            await asyncio.Event().wait()
            yield

    talk = Talk(Slow())

    async def stop_early() -> None:
        asking = asyncio.create_task(talk.session.handle("hello?"))
        await began.wait()
        talk.session.stop()
        assert await asking

    asyncio.run(stop_early())
    assert talk.session.messages == []
    assert talk.screen.notes == ["Stopped before the answer began; the question was not kept."]


def test_an_empty_answer_is_not_kept() -> None:
    talk = Talk(FakeGenerator([""]))
    talk.say("hello?")
    assert talk.session.messages == []
    assert talk.screen.notes == ["The answer is empty; the question was not kept."]
    assert talk.screen.summaries == ["0.0 tokens/s, 0 tokens, stop, no weights"]


def test_cancelling_the_session_itself_is_not_taken_for_a_stopped_answer() -> None:
    policy = FakeGenerator(["one two"], pause_after=1)
    talk = Talk(policy)

    async def cancel() -> None:
        asking = asyncio.create_task(talk.session.handle("count"))
        await policy.paused.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancel())
    assert policy.num_cancelled == 1


def test_a_failed_question_is_said_and_not_kept_and_the_session_goes_on() -> None:
    talk = Talk(FakeGenerator([ActorFailure("replica 0 was lost", repair="ask again"), "here"]))
    assert talk.say("one", "two") == [True, True]
    assert talk.screen.problems == ["replica 0 was lost\n  repair: ask again\nThe question was not kept."]
    assert talk.screen.summaries[0] is None
    assert talk.session.messages == [user("two"), assistant("here")]


def test_an_error_that_is_not_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        Talk(FakeGenerator([ZeroDivisionError()])).say("one")


def test_a_full_context_says_so_and_what_to_do() -> None:
    talk = Talk(FakeGenerator(["0123456789" * 10], max_seq_len=60), max_seq_len=60)
    talk.say("go")
    room = 60 - len("user: go\nassistant: ")
    assert talk.session.messages[-1] == assistant(("0123456789" * 10)[:room])
    assert talk.screen.notes == ["The context of 60 tokens is full: /reset starts a new conversation."]
    talk.say("more")
    assert "at most 59 tokens" in talk.screen.problems[0]
    assert talk.screen.problems[0].endswith("The question was not kept: /reset starts a new conversation.")
    talk.say("/reset", "go")
    assert talk.policy.requests[-1].messages == (user("go"),)
    talk.say("/reset", "x" * 60)
    assert talk.screen.problems[1].endswith("The question was not kept: ask a shorter one.")


def test_an_answer_cut_by_max_tokens_is_no_full_context() -> None:
    talk = Talk(FakeGenerator(["0123456789"], max_seq_len=60, sampling=Sampling(max_tokens=4)), max_seq_len=60)
    talk.say("go")
    assert talk.screen.answers[0] == "0123"
    assert talk.screen.notes == []
    assert talk.screen.summaries == ["4.0 tokens/s, 4 tokens, length, initial weights"]


# ---- commands


def test_the_system_message_goes_first_and_can_be_changed_and_removed() -> None:
    talk = Talk(FakeGenerator(["a"]), system="Be brief.")
    talk.say("1", "/system  Be kind. ", "2", "/system", "3")
    firsts = [request.messages[0] for request in talk.policy.requests if request.messages]
    assert firsts == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        user("1"),
    ]
    assert talk.screen.notes == ["The system message is set.", "There is no system message now."]


def test_the_temperature_is_set_for_the_questions_that_follow() -> None:
    talk = Talk(FakeGenerator(["a"], sampling=Sampling(temperature=0.3, top_k=5)), sampling=Sampling(temperature=0.3))
    talk.say("1", "/temperature 0.7", "2", "/temperature 0", "3")
    assert [request.sampling.temperature for request in talk.policy.requests] == [0.3, 0.7, 0.0]
    assert {request.sampling.top_k for request in talk.policy.requests} == {5}


@pytest.mark.parametrize("value", ["", "hot", "-1", "nan", "inf", "1 2"])
def test_a_temperature_that_is_none_changes_nothing(value: str) -> None:
    talk = Talk(FakeGenerator(["a"]), sampling=Sampling(temperature=0.3))
    assert talk.say(f"/temperature {value}", "1") == [True, True]
    assert talk.screen.problems == [
        "The temperature must be a finite number from 0 up, as in /temperature 0.7; it stays 0.3."
    ]
    assert talk.policy.requests[0].sampling == Sampling()


def loads(token_text: Callable[[int], str]) -> Callable[[], Awaitable[Callable[[int], str]]]:
    async def load() -> Callable[[int], str]:
        return token_text

    return load


def test_logprobs_are_shown_for_each_token_with_its_version_and_turned_off_again() -> None:
    talk = Talk(FakeGenerator(["a é"]), load_token_text=loads(chr))
    talk.policy.version = 2
    talk.say("/logprobs", "1", "/logprobs", "2")
    assert talk.screen.answers[:2] == [
        "  -0.0100  version 2  'a'\n  -0.0200  version 2  ' '\n  -0.0300  version 2  'é'\n",
        "a é",
    ]
    assert talk.session.messages[1] == assistant("a é")
    assert talk.say("/logprobs on") == [True]
    assert talk.screen.problems == ["/logprobs takes no value: it turns logprobs on, or off again."]


def test_without_a_tokenizer_logprobs_name_the_tokens_by_number() -> None:
    talk = Talk(FakeGenerator(["a"]))
    talk.say("/logprobs", "1")
    assert talk.screen.answers[0] == "  -0.0100  initial weights  'token 97'\n"


def test_a_tokenizer_that_cannot_be_loaded_is_a_problem_and_no_end() -> None:
    async def fail() -> Any:
        raise ModelError("no tokenizer")

    talk = Talk(FakeGenerator(["a"]), load_token_text=fail)
    assert talk.say("/logprobs", "1") == [True, True]
    assert talk.screen.problems == ["no tokenizer"]
    assert talk.screen.answers[0] == "a"


def test_saved_conversations_are_read_by_the_data_loader(tmp_path: Path) -> None:
    from forge.data.files import Record
    from forge.data.formats import Layout, convert, detect

    path = tmp_path / "talk.jsonl"
    talk = Talk(FakeGenerator(["Four – 4."]), system="Count.")
    talk.say("2+2?", f"/save {path}", "/reset", "/system", "3+1?", f"/save {path}")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert records == [
        {"messages": [{"role": "system", "content": "Count."}, user("2+2?"), assistant("Four – 4.")]},
        {"messages": [user("3+1?"), assistant("Four – 4.")]},
    ]
    assert talk.screen.notes[0] == f"The conversation was added to {path}."
    found = [Record(f"talk.jsonl:{line}", raw) for line, raw in enumerate(path.read_bytes().splitlines(), start=1)]
    layout = Layout(detect(found, columns={}, lenient=False), {})
    assert [list(convert(record, layout=layout).messages) for record in found] == [one["messages"] for one in records]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["1", "/save"], "/save needs a file, as in /save talk.jsonl."),
        (["/save talk.jsonl"], "/save needs a conversation: ask something first."),
        (
            ["1", "/save no/such/folder/talk.jsonl"],
            "no/such/folder/talk.jsonl cannot be written: No such file or directory. Name another file.",
        ),
    ],
)
def test_what_cannot_be_saved(lines: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    talk = Talk(FakeGenerator(["a"]))
    assert all(talk.say(*lines))
    assert talk.screen.problems == [problem]
    assert list(tmp_path.iterdir()) == []


def test_help_and_unknown_commands_name_all_commands_and_quit_ends() -> None:
    names = ["/system", "/temperature", "/logprobs", "/reset", "/save", "/help", "/quit"]
    talk = Talk(FakeGenerator(["a"]))
    assert talk.say("/help", "/tempreature 1", "/", " /etc is what?", "/quit") == [True, True, True, True, False]
    assert [name for name in names if f"\n{name} " not in "\n" + talk.screen.notes[0]] == []
    known = f"There are {', '.join(names)}."
    assert talk.screen.problems == [f"There is no command /{typo}. {known}" for typo in ("tempreature", "")]
    assert [request.messages for request in talk.policy.requests] == [(user("/etc is what?"),)]


# ---- the fake


def test_the_fake_answers_as_a_service_does() -> None:
    policy = FakeGenerator(lambda request: request.text[::-1], name="mirror")

    async def ask() -> Any:
        whole = await policy.generate.route("ab c", sampling={"max_tokens": 3}, n=2)
        stopped = await policy.generate.route(token_ids=[97, 98], sampling=Sampling(stop=("a",)))
        deltas = [delta async for delta in policy.generate_stream.stream(messages=[user("x y")])]
        return whole, stopped, deltas, await policy.card.route(), await policy.stats.route()

    whole, [stopped], deltas, card, stats = asyncio.run(ask())
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in whole] == [
        (index, "c b", "length", (-0.01, -0.02, -0.03)) for index in (0, 1)
    ]
    assert (stopped.prompt_ids, stopped.text, stopped.stop_reason) == ((97, 98), "b", "a")
    last = deltas[-1].completion
    assert last.text == "".join(delta.text for delta in deltas) == "user: x y\nassistant: "[::-1]
    assert last.token_ids == tuple(token for delta in deltas for token in delta.token_ids)
    assert last.logprobs == tuple(value for delta in deltas for value in delta.logprobs)
    assert [delta.completion for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (card["name"], stats.num_done, stats.num_running) == ("mirror", 3, 0)
    assert policy.requests[1].token_ids == (97, 98)


@pytest.mark.parametrize("arguments", [{}, {"prompt": "a", "token_ids": [1]}, {"prompt": ""}, {"prompt": "x" * 10}])
def test_the_fake_refuses_what_a_service_refuses(arguments: dict[str, Any]) -> None:
    policy = FakeGenerator(max_seq_len=10)
    with pytest.raises(PromptError) as refused:
        asyncio.run(policy.generate.route(**arguments))
    assert refused.value.rule
    assert refused.value.repair
