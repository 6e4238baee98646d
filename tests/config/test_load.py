"""Loading: what a file, a dictionary and overrides become, and what a user is told when they cannot."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from trimtab.base.errors import ConfigError
from trimtab.config.learn import Learn, Sampling
from trimtab.config.load import config_from_dict, load_as, load_config
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.run import Run
from trimtab.config.schema import Config, EvalSampling
from trimtab.config.sft import SftConfig

LEAST = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "reward": [{"fn": "exact_match"}]}
TEXT = "model: {path: m}\ndata: {train: a.jsonl}\nreward: [{fn: exact_match}]\n"


def build(*overrides: str, **sections: Any) -> Config:
    return config_from_dict(LEAST | sections, overrides)


def problems(*overrides: str, **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(*overrides, **sections)
    return [str(problem) for problem in caught.value.problems]


def load_text(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def file_problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    return [str(problem) for problem in caught.value.problems]


# --- values


def test_a_file_with_overrides(tmp_path: Path) -> None:
    config = load_text(tmp_path, TEXT + "learn: {lr: 1e-5, steps: 7}\n", "learn.lr=1e-6", "learn.kl.coef=.5")
    assert (config.learn.lr, config.learn.steps, config.learn.kl.coef) == (1e-6, 7, 0.5)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", ".000001", "0.000_001", "+1e-06"])
def test_floats_need_no_point_or_sign(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, TEXT + f"learn: {{lr: {text}}}").learn.lr == 1e-6
    assert build(f"learn.lr={text}").learn.lr == 1e-6
    assert build(f"data.options.x={text}", data={"train": "task:t"}).data.options == {"x": 1e-6}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("010", "010"),
        ("1.2.3", "1.2.3"),
        ('"1e-6"', "1e-6"),
        ("None", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("10_000", 10_000),
        ("0x10", 16),
        ("-3", -3),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_plain_words_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    assert build(f"data.options.x={text}", data={"train": "task:t"}).data.options == {"x": value}


def test_off_is_a_word_where_it_is_a_choice(tmp_path: Path) -> None:
    assert load_text(tmp_path, TEXT + "learn: {importance: {level: off}}").learn.importance.level == "off"


def test_overrides_reach_every_kind_of_place() -> None:
    config = build(
        "reward.0.weight=2",
        "reward.1.fn=length",
        "reward.1.args.most=100",
        "run.rollout.kv_memory=2GiB",
        "data.train=task:arithmetic",
        "data.options.difficulty=3",
        "data.options.nested.deep=x",
        'learn.sampling.stop=["\\n"]',
        "learn.overlong.buffer=64",
        "learn.sampling={temperature: 0.5}",
        "learn.sampling.top_k=5",
    )
    assert [(part.fn, part.weight, part.args) for part in config.reward] == [
        ("exact_match", 2.0, {}),
        ("length", 1.0, {"most": 100}),
    ]
    assert config.run.rollout.kv_memory == 2 * 2**30
    assert config.data.options == {"difficulty": 3, "nested": {"deep": "x"}}
    assert config.learn.overlong
    assert config.learn.overlong.buffer == 64
    assert config.learn.sampling == Sampling(temperature=0.5, top_k=5)
    assert build('learn.sampling.stop=["\\n"]').learn.sampling.stop == ["\n"]


def test_a_later_override_wins() -> None:
    assert build("learn.steps=1", "learn.steps=2").learn.steps == 2


def test_overrides_alone_make_a_config() -> None:
    config = load_config(None, ["model.path=m", "data.train=a.jsonl", "reward.0.fn=math"])
    assert config.reward[0].fn == "math"


def test_the_file_lies_over_the_base(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT + "learn: {lr: 0.1}")
    config = load_config(path, base={"learn": {"lr": 0.5, "steps": 3}, "run": {"device": "cpu"}, "reward": [{}, {}]})
    assert (config.learn.lr, config.learn.steps, config.run.device, len(config.reward)) == (0.1, 3, "cpu", 1)


def test_python_values_are_taken_and_left_unchanged() -> None:
    data = LEAST | {"model": {"path": PurePosixPath("a/b")}, "learn": Learn(steps=3, reward_clip=(0, 1))}
    config = config_from_dict(data, ["learn.lr=1", "model.tokenizer=t"])
    assert (config.model.path, config.learn.steps, config.learn.reward_clip) == ("a/b", 3, (0.0, 1.0))
    assert data["model"] == {"path": PurePosixPath("a/b")}


def test_an_empty_section_is_the_default(tmp_path: Path) -> None:
    assert load_text(tmp_path, TEXT + "run:\nlearn:\n  kl:\n").run == build().run


def test_evaluation_stays_greedy_when_its_sampling_is_given_in_part() -> None:
    config = build("data.eval=b.jsonl", "eval.sampling.stop=[x]")
    assert config.eval.sampling == EvalSampling(stop=["x"])


def test_merge_keys_are_not_duplicates(tmp_path: Path) -> None:
    text = (
        TEXT + "learn: {sampling: &s {top_k: 5, stop: [x]}}\neval: {sampling: {<<: *s, temperature: 1.0, top_k: 6}}\n"
    )
    config = load_text(tmp_path, text.replace("train: a.jsonl", "train: a.jsonl, eval: b.jsonl"))
    assert config.eval.sampling == EvalSampling(temperature=1.0, top_k=6, stop=["x"])


def test_an_override_of_one_alias_leaves_the_other_alone(tmp_path: Path) -> None:
    text = (
        TEXT.replace("a.jsonl", "a.jsonl, eval: b.jsonl")
        + "learn: {sampling: &s {stop: [x], temperature: 1}}\neval: {sampling: *s}\n"
    )
    config = load_text(tmp_path, text, "eval.sampling.top_k=3")
    assert (config.learn.sampling.top_k, config.eval.sampling.top_k) == (0, 3)


# --- files that cannot be read


def test_a_missing_file_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(TEXT)
    with pytest.raises(ConfigError) as caught:
        load_config(Path("trian.yaml"))
    assert str(caught.value) == f"{tmp_path}/trian.yaml: there is no such file. Did you mean train.yaml?"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("model: {path: m\ndata: 3\n", "line 2, column 5", "YAML cannot be read"),
        ("model:\n\tpath: m\n", "line 2, column 1", "Indent with spaces, not tabs"),
        ("model: *nobody\n", "line 1, column 8", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1", "but found another document"),
        ("model: !!python/object:os.system {}\n", "line 1, column 8", "could not determine a constructor"),
        ("model: {[a]: 1}\n", "line 1, column 9", "unhashable key"),
        ("model: m\nx: \x07\n", "line 2, column 4", "cannot hold the character '\\x07'"),
    ],
)
def test_syntax_errors_say_where(tmp_path: Path, text: str, place: str, what: str) -> None:
    (problem,) = file_problems(tmp_path, text)
    assert problem.startswith(f"{tmp_path}/c.yaml, {place}: ")
    assert what in problem


def test_a_value_that_holds_itself(tmp_path: Path) -> None:
    (problem,) = file_problems(tmp_path, TEXT + "learn: &x {kl: *x}\n")
    assert "a value contains itself" in problem


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    (problem,) = file_problems(tmp_path, text)
    assert problem.startswith(f"{tmp_path}/c.yaml: is empty. Write at least model:")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "3"])
def test_a_file_without_sections(tmp_path: Path, text: str) -> None:
    (problem,) = file_problems(tmp_path, text)
    assert "instead of sections with keys. Write at least model:" in problem


def test_keys_written_twice_are_reported_with_their_lines(tmp_path: Path) -> None:
    found = file_problems(tmp_path, TEXT + "learn:\n  lr: 1\n  steps: 2\n  lr: 2\nrun: {}\nlearn: {}\n")
    assert found == [
        f"learn.lr: appears more than once in {tmp_path}/c.yaml: on line 5 and line 7. Keep one",
        f"learn: appears more than once in {tmp_path}/c.yaml: on line 4 and line 9. Keep one",
    ]


# --- unknown keys


def test_a_key_that_one_may_look_for_is_answered_by_name() -> None:
    (said,) = problems("learn.in_flight=true")
    assert "does not change weights within a completion" in said and "learn.staleness: 1" in said


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learn.temprature", "learn.sampling.temperature"),
        ("learn.temperature", "learn.sampling.temperature"),
        ("run.lr", "learn.lr"),
        ("lr", "learn.lr"),
        ("leran.lr", "learn.lr"),
        ("leran.lrr", "learn.lr"),
        ("sampling.top_p", "learn.sampling.top_p"),
        ("learn.samples-per-prompt", "learn.samples_per_prompt"),
        ("run.kv_memory", "run.rollout.kv_memory"),
        ("eval.sampling.temprature", "eval.sampling.temperature"),
        ("reward.0.wieght", "reward.0.weight"),
        ("data.option.size", "data.options.size"),
        ("timeout_s", "reward.0.timeout_s"),
        ("reward[0].weight", "reward.0.weight"),
    ],
)
def test_an_unknown_key_is_pointed_to_the_nearest(given: str, meant: str) -> None:
    assert problems(f"{given}=1") == [f"{given}: unknown key. Did you mean {meant}?"]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("learn.learning_rate", "Trimtab calls it learn.lr"),
        ("num_generations", "Trimtab calls it learn.samples_per_prompt"),
        ("learn.beta", "Trimtab calls it learn.kl.coef"),  # and not learn.optimizer.beta1
        ("run.gradient_checkpointing", "Trimtab chooses it; to fix it, write run.checkpoint_activations"),
    ],
)
def test_a_name_that_other_frameworks_have_is_told_what_it_is_here(given: str, fix: str) -> None:
    assert problems(f"{given}=1") == [f"{given}: unknown key. {fix}"]


def test_a_single_letter_is_like_no_other() -> None:
    (problem,) = problems(x={"path": "model"})
    assert problem.startswith("x: unknown key. The keys here are model, ")


def test_unknown_keys_of_a_file_read_the_same() -> None:
    assert problems(learn={"temprature": 1}, run={"lr": 1}, reward=[{"fn": "math", "wieght": 1}], optimiser={}) == [
        "optimiser: unknown key. Did you mean learn.optimizer?",
        "reward.0.wieght: unknown key. Did you mean reward.0.weight?",
        "learn.temprature: unknown key. Did you mean learn.sampling.temperature?",
        "run.lr: unknown key. Did you mean learn.lr?",
    ]


def test_a_dotted_key_in_a_file_is_told_how_to_nest() -> None:
    fix = "a file takes no dotted keys; they are for the command line. In a file write"
    assert problems(**{"learn.kl.coef": 1}) == [f"learn.kl.coef: {fix} learn: {{kl: {{coef: …}}}}"]
    assert problems(**{"learn.klx.coef": 1}) == ["learn.klx.coef: unknown key. Did you mean learn.kl.coef?"]


def test_a_key_like_nothing_lists_the_keys_of_its_section() -> None:
    assert problems("model.zzzzzzzz=1") == [
        "model.zzzzzzzz: unknown key. The keys here are path, tokenizer, dtype, base, kv_dtype, lora, trust_remote_code"
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learn.lr", "learn.lr: has no value. Write key=value, such as learn.lr=1e-6"),
        ("learn.lrr", "learn.lrr: unknown key. Did you mean learn.lr?"),
        ("learn.lr 1e-6", "learn.lr 1e-6: has no =. Write learn.lr=1e-6"),
        ("learn.lr: 1e-6", "learn.lr: 1e-6: has no =. Write learn.lr=1e-6"),
        ("1e-6", "1e-6: has no =. Write key=value, such as learn.lr=1e-6"),
        ("reward.-1.fn=x", "reward.-1.fn: reward is a list, and -1 is not an index into it. Write reward.0.fn"),
        (
            "data.suffix= hi",
            'data.suffix: YAML changes the text " hi". Quote it for YAML and for the shell: data.suffix=\'" hi"\'',
        ),
        (
            "data.suffix=a # b",
            'data.suffix: YAML changes the text "a # b". Quote it for YAML and for the shell: data.suffix=\'"a # b"\'',
        ),
        (
            "data.suffix=a: b",
            'data.suffix: YAML changes the text "a: b". Quote it for YAML and for the shell: data.suffix=\'"a: b"\'',
        ),
        ("=3", "=3: has no key. Write key=value, such as learn.lr=1e-6"),
        ("learn.lr.x=1", "learn.lr.x: learn.lr is not a section: it takes a number above 0. Write learn.lr=1e-6"),
        ("reward.fn=x", "reward.fn: reward is a list, and fn is not an index into it. Write reward.0.fn"),
        ("reward.5.fn=x", "reward.5.fn: the list has 1 item. To add one, write reward.1.fn"),
        (
            "learn.kl={coef: 1, coef: 2}",
            "learn.kl.coef: appears more than once in the override: on line 1. Keep one",
        ),
        (
            "learn.sampling.stop=[a",
            "learn.sampling.stop: \"[a\": YAML cannot be read: expected ',' or ']', but got '<stream end>'. "
            "Write a YAML value; quote text",
        ),
    ],
)
def test_overrides_that_cannot_be_applied(override: str, message: str) -> None:
    assert problems(override) == [message]


# --- wrong values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learn.lr=fast", 'got "fast", but it takes a number above 0. Leave it out to use the default, 1e-6'),
        ("learn.lr=0", "got 0, but it takes a number above 0. Leave it out to use the default, 1e-6"),
        ("learn.lr=.inf", "got inf, but it takes a number above 0. Leave it out to use the default, 1e-6"),
        ("learn.steps=2.5", "got 2.5, but it takes a whole number of at least 1. Leave it out to use the default, 100"),
        (
            "learn.steps=true",
            "got true, but it takes a whole number of at least 1. Leave it out to use the default, 100",
        ),
        ("learn.algorithm=gppo", "Did you mean grpo?"),
        ("learn.algorithm=DPO", "Train a reward model from the pairs (trimtab reward-model)"),
        ("learn.algorithm=reinforce++", "Did you mean reinforce_pp?"),
        ("model.dtype=fp16", "Did you mean float16?"),
        ("learn.max_grad_norm=0", "Write null to leave it unset"),
        ("learn.max_grad_norm=none", "Write null to leave it unset"),
        ("model=a/b", "trust_remote_code. Write {path: a/b}"),
        ("reward.0=math", "args. Write {fn: math}"),
        ("learn.schedule=cosine", "unit. Write {kind: cosine}"),
        ("learn.optimizer=adamw", "states. Leave it out to use the defaults"),
        ("learn.advantage=group", "Did you mean group_std?"),
        ("learn.kl.estimator=k4", 'got "k4", but it takes one of k1, k2, k3. Did you mean k1?'),
        ("run.device=gpu", 'got "gpu", but it takes one of auto, cpu, cuda. Did you mean cuda?'),
        ("run.token_budget=atuo", "a whole number of at least 1, or auto. Did you mean auto?"),
        ("run.rollout.kv_memory=2XB", 'got "2XB", but it takes a size such as 512MiB or 2GiB, or auto.'),
        ("data.suffix=12", 'got 12, but it takes text. Write it in quotes: data.suffix: "12"'),
        ("data.suffix=", 'got null, but it takes text. For empty text write ""'),
        ("learn.sampling.stop=ab", 'Write it as a list: ["ab"]'),
        ("learn.sampling.stop=[3]", "got [3], but it takes a list, each item text that is not empty."),
        ("learn.reward_clip=[0, true]", "got [0, true], but it takes a list of 2, each a number, or null."),
        ("learn.reward_clip=[0]", "got [0], but it takes a list of 2, each a number, or null."),
        (
            "learn.kl=3",
            "got 3, but it takes a section with the keys coef, estimator, where, corrected, target, horizon.",
        ),
        ("reward={fn: x}", 'but it takes a list of at least one section. Write a list: reward: [{fn: "rewards.py'),
        ("reward=[]", "got [], but it takes a list of at least one section."),
        ("reward.0=3", "got 3, but it takes a section with the keys fn, name, weight, normalize, timeout_s, args"),
        ("reward.0.normalize=groups", "but it takes one of none, group, step. Did you mean group?"),
        ("observe.kl_bands={a: 3}", "but it takes a mapping, each value a list of 2, each a number. Leave it out"),
        ("eval.sampling.temperature=-1", "a number of at least 0. Leave it out to use the default, 0.0"),
        ("data.options={1: 2}", 'has the key 1, but a key must be text. Write it in quotes: "1"'),
        ("learn.overlong.penalty=0.5", "is required but missing. Add it: The penalty grows linearly"),
    ],
)
def test_a_wrong_value_says_what_was_given_and_what_is_taken(override: str, message: str) -> None:
    (problem,) = problems(override)
    key = override.partition("=")[0].replace("overlong.penalty", "overlong.buffer")
    assert problem.startswith(f"{key}: ")
    assert message in problem
    assert "pydantic" not in problem


def test_objects_that_cannot_be_saved_are_refused() -> None:
    (problem,) = problems(data={"train": "task:t", "options": {"x": [object()]}})
    assert problem.startswith("data.options: holds a Python object, which YAML cannot store")


def test_nothing_given_names_every_required_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None)
    assert [problem.where for problem in caught.value.problems] == ["model.path", "data.train", "reward"]


def test_every_kind_of_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(
            {
                "data": {"train": "a.jsonl"},
                "reward": [{"fn": "math", "weight": "much"}],
                "learn": {"temprature": 1, "lr": -1, "kl": {"target": 0.1}},
                "run": {"device": "tpu"},
            },
            ["learn.stepz=3"],
        )
    assert [problem.where for problem in caught.value.problems] == [
        "learn.stepz",
        "learn.temprature",
        "model.path",
        "reward.0.weight",
        "learn.lr",
        "run.device",
        "learn.kl.target",
    ]
    assert str(caught.value).startswith("7 problems in the configuration:\n  learn.stepz: unknown key")


def test_a_wrong_value_raises_no_contradiction_of_its_own_making() -> None:
    """Each of these would contradict the default that stands in for the wrong key."""
    assert len(problems("learn.kl.coeff=0.1", "learn.kl.estimator=k2")) == 1
    assert len(problems("learn.kl.coef=lots", "learn.kl.estimator=k2")) == 1
    assert len(problems("data.train=3", "data.options.size=3")) == 1
    assert len(problems("learn.kl=3", "learn.kl.estimator=k2")) == 1
    assert len(problems("eval.part=e", "data.eval=b.csv", reward=[{"name": "exact"}])) == 1


@pytest.mark.parametrize(
    ("run", "engine"),
    [
        ({"rollout": {"tensor_parallel": 2}}, "vllm"),
        ({"rollout": {"tensor_parallel": 1}}, "auto"),
        ({"engine": "native", "rollout": {"tensor_parallel": 2}}, "native"),
        ({}, "auto"),
    ],
)
def test_a_model_in_parts_is_vllms_unless_said_otherwise(run: dict[str, Any], engine: str) -> None:
    assert Run.model_validate(run).engine == engine


OFFLINE = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}}


@pytest.mark.parametrize(("schema", "least"), [(Config, LEAST), (SftConfig, OFFLINE), (RewardModelConfig, OFFLINE)])
def test_a_seed_is_what_the_generators_take(schema: Any, least: dict[str, Any]) -> None:
    for seed in (0, 2**63, 2**64 - 1):
        assert load_as(schema, None, [f"learn.seed={seed}"], least).learn.seed == seed
    for seed in (-1, 2**64, "9" * 5000):
        with pytest.raises(ConfigError, match=r"learn\.seed: "):
            load_as(schema, None, [f"learn.seed={seed}"], least)


@pytest.mark.parametrize(("key", "most"), [("run.threads", 1024), ("run.reward_workers", 256)])
def test_threads_and_workers_are_bounded(key: str, most: int) -> None:
    assert build(f"{key}={most}")
    (problem,) = problems(f"{key}={most + 1}")
    assert f"it takes a whole number of at least 1 and at most {most}, or auto" in problem


@pytest.mark.parametrize("stage", ["rl", "dpo", "train", "null", ""])
def test_stage_is_a_key_of_other_commands_and_its_value_is_wrong(tmp_path: Path, stage: str) -> None:
    said = "it takes sft or reward-model. Leave it out to use trimtab train"
    (problem,) = problems(f"stage={stage}")
    assert problem.startswith("stage: got ") and problem.endswith(said)
    (problem,) = file_problems(tmp_path, TEXT + f"stage: {stage}\n")
    assert problem.startswith("stage: got ") and problem.endswith(said)


def test_a_stage_of_another_command_is_named_wherever_it_is_written(tmp_path: Path) -> None:
    assert problems("stage=sft") == ["stage: this config is for trimtab sft. Run trimtab sft"]
    assert file_problems(tmp_path, TEXT + "stage: sft\n") == problems("stage=sft")
    with pytest.raises(ConfigError, match="Run trimtab reward-model"):
        load_as(SftConfig, None, ["stage=reward-model"], OFFLINE)
    with pytest.raises(ConfigError, match=r'stage: got "dpo", but it takes sft\. Leave it out to use the default, sft'):
        load_as(SftConfig, None, ["stage=dpo"], OFFLINE)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("model.lora=16", "Write {r: 16}"),
        ("model.lora=true", "Write {} to use its defaults, or leave the key out to switch it off"),
        ("model.lora=false", "Leave the key out to switch it off"),
        ("learn.overlong=10", "Write {buffer: 10}"),
        ("learn.overlong=true", "Write {buffer: …}"),
        ("environment=tools.py:World", "Write {fn: 'tools.py:World'}"),
    ],
)
def test_a_section_that_is_off_unless_given_is_shown_as_it_is_written(override: str, fix: str) -> None:
    (problem,) = problems(override)
    assert problem.endswith(f". {fix}")


@pytest.mark.parametrize("name", ["gpg", "remax", "zzzz"])
def test_a_value_that_is_near_to_none_is_not_taken_for_one(name: str) -> None:
    (problem,) = problems(f"learn.algorithm={name}")
    assert "Did you mean" not in problem and "takes one of grpo" in problem
