"""The echo environment of OpenEnv's own template, for as many sessions as `MAX_SESSIONS` says."""

from __future__ import annotations

import os

from echo_env.models import EchoAction, EchoObservation
from echo_env.server.echo_env_environment import EchoEnvironment
from openenv.core.env_server import create_app

app = create_app(
    EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=int(os.environ.get("MAX_SESSIONS", "64"))
)
