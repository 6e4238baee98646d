"""What an engine's process keeps of the call that runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_tokenizer

from trimtab.config.learn import Sampling
from trimtab.rollout.external.account import Account, stop_strings
from trimtab.rollout.external.messages import Beat


def test_a_call_is_counted_from_its_beginning_and_not_anew_where_it_goes_on() -> None:
    account = Account("1.2", 64)
    account.begin(1)
    for used in (0.25, 0.5, 0.125):
        account.step(used)
    account.prompt(10, cached=4)
    account.prompt(7, cached=0)
    assert account.beat == Beat(1, 3, 13, 4, 32), "of the cache, at most"
    account.begin(1)
    assert account.beat == Beat(1, 3, 13, 4, 32)
    account.begin(2)
    assert account.beat == Beat(2, 0, 0, 0, 0)
    assert (account.ready.version, account.ready.blocks) == ("1.2", 64)


def test_a_sequence_is_told_in_plain_bytes() -> None:
    account = Account("1.2", 64)
    account.begin(3)
    every_other = torch.arange(6, dtype=torch.float32)[::2]
    done = account.done(5, [7, 8, 9], every_other, True)
    assert (done.call, done.id, done.stopped) == (3, 5, True)
    assert np.frombuffer(done.tokens, np.int64).tolist() == [7, 8, 9]
    assert np.frombuffer(done.logprobs, np.float32).tolist() == [0.0, 2.0, 4.0]


def test_a_tokenizer_is_read_only_for_stop_strings(tmp_path: Path) -> None:
    assert not stop_strings(Sampling(), str(tmp_path))
    tiny_tokenizer().save_pretrained(tmp_path)
    assert stop_strings(Sampling(stop=["a"]), str(tmp_path))
    with pytest.raises(OSError, match="elsewhere"):
        stop_strings(Sampling(stop=["a"]), str(tmp_path / "elsewhere"))
