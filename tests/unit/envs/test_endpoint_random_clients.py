"""Clients that extend, fork, edit and repeat conversations at random: tokens stay exact, and nothing counts twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from endpoint_clients import LIMIT_S, TOOLS
from forge.envs.endpoint_branches import BranchIndex
from forge.envs.episode import episode, run_episode
from forge.envs.history import History
from forge.envs.trace import path_to, rows_of
from forge.types import Turn, VersionSpan
from scripted_policy import END, ScriptedPolicy, state_of

ANSWERS = [
    "Yes.",
    " \n Yes. \n",
    "<think>\nhm\n</think>\n\nNo.",
    'See. <tool_call>{"arguments": {"x": 1}, "name": "double"}</tool_call>',
    '<tool_call>{"name": "double"}</tool_call><tool_call>{</tool_call>',
    "a<tool_call>{",
    "",
]
ACTIONS = ["extend", "extend", "extend", "fork", "repeat", "edit", "drop", "new", "plain"]


class RandomPolicy(ScriptedPolicy):
    """Answers with what its seed says; some answers are cut off."""

    async def sample(self, token_ids, *, options, session):
        dice = random.Random(options["seed"])
        self.answers = lambda text: dice.choice(ANSWERS) + (END if dice.random() < 0.8 else "")
        return await super().sample(token_ids, options=options, session=session)


class Client:
    """Keeps conversations as their client sees them."""

    def __init__(self, session, endpoint):
        self._session, self._endpoint = session, endpoint
        self.known = []

    async def ask(self, messages, *, tools=True):
        body = {"model": "m", "messages": messages, **({"tools": TOOLS} if tools else {})}
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        async with self._session.post(
            f"{self._endpoint.base_url}/chat/completions", json=body, headers=headers
        ) as found:
            assert found.status == 200, await found.text()
            answer = (await found.json())["choices"][0]["message"]
        self.known.append([*messages, answer])

    def follow(self, messages):
        """The messages with what comes after their last answer: the results of its calls, or another question."""
        calls = messages[-1].get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in calls]
        return [*messages, *(results or [{"role": "user", "content": f"Go on {len(messages)}"}])]

    async def act(self, action, dice):
        if action == "new" or not self.known:
            await self.ask([{"role": "user", "content": f"Hello {dice.randrange(3)}"}])
            return
        latest, any_ = self.known[-1], dice.choice(self.known)
        if action == "extend":
            await self.ask(self.follow(latest))
        elif action == "fork":
            await asyncio.gather(*(self.ask([*any_, {"role": "user", "content": f"Fork {n}"}]) for n in range(2)))
        elif action == "repeat":
            await self.ask(any_[:-1])
        elif action == "edit":
            await self.ask(
                [*any_[:-1], {"role": "assistant", "content": "I said so."}, {"role": "user", "content": "?"}]
            )
        elif action == "drop":
            await self.ask(self.follow(any_[1:]))
        else:
            await self.ask(self.follow(any_), tools=False)


@settings(max_examples=25, deadline=None)
@example(["extend", "repeat", "new", "extend", "extend", "extend", "edit"], 942952021)
@given(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=12), st.integers(0, 2**32))
def test_whatever_clients_do_tokens_are_exact_and_count_once(thinking, actions, seed):
    import aiohttp

    def play():
        policy = RandomPolicy(thinking, [])

        @episode
        async def program(task, agent):
            dice = random.Random(seed)
            async with aiohttp.ClientSession() as session, agent.endpoint() as endpoint:
                client = Client(session, endpoint)
                for action in actions:
                    await client.act(action, dice)
            return 1.0

        async def main():
            async with asyncio.timeout(LIMIT_S):
                return await run_episode(program, state_of(policy))

        return asyncio.run(main()), policy

    done, policy = play()
    sent = Counter()
    for turn in done.turns:
        tokens = [token for each in path_to(done.turns, turn.index) for token in (*each.context_ids, *each.token_ids)]
        sent[tuple(tokens[: len(tokens) - len(turn)])] += 1
        assert turn.parent is None or turn.parent < turn.index
        assert turn.previous is None or turn.previous < turn.index
        assert (turn.prefix_break is None) or turn.previous is not None
    assert sent == Counter(policy.prompts)  # exactly what the engine received
    counted = [turn.index for row in rows_of(done.turns) for _, _, turn, counts in row.sampled_spans() if counts]
    assert sorted(counted) == [turn.index for turn in done.turns if len(turn)]
    assert sum(done.counts.prefix_breaks.values()) == sum(turn.prefix_break is not None for turn in done.turns)
    again, _ = play()
    assert again.turns == done.turns


# ---- The index by itself ---------------------------------------------------------------------------------------------


def turn_of(index, *, parent=None):
    return Turn(index, parent, parent, (), (), (), (1,), (0.0,), None, "", "stop", (VersionSpan(0, 0, 1),))


def test_the_longest_known_conversation_is_continued():
    index = BranchIndex("s")
    said = [{"role": "user", "content": "a"}]
    for number in range(3):
        point = index.find(said, {}, {})
        answer = {"role": "assistant", "content": f"answer {number}"}
        raw = {"role": "assistant", "content": f"raw {number}"}
        history = History((*point.history.messages, *point.messages, raw), text="x" * (number + 1))
        index.add(point, turn_of(number, parent=point.last), history, answer)
        said = [*said, answer, {"role": "user", "content": f"b{number}"}]
    point = index.find(said, {}, {})
    assert (point.last, point.messages, point.edited) == (2, ({"role": "user", "content": "b2"},), None)
    assert [message["content"] for message in point.history.messages] == ["a", "raw 0", "b0", "raw 1", "b1", "raw 2"]
    middle = index.find([*said[:4], {"role": "user", "content": "other"}], {}, {})
    assert (middle.last, middle.history.text) == (1, "xx")  # the text of the longer branch has it
    assert middle.session != point.session


def test_identity_depends_on_what_is_asked():
    messages = [{"role": "user", "content": "a"}]
    index = BranchIndex("s")
    first = index.find(messages, {}, {})
    assert first.key[1] == 0
    assert index.find(messages, {}, {}).key == (first.key[0], 1)
    others = [index.find(messages, {"tools": TOOLS}, {}), index.find(messages, {}, {"max_tokens": 3})]
    assert len({first.key[0], *(other.key[0] for other in others)}) == 3
    index.release(first)
    assert index.find(messages, {}, {}).key == first.key  # it got no answer, and is asked again
    assert index.find(messages, {}, {}).key == (first.key[0], 2)
    assert BranchIndex("t").find(messages, {}, {}).key == first.key
