"""How ranks leave a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline import pretrain
from tests.harness import run_ranks

OPTIONS = ("--model", "tiny", "--seq_length", "16", "--train_steps", "1", "--sample_tokens", "0")


@pytest.mark.slow
def test_no_rank_leaves_before_the_outcome_is_written(tmp_path: Path):
    """The exit code 3 of the first to leave makes launchers end the others at once."""
    (tmp_path / "text.txt").write_text("what is read, and read again. " * 100, encoding="utf-8")
    (tmp_path / "more.txt").write_text("what is held out of the reading. " * 10, encoding="utf-8")
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 4, "gradient_clipping": 1.0}', encoding="utf-8")
    output = tmp_path / "run"
    arguments = [*OPTIONS, "--data", str(tmp_path), "--deepspeed_config", str(config)]
    arguments += ["--output_dir", str(output)]
    assert run_ranks(outcome_is_there_when_leaving, 2, arguments, output) == [True, True]


def outcome_is_there_when_leaving(arguments: list[str], output: Path) -> bool:
    write_outcome = pretrain.write_outcome

    def slow(*args: object) -> None:
        time.sleep(1.0)
        write_outcome(*args)

    pretrain.write_outcome = slow
    assert pretrain.main(arguments) == 0
    return (output / "outcome.json").exists()
