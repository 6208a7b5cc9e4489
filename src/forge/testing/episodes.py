"""Episodes without a model: a policy whose answers are given, and `play`, which runs a program against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.config.episodes import EpisodeLimits
from forge.envs.character_codec import CharacterCodec
from forge.envs.environment import Env, as_program
from forge.envs.episode import EpisodeProgram, EpisodeRun, Program, run_episode
from forge.envs.history import ChatCodec
from forge.envs.journal import Entry, Journal
from forge.envs.state import AgentBinding, EpisodeKey, EpisodeState, Policy
from forge.envs.tool_calls import ToolFormat
from forge.errors import OptionError
from forge.types import INITIAL_VERSION, Completion, Task, VersionSpan

Answers = Sequence[str] | Callable[[str], str]
"""Answers in the order of requests, or a function from the text of the whole prompt to the answer."""


@dataclass
class ScriptedPolicy:
    """A `forge.envs.state.Policy` with given answers.

    Attributes:
        answers: what it says.
        codec: the tokenizer. Without one, each character is a token.
        max_seq_len: its context, in tokens.
        version: the weights that it says it has.
        prompts: the text of every prompt that it got. Without a tokenizer of your own, a message is a line
            `role: content`, and the first line names the tools where there are any.
    """

    answers: Answers
    codec: ChatCodec = field(default_factory=CharacterCodec)
    max_seq_len: int = 1 << 20
    version: int = INITIAL_VERSION
    prompts: list[str] = field(default_factory=list)

    async def sample(self, token_ids: Sequence[int], *, options: Mapping[str, Any], session: str) -> Completion:
        """See `forge.envs.state.Policy.sample`."""
        number = len(self.prompts)
        self.prompts.append(_text_of(token_ids, self.codec))
        whole = (*self.codec.encode_rendered(self._answer(number)), self.codec.stop_token_ids[0])
        ids = whole[: options["max_tokens"]]
        is_whole = len(ids) == len(whole)
        return Completion(
            prompt_ids=tuple(token_ids),
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            full_logprobs=None,
            text=self.codec.decode(ids[:-1] if is_whole else ids),
            finish_reason="stop" if is_whole else "length",
            versions=(VersionSpan(self.version, 0, len(ids)),),
        )

    def _answer(self, number: int) -> str:
        if callable(self.answers):
            return self.answers(self.prompts[number])
        if number >= len(self.answers):
            raise OptionError(
                "the script has no answer left",
                path="answers",
                value=len(self.answers),
                rule=f"an answer for each turn: this is turn {number + 1}",
                repair="give more answers, or a function from the prompt to the answer",
            )
        return self.answers[number]


def _text_of(token_ids: Sequence[int], codec: ChatCodec) -> str:
    """Return a prompt as text that a test can compare with."""
    if not isinstance(codec, CharacterCodec):
        return codec.decode(token_ids)
    prompt = codec.read_prompt(token_ids)
    tools = ", ".join(each["function"]["name"] for each in prompt.tools)
    lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in prompt.messages]
    return (f"tools: {tools}\n" if tools else "") + "".join(lines) + "assistant: "


def _policy_of(answers: Answers | Policy) -> Policy:
    return ScriptedPolicy(answers) if callable(answers) or isinstance(answers, Sequence) else answers


def _codec_of(policy: Policy) -> ChatCodec:
    return policy.codec if isinstance(policy, ScriptedPolicy) else CharacterCodec()


async def play(
    program: EpisodeProgram | Program | type[Env],
    answers: Answers | Policy | Mapping[str, Answers | Policy],
    *,
    task: Task | None = None,
    args: Mapping[str, Any] | None = None,
    limits: EpisodeLimits | None = None,
    tool_format: ToolFormat = "hermes",
    sampling: Mapping[str, Any] | None = None,
    journal: list[Entry] | None = None,
) -> EpisodeRun:
    """Run one episode against a policy whose answers are given, and return what became of it.

    Where the program declares agents, `answers` may be a mapping from their names to the answers of each.
    `args` are the program's arguments (`episode.args`). `journal` gets the episode's entries; entries that are in it
    already are replayed. What the program raises is raised: `Fault`, `RewardError`, its own exceptions.

    Example:
        >>> run = await play(solve, ["4"], task=Task("sum", answer="4"))
        >>> assert run.score.reward == 1.0
    """
    made = as_program(program, name=getattr(program, "__qualname__", repr(program)))
    own = {name: _policy_of(each) for name, each in answers.items()} if isinstance(answers, Mapping) else {}
    policy = ScriptedPolicy(()) if isinstance(answers, Mapping) else _policy_of(answers)
    chosen = {"max_tokens": 4096, **(sampling or {})}
    kept = [] if journal is None else journal
    state = EpisodeState(
        task=task or Task("test", messages=({"role": "user", "content": "?"},)),
        key=EpisodeKey(0, 0, 0),
        limits=limits or EpisodeLimits(),
        policy=policy,
        codec=_codec_of(policy),
        tool_format=tool_format,
        sampling=chosen,
        journal=Journal(tuple(kept), write=kept.append),
        bindings={name: AgentBinding(each, _codec_of(each), tool_format, chosen) for name, each in own.items()},
    )
    return await run_episode(made.with_args(args) if args else made, state)
