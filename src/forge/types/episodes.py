"""What rollouts make: tasks, turns, scores, episodes and groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

from forge.types.completions import INITIAL_VERSION, Completion, FinishReason, Timings, VersionSpan


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the policy made.

    Attributes:
        id: names the call in its conversation; the tool's answer refers to it.
        name: the tool.
        arguments: the arguments by name.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]

    def as_message_part(self) -> dict[str, Any]:
        """Return the call as an entry of a message's `tool_calls`."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that was meant as a call of a tool and cannot be read, and the reason in words for the model."""

    id: str
    text: str
    reason: str


DEFAULT_AGENT: Final = "agent"
"""The name of the agent of an episode that declares none."""

LIVE: Final = "live"
"""What answers for an agent that is the policy that is trained, in words."""


def version_label(version: int) -> str:
    """Return what answers for an agent that is one version of the policy, in words."""
    return f"version {version}"


def labelled_version(label: str) -> int | None:
    """Return the version that a label names; None where something else answers."""
    kind, _, number = label.partition(" ")
    return int(number) if kind == "version" and number.isdecimal() else None


PrefixBreakKind = Literal["template", "retokenization", "client_edit", "compaction"]
"""Why a history could not be extended token by token.

- `template`: the chat template renders earlier messages differently once later ones follow.
- `retokenization`: the text continues the history, but its tokens cannot be joined to the sampled ones.
- `client_edit`: a client of the HTTP endpoint sent another history than it was given.
- `compaction`: the program replaced its history.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of an episode.

    A turn has the tokens appended since its parent's last token (`context_ids`: what the policy read) and the tokens
    sampled after them. Concatenated from the root, they are exactly what the engine received and sampled.

    Attributes:
        index: the turn's position in the episode.
        parent: the index of the turn whose tokens this one extends; None for a root.
        previous: the index of the turn before it in its branch, whose tokens it need not extend; None for the first.
        agent: the agent whose turn it is.
        path: its branch that requested the turn: () for the agent itself, (0,) for its first fork.
        messages: the messages appended before it.
        context_ids: the tokens appended since the parent's last token; the whole prompt of a root.
        token_ids: the sampled tokens, an end token included.
        logprobs: the sampler's logprob of each sampled token.
        full_logprobs: the same before truncation and penalties; None where the engine does not report them.
        text: the sampled tokens as text, without special tokens and without what ended it.
        finish_reason, stop_reason: why the completion ended.
        versions: the weight versions that produced the sampled tokens.
        seed: the seed that it was sampled with.
        prefix_break: why the turn does not extend the branch's previous turn; None where it does, and for first turns.
        calls: the tool calls in it, where the policy was given tools.
        is_delivered: False for a response that never reached its client: it is not trained on.
        is_trained: False for a turn that the program left out of training.
        num_cached: context tokens, the parent's included, that the engine did not have to compute again.
        timings: how long the engine took.
        order: how many turns of the episode arrived before it. Where agents move at the same time, chance decides it.
    """

    index: int
    parent: int | None
    previous: int | None
    path: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...]
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    full_logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    seed: int = 0
    stop_reason: int | str | None = None
    prefix_break: PrefixBreakKind | None = None
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    is_delivered: bool = True
    is_trained: bool = True
    num_cached: int = 0
    timings: Timings = field(default_factory=Timings)
    agent: str = DEFAULT_AGENT
    order: int = field(default=0, compare=False)

    @classmethod
    def of(cls, completion: Completion, **fields: Any) -> Turn:
        """Return a completion as a turn: the only one of its episode, unless `fields` say otherwise."""
        values: dict[str, Any] = {
            "index": 0,
            "parent": None,
            "previous": None,
            "path": (),
            "messages": (),
            "context_ids": completion.prompt_ids,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "full_logprobs": completion.full_logprobs,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "versions": completion.versions,
            "num_cached": completion.num_shared,
            "timings": completion.timings,
        }
        return cls(**{**values, **fields})

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def counts(self) -> bool:
        """Whether its tokens are trained on."""
        return self.is_delivered and self.is_trained and len(self) > 0

    def without_tokens(self) -> Turn:
        """Return the turn with its text alone, as another model's turns are kept."""
        return replace(self, context_ids=(), token_ids=(), logprobs=(), full_logprobs=None, versions=())

    @property
    def version(self) -> int:
        """The oldest weights that made a token of it."""
        return min((span.version for span in self.versions), default=INITIAL_VERSION)

    @property
    def policy_logprobs(self) -> tuple[float, ...]:
        """The sampler's logprobs before truncation and penalties, where it reports them: a trainer computes the same.

        With top_p, top_k, min_p or penalties the policy that is trained is the one without them.
        """
        return self.logprobs if self.full_logprobs is None else self.full_logprobs


@dataclass(frozen=True, slots=True)
class Task:
    """One task for a policy.

    Attributes:
        id: names it in its source, the same in every run: "train.jsonl:17", "arithmetic:3:17".
        messages: the conversation to answer, each a mapping with `role` and `content`; it goes through the chat
            template. Empty where `text` is given.
        text: text to continue, instead of a conversation.
        answer: what rewards compare with; None where they need none.
        metadata: whatever else the source knows. Plain values: it crosses processes and is written as JSON.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """What one completion earned.

    Attributes:
        reward: the number to learn from: the weighted sum of the parts.
        parts: each reward by its name, before its weight.
        failures: the rewards that failed, by name, with what happened; their parts are 0.
        unshaped: the reward without what only shapes it (length terms, the overlong penalty, the divergence from the
            reference); None where that is the reward itself.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    unshaped: float | None = None


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What one agent of an episode earned that declares its agents.

    Attributes:
        score: what it earned; None where it does not learn and got no reward.
        learns: whether its turns are trained on.
        policy: what answered for it: `live` for the policy that is trained, or another in words.
        advantage: how much better it was than its baseline. Where tokens have advantages of their own, their mean.
    """

    score: Score | None
    learns: bool = True
    policy: str = "live"
    advantage: float = 0.0


Answer: TypeAlias = Completion | Turn
"""What rewards score: a completion, or a turn of an episode. Both have `text`, `token_ids` and `finish_reason`."""

EpisodeOutcome = Literal[
    "finished", "truncated", "turn_limit", "token_limit", "context_full", "tool_call_limit", "time_limit"
]
"""How the policy brought an episode to its end. `truncated` where its environment ended it before the task was done,
`time_limit` only where the episode declares time part of the task."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task: its turns, what it earned, and how much better than expected that was.

    What belongs to single tokens (`ref_logprobs`, `teacher_logprobs`, `values`, `token_advantages`) covers the T
    sampled tokens of all turns, turn after turn.

    Attributes:
        task: what was to be done.
        turns: what was sampled, as a tree; a single-turn episode has one.
        score: what it earned in all.
        member: which of its group's episodes it is.
        advantage: how much better it was than its baseline; known when its group is complete. Where tokens have
            advantages of their own, their mean.
        ref_logprobs: the reference model's logprobs of the T tokens; None without a reference.
        teacher_logprobs: the teacher's logprobs of the T tokens; None without distillation.
        values: the critic's value of the state in which each of the T tokens was sampled; None without a critic. 0 at
            tokens that are not trained on.
        end_values: its value of the state after the last token of turns, by index, where the policy has the last word.
        token_advantages: the advantage of each of the T tokens; None where `advantage` is that of all of them.
        turn_rewards: what single turns earned themselves, by index; included in the score.
        outcome: how it ended.
        stats: what it used, by name: numbers for metrics and the report.
        agents: what each agent earned, in the order in which the program declares them; empty for a program with one
            agent. Then `score` is that of the first agent that learns, with the parts of all. Turns of an agent that is
            not the live policy have text and no tokens.
    """

    task: Task
    turns: tuple[Turn, ...]
    score: Score
    member: int = 0
    advantage: float = 0.0
    ref_logprobs: tuple[float, ...] | None = None
    teacher_logprobs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    end_values: Mapping[int, float] = field(default_factory=dict)
    token_advantages: tuple[float, ...] | None = None
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    outcome: EpisodeOutcome = "finished"
    stats: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, AgentResult] = field(default_factory=dict)

    @classmethod
    def single(cls, task: Task, completion: Completion, score: Score, **fields: Any) -> Episode:
        """Return the episode of one completion."""
        turn = Turn.of(completion, messages=task.messages)
        return cls(task, (turn,), score, **{"member": completion.index, **fields})

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled, T."""
        return sum(len(turn) for turn in self.turns)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that are trained on: those that were delivered, of turns that the program did not leave out."""
        return sum(len(turn) for turn in self.turns if turn.counts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The T sampled tokens."""
        return tuple(chain.from_iterable(turn.token_ids for turn in self.turns))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The T logprobs that a trainer's are compared with (`Turn.policy_logprobs`)."""
        return tuple(chain.from_iterable(turn.policy_logprobs for turn in self.turns))

    @property
    def text(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].text if self.turns else ""

    @property
    def version(self) -> int:
        """The oldest weights that made a token of it."""
        return min((turn.version for turn in self.turns if len(turn)), default=INITIAL_VERSION)

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut off: its last turn that was delivered by length, or the episode by a limit or its
        environment."""
        last = next((turn for turn in reversed(self.turns) if turn.is_delivered), None)
        return self.outcome != "finished" or (last is not None and last.finish_reason == "length")


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task, which are compared with each other.

    Attributes:
        number: its place in the run's order of prompts, which is its identity: no two groups of a run share it.
        epoch: how often the prompts had been gone through before it.
        episodes: in the order of their seeds; at least one.
        temperature: what its tokens were sampled at, which may change during a run; None for what the configuration
            says. Its logprobs, those of other models about it, and those that a trainer computes are all at this
            temperature.
    """

    number: int
    epoch: int
    episodes: tuple[Episode, ...]
    temperature: float | None = None

    @property
    def task(self) -> Task:
        return self.episodes[0].task

    @property
    def version(self) -> int:
        """The oldest weights that made a token of it. Episodes without a token do not count."""
        return min((episode.version for episode in self.episodes if episode.num_tokens), default=INITIAL_VERSION)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(episode.score.reward for episode in self.episodes)

    @property
    def unshaped_rewards(self) -> tuple[float, ...]:
        """The rewards before shaping."""
        scores = [episode.score for episode in self.episodes]
        return tuple(score.reward if score.unshaped is None else score.unshaped for score in scores)

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(episode.num_tokens for episode in self.episodes)
