"""A tiny character tokenizer with a chat template, and a guard that no test here touches the network."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trimtab.config.schema import Data

CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n", "é", "你", "\u2028"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|turn|>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_tokenizer(*, template: bool = False, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """One token a character; `bos` and `eos`: added to plain text by the tokenizer itself."""
    vocab = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    single = f"{'<s> ' * bos}$A{' </s>' * eos}"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=100_000
    )
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def plain() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat() -> PreTrainedTokenizerFast:
    return make_tokenizer(template=True, bos=True)


@pytest.fixture(scope="session")
def data() -> Callable[..., Data]:
    return lambda **keys: Data(**{"train": "x.jsonl", **keys})


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a data test tried to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
