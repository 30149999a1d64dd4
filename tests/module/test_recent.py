from __future__ import annotations

from fxdp.module.recent import Recent


def test_what_was_used_last_is_kept() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"] = 1, 2
    assert recent.get("a") == 1
    recent["c"] = 3
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (1, None, 3)
    assert len(recent) == 2
    assert "b" not in recent
    recent["a"] = 4
    assert (recent.get("a"), len(recent)) == (4, 2)
