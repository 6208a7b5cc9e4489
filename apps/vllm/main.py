"""Talk to a model, on the embedded engine or on vLLM: the same as `forge chat`.

python -m apps.vllm.main --config apps/vllm/tiny.yaml
python -m apps.vllm.main --config apps/vllm/llama3_8b.yaml generator.sampling.temperature=0.2
echo "What is 2 + 2?" | python -m apps.vllm.main --config apps/vllm/llama3_8b.yaml
"""

from __future__ import annotations

import sys

from forge.cli.chat import chat
from forge.config import PolicyConfig, from_command_line
from forge.errors import INPUT_ERRORS, ForgeError


def main() -> None:
    config = from_command_line(PolicyConfig)
    try:
        sys.exit(chat(config))
    except ForgeError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, INPUT_ERRORS) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
