"""Templates shaped like those of published models, and tokenizers that have their special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from forge.models.tiny import make_tiny

# Thinking: shown for turns after the last question, with an empty block where there was none in the last turn, and
# removed from earlier ones. Answers of tools are gathered in a message of the user.
THINKING = """\
{%- set seen = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not (message.content.startswith('<tool_response>')
      and message.content.endswith('</tool_response>')) %}{%- set seen.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role in ('user', 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.question and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n' + (call | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

ALTERNATING = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{- ' ' + message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
"""


def chatml_folder(folder: Path, template: str) -> Path:
    """A tiny model whose template is another one."""
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def llama_folder(folder: Path) -> Path:
    """A tokenizer with Llama 3's special tokens, a BOS that it adds, positions that it trims, and two ends."""
    chatml_folder(folder, HEADERS)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    words = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
    for index, word in enumerate(words):
        content["added_tokens"].append({**content["added_tokens"][0], "id": 512 + index, "content": word})
    begin = {"SpecialToken": {"id": words[0], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {
                "type": "TemplateProcessing",
                "single": [begin, text],
                "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {words[0]: {"id": words[0], "ids": [512], "tokens": [words[0]]}},
            },
        ],
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": words[0], "eos_token": words[3]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [515, 516]}), encoding="utf-8")
    return folder
