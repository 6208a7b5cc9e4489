"""The self-play league: the section `episode.league`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, PathText, broken_rule

_MIN_GAMES = 20


class EloConfig(ConfigModel):
    """Elo ratings of the live policy and of the members."""

    k: float = Field(default=16.0, gt=0, description="The most that one game changes a rating.")
    start: float = Field(
        default=1000.0,
        description="The rating of the live policy and of `checkpoints` at the start. A version that is added starts "
        "with the rating that the live policy has then.",
    )


class LeagueConfig(ConfigModel):
    """Self-play against earlier versions of the policy. In every group one agent is the live policy and learns; all
    other agents of the league are one opponent, which is drawn for the group and never learns."""

    agents: tuple[str, ...] = Field(
        default=(), description="The agents that take part, by name; empty for all that the program declares."
    )
    learner: str | None = Field(
        default=None, description="The agent that learns; null for each of `agents` in turn, by the group's number."
    )
    rule: Literal["latest", "uniform", "prioritised"] = Field(
        default="uniform",
        description="How the opponent of a group is drawn from the members: the newest version, each with the same "
        "probability, or by the win rate of the live policy against it.",
    )
    prioritise: Literal["hard", "variance"] = Field(
        default="hard",
        description="With `rule: prioritised` and win rate w, a member's weight is `hard`: (1 - w)^power, so that "
        "strong opponents come more often; or `variance`: (w (1 - w))^power, so that equal ones do.",
    )
    power: float = Field(default=1.0, gt=0, description="The exponent of `prioritise`.")
    self_play: float = Field(
        default=0.2, ge=0, lt=1, description="The probability that the opponent is the live policy itself."
    )
    checkpoints: tuple[PathText, ...] = Field(
        default=(),
        description="Folders of checkpoints of the same model that are members from the start and stay, each with "
        "generators of its own.",
    )
    add_every: int | None = Field(
        default=50, ge=1, description="Add the live policy as a member every so many steps; null for never."
    )
    add_at_win_rate: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Add the live policy as a member when its win rate against every member is at least this.",
    )
    min_games: int = Field(
        default=_MIN_GAMES, ge=1, description="The games against each member that `add_at_win_rate` asks for."
    )
    max_members: int = Field(default=8, ge=1, description="The most members there may be, `checkpoints` included.")
    max_gb: float | None = Field(
        default=None, gt=0, description="The most memory for weights of members, in 1e9 bytes; null for no such bound."
    )
    evict: Literal["spread", "oldest"] = Field(
        default="spread",
        description="Which version makes room for a new one. `spread`: the one that is closest to its neighbours, so "
        "that members stay spread over the run, the first and the newest included. `oldest`: the oldest.",
    )
    decay: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="How much an earlier game against a member counts in the win rate, compared with the next one.",
    )
    result: Literal["compare", "sign"] = Field(
        default="compare",
        description="How a game is decided. `compare`: the learner wins if it earned more than every opponent. `sign`: "
        "it wins if it earned more than 0, for programs that give opponents no reward.",
    )
    draw_margin: float = Field(
        default=0.0, ge=0, description="Games are drawn in which rewards differ by no more than this."
    )
    evaluate_against: Literal["first", "latest", "live"] = Field(
        default="first",
        description="The opponent in evaluations of the run: the first member, the newest, or live.",
    )
    elo: EloConfig = Field(default_factory=EloConfig, description="Elo ratings.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.agents and (len(self.agents) < 2 or len(set(self.agents)) < len(self.agents)):
            rule = "at least two different agents: one that learns, and one that is the opponent"
            raise broken_rule(rule, repair="name them all, or leave agents out for all of the program", key="agents")
        if self.learner is not None and self.agents and self.learner not in self.agents:
            rule = f"one of agents: {', '.join(self.agents)}"
            raise broken_rule(rule, repair="name one of them, or leave learner out", key="learner")
        if self.rule != "prioritised":
            for key, default in (("prioritise", "hard"), ("power", 1.0)):
                if getattr(self, key) != default:
                    rule = "has no effect without rule: prioritised"
                    raise broken_rule(rule, repair="remove it, or set rule: prioritised", key=key)
        if self.add_at_win_rate is None and self.min_games != _MIN_GAMES:
            rule = "has no effect without add_at_win_rate"
            raise broken_rule(rule, repair="remove it, or set add_at_win_rate", key="min_games")
        if self.max_members <= len(self.checkpoints):
            rule = f"more than the {len(self.checkpoints)} of checkpoints: the policy's versions are members, too"
            raise broken_rule(rule, repair=f"set it to {len(self.checkpoints) + 1} or more", key="max_members")
        if len(set(self.checkpoints)) < len(self.checkpoints):
            raise broken_rule("different folders", repair="name each once", key="checkpoints")
        return self
