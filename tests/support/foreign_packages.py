"""What tests install into venvs of their own, one for each line, because it cannot share ours.

`scripts/foreign_venvs.py` makes them all before the tests run.
"""

from __future__ import annotations

from typing import Final

GYMNASIUM: Final = ("gymnasium==1.4.0",)
JUPYTER: Final = ("ipykernel==7.4.0", "jupyter-client==8.10.0")
KUBERNETES_VALIDATE: Final = ("kubernetes-validate==1.37.0",)
LM_EVAL: Final = ("lm-eval[api]==0.4.13", "transformers>=5.16.1,<5.20")
MCP: Final = ("mcp==2.3.0",)
MINI_SWE_AGENT: Final = ("mini-swe-agent==2.4.6", "mcp")
MLFLOW: Final = ("mlflow-skinny==3.17.2",)
OPENAI_AGENTS: Final = ("openai-agents==0.24.0",)
OPENENV: Final = ("openenv==0.10.0",)
REASONING_GYM: Final = ("reasoning-gym==0.1.25",)
TEXTARENA: Final = ("textarena==0.7.4",)
TRACKIO: Final = ("trackio==0.43.0",)
VERIFIERS: Final = ("verifiers==0.4.0",)

ALL: Final = (
    GYMNASIUM,
    JUPYTER,
    KUBERNETES_VALIDATE,
    LM_EVAL,
    MCP,
    MINI_SWE_AGENT,
    MLFLOW,
    OPENAI_AGENTS,
    OPENENV,
    REASONING_GYM,
    TEXTARENA,
    TRACKIO,
    VERIFIERS,
)
