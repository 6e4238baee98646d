"""`trimtab convert` as a user runs it: what is printed where, what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.config.load import load_config


def convert(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_config_is_on_stdout_and_the_table_on_stderr() -> None:
    code, out, err = convert(
        "openrlhf", "--", "--init_kl_coef", "0.01", "--zero_stage", "3", "--eps_clip_low_high", "0.2", "0.28"
    )
    assert code == 0
    assert yaml.safe_load(out)["learn"]["kl"]["coef"] == 0.01 and "coef: 0.01  # --init_kl_coef" in out
    assert "--zero_stage 3" in err and "automatic" in err and "learn.clip.high" in err and "loosens" in err
    assert "fill in model.path" in err and "3 settings: 2 went into the config, 1 Trimtab decides now." in err


def test_json_is_as_the_design_says() -> None:
    code, out, err = convert(
        "verl", "--json", "--", "data.train_batch_size=64", "actor_rollout_ref.rollout.n=8", "foo.bar=1"
    )
    (line,) = out.splitlines()
    found = json.loads(line)
    assert (
        code == 0
        and set(found) == {"kind", "version", "command", "config", "flags", "defaults", "fill_in"}
        and "foo.bar" in err
    )
    assert [set(flag) for flag in found["flags"]] == [{"flag", "value", "outcome", "key", "note"}] * 3
    assert found["flags"][0] == {
        "flag": "data.train_batch_size",
        "value": 64,
        "outcome": "mapped",
        "key": "learn.prompts_per_step",
        "note": "Counted in prompts, as in Trimtab.",
    }
    assert found["config"]["learn"]["samples_per_prompt"] == 8 and found["flags"][2]["outcome"] == "unsupported"


def test_out_writes_a_config_that_loads_once_it_is_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    arguments = [
        "trl",
        "--out",
        file,
        "--",
        "--model_name_or_path",
        "m",
        "--num_generations",
        "4",
        "--reward_funcs",
        "a.b",
    ]
    code, out, _ = convert(*arguments)
    assert code == 0 and out == f"wrote {file}\n"
    assert load_config(file, ["data.train=task:sort"]).learn.samples_per_prompt == 4
    code, _, err = convert(*arguments)
    assert code == 2 and "already exists" in err


def test_a_config_that_needs_nothing_is_planned_at_once(tmp_path: Path) -> None:
    script, config = tmp_path / "run.sh", tmp_path / "config.yaml"
    script.write_text(
        "MODEL=Qwen/Qwen2.5-0.5B-Instruct\npython3 -m openrlhf.cli.train_ppo_ray \\\n  --pretrain $MODEL \\\n"
        "  --prompt_data task:arithmetic --remote_rm_url r.py --advantage_estimator group_norm --n_samples_per_prompt 8 \\\n"
        "  --rollout_batch_size 16 --train_batch_size 64 --max_new_tokens 64 --max_len 128 --max_samples 1000\n"
    )
    assert convert("openrlhf", "--file", script, "--out", config)[0] == 0
    planned = CliRunner().invoke(app, ["plan", str(config), "--device", "h100"])
    assert planned.exit_code == 0, planned.output


def test_a_file_is_read_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data:\n  train_batch_size: 64\n")
    (tmp_path / "a.py").write_text("from trl import GRPOConfig\nc = GRPOConfig(beta=0.1)\n")
    (tmp_path / "a.txt").write_text("K_ROLLOUTS = 4  # four\n")
    for kind, file, key in (
        ("verl", "a.yaml", "prompts_per_step: 64"),
        ("trl", "a.py", "coef: 0.1"),
        ("script", "a.txt", "_prompt: 4"),
    ):
        code, out, _ = convert(kind, "--file", tmp_path / file)
        assert code == 0 and key in out


def test_a_whole_command_may_be_pasted_in_quotes() -> None:
    code, out, _ = convert(
        "verl",
        "--",
        "python3 -m verl.trainer.main_ppo \\\n data.train_batch_size=64 \\\n actor_rollout_ref.rollout.n=4",
    )
    assert code == 0 and "prompts_per_step: 64" in out and "samples_per_prompt: 4" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["openrlfh", "--", "--a", "1"], "openrlfh: is not a framework that Trimtab converts. Did you mean openrlhf?"),
        (["slime", "--", "--a", "1"], "Write one of openrlhf, verl, trl, trl-rloo, trl-ppo, trl-sft, trl-reward, nanochat"),
        (["trl", "--", "trl", "dpo", "--beta", "0.1"], "trl dpo: learning from pairs without a reward model is not supported"),
        (["verl", "--", "algorithm.adv_estimator=grppo"], "Did you mean grpo?"),
        (["trl", "--version", "0.1", "--", "--beta", "0.1"], "--version: Trimtab knows the defaults of trl from 0.15.0"),
        (["verl"], "has no settings. Write trimtab convert verl -- FLAGS, or trimtab convert verl --file FILE"),
        (["verl", "--", ""], "the text given: is empty"),
        (["verl", "--file", "none.sh"], "none.sh: there is no such file"),
        (["verl", "--file", "."], "cannot be read"),
        (["verl", "--file", "empty.sh"], "is empty"),
        (["verl", "--file", "open.sh"], "open.sh, line 2: a quote \" is opened and never closed"),
        (["verl", "--file", "bad.yaml"], "bad.yaml, line 2: YAML cannot be read"),
        (["verl", "--file", "bytes.sh"], "is not UTF-8 text"),
        (["verl", "--file", "open.sh", "--", "a=1"], "has settings from two places"),
        (["verl", "--out", "none/config.yaml", "--", "a=1"], "cannot be written: No such file or directory"),
    ],
)  # fmt: skip
def test_bad_input_is_told_in_words(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.sh").write_text("\n")
    (tmp_path / "open.sh").write_text('x=1\na="b\n')
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    (tmp_path / "bytes.sh").write_bytes(b"--a caf\xe9")
    code, out, err = convert(*arguments)
    assert code == 2 and message in err and "Traceback" not in err and out == ""
    code, out, _ = convert(*arguments[:1], "--json", *arguments[1:])
    assert code == 2 and json.loads(out.splitlines()[-1])["kind"] == "ConfigError"


def test_the_version_whose_defaults_were_taken_is_named() -> None:
    code, out, err = convert("trl", "--version", "0.24", "--", "--beta", "0.1")
    assert code == 0 and "max_new_tokens: 256  # TRL's default of max_completion_length" in out
    assert "Flags of TRL 0.24, GRPOConfig" in err and "Defaults are those of TRL 0.24" in err
    code, out, err = convert("trl", "--json", "--", "--beta", "0.1")
    assert json.loads(out)["version"] == "1.16.0" and "Defaults are those of TRL 1.16.0; for another version" in err


def test_supervised_training_names_its_command(tmp_path: Path) -> None:
    code, out, err = convert("trl", "--", "trl", "sft", "--model_name_or_path", "m", "--packing")
    assert code == 0 and "\nstage: sft\n" in out and "Run it with trimtab sft CONFIG." in err


def test_help_names_the_kinds() -> None:
    result = CliRunner().invoke(app, ["convert", "--help"])
    assert result.exit_code == 0 and all(
        kind in result.output for kind in ("openrlhf", "verl", "trl", "nanochat", "script")
    )
