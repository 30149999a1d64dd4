"""Options of several parts: dataclasses, dicts and short forms; all faults at once."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from torch import nn

import fxdp
from fxdp.errors import InputError, ScheduleError
from fxdp.options import Options
from fxdp.options.option_values import GROUPS

_OF = {name: option for option, kind in GROUPS.items() for name in kind.names()}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("microbatches", value) for value in (0, True, 1.5, 10**12, None)),
        *(("schedule", value) for value in (1, ["gpipe"])),
        *(("stages", value) for value in (0, 10**12, [1], {"a": 1})),
        *(("batch_stats", value) for value in ("own", None)),
        *(("gradients", value) for value in ("nowhere", 1)),
        *(("memory_budget", value) for value in (-0.1, 1.5, math.nan, True, "0.5", None)),
        *(("modules", value) for value in ("layers.*", None, [""], [1])),
        *(("mode", value) for value in ("sometimes", True)),
        *(("bucket_cap_mb", value) for value in (math.inf, math.nan, 10**400, 0, "1")),
        *(("link_gbit", value) for value in (0, -1, 1e-9, True, "1000", math.nan, math.inf, 10**30)),
        *(("uneven", value) for value in ("no", 1, None)),
        *(("block", value) for value in (0, -1, True, "4", 1.5)),
        *(("verify", value) for value in ("no", 1, None)),
        *(("check_replicas", value) for value in (-1, True, "100", 1.0)),
        *(("dump_dir", value) for value in (3, b"x", "", __file__, f"{__file__}/x")),
    ],
)
def test_a_bad_value_is_refused_in_both_forms(name: str, value: Any) -> None:
    option = _OF[name]
    with pytest.raises(InputError, match=rf"{option}: {name} is ") as caught:
        Options.named({option: {name: value}})
    own = GROUPS[option].__name__
    with pytest.raises(InputError, match=rf"fxdp.{own} cannot .*\n  {name} is ") as alone:
        GROUPS[option](**{name: value})
    for text in (str(caught.value), str(alone.value)):
        assert "expected" in text or "is no folder" in text
        assert len(text) < 300


def test_each_fault_is_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        fxdp.compile(
            nn.Linear(2, 2), backend="fast", rng="x", activation_checkpointing=True, communication=25,
            pipeline={"microbatch": 4, "stages": 0}, debug={"verify": 1, "quiet": True},
        )  # type: ignore[arg-type] # fmt: skip
    assert str(caught.value).splitlines()[1:] == [
        "  backend is 'fast', expected one of ('inductor', 'eager')",
        "  rng is 'x', expected one of ('sharded', 'single-device')",
        "  activation_checkpointing is True, expected a memory budget from 0 to 1, a list of modules, a "
        "mode, fxdp.ActivationCheckpointing(...), or a dict of memory_budget, modules, mode",
        "  pipeline: has no 'microbatch', expected microbatches",
        "  pipeline: stages is 0, expected an integer of at least 1, or a list of module names",
        "  communication is 25, expected fxdp.Communication(...), or a dict of bucket_cap_mb, link_gbit, "
        "uneven",
        "  debug: has no 'quiet', expected some of verify, check_replicas, dump_dir",
        "  debug: verify is 1, expected True or False",
    ]


def test_a_schedule_that_does_not_exist() -> None:
    for make in (
        lambda: fxdp.Pipeline(schedule="1f1c"),
        lambda: Options.named({"pipeline": {"schedule": "x"}}),
    ):
        with pytest.raises(ScheduleError, match="no schedule"):
            make()


@pytest.mark.parametrize("option", GROUPS)
def test_none_and_nothing_are_the_defaults(option: str) -> None:
    default = getattr(Options(), option)
    assert default == GROUPS[option]()
    assert all(getattr(Options.named({option: given}), option) == default for given in (None, {}, default))


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (0.5, {"memory_budget": 0.5}),
        (0, {"memory_budget": 0}),
        (["layers.*"], {"modules": ["layers.*"]}),
        (("a",), {"modules": ("a",)}),
        ("except_last", {"mode": "except_last"}),
        ({"memory_budget": 0.5, "mode": "always"}, {"memory_budget": 0.5, "mode": "always"}),
    ],
)
def test_short_forms_of_activation_checkpointing(given: Any, same: dict[str, Any]) -> None:
    found = Options.named({"activation_checkpointing": given}).activation_checkpointing
    assert found == fxdp.ActivationCheckpointing(**same)


def test_a_budget_that_the_backend_does_not_keep() -> None:
    with pytest.raises(InputError, match=r"budget is 0\.5 with backend='eager', which saves all; expected"):
        Options.named({"activation_checkpointing": 0.5, "backend": "eager"})
    Options.named({"activation_checkpointing": ["layers.*"], "backend": "eager"})


def test_a_value_prints_as_the_code_that_makes_it() -> None:
    for value in (
        fxdp.Pipeline(microbatches=4, stages=[f"a_long_name_of_a_block.{i}" for i in range(9)]),
        fxdp.ActivationCheckpointing(modules=["layers.*"]),
        fxdp.Communication(bucket_cap_mb=0.5),
        fxdp.Debug(),
    ):
        assert eval(repr(value), {"fxdp": fxdp}) == value


def test_lines_that_ranks_compare_name_each_part() -> None:
    lines = Options.named({"pipeline": {"microbatches": 2}, "debug": {"dump_dir": "here"}}).lines()
    assert {"option pipeline.microbatches=2", "option debug.verify=True", "option backend='inductor'"} <= {
        *lines
    }
    assert not any("dump_dir" in line for line in lines)  # of a rank's own host


def test_options_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxdp"):
        Options.named({"pipeline": {"stages": 2}, "activation_checkpointing": "always"}).warn_idle()
        Options.named({"activation_checkpointing": ["a"]}).warn_idle()
    (said,) = caplog.messages
    assert said.startswith(
        "pipeline=fxdp.Pipeline(stages=2), activation_checkpointing='always': without effect"
    )
