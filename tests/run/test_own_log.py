"""The log of fxdp is not the script's."""

from __future__ import annotations

import logging

import pytest

from fxdp.run.own_log import keep_log_apart


def test_messages_stay_out_of_a_scripts_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    own = logging.Logger("fxdp")
    own.parent = logging.getLogger()
    monkeypatch.setitem(logging.Logger.manager.loggerDict, "fxdp", own)
    caplog.set_level(logging.INFO)  # of the root logger, as by logging.basicConfig(level=logging.INFO)
    keep_log_apart()
    own.info("compiled")
    own.warning("no rule")
    logging.getLogger("script").info("loss 0.5")
    assert caplog.messages == ["loss 0.5"]
    assert capsys.readouterr().err == "no rule\n"
