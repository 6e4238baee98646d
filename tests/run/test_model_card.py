"""The card of an exported model, and its upload: what it says is the run's, and no failure of the net loses the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny import tiny_model
from typer.testing import CliRunner

from tests.observe.planted import plant
from trimtab.base.errors import ConfigError
from trimtab.cli import app
from trimtab.config.learn import Learn
from trimtab.model.weights import WeightStore
from trimtab.observe.model_card import card_text, write_card
from trimtab.record.checkpoint import RunState
from trimtab.record.reader import open_run
from trimtab.record.saving import save_checkpoint
from trimtab.run import hub
from trimtab.run.export_command import export_with_card
from trimtab.update.optimizer import MasterAdamW


class FakeHub:
    """Remembers what it is asked to do."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._error = error

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> Any:
        assert exist_ok
        self.calls.append(("create", (name, private)))
        return SimpleNamespace(repo_id=f"me/{name.rpartition('/')[2]}")

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self._error is not None:
            raise self._error
        self.calls.append(("upload", (repo_id, {path.name for path in Path(folder_path).iterdir()})))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A planted run that has a checkpoint with weights."""
    folder = plant(tmp_path_factory.mktemp("card") / "run", "healthy")
    model = tiny_model()
    optimizer = MasterAdamW(WeightStore(model.named_parameters()), Learn())
    save_checkpoint(folder, RunState(step=151, best_step=151), model, tokenizer, optimizer, 9)
    return folder


def test_a_card_says_what_was_trained_how_and_what_came_of_it(run: Path, tmp_path: Path) -> None:
    done = export_with_card(run, tmp_path / "out", "last", "same", True, None)
    assert done.card == tmp_path / "out/README.md" and done.checkpoint.name == "step-151"
    text = done.card.read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["tags"] == ["trimtab", "reinforcement-learning", "grpo"]
    for words in ("after 151 steps of reinforcement learning (grpo)", "| held-out pass@1 | 36.0% | 8",
                  "![learning curve](curve.png)",
                  'AutoModelForCausalLM.from_pretrained("out")', "| task | `gsm8k.jsonl` |", "| reward | `math` |",
                  "| `learn.samples_per_prompt` | `8` |", "on 1 × NVIDIA H200."):  # fmt: skip
        assert words in body, words
    assert str(tmp_path) not in text and "planted-host" not in text
    assert (tmp_path / "out/curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_without_being_asked_for_there_is_no_card(run: Path, tmp_path: Path) -> None:
    assert export_with_card(run, tmp_path / "out", "last", "same", False, None).card is None
    assert not (tmp_path / "out/README.md").exists()


def test_of_an_earlier_checkpoint_later_steps_do_not_count(run: Path) -> None:
    text = card_text(open_run(run), 100, "me/model")
    assert "after 100 steps" in text and "| held-out pass@1 | 36.0% | 77.1%" in text and "![" not in text


@pytest.mark.parametrize("name", ["sft", "no_evaluation", "hostile", "old_version", "one_step"])
def test_every_run_has_a_card(name: str, tmp_path: Path) -> None:
    run = plant(tmp_path / "run", name)
    (tmp_path / "out").mkdir()
    text = write_card(run, tmp_path / "out", 1000, "me/model").read_text()
    assert yaml.safe_load(text.split("---\n", 2)[1])["library_name"] == "transformers"
    assert "<script" not in text and "<img" not in text and "\x1b" not in text
    assert ("There was no held-out evaluation" in text) == (name == "no_evaluation")
    assert ("supervised fine-tuning" in text) == (name == "sft")


def test_a_base_model_of_the_hub_is_named_and_a_folder_is_not(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "healthy")
    for path, named in (("Qwen/Qwen3-0.6B", True), ("/home/me/secret/model", False)):
        settings = yaml.safe_load((run / "config.yaml").read_text())
        settings["model"]["path"] = path
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
        text = card_text(open_run(run), 1, "m")
        assert ("base_model" in text) == named and "secret" not in text


def test_what_is_uploaded_is_the_folder_with_its_card(run: Path, tmp_path: Path) -> None:
    done = export_with_card(run, None, "last", "same", False, "me/model")
    assert done.folder == run / "export/step-151"
    api = FakeHub()
    assert hub.upload(done.folder, "me/model", api=api) == "https://huggingface.co/me/model"
    create, (what, (name, files)) = api.calls
    assert create == ("create", ("me/model", True)) and (what, name) == ("upload", "me/model")
    assert {"README.md", "curve.png", "model.safetensors", "config.json"} <= files
    again = export_with_card(run, None, "last", "same", False, "me/model")  # an upload that failed is tried again
    assert again == done
    hub.upload(done.folder, "model", public=True, api=api)
    assert ("create", ("model", False)) in api.calls


@pytest.mark.parametrize("name", ["a b", "a/b/c", "", "-x", "a" * 200])
def test_a_name_that_the_hub_cannot_have_is_refused_first(run: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--to-hub: .* is no name of a model"):
        export_with_card(run, tmp_path / "out", "last", "same", False, name)
    assert not (tmp_path / "out").exists()


def test_without_a_token_the_model_and_its_card_are_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(run), str(out), "--to-hub", "me/model"])
    assert done.exit_code == 2 and (out / "README.md").is_file() and (out / "model.safetensors").is_file()
    told = " ".join(done.output.split())
    assert "--to-hub: there is no Hugging Face token on this machine. Run `hf auth login`, or set HF_TOKEN." in told
    assert "hf upload me/model" in told


def test_without_a_network_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, and an address at which nobody listens."""
    from huggingface_hub import HfApi

    with pytest.raises(
        ConfigError, match=r"--to-hub: the Hub cannot be reached \(.*\)\. The model and its card are in"
    ):
        hub.upload(tmp_path, "me/model", api=HfApi(endpoint="http://127.0.0.1:9", token="none"))


def test_errors_that_are_not_of_the_network_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        hub.upload(tmp_path, "me/model", api=FakeHub(ZeroDivisionError()))
    with pytest.raises(ConfigError, match="cannot be reached"):
        hub.upload(tmp_path, "me/model", api=FakeHub(ConnectionError("refused")))


def test_options_without_an_effect_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--public: has no effect without --to-hub"):
        export_with_card(run, tmp_path / "out", "last", "same", True, None, public=True)
    with pytest.raises(ConfigError, match="FOLDER: is missing"):
        export_with_card(run, None, "last", "same", True, None)
