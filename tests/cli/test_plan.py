"""`trimtab plan` from a config alone: what it prints, what it returns, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from bisect import bisect_left
from pathlib import Path

import pytest
import yaml
from transformers import BloomConfig, MambaConfig, PreTrainedConfig
from typer.testing import CliRunner

from trimtab.cli import app

CONFIG = {
    "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
    "data": {"train": "task:arithmetic", "max_prompt_tokens": 256},
    "reward": [{"fn": "task"}],
    "learn": {"prompts_per_step": 32, "samples_per_prompt": 16, "max_new_tokens": 512},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    return file


def plan(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def write_shape(folder: Path) -> None:
    shape = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))


def test_a_reward_model_is_looked_for_in_the_configs_folder_as_training_does(config: Path) -> None:
    write_shape(config.parent / "rm")
    code, out, shown = plan(config, "reward=[{fn: 'model:rm'}]", "--device", "h200", "--json")
    assert code == 0, shown
    assert json.loads(out.splitlines()[-1])["fits"]


def test_evaluation_is_planned_for_as_it_will_run(config: Path) -> None:
    """More sequences at once than a training step has, or longer ones, take more KV cache; what training refuses is refused."""

    def kv(*overrides: str) -> int:
        code, out, shown = plan(config, "data.eval=task:arithmetic", *overrides, "--device", "h200", "--json")
        assert code == 0, shown
        choices = {choice["key"]: choice["value"] for choice in json.loads(out.splitlines()[-1])["choices"]}
        return choices["run.rollout.kv_memory"]

    small = kv("eval.limit=512")
    assert kv("eval.limit=1024") == pytest.approx(2 * small, rel=0.2)
    assert kv("eval.limit=512", "eval.max_new_tokens=1024") > 1.3 * small
    assert kv("eval.limit=512", "learn.sampling.stop=[x]") == small
    write_shape(config.parent / "short")
    short = (f"model.path={config.parent / 'short'}", "data.max_prompt_tokens=16", "learn.max_new_tokens=64")
    code, _, shown = plan(config, *short, "data.eval=task:arithmetic", "eval.max_new_tokens=512", "--device", "h200")
    assert code == 2
    assert "eval.max_new_tokens: 512 leaves no room for a prompt in the model's context of 512 tokens" in shown


def test_it_answers_as_the_design_says(config: Path) -> None:
    code, out, shown = plan(config, "--device", "h200", "--json")
    found = json.loads(out.splitlines()[-1])
    assert (
        code == 0
        and found["fits"]
        and found["parameters"] == 494_032_768
        and found["kv_bytes_per_token"] == 24 * 2 * 2 * 64 * 2
    )
    assert {phase["name"] for phase in found["phases"]} >= {
        "load",
        "rollout",
        "update",
        "optimizer",
        "checkpoint",
        "export",
    }
    update = next(phase for phase in found["phases"] if phase["name"] == "update")
    assert (
        update["device_bytes"] == sum(update["components"].values())
        and update["components"]["weights"] == 2 * 494_032_768
    )
    assert found["step_seconds"]["total"] == pytest.approx(
        sum(found["step_seconds"][k] for k in ("rollout", "score", "update", "publish")), abs=1e-5
    )
    assert {choice["key"] for choice in found["choices"]} >= {"run.token_budget", "run.rollout.kv_memory"}
    assert "a step takes about" in shown and "update" in shown


def test_devices_of_a_machine_are_planned_for(config: Path) -> None:
    large = ("model.path=Qwen/Qwen2.5-7B", "learn.prompts_per_step=128", "--host-memory", "1500GiB")
    code, out, shown = plan(config, *large, "--device", "h200", "--devices", "8", "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["devices"] == 8 and found["shard"] == "optimizer" and found["shard_devices"] == 8
    assert found["step_seconds"]["communication"] > 0 and "each rank" in shown and "communication" in shown
    assert {choice["key"] for choice in found["choices"]} >= {"run.devices", "run.shard", "run.shard_devices"}
    code, out, _ = plan(config, "--device", "h200", "run.devices=2", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["devices"] == 2, "as many as the run asks for"


def test_devices_that_are_not_there_are_refused(config: Path) -> None:
    assert (
        "is 4, but the planned machine has 2 GPUs"
        in plan(config, "--device", "h200", "--devices", "2", "run.devices=4")[2]
    )
    assert "no effect on one device" in plan(config, "--device", "h200", "run.shard=optimizer")[2]
    _, out, _ = plan(config, "--device", "cpu", "run.devices=2", "run.memory=64GiB", "--json")
    assert json.loads(out.splitlines()[-1])["devices"] == 2


def test_overrides_and_profiles_change_it(config: Path) -> None:
    def update_bytes(*more: str) -> int:
        found = json.loads(plan(config, *more, "--device", "rtx4090", "--json")[1].splitlines()[-1])
        return next(p["device_bytes"] for p in found["phases"] if p["name"] == "update")

    assert update_bytes("run.token_budget=4096") < update_bytes() < update_bytes("--profile", "max")
    assert update_bytes("--profile", "safe") < update_bytes()


def test_what_does_not_fit_says_what_would_and_exits_with_1(config: Path) -> None:
    code, out, _ = plan(config, "model.path=Qwen/Qwen2.5-7B", "--device-memory", "24GiB")
    assert code == 1 and "does not fit" in out and "model.lora" in out
    code, out, _ = plan(config, "model.path=Qwen/Qwen2.5-7B", "--device-memory", "24GiB", "--json")
    assert code == 1 and json.loads(out.splitlines()[-1])["fits"] is False


def test_a_refused_plan_contradicts_nothing(config: Path) -> None:
    """No time of a step that cannot run, no reason of a plan that fits; one limit, with what it is a share of."""
    code, out, _ = plan(config, "model.path=Qwen/Qwen2.5-7B", "--device-memory", "24GiB")
    words = " ".join(out.replace("│", " ").split())
    assert code == 1 and "a step takes" not in words
    assert "all activations fit" not in words and "fits on the device" not in words and "they fit" not in words
    assert (
        "even with these minimum memory settings" in words
        and "run.checkpoint_activations True takes the least memory" in words
    )
    assert (
        words.count("96 % of 24.0 GiB, which is run.memory; run.profile max") == 2
    )  # beside the plan and in the refusal
    code, out, _ = plan(config, "model.path=Qwen/Qwen2.5-7B", "--device-memory", "24GiB", "--json")
    found = json.loads(out.splitlines()[-1])
    assert found["step_seconds"] is None and found["start_seconds"] is None and found["binding_phase"] == "optimizer"
    code, out, _ = plan(config, "model.path=Qwen/Qwen2.5-7B", "--device-memory", "24GiB", "--compare", config)
    assert code == 1 and next(line for line in out.splitlines() if "seconds per step" in line).split()[3] == "-"


def test_the_phase_that_decides_has_a_column(config: Path) -> None:
    """Whichever it is: what takes the most memory is shown."""
    changes = ["model.path=meta-llama/Llama-3.1-70B", "learn.kl.coef=0.01", "learn.max_new_tokens=1024"]
    changes += ["learn.prompts_per_step=128", "run.placement=colocated"]
    code, out, _ = plan(config, *changes, "--device", "a100-80", "--devices", "48", "--host-memory", "512GiB")
    header = next(line for line in out.splitlines() if line.strip("│ ").startswith("GiB"))
    decides = re.search(r"memory bottleneck: .*? in (\w+)", " ".join(out.split()))
    assert code == 0 and decides is not None
    assert decides[1] in header and "update" in header


def test_memory_is_limited_by_a_key_or_by_the_option_alike(config: Path) -> None:
    by_key, by_option = (
        json.loads(plan(config, "--device", "h200", "--json", *more)[1].splitlines()[-1])
        for more in (["run.memory=20GiB"], ["--device-memory", "20GiB"])
    )
    assert by_key == by_option and by_key["device_memory"] == 20 * 2**30
    code, _, error = plan(config, "--device", "h200", "run.memory=lots")
    assert code == 2 and "takes a size such as" in error


def test_two_configs_are_compared(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "longer.yaml"
    other.write_text(yaml.safe_dump(CONFIG | {"learn": CONFIG["learn"] | {"max_new_tokens": 4096}}))
    code, out, _ = plan(config, "--compare", other, "--device", "h100")
    assert code == 0 and "longer.yaml" in out and "seconds per step" in out
    found = json.loads(plan(config, "--compare", other, "--device", "h100", "--json")[1].splitlines()[-1])
    assert len(found["plans"]) == 2


def test_a_folder_with_a_config_is_enough(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    shape = sizes | {"model_type": "llama", "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(shape))
    assert plan(config, f"model.path={folder}", "--device", "t4")[0] == 0
    for broken in (
        "{",
        "[]",
        json.dumps(shape | {"num_attention_heads": 0}),
        json.dumps(shape | {"hidden_size": "512"}),
    ):
        (folder / "config.json").write_text(broken)
        code, _, error = plan(config, f"model.path={folder}", "--device", "t4")
        assert code == 2 and "config" in error
    (folder / "config.json").unlink()
    code, _, error = plan(config, f"model.path={folder}", "--device", "t4")
    assert code == 2 and "has no config.json" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h2000"], "Did you mean h200"),
        (["--device-memory", "lots"], "is not a size"),
        (["--device-memory", "40"], "Write it with a unit"),
        (["--device", "h200", "--profile", "wild"], "Write one of safe, balanced, max"),
        (["--device", "cpu", "--devices", "2"], "a CPU counts as one device"),
        (["learn.max_new_tokns=4", "--device", "h200"], "max_new_tokens"),
        (["run.rollout.kv_memory=1KiB", "--device", "h200"], "cannot hold one sequence"),
    ],
)
def test_bad_input_is_told(config: Path, arguments: list[str], message: str) -> None:
    code, _, error = plan(config, *arguments)
    assert code == 2 and message in error


def test_adapters_are_counted_by_their_targets(config: Path) -> None:
    def trained(*more: str) -> int:
        return json.loads(plan(config, "model.lora.r=8", *more, "--device", "h200", "--json")[1].splitlines()[-1])[
            "trained_parameters"
        ]

    assert trained("model.lora.targets=[q_proj]") == 24 * 8 * (896 + 896) < trained()


def test_what_fits_only_with_more_of_the_memory_is_planned_as_train_would(config: Path) -> None:
    def fits(gib: float, *more: str) -> int:
        return plan(config, "model.path=Qwen/Qwen2.5-1.5B", "--device-memory", f"{gib}GiB", *more)[0]

    tight = bisect_left(range(80), True, lo=20, key=lambda quarters: fits(quarters / 4) == 0) / 4
    assert fits(tight) == 0 and fits(tight, "--profile", "safe") == 1


def test_a_cpu_is_planned_for(config: Path) -> None:
    code, out, _ = plan(config, "model.path=HuggingFaceTB/SmolLM2-135M", "--device", "cpu", "--host-memory", "64GiB")
    assert code == 0 and "CPU" in out


def test_completions_can_be_taken_to_be_those_of_a_run(config: Path, tmp_path: Path) -> None:
    """Time is predicted for them; memory stays that of the longest."""
    run = tmp_path / "earlier"
    run.mkdir()
    row = {"response/length_p50": 60.0, "response/length_p90": 200.0, "response/length_max": 512.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": i}) + "\n" for i in range(3)) + '{"torn')
    longest, seen = (
        json.loads(plan(config, "--device", "h200", "--json", *more)[1].splitlines()[-1])
        for more in ([], ["--like", run])
    )
    assert seen["step_seconds"]["rollout"] < 0.9 * longest["step_seconds"]["rollout"]
    assert seen["step_seconds"]["update"] < 0.5 * longest["step_seconds"]["update"]
    assert [p["device_bytes"] for p in seen["phases"]] == [p["device_bytes"] for p in longest["phases"]]
    assert any("on average" in note for note in seen["notes"])
    (run / "metrics.jsonl").write_text("{}\n")
    code, _, error = plan(config, "--device", "h200", "--like", run)
    assert code == 2 and "no step of " in error
    code, _, error = plan(config, "--device", "h200", "--like", tmp_path / "nowhere")
    assert code == 2 and "has no metrics.jsonl" in error


def test_no_torch_is_needed_for_a_known_architecture(config: Path) -> None:
    """Which is why it answers at once: torch alone takes longer to import."""
    code = (
        "import sys; from pathlib import Path; from trimtab.run.plan_command import PlanOptions, look; "
        f"print(look(Path({str(config)!r}), ['model.path=meta-llama/Llama-3.1-70B'], PlanOptions('h100', 1024)).plan.fits); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["run.engine=vllm", "run.rollout.tensor_parallel=3"], "vLLM cannot split"),
        (["run.engine=vllm", "model.dtype=float32", "model.lora={r: 8}"], "adapters only in half precision"),
        (["run.engine=sglang", "model.dtype=float64"], "cannot compute in float64"),
    ],
)
def test_what_an_engine_cannot_do_is_told_by_the_plan(config: Path, changes: list[str], words: str) -> None:
    code, _, shown = plan(config, *changes, "--device", "h200")
    assert code == 2 and words in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["model.lora={targets: [nope]}", "--device", "h200"],
            "model.lora.targets: Qwen/Qwen2.5-0.5B-Instruct has no linear layer nope",
        ),
        (["run.kernels=liger", "--device", "cpu"], "run.kernels: liger kernels need a GPU, and the plan is for a CPU"),
    ],
)
def test_what_training_refuses_is_not_planned(config: Path, arguments: list[str], words: str) -> None:
    code, _, shown = plan(config, *arguments)
    assert code == 2 and words in " ".join(shown.split())


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=99),
            "does not use transformers' attention interface",
        ),
        (
            MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=99),
            "has layers that carry a state from token to token, of a kind that was not compared (mamba)",
        ),
    ],
    ids=["bloom", "mamba"],
)
def test_an_architecture_that_cannot_be_packed_is_refused(
    config: Path, tmp_path: Path, made: PreTrainedConfig, words: str
) -> None:
    made.save_pretrained(tmp_path / "other")
    code, _, shown = plan(config, f"model.path={tmp_path / 'other'}", "--device", "h200")
    assert code == 2 and words in " ".join(shown.split())


def test_sglang_is_not_planned_for_a_cpu(config: Path) -> None:
    code, _, shown = plan(config, "run.engine=sglang", "--device", "cpu")
    assert code == 2 and "SGLang needs a GPU" in shown


def test_a_copy_in_parts_is_noted(config: Path) -> None:
    code, out, shown = plan(config, "run.rollout.tensor_parallel=2", "--device", "h200")
    assert code == 0 and "vLLM splits its copy of the model over 2 devices" in " ".join((out + shown).split())
