"""The state file says what is running, or that nothing is."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cluster.processes import CLUSTER_VARIABLE
from kvferry.cluster.state_file import (
    ClusterState,
    alive,
    read_state,
    remove_state,
    require_running,
    require_state,
    write_state,
)
from kvferry.core import ConfigError, UnavailableError

STATE = ClusterState("kvf-1", "smollm2", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", 4, "/tmp/kvferry-x", ("router",))


def test_round_trip(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    assert read_state(directory) is None
    write_state(directory, STATE)
    assert read_state(directory) == STATE == require_state(directory)
    assert [file.name for file in directory.iterdir()] == ["cluster.json"]
    remove_state(directory)
    remove_state(directory)
    assert read_state(directory) is None


def test_no_cluster_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvferry up") as caught:
        require_state(tmp_path)
    assert caught.value.field == "state_dir"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1}', '{"version": 99}', '{"version": 1, "x": 2, "actors": []}']
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cluster\.json"):
        read_state(tmp_path)


def test_a_cluster_that_ended_by_itself_is_told_apart_from_one_that_runs(tmp_path: Path) -> None:
    state = replace(STATE, cluster_id="kvf-of-a-test")
    write_state(tmp_path, state)
    with pytest.raises(
        UnavailableError, match=r"cluster kvf-of-a-test of .* has ended: .*pid 4.*`kvferry up`"
    ) as caught:
        require_running(tmp_path)
    assert caught.value.field == "state_dir"
    # What Ray leaves behind for a while is not the cluster; its control service is.
    for name, runs in (("ray::DashboardAgent", False), ("/ray/gcs_server", True)):
        environ = {CLUSTER_VARIABLE: state.cluster_id}
        with subprocess.Popen([name, "60"], executable="/bin/sleep", env=environ) as member:
            try:
                assert alive(state) is runs
            finally:
                member.kill()
    assert not alive(state)


def test_an_end_on_somebody_elses_ray_cannot_be_told(tmp_path: Path) -> None:
    state = replace(STATE, ray_head_pid=None)
    write_state(tmp_path, state)
    assert require_running(tmp_path) == state
