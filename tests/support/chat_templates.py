"""Chat templates in the styles of well-known models, written for tests."""

from __future__ import annotations

CHATML_TOOLS = """\
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = 'You are helpful.', messages %}{% endif -%}
<|im_start|>system
{{ system }}
{%- if tools %}

# Functions
You may use these, one description a line:
<tools>
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}

</tools>
{%- endif %}<|im_end|>
{% for m in rest -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Tools in the system turn, one a line, as Qwen and Hermes have them."""

MISTRAL_TOOLS = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'system' %}[SYS]{{ m.content }}[/SYS]
{%- else %}{{ m.content }}</s>
{%- endif %}
{%- endfor %}"""
"""Tools before the last message of the user."""

THINKING = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and loop.index0 < last.user and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif -%}
<|im_start|>{{ m.role }}
{{ content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Thoughts of the model are dropped once the user has said something more, as in Qwen3."""
