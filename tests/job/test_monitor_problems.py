"""The monitor blocks of the JSON, checked before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.base.json_reader import Document
from pipeline.base.problems import Problem
from pipeline.job.deepspeed_dict import resolved_monitors
from pipeline.job.facts import Facts, Settings
from pipeline.job.options import Options
from pipeline.job.schema import MONITORS
from pipeline.job.training_rules import monitors
from tests.job.drafts import draft


def settings(config: dict) -> Settings:
    return Settings(Document("f.json", config, {"wandb.enabled": 7}))


def monitor_problems(config: dict) -> list[Problem]:
    return list(monitors(Facts(Options(), settings(config), None, None)))


@pytest.mark.parametrize(("key", "module"), [(k, m) for k, m in MONITORS.items() if m is not None])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, key, module):
    monkeypatch.setattr("pipeline.job.training_rules.find_spec", lambda name: None)
    (problem,) = monitor_problems({key: {"enabled": True}})
    place = "f.json:7" if key == "wandb" else "f.json"
    assert (problem.key, problem.value, problem.severity) == (f"{key}.enabled ({place})", True, "error")
    assert module in problem.rule
    assert f"pip install {module}" in problem.remedy


def test_all_missing_packages_are_reported_together(monkeypatch):
    monkeypatch.setattr("pipeline.job.training_rules.find_spec", lambda name: None)
    problems = monitor_problems({key: {"enabled": True} for key in MONITORS})
    keys = [problem.key.partition(" ")[0] for problem in problems]
    assert keys == ["tensorboard.enabled", "wandb.enabled", "comet.enabled"]


@pytest.mark.parametrize(
    ("block", "installed", "writes", "said"),
    [
        ({}, True, True, "{folder} (the package is installed)"),
        ({}, False, False, "off (the package is not installed)"),
        ({"tensorboard": {"enabled": False}}, True, False, None),
        ({"tensorboard": {}}, True, False, None),
        ({"tensorboard": {"enabled": True}}, True, True, None),
    ],
)
def test_tensorboard_is_written_unless_the_json_says_no(
    block, installed, writes, said, tmp_path, monkeypatch
):
    monkeypatch.setattr("pipeline.job.resolve.is_installed", lambda name: installed)
    found = draft(tmp_path, block)
    assert found.job is not None, found.problems
    folder = str(tmp_path / "run" / "tensorboard")
    assert found.job.monitors.get("tensorboard", {}).get("output_path") == (folder if writes else None)
    notes = [str(note) for note in found.job.resolved if note.key == "tensorboard"]
    assert notes == ([] if said is None else [f"tensorboard = {said.format(folder=folder)}"])


def test_a_folder_of_an_earlier_run_is_not_the_package(tmp_path, monkeypatch):
    """Weights & Biases leaves a folder `wandb` where the job was started."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (problem,) = monitor_problems({"wandb": {"enabled": True}})
    assert "not installed" in problem.rule


@pytest.mark.parametrize("block", [{"enabled": False}, {}, None, "yes", {"enabled": "yes"}])
def test_what_is_off_or_no_block_is_left_alone(monkeypatch, block):
    monkeypatch.setattr("pipeline.job.training_rules.find_spec", lambda name: None)
    assert monitor_problems({"wandb": block, "train_batch_size": 8}) == []


def test_an_output_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "notes").write_text("")
    path = str(tmp_path / "notes" / "csv")
    (problem,) = monitor_problems({"csv_monitor": {"enabled": True, "output_path": path}})
    assert (problem.key, problem.value) == ("csv_monitor.output_path (f.json)", path)
    assert str(tmp_path / "notes") in problem.rule
    assert monitor_problems({"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "new")}}) == []


def test_the_record_of_another_run_is_left_alone(tmp_path):
    (tmp_path / "logs/job").mkdir(parents=True)
    (tmp_path / "logs/job/train_loss.csv").write_text("step,loss\n1,4.0\n")
    block = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "job"}
    options = Options(output_dir=str(tmp_path / "run"))
    facts = Facts(options, settings({"csv_monitor": block}), None, SimpleNamespace(name="tiny"))
    (problem,) = monitors(facts)
    assert (problem.key, problem.value) == ("csv_monitor.job_name (f.json)", "job")
    assert "another run" in problem.rule
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    assert list(monitors(facts)) == [], "the run goes on with its own record"


def test_files_go_under_the_run_unless_the_json_says_where():
    config = {
        "tensorboard": {"enabled": True, "job_name": "a"},
        "csv_monitor": {"enabled": True, "output_path": "elsewhere"},
        "wandb": {"enabled": False},
    }
    assert resolved_monitors(settings(config), "runs/tiny") == {
        "tensorboard": {"enabled": True, "job_name": "a", "output_path": "runs/tiny/tensorboard"},
        "csv_monitor": {"enabled": True, "output_path": "elsewhere"},
    }
    assert "output_path" not in config["tensorboard"], "the user's JSON was changed"


def test_no_heavy_module_is_imported():
    code = (
        "import sys; from tests.job.test_monitor_problems import MONITORS, monitor_problems;"
        "monitor_problems({key: {'enabled': True} for key in MONITORS});"
        "print([m for m in ('torch', 'tensorboard', 'deepspeed') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
