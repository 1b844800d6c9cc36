"""The set-up runs once, again when its sources have changed, and survives interruption and company."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.launch import install
from pipeline.launch.install import Setup, SetupError, explain_failure, phase_of

ROOT = Path(__file__).resolve().parents[2]


class FakeSetup(Setup):
    """A set-up that links this Python instead of installing; counts how often, and can fail or take time."""

    def __init__(
        self,
        root: Path,
        error: BaseException | None = None,
        seconds: float = 0.0,
        for_tests: bool = False,
    ) -> None:
        super().__init__(root, for_tests)
        self.installs = 0
        self.error, self.seconds = error, seconds

    def _install(self) -> None:
        self.installs += 1
        time.sleep(self.seconds)
        if self.error is not None:
            (self.venv / "half_a_package").mkdir()
            raise self.error


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")

    def create(folder: Path, **_options: bool) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(install.venv, "create", create)
    return tmp_path


def test_a_second_start_installs_nothing(root: Path) -> None:
    for expected in (1, 0, 0):
        setup = FakeSetup(root)
        setup.ensure()
        assert setup.installs == expected
        assert setup.is_ready()


def test_a_link_to_another_environment_is_refused_and_nothing_is_lost(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Another clone's, or one that was never a project's."""
    other = tmp_path_factory.mktemp("other")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(root / name, other)
    FakeSetup(other).ensure()
    plain = tmp_path_factory.mktemp("plain")
    (plain / "precious").touch()
    for target, said in ((other / ".venv", f"but of {other}"), (plain, "not an environment of this project")):
        before = sorted(target.rglob("*"))
        (root / ".venv").symlink_to(target)
        setup = FakeSetup(root)
        with pytest.raises(SetupError, match=said):
            setup.ensure()
        assert setup.installs == 0 and sorted(target.rglob("*")) == before
        (root / ".venv").unlink()
    assert FakeSetup(other).is_ready()


def test_a_link_to_a_folder_of_its_own_works(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a larger disk, say."""
    disk = tmp_path_factory.mktemp("disk")
    (root / ".venv").symlink_to(disk / "missing")
    with pytest.raises(SetupError, match="which is no folder"):
        FakeSetup(root).ensure()
    (disk / "missing").mkdir()
    for specification, expected in (("a", 1), ("a", 0), ("b", 1)):
        (root / "constraints.txt").write_text(specification)
        setup = FakeSetup(root)
        setup.ensure()
        assert setup.installs == expected and setup.is_ready() and setup.venv.is_symlink()


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_a_changed_specification_is_installed_from_nothing(root: Path, name: str) -> None:
    FakeSetup(root).ensure()
    (root / ".venv" / "old_package").mkdir()
    (root / name).write_text("changed\n")
    setup = FakeSetup(root)
    assert not setup.is_ready()
    setup.ensure()
    assert setup.installs == 1
    assert not (root / ".venv" / "old_package").exists()


def test_a_moved_project_is_set_up_again(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    FakeSetup(root).ensure()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "project"
    shutil.copytree(root, elsewhere, symlinks=True)
    assert not FakeSetup(elsewhere).is_ready()


def test_another_python_or_a_vanished_one_is_set_up_again(root: Path) -> None:
    setup = FakeSetup(root)
    setup.ensure()
    assert setup.stamp("3.9") != setup.stamp("3.10")
    setup.python.unlink()
    setup.python.symlink_to(root / "gone")
    assert not setup.is_ready()


@pytest.mark.parametrize("error", [SetupError("no network"), KeyboardInterrupt()])
def test_an_interrupted_set_up_is_done_again_from_nothing(root: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        FakeSetup(root, error).ensure()
    assert not FakeSetup(root).is_ready()
    setup = FakeSetup(root)
    setup.ensure()
    assert setup.installs == 1
    assert not (root / ".venv" / "half_a_package").exists()


def test_two_starts_at_once_install_once(root: Path, capsys: pytest.CaptureFixture) -> None:
    setups = [FakeSetup(root, seconds=0.5) for _ in range(3)]
    threads = [threading.Thread(target=setup.ensure) for setup in setups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(setup.installs for setup in setups) == 1
    assert all(setup.is_ready() for setup in setups)
    assert "waiting for it" in capsys.readouterr().err


def test_an_environment_of_somebody_else_is_left_alone(root: Path) -> None:
    (root / ".venv" / "bin").mkdir(parents=True)
    with pytest.raises(SetupError, match=r"not made by launch\.sh"):
        FakeSetup(root).ensure()
    assert (root / ".venv" / "bin").is_dir()


def test_tools_for_tests_are_added_and_kept(root: Path) -> None:
    def setup(for_tests: bool) -> tuple[int, bool]:
        made = FakeSetup(root, for_tests=for_tests)
        made.ensure()
        return made.installs, (root / ".venv" / "trained_with").exists()

    assert setup(False) == (1, False)
    (root / ".venv" / "trained_with").touch()
    assert [setup(True), setup(True), setup(False)] == [(1, True), (0, True), (0, True)]
    with pytest.raises(KeyboardInterrupt):
        (root / "constraints.txt").write_text("changed")
        FakeSetup(root, KeyboardInterrupt()).ensure()
    assert [setup(False), setup(True)] == [(1, False), (0, False)]
    assert (root / ".venv" / ".setup" / "tests").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_another_user_of_one_clone_is_told_a_way_that_works(mode: int, tmp_path: Path) -> None:
    """He may use an environment that is ready; who may not write one that is not makes a copy of his own."""
    python = next((each for each in OTHERS_PYTHONS if as_another(each, "-V").returncode == 0), None)
    if python is None:
        pytest.skip("no Python of this machine can be started by another user")
    with TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        root, home = Path(folder) / "a clone", Path(folder) / "home"
        root.mkdir()
        home.mkdir()
        os.chown(home, 65534, 65534)
        for name in ("constraints.txt", "pyproject.toml", "launch.sh"):
            shutil.copy(ROOT / name, root)
        script = shutil.copy(ROOT / "pipeline" / "launch" / "install.py", folder)
        bin_folder = root / ".venv" / "bin"
        bin_folder.mkdir(parents=True)
        (bin_folder / "python").symlink_to(python)
        setup = Setup(root)
        setup.state.mkdir()
        (setup.state / "stamp").write_text(setup.stamp(setup._python_version() or ""))
        assert as_another(python, "-I", script, str(root)).returncode == 0
        (root / "constraints.txt").write_text("torch==0\n")
        (root / ".venv").chmod(mode)
        refused = as_another(python, "-I", script, str(root))
        assert refused.returncode == 1 and "which belongs to root" in refused.stderr
        copy, start = refused.stderr.splitlines()[-2:]
        assert as_another("bash", "-ec", copy, HOME=str(home)).returncode == 0
        assert as_another("bash", "-ec", f"test -x {start.strip()}", HOME=str(home)).returncode == 0
        assert not (home / "a clone" / ".venv").exists()


OTHERS_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable)


def as_another(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a user who owns nothing."""
    return subprocess.run(
        words, user=65534, group=65534, extra_groups=[], env={**os.environ, **variables}, cwd="/",
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Collecting torch==2.13.0 (from x)", "resolving torch"),
        ("  Downloading torch-2.13.0-cp310.whl (526.6 MB)", "downloading torch-2.13.0-cp310.whl (526.6 MB)"),
        ("Building wheels for collected packages: deepspeed", "building deepspeed"),
        ("Installing collected packages: a, b", "installing the packages"),
        ("Requirement already satisfied: pip", None),
    ],
)
def test_progress_from_pips_output(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase


def test_the_longest_phase_is_announced_and_the_log_keeps_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip says nothing while it installs: without this line a log ends in the phase before, for minutes."""
    setup, seen = Setup(tmp_path), []
    setup.state.mkdir(parents=True)
    monkeypatch.setattr(install, "say", lambda line: seen.append((line, setup.log.read_text())))
    words = 'print("Collecting a"); print("Installing collected packages: a, b")'
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.parent.mkdir()
    pip.write_text(f"#!{sys.executable}\n{words}\n")
    pip.chmod(0o755)
    setup._install()
    ((line, log),) = seen
    assert line.endswith("installing the packages")
    assert log.endswith("Installing collected packages: a, b\n")


def test_a_failure_names_its_cause_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "install.log"
    log.write_text(
        "Collecting torch\nERROR: Could not install packages: [Errno 28] No space left on device\n"
    )
    text = explain_failure(log)
    assert "disk is full" in text
    assert "ERROR: Could not install" in text
    assert str(log) in text


def test_a_failure_of_unknown_cause_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "install.log"
    log.write_text("\n".join(f"line {number}" for number in range(20)))
    assert "line 19" in explain_failure(log)
    assert "line 10" not in explain_failure(log)


def test_versions_that_do_not_fit_together_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "install.log"
    log.write_text(
        "Collecting two>=1\n"
        "ERROR: Cannot install two because these package versions have conflicting dependencies.\n\n"
        "The conflict is caused by:\n"
        "    two 1.0 depends on one<3\n"
        "    The user requested (constraint) one==4.0\n\n"
        "To fix this you could try to:\n"
        "1. loosen the range of package versions you've specified\n\n"
        "ERROR: ResolutionImpossible: for help visit the documentation\n"
    )
    text = explain_failure(log)
    assert "two 1.0 depends on one<3" in text
    assert "The user requested (constraint) one==4.0" in text
    assert "ERROR" not in text
    assert "loosen" not in text


def test_pinned_versions_fit_what_the_installed_packages_ask_for() -> None:
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                (version,) = pin.specifier
                pins[canonicalize_name(pin.name)] = version.version
    contradictions = []
    for package in importlib.metadata.distributions():
        if canonicalize_name(package.name) not in pins:
            continue
        for asked in map(Requirement, package.requires or []):
            pinned = pins.get(canonicalize_name(asked.name))
            applies = asked.marker is None or asked.marker.evaluate({"extra": ""})
            if applies and pinned and not asked.specifier.contains(pinned, prereleases=True):
                contradictions.append(f"{package.name} {package.version} needs {asked}; pinned: {pinned}")
    assert contradictions == []
