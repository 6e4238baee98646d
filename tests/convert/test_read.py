"""Command lines, shell scripts, YAML and Python are read into settings, each once and in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.base.errors import ConfigError
from trimtab.convert.read import read_file, read_text, read_words
from trimtab.convert.settings import Setting, literal


def pairs(found: list[Setting]) -> list[tuple[str, object]]:
    return [(setting.name, setting.value) for setting in found]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8), ("-1", -1), ("1_000", 1000), ("1e-6", 1e-6), ("0.2", 0.2), (".5", 0.5), ("2.", 2.0),
        ("True", True), ("false", False), ("null", None), ("None", None), ("none", "none"), ("", ""), ("a/b", "a/b"),
        ("1.2.3", "1.2.3"), ("[1, a]", [1, "a"]), ("['x.csv', 'y.csv']", ["x.csv", "y.csv"]), ("(0.9, 0.95)", [0.9, 0.95]),
        ("[a", "[a"),
    ],
)  # fmt: skip
def test_values(text: str, value: object) -> None:
    assert literal(text) == value and type(literal(text)) is type(value)


def test_flags_with_one_two_and_no_values() -> None:
    words = ["--eps_clip", "0.2", "--reward_clip_range", "-10", "10", "--packing_samples", "--lr=1e-6", "--name", "a b"]
    assert pairs(read_words(words)) == [
        ("--eps_clip", 0.2),
        ("--reward_clip_range", [-10, 10]),
        ("--packing_samples", True),
        ("--lr", 1e-6),
        ("--name", "a b"),
    ]


def test_hydra_overrides() -> None:
    words = ["data.n=8", "+data.seed=1", "++a.b=[x,y]", "~trainer.logger", "path=http://x?a=b"]
    assert pairs(read_words(words)) == [
        ("data.n", 8),
        ("+data.seed", 1),
        ("++a.b", ["x", "y"]),
        ("~trainer.logger", None),
        ("path", "http://x?a=b"),
    ]


def test_spaces_around_the_sign_and_commas_behind() -> None:
    assert pairs(read_words(["a.b", "=", "True", "c=", "2", "d=3,", "e=", "f=4"])) == [
        ("a.b", True),
        ("c", 2),
        ("d", 3),
        ("e", ""),
        ("f", 4),
    ]


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("python3 -m verl.trainer.main_ppo --x 1", []),
        ("python -u train.py --x 1", ["-u"]),
        ("ray job submit --address=http://h:1 --runtime-env-json '{}' -- python3 -m openrlhf.cli.train_ppo_ray --x 1",
         ["--address", "--runtime-env-json"]),
        ("deepspeed --module openrlhf.cli.train_ppo --x 1", []),
        ("deepspeed --num_gpus 8 train.py --x 1", ["--num_gpus"]),
        ("torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl -- --x 1", ["--standalone", "--nproc_per_node"]),
        ("accelerate launch --config_file a.yaml --num_processes 4 train.py --x 1", ["--config_file", "--num_processes"]),
        ("CUDA_VISIBLE_DEVICES=0 trl grpo --x 1", []),
        ("nohup uv run python3 train.py --x 1 > log.txt 2>&1 &", []),
        ("./train.py --x 1", []),
    ],
)  # fmt: skip
def test_what_starts_the_program_is_told_from_its_flags(line: str, launcher: list[str]) -> None:
    found = read_text(line, "it")
    assert [setting.name for setting in found if setting.origin == "launcher"] == launcher
    assert [(setting.name, setting.value) for setting in found if setting.origin == "flag"] == [("--x", 1)]


def test_a_script_with_everything() -> None:
    text = """
    #!/bin/bash
    set -xeuo pipefail
    export NCCL_DEBUG=WARN
    MODEL=${MODEL:-Qwen/Qwen2.5-7B}     # may be set outside
    longest=$((512 + 2 * 1024))
    echo "starting $MODEL" >&2
    if [ "$X" = 1 ]; then
        MODEL=other
    fi
    ARGS=(
        model.path=$MODEL               # the model
        "data.files=['a b.parquet']"
    )
    python3 -m verl.trainer.main_ppo "${ARGS[@]}" \\
        data.length=$longest \\   # a comment where a shell allows none
        data.root="$HOME/data" name='$MODEL' \\
        $@ 2>&1 | tee log.txt
    """
    assert [(s.name, s.value, s.origin) for s in read_text(text, "run.sh")] == [
        ("NCCL_DEBUG", "WARN", "variable"),
        ("verl.trainer.main_ppo", None, "program"),
        ("model.path", "Qwen/Qwen2.5-7B", "flag"),
        ("data.files", ["a b.parquet"], "flag"),
        ("data.length", 2560, "flag"),
        ("data.root", "$HOME/data", "flag"),
        ("name", "$MODEL", "flag"),
    ]


def test_more_of_an_array_a_variable_of_words_and_a_document_in_the_text() -> None:
    text = (
        "A=(a.x=1)\nA+=(a.y=2)\nMORE='\n  b.x=1 \\\n  b.y=2'\ncat > f <<'EOF'\n--not a flag\nEOF\n"
        'python3 -m verl.trainer.main_ppo "${A[@]}" $MORE c.x="$MORE"\n'
    )
    program, *found = pairs(read_text(text, "run.sh"))
    assert program == ("verl.trainer.main_ppo", None)
    assert found[:4] == [("a.x", 1), ("a.y", 2), ("b.x", 1), ("b.y", 2)] and found[4][0] == "c.x" and len(found) == 5


def test_flags_one_to_a_line_without_continuation() -> None:
    text = "# no --adam_offload\n--overlap_comm\n\n--zero_stage 3\n"
    assert pairs(read_text(text, "it")) == [("--overlap_comm", True), ("--zero_stage", 3)]


def test_an_array_that_nothing_uses_counts_all_the_same() -> None:
    assert pairs(read_text("ARGS=(a.b=1 c.d=2)", "run.sh")) == [("a.b", 1), ("c.d", 2)]


def test_other_commands_are_told_apart() -> None:
    found = read_text("--use_tensorboard ./runs\ntensorboard --logdir ./runs\n", "it")
    assert [(s.name, s.origin) for s in found] == [
        ("--use_tensorboard", "flag"),
        ("tensorboard --logdir ./runs", "command"),
    ]


def test_yaml_keeps_order_and_what_is_written_twice() -> None:
    text = "actor:\n  lr: 1e-6\n  on: true\ndata: {files: [a, b], none: , text: '8'}\nactor:\n  lr: 2e-6\n"
    assert pairs(read_text(text, "it")) == [
        ("actor.lr", 1e-6),
        ("actor.on", True),
        ("data.files", ["a", "b"]),
        ("data.none", None),
        ("data.text", "8"),
        ("actor.lr", 2e-6),
    ]


def test_python_constants_that_are_not_used_elsewhere() -> None:
    text = "A = 2  # two\nB: int = 3\nC = A * 2\nNAME = 'x'\nfor i in range(3):\n    D = 1\n"
    assert pairs(read_text(text, "it.py")) == [("B", 3), ("C", "A * 2"), ("NAME", "x")]


def test_python_arguments_of_a_trainer() -> None:
    text = (
        "N = 8\nd = load_dataset('a/b', 'main', split='train')\nc = GRPOConfig(num_generations=N, beta=0.1)\n"
        "t = trl.GRPOTrainer(model='m', reward_funcs=[f, 'x.y'], args=c, train_dataset=d, peft_config=LoraConfig(r=4))\n"
    )
    assert pairs(read_text(text, "it.py")) == [
        ("dataset_name", "a/b"),
        ("dataset_config", "main"),
        ("dataset_train_split", "train"),
        ("GRPOConfig", None),
        ("num_generations", 8),
        ("beta", 0.1),
        ("GRPOTrainer", None),
        ("model_name_or_path", "m"),
        ("reward_funcs", ["f", "x.y"]),
        ("LoraConfig", None),
        ("lora_r", 4),
    ]


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("", "it", "is empty"),
        ("  \n", "it", "is empty"),
        ("# only a comment\n", "it.sh", "holds no settings"),
        ("set -x\ncd /tmp\n", "it.sh", "holds no settings"),
        ("--a 'b\n--c 1\n", "it", "it, line 1: a quote ' is opened and never closed"),
        ('x=1\n--a "b', "it.sh", 'it.sh, line 2: a quote " is opened and never closed'),
        ("a: [1\n", "it.yaml", "it.yaml, line 2: YAML cannot be read"),
        ("- a\n- b\n", "it.yaml", "holds no keys"),
        ("a: &x\n  b: *x\n", "it.yaml", "contains itself"),
        ("def f(:\n", "it.py", "is not valid Python"),
        ("import os\n", "it.py", "holds no settings"),
    ],
)
def test_what_cannot_be_read_says_where_and_why(text: str, source: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_text(text, source)
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"--a caf\xe9")
    for file, message in (("none.sh", "there is no such file"), (".", "cannot be read"), ("latin", "is not UTF-8")):
        with pytest.raises(ConfigError) as error:
            read_file(tmp_path / file)
        assert message in str(error.value)
