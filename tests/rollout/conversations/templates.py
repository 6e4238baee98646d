"""Chat templates of several families, shortened to what matters here, and a tokenizer that can write them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

QWEN = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

THINKS = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].strip() + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
"""Leaves thoughts out of earlier turns, and opens one for the next."""

LLAMA2 = """{%- for message in messages %}
{%- if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + ' ' + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{%- endif %}
{%- endfor %}"""

DEAF = """{%- for message in messages %}{%- if message.role in ('user', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Writes nothing for tools and their answers."""

ALTERNATES = """{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def chat_tokenizer(
    template: str | None, eos: str = "<|im_end|>", marks_are_special: bool = False
) -> PreTrainedTokenizerFast:
    """One token a character of ASCII, and one a mark."""
    characters = [chr(code) for code in (10, *range(32, 127))]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *MARKS, *characters])}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token=eos)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=marks_are_special) for mark in MARKS])
    tokenizer.chat_template = template
    return tokenizer
