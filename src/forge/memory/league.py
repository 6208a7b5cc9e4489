"""How many versions of the policy a self-play league keeps in memory."""

from __future__ import annotations

from forge.config import LeagueConfig
from forge.errors import ConfigError


def max_league_versions(league: LeagueConfig, version_bytes: int) -> int:
    """Return how many versions of the policy may be members at a time; `ConfigError` where there is no room for one.

    Args:
        league: the section `episode.league`.
        version_bytes: the size of one version's weights.
    """
    num_fixed, most = len(league.checkpoints), league.max_members
    if league.max_gb is not None:
        most = min(most, int(league.max_gb * 1e9 // version_bytes))
    if most <= num_fixed:
        raise ConfigError(
            "the league has no room for a version of the policy",
            path="episode.league.max_gb",
            value=league.max_gb,
            rule=f"at least {(num_fixed + 1) * version_bytes / 1e9:.3g}, for {num_fixed + 1} times the weights",
            repair="raise it, or remove checkpoints",
        )
    return most - num_fixed
