"""The server: the echo environment that `openenv init echo_env` makes, for many sessions. Runs in OpenEnv's venv."""

from __future__ import annotations

from echo_env.models import EchoAction, EchoObservation
from echo_env.server.echo_env_environment import EchoEnvironment
from openenv.core.env_server import create_app

app = create_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=4096)
