"""Chat templates in the manner of real models', over the tokenizer of bytes."""

from __future__ import annotations

from copy import deepcopy

from transformers import PreTrainedTokenizerFast

from support.tiny import byte_tokenizer

QWEN = """\
{%- if tools %}{{- '<system>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '\\nUse <tool_call></tool_call>.\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- 'assistant:' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}{{- 'tool:' + message.content }}
{%- else %}{{- message.role + ':' + message.content }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{%- endif %}"""
"""Takes tools, calls and results, and thinks unless told otherwise: Qwen 3."""
LLAMA = """\
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- for tool in tools %}{{- tool | tojson }}
{%- endfor %}{%- endif %}
{%- for message in messages %}{{- message.role + ':' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
SMOLLM = LLAMA.replace("tools", "xml_tools").replace("Environment: ipython", "<tool_call>")
"""SmolLM 3 takes tools under another name."""
BEGUN = "{% for m in messages %}{{ m.content }}{% endfor %}a:<think>\n{# </think> #}"
"""Opens the reasoning itself: DeepSeek R1."""


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.chat_template = template
    return tokenizer
