from __future__ import annotations

import pytest
import torch.distributed as dist

from fxdp.errors import MeshError
from fxdp.settings import Settings, ShortcutSettings
from fxdp.settings.launch import Launch

_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_defaults() -> None:
    assert Settings.from_environment({}) == Settings(launch=None, timeout_s=300.0, host=None)


def test_torchrun() -> None:
    settings = Settings.from_environment({**_TORCHRUN, "FXDP_TIMEOUT_S": "7.5"})
    assert settings == Settings(Launch(1, 2, 0, "host", 29500), 7.5)


def test_world_of_one_without_address_is_no_launch() -> None:
    assert Settings.from_environment({"RANK": "0", "WORLD_SIZE": "1"}).launch is None
    with pytest.raises(MeshError, match="RANK is '5'; expected an integer from 0 to 0"):
        Settings.from_environment({"RANK": "5", "WORLD_SIZE": "1"})


def test_missing_variable_is_named() -> None:
    incomplete = {key: value for key, value in _TORCHRUN.items() if key != "MASTER_ADDR"}
    with pytest.raises(MeshError, match="WORLD_SIZE=2, but MASTER_ADDR is not set"):
        Settings.from_environment(incomplete)


def test_with_a_process_group_of_another_launcher_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert Settings.from_environment({"RANK": "1", "WORLD_SIZE": "2"}).launch is None
    assert Settings.from_environment(_TORCHRUN).launch is not None


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_not_a_number(text: str) -> None:
    with pytest.raises(MeshError, match=f"FXDP_TIMEOUT_S is '{text}'; expected a number >= 0"):
        Settings.from_environment({"FXDP_TIMEOUT_S": text})


def test_shared_memory_can_be_left_alone() -> None:
    assert Settings.from_environment({}).shared_memory
    assert not Settings.from_environment({"FXDP_SHARED_MEMORY": "0"}).shared_memory


@pytest.mark.parametrize("text", ["", "on", " on "])
def test_all_shortcuts_are_taken_by_default(text: str) -> None:
    found = ShortcutSettings.from_environment({"FXDP_SHORTCUTS": text})
    assert (found.text, found.why_off("memoized_fakes")) == ("", None)


def test_shortcuts_can_be_left_out() -> None:
    found = ShortcutSettings.from_environment({"FXDP_SHORTCUTS": "off"})
    assert (found.text, found.why_off("cold_start")) == ("off", "FXDP_SHORTCUTS=off")
    found = ShortcutSettings.from_environment({"FXDP_SHORTCUTS": "-b, -a", "FXDP_COLD_START": "0"})
    assert found.text == "a b cold_start"
    assert [found.why_off(name) for name in ("a", "cold_start", "c")] == [
        "FXDP_SHORTCUTS=-a", "FXDP_COLD_START=0", None,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["no", "memoized_fakes", "-a,b", "-", "-a,,-b", "off,-a"])
def test_what_is_no_list_of_shortcuts_is_refused(text: str) -> None:
    with pytest.raises(MeshError, match=r"FXDP_SHORTCUTS is .*; expected on, off, or what to leave out"):
        ShortcutSettings.from_environment({"FXDP_SHORTCUTS": text})


def test_whether_there_are_other_hosts() -> None:
    for here, several in (("1", True), ("2", False), (None, True)):
        variables = _TORCHRUN | ({} if here is None else {"LOCAL_WORLD_SIZE": here})
        launch = Settings.from_environment(variables).launch
        assert launch is not None
        assert launch.several_hosts is several


def test_restarts_count_where_torchrun_keeps_its_store() -> None:
    restarted = {**_TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}
    for kept, restarts in (("True", 2), ("False", 0)):
        launch = Settings.from_environment({**restarted, "TORCHELASTIC_USE_AGENT_STORE": kept}).launch
        assert launch is not None
        assert launch.restarts == restarts
